"""A client that leaves, in whatever phase its request is, leaves nothing behind."""

import asyncio
import random

import aiohttp
import pytest

from engine.asks import REQUEST_LIMIT_S, Ask, ask, random_tokens, session
from engine.deployment import Deployment
from engine.quiet import wait_quiet
from kvbaton.protocol.mode import Mode

pytestmark = pytest.mark.engine

LONG_TOKENS = 5000
NUM_MOMENTS = 24


def long_ask(rng: random.Random, *, stream: bool) -> Ask:
    """Return a request that no cache can shorten."""
    prompt = random_tokens(rng, LONG_TOKENS)
    body = {"prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True, "stream": stream}
    return Ask("long", "/v1/completions", body)


async def leave_after(
    http: aiohttp.ClientSession, url: str, model: str, request: Ask, patience_s: float
) -> bool:
    """Ask, and close the connection when patience ends; returns whether the answer was quicker."""
    task = asyncio.create_task(ask(http, url, model, request))
    done, _ = await asyncio.wait({task}, timeout=patience_s)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return bool(done)


@pytest.mark.parametrize("mode", list(Mode))
async def test_client_that_leaves_at_any_moment_leaves_nothing_behind(pair: Deployment, mode: Mode) -> None:
    rng = random.Random(f"leaving {mode}")
    url, model = pair.router(mode).url, pair.config.model
    async with session() as http:
        whole = await ask(http, url, model, long_ask(rng, stream=True))
        assert whole.ok, whole.error
        # From before the prefill leg is sent to the last tokens: one by one, then all at once.
        moments = [whole.seconds * 1.05 * number / NUM_MOMENTS for number in range(NUM_MOMENTS)]
        for number, moment_s in enumerate(moments):
            await leave_after(http, url, model, long_ask(rng, stream=bool(number % 2)), moment_s)
        await asyncio.gather(
            *(leave_after(http, url, model, long_ask(rng, stream=True), 4 * moment_s) for moment_s in moments)
        )
    wait_quiet(pair)
    async with session() as http:
        after = await ask(http, url, model, long_ask(rng, stream=True))

    assert after.ok, after.error
    wait_quiet(pair)


async def test_client_that_leaves_after_the_first_token_stops_the_decode(pair: Deployment) -> None:
    rng = random.Random("first token")
    body = {
        "model": pair.config.model,
        "prompt": random_tokens(rng, 2000),
        "max_tokens": 4000,
        "ignore_eos": True,
    }
    timeout = aiohttp.ClientTimeout(total=REQUEST_LIMIT_S)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        response = await http.post(f"{pair.router().url}/v1/completions", json=body | {"stream": True})
        first = await response.content.readany()
        response.close()

    assert first.startswith(b"data: ")
    wait_quiet(pair, 10)


@pytest.mark.parametrize("flag", ["do_remote_decode", "do_remote_prefill"])
async def test_client_that_leaves_an_engine_it_asked_directly_leaves_nothing_behind(
    pair: Deployment, flag: str
) -> None:
    """A router that dies is such a client: one leg without the other, broken off."""
    rng = random.Random(flag)
    prefill = pair.prefill[0]
    engine = prefill if flag == "do_remote_decode" else pair.decode[0]
    other_side = {
        "remote_engine_id": "engine-unknown",
        "remote_host": "127.0.0.1",
        "remote_port": int(prefill.spec.environment["VLLM_NIXL_SIDE_CHANNEL_PORT"]),
    }
    async with session() as http:
        for number, patience_s in enumerate((0.0, 0.02, 0.1, 0.3, 1.0)):
            params = {flag: True, "transfer_id": f"left-{flag}-{number}", **other_side}
            request = long_ask(rng, stream=False).but(kv_transfer_params=params)
            await leave_after(http, engine.url, pair.config.model, request, patience_s)

    wait_quiet(pair)
