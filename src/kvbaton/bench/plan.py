"""Plan: in which order contenders are visited, which cells each visit still owes, and how long all of it takes.

A visit is one boot of one contender. Within a repeat every contender is visited once, and every other repeat goes
backwards (A B C, C B A, ...), so that slow drift of the machine favours nobody.
"""

from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Final

from kvbaton.bench.config import BenchConfig
from kvbaton.bench.contenders import Contender
from kvbaton.bench.store import CellKey
from kvbaton.workload.cells import Cell, Link

BOOT_S: Final = 60.0
WARM_UP_S: Final = 20.0
CHECK_S: Final = 75.0
CELL_OVERHEAD_S: Final = 5.0
UNLOADED_REQUEST_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Step:
    """One cell over one link."""

    link: Link
    cell: Cell


@dataclass(frozen=True, slots=True)
class Visit:
    """One boot of one contender and what it still has to measure."""

    contender: Contender
    repeat: int
    steps: tuple[Step, ...]


def plan_visits(config: BenchConfig, done: Container[CellKey]) -> list[Visit]:
    """All visits that have something left to measure."""
    visits = []
    for repeat in range(config.repeats):
        order = config.contenders if repeat % 2 == 0 else tuple(reversed(config.contenders))
        for contender in order:
            steps = tuple(
                step for step in _steps(config, contender) if key_of(contender, repeat, step) not in done
            )
            # unloaded cells alone are there for the others' sake
            if any(step.cell.rate_per_s is not None for step in steps):
                visits.append(Visit(contender, repeat, steps))
    return visits


def key_of(contender: Contender, repeat: int, step: Step) -> CellKey:
    """What a step's record is found by."""
    return CellKey(contender.key, repeat, step.link.name, step.cell.prompt_tokens, step.cell.rate_per_s)


def _steps(config: BenchConfig, contender: Contender) -> Iterator[Step]:
    """Per link and prompt length first one request at a time, then the rates; one engine has no link."""
    links = config.links if contender.connector is not None else (Link(),)
    for link in links:
        for tokens in sorted({cell.prompt_tokens for cell in config.cells}):
            yield Step(link, Cell(tokens, None))
            for cell in config.cells:
                if cell.prompt_tokens == tokens:
                    yield Step(link, cell)


def estimate_s(config: BenchConfig, visits: list[Visit], num_checks: int) -> float:
    """How long a benchmark will take, boots and token checks included."""
    return num_checks * CHECK_S + sum(visit_s(config, visit) for visit in visits)


def visit_s(config: BenchConfig, visit: Visit) -> float:
    """How long one visit will take."""
    boot_s = 0.0 if config.attached else BOOT_S
    return boot_s + WARM_UP_S + sum(step_s(config, step) for step in visit.steps)


def step_s(config: BenchConfig, step: Step) -> float:
    """How long one cell will take: requests come at their rate, whatever the contender does."""
    if step.cell.rate_per_s is None:
        return CELL_OVERHEAD_S + config.unloaded_requests * UNLOADED_REQUEST_S
    return CELL_OVERHEAD_S + config.requests / step.cell.rate_per_s
