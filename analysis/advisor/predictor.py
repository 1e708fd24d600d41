"""Formulas with fitted parameters, bent where measurements are near; and predictions of what their fit has not seen.

What the formulas get wrong in the same way again and again is a Gaussian process on the log errors of a fit. Far from
every measured row its correction is zero, so that extrapolations rest on the formulas alone (Rasmussen and Williams
2006, ch. 2). Lengths and sizes are fixed, not fitted. Which rows a fit sees and which it is judged by was fixed before
anything was fitted, the same in every version.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from analysis.advisor.fit import FEWEST_ERRORS, fit, half_width
from analysis.advisor.step import StepTime, step_time

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from analysis.advisor.fit import Fitted
    from analysis.advisor.layouts import Layouts, Values
    from analysis.advisor.machine import Machines
    from analysis.advisor.measurements import Evidence


@dataclass(frozen=True)
class Predictor:
    """What was learnt from measured steps."""

    fitted: Fitted
    residuals: Residuals

    @classmethod
    def of(cls, evidence: Evidence) -> Predictor:
        """Fit the parameters, then the errors that remain."""
        fitted = fit(evidence.layouts, evidence.machines, evidence.time_s)
        step_s = step_time(evidence.layouts, evidence.machines, fitted).step_s
        return cls(fitted, Residuals.of(evidence.layouts, evidence.machines, np.log(evidence.time_s / step_s)))

    def predict(self, layouts: Layouts, machines: Machines) -> tuple[StepTime, Values]:
        """Each row's phases, and the standard deviation of the log of their sum.

        A correction stretches all phases of a row alike.
        """
        phases = step_time(layouts, machines, self.fitted)
        correction, deviation = self.residuals.correction(layouts, machines)
        stretch = np.exp(correction)
        return StepTime(**{each.name: getattr(phases, each.name) * stretch for each in fields(phases)}), deviation


LENGTHS = {
    "hidden": 0.5,
    "sequence": 0.5,
    "micro_batch": 0.5,
    "tensor": 0.5,
    "layers": 3.0,
    "pipeline": 1.5,
    "data": 3.0,
    "global_batch": 3.0,
}
"""Over how many doublings of each quantity errors are alike. The first four decide which kernels run.
Devices of twice the speed, in products or in memory, share little."""
ERROR_SIZE = 0.1
"""Standard deviation of the formulas' log error."""
REPEAT_SIZE = 0.02
"""Standard deviation of what two measurements of one layout differ by, and of what is left unexplained."""

LARGEST_ERROR = 0.3
"""Larger log errors are taken for disturbed measurements, and count as this."""


@dataclass(frozen=True)
class Residuals:
    """The rows of a fit, and how each of them bends what is near."""

    features: Values
    triangle: Values
    """Cholesky factor of the rows' covariance."""
    weights: Values

    @classmethod
    def of(cls, layouts: Layouts, machines: Machines, log_errors: Values) -> Residuals:
        """From the log of measured ÷ predicted of a fit's own rows."""
        from scipy.linalg import cho_solve

        features = _features(layouts, machines)
        covariance = _alike(features, features) + REPEAT_SIZE**2 * np.eye(len(features))
        triangle = np.asarray(np.linalg.cholesky(covariance), dtype=np.float64)
        return cls(features, triangle, cho_solve((triangle, True), np.clip(log_errors, -LARGEST_ERROR, LARGEST_ERROR)))

    def correction(self, layouts: Layouts, machines: Machines) -> tuple[Values, Values]:
        """What to add to the log of each row's predicted time, and its standard deviation afterwards."""
        from scipy.linalg import solve_triangular

        near = _alike(_features(layouts, machines), self.features)
        explained = solve_triangular(self.triangle, near.T, lower=True, check_finite=False)
        return near @ self.weights, np.sqrt(np.maximum(ERROR_SIZE**2 - (explained**2).sum(0), 0.0) + REPEAT_SIZE**2)


def _features(layouts: Layouts, machines: Machines) -> Values:
    columns = [np.log2(getattr(layouts, name)) / length for name, length in LENGTHS.items()]
    columns += [np.log2(machines.flops_per_s), np.log2(machines.memory_bytes_per_s)]
    # Alternatives, not sizes: rows that differ in one of them have nothing in common.
    kinds = [10.0 * column for column in (layouts.recompute, layouts.sharded, layouts.fused_attention, layouts.fp8)]
    return np.stack([*columns, *kinds], axis=1)


def _alike(first: Values, second: Values) -> Values:
    """Covariance of the errors of two sets of rows: squared exponential."""
    squares = (first**2).sum(1)[:, None] + (second**2).sum(1) - 2.0 * first @ second.T
    result: Values = ERROR_SIZE**2 * np.exp(-0.5 * np.maximum(squares, 0.0))
    return result


UNTESTED = 1.5
"""How much wider intervals get where rows are extrapolated and no fit could be tried on such: an assumption."""
_RESPECTS = {"devices": "devices", "hidden": "width", "layers": "layers", "sequence": "sequence", "tensor": "tensor"}


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """Predicted steps, one element per row."""

    phases: StepTime
    low_s: Values
    """Lower end of the 90 % interval; NaN where too few rows could be left out."""
    high_s: Values
    extrapolates: list[list[str]]
    """In which respects a row lies outside of everything measured."""
    in_evidence: NDArray[np.bool_]
    """Rows that the evidence holds too: the fit that predicts them had not seen their fold."""


