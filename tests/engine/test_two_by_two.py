"""Two prefill and two decode engines, two ranks each, serve a mixed load over every pair."""

from collections import Counter

import pytest

from engine.asks import CONCURRENCY, Answer, Ask, ask_all, compare
from engine.deployment import Deployment, small
from engine.fans import fans_out
from engine.quiet import wait_quiet
from engine.theatre import Theatre
from kvbaton.protocol.mode import Mode

pytestmark = pytest.mark.engine


@pytest.fixture
def grid(theatre: Theatre, expected: list[tuple[Ask, Answer]]) -> Deployment:
    """Four engines that cache no prefixes and split the model over two ranks."""
    return theatre.play(
        "grid",
        lambda folder: small(
            folder, prefill=2, decode=2, tensor_parallel=2, prefix_caching=False, cores=("0|1",) * 4
        ),
    )


@pytest.mark.parametrize("mode", list(Mode))
async def test_mixed_load_over_every_pair_of_two_rank_engines_equals_one_engine(
    grid: Deployment, expected: list[tuple[Ask, Answer]], mode: Mode
) -> None:
    single = [(request, answer) for request, answer in expected if not fans_out(request)]
    marks = grid.trace_marks()

    answers = await ask_all(
        grid.router(mode).url, grid.config.model, [each for each, _ in single], CONCURRENCY
    )

    assert compare(single, answers) == []
    pairs = Counter(
        (answer.headers.get("x-kvbaton-prefill"), answer.headers.get("x-kvbaton-decode"))
        for answer in answers
        if answer.headers.get("x-kvbaton-mode") == mode.value
    )
    assert set(pairs) == {(p.url, d.url) for p in grid.prefill for d in grid.decode}
    wait_quiet(grid)
    received = Counter((trace["mode"], trace["outcome"]) for trace in grid.received(marks))
    assert set(received) == {(mode.value, "committed")}
    # Each rank receives its half.
    assert received.total() % 2 == 0
