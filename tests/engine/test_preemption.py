"""vLLM takes a prefill's blocks back while its KV is already leaving: decode still gets the right KV, and only that."""

import asyncio
import random

import aiohttp
import pytest

from engine.asks import Answer, Ask, ask, compare, random_tokens, session
from engine.deployment import QUICK, Deployment, small
from engine.quiet import wait_quiet
from engine.theatre import Theatre
from kvbaton.protocol.mode import Mode

pytestmark = pytest.mark.engine

BLOCK_TOKENS = 32
PROMPT_TOKENS = 1600
NUM_RIVALS = 12
RIVAL_PROMPT_TOKENS = 64
RIVAL_STARTED = 3
NUM_TRIES = 8
# The prompt alone (50 blocks) fits, but not beside twelve rivals of three or four blocks each.
NUM_BLOCKS = 1 + PROMPT_TOKENS // BLOCK_TOKENS + 10


@pytest.fixture
def tight(theatre: Theatre) -> Deployment:
    """A pair whose prefill engine computes a prompt in many steps and has few blocks."""
    return theatre.play(
        "tight",
        lambda folder: small(
            folder,
            prefix_caching=False,
            connector_config={**QUICK, "verify": True},
            block_tokens=BLOCK_TOKENS,
            chunk_tokens=64,
            max_model_len=1664,
            engine_args=(
                "--num-gpu-blocks-override",
                str(NUM_BLOCKS),
                "--no-scheduler-reserve-full-isl",  # begin a prompt although it does not fit yet
            ),
        ),
    )


def greedy(prompt: list[int], num_out: int) -> Ask:
    body = {"prompt": prompt, "max_tokens": num_out, "temperature": 0, "ignore_eos": True}
    return Ask("a prompt", "/v1/completions", body | {"return_token_ids": True})


async def run_rival(
    http: aiohttp.ClientSession, url: str, body: dict[str, object], started: asyncio.Event
) -> None:
    """Generate on the prefill engine itself, block after block."""
    async with http.post(f"{url}/v1/completions", json=body) as response:
        assert response.status == 200
        num_events = 0
        async for line in response.content:
            num_events += line.startswith(b"data: {")
            if num_events >= RIVAL_STARTED:
                started.set()


async def overtaken(
    tight: Deployment, http: aiohttp.ClientSession, request: Ask, rng: random.Random
) -> Answer:
    """Ask through the router while rivals on the prefill engine take block after block."""
    prefill, model = tight.prefill[0], tight.config.model
    started = [asyncio.Event() for _ in range(NUM_RIVALS)]
    bodies = [
        {"model": model, "stream": True, "ignore_eos": True, "max_tokens": 60}
        | {"prompt": random_tokens(rng, RIVAL_PROMPT_TOKENS)}
        for _ in started
    ]
    rivals = [
        asyncio.create_task(run_rival(http, prefill.url, body, event))
        for body, event in zip(bodies, started, strict=True)
    ]
    await asyncio.gather(*(event.wait() for event in started))
    answer = await ask(http, tight.router(Mode.PUSH).url, model, request)
    await asyncio.gather(*rivals)
    return answer


async def test_answer_is_right_after_a_streamed_prefill_was_preempted(tight: Deployment) -> None:
    rng = random.Random("preemption")
    prefill, decode = tight.prefill[0], tight.decode[0]
    tight.router(Mode.PUSH)
    resent = False

    async with session() as http:
        for _ in range(NUM_TRIES):
            request = greedy(random_tokens(rng, PROMPT_TOKENS), 12)
            alone = await ask(http, decode.url, tight.config.model, request)
            assert alone.ok, alone.error
            marks = tight.trace_marks()

            answer = await overtaken(tight, http, request, rng)

            assert compare([(request, alone)], [answer]) == []
            await asyncio.to_thread(wait_quiet, tight)
            ended = tight.traces(marks)
            assert [trace["outcome"] for trace in ended] == ["committed"] * 2
            # with checksums a preempted prefill is sent again from its first block: more than it holds, so it was leaving already
            moved = {str(trace["side"]): int(str(trace["bytes"])) for trace in ended}
            resent = moved["producer"] > moved["consumer"]
            if resent:
                break

    assert resent, "no prefill was preempted while its KV was leaving"
    # the rivals were there first and fit by themselves, so it is the prompt that was preempted
    assert prefill.gauges()["vllm:num_preemptions_total"]
