"""The phases of a step by configuration, from the pass after the last epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import polars as pl

from analysis import text
from analysis.comparison.configurations import displayed
from analysis.figures._chart import panel, per_group, stacked_bars
from analysis.metrics import PHASES, phase_times
from analysis.text import DISTURBED_MARK

if TYPE_CHECKING:
    import altair as alt

    from analysis.runs.reader import Runs

ORDER = 10
TITLE = "What a step is spent on"
_NAMES = {
    "data_wait": ("waiting for data", "#999999"),
    "host_to_device": ("host to device", "#f0e442"),
    "forward": ("forward", "#56b4e9"),
    "backward": ("backward", "#0072b2"),
    "communication": ("exposed communication", "#d55e00"),
    "bubble": ("bubble", "#e69f00"),
    "optimizer": ("optimizer", "#009e73"),
    "other": ("other", "#4d4d4d"),
}


def figure(runs: Runs) -> alt.FacetChart | None:
    """Milliseconds per step, stacked by phase, one bar per configuration; None where nothing was attributed."""
    measured = _per_configuration(runs)
    if measured.is_empty():
        return None
    total = pl.col("step_time_s") * 1e3
    times = {name: pl.col(f"{phase}_s") * 1e3 for phase, (name, _) in _NAMES.items()}
    mark = pl.when("disturbed").then(pl.lit(DISTURBED_MARK)).otherwise(pl.lit(""))
    label = total.map_elements(lambda value: f"{text.number(value)} ms", return_dtype=pl.String) + mark
    rows = measured.select("group", "configuration", "disturbed", total=total, label=label, **times)
    return stacked_bars(
        panel(rows, "Mean over ranks, steps and repeats"),
        dict(_NAMES.values()),
        part="phase",
        title=TITLE,
        axis="Time per step (ms)",
        unit="ms per step",
    )


def _per_configuration(runs: Runs) -> pl.DataFrame:
    """Means over repeats, one row per configuration; a phase that no run of it has is null."""
    times = [f"{phase}_s" for phase in PHASES]
    return (
        displayed(runs)
        .join(phase_times(runs), on="run_id", maintain_order="left")
        .group_by("group", "configuration", maintain_order=True)
        .agg(pl.col("step_time_s", *times).mean(), pl.col("disturbed").any())
    )


def finding(runs: Runs) -> str:
    """What takes most of a step, and how much of it is waiting for others."""
    spent = per_group(_per_configuration(runs), _shares)
    if not spent:
        return "No run that counts was attributed: measure.attribution_steps=20 says what its steps are spent on."
    return f"{spent}\nMeasured in steps of their own after the last epoch, which enter no other figure."


def _shares(rows: pl.DataFrame) -> str:
    return f"of a step, {text.listed([_spent(row) for row in rows.iter_rows(named=True)], sep='; ')}"


def _spent(row: dict[str, Any]) -> str:
    shares = {phase: row[f"{phase}_s"] / row["step_time_s"] for phase in PHASES if row[f"{phase}_s"] is not None}
    largest = max(shares, key=lambda phase: shares[phase])
    named = [largest, *(phase for phase in ("communication", "bubble") if phase in shares and phase != largest)]
    return (
        f"{row['configuration']} spends {text.listed([f'{text.percent(shares[p])} on {_NAMES[p][0]}' for p in named])}"
    )
