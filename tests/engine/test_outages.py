"""Engines die, freeze, come back as something else or corrupt a byte: requests fail quickly or succeed, and nobody is restarted for it."""

import asyncio
import contextlib
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.asks import Answer, Ask, ask, ask_all, random_tokens, session
from engine.deployment import (
    QUICK,
    Actor,
    Deployment,
    chained,
    get,
    wait_until,
    with_environment,
    with_option,
    with_transfer,
)
from engine.legs import good_params
from engine.quiet import wait_quiet
from kvbaton.launch.groups import signal_group
from kvbaton.launch.specs import ProcessSpec
from kvbaton.protocol.mode import Mode
from kvbaton.testing.flipping import ORDER_VARIABLE

pytestmark = pytest.mark.engine

LOST_S = 12.0  # heartbeats 3 s, a router's retry, and what a busy machine adds
NUM_UNDER_WAY = 10


def order_file(engine: Actor) -> Path:
    return engine.spec.log_path.with_suffix(".flip")


def flipping(engine: Actor, policy: str) -> Callable[[ProcessSpec], ProcessSpec]:
    """Start an engine on a transport that can be told to change a byte."""
    return chained(
        with_transfer(
            kv_connector="FlippingConnector",
            kv_connector_module_path="kvbaton.testing.flipping",
            kv_load_failure_policy=policy,
        ),
        with_environment(**{ORDER_VARIABLE: str(order_file(engine))}),
    )


def requests(seed: str, count: int, tokens: int = 3000) -> list[Ask]:
    rng = random.Random(seed)
    body = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return [Ask(seed, "/v1/completions", body | {"prompt": random_tokens(rng, tokens)}) for _ in range(count)]


def restart(engine: Actor, change: Callable[[ProcessSpec], ProcessSpec] = lambda spec: spec) -> None:
    if engine.runs:
        engine.kill()
    engine.start(change)
    engine.wait_ready()


async def succeed(pair: Deployment, seed: str, mode: Mode | None = None) -> list[Answer]:
    """Ask until an answer comes, which must be soon, then some more which must all be handed off."""
    url, model = pair.router(mode).url, pair.config.model
    loop = asyncio.get_running_loop()
    end_s = loop.time() + LOST_S
    async with session() as http:
        while not (first := await ask(http, url, model, requests(f"{seed} first", 1)[0])).ok:
            assert loop.time() < end_s, first.error
    answers = await ask_all(url, model, requests(seed, 4), 4)
    assert [answer.error for answer in answers if not answer.ok] == []
    assert {answer.headers.get("x-kvbaton-mode") for answer in answers} == {(mode or pair.config.mode).value}
    return answers


async def under_way(pair: Deployment, seed: str, mode: Mode, strike: Callable[[], object]) -> list[Answer]:
    """Send requests, strike once the first is answered, and return all answers."""
    url, model = pair.router(mode).url, pair.config.model
    async with session() as http:
        tasks = [asyncio.create_task(ask(http, url, model, each)) for each in requests(seed, NUM_UNDER_WAY)]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        struck_s = asyncio.get_running_loop().time()
        await asyncio.to_thread(strike)
        answers = list(await asyncio.gather(*tasks))
        took_s = asyncio.get_running_loop().time() - struck_s
    assert took_s < LOST_S
    assert [
        answer
        for answer in answers
        if not answer.ok and not 500 <= answer.status < 600 and answer.status != 200
    ] == []
    return answers


@contextlib.contextmanager
def frozen(engine: Actor) -> Iterator[None]:
    signal_group(engine.group, signal.SIGSTOP)
    try:
        yield
    finally:
        signal_group(engine.group, signal.SIGCONT)


@pytest.mark.parametrize("mode", list(Mode))
async def test_prefill_engine_that_freezes_fails_its_requests_and_recovers(
    pair: Deployment, mode: Mode
) -> None:
    engine = pair.prefill[0]
    await succeed(pair, f"before freezing {mode}", mode)
    waiting = requests(f"frozen {mode}", 1)[0].but(
        kv_transfer_params=good_params(pair, f"frozen-{mode}") | {"transfer_mode": mode.value}
    )
    with frozen(engine):
        async with session() as http:
            answer = await ask(http, pair.decode[0].url, pair.config.model, waiting)

    assert 500 <= answer.status < 600
    assert answer.seconds < LOST_S
    await succeed(pair, f"after freezing {mode}", mode)
    wait_quiet(pair)


