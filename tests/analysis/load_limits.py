"""How often the limits of disturbed epochs and of unlike probes are wrong: `python -m tests.analysis.load_limits`
prints the tables of docs/measurement.md.

Loads are simulated, probes are measured on this machine; what is said of them is said by the analysis itself.
"""

from __future__ import annotations

import os

import numpy as np
import polars as pl
import torch

from analysis.comparison.issues import unlike_probes
from analysis.comparison.work import PROBED
from analysis.metrics.disturbance import taken as exceeds
from parallelbench.measure.machine_probe import probe
from parallelbench.world.world import World

RUNS, RANKS = 1000, 2
"""Simulated runs; ranks with a core of their own."""
TICK_S = 0.01
IDLE = 0.3
"""Share of an epoch in which a rank's core is idle, waiting for others."""
EPOCHS = {0.02: 100, 0.3: 5, 1.0: 5, 5.0: 5, 30.0: 5}
"""Length of an epoch, s → steady epochs of a run."""
LENGTHS_S = tuple(EPOCHS)
QUIET = {"0.2 %": 0.002, "1 %": 0.01, "3 %": 0.03}
"""What daemons and interrupts of an idle machine take of a core; in bursts of 1 ms."""
PLANTED = {"5 %": 0.05, "8 %": 0.08, "10 %": 0.1, "20 %": 0.2, "50 %": 0.5}
"""What a program takes of one rank's core, in bursts of 20 ms, besides 0.2 % everywhere."""
REPEATS = 3


def taken_s(
    rng: np.random.Generator, share: float, length_s: float, *, burst_s: float, shape: tuple[int, ...]
) -> np.ndarray:
    """What others take of epochs: bursts at random times, of random lengths."""
    count = rng.poisson(share * length_s / burst_s, shape)
    return np.where(count > 0, rng.gamma(np.maximum(count, 1), burst_s), 0.0)


def counted_s(rng: np.random.Generator, taken: np.ndarray, length_s: float) -> np.ndarray:
    """What the probe finds, not cut off at 0: the kernel's idle time has whole ticks, at both ends of the epoch."""
    before = rng.random(taken.shape) * TICK_S
    idle = np.floor((before + IDLE * length_s) / TICK_S) * TICK_S
    return taken + IDLE * length_s - idle


def set_aside(rng: np.random.Generator, length_s: float, *, quiet: float, planted: float = 0.0) -> float:
    """The share of runs that count in no comparison."""
    taken = taken_s(rng, quiet, length_s, burst_s=0.001, shape=(RUNS, epochs := EPOCHS[length_s], RANKS))
    taken[..., 0] += taken_s(rng, planted, length_s, burst_s=0.02, shape=(RUNS, epochs))
    run, _, rank = (axis.ravel() for axis in np.indices(taken.shape))
    ranks = pl.DataFrame({"run_id": run, "rank": rank, "others_s": counted_s(rng, taken, length_s).ravel()})
    windows = ranks.group_by("run_id", "rank").agg(pl.col("others_s").sum(), epochs=pl.len())
    windows = windows.with_columns(measured_s=pl.col("epochs") * length_s, unmeasured=0, cores=1)
    return float(np.mean(windows.group_by("run_id").agg(found=exceeds().any())["found"].to_list()))


class Probed:
    """A run, as far as its probes go."""

    definition: dict[str, object] = {}  # noqa: RUF012 - nothing differs
    environment: dict[str, object] = {}  # noqa: RUF012
    data_sha256 = None

    def __init__(self, start: dict[str, float], end: dict[str, float], factor: float = 1.0) -> None:
        self._speeds = {name: value / factor for name, value in (start | end).items()}

    def value(self, metric: str) -> float | None:
        return self._speeds.get(metric)

    def probes(self, key: str) -> tuple[float, ...]:
        return tuple(self._speeds[name] for name in PROBED[key] if name in self._speeds)


def probes(count: int) -> list[Probed]:
    """So many runs on this machine, each probed at its start and its end, on a core as a rank is."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    world = World()
    return [Probed(probe(world, "start"), probe(world, "end")) for _ in range(count)]  # type: ignore[arg-type]


def called_unlike(rng: np.random.Generator, runs: list[Probed], factor: float = 1.0, *, trials: int = RUNS) -> float:
    """How often two sides of `REPEATS` of these runs are unlike machines, where one is slower by a factor."""
    unlike = 0
    for _ in range(trials):
        chosen = rng.choice(len(runs), 2 * REPEATS, replace=False)
        one, other = ([runs[index] for index in half] for half in np.split(chosen, 2))
        slower = [Probed(run._speeds, {}, factor) for run in other]
        unlike += bool(unlike_probes([one, slower]))
    return unlike / trials


def main() -> None:
    rng = np.random.default_rng(0)
    print("runs set aside, %: others take of every core / of one rank's core, besides; epochs of", *LENGTHS_S, "s")
    for name, share in QUIET.items():
        print(f"quiet {name}", *(f"{100 * set_aside(rng, length_s, quiet=share):.1f}" for length_s in LENGTHS_S))
    for name, share in PLANTED.items():
        rates = (set_aside(rng, length_s, quiet=0.002, planted=share) for length_s in LENGTHS_S)
        print(f"planted {name}", *(f"{100 * rate:.1f}" for rate in rates))
    runs = probes(40)
    for kind, columns in PROBED.items():
        best = [max(value for name in columns if (value := run.value(name))) for run in runs]
        print(kind, "largest ÷ smallest of all runs:", f"{max(best) / min(best):.3f}")
    for factor in (1.0, 1.1, 1.2, 1.3, 1.5, 2.0):
        print(f"one side slower by {factor}: unlike in {100 * called_unlike(rng, runs, factor):.1f} %")


if __name__ == "__main__":
    main()
