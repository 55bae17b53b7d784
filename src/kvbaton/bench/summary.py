"""Summary: from raw records to one row per contender and cell, computed again every time and never stored."""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Final

from kvbaton.bench.contenders import BASELINES, CONTENDERS
from kvbaton.bench.instrument import STEP
from kvbaton.workload.record import CellResult, Header, Record, Request, Skipped, TokenCheck
from kvbaton.workload.stats import Spread, bootstrap_ratio, is_steady, median, spread, summarise

NIXL_CALL: Final = "nixl."
TRANSFER_CALL: Final = "nixl.transfer"
RATIO_SEED: Final = 1
RATIO_ROUNDS: Final = 500


class Metric(StrEnum):
    """What is measured per request; TTFT, TPOT and ITL as vLLM's serving benchmark defines them."""

    TTFT = "TTFT"
    TPOT = "TPOT"
    ITL = "ITL"
    PREFILL = "prefill leg"
    EXPOSED = "exposed handoff"


COMPARED: Final = (Metric.TTFT, Metric.TPOT, Metric.EXPOSED)
"""Metrics that ratios are taken of."""


def _one(value: float | None) -> list[float]:
    return [] if value is None else [value]


VALUES: Final[Mapping[Metric, Callable[[Request], list[float]]]] = {
    Metric.TTFT: lambda request: [request.ttft_s],
    Metric.TPOT: lambda request: _one(request.tpot_s),
    Metric.ITL: lambda request: request.itls_s,
    Metric.PREFILL: lambda request: _one(request.prefill_leg_s),
    Metric.EXPOSED: lambda request: _one(request.exposed_s),
}


@dataclass(frozen=True, slots=True)
class Figure:
    """One metric of one row, in seconds: each statistic is the median of the repeats' own."""

    mean_s: float
    median_s: float
    p99_s: float
    medians_s: Spread


@dataclass(frozen=True, slots=True)
class Costs:
    """What a request cost beside its latency; per request, median over repeats, None where not known.

    Attributes:
        hook_wall_s: time in connector hooks, by engine.
        hook_cpu_s: the same, but only what the thread really computed.
        step_cpu_p99_s: 99 of 100 steps had no more CPU time in hooks, by engine and side (scheduler or worker).
        nixl_engine_thread_s: time in NIXL calls that engine threads made, inside hooks or not.
        descriptors: handed to NIXL.
        transfers: posted.
        cpu_s: by process.
    """

    hook_wall_s: Mapping[str, float]
    hook_cpu_s: Mapping[str, float]
    step_cpu_p99_s: Mapping[tuple[str, str], float]
    nixl_engine_thread_s: float
    descriptors: float
    transfers: float
    cpu_s: Mapping[str, float]


@dataclass(frozen=True, slots=True, order=True)
class Group:
    """One table: a prompt length over a link."""

    link: str
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Row:
    """One contender in one cell."""

    contender: str
    group: Group
    rate_per_s: float | None
    num_repeats: int
    num_requests: int
    num_failed: int
    figures: Mapping[Metric, Figure]
    ratios: Mapping[tuple[str, Metric], Spread]
    output_tokens_per_s: float
    rho: float | None
    steady: bool
    costs: Costs
    example: Request | None
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """Everything a report shows."""

    headers: tuple[Header, ...]
    checks: tuple[TokenCheck, ...]
    skipped: tuple[Skipped, ...]
    rows: tuple[Row, ...]
    topologies: tuple[str, ...]


Key = tuple[str, Group, float | None]


def summarise_records(records: Iterable[Record]) -> Report:
    """Group records into rows, cells measured twice by their last result."""
    records = list(records)
    results: dict[tuple[Key, int], CellResult] = {}
    skipped: dict[tuple[Key, int], Skipped] = {}
    for record in records:
        if isinstance(record, CellResult | Skipped):
            key: Key = (record.contender, Group(record.link, record.prompt_tokens), record.rate_per_s)
            if isinstance(record, CellResult):
                results[key, record.repeat] = record
                skipped.pop((key, record.repeat), None)
            else:
                skipped[key, record.repeat] = record
    cells: dict[Key, dict[int, CellResult]] = {}
    for (key, repeat), result in sorted(results.items(), key=lambda item: item[0][1]):
        cells.setdefault(key, {})[repeat] = result
    rows = [_row(key, by_repeat, cells) for key, by_repeat in cells.items()]
    order = {key: index for index, key in enumerate(CONTENDERS)}
    rows.sort(key=lambda row: (row.group, row.rate_per_s or 0.0, order.get(row.contender, len(order))))
    checks = {record.contender: record for record in records if isinstance(record, TokenCheck)}
    return Report(
        headers=tuple(record for record in records if isinstance(record, Header)),
        checks=tuple(checks.values()),
        skipped=tuple(skipped.values()),
        rows=tuple(rows),
        topologies=tuple(sorted({result.topology for result in results.values()})),
    )


def values_of(result: CellResult, metric: Metric) -> list[float]:
    """A metric of every request that succeeded."""
    return [value for request in good(result) for value in VALUES[metric](request)]


def good(result: CellResult) -> list[Request]:
    """Requests that succeeded."""
    return [request for request in result.requests if request.error is None]


