"""Every run against its counterpart: the run of one device that had the same seed, batches and learning rate.

Both compute the same in another order of sums, so their losses differ by rounding alone. But training is chaotic:
differences grow exponentially with the steps, until two right runs are as unlike as two trainings of one kind. So the
first steps say most, and each is compared by itself; later ones by blocks, and the test set by epochs. What is compared
is the geometric mean of the losses up to there, in which the swings of single steps cancel out. `allowed` says how much
it may differ. The closing check compares single steps again, after the last.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import polars as pl

from analysis.comparison.groups import labels
from analysis.comparison.policy import IS_REFERENCE
from analysis.metrics.epoch_metrics import AS_TEXT, numbered

if TYPE_CHECKING:
    from analysis.reader import Runs

NO_COUNTERPART = "no run of one device with its seed, batch size and learning rate"
NOT_ALIKE = "it does not train like one device, or an older version measured it"
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


@lru_cache(maxsize=8)
def _held(runs: Runs) -> pl.DataFrame:
    several, counterparts = _sides(runs)
    rows = several.join(counterparts, on=_SAME, how="left").with_columns(
        unchecked=pl.when(pl.col("rounding").is_null()).then(pl.lit(NOT_ALIKE))
        .when(pl.col("counterpart").is_null()).then(pl.lit(NO_COUNTERPART))
    )  # fmt: skip
    compared = rows.filter(pl.col("unchecked").is_null()).select(
        "run_id", "counterpart", "rounding", "steps_per_epoch", "optimizer"
    )
    return rows.select("run_id", "counterpart", "unchecked").join(_worst(runs, compared), on="run_id", how="left")


def _sides(runs: Runs) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The runs on several devices, and those on one: of several of one kind the first."""
    groups = labels(runs).select("run_id", "group")
    rows = runs.run.filter(pl.col("state") == "done").join(groups, on="run_id")
    counterparts = rows.filter(IS_REFERENCE, pl.col("outcome") == "ok").select(*_SAME, counterpart="run_id")
    several = rows.filter(~IS_REFERENCE).select("run_id", *_SAME, "rounding", "optimizer")
    return several, counterparts.unique(_SAME, keep="first", maintain_order=True)


def _worst(runs: Runs, compared: pl.DataFrame) -> pl.DataFrame:
    """Of each compared run the loss that exceeds most what is allowed."""
    epochs = numbered(runs, "epochs", "epoch", *_LOSSES).with_columns(step=pl.lit(None, pl.Int32), steps=pl.lit(1))
    blocks = numbered(runs, "losses", "epoch", "step", "steps", "train_loss")
    each = [_held_by(compared, epochs, name) for name in _LOSSES] + [_held_by(compared, blocks, "train_loss")]
    rows = pl.concat(each).with_columns(excess=(pl.col("loss") - pl.col("other")).abs() / pl.col("limit"))
    worst = rows.sort("excess", descending=True, nulls_last=True).unique("run_id", keep="first", maintain_order=True)
    return worst.with_columns(AS_TEXT)


def _held_by(compared: pl.DataFrame, rows: pl.DataFrame, name: str) -> pl.DataFrame:
    """One kind of loss of each compared run beside its counterpart's: the means up to each row."""
    at, weights = ("epoch", "step"), pl.col("steps")
    means = rows.select(
        "run_id", *at, "steps", mean_loss(pl.col(name), weights).over("run_id", order_by=at).alias("loss")
    )
    pairs = compared.with_columns(pl.col("run_id", "counterpart").cast(means.schema["run_id"]))
    of_one = means.select(*at, counterpart="run_id", other="loss")
    both = pairs.join(means, on="run_id").join(of_one, on=("counterpart", *at), nulls_equal=True)
    # After an epoch all of its steps have been taken; up to a block, those before it and its own.
    within = pl.coalesce(pl.col("step") + pl.col("steps") - 1, "steps_per_epoch")
    # A test loss comes after the update of the last of them.
    taken = (pl.col("epoch") - 1) * pl.col("steps_per_epoch") + within + (name == "test_loss")
    limit = allowed(pl.col("rounding"), taken, pl.col("optimizer")) * pl.col("other")
    return both.select("run_id", *at, "loss", "other", limit=limit)
