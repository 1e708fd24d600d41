"""How often a history calls a change where the sources never changed, and how often it sees one: simulated.

`python -m tests.analysis.false_changes` prints the tables of docs/comparisons.md (a minute).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from analysis.comparison.change_points import DRIFTS, FEWEST_POINTS, MARGIN, shifts

Series = Callable[[np.random.Generator, int], np.ndarray]
"""(generator, points) → the logarithms of so many points, one after the other."""
NOISE = 0.01
"""Standard deviation of a point, of logarithms."""


def _remembering(share: float, deviation: float) -> Series:
    """A machine's slow drift: each point has this share of what the one before was off by."""

    def drawn(rng: np.random.Generator, points: int) -> np.ndarray:
        steps = rng.normal(0, deviation, points)
        steps[1:] *= math.sqrt(1 - share**2)
        for place in range(1, points):
            steps[place] += share * steps[place - 1]
        return steps

    return drawn


def _noise(rng: np.random.Generator, points: int) -> np.ndarray:
    return rng.normal(0, NOISE, points)


def _with_noise(drift: Series) -> Series:
    return lambda rng, points: drift(rng, points) + _noise(rng, points)


def _steadily(share: float) -> Series:
    return _with_noise(lambda rng, points: share * NOISE * np.arange(points))


def _season(rng: np.random.Generator, points: int) -> np.ndarray:
    """A machine room that is warmer in summer: a wave of twenty points that begins anywhere."""
    turns = np.arange(points, dtype=np.float64) / 20 + rng.random()
    wave: np.ndarray = 2 * NOISE * np.sin(2 * math.pi * turns)
    return wave


EQUAL: dict[str, Series] = {
    "even noise of 1 %": _noise,
    "skewed noise": lambda rng, points: np.log1p(rng.gamma(1.5, NOISE, points)),
    "one point in 33 disturbed by 5 %": lambda rng, points: (
        _noise(rng, points) + (rng.random(points) < 0.03) * rng.exponential(0.05, points)
    ),
    "two speeds 20 % apart": lambda rng, points: (rng.random(points) < 0.5) * math.log(1.2) + _noise(rng, points),
    "drift of 1 % (autocorrelation 0.95) and noise": _with_noise(_remembering(0.95, 0.01)),
    "drift of 3 % (autocorrelation 0.95) and noise": _with_noise(_remembering(0.95, 0.03)),
    "drift of 2 % (autocorrelation 0.8) alone": _remembering(0.8, 0.02),
    "a random walk by 0.3 times the noise, and noise": _with_noise(
        lambda rng, points: np.cumsum(rng.normal(0, 0.3 * NOISE, points))
    ),
    "a wave of twice the noise, and noise": _with_noise(_season),
    **{f"a steady drift by {share} times the noise a point": _steadily(share) for share in (0.1, 0.25, 0.5, 2)},
}
"""Series without a change."""


Runs = Callable[[np.random.Generator, int], list[np.ndarray]]
"""(generator, points) → of each point the logarithms of its runs."""


def _each(run: Series, *, day: Series | None = None, sizes: Sequence[int] = range(3, 9), last: int = 0) -> Runs:
    """Points of so many runs each, three in the `last` ones; a day shifts all runs of its point."""

    def drawn(rng: np.random.Generator, points: int) -> list[np.ndarray]:
        off = np.zeros(points) if day is None else day(rng, points)
        counts = rng.choice(list(sizes), points)
        counts[points - last :] = 3
        return [run(rng, int(n)) + of_day for n, of_day in zip(counts, off, strict=True)]

    return drawn


def _slow_day(rng: np.random.Generator, points: int) -> np.ndarray:
    """A day in ten that is 15 % slower."""
    days: np.ndarray = (rng.random(points) < 0.1) * math.log(1.15)
    return days