def predicted(known: Evidence, layouts: Layouts, machines: Machines) -> Predictions:
    """Each row's step by a fit that has not seen it.

    The intervals are those of fits that lack a fold, for all rows alike: their errors are what was tried.
    """
    fold_of_known, fold_of_asked = folds(known.layouts), folds(layouts)
    repeated = known.holds(layouts, machines)
    parts, scores = _blank(len(layouts)), np.full(len(known), np.nan)
    claimed: list[Values] = []
    for fold in range(FOLDS):
        inside = fold_of_known != fold
        if inside.all() or not inside.any():
            continue
        predictor = Predictor.of(known.take(inside))
        scores[~inside] = _scores(predictor, known.take(~inside))
        claimed.append(predictor.residuals.correction(layouts, machines)[1])
        _put(parts, predictor, layouts, machines, rows=repeated & (fold_of_asked == fold))
    _put(parts, Predictor.of(known), layouts, machines, rows=~repeated)
    deviation = parts.pop("deviation")
    if claimed:
        deviation = np.where(repeated, deviation, np.mean(claimed, axis=0))
    phases = StepTime(**parts)
    outside = _outside(layouts, machines, known)
    extrapolated = np.array([bool(each) for each in outside], dtype=bool)
    width = deviation * _widths(known, scores, extrapolated, layouts.devices > machines.devices_per_node)
    return Predictions(
        phases=phases,
        low_s=phases.step_s * np.exp(-width),
        high_s=phases.step_s * np.exp(width),
        extrapolates=outside,
        in_evidence=repeated,
    )


def _blank(rows: int) -> dict[str, Values]:
    return {name: np.zeros(rows) for name in (*(each.name for each in fields(StepTime)), "deviation")}


def _put(
    parts: dict[str, Values], predictor: Predictor, layouts: Layouts, machines: Machines, *, rows: NDArray[np.bool_]
) -> None:
    """Write what a fit says of some rows into the columns."""
    if rows.any():
        phases, deviation = predictor.predict(layouts.take(rows), machines.take(rows))
        for each in fields(phases):
            parts[each.name][rows] = getattr(phases, each.name)
        parts["deviation"][rows] = deviation


def _scores(predictor: Predictor, evidence: Evidence) -> Values:
    """Log errors in units of the standard deviation that the predictor claims."""
    phases, deviation = predictor.predict(evidence.layouts, evidence.machines)
    result: Values = np.log(evidence.time_s / phases.step_s) / deviation
    return result


def _widths(
    known: Evidence, scores: Values, extrapolated: NDArray[np.bool_], across_nodes: NDArray[np.bool_]
) -> Values:
    """Half of each row's interval of log time, in units of its standard deviation.

    Steps in one node and steps across nodes are judged by the errors of their own kind, where there are enough.
    """
    usual = half_width(scores[~np.isnan(scores)])
    if usual is None:
        return np.full(len(extrapolated), np.nan)
    across = (known.layouts.devices > known.machines.devices_per_node) & ~np.isnan(scores)
    far = half_width(scores[across])
    each = np.where(across_nodes, UNTESTED * usual if far is None else far, usual)
    largest = known.layouts.devices == known.layouts.devices.max()
    wide = UNTESTED * each
    if extrapolated.any() and FEWEST_ERRORS <= largest.sum() <= len(known) - FEWEST_ERRORS:
        unseen = half_width(_scores(Predictor.of(known.take(~largest)), known.take(largest)))
        wide = wide if unseen is None else np.maximum(each, unseen)
    result: Values = np.where(extrapolated, wide, each)
    return result


def _outside(layouts: Layouts, machines: Machines, known: Evidence) -> list[list[str]]:
    """In which respects each row is larger or smaller than everything measured, or on another machine."""
    found: list[list[str]] = [[] for _ in range(len(layouts))]
    for name, word in _RESPECTS.items():
        values, measured = getattr(layouts, name), getattr(known.layouts, name)
        for row in np.flatnonzero((values > measured.max()) | (values < measured.min())).tolist():
            found[row].append(word)
    hardware = set(zip(known.machines.flops_per_s, known.machines.network_bytes_per_s, strict=True))
    for row, pair in enumerate(zip(machines.flops_per_s, machines.network_bytes_per_s, strict=True)):
        if pair not in hardware:
            found[row].append("machine")
    return found


FOLDS = 5
"""Folds of the cross-validation."""
_KEY = (
    *("hidden", "layers", "heads", "vocabulary", "sequence", "global_batch", "micro_batch", "tensor", "pipeline"),
    *("data", "recompute", "sharded", "fused_attention"),
)
"""What a fold follows from; later columns of a layout don't move rows to other folds."""
LARGEST_FITTED = {"vtrain": 64, "llm_foundry": 8}
"""Extrapolation: fitted on at most so many devices, judged on more. vTrain: on one node and on 3.6 billion parameters
on 64 devices, judged on 18.4 billion on 256."""


def folds(layouts: Layouts) -> NDArray[np.int64]:
    """The fold of each row, by a hash of what was asked, never of what was measured or where the row stands.

    So rows that repeat a layout are always in one fold, and a row is in the same fold whatever file it is in.
    """
    rows = (layouts.row(i) for i in range(len(layouts)))
    keys = ("|".join(f"{name}={row[name]:g}" for name in _KEY) for row in rows)
    return np.array([int(hashlib.sha256(key.encode()).hexdigest()[:8], 16) % FOLDS for key in keys], dtype=np.int64)


def beyond(layouts: Layouts, largest: int) -> NDArray[np.bool_]:
    """Rows on more devices than a fit may see."""
    return layouts.devices > largest
