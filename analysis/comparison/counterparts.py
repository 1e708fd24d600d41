"""Every run against its counterpart: the run of one device that had the same seed, batches and learning rate.

Both compute the same in another order of sums, so their losses differ by rounding alone. But training is chaotic:
differences grow exponentially with the steps, until two right runs are as unlike as two trainings of one kind. So the
first steps say most, and each is compared by itself; later ones by blocks, and the test set by epochs. What is compared
is the geometric mean of the losses up to there, in which the swings of single steps cancel out. `allowed` says how much
it may differ. The closing check compares single steps again, after the last.

Runs that were trained again elsewhere are held against the bundled ones in the same way: two right trainings of one
run, on two machines, differ by the order of sums. Of accuracies, what is allowed is three standard errors of the
difference of two shares of the test set. Times belong to machines, so they are told and never judged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import polars as pl

from analysis.comparison.work import IS_PROGRAM, IS_REFERENCE, labels
from analysis.metrics.epochs import AS_TEXT, numbered
from analysis.metrics.runs import per_run
from analysis.runs.reader import once

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from analysis.runs.reader import Runs


NO_COUNTERPART = "no run of one device with its seed, batch size and learning rate"
OTHER_DATA = "its run of one device trained on other contents of the data set"
NOT_ALIKE = (
    "its training takes other steps by design (an asynchronous strategy, batch statistics of each shard, or random "
    "numbers of each rank)"
)
_SAME = ("group", "repeat", "global_batch_size", "learning_rate", "steps_per_epoch")
_LOSSES = ("train_loss", "test_loss")

SPREAD = 50.0
"""How many times its rounding a right run may differ after few steps, relative."""
GROWTH_PER_STEP = 0.25
"""By what power of e differences may grow in a step of SGD; measured: up to 0.2 where it is about to diverge."""
SATURATED, COARSE_SATURATED = 0.5, 1.0
"""How far the mean losses of two right runs may be apart in the end, relative, and where rounding is coarse (half
types, TF32); measured: up to 0.17 and 0.41, in few epochs of SGD that is about to diverge."""
COARSE = 1e-4
"""Rounding above is coarse."""
LEAST_LOSS = 0.02
"""Losses below count as this much: where all is learned, their ratio says nothing."""
SMOOTH = ("sgd",)
"""Optimizers that don't divide by a gradient: the others make whole steps of the last bits of one that is zero."""


def allowed(rounding: pl.Expr, steps: pl.Expr, optimizer: pl.Expr) -> pl.Expr:
    """How far a mean loss may be from one device's after so many steps, relative. The first comes before any update."""
    grown = SPREAD * rounding * (GROWTH_PER_STEP * steps).clip(upper_bound=100.0).exp()
    end = pl.when(rounding > COARSE).then(COARSE_SATURATED).otherwise(SATURATED)
    return pl.when(optimizer.is_in(SMOOTH) | (steps <= 1)).then(pl.min_horizontal(grown, end)).otherwise(end)


def mean_loss(losses: pl.Expr, weights: pl.Expr) -> pl.Expr:
    """The geometric mean of the losses up to each row, in the order of the rows."""
    return ((losses.clip(lower_bound=LEAST_LOSS).log() * weights).cum_sum() / weights.cum_sum()).exp()


def held_against_one_device(runs: Runs) -> pl.DataFrame:
    """One row per published run that is none of one device: `run_id` and

    - `counterpart`: its run id; null without one
    - `unchecked`: why its losses were not compared, in words; null where they were
    - `excess`: the largest difference of a loss ÷ what is allowed. Above 1 it has trained something else
    - `epoch`, `step` (null: after the epoch), `loss`, `other`, `limit`: where that is, both losses, what is allowed
    """
    return _held(runs.whole).filter(pl.col("run_id").is_in(runs.run["run_id"].implode()))


def unlike_one_device(runs: Runs) -> dict[str, str]:
    """Run id → what differs, of the runs whose losses are not their counterpart's."""
    rows = held_against_one_device(runs).filter(~(pl.col("excess") <= 1))
    columns = ("run_id", "epoch", "step", "loss", "other", "limit")
    return {
        run_id: f"its mean loss up to {f'step {step} of ' if step else ''}epoch {epoch} is {loss:.6g}, one device's "
        f"{other:.6g}: over {limit:.2g} apart"
        for run_id, epoch, step, loss, other, limit in rows.select(columns).rows()
    }