EQUAL_RUNS: dict[str, Runs] = {
    "even noise of 1 %": _each(_noise),
    "even noise of 1 %, and 1 % of each day": _each(_noise, day=_noise),
    "8 runs, of the last three points 3": _each(_noise, sizes=(8,), last=3),
    "skewed noise": _each(EQUAL["skewed noise"]),
    "noise with heavy tails (Student's t of 2)": _each(lambda rng, n: NOISE * rng.standard_t(2, n)),
    "three runs in ten 15 % slower": _each(
        lambda rng, n: (rng.random(n) < 0.3) * math.log(1.15) + NOISE / 2 * rng.standard_normal(n)
    ),
    "a day in ten 15 % slower": _each(_noise, day=_slow_day),
}
"""Points of 3 to 8 runs without a change."""


def changed(by: float, *, last: int | None = None) -> Series:
    """Even noise, and a change by so many times the noise: from the middle on, or of so many points at the end."""

    def drawn(rng: np.random.Generator, points: int) -> np.ndarray:
        first = points // 2 if last is None else points - last
        moved: np.ndarray = _noise(rng, points) + by * NOISE * (np.arange(points) >= first)
        return moved

    return drawn


CHANGED: dict[str, Series] = {
    **{f"in the middle, by {by} times the noise": changed(by) for by in (2, 3, 5, 7)},
    **{f"of the last two points, by {by} times the noise": changed(by, last=2) for by in (3, 5, 7)},
    "of the last three points, by 5 times the noise": changed(5, last=3),
}


def called(series: Series, points: int, trials: int, *, drifts: Sequence[float] = DRIFTS, seed: int = 5) -> float:
    """In which share of simulated series any change is called."""
    rng = np.random.default_rng(seed)
    return sum(bool(shifts(series(rng, points), drifts=drifts)) for _ in range(trials)) / trials


def called_of_runs(runs: Runs, points: int, trials: int, *, seed: int = 5) -> float:
    """The same of series whose points are medians of runs."""
    rng = np.random.default_rng(seed)
    found = 0
    for _ in range(trials):
        repeats = runs(rng, points)
        found += bool(shifts([float(np.median(each)) for each in repeats], repeats=repeats))
    return found / trials


def called_at_the_end(series: Series, points: int, trials: int, *, seed: int = 5) -> tuple[float, float]:
    """In which share of histories, looked at after each point, the last points are ever called a change; and any is."""
    rng = np.random.default_rng(seed)
    last = anywhere = 0
    for _ in range(trials):
        whole = series(rng, points)
        looks = [(n, shifts(whole[:n])) for n in range(FEWEST_POINTS, points + 1)]
        last += any(found and found[-1].at == n - MARGIN for n, found in looks)
        anywhere += any(found for _, found in looks)
    return last / trials, anywhere / trials


SIZES = (FEWEST_POINTS, 20, 50)


def main() -> None:
    """Print all tables, in per cent."""
    for title, kinds in (("no change", EQUAL), ("a change", CHANGED)):
        head = [f"{points} points" for points in SIZES]
        print(f"| {title} |", " | ".join(head), "| 20 points, drift left out of account |")
        for name, series in kinds.items():
            shares = [100 * called(series, points, 1000) for points in SIZES]
            shares.append(100 * called(series, 20, 1000, drifts=DRIFTS[:1]))
            print(f"| {name} |", " | ".join(f"{share:.1f}" for share in shares), "|", flush=True)
    print("| no change, points of 3 to 8 runs | 10 points | 20 points | 40 points |")
    for title, runs in EQUAL_RUNS.items():
        shares = [100 * called_of_runs(runs, points, 1000) for points in (10, 20, 40)]
        print(f"| {title} |", " | ".join(f"{share:.1f}" for share in shares), "|", flush=True)
    print("| looked at after each point, 9 to 28 | last points | any |")
    for name in (
        "even noise of 1 %",
        "one point in 33 disturbed by 5 %",
        "drift of 3 % (autocorrelation 0.95) and noise",
    ):
        last, anywhere = called_at_the_end(EQUAL[name], 28, 300)
        print(f"| {name} | {100 * last:.1f} | {100 * anywhere:.1f} |", flush=True)


if __name__ == "__main__":
    main()
