"""Ratios paired by repeat, and their intervals: as wide as they must be, and no wider."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from scipy.signal import lfilter
from scipy.stats import ttest_1samp

from analysis.comparison.pairing import paired_ratio
from analysis.stats import FEWEST_REPEATS, half_width, interval

Shape = tuple[int, int]
Noise = Callable[[np.random.Generator, Shape], np.ndarray]
"""(generator, (trials, runs)) → by which factors so many runs, one after the other, take longer than they should."""


def test_ratios_are_paired_by_repeat_not_by_place() -> None:
    # The machine was half as fast in repeat 2: paired, the ratio is 2 throughout.
    ratio = paired_ratio({0: 2.0, 2: 4.0, 1: 2.2, 7: 9.0}, {2: 2.0, 1: 1.1, 0: 1.0, 5: 1.0})
    assert ratio is not None
    assert ratio.pairs == ((0, 2.0), (1, 2.0), (2, 2.0))
    assert (ratio.median, ratio.low, ratio.high) == pytest.approx((2.0, 2.0, 2.0))


def test_what_was_not_measured_makes_no_pair_and_nothing_is_divided_by_0() -> None:
    assert paired_ratio({0: None, 1: 2.0}, {0: 1.0, 1: None}) is None
    assert paired_ratio({0: 1.0, 1: 0.0}, {0: 0.0, 1: 1.0}) is None
    assert paired_ratio({}, {0: 1.0}) is None


def test_one_pair_has_no_interval_and_no_verdict() -> None:
    ratio = paired_ratio({3: 3.0}, {3: 2.0})
    assert ratio is not None
    assert (ratio.n, ratio.median, ratio.low, ratio.high, ratio.verdict) == (1, 1.5, None, None, "too few repeats")


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ([1.2, 1.3, 1.25], "above 1"),
        ([0.8, 0.9, 0.85], "below 1"),
        ([0.9, 1.1, 1.3], "indistinguishable"),
        ([1.01, 1.2], "indistinguishable"),
        ([1.0, 1.0], "indistinguishable"),
        ([1.1, 1.1], "above 1"),
    ],
)
def test_the_verdict_is_indistinguishable_where_the_interval_holds_1(values: list[float], verdict: str) -> None:
    ratio = paired_ratio(dict(enumerate(values)), dict.fromkeys(range(len(values)), 1.0))
    assert ratio is not None
    assert ratio.verdict == verdict


@pytest.mark.parametrize("n", [2, 3, 5, 6, 7, 12, 30])
def test_the_interval_is_scipys_t_interval_of_the_logarithms(n: int) -> None:
    values = np.random.default_rng(n).lognormal(0.3, 0.1, n)
    expected = np.exp(ttest_1samp(np.log(values), 0.0).confidence_interval(0.95))
    assert interval(tuple(values)) == pytest.approx(tuple(expected))


def test_changing_the_sides_over_turns_the_interval_over() -> None:
    values = (1.1, 1.3, 1.25, 0.97)
    low, high = interval(values) or (0.0, 0.0)
    assert interval(tuple(1 / value for value in values)) == pytest.approx((1 / high, 1 / low))


def test_the_interval_always_holds_the_median_it_is_shown_with() -> None:
    lopsided = (1.0,) * 5 + (2.0,) * 4
    low, high = interval(lopsided) or (0.0, 0.0)
    mean, reach = np.mean(np.log(lopsided)), half_width(9) * np.std(np.log(lopsided), ddof=1)
    assert np.exp(mean - reach) > 1.0, "the t interval alone would not"
    assert (low, high) == pytest.approx((1.0, np.exp(mean + reach)))


# --- A/A: the same against the same


def _drifting(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    """A machine that warms up and cools down: each run is much like the one before (autocorrelation 0.8)."""
    return lfilter([0.6], [1, -0.8], rng.normal(0, 0.02, shape), axis=1)


NOISE: dict[str, Noise] = {
    "even": lambda rng, shape: np.exp(rng.normal(0, 0.02, shape)),
    "skewed": lambda rng, shape: 1 + rng.gamma(1.5, 0.02, shape),
    "drifting": lambda rng, shape: np.exp(_drifting(rng, shape)),
    "drifting, skewed, now and then disturbed": lambda rng, shape: np.exp(
        _drifting(rng, shape)
        + np.log1p(rng.gamma(2.0, 0.01, shape))
        + (rng.random(shape) < 0.03) * rng.exponential(0.05, shape)
    ),
}


def verdicts(noise: Noise, repeats: int, *, slower: float = 1.0, trials: int = 1000) -> list[str]:
    """What is said of two configurations, each round of a sweep in an order of its own, as sweeps are."""
    rng = np.random.default_rng(5)
    times = noise(rng, (trials, 2 * repeats)).reshape(trials, repeats, 2)
    times = rng.permuted(times, axis=2) * [1.0, slower]
    found = [paired_ratio(dict(enumerate(b)), dict(enumerate(a))) for a, b in times.transpose(0, 2, 1).tolist()]
    return [ratio.verdict for ratio in found if ratio]


@pytest.mark.parametrize("repeats", [FEWEST_REPEATS, 3, 4, 5, 6, 8, 10])
@pytest.mark.parametrize("noise", NOISE)
def test_the_same_is_indistinguishable_from_itself_as_often_as_promised(noise: str, repeats: int) -> None:
    said = verdicts(NOISE[noise], repeats)
    assert 930 <= said.count("indistinguishable") <= 970
    assert said.count("above 1") > 0 < said.count("below 1")


def test_one_wild_repeat_makes_the_verdict_cautious_and_not_false() -> None:
    def wild(rng: np.random.Generator, shape: Shape) -> np.ndarray:
        return np.exp(rng.normal(0, 0.01, shape) + (rng.random(shape) < 0.05) * rng.exponential(0.1, shape))

    assert verdicts(wild, 6).count("indistinguishable") >= 950


def test_what_is_slower_is_found_to_be() -> None:
    assert verdicts(NOISE["skewed"], 6, slower=1.10).count("above 1") > 900
    assert "below 1" not in verdicts(NOISE["skewed"], 6, slower=1.10)
    assert "above 1" not in set(verdicts(NOISE["even"], 3, slower=0.8))
