"""Ratios paired by repeat, and their intervals: as wide as they must be, and no wider."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from analysis.comparison.pairing import paired_ratio
from analysis.comparison.ratio import (
    ERROR,
    Ratio,
    at_one_look,
    critical,
    error_of_each,
    half_width,
    ratio_of_pairs,
    repeats_to_add,
)
from analysis.comparison.verdict import of_speed
from tests.analysis.false_alarms import NOISE, Noise, misses
from tests.helpers import interval


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


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ([1.2, 1.3, 1.25, 1.25], "faster"),
        ([0.75, 0.95, 0.8, 0.9], "no difference shown"),
        ([0.8, 0.82, 0.81, 0.81], "slower"),
        ([0.9, 1.1, 1.3, 1.2], "no difference shown"),
        ([1.01, 1.2, 1.3, 1.2], "no difference shown"),
        ([1.0, 1.0, 1.0, 1.0], "equal within 5 %"),
        ([0.99, 1.0, 1.01] * 3, "equal within 5 %"),
        ([1.03, 1.031, 1.029, 1.03], "faster"),
        ([1.1, 1.1, 1.1, 1.1], "faster"),
        ([1.1, 1.1, 1.1], "too few repeats"),  # of machines with two speeds, three agree by chance
    ],
)
def test_the_verdict_follows_from_the_interval_and_turns_over_with_the_sides(values: list[float], verdict: str) -> None:
    ones = dict.fromkeys(range(len(values)), 1.0)
    ratio, inverse = paired_ratio(dict(enumerate(values)), ones), paired_ratio(ones, dict(enumerate(values)))
    assert ratio is not None
    assert of_speed(ratio) == verdict
    assert inverse is not None
    assert of_speed(inverse.inverse) == verdict


@pytest.mark.parametrize("values", [[0.9, 1.1, 1.0, 1.0], [1.05, 1.37, 1.05, 1.37]])
def test_repeats_that_would_decide_do_decide_one_way_or_the_other(values: list[float]) -> None:
    def of(count: int) -> Ratio:
        ratio = paired_ratio({r: values[r % len(values)] for r in range(count)}, dict.fromkeys(range(count), 1.0))
        assert ratio is not None
        return ratio

    further = of(len(values)).further_repeats
    assert further is not None
    decided = of(len(values) + further + len(values))
    assert (of_speed(decided), decided.further_repeats) == ("equal within 5 %" if values[0] < 1 else "faster", None)
    assert of_speed(of(len(values) + further // 2)) == "no difference shown"


@pytest.mark.parametrize("n", [3, 6, 30])
def test_the_interval_is_scipys_t_interval_of_the_logarithms(n: int) -> None:
    values = np.random.default_rng(n).lognormal(0.3, 0.1, n)
    expected = np.exp(ttest_1samp(np.log(values), 0.0).confidence_interval(1 - at_one_look(n, ERROR)))
    assert interval(tuple(values)) == pytest.approx(tuple(expected))


def test_the_interval_always_holds_the_median_it_is_shown_with() -> None:
    lopsided = (1.0,) * 13 + (2.0,) * 12
    low, high = interval(lopsided) or (0.0, 0.0)
    mean, reach = np.mean(np.log(lopsided)), half_width(25) * np.std(np.log(lopsided), ddof=1)
    assert np.exp(mean - reach) > 1.0, "the t interval alone would not"
    assert (low, high) == pytest.approx((1.0, np.exp(mean + reach)))


# --- A/A: the same against the same


def verdicts(noise: Noise, repeats: int, *, slower: float = 1.0, trials: int = 1000) -> list[str]:
    """What is said of two configurations, each round of a sweep in an order of its own, as sweeps are."""
    rng = np.random.default_rng(5)
    times = noise(rng, (trials, 2 * repeats)).reshape(trials, repeats, 2)
    times = rng.permuted(times, axis=2) * [1.0, slower]
    found = [paired_ratio(dict(enumerate(b)), dict(enumerate(a))) for a, b in times.transpose(0, 2, 1).tolist()]
    return [of_speed(ratio.inverse) for ratio in found if ratio]


def test_what_is_slower_is_found_to_be() -> None:
    assert verdicts(NOISE["skewed"], 6, slower=1.10).count("slower") > 900
    assert "faster" not in verdicts(NOISE["skewed"], 6, slower=1.10)
    assert "slower" not in set(verdicts(NOISE["even"], 4, slower=0.8))


# --- what holds together


def test_the_mean_of_two_ratios_and_that_of_their_inverses_are_inverses() -> None:
    """Of 0.5 and 2 the arithmetic median would be 1.25, either way round."""
    for values in ((1 / 2, 1 / 2, 2.0, 2.0), (1.1, 1.7, 0.9, 1.2)):
        one, other = (ratio_of_pairs(list(enumerate(v))) for v in (values, [1 / value for value in values]))
        assert one is not None
        assert other is not None
        assert one.median * other.median == pytest.approx(1.0, rel=1e-15)
        assert (one.low or 0) * (other.high or 0) == pytest.approx(1.0, rel=1e-14)


@pytest.mark.parametrize("noise", NOISE)
def test_looking_after_every_repeat_leaves_out_the_truth_no_more_often(noise: str) -> None:
    """Of noise that lasts for some runs, the rounds of a pair share a little: docs/comparisons.md has the figure."""
    found = misses(NOISE[noise], most=20, trials=20_000, critical_of=critical)
    least, most = (0.0, 0.005) if "steady" in noise else (0.03, 0.054 if noise == "drifting" else 0.05)
    assert least <= found <= most + 3 * math.sqrt(0.05 / 20_000)


def test_pairs_of_one_pool_are_one_value() -> None:
    pairs = [(0, 1.0), (1, 1.2), (2, 2.0), (3, 2.4)]
    ratio = ratio_of_pairs(pairs, {0: 7, 1: 7, 2: 9, 3: 9})
    assert ratio is not None
    assert ratio.logarithms == pytest.approx((math.log(1.2) / 2, math.log(4.8) / 2))
    apart = ratio_of_pairs(pairs, dict.fromkeys(range(4), 0))
    assert apart is not None
    assert (apart.low, apart.is_apart, of_speed(apart)) == (None, True, "not interleaved")
    # Four pairs, of which two are independent: more pairs like them would not help.
    assert (ratio.low, ratio.is_apart, of_speed(ratio)) == (None, True, "not interleaved")


@pytest.mark.parametrize("pairs_of_a_pool", [1, 2])
def test_as_many_repeats_as_are_told_decide(pairs_of_a_pool: int) -> None:
    """The unit is a repeat of each side: in turn each is independent, whatever those before shared."""
    limit, means = 1.024, [1.01, 1.02, 1.03] * 3
    values = [mean for mean in means for _ in range(pairs_of_a_pool)]
    pools = {repeat: repeat // pairs_of_a_pool for repeat in range(len(values))}
    ratio = ratio_of_pairs(list(enumerate(values)), pools)
    assert ratio is not None
    needed = repeats_to_add(lambda more: (ratio.after(more) or (0.0, math.inf))[1] <= limit)
    assert needed is not None

    def high_after(more: int) -> float:
        further = {len(values) + place: means[place % 3] for place in range(more)}
        whole = ratio_of_pairs([*enumerate(values), *further.items()], pools | {repeat: repeat for repeat in further})
        assert whole is not None
        return whole.high or math.inf

    assert high_after(needed) <= limit < high_after(needed // 2)
    assert repeats_to_add(lambda _: False) is None
    assert repeats_to_add(lambda more: 4 <= more < 20) == 4, "a claim's margin may take it back"


def test_a_verdict_that_a_narrower_interval_decides_alone_ends_the_search() -> None:
    """A claim with a margin is refuted by an interval that reaches its bound, and by no narrower one within it."""
    decided = [lambda _: True, lambda _: True, lambda error: error < 0.04]
    assert error_of_each(decided) == pytest.approx(0.05 * 2 / 3)


@pytest.mark.parametrize(
    ("p_values", "rejected"),
    [
        ([0.001, 0.02, 0.03, 0.9], 3),  # 0.03 ≤ 0.05 · 3 ÷ 4, so the 0.02 below it is, too
        ([0.013, 0.026, 0.04, 0.9], 0),
        ([0.012, 0.9, 0.9, 0.9], 1),
        ([0.01, 0.04], 2),
        ([0.06], 0),
        ([], 0),
    ],
)
def test_the_error_of_each_is_that_of_benjamini_and_hochberg(p_values: list[float], rejected: int) -> None:
    error = error_of_each([lambda error, p=p: p <= error for p in p_values])  # type: ignore[misc]
    assert sum(p <= error for p in p_values) == rejected
    assert error == pytest.approx(0.05 * max(rejected, 1) / max(len(p_values), 1))


@pytest.mark.slow
def test_a_slow_down_of_the_size_that_is_told_is_seen_in_four_of_five_cases() -> None:
    rng = np.random.default_rng(1)
    seen = rng.normal(0, 0.02, 6)
    known = ratio_of_pairs(list(enumerate(np.exp(0.02 * seen / np.std(seen, ddof=1)).tolist())))
    assert known is not None
    least = known.smallest_seen(1.03)
    assert least is not None
    slower = least * np.exp(rng.normal(0, 0.02, (4000, 6)))
    found = [ratio_of_pairs(list(enumerate(row))) for row in slower.tolist()]
    assert np.mean([(ratio.low or 0) > 1.03 for ratio in found if ratio]) == pytest.approx(0.8, abs=0.02)
