"""Predictions by fits that have not seen what they predict, with intervals that such fits deserve."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from analysis.advisor.intervals import FEWEST, half_width
from analysis.advisor.predictor import Predictor
from analysis.advisor.splits import FOLDS, folds
from analysis.advisor.step_model import StepTime

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from analysis.advisor.evidence import Evidence
    from analysis.advisor.layouts import Layouts, Values
    from analysis.advisor.machines import Machines

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
    if extrapolated.any() and FEWEST <= largest.sum() <= len(known) - FEWEST:
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
