"""Visits: interleaved, complete, and only what is still owed."""

from pathlib import Path

from kvbaton.bench.config import BenchConfig
from kvbaton.bench.contenders import CONTENDERS
from kvbaton.bench.plan import estimate_s, key_of, plan_visits
from kvbaton.workload.cells import Cell, Link

KEYS = ("plain", "upstream-pull", "ours-push")
CONFIG = BenchConfig(
    out=Path("out"),
    contenders=tuple(CONTENDERS[key] for key in KEYS),
    cells=(Cell(2048, 0.4), Cell(2048, 0.8), Cell(4096, 0.2)),
    links=(Link(), Link(4e8)),
    repeats=3,
)


def test_repeats_go_back_and_forth() -> None:
    order = [(visit.repeat, visit.contender.key) for visit in plan_visits(CONFIG, set())]

    assert order == [(0, key) for key in KEYS] + [(1, key) for key in reversed(KEYS)] + [
        (2, key) for key in KEYS
    ]


def test_pair_visits_every_cell_on_every_link_once_and_unloaded_first() -> None:
    visit = next(visit for visit in plan_visits(CONFIG, set()) if visit.contender.key == "ours-push")
    seen = [(step.link.name, step.cell.name) for step in visit.steps]

    one_link = ["2048@unloaded", "2048@0.4", "2048@0.8", "4096@unloaded", "4096@0.2"]
    assert seen == [(link, cell) for link in ("none", "400mbit") for cell in one_link]


def test_plain_engine_has_no_link_to_limit() -> None:
    visit = next(visit for visit in plan_visits(CONFIG, set()) if visit.contender.key == "plain")

    assert {step.link.name for step in visit.steps} == {"none"}


def test_measured_cells_are_not_visited_again() -> None:
    done = {
        key_of(visit.contender, visit.repeat, step)
        for visit in plan_visits(CONFIG, set())[:2]
        for step in visit.steps
    }

    left = plan_visits(CONFIG, done)

    assert len(left) == 7
    assert plan_visits(CONFIG, done | {key_of(v.contender, v.repeat, s) for v in left for s in v.steps}) == []


def test_visit_owing_only_unloaded_requests_is_not_worth_a_boot() -> None:
    done = {
        key_of(visit.contender, visit.repeat, step)
        for visit in plan_visits(CONFIG, set())
        for step in visit.steps
        if step.cell.rate_per_s is not None
    }

    assert plan_visits(CONFIG, done) == []


def test_estimate_covers_the_time_arrivals_alone_take() -> None:
    arrivals_s = 3 * (2 * 2 + 1) * (10 / 0.4 + 10 / 0.8 + 10 / 0.2)

    assert arrivals_s < estimate_s(CONFIG, plan_visits(CONFIG, set()), 3) < 3 * arrivals_s
