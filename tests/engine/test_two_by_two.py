"""More engines: two prefill and two decode engines over every pair, and engines of two ranks each."""

from collections import Counter
from collections.abc import Mapping

import pytest

from engine.asks import CONCURRENCY, Answer, Ask, ask_all, compare
from engine.deployment import Deployment, small
from engine.fans import fans_out
from engine.quiet import wait_quiet
from engine.theatre import Theatre
from kvbaton.launch.config import JsonValue
from kvbaton.protocol.mode import Mode

pytestmark = pytest.mark.engine

# More busy processes than cores: an engine may not be heard of for a while without being dead.
PATIENT: Mapping[str, JsonValue] = {"verify": True, "lost_after_s": 30}
NUM_TWO_RANK_ASKS = 14


@pytest.fixture
def grid(theatre: Theatre, expected: list[tuple[Ask, Answer]]) -> Deployment:
    """Two engines of each role, which cache no prefixes."""
    return theatre.play(
        "grid",
        lambda folder: small(folder, prefill=2, decode=2, prefix_caching=False, connector_config=PATIENT),
    )


@pytest.fixture
def ranks(theatre: Theatre, expected: list[tuple[Ask, Answer]]) -> Deployment:
    """One engine of each role, each splitting the model over two ranks."""
    return theatre.play(
        "ranks",
        lambda folder: small(folder, tensor_parallel=2, cores=("0|1",) * 2, connector_config=PATIENT),
    )


def single(expected: list[tuple[Ask, Answer]]) -> list[tuple[Ask, Answer]]:
    return [(request, answer) for request, answer in expected if not fans_out(request)]


@pytest.mark.parametrize("mode", list(Mode))
async def test_mixed_load_over_every_pair_equals_one_engine(
    grid: Deployment, expected: list[tuple[Ask, Answer]], mode: Mode
) -> None:
    chosen = single(expected)
    marks = grid.trace_marks()

    answers = await ask_all(
        grid.router(mode).url, grid.config.model, [each for each, _ in chosen], CONCURRENCY
    )

    assert compare(chosen, answers) == []
    pairs = Counter(
        (answer.headers.get("x-kvbaton-prefill"), answer.headers.get("x-kvbaton-decode"))
        for answer in answers
        if answer.headers.get("x-kvbaton-mode") == mode.value
    )
    assert set(pairs) == {(p.url, d.url) for p in grid.prefill for d in grid.decode}
    wait_quiet(grid)
    outcomes = {(trace["mode"], trace["outcome"]) for trace in grid.received(marks)}
    assert outcomes == {(mode.value, "committed")}


@pytest.mark.parametrize("mode", list(Mode))
async def test_engines_of_two_ranks_equal_one_engine(
    ranks: Deployment, expected: list[tuple[Ask, Answer]], mode: Mode
) -> None:
    chosen = single(expected)[:NUM_TWO_RANK_ASKS]
    marks = ranks.trace_marks()
    asks = [request.but(cache_salt=mode.value) for request, _ in chosen]

    answers = await ask_all(ranks.router(mode).url, ranks.config.model, asks, CONCURRENCY)

    assert compare(chosen, answers) == []
    wait_quiet(ranks)
    parts = Counter(str(trace["transfer_id"]) for trace in ranks.received(marks))
    assert len(parts) > NUM_TWO_RANK_ASKS // 2
    # Each rank receives its part of every handoff.
    assert set(parts.values()) == {2}
    assert {trace["outcome"] for trace in ranks.received(marks)} == {"committed"}
