"""Optimizer steps to a test accuracy against the batch size, and the three regimes of Shallue et al. 2018 (arXiv
1811.03600): perfect scaling, diminishing returns, maximal data parallelism.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import polars as pl

from analysis.claims.figures import is_reproduction
from analysis.comparison.summary import learned
from analysis.comparison.work import groups_across
from analysis.figures.finding import per_group
from analysis.figures.lines import Axis, Lines
from analysis.metrics.runs import ACCURACY_LADDER, step_to_accuracy, steps_to_accuracy
from analysis.runs.reader import once

if TYPE_CHECKING:
    from analysis.runs.reader import Runs

_ENOUGH_BATCHES = 4
_FIT, _PERFECT = "fitted", "perfect scaling"
_ROOTS = ("batch_size", "optimizer.lr", "epochs")
"""Keys in which runs of one curve may differ: as in the paper, every batch has its best learning rate."""
_EDGE = 0.1
"""Tolerance of the regimes' ends: slopes −0.9 (doubling the batch nearly halves the steps) and −0.1."""
_COARSE = 0.1
"""Share of the steps that may lie between those known to be too few and those that are enough. Where accuracy is known
once per epoch, every batch needs N ÷ b steps for its first epoch, and the epochs would pass for perfect scaling.
"""


class Curve(NamedTuple):
    """s(b) = s_min · (1 + b_c ÷ b), of McCandlish et al. 2018 (arXiv 1812.06162, equation 2.11)."""

    least_steps: float
    critical_batch: float

    def steps(self, batch: float) -> float:
        """At this batch."""
        return self.least_steps * (1 + self.critical_batch / batch)

    @property
    def perfect_up_to(self) -> float:
        """The batch up to which doubling it nearly halves the steps."""
        return self.critical_batch * _EDGE / (1 - _EDGE)

    @property
    def maximal_from(self) -> float:
        """The batch from which doubling it saves next to nothing."""
        return self.critical_batch * (1 - _EDGE) / _EDGE


@once
def steps(runs: Runs) -> pl.DataFrame:
    """Of every batch and repeat, the fewest steps to the highest target that all batches of its curve reach.

    Columns: panel, configuration, variant, strategy, target, x (the batch), repeat, steps_to_accuracy and `least`, the
    fewest these may be: accuracy is known at the end of an epoch. It rests on no clock: runs on shared cores count.
    """
    work = pl.col("run_id").replace_strict(groups_across(runs, _ROOTS), return_dtype=pl.String)
    point = ("panel", "x", "repeat")
    rows = (
        learned(runs)
        .with_row_index("place")
        .select(
            *("run_id", "place", "repeat", "configuration", "variant", "strategy"),
            x="global_batch_size",
            panel=pl.format("{} · {}", work, "configuration"),
            best="best_test_accuracy",
        )
        .filter(_has_enough_batches())
        .with_columns(pl.col("place").min().over("panel"), pl.col("best").max().over(point))
        .with_columns(target=_reached(pl.col("best").min().over("panel")))
        .drop_nulls("target")
    )
    targets = dict(rows.select("run_id", "target").rows())
    fewest = pl.col("steps_to_accuracy", "steps").sort_by("steps_to_accuracy", "steps").first()
    return (
        rows.join(steps_to_accuracy(runs, targets), on="run_id")
        .join(step_to_accuracy(runs, targets), on="run_id")
        .group_by(point)
        .agg(fewest, pl.col("target", "place", "configuration", "variant", "strategy").first())
        .filter(_has_enough_batches())
        .sort("place", "x", "repeat")
        .with_columns(least=pl.col("steps_to_accuracy") - pl.col("steps").cast(pl.Int64) + 1)
        .drop("steps", "place")
    )


def _has_enough_batches() -> pl.Expr:
    return pl.col("x").n_unique().over("panel") >= _ENOUGH_BATCHES


def _reached(accuracy: pl.Expr) -> pl.Expr:
    """The highest step of `ACCURACY_LADDER` up to this accuracy; null below all of them."""
    return pl.max_horizontal(pl.when(accuracy >= step).then(step) for step in ACCURACY_LADDER)


def is_coarse(data: pl.DataFrame) -> bool:
    """Whether accuracy was measured too rarely to tell how the steps of this panel depend on the batch."""
    return bool((data["steps_to_accuracy"] - data["least"] > _COARSE * data["steps_to_accuracy"]).any())


def fit(data: pl.DataFrame) -> Curve:
    """Least squares of log steps over all batches and repeats."""
    import numpy as np
    from scipy.optimize import least_squares

    batches, log_steps = data["x"].to_numpy().astype(float), np.log(data["steps_to_accuracy"].to_numpy().astype(float))

    def residuals(logs: Any) -> Any:
        return logs[0] + np.log1p(np.exp(logs[1]) / batches) - log_steps

    start = [math.log(float(data["steps_to_accuracy"].min())), math.log(float(np.median(batches)))]  # type: ignore[arg-type]
    fit = least_squares(residuals, start)
    return Curve(*(math.exp(value) for value in fit.x))