def _row(key: Key, by_repeat: Mapping[int, CellResult], cells: Mapping[Key, Mapping[int, CellResult]]) -> Row:
    contender, group, rate_per_s = key
    results = list(by_repeat.values())
    figures = {metric: figure for metric in Metric if (figure := _figure(results, metric)) is not None}
    ratios: dict[tuple[str, Metric], Spread] = {}
    for baseline in BASELINES:
        base = cells.get((baseline, group, rate_per_s))
        if base is not None and baseline != contender:
            ratios |= {
                (baseline, metric): ratio for metric in Metric if (ratio := _ratio(by_repeat, base, metric))
            }
    rhos = [result.rho for result in results if result.rho is not None]
    rho = median(rhos) if rhos else None
    answered = [request for result in results for request in good(result)]
    return Row(
        contender=contender,
        group=group,
        rate_per_s=rate_per_s,
        num_repeats=len(results),
        num_requests=sum(len(result.requests) for result in results),
        num_failed=sum(len(result.requests) for result in results) - len(answered),
        figures=figures,
        ratios=ratios,
        output_tokens_per_s=median(
            [sum(request.output_tokens for request in good(result)) / result.duration_s for result in results]
        ),
        rho=rho,
        steady=is_steady(rho),
        costs=_costs(results),
        example=_example(answered),
        notes=tuple(dict.fromkeys(note for result in results for note in result.notes)),
    )


def _figure(results: Sequence[CellResult], metric: Metric) -> Figure | None:
    summaries = [found for result in results if (found := summarise(values_of(result, metric))) is not None]
    medians = spread([found.median for found in summaries])
    if medians is None:
        return None
    return Figure(
        mean_s=median([found.mean for found in summaries]),
        median_s=medians.middle,
        p99_s=median([found.p99 for found in summaries]),
        medians_s=medians,
    )


def _ratio(ours: Mapping[int, CellResult], base: Mapping[int, CellResult], metric: Metric) -> Spread | None:
    repeats = sorted(ours.keys() & base.keys())
    return bootstrap_ratio(
        [values_of(ours[repeat], metric) for repeat in repeats],
        [values_of(base[repeat], metric) for repeat in repeats],
        random.Random(RATIO_SEED),
        rounds=RATIO_ROUNDS,
    )


def _costs(results: Sequence[CellResult]) -> Costs:
    engines = sorted({hook.engine for result in results for hook in result.hooks})
    processes = sorted({name for result in results for name in result.cpu_s})

    def per_request(measure: Callable[[CellResult], float]) -> float:
        return median([measure(result) / max(1, len(result.requests)) for result in results])

    return Costs(
        hook_wall_s={engine: per_request(partial(_hooks_s, engine=engine, cpu=False)) for engine in engines},
        hook_cpu_s={engine: per_request(partial(_hooks_s, engine=engine, cpu=True)) for engine in engines},
        step_cpu_p99_s={
            (engine, side): median(found)
            for engine in engines
            for side in ("scheduler", "worker")
            if (
                found := [p99 for result in results if (p99 := _step_p99_s(result, engine, side)) is not None]
            )
        },
        nixl_engine_thread_s=per_request(_nixl_on_engine_threads_s),
        descriptors=per_request(_descriptors),
        transfers=per_request(_transfers),
        cpu_s={name: per_request(partial(_cpu_s, name=name)) for name in processes},
    )


def _hooks_s(result: CellResult, *, engine: str, cpu: bool) -> float:
    hooks = [hook for hook in result.hooks if hook.engine == engine and _is_hook(hook.hook)]
    return sum(hook.cpu_s if cpu else hook.wall_s for hook in hooks)


def _nixl_on_engine_threads_s(result: CellResult) -> float:
    return sum(
        hook.wall_s for hook in result.hooks if not _is_hook(hook.hook) and hook.side == "engine thread"
    )


def _descriptors(result: CellResult) -> float:
    return sum(hook.amount for hook in result.hooks if not _is_hook(hook.hook) and hook.hook != TRANSFER_CALL)


def _transfers(result: CellResult) -> float:
    return sum(hook.calls for hook in result.hooks if hook.hook == TRANSFER_CALL)


def _cpu_s(result: CellResult, *, name: str) -> float:
    return result.cpu_s.get(name, 0.0)


def _step_p99_s(result: CellResult, engine: str, side: str) -> float | None:
    steps = sorted(
        (int(hook.hook.removeprefix(STEP)), hook.calls)
        for hook in result.hooks
        if (hook.engine, hook.side) == (engine, side) and hook.hook.startswith(STEP)
    )
    left = 0.99 * sum(calls for _, calls in steps)
    for edge_us, calls in steps:
        left -= calls
        if left <= 0:
            return edge_us / 1e6
    return None


def _is_hook(name: str) -> bool:
    return not name.startswith((NIXL_CALL, STEP))


def _example(requests: Sequence[Request]) -> Request | None:
    """The request whose TTFT is the median one's: what the waterfall shows."""
    if not requests:
        return None
    ordered = sorted(requests, key=lambda request: request.ttft_s)
    return ordered[(len(ordered) - 1) // 2]