@once
def _held(runs: Runs) -> pl.DataFrame:
    several, counterparts = _sides(runs)
    rows = several.join(counterparts, on=_SAME, how="left").with_columns(
        unchecked=pl.when(pl.col("rounding").is_null()).then(pl.lit(NOT_ALIKE))
        .when(pl.col("counterpart").is_null()).then(pl.lit(NO_COUNTERPART))
        .when(pl.col("data_sha256") != pl.col("counterpart_data_sha256")).then(pl.lit(OTHER_DATA))
    )  # fmt: skip
    compared = rows.filter(pl.col("unchecked").is_null()).select(
        "run_id", "counterpart", "rounding", "steps_per_epoch", "optimizer"
    )
    return rows.select("run_id", "counterpart", "unchecked").join(_worst(runs, compared), on="run_id", how="left")


def _sides(runs: Runs) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The runs on several devices, and those on one: of several of one kind the first."""
    groups = labels(runs).select("run_id", "group")
    rows = runs.run.filter(pl.col("state") == "done", ~IS_PROGRAM).join(groups, on="run_id")
    counterparts = rows.filter(IS_REFERENCE, pl.col("outcome") == "ok").select(
        *_SAME, counterpart="run_id", counterpart_data_sha256="data_sha256"
    )
    several = rows.filter(~IS_REFERENCE).select("run_id", *_SAME, "rounding", "optimizer", "data_sha256")
    return several, counterparts.unique(_SAME, keep="first", maintain_order=True)


def _worst(runs: Runs, compared: pl.DataFrame) -> pl.DataFrame:
    """Of each compared run the loss that exceeds most what is allowed."""
    epochs = numbered(runs, "epochs", "epoch", *_LOSSES).with_columns(step=pl.lit(None, pl.Int32), steps=pl.lit(1))
    blocks = numbered(runs, "losses", "epoch", "step", "steps", "train_loss")
    rows = pl.concat([*_held_by(compared, epochs, *_LOSSES), *_held_by(compared, blocks, "train_loss")])
    rows = rows.with_columns(excess=(pl.col("loss") - pl.col("other")).abs() / pl.col("limit"))
    worst = rows.sort("excess", descending=True, nulls_last=True).unique("run_id", keep="first", maintain_order=True)
    return worst.with_columns(AS_TEXT).collect()


def _held_by(compared: pl.DataFrame, rows: pl.DataFrame, *names: str) -> Iterator[pl.LazyFrame]:
    """Each kind of loss of each compared run beside its counterpart's: the means up to each row."""
    at, means = ("epoch", "step"), rows.with_columns(_mean_up_to_each(name).alias(name) for name in names).lazy()
    pairs = compared.lazy().with_columns(pl.col("run_id", "counterpart").cast(rows.schema["run_id"]))
    of_one = means.select(*at, pl.col("run_id").alias("counterpart"), pl.col(names).name.suffix("_of_one"))
    both = pairs.join(means, on="run_id").join(of_one, on=("counterpart", *at), nulls_equal=True)
    # After an epoch all of its steps have been taken; up to a block, those before it and its own.
    within = pl.coalesce(pl.col("step") + pl.col("steps") - 1, "steps_per_epoch")
    for name in names:
        # A test loss comes after the update of the last of them.
        taken = (pl.col("epoch") - 1) * pl.col("steps_per_epoch") + within + (name == "test_loss")
        other = pl.col(f"{name}_of_one")
        limit = allowed(pl.col("rounding"), taken, pl.col("optimizer")) * other
        yield both.select("run_id", *at, loss=name, other=other, limit=limit)


STANDARD_ERRORS = 3.0
"""Within this many of the difference of two accuracies they agree."""
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
    each = [_held_again(facts, _means(bundled, name), _means(again, name), steps) for name, steps in taken.items()]
    one, other = (_cumulated(runs.losses, "train_loss") for runs in (bundled, again))
    each.append(_held_again(facts, one, other, before + whole))
    rows = pl.concat(each).group_by("run_id").agg(pl.col("excess", "difference").max())
    return {run_id: (excess, difference) for run_id, excess, difference in rows.iter_rows()}


def _held_again(facts: pl.DataFrame, one: pl.DataFrame, other: pl.DataFrame, taken: pl.Expr) -> pl.DataFrame:
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
    of_epochs = runs.epochs.with_columns(step=pl.lit(None, pl.Int32), steps=pl.lit(1, pl.Int32))
    return _cumulated(of_epochs, name)


def _cumulated(rows: pl.DataFrame, name: str) -> pl.DataFrame:
    """Of each run the mean loss up to each row."""
    return rows.select("run_id", "epoch", "step", "steps", loss=_mean_up_to_each(name))


def _mean_up_to_each(name: str) -> pl.Expr:
    return mean_loss(pl.col(name), pl.col("steps")).over("run_id", order_by=("epoch", "step"))