def _rows(runs: Runs) -> pl.DataFrame:
    """Each panel is of one configuration and one kind of work."""
    return steps(runs).with_columns(group="panel", value=pl.col("steps_to_accuracy"), disturbed=pl.lit(False))


def _theory(data: pl.DataFrame) -> pl.DataFrame:
    """The fitted curve, perfect scaling beside it, and the regimes' ends that lie among the batches; nothing of panels
    in which accuracy was measured too rarely.
    """
    schema = {"panel": pl.String, "line": pl.String, "x": pl.Float64, "value": pl.Float64, "label": pl.String}
    rows = [
        {"panel": name} | row
        for (name,), members in data.group_by("panel", maintain_order=True)
        if not is_coarse(members)
        for row in _lines(members)
    ]
    return pl.DataFrame(rows, schema=schema)


def _lines(data: pl.DataFrame) -> list[dict[str, Any]]:
    curve = fit(data)
    low, high = float(data["x"].min()), float(data["x"].max())  # type: ignore[arg-type]
    most = float(data["value"].max())  # type: ignore[arg-type]
    grid = [low * (high / low) ** (i / 60) for i in range(61)]
    floor = curve.least_steps / 2
    perfect = [(b, curve.steps(low) * low / b) for b in grid]
    edges = {"diminishing": curve.perfect_up_to, "maximal": curve.maximal_from}
    return [
        *({"line": _FIT, "x": b, "value": curve.steps(b)} for b in grid),
        *({"line": _PERFECT, "x": b, "value": s} for b, s in perfect if s >= floor),
        *(
            {"line": f"{label} from here", "x": b, "value": end, "label": label if end == most else None}
            for label, b in edges.items()
            if low < b < high
            for end in (floor, most)
        ),
    ]


def _regimes(data: pl.DataFrame) -> str:
    if is_coarse(data):
        return _too_rarely(data)
    curve = fit(data)
    off = max(
        max(value / curve.steps(batch), curve.steps(batch) / value)
        for batch, value in data.select("x", "steps_to_accuracy").rows()
    )
    low, high = float(data["x"].min()), float(data["x"].max())  # type: ignore[arg-type]
    law = f"s = {curve.least_steps:.0f}·(1 + {curve.critical_batch:.0f} ÷ b) fits"
    if not (low <= curve.perfect_up_to <= high or low <= curve.maximal_from <= high):
        law = "its bend lies where no batch was measured; the curve fits"  # its numbers would be made up
    return (
        f"to {100 * data['target'][0]:g} % test accuracy, scaling is near perfect "
        f"{_where(curve.perfect_up_to, low, high, 'up to')}, and larger batches save next to nothing "
        f"{_where(curve.maximal_from, low, high, 'from')}; {law} all runs within a factor of {off:.2f}"
    )


def _too_rarely(data: pl.DataFrame) -> str:
    """The batch whose steps are known least, and a length of epochs that would do for all if their steps are right."""
    worst = data.sort(pl.col("least") / pl.col("steps_to_accuracy")).row(0, named=True)
    needed, least = worst["steps_to_accuracy"], worst["least"]
    shorter = max(1, int(_COARSE * min(data["steps_to_accuracy"].to_list())))
    return (
        f"accuracy was measured too rarely to tell how the steps depend on the batch: a batch of {worst['x']} reaches "
        f"{100 * data['target'][0]:g} % test accuracy after {least:,} to {needed:,} steps, as an epoch is tested at "
        f"its end; measure again with measure.steps_per_epoch={shorter}, and as many more epochs"
    )


def _where(batch: float, low: float, high: float, word: str) -> str:
    """Extrapolations are distinguished from measurements."""
    if batch < low:
        return f"{word} a batch below the smallest, {low:.0f}"
    if batch > high:
        return f"{word} a batch above the largest, {high:.0f}"
    return f"{word} a batch of {batch:.0f}"


batch_regimes = Lines(
    order=13,
    title="Steps to accuracy against batch size",
    remark="Points: the best learning rate of each repeat.",
    rows=_rows,
    drawn_for=is_reproduction,
    x=Axis("doubling", "Batch size"),
    y=Axis("doubling", "Optimizer steps"),
    joined=False,
    references=_theory,
    finding=lambda runs: (
        per_group(steps(runs), _regimes, by="panel", every=True)
        or f"No work was trained with {_ENOUGH_BATCHES} batch sizes to an accuracy that all of them reach."
    ),
)
