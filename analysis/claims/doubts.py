"""What keeps an effect from deciding anything, and what else to know of it: whether the runs behind it are alike."""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import polars as pl

from analysis.claims.grammar import LEARNING, OF_SAMPLES, Claim
from analysis.configurations import facts
from analysis.metrics import per_epoch
from analysis.sides import Differences, is_told, said, surroundings
from parallelbench.store.surroundings import matters, unlike

if TYPE_CHECKING:
    from collections.abc import Iterable

    from analysis.claims.cells import Cell
    from analysis.reader import Runs
    from analysis.work import Work


_BY_DEVICES = ("threads", "variables.OMP_NUM_THREADS", "variables.GLOO_SOCKET_IFNAME", "variables.NCCL_SOCKET_IFNAME")
"""What the launcher sets as the devices and nodes of a run need it: it belongs to the way that is compared."""


class _Run(NamedTuple):
    """What of a run must be alike in those that it is compared with, or is told."""

    environment: Work
    """Of its environment what matters, and what is told."""
    size: int
    """Samples of its data set."""
    epoch_samples: int | None
    """Samples that an epoch of it holds."""
    began: float
    ended: float
    """Unix times of the first and the last epoch's end."""


def objections(runs: Runs, claim: Claim, cell: Cell) -> list[str]:
    """Why nothing is decided, whatever the effect."""
    found = []
    if cell.missed:
        repeats = len(cell.missed | cell.values.keys())
        found.append(f"{len(cell.missed)} of {repeats} repeats never reach {claim.target:g}")
    repeats_runs = _compared(runs, cell)
    if claim.metric in OF_SAMPLES and (unlike := _unlike_epochs(repeats_runs)):
        found.append(f"epochs hold {unlike} samples: compare samples per second")
    if claim.metric not in LEARNING and (differences := _between(repeats_runs, told=False)):
        found.append(f"the sides ran in unlike surroundings: {said(differences)}")
    return found


def cautions(runs: Runs, claim: Claim, cell: Cell) -> list[str]:
    """What may be in the effect besides what is compared."""
    repeats_runs = _compared(runs, cell)
    differences = _between(repeats_runs, told=True)
    if claim.metric in LEARNING:  # losses and bytes hardly hang on what times do
        differences |= _between(repeats_runs, told=False)
    found = [f"compared runs differ in {', '.join(sorted(differences))}"] if differences else []
    if claim.metric not in LEARNING and _one_after_the_other(repeats_runs):
        found.append("compared runs were measured one after the other: what changed in between is in the effect")
    return found


def _compared(runs: Runs, cell: Cell) -> list[list[_Run]]:
    """Of each repeat the runs that are compared."""
    known = _known(runs)
    return [[known[run_id] for run_id in run_ids] for run_ids in cell.runs.values()]


@lru_cache(maxsize=8)
def _known(runs: Runs) -> dict[str, _Run]:
    """Run id → what is looked at."""
    epochs = per_epoch(runs).group_by("run_id").agg(
        pl.col("train_samples").max().alias("epoch_samples"),
        # Where no times are known, nothing is known to be before or after.
        pl.col("finished_at").min().fill_null(float("-inf")).alias("began"),
        pl.col("finished_at").max().fill_null(float("inf")).alias("ended"),
    )  # fmt: skip
    rows = facts(runs).select("run_id", "environment_json", "train_samples").join(epochs, on="run_id")
    return {run_id: _Run(_relevant(environment), *rest) for run_id, environment, *rest in rows.iter_rows()}


def _relevant(environment_json: str | None) -> Work:
    return {key: value for key, value in surroundings(environment_json).items() if _matters(key) or is_told(key)}


def _unlike_epochs(repeats_runs: Iterable[list[_Run]]) -> str:
    """How many samples epochs hold, where it isn't as many although the data sets are of one size."""
    for compared in repeats_runs:
        held: dict[int, set[int]] = defaultdict(set)
        for run in compared:
            if run.epoch_samples is not None:
                held[run.size].add(run.epoch_samples)
        if unlike := next((found for found in held.values() if len(found) > 1), None):
            return " and ".join(f"{samples:,}" for samples in sorted(unlike))
    return ""


def _between(repeats_runs: Iterable[list[_Run]], *, told: bool) -> Differences:
    """In what the environments of runs that are compared differ."""
    found: Differences = {}
    for first, *others in repeats_runs:
        for other in others:
            found = unlike(first.environment, other.environment, is_told if told else _matters) | found
    return found


def _matters(key: str) -> bool:
    return matters(key) and key not in _BY_DEVICES


def _one_after_the_other(repeats_runs: list[list[_Run]]) -> bool:
    """Whether all repeats of one side ended before any of the other: not so in a sweep, which is interleaved."""
    sides = list(zip(*repeats_runs, strict=True))
    ends = [max(run.ended for run in side) for side in sides]
    begins = [min(run.began for run in side) for side in sides]
    return len(repeats_runs) > 1 and min(ends) < max(begins)
