"""How often the verdicts are wrong where nothing differs: `python -m tests.analysis.false_alarms` prints the tables of
docs/comparisons.md.

Times are simulated; what is said of them is said by the analysis itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
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
from analysis.comparison.sides import TIME, Compared, Comparison, together
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
"""Orders of submits: A B A B, all of A first, A A B B."""


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

    def times(self, rng: np.random.Generator) -> np.ndarray:
        """Shape (configurations + 1, repeats): the baseline's first; all are equally fast."""
        sides = CONFIGURATIONS + 1
        times = self.noise(rng, (self.repeats * sides,)).reshape(self.repeats, sides)
        times = rng.permuted(times, axis=1).T  # each round in an order of its own, as sweeps are
        if self.sessions:
            own = rng.normal(0, DRIFT, 2 * self.sessions)
            own[1:] *= math.sqrt(1 - self.shared**2)
            drift = _remembering(self.shared, own)
            times *= np.exp(drift[self._submits()][[0] + [1] * CONFIGURATIONS])
        return times

    def _submits(self) -> np.ndarray:
        """Shape (2, repeats): of each side and repeat the place of its submit among all."""
        session = np.arange(self.repeats) * self.sessions // self.repeats
        before = {
            IN_TURN: lambda side: 2 * session + side,
            FIRST: lambda side: session + side * self.sessions,
            IN_TWOS: lambda side: 4 * (session // 2) + 2 * side + session % 2,
        }
        return np.stack([before[self.order](side) for side in (0, 1)])

    def ratios(self, times: np.ndarray, repeats: int) -> list[Ratio]:
        """Of each configuration to the baseline, by the first repeats."""
        found = [
            ratio_of_pairs(list(enumerate((of / times[0])[:repeats].tolist())), self._pools[repeats])
            for of in times[1:]
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

    def looks(self, times: np.ndarray) -> Iterator[list[Ratio]]:
        """The ratios at each look."""
        for repeats in range(FEWEST_REPEATS if self.stops else self.repeats, self.repeats + 1):
            yield self.ratios(times, repeats)


def report(ratios: list[Ratio]) -> bool:
    """Whether the report says faster or slower of any configuration."""
    error = of_several(ratios)
    return any(of_speed(ratio.at(error)) in (SpeedVerdict.FASTER, SpeedVerdict.SLOWER) for ratio in ratios)


def _comparison(ratios: list[Ratio]) -> Comparison:
    rows = [Compared("work", str(place), {}, {}, {TIME: ratio}) for place, ratio in enumerate(ratios)]
    return Comparison(*together(tuple(rows)), only_a=(), only_b=(), lost=(), gained=(), notes=())


def compare(ratios: list[Ratio]) -> bool:
    """Whether `compare` does, or of all together."""
    found = _comparison(ratios)
    said = [row.verdict for row in found.rows] + [found.verdict]
    return SpeedVerdict.FASTER in said or SpeedVerdict.SLOWER in said


def gate_fails(ratios: list[Ratio]) -> bool:
    """Whether the gate fails without any margin."""
    return gate(_comparison(ratios), margin=0.0).code == SLOWER


EXPECT = Expect(above=1.0)


def claims(ratios: list[Ratio]) -> bool:
    """Whether any of several claims "takes longer" is reproduced or refuted."""

    def decides(ratio: Ratio, error: float) -> bool:
        values = [value for _, value in ratio.pairs]
        ends = interval(values, ratio.pools, error=error)
        return decide(values, ends, EXPECT, independent=len(ratio.logarithms))[0] != "inconclusive"

    able = [ratio for ratio in ratios if ratio.low is not None]
    error = error_of_each([lambda error, ratio=ratio: decides(ratio, error) for ratio in able])  # type: ignore[misc]
    return any(decides(ratio, error) for ratio in able)


ROOMS: dict[str, Callable[[list[Ratio]], bool]] = {
    "report": report,
    "compare": compare,
    "claims": claims,
    "gate": gate_fails,
}
DESIGNS: dict[str, Design] = {
    **{f"{name}, 6 repeats": Design(noise, 6) for name, noise in NOISE.items()},
    "one submit per side, 3 % drift between them": Design(NOISE["even"], 6, sessions=1),
    "3 submits per side, 3 % drift between them": Design(NOISE["even"], 6, sessions=3),
    "6 submits per side, likewise": Design(NOISE["even"], 6, sessions=6),
    **{
        f"6 submits per side, {name}, drift shared by consecutive submits": Design(
            NOISE["even"], 6, sessions=6, shared=SHARED, order=name
        )
        for name in (IN_TURN, IN_TWOS, FIRST)
    },
    f"even, looked at after each of {MOST_REPEATS} repeats": Design(NOISE["even"], MOST_REPEATS, stops=True),
    f"skewed, looked at after each of {MOST_REPEATS} repeats": Design(NOISE["skewed"], MOST_REPEATS, stops=True),
    f"{MOST_REPEATS} submits per side, 3 % drift, looked at after each": Design(
        NOISE["even"], MOST_REPEATS, sessions=MOST_REPEATS, stops=True
    ),
    f"{MOST_REPEATS} submits per side, {IN_TURN}, shared drift, looked at after each": Design(
        NOISE["even"], MOST_REPEATS, sessions=MOST_REPEATS, stops=True, shared=SHARED
    ),
}


def false_alarms(design: Design, trials: int, *, seed: int = 5) -> dict[str, int]:
    """Of each room, in how many simulated comparisons of equal configurations it says that any differs."""
    rng = np.random.default_rng(seed)
    found = dict.fromkeys(ROOMS, 0)
    for _ in range(trials):
        looks = list(design.looks(design.times(rng)))
        for name, says in ROOMS.items():
            found[name] += any(map(says, looks))
    return found


# --- one interval by itself


def misses(noise: Noise, *, most: int, trials: int, critical_of: Callable[[int], float], seed: int = 5) -> float:
    """How often an interval leaves out the true ratio at any look from the third repeat to the last."""
    rng = np.random.default_rng(seed)
    outside = 0
    for _ in range(-(-trials // 5000)):
        times = rng.permuted(noise(rng, (5000, 2 * most)).reshape(5000, most, 2), axis=2)
        logs = np.log(times[:, :, 1] / times[:, :, 0])
        n, looks = np.arange(1, most + 1), slice(FEWEST_REPEATS - 1, most)
        mean = np.cumsum(logs, axis=1) / n
        squares = np.maximum(np.cumsum(logs**2, axis=1) - n * mean**2, 0)[:, looks]
        reach = np.sqrt(squares / (n[looks] - 1) / n[looks]) * [critical_of(k) for k in n[looks].tolist()]
        outside += int((np.abs(mean[:, looks]) > reach).any(axis=1).sum())
    return outside / (5000 * -(-trials // 5000))


def main() -> None:
    """Print both tables."""
    shown = {f"looks at 3 to {most}": most for most in (3, 6, 10, 20, 50, 100)}
    print("| noise | interval |", " | ".join(shown), "|")
    for name, noise in NOISE.items():
        for title, of in (("this one", critical), ("t, 95 %", lambda n: float(stdtrit(n - 1, 1 - ERROR / 2)))):
            rates = [misses(noise, most=most, trials=100_000, critical_of=of) for most in shown.values()]
            print(f"| {name} | {title} |", " | ".join(f"{100 * (1 - rate):.1f}" for rate in rates), "|")
    print("\n| simulated |", " | ".join(ROOMS), "|")
    for name, design in DESIGNS.items():
        found = false_alarms(design, 1000)
        print(f"| {name} |", " | ".join(f"{count / 10:.1f}" for count in found.values()), "|")


if __name__ == "__main__":
    main()
