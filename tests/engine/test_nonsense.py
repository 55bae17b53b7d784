"""Nonsense from clients and on sockets fails that request with a reason, and harms nothing else."""

import asyncio
import json
import random
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine.asks import Answer, Ask, ask, random_tokens, session
from engine.deployment import HOST, QUICK, Deployment
from engine.junk import FAR_AWAY, bad_params, bad_producer_params, junk_messages, throw
from engine.legs import directory_of, good_params, side_channel
from engine.quiet import wait_quiet

pytestmark = pytest.mark.engine

LIMIT_S = float(str(QUICK["handoff_timeout_s"])) + 8
PROMPT_TOKENS = 300


def with_params(rng: random.Random, params: object) -> Ask:
    body = {
        "prompt": random_tokens(rng, PROMPT_TOKENS),
        "max_tokens": 4,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return Ask("nonsense", "/v1/completions", body | {"kv_transfer_params": params})


async def ask_cases(url: str, model: str, cases: dict[str, object]) -> dict[str, Answer]:
    rng = random.Random(7)
    async with session() as http:
        answers = await asyncio.gather(
            *(ask(http, url, model, with_params(rng, case)) for case in cases.values())
        )
    return dict(zip(cases, answers, strict=True))


async def test_nonsense_parameters_fail_on_a_decode_engine_within_the_deadline(pair: Deployment) -> None:
    cases = bad_params(good_params(pair, "nonsense"))
    for number, params in enumerate(cases.values()):
        if isinstance(params, dict) and params.get("transfer_id") == "nonsense":
            params["transfer_id"] = f"nonsense-{number}"
    good = good_params(pair, "far-away")
    cases["a host that never answers"] = good | {"remote_host": FAR_AWAY}
    cases |= {f"not an object: {value!r}": value for value in (5, "x", [1], True)}

    answers = await ask_cases(pair.decode[0].url, pair.config.model, cases)

    served = {name: answer.status for name, answer in answers.items() if not 400 <= answer.status < 600}
    assert served == {}
    assert {name: answer.seconds for name, answer in answers.items() if answer.seconds > LIMIT_S} == {}
    wait_quiet(pair)


async def test_nonsense_parameters_on_a_prefill_engine_leave_no_blocks_held(pair: Deployment) -> None:
    answers = await ask_cases(pair.prefill[0].url, pair.config.model, bad_producer_params())

    assert {name: answer.status for name, answer in answers.items() if answer.status == 0} == {}
    assert {name: answer.seconds for name, answer in answers.items() if answer.seconds > LIMIT_S} == {}
    wait_quiet(pair)


async def test_parameters_a_client_sends_to_the_router_are_ignored(pair: Deployment) -> None:
    cases = bad_params(good_params(pair, "from-a-client"))

    answers = await ask_cases(pair.router().url, pair.config.model, cases)

    assert {name: answer.error for name, answer in answers.items() if not answer.ok} == {}
    assert {len(answer.tokens[0]) for answer in answers.values()} == {4}
    wait_quiet(pair)


async def test_transfer_id_used_twice_gives_right_tokens_or_an_error(pair: Deployment) -> None:
    rng = random.Random("twice")
    model, url = pair.config.model, pair.router().url
    first = with_params(rng, {"do_remote_decode": True, "transfer_id": "twice"})
    second = with_params(rng, {"do_remote_decode": True, "transfer_id": "twice"})
    consume = good_params(pair, "twice")
    async with session() as http:
        wanted = [await ask(http, url, model, each.but(kv_transfer_params=None)) for each in (first, second)]
        await asyncio.gather(*(ask(http, pair.prefill[0].url, model, each) for each in (first, second)))
        found = await asyncio.gather(
            *(
                ask(http, pair.decode[0].url, model, each.but(kv_transfer_params=consume))
                for each in (first, second)
            )
        )

    for right, answer in zip(wanted, found, strict=True):
        assert answer.status >= 400 or answer.tokens == right.tokens
    wait_quiet(pair)


async def test_junk_on_side_channel_and_rank_ports_disturbs_nothing(pair: Deployment) -> None:
    rng = random.Random("junk")
    ports = [
        port
        for engine in pair.engines
        for port in (
            side_channel(engine),
            *(rank.port for rank in directory_of(HOST, side_channel(engine)).ranks),
        )
    ]
    idle = [socket.create_connection((HOST, port), timeout=5) for port in ports for _ in range(20)]
    loop = asyncio.get_running_loop()
    plain = [with_params(rng, None) for _ in range(12)]
    with ThreadPoolExecutor(8) as pool:
        thrown = [
            loop.run_in_executor(pool, throw, HOST, port, message)
            for message in junk_messages(rng)
            for port in ports
        ]
        async with session() as http:
            answers = await asyncio.gather(
                *(ask(http, pair.router().url, pair.config.model, each) for each in plain)
            )
        await asyncio.gather(*thrown)
    for connection in idle:
        connection.close()

    assert [answer.error for answer in answers if not answer.ok] == []
    assert {answer.headers.get("x-kvbaton-mode") for answer in answers} == {pair.config.mode.value}
    wait_quiet(pair)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"model": 5}',
        b"\xff\xfe",
        b'{"prompt": ' + b"[" * 3000,
        b'{"prompt": "x"}' * 2,
    ],
)
async def test_body_that_is_no_request_is_answered_with_a_client_error(pair: Deployment, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    async with (
        session() as http,
        http.post(f"{pair.router().url}/v1/completions", data=body, headers=headers) as response,
    ):
        status, said = response.status, await response.read()

    assert 400 <= status < 500
    assert "error" in json.loads(said)
