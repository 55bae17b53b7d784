"""Arrivals: how requests are spread over time, in the terms of vLLM's serving benchmark.

Gaps are gamma distributed with a shape called burstiness, then stretched so that the last request arrives exactly at
number / rate. Two runs with different seeds therefore offer exactly the same load.
"""

import math
import random
from enum import StrEnum


class Arrivals(StrEnum):
    """The shape of the gaps between requests."""

    POISSON = "poisson"
    BURSTY = "bursty"  # gaps vary more than Poisson's
    UNIFORM = "uniform"  # all gaps equal

    @property
    def burstiness(self) -> float:
        """The gamma shape, as `--burstiness` takes it."""
        return {"poisson": 1.0, "bursty": 0.25, "uniform": math.inf}[self.value]


def arrival_offsets_s(
    arrivals: Arrivals, rate_per_s: float, num_requests: int, rng: random.Random
) -> list[float]:
    """Seconds from the start at which each request arrives.

    Raises:
        ValueError: the rate is not positive or there is no request.
    """
    if not rate_per_s > 0 or num_requests < 1:
        raise ValueError("need a positive rate and at least one request")
    shape = arrivals.burstiness
    if math.isinf(shape):
        gaps = [1.0] * num_requests
    else:
        gaps = [rng.gammavariate(shape, 1.0) for _ in range(num_requests)]
    total = math.fsum(gaps)
    span_s = num_requests / rate_per_s
    offsets, passed = [], 0.0
    for gap in gaps:
        passed += gap
        offsets.append(passed / total * span_s)
    return offsets
