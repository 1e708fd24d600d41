"""Figure 5 of publication 003: rates and times of the first two epochs over devices, and over sizes of the set."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import polars as pl

from analysis import text
from analysis.claims.figures import is_reproduction
from analysis.comparison.summary import displayed
from analysis.comparison.work import groups_across, natural
from analysis.figures.chart import NAMES, measured, rests_on_disturbed
from analysis.figures.finding import Sentence
from analysis.figures.lines import SAMPLES_PER_S, Across, Axis, Lines, against
from analysis.metrics.epochs import AS_TEXT, numbered_epochs

if TYPE_CHECKING:
    from analysis.runs.reader import Runs

_SAMPLES = Across("train_samples", ("data.copies", "data.train_samples"), "Training samples")
throughput_data = against(  # figure 5e
    _SAMPLES,
    order=12,
    title="Throughput against the size of the training set",
    y=SAMPLES_PER_S,
    drawn_for=is_reproduction,
)

FIRST, SECOND = "First epoch", "Second epoch"


def _epoch_rates(runs: Runs) -> pl.DataFrame:
    """A row per displayed run and epoch, of the first two, in works that were measured on several numbers of devices;
    none where no run has a second epoch. `which` is the first or the second epoch.
    """
    marked = {f"disturbed_{which}": rests_on_disturbed(runs, f"{which}_epoch_time_s") for which in ("first", "second")}
    rows = displayed(runs).select("run_id", *NAMES, panel="group", **marked)
    rows = rows.filter(pl.col("devices").n_unique().over("group") > 1)
    epoch, warm = pl.col("epoch"), ~pl.col("warm_up")
    which = pl.when(epoch == 2, warm).then(pl.lit(SECOND)).when(epoch == 1, ~warm).then(pl.lit(FIRST))
    rate = "epoch_throughput_samples_per_s"
    epochs = numbered_epochs(runs).select("run_id", "epoch", "warm_up", rate).filter(epoch <= 2)
    epochs = epochs.select(AS_TEXT, rate, which=which, value=rate).drop_nulls()
    joined = rows.join(epochs, on="run_id", maintain_order="left_right")
    own = pl.when(pl.col("which") == SECOND).then("disturbed_second").otherwise("disturbed_first")
    joined = joined.with_columns(disturbed=own).drop("run_id", *marked)
    joined = joined.filter((pl.col("which") == SECOND).any())
    return joined.sort(natural("group"), pl.col("which") != SECOND, maintain_order=True)


def _first_and_second(runs: Runs) -> pl.DataFrame:
    rate, which = pl.col("value"), pl.col("which")
    return (
        _epoch_rates(runs)
        .group_by("group", "configuration", maintain_order=True)
        .agg(
            pl.col("disturbed").any(),
            first=rate.filter(which == FIRST).median(),
            second=rate.filter(which == SECOND).median(),
        )
    )


_of_devices = partial(Lines, drawn_for=is_reproduction, x=Axis("devices", "Devices"), own_axes=True, origins=True)
epoch_rates = _of_devices(  # figures 5a and 5d
    order=3,
    title="Samples per second of the first and the second epoch",
    rows=_epoch_rates,
    by="which",
    y=Axis("zero", "Samples per second"),
    widths={SECOND: 2.6, FIRST: 0.9},
    finding=Sentence(
        rows=_first_and_second,
        by="second",
        descending=True,
        each=lambda row: (
            f"{text.number(row['second'])} with {row['configuration']} (first epoch: {text.number(row['first'])})"
        ),
        whole="in the second epoch, samples per second are {}",
        nothing="No kind of work that counts has a second epoch on several numbers of devices.",
    ),
)


def _second_epochs(runs: Runs) -> pl.DataFrame:
    """A row per displayed run of works that differ in the size of the training set only, and were measured on several
    numbers of devices.
    """
    works = pl.col("run_id").replace_strict(groups_across(runs, _SAMPLES.roots), return_dtype=pl.String)
    rows = measured(runs, "second_epoch_time_s", "train_samples", panel=works)
    several = [pl.col(name).n_unique().over("panel") > 1 for name in ("train_samples", "devices")]
    return rows.filter(*several).sort(natural("panel"), "train_samples", maintain_order=True)


def _smallest_and_largest_set(runs: Runs) -> pl.DataFrame:
    """The second epoch's time with either, per configuration that was measured with both."""
    size, time = pl.col("train_samples"), pl.col("value")
    ends = (
        _second_epochs(runs)
        .group_by("panel", "configuration", maintain_order=True)
        .agg(
            pl.col("group").first(),
            pl.col("disturbed").any(),
            small=size.min(),
            large=size.max(),
            of_small=time.filter(size == size.min()).median(),
            of_large=time.filter(size == size.max()).median(),
        )
    )
    return ends.filter(pl.col("small") < pl.col("large"))


# What devices save shows beside what they save of a smaller set.
epoch_time_data = _of_devices(  # figure 5c
    order=12,
    title="Second epoch by devices and size of the training set",
    rows=_second_epochs,
    by="train_samples",
    y=Axis("zero", "Second epoch (s)"),
    remark="Beside the lines: samples of the training set.",
    finding=Sentence(
        rows=_smallest_and_largest_set,
        by="of_large",
        each=lambda row: (
            f"{text.number(row['of_small'])} to {text.seconds(row['of_large'])} with {row['configuration']} "
            f"({row['small']:,} to {row['large']:,} samples)"
        ),
        whole="a second epoch takes {}",
        group="panel",
        nothing="No kind of work that counts has a second epoch of several sizes of the training set.",
    ),
)
