"""Measured steps with their machines, and predictions that rest on them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from analysis.advisor.fitting import fit
from analysis.advisor.intervals import FEWEST, SHARE, half_width
from analysis.advisor.layouts import Layouts
from analysis.advisor.machines import Machines
from analysis.advisor.splits import FOLDS, folds
from analysis.advisor.step_model import StepTime, step_time

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from analysis.advisor.layouts import Values
    from analysis.advisor.measurements import Source
    from analysis.advisor.parameters import Fitted

_FILES: dict[Source, tuple[str, ...]] = {
    "vtrain": ("vtrain_single_node.csv", "vtrain_multi_node.csv"),
    "llm_foundry": ("llm_foundry_a100_40gb.csv",),
}
UNTESTED = 2.0
"""How much wider an interval gets where rows are extrapolated and no fit could be tried on such: an assumption."""


def shipped_files(source: Source) -> list[Path]:
    """The published measurements that come with the suite."""
    folder = Path(str(resources.files("analysis"))) / "advisor" / "data"
    return [folder / name for name in _FILES[source]]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Steps that were measured."""

    layouts: Layouts
    machines: Machines
    time_s: Values

    def take(self, rows: NDArray[np.bool_]) -> Evidence:
        """Only these rows."""
        return Evidence(layouts=self.layouts.take(rows), machines=self.machines.take(rows), time_s=self.time_s[rows])

    def fitted(self) -> Fitted:
        """The parameters that explain it."""
        return fit(self.layouts, self.machines, self.time_s)


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """Predicted steps, one element per row."""

    phases: StepTime
    low_s: Values
    """Lower end of the 90 % interval; NaN where too few rows could be left out."""
    high_s: Values
    extrapolates: list[list[str]]
    """In which respects a row lies outside of everything measured."""
    excluded: NDArray[np.bool_]
    """Rows that the evidence holds too: the fit that predicts them had not seen their fold."""


def joined_evidence(parts: Sequence[Evidence]) -> Evidence:
    """The rows of all."""

    def stacked(kind: type[Layouts] | type[Machines], values: Sequence[Layouts | Machines]) -> dict[str, Values]:
        return {each.name: np.concatenate([getattr(v, each.name) for v in values]) for each in fields(kind)}

    return Evidence(
        layouts=Layouts(**stacked(Layouts, [part.layouts for part in parts])),
        machines=Machines(**stacked(Machines, [part.machines for part in parts])),
        time_s=np.concatenate([part.time_s for part in parts]),
    )


def predicted(known: Evidence, layouts: Layouts, machines: Machines) -> Predictions:
    """Each row's step by a fit that has not seen it, with the interval that such fits deserve."""
    fold_of_known, fold_of_asked = folds(known.layouts), folds(layouts)
    seen = _is_among(layouts, machines, known)
    off_in_folds, parts = np.zeros(len(known.layouts)), {}
    for fold in range(FOLDS):
        inside = fold_of_known != fold
        if inside.all() or not inside.any():
            continue
        fitted = known.take(inside).fitted()
        off_in_folds[~inside] = _log_errors(fitted, known.take(~inside))
        parts[fold] = fitted
    whole = known.fitted()
    columns = {name: np.full(len(layouts), value) for name, value in whole.items()}
    for fold, fitted in parts.items():
        rows = seen & (fold_of_asked == fold)
        for name, value in fitted.items():
            columns[name][rows] = value
    phases = step_time(layouts, machines, columns)
    outside = _outside(layouts, machines, known)
    width = _half_widths(known, off_in_folds, np.array([bool(each) for each in outside], dtype=bool))
    return Predictions(
        phases=phases,
        low_s=phases.step_s * np.exp(-width),
        high_s=phases.step_s * np.exp(width),
        extrapolates=outside,
        excluded=seen,
    )


def _log_errors(fitted: Fitted, evidence: Evidence) -> Values:
    result: Values = np.log(evidence.time_s / step_time(evidence.layouts, evidence.machines, fitted).step_s)
    return result


def _half_widths(known: Evidence, off_in_folds: Values, extrapolated: NDArray[np.bool_]) -> Values:
    """Half of each row's interval of log time."""
    usual = half_width(off_in_folds, SHARE)
    if usual is None:
        return np.full(len(extrapolated), np.nan)
    devices = known.layouts.devices
    largest = devices == devices.max()
    wide = UNTESTED * usual
    if FEWEST <= largest.sum() <= len(devices) - FEWEST:
        unseen = half_width(_log_errors(known.take(~largest).fitted(), known.take(largest)), SHARE)
        wide = max(usual, unseen or wide)
    return np.where(extrapolated, wide, usual)


def _is_among(layouts: Layouts, machines: Machines, known: Evidence) -> NDArray[np.bool_]:
    """Rows whose layout and machine the evidence holds."""

    def keys(these: Layouts, those: Machines) -> list[tuple[float, ...]]:
        columns = [getattr(each, field.name) for each in (these, those) for field in fields(each)]
        return list(zip(*(column.tolist() for column in columns), strict=True))

    held = set(keys(known.layouts, known.machines))
    return np.array([key in held for key in keys(layouts, machines)], dtype=bool)


_RESPECTS = {"devices": "devices", "hidden": "width", "layers": "layers", "sequence": "sequence", "tensor": "tensor"}


def _outside(layouts: Layouts, machines: Machines, known: Evidence) -> list[list[str]]:
    """In which respects each row is larger or smaller than everything measured, or on another machine."""
    found: list[list[str]] = [[] for _ in range(len(layouts))]
    for name, word in _RESPECTS.items():
        values, measured = getattr(layouts, name), getattr(known.layouts, name)
        for row in np.flatnonzero((values > measured.max()) | (values < measured.min())).tolist():
            found[row].append(word)
    hardware = {(a, b) for a, b in zip(known.machines.flops_per_s, known.machines.network_bytes_per_s, strict=True)}
    for row, pair in enumerate(zip(machines.flops_per_s, machines.network_bytes_per_s, strict=True)):
        if pair not in hardware:
            found[row].append("machine")
    return found
