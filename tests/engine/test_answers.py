"""Answers through a prefill and a decode engine are those of one engine, in push and in pull."""

from collections import Counter

import pytest

from engine.asks import CONCURRENCY, Answer, Ask, ask_all, compare
from engine.deployment import Deployment
from engine.fans import fans_out
from engine.quiet import wait_quiet
from kvbaton.protocol.mode import Mode

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("mode", list(Mode))
async def test_varied_requests_through_a_pair_equal_one_engine(
    pair: Deployment, expected: list[tuple[Ask, Answer]], mode: Mode
) -> None:
    single = [(request, answer) for request, answer in expected if not fans_out(request)]
    router = pair.router(mode)
    marks = pair.trace_marks()
    # A salt per mode: otherwise the second mode would find everything cached and hand nothing over.
    asks = [request.but(cache_salt=mode.value) for request, _ in single]

    answers = await ask_all(router.url, pair.config.model, asks, CONCURRENCY)

    assert compare(single, answers) == []
    assert {answer.headers.get("x-kvbaton-mode") for answer in answers} <= {mode.value, "local"}
    wait_quiet(pair)
    received = pair.received(marks)
    assert Counter((trace["mode"], trace["outcome"]) for trace in received) == {
        (mode.value, "committed"): len(received)
    }
    # Prompts of one token, and those the decode engine has in its cache, need no handoff.
    assert len(received) >= len(single) // 2
    # Every block of every layer was compared, in both layers of this model.
    assert [trace for trace in received if trace["checksums"] != 2 * int(trace["blocks"])] == []
    assert sum(int(trace["blocks"]) for trace in received) > len(received)


@pytest.mark.parametrize("mode", list(Mode))
async def test_requests_that_fan_out_equal_one_engine(
    pair: Deployment, expected: list[tuple[Ask, Answer]], mode: Mode
) -> None:
    fans = [(request, answer) for request, answer in expected if fans_out(request)]
    asks = [request.but(cache_salt=f"fan-{mode.value}") for request, _ in fans]

    # One by one: a decode engine that computes several seeded prompts at once cuts them into chunks, see `asks.shape`.
    answers = await ask_all(pair.router(mode).url, pair.config.model, asks, 1)

    assert compare(fans, answers) == []
    wait_quiet(pair)
