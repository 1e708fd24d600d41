"""Ratios paired by repeat, and their intervals."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import bootstrap

from analysis.stats import ENOUGH_REPEATS, best_coverage, median_interval, paired_ratio


def test_ratios_are_paired_by_repeat_not_by_place() -> None:
    # The machine was half as fast in repeat 2: paired, the ratio is 2 throughout.
    ratio = paired_ratio({0: 2.0, 2: 4.0, 1: 2.2, 7: 9.0}, {2: 2.0, 1: 1.1, 0: 1.0, 5: 1.0})
    assert ratio is not None
    assert ratio.pairs == ((0, 2.0), (1, 2.0), (2, 2.0))
    assert (ratio.median, ratio.low, ratio.high) == (2.0, 2.0, 2.0)


def test_what_was_not_measured_makes_no_pair() -> None:
    assert paired_ratio({0: None, 1: 2.0}, {0: 1.0, 1: None}) is None
    assert paired_ratio({}, {0: 1.0}) is None


def test_one_pair_has_no_interval_and_no_verdict() -> None:
    ratio = paired_ratio({3: 3.0}, {3: 2.0})
    assert ratio is not None
    assert (ratio.n, ratio.median, ratio.low, ratio.high, ratio.verdict) == (1, 1.5, None, None, "one repeat")


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ([1.2, 1.3, 1.25], "above 1"),
        ([0.8, 0.9, 0.7], "below 1"),
        ([0.9, 1.1, 1.3], "indistinguishable"),
        ([1.0, 1.0], "indistinguishable"),
        ([1.1, 1.1], "above 1"),
    ],
)
def test_the_verdict_is_indistinguishable_where_the_interval_holds_1(values: list[float], verdict: str) -> None:
    ratio = paired_ratio(dict(enumerate(values)), dict.fromkeys(range(len(values)), 1.0))
    assert ratio is not None
    assert ratio.verdict == verdict


def test_the_interval_of_two_values_is_their_span() -> None:
    assert median_interval((1.5, 1.2)) == (1.2, 1.5)


@pytest.mark.parametrize("n", [2, 3, 5, 6, 7, 12, 30])
def test_the_interval_is_scipys(n: int) -> None:
    values = np.random.default_rng(n).normal(1.4, 0.1, n)
    expected = bootstrap(
        (values,), np.median, n_resamples=9999, method="percentile", rng=np.random.default_rng(0), confidence_level=0.95
    ).confidence_interval
    assert median_interval(tuple(values)) == (expected.low, expected.high)


def test_the_interval_is_the_same_every_time() -> None:
    values = (1.0, 1.2, 0.9, 1.1)
    first = median_interval(values)
    median_interval.cache_clear()
    assert median_interval(values) == first


@pytest.mark.slow
def test_the_interval_holds_the_true_median_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    held = 0
    for _ in range(150):
        low, high = median_interval(tuple(rng.normal(1.0, 0.05, 15))) or (0.0, 0.0)
        held += low <= 1.0 <= high
    assert 0.88 <= held / 150 <= 1.0


def test_few_repeats_can_not_give_95_per_cent() -> None:
    assert best_coverage(2) == 0.5
    assert best_coverage(ENOUGH_REPEATS - 1) < 0.95 < best_coverage(ENOUGH_REPEATS)
