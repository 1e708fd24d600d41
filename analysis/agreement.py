"""Whether runs that were trained again elsewhere came to the same: losses, accuracies and parity checks.

Two right trainings of one run, on two machines, differ by the order of sums. Their losses are held against each other
as those of several devices are against one's (`analysis.comparison.counterparts`): by how far rounding may have grown,
little in the first steps, much after many. Of accuracies, what is allowed is three standard errors of the difference of
two shares of the test set. Times belong to machines, so they are told and never judged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import polars as pl

from analysis.comparison.counterparts import allowed, mean_loss
from analysis.metrics import per_run

if TYPE_CHECKING:
    from collections.abc import Mapping

    from analysis.reader import Runs

STANDARD_ERRORS = 3.0
"""Within this many of the difference of two accuracies they agree."""
_LOSSES = ("train_loss", "test_loss")
_COLUMNS = (
    *("run_id", "slug", "state", "outcome", "reason", "rounding", "optimizer", "steps_per_epoch", "test_samples"),
    *("parity_passed", "data_sha256", "epochs"),
)


class RerunFinding(Enum):
    """What came of a comparison; its value are the words."""

    SAME = "the same"
    WITHIN = "within what rounding may make of them"
    APART = "apart"
    UNJUDGED = "not judged: it does not train like one device"
    UNKNOWN = "not measured"

    @property
    def agrees(self) -> bool:
        """Whether nothing speaks against it."""
        return self not in (RerunFinding.APART, RerunFinding.UNKNOWN)


@dataclass(frozen=True)
class Agreement:
    """One run: as it was bundled, and as it was trained again."""

    run: str
    """Its name."""
    unfinished: str
    """Why there is nothing to compare; empty where there is."""
    losses: RerunFinding = RerunFinding.UNKNOWN
    difference: float | None = None
    """The largest relative difference of a mean loss up to any epoch, or block of steps."""
    accuracies: tuple[float | None, float | None] = (None, None)
    """After the last epoch."""
    allowed_accuracy: float | None = None
    """How far the accuracies may be apart."""
    parity: tuple[bool | None, bool | None] = (None, None)
    """Whether the parity check passed; None: it was not made."""
    same_data: bool = True
    """Whether both trained on the same contents, as far as both recorded them."""
    times_s: tuple[float | None, float | None] = (None, None)
    """Per epoch in steady state: told only."""

    @property
    def accuracy(self) -> RerunFinding:
        """Of the accuracies."""
        one, other = self.accuracies
        if one is None or other is None or self.allowed_accuracy is None:
            return RerunFinding.SAME if one is other is None else RerunFinding.UNKNOWN
        if one == other:
            return RerunFinding.SAME
        return RerunFinding.WITHIN if abs(one - other) <= self.allowed_accuracy else RerunFinding.APART

    @property
    def agrees(self) -> bool:
        """Whether all that is judged agrees."""
        judged = self.losses.agrees and self.accuracy.agrees
        return judged and not self.unfinished and self.parity[0] == self.parity[1] and self.same_data


def agreements(bundled: Runs, again: Runs, ids: Mapping[str, str]) -> list[Agreement]:
    """One per run id of a bundled run → its run id when it was trained again, in this order."""
    rows = [{row["run_id"]: row for row in runs.run.select(_COLUMNS).to_dicts()} for runs in (bundled, again)]
    apart = _apart(bundled, again, ids)
    derived = [_derived(runs) for runs in (bundled, again)]
    found = []
    for one_id, other_id in ids.items():
        one, other = rows[0][one_id], rows[1].get(other_id)
        if other is None or other["state"] != "done":
            found.append(Agreement(one["slug"], _why(other)))
            continue
        (time, accuracy), (other_time, other_accuracy) = derived[0][one_id], derived[1][other_id]
        contents = (one["data_sha256"], other["data_sha256"])
        found.append(
            Agreement(
                run=one["slug"],
                unfinished="",
                losses=_finding(apart.get(one_id), one),
                difference=None if one_id not in apart else apart[one_id][1],
                accuracies=(accuracy, other_accuracy),
                allowed_accuracy=_allowed_accuracy(accuracy, other_accuracy, one["test_samples"]),
                parity=(one["parity_passed"], other["parity_passed"]),
                same_data=None in contents or contents[0] == contents[1],
                times_s=(time, other_time),
            )
        )
    return found


def _why(row: Mapping[str, Any] | None) -> str:
    if row is None or row["state"] in ("missing", "running"):
        return "not trained yet"
    return f"{row['outcome'] or row['state']}: {row['reason']}" if row["reason"] else str(row["outcome"])


def _derived(runs: Runs) -> dict[str, tuple[float | None, float | None]]:
    rows = per_run(runs).select("run_id", "steady_epoch_time_s", "final_test_accuracy").rows()
    return {run_id: (time, accuracy) for run_id, time, accuracy in rows}


def _finding(apart: tuple[float, float] | None, row: Mapping[str, Any]) -> RerunFinding:
    """Of the losses of a run, whose largest excess and difference these are."""
    if apart is None:
        return RerunFinding.SAME if row["epochs"] == 0 else RerunFinding.UNKNOWN
    excess, difference = apart
    if difference == 0:
        return RerunFinding.SAME
    if row["rounding"] is None:
        return RerunFinding.UNJUDGED
    return RerunFinding.WITHIN if excess <= 1 else RerunFinding.APART


def _allowed_accuracy(one: float | None, other: float | None, samples: int | None) -> float | None:
    """Three standard errors of the difference, and at least one sample: the shares are of whole samples."""
    if one is None or other is None or not samples:
        return None
    share = (one + other) / 2
    return max(STANDARD_ERRORS * math.sqrt(2 * share * (1 - share) / samples), 1 / samples)


def _apart(bundled: Runs, again: Runs, ids: Mapping[str, str]) -> dict[str, tuple[float, float]]:
    """Bundled run id → the largest difference of a mean loss, as a multiple of what is allowed (not a number where the
    run has no rounding), and relative.
    """
    pairs = pl.DataFrame(list(ids.items()), schema={"run_id": pl.String, "again": pl.String}, orient="row")
    facts = bundled.run.select("run_id", "rounding", "optimizer", "steps_per_epoch").join(pairs, on="run_id")
    before = (pl.col("epoch") - 1) * pl.col("steps_per_epoch")
    # After an epoch all of its steps have been taken; a test loss comes after the update of the last of them, too.
    taken = {name: before + pl.col("steps_per_epoch") + (name == "test_loss") for name in _LOSSES}
    whole = pl.col("step") + pl.col("steps") - 1
    each = [_held(facts, _means(bundled, name), _means(again, name), steps) for name, steps in taken.items()]
    each.append(_held(facts, _of_blocks(bundled), _of_blocks(again), before + whole))
    rows = pl.concat(each).group_by("run_id").agg(pl.col("excess", "difference").max())
    return {run_id: (excess, difference) for run_id, excess, difference in rows.iter_rows()}


def _held(facts: pl.DataFrame, one: pl.DataFrame, other: pl.DataFrame, taken: pl.Expr) -> pl.DataFrame:
    """Each mean loss of a bundled run beside that of the run that was trained again."""
    there = other.select("epoch", "step", again="run_id", loss_again="loss")
    both = one.join(facts, on="run_id").join(there, on=("again", "epoch", "step"), how="left", nulls_equal=True)
    relative = (pl.col("loss") - pl.col("loss_again")).abs() / pl.col("loss")
    # A loss that is missing, or not finite, agrees with nothing.
    difference = pl.when(relative.is_finite()).then(relative).otherwise(float("inf"))
    limit = allowed(pl.col("rounding"), taken, pl.col("optimizer"))
    return both.select("run_id", excess=difference / limit, difference=difference)


def _means(runs: Runs, name: str) -> pl.DataFrame:
    """Per run and epoch the mean loss up to there."""
    rows = runs.epochs.select("run_id", "epoch", name, step=pl.lit(None, pl.Int32), steps=pl.lit(1, pl.Int32))
    return _cumulated(rows.rename({name: "loss"}))


def _of_blocks(runs: Runs) -> pl.DataFrame:
    """The same per block of steps."""
    return _cumulated(runs.losses.select("run_id", "epoch", "step", "steps", loss="train_loss"))


def _cumulated(rows: pl.DataFrame) -> pl.DataFrame:
    means = mean_loss(pl.col("loss"), pl.col("steps")).over("run_id", order_by=("epoch", "step"))
    return rows.select("run_id", "epoch", "step", "steps", loss=means)