async def test_prefill_engine_killed_fails_requests_in_seconds(pair: Deployment) -> None:
    decode_group = pair.decode[0].group
    waiting = requests("waiting", 1)[0].but(kv_transfer_params=good_params(pair, "killed"))
    async with session() as http:
        alone = asyncio.create_task(ask(http, pair.decode[0].url, pair.config.model, waiting))
        await under_way(pair, "killed prefill", Mode.PUSH, pair.prefill[0].kill)
        answer = await alone
        without = await ask(http, pair.router().url, pair.config.model, waiting.but(kv_transfer_params=None))

    assert 500 <= answer.status < 600
    assert answer.seconds < LOST_S
    # Whether a router may compute it all on the decode engine is its policy; hanging is not.
    assert without.seconds < LOST_S
    assert pair.decode[0].group == decode_group
    assert pair.decode[0].runs


async def test_prefill_engine_of_another_dtype_is_refused_with_both_values(pair: Deployment) -> None:
    engine, decode = pair.prefill[0], pair.decode[0]
    restart(engine, with_option("--dtype", "bfloat16"))
    router = pair.router()
    wait_until(lambda: get(router.spec.health_url) is not None, LOST_S, "the router does not see the engine")
    marks = [len(each.log()) for each in pair.engines]

    answers = await ask_all(router.url, pair.config.model, requests("another dtype", 3), 3)

    assert [answer.ok for answer in answers] == [False] * 3
    assert {answer.status for answer in answers} <= set(range(500, 600))
    assert max(answer.seconds for answer in answers) < LOST_S
    said = "".join(each.log_since(mark) for each, mark in zip(pair.engines, marks, strict=True))
    refusals = [
        line for line in said.splitlines() if "dtype" in line and "bfloat16" in line and "float32" in line
    ]
    assert refusals, f"{answers[0].error}\n{said[-3000:]}"
    assert decode.runs
    assert engine.runs


async def test_prefill_engine_restarted_serves_the_next_request(pair: Deployment) -> None:
    decode_group = pair.decode[0].group
    restart(pair.prefill[0], flipping(pair.prefill[0], "fail"))

    for mode in Mode:
        await succeed(pair, f"restarted {mode}", mode)

    assert pair.decode[0].group == decode_group
    wait_quiet(pair)


async def test_decode_engine_killed_leaves_the_prefill_engine_free(pair: Deployment) -> None:
    engine = pair.decode[0]
    prefill_group = pair.prefill[0].group
    await under_way(pair, "killed decode", Mode.PUSH, engine.kill)

    lease_s = float(str(QUICK["lease_s"]))
    restart(engine, flipping(engine, "recompute"))
    for mode in Mode:
        await succeed(pair, f"decode restarted {mode}", mode)

    wait_quiet(pair, 2 * lease_s + 10)
    assert pair.prefill[0].group == prefill_group


def ensure_flipping(pair: Deployment) -> None:
    """Have both engines on the transport that takes orders, and the decode engine compute what fails to load."""
    for engine, policy in ((pair.prefill[0], "fail"), (pair.decode[0], "recompute")):
        running = Path(f"/proc/{engine.group}/cmdline").read_bytes() if engine.runs else b""
        if b"FlippingConnector" not in running:
            restart(engine, flipping(engine, policy))


@pytest.mark.parametrize("mode", list(Mode))
async def test_byte_changed_in_transit_is_caught_and_the_answer_still_right(
    pair: Deployment, mode: Mode
) -> None:
    ensure_flipping(pair)
    request = requests(f"flip {mode}", 1)[0]
    url, model = pair.router(mode).url, pair.config.model
    decode, initiator = pair.decode[0], pair.prefill[0] if mode is Mode.PUSH else pair.decode[0]
    async with session() as http:
        right = await ask(http, decode.url, model, request.but(cache_salt="another"))
        mark, marks = len(decode.log()), pair.trace_marks()
        order_file(initiator).touch()
        answer = await ask(http, url, model, request)

    assert not order_file(initiator).exists()
    outcomes = [trace["outcome"] for trace in pair.received(marks)]
    assert "checksum" in outcomes
    assert "block checksums differ" in decode.log_since(mark)
    assert answer.ok, answer.error
    assert answer.tokens == right.tokens
    wait_quiet(pair)


async def test_policy_recompute_computes_what_cannot_be_loaded(pair: Deployment) -> None:
    ensure_flipping(pair)
    request = requests("recompute", 1)[0]
    decode, model = pair.decode[0], pair.config.model
    cases = {
        "unknown": good_params(pair, "recompute-unknown"),
        "unreachable": good_params(pair, "recompute-unreachable") | {"remote_port": 1},
        "nonsense": {"do_remote_prefill": True},
    }
    async with session() as http:
        right = await ask(http, decode.url, model, request.but(cache_salt="right"))
        answers = {
            name: await ask(http, decode.url, model, request.but(cache_salt=name, kv_transfer_params=params))
            for name, params in cases.items()
        }

    assert {name: answer.tokens for name, answer in answers.items()} == dict.fromkeys(cases, right.tokens)
    wait_quiet(pair)
