"""How often the verdicts are wrong where nothing differs: `python -m tests.analysis.false_alarms` prints the tables of
docs/comparisons.md.

Times are simulated; what is said of them is said by the analysis itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.special import stdtrit

from analysis.claims.claim import Expect
from analysis.claims.verdict import decide
from analysis.comparison.gate import SLOWER, gate
from analysis.comparison.pairing import pools
from analysis.comparison.ratio import ERROR, FEWEST_REPEATS, Ratio, critical, error_of_each, of_several, ratio_of_pairs
from analysis.comparison.run import Span
from analysis.comparison.sides import Compared, Comparison, judged_together
from analysis.comparison.speed import Speed
from analysis.comparison.verdict import SpeedVerdict, of_speed
from tests.helpers import interval

Shape = tuple[int, ...]
Noise = Callable[[np.random.Generator, Shape], np.ndarray]
"""(generator, (…, runs)) → by which factors so many runs, one after the other, take longer than they should."""
CONFIGURATIONS = 4
MOST_REPEATS = 12
DRIFT = 0.03
SHARED = 0.95
"""How much like the submit before a submit is, where drift is shared: a machine that changes from day to day."""


def _drifting(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    """A machine that warms up and cools down: each run is much like the one before (autocorrelation 0.8)."""
    return _remembering(0.8, 0.6 * rng.normal(0, 0.02, shape))


def _remembering(share: float, steps: np.ndarray) -> np.ndarray:
    """Each value and this share of what came of the one before; scipy's `lfilter` takes two seconds to load."""
    for place in range(1, steps.shape[-1]):
        steps[..., place] += share * steps[..., place - 1]
    return steps


def _steadily(times: float) -> Noise:
    """A machine that slows down by so many times its noise with each run."""
    return lambda rng, shape: np.exp(0.002 * times * np.arange(shape[-1]) + rng.normal(0, 0.002, shape))


