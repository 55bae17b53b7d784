"""Two prefill and two decode engines serve a mixed load over every pair; engines of two ranks hand over rank to rank."""

from collections import Counter

import pytest

from engine.asks import CONCURRENCY, Answer, Ask, ask_all, compare
from engine.deployment import Deployment, small
from engine.fans import fans_out
from engine.quiet import wait_quiet
from engine.theatre import Theatre
from kvbaton.protocol.mode import Mode

pytestmark = pytest.mark.engine

NUM_SPLIT = 12


# Four engines, or two engines of two ranks, on two cores: ranks wait for each other at every layer, and nobody is punctual.
PATIENT = {"verify": True, "lost_after_s": 60, "handoff_timeout_s": 240, "park_s": 240, "lease_s": 240}


@pytest.fixture
def grid(theatre: Theatre, expected: list[tuple[Ask, Answer]]) -> Deployment:
    """Four engines that cache no prefixes."""
    return theatre.play(
        "grid",
        lambda folder: small(folder, prefill=2, decode=2, prefix_caching=False, connector_config=PATIENT),
    )


@pytest.fixture
def split(theatre: Theatre, expected: list[tuple[Ask, Answer]]) -> Deployment:
    """Two engines that split the model over two ranks each."""
    return theatre.play(
        "split",
        lambda folder: small(
            folder, tensor_parallel=2, prefix_caching=False, cores=("0|1",) * 2, connector_config=PATIENT
        ),
    )


@pytest.mark.parametrize("mode", list(Mode))
async def test_mixed_load_over_every_pair_of_engines_equals_one_engine(
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


@pytest.mark.parametrize("mode", list(Mode))
async def test_two_ranks_hand_over_to_two_ranks_and_equal_one_engine(
    split: Deployment, expected: list[tuple[Ask, Answer]], mode: Mode
) -> None:
    single = [(request, answer) for request, answer in expected if not fans_out(request)][:NUM_SPLIT]
    marks = split.trace_marks()

    answers = await ask_all(
        split.router(mode).url, split.config.model, [each for each, _ in single], CONCURRENCY
    )

    assert compare(single, answers) == []
    wait_quiet(split)
    received = Counter((trace["mode"], trace["outcome"]) for trace in split.received(marks))
    assert set(received) == {(mode.value, "committed")}
    # Each rank receives its half.
    assert received.total() % 2 == 0
