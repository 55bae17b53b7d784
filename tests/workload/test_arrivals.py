"""Arrivals offer exactly the asked load, whatever their shape."""

import itertools
import random

import pytest

from kvbaton.workload.arrivals import Arrivals, arrival_offsets_s


@pytest.mark.parametrize("arrivals", [*Arrivals])
def test_offsets_rise_and_end_at_number_over_rate(arrivals: Arrivals) -> None:
    offsets = arrival_offsets_s(arrivals, 0.4, 50, random.Random(5))

    assert offsets == sorted(offsets)
    assert offsets[-1] == pytest.approx(125.0)


def test_uniform_gaps_are_equal() -> None:
    assert arrival_offsets_s(Arrivals.UNIFORM, 2.0, 4, random.Random(5)) == pytest.approx(
        [0.5, 1.0, 1.5, 2.0]
    )


def test_bursty_gaps_vary_more_than_poissons() -> None:
    def spread_of(arrivals: Arrivals) -> float:
        offsets = arrival_offsets_s(arrivals, 1.0, 2000, random.Random(5))
        gaps = [b - a for a, b in itertools.pairwise(offsets)]
        middle = sum(gaps) / len(gaps)
        return sum((gap - middle) ** 2 for gap in gaps) / len(gaps) / middle**2

    assert spread_of(Arrivals.POISSON) == pytest.approx(1.0, rel=0.2)
    assert spread_of(Arrivals.BURSTY) > 2.5


@pytest.mark.parametrize(("rate", "number"), [(0.0, 3), (-1.0, 3), (1.0, 0)])
def test_offsets_of_no_load_are_refused(rate: float, number: int) -> None:
    with pytest.raises(ValueError):
        arrival_offsets_s(Arrivals.POISSON, rate, number, random.Random(5))
