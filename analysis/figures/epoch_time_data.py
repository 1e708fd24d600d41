"""Time of the second epoch against devices, all sizes of the training set on one axis, as in figure 5c of publication
003 (see docs/experiments.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from analysis import text
from analysis.comparison.configurations import displayed
from analysis.comparison.work import groups_across, natural
from analysis.figures._chart import lines_over_devices, ranked

if TYPE_CHECKING:
    import altair as alt

    from analysis.runs.reader import Runs

ORDER = 12
TITLE = "Second epoch by devices and size of the training set"
_KEYS = ("data.copies", "data.train_samples")


def times(runs: Runs) -> pl.DataFrame:
    """A row per displayed run of works that differ in the size of the training set only, and were measured on several
    numbers of devices.

    Columns: panel, group, configuration, variant, strategy, framework, devices, repeat, disturbed, train_samples,
    second_epoch_time_s.
    """
    works = groups_across(runs, _KEYS)
    names = ("group", "configuration", "variant", "strategy", "devices", "repeat", "disturbed")
    rows = displayed(runs).select(
        pl.col("run_id").replace_strict(works, return_dtype=pl.String).alias("panel"),
        *names,
        pl.col("framework").fill_null("torch"),  # results of before there were others have none
        "train_samples",
        "second_epoch_time_s",
    )
    several = [pl.col(name).n_unique().over("panel") > 1 for name in ("train_samples", "devices")]
    rows = rows.drop_nulls("second_epoch_time_s").filter(*several)
    return rows.sort(natural("panel"), "train_samples", maintain_order=True)


def figure(runs: Runs) -> alt.FacetChart | None:
    """A line per variant and size, in seconds: what devices save shows beside what they save of a smaller set.

    None where no size differs, or nothing has a second epoch.
    """
    data = times(runs)
    if data.is_empty():
        return None
    unit = "Second epoch (s); samples beside the lines"
    return lines_over_devices(data, "second_epoch_time_s", by="train_samples", title=TITLE, unit=unit)


def finding(runs: Runs) -> str:
    """How long the second epoch of the smallest and of the largest set takes, per configuration."""
    rows = times(runs)
    size, time = pl.col("train_samples"), pl.col("second_epoch_time_s")
    ends = rows.group_by("panel", "configuration", maintain_order=True).agg(
        pl.col("group").first(),
        pl.col("disturbed").any(),
        small=size.min(),
        large=size.max(),
        of_small=time.filter(size == size.min()).median(),
        of_large=time.filter(size == size.max()).median(),
    )
    nothing = "No kind of work that counts has a second epoch of several sizes of the training set."
    return ranked(runs, ends.filter(pl.col("small") < pl.col("large")), _told, by="panel") or nothing


def _told(rows: pl.DataFrame) -> str:
    shown = [
        f"{text.number(row['of_small'])} to {text.seconds(row['of_large'])} with {row['configuration']} "
        f"({row['small']:,} to {row['large']:,} samples)"
        for row in rows.sort("of_large", maintain_order=True).iter_rows(named=True)
    ]
    return f"a second epoch takes {text.listed(shown, sep='; ')}"
