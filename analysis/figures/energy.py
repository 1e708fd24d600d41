"""Energy of the GPUs by strategy and device count: of an epoch, and until the target accuracy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import polars as pl

from analysis import text
from analysis.comparison.configurations import summary
from analysis.comparison.ratio import SpeedVerdict
from analysis.figures._chart import bars, ranked, timed

if TYPE_CHECKING:
    import altair as alt

    from analysis.runs.reader import Runs

ORDER = 10
TITLE = "Energy by strategy and device count"


def figure(runs: Runs) -> alt.FacetChart | None:
    """Energy of all GPUs of a run in J; None where none was measured."""
    target = pl.col("accuracy_target").map_elements(
        lambda share: f", {text.accuracy(share)} test accuracy", return_dtype=pl.String
    )
    data = timed(
        runs,
        {
            "gpu_energy_per_epoch_j": "An epoch (median of the later ones)",
            "energy_to_accuracy_j": pl.format("To the target{}", target.fill_null("")),
        },
    )
    if data.is_empty():
        return None
    labels = pl.col("median").map_elements(_joules, return_dtype=pl.String)
    columns = ("gpu_energy_per_epoch_j", "energy_to_accuracy_j")
    return bars(data, columns=columns, title=TITLE, unit="Energy of all GPUs (J)", labels=labels)


def _joules(energy_j: float) -> str:
    return f"{text.number(energy_j)} J"


def finding(runs: Runs) -> str:
    """Which configuration needs least per sample, and what the others need beside one device."""
    measured = summary(runs).drop_nulls("gpu_energy_per_sample_j")
    return ranked(runs, measured, _costs) or "No run that counts measured the energy of its GPUs."


def _costs(rows: pl.DataFrame) -> str:
    shown = [_cost(row) for row in rows.sort("gpu_energy_per_sample_j").iter_rows(named=True)]
    return f"a sample costs {text.listed(shown, sep='; ')}"


def _cost(row: dict[str, Any]) -> str:
    energy = f"{text.number(row['gpu_energy_per_sample_j'])} J with {row['configuration']}"
    if row["energy_ratio"] is None or row["verdict"] == SpeedVerdict.BASELINE:
        return energy
    return f"{energy}, {text.ratio(row, 'energy_ratio')} times that of one device"