def two_speeds(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    """Boost states, or two kinds of nodes, 20 % apart."""
    return np.exp((rng.random(shape) < 0.5) * math.log(1.2) + rng.normal(0, 0.01, shape))


NOISE: dict[str, Noise] = {
    "even": lambda rng, shape: np.exp(rng.normal(0, 0.02, shape)),
    "skewed": lambda rng, shape: 1 + rng.gamma(1.5, 0.02, shape),
    "drifting": lambda rng, shape: np.exp(_drifting(rng, shape)),
    "drifting, skewed, now and then disturbed": lambda rng, shape: np.exp(
        _drifting(rng, shape)
        + np.log1p(rng.gamma(2.0, 0.01, shape))
        + (rng.random(shape) < 0.03) * rng.exponential(0.05, shape)
    ),
    **{f"steady drift, {times} times the noise a run": _steadily(times) for times in (2, 5, 10)},
    "two speeds": two_speeds,
}


def _about_its_median(noise: Noise) -> Noise:
    """Half of the runs take less than 1, half more."""
    median = float(np.median(noise(np.random.default_rng(0), (400_000,))))
    return lambda rng, shape: noise(rng, shape) / median


def _about_its_mean(noise: Noise) -> Noise:
    """The geometric mean of the runs is 1."""
    mean = float(np.exp(np.log(noise(np.random.default_rng(0), (400_000,))).mean()))
    return lambda rng, shape: noise(rng, shape) / mean


QUIET: Noise = lambda rng, shape: np.exp(rng.normal(0, 0.005, shape))  # noqa: E731
UNLIKE: dict[str, Noise] = {
    "strongly skewed": lambda rng, shape: (1 + rng.gamma(0.5, 0.1, shape)) * QUIET(rng, shape),
    "disturbed by 20 % in one run of ten": lambda rng, shape: (
        QUIET(rng, shape) * np.exp((rng.random(shape) < 0.1) * rng.exponential(0.2, shape))
    ),
}
"""Noise of one side beside another side that is quiet."""


@dataclass(frozen=True)
class Start:
    """When and in which submit a simulated run began: all that its pool depends on."""

    session: tuple[str, int]
    at: float

    @property
    def span(self) -> Span:
        """When it began and ended."""
        return self.at, self.at + 0.1


IN_TURN, FIRST, IN_TWOS = "in turn", "first", "in twos"
"""Orders of submits: A B, B A; all of A first; A A B B."""


@dataclass(frozen=True)
class Seen:
    """What is known at a look."""

    ratios: list[Ratio]
    """Of each configuration to the baseline."""
    to_fastest: list[Ratio]
    """Of all others to the one that is fastest so far."""


@dataclass(frozen=True)
class Design:
    """How the repeats of a simulated comparison were measured."""

    noise: Noise
    repeats: int
    sessions: int = 0
    """Submits of each side; 0: both sides in one, in turn."""
    stops: bool = False
    """Whether it is looked at after every repeat from the third on, and ends with the first verdict."""
    shared: float = 0.0
    """Of the machine's drift of 3 % between submits, the autocorrelation from each submit to the next one."""
    order: str = IN_TURN
    configurations: int = CONFIGURATIONS
    """Beside the baseline."""
    of_baseline: Noise | None = None
    """The baseline's own noise, if it is unlike the others'."""

    def times(self, rng: np.random.Generator) -> np.ndarray:
        """Shape (configurations + 1, repeats): the baseline's first; all are equally fast."""
        sides = self.configurations + 1
        measured = self.noise(rng, (self.repeats * sides,)).reshape(self.repeats, sides)
        places = np.array([rng.permutation(sides) for _ in range(-(-self.repeats // 2))])
        # Rounds come in pairs, a drawn order and its reverse, as sweeps are.
        of_rounds = np.stack([places, sides - 1 - places], axis=1).reshape(-1, sides)[: self.repeats]
        times = np.take_along_axis(measured, of_rounds, axis=1).T
        if self.of_baseline:
            times[0] = self.of_baseline(rng, (self.repeats,))
        if self.sessions:
            own = rng.normal(0, DRIFT, 2 * self.sessions)
            own[1:] *= math.sqrt(1 - self.shared**2)
            drift = _remembering(self.shared, own)
            times *= np.exp(drift[self._submits()][[0] + [1] * self.configurations])
        return times

    def _submits(self) -> np.ndarray:
        """Shape (2, repeats): of each side and repeat the place of its submit among all."""
        session = np.arange(self.repeats) * self.sessions // self.repeats
        before = {
            IN_TURN: lambda side: 2 * session + (side + session) % 2,
            FIRST: lambda side: session + side * self.sessions,
            IN_TWOS: lambda side: 4 * (session // 2) + 2 * side + session % 2,
        }
        return np.stack([before[self.order](side) for side in (0, 1)])

    def ratios(self, times: np.ndarray, repeats: int, *, to: int = 0) -> list[Ratio]:
        """Of each other configuration to this one, by the first repeats."""
        found = [
            ratio_of_pairs(list(enumerate((of / times[to])[:repeats].tolist())), self._pools[repeats])
            for place, of in enumerate(times)
            if place != to
        ]
        return [ratio for ratio in found if ratio]

    @cached_property
    def _pools(self) -> dict[int, dict[int, int]]:
        """Number of repeats → the pool of each."""
        if self.sessions:
            starts = [
                [Start(("submit", at), at + 1e-3 * r) for r, at in enumerate(s)] for s in self._submits().tolist()
            ]
        else:
            starts = [[Start(("submit", 0), 2 * r + (r + side) % 2) for r in range(self.repeats)] for side in (0, 1)]
        pairs = list(zip(*starts, strict=True))
        return {n: dict(enumerate(pools(pairs[:n]))) for n in range(1, self.repeats + 1)}  # type: ignore[arg-type]

    def looks(self, times: np.ndarray) -> Iterator[Seen]:
        """What is known at each look."""
        for repeats in range(FEWEST_REPEATS if self.stops else self.repeats, self.repeats + 1):
            fastest = int(np.median(times[:, :repeats], axis=1).argmin())
            yield Seen(self.ratios(times, repeats), self.ratios(times, repeats, to=fastest))


DIFFERS = (SpeedVerdict.FASTER, SpeedVerdict.SLOWER)


def report(seen: Seen) -> bool:
    """Whether the report says faster or slower of any configuration."""
    error = of_several(seen.ratios)
    return any(of_speed(ratio.at(error)) in DIFFERS for ratio in seen.ratios)


def fastest(seen: Seen) -> bool:
    """Whether the report's headline tells any configuration apart from the fastest one."""
    error = of_several(seen.to_fastest, fastest_of=len(seen.to_fastest) + 1)
    return any(of_speed(ratio.at(error)) in DIFFERS for ratio in seen.to_fastest)


def _comparison(ratios: list[Ratio]) -> Comparison:
    rows = [Compared("work", str(place), {}, {}, Speed(ratio.inverse), {}) for place, ratio in enumerate(ratios)]
    return Comparison(*judged_together(tuple(rows)), only_a=(), only_b=(), lost=(), gained=(), notes=())


def compare(seen: Seen) -> bool:
    """Whether `compare` does, or of all together."""
    found = _comparison(seen.ratios)
    return any(verdict in DIFFERS for verdict in [*(row.verdict for row in found.rows), found.verdict])


def gate_fails(seen: Seen) -> bool:
    """Whether the gate fails without any margin."""
    return gate(_comparison(seen.ratios), margin=0.0).code == SLOWER


EXPECT = Expect(above=1.0)


def claims(seen: Seen) -> bool:
    """Whether any of several claims "takes longer" is reproduced or refuted."""

    def decides(ratio: Ratio, error: float) -> bool:
        values = [value for _, value in ratio.pairs]
        ends = interval(values, ratio.pools, error=error)
        return decide(values, ends, EXPECT, independent=len(ratio.logarithms))[0] != "inconclusive"

    able = [ratio for ratio in seen.ratios if ratio.low is not None]
    error = error_of_each([lambda error, ratio=ratio: decides(ratio, error) for ratio in able])  # type: ignore[misc]
    return any(decides(ratio, error) for ratio in able)


ROOMS: dict[str, Callable[[Seen], bool]] = {
    "report": report,
    "fastest": fastest,
    "compare": compare,
    "claims": claims,
    "gate": gate_fails,
}
DESIGNS: dict[str, Design] = {
    **{f"{name}, 6 repeats": Design(noise, 6) for name, noise in NOISE.items()},
    **{f"{name}, {n} repeats": Design(NOISE[name], n) for name in ("even", "two speeds") for n in (3, 4, 5)},
    **{
        f"one side {name}, the others quiet, equal medians, 4 repeats": Design(
            QUIET, 4, of_baseline=_about_its_median(noise)
        )
        for name, noise in UNLIKE.items()
    },
    "one submit per side, 3 % drift between them": Design(NOISE["even"], 6, sessions=1),
    "3 submits per side, 3 % drift between them": Design(NOISE["even"], 6, sessions=3),
    "6 submits per side, likewise": Design(NOISE["even"], 6, sessions=6),
    **{
        f"6 submits per side, {name}, drift shared by consecutive submits": Design(
            NOISE["even"], 6, sessions=6, shared=SHARED, order=name
        )
        for name in (IN_TURN, IN_TWOS, FIRST)
    },
    **{
        f"{name}, looked at after each of {MOST_REPEATS} repeats": Design(noise, MOST_REPEATS, stops=True)
        for name, noise in NOISE.items()
    },
    f"{MOST_REPEATS} submits per side, 3 % drift, looked at after each": Design(
        NOISE["even"], MOST_REPEATS, sessions=MOST_REPEATS, stops=True
    ),
    f"{MOST_REPEATS} submits per side, {IN_TURN}, shared drift, looked at after each": Design(
        NOISE["even"], MOST_REPEATS, sessions=MOST_REPEATS, stops=True, shared=SHARED
    ),
}


def false_alarms(design: Design, trials: int, *, rooms: Sequence[str] = tuple(ROOMS), seed: int = 5) -> dict[str, int]:
    """Of each room, in how many simulated comparisons of equal configurations it says that any differs."""
    rng = np.random.default_rng(seed)
    found = dict.fromkeys(rooms, 0)
    for _ in range(trials):
        looks = list(design.looks(design.times(rng)))
        for name in rooms:
            found[name] += any(map(ROOMS[name], looks))
    return found


LONGEST = 20
"""Repeats after each of which the tables below are looked at."""
SIZES = (1, 4, 9, 19)
"""Configurations beside the baseline."""


def looked_at(noise: Noise, configurations: int, *, of_baseline: Noise | None = None) -> Design:
    """A sweep that is looked at after each of many repeats."""
    return Design(noise, LONGEST, stops=True, configurations=configurations, of_baseline=of_baseline)


# --- one interval by itself


def misses(noise: Noise, *, most: int, trials: int, critical_of: Callable[[int], float], seed: int = 5) -> float:
    """How often an interval leaves out the true ratio at any look from the third repeat to the last."""
    rng = np.random.default_rng(seed)
    outside = 0
    for _ in range(-(-trials // 5000)):
        times = np.log(noise(rng, (5000, 2 * most))).reshape(5000, most, 2)
        drawn = rng.choice([-1.0, 1.0], (5000, -(-most // 2), 1))
        signs = np.concatenate([drawn, -drawn], axis=2).reshape(5000, -1)[:, :most]  # A B, B A, or B A, A B
        logs = signs * (times[:, :, 1] - times[:, :, 0])
        n, looks = np.arange(1, most + 1), slice(FEWEST_REPEATS - 1, most)
        mean = np.cumsum(logs, axis=1) / n
        squares = np.maximum(np.cumsum(logs**2, axis=1) - n * mean**2, 0)[:, looks]
        reach = np.sqrt(squares / (n[looks] - 1) / n[looks]) * [critical_of(k) for k in n[looks].tolist()]
        outside += int((np.abs(mean[:, looks]) > reach).any(axis=1).sum())
    return outside / (5000 * -(-trials // 5000))


def main() -> None:
    """Print all tables."""
    shown = {f"looks at 3 to {most}": most for most in (3, 6, 10, 20, 50, 100)}
    print("| noise | interval |", " | ".join(shown), "|")
    for name, noise in NOISE.items():
        for title, of in (("this one", critical), ("t, 95 %", lambda n: float(stdtrit(n - 1, 1 - ERROR / 2)))):
            rates = [misses(noise, most=most, trials=100_000, critical_of=of) for most in shown.values()]
            print(f"| {name} | {title} |", " | ".join(f"{100 * (1 - rate):.1f}" for rate in rates), "|")
    print("\n| simulated |", " | ".join(ROOMS), "|")
    for name, design in DESIGNS.items():
        found = false_alarms(design, 1000)
        print(f"| {name} |", " | ".join(f"{count / 10:.1f}" for count in found.values()), "|", flush=True)
    rooms = ("report", "fastest")  # the others find fewer, above
    print(f"\n| looked at after each of {LONGEST} repeats | beside the baseline |", " | ".join(rooms), "|")
    unlike = {
        f"one side {name}, equal {middle}": about(noise)
        for name, noise in UNLIKE.items()
        for middle, about in (("medians", _about_its_median), ("geometric means", _about_its_mean))
    }
    unlike["one side two speeds, the other quiet between them"] = lambda rng, shape: two_speeds(rng, shape) / 1.2**0.5
    for name, noise in (NOISE | unlike).items():
        for size in SIZES if name in NOISE else SIZES[:1]:
            design = looked_at(noise, size) if name in NOISE else looked_at(QUIET, size, of_baseline=noise)
            found = false_alarms(design, 1000, rooms=rooms)
            print(f"| {name} | {size} |", " | ".join(f"{count / 10:.1f}" for count in found.values()), "|", flush=True)


if __name__ == "__main__":
    main()
