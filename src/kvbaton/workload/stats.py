"""Statistics of a benchmark: percentiles, offered load, and how sure a ratio is.

Percentiles interpolate linearly between order statistics, as vLLM's serving benchmark does (numpy's default).
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

STEADY_RHO = 0.9
"""From this offered load on, queues still grow when a run of ordinary length ends, so its means depend on its length."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A value with the range it was seen in."""

    low: float
    middle: float
    high: float


@dataclass(frozen=True, slots=True)
class Summary:
    """One metric over one set of values."""

    count: int
    mean: float
    median: float
    p99: float


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` of the values lie, interpolated.

    Raises:
        ValueError: there are no values or the percentage is out of range.
    """
    if not values or not 0 <= percent <= 100:
        raise ValueError("need values and a percentage of 0 to 100")
    ordered = sorted(values)
    position = percent / 100 * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def median(values: Sequence[float]) -> float:
    """The middle value."""
    return percentile(values, 50)


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("need values")
    return math.fsum(values) / len(values)


def summarise(values: Sequence[float]) -> Summary | None:
    """Mean, median and p99, or None where there is nothing."""
    if not values:
        return None
    return Summary(len(values), mean(values), median(values), percentile(values, 99))


def spread(values: Sequence[float]) -> Spread | None:
    """Median with minimum and maximum, for a few repeats of the same thing."""
    return Spread(min(values), median(values), max(values)) if values else None


def offered_load(rate_per_s: float | None, service_s: float | None) -> float | None:
    """Rho: the share of its time a server would be busy, arrivals times unloaded service time."""
    return None if rate_per_s is None or service_s is None else rate_per_s * service_s


def is_steady(rho: float | None) -> bool:
    """Whether a run under this load may be called a steady state."""
    return rho is None or rho < STEADY_RHO


def bootstrap_ratio(
    numerators: Sequence[Sequence[float]],
    denominators: Sequence[Sequence[float]],
    rng: random.Random,
    *,
    rounds: int = 1000,
    confidence: float = 0.95,
) -> Spread | None:
    """How sure the ratio of two contenders is.

    The estimate is the median, over repeats, of the ratio of medians within a repeat: repeats are interleaved, so drift of
    the machine hits both sides of one ratio alike. The interval comes from drawing repeats, and requests within them, anew.

    Args:
        numerators: values by repeat.
        denominators: values by repeat, in the same order.
        rng: source of randomness; its seed makes the interval reproducible.
        rounds: how often to draw.
        confidence: share of draws inside the interval.
    """
    pairs = [(a, b) for a, b in zip(numerators, denominators, strict=False) if a and b and median(b) > 0]
    if not pairs:
        return None
    drawn = []
    for _ in range(rounds):
        ratios = []
        for top, bottom in rng.choices(pairs, k=len(pairs)):
            below = median(rng.choices(bottom, k=len(bottom)))
            if below > 0:
                ratios.append(median(rng.choices(top, k=len(top))) / below)
        if ratios:
            drawn.append(median(ratios))
    tail = (1 - confidence) / 2 * 100
    estimate = median([median(top) / median(bottom) for top, bottom in pairs])
    return Spread(percentile(drawn, tail), estimate, percentile(drawn, 100 - tail)) if drawn else None
