"""Statistics agree with numpy, and a ratio's interval holds what it should."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.workload.stats import (
    bootstrap_ratio,
    is_steady,
    mean,
    median,
    offered_load,
    percentile,
    spread,
    summarise,
)
from strategies import examples

VALUES = st.lists(st.floats(0, 1e6, allow_nan=False), min_size=1, max_size=60)


@examples(100)
@given(VALUES, st.floats(0, 100))
def test_percentile_equals_numpys(values: list[float], percent: float) -> None:
    assert percentile(values, percent) == pytest.approx(
        float(np.percentile(values, percent)), rel=1e-9, abs=1e-9
    )


@examples(100)
@given(VALUES)
def test_summary_orders_median_and_p99(values: list[float]) -> None:
    summary = summarise(values)

    assert summary is not None
    assert min(values) <= summary.median <= summary.p99 <= max(values)


@pytest.mark.parametrize(
    "call", [lambda: percentile([], 50), lambda: percentile([1.0], 101), lambda: mean([])]
)
def test_statistics_without_meaning_are_refused(call) -> None:
    with pytest.raises(ValueError):
        call()


def test_nothing_has_no_summary() -> None:
    assert summarise([]) is None
    assert spread([]) is None


def test_offered_load_is_rate_times_service() -> None:
    assert offered_load(0.5, 1.5) == 0.75
    assert offered_load(None, 1.5) is None
    assert offered_load(0.5, None) is None


@pytest.mark.parametrize(
    ("rho", "steady"), [(None, True), (0.0, True), (0.899, True), (0.9, False), (2.0, False)]
)
def test_load_from_nine_tenths_is_not_steady(rho: float | None, steady: bool) -> None:
    assert is_steady(rho) is steady


def test_ratio_of_equal_contenders_is_one_and_inside_its_interval() -> None:
    rng = random.Random(3)
    runs = [[rng.gauss(100, 5) for _ in range(30)] for _ in range(3)]

    ratio = bootstrap_ratio(runs, runs, random.Random(1))

    assert ratio is not None
    assert ratio.middle == 1.0
    assert ratio.low < 1.0 < ratio.high


def test_ratio_cancels_drift_that_hits_both_sides_of_a_repeat() -> None:
    rng = random.Random(4)
    drift = (1.0, 1.4, 0.7)
    base = [[rng.gauss(100, 1) * factor for _ in range(40)] for factor in drift]
    half = [[rng.gauss(50, 1) * factor for _ in range(40)] for factor in drift]

    ratio = bootstrap_ratio(half, base, random.Random(1))

    assert ratio is not None
    assert 0.48 < ratio.low <= ratio.middle <= ratio.high < 0.52


def test_ratio_with_equal_seeds_is_equal() -> None:
    top, bottom = [[1.0, 2.0, 3.0]], [[2.0, 3.0, 4.0]]

    assert bootstrap_ratio(top, bottom, random.Random(9)) == bootstrap_ratio(top, bottom, random.Random(9))


def test_ratio_without_common_repeats_is_none() -> None:
    assert bootstrap_ratio([[1.0]], [], random.Random(1)) is None
    assert bootstrap_ratio([[]], [[1.0]], random.Random(1)) is None
    assert bootstrap_ratio([[1.0]], [[0.0]], random.Random(1)) is None


@examples(100)
@given(VALUES)
def test_median_is_inside_the_range(values: list[float]) -> None:
    assert min(values) <= median(values) <= max(values)
