"""Losses that users' programs print, as curves over their steps, and where the curves of two sides part."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

import polars as pl

from analysis.comparison.campaign import campaign
from analysis.comparison.summary import displayed
from analysis.comparison.work import IS_PROGRAM
from analysis.metrics.epochs import AS_TEXT, numbered
from analysis.runs.reader import once

if TYPE_CHECKING:
    from analysis.runs.reader import Runs

UNLIKE = 0.05
"""Relative difference of two sides' printed losses from which their curves part."""
_OF_RUN = ("run_id", "group", "configuration", "variant", "strategy", "repeat", "disturbed")


@once
def printed(runs: Runs) -> pl.DataFrame:
    """One row per loss that a displayed run's program printed: the run's names, `epoch` (window), `step` within it,
    `program_step` (from 1) and `loss`.
    """
    rows = displayed(runs).filter(IS_PROGRAM).select(_OF_RUN)
    taken = numbered(runs, "epochs", "epoch", "steps").with_columns(AS_TEXT).sort("run_id", "epoch")
    # The first window begins at the end of the first step.
    begins = taken.with_columns(begins=1 + pl.col("steps").cum_sum().over("run_id") - pl.col("steps")).drop("steps")
    losses = numbered(runs, "losses", "epoch", "step", "train_loss").with_columns(AS_TEXT)
    found = rows.join(losses, on="run_id", maintain_order="left_right").join(begins, on=["run_id", "epoch"])
    places = found.with_columns(program_step=pl.col("begins") + pl.col("step"), loss="train_loss")
    return places.select(*_OF_RUN, "epoch", "step", "program_step", "loss").drop_nulls("loss")


class Parting(NamedTuple):
    """Two sides whose curves part, and stay apart until the end."""

    name: str
    other: str
    """The configuration that it is compared with."""
    apart: float
    """Relative difference in the last window: of the means over its steps, median over repeats."""
    step: int
    """First step of the window from which on they are apart."""


@once
def partings(runs: Runs) -> list[Parting]:
    """Of configurations from what they are compared with, where both printed losses at the same steps of one repeat."""
    known, found = printed(runs), list[Parting]()
    for each, _ in campaign(runs).others:
        one = campaign(runs).baseline_of(each)
        sides = [known.filter(group=each.group, configuration=str(side)) for side in (one, each)]
        both = sides[0].join(sides[1], on=("repeat", "epoch", "step"))
        # Ranks print the losses of their own samples: single ones differ by chance.
        means = both.group_by("epoch", "repeat").agg(pl.col("loss", "loss_right").mean(), pl.col("program_step").min())
        largest = pl.max_horizontal(pl.col("loss").abs(), pl.col("loss_right").abs())
        apart = ((pl.col("loss_right") - pl.col("loss")).abs() / largest).fill_nan(0.0).median()
        windows = means.group_by("epoch").agg(apart.alias("apart"), pl.col("program_step").min())
        last = windows.sort("epoch", descending=True).select("apart", "program_step").rows()
        if unlike := list(itertools.takewhile(lambda window: window[0] > UNLIKE, last)):
            found.append(Parting(each.name, str(one), unlike[0][0], unlike[-1][1]))
    return found
