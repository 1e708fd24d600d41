"""Samples per second of the first and of the second epoch against devices, as in figures 5a and 5d of publication 003
(see docs/experiments.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from analysis import text
from analysis.comparison.configurations import displayed
from analysis.comparison.work import natural
from analysis.figures._chart import lines_over_devices, ranked
from analysis.metrics.epochs import AS_TEXT, numbered_epochs

if TYPE_CHECKING:
    import altair as alt

    from analysis.runs.reader import Runs

ORDER = 3
TITLE = "Samples per second of the first and the second epoch"
FIRST, SECOND = "First epoch", "Second epoch"
_WIDTHS = {SECOND: 2.6, FIRST: 0.9}


def rates(runs: Runs) -> pl.DataFrame:
    """A row per displayed run and epoch, of the first two, in works that were measured on several numbers of devices.

    Columns: group, configuration, variant, strategy, framework, devices, repeat, disturbed, which (first or second
    epoch), epoch_throughput_samples_per_s.
    """
    names = ("group", "configuration", "variant", "strategy", "devices", "repeat", "disturbed")
    rows = displayed(runs).select("run_id", *names, pl.col("framework").fill_null("torch"))
    rows = rows.filter(pl.col("devices").n_unique().over("group") > 1)
    epoch, warm = pl.col("epoch"), ~pl.col("warm_up")
    which = pl.when(epoch == 2, warm).then(pl.lit(SECOND)).when(epoch == 1, ~warm).then(pl.lit(FIRST))
    rate = "epoch_throughput_samples_per_s"
    epochs = numbered_epochs(runs).filter(epoch <= 2).select(AS_TEXT, rate, which=which).drop_nulls()
    joined = rows.join(epochs, on="run_id", maintain_order="left_right").drop("run_id")
    return joined.sort(natural("group"), pl.col("which") != SECOND, maintain_order=True)


def figure(runs: Runs) -> alt.FacetChart | None:
    """Two lines per variant: thick, the second epoch; thin, the first. None where no work has several numbers of
    devices, or no run a second epoch.
    """
    data = rates(runs)
    if SECOND not in data["which"]:
        return None
    data = data.with_columns(panel=pl.col("group"))
    rate = "epoch_throughput_samples_per_s"
    return lines_over_devices(data, rate, by="which", title=TITLE, unit="Samples per second", widths=_WIDTHS)


def finding(runs: Runs) -> str:
    """How many samples each configuration processes a second in its second epoch, and in its first."""
    data = rates(runs)
    of = {"second": SECOND, "first": FIRST}
    medians = (
        pl.col("epoch_throughput_samples_per_s").filter(pl.col("which") == which).median().alias(name)
        for name, which in of.items()
    )
    rows = data.group_by("group", "configuration", maintain_order=True).agg(*medians, pl.col("disturbed").any())
    nothing = "No kind of work that counts has a second epoch on several numbers of devices."
    return ranked(runs, rows.drop_nulls("second"), _told) or nothing


def _told(rows: pl.DataFrame) -> str:
    shown = [
        f"{text.number(row['second'])} with {row['configuration']} (first epoch: {text.number(row['first'])})"
        for row in rows.sort("second", descending=True, maintain_order=True).iter_rows(named=True)
    ]
    return f"in the second epoch, samples per second are {text.listed(shown, sep='; ')}"
