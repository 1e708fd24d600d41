"""Losses that users' programs print, as curves over their steps, and where the curves of two sides part."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

import polars as pl

from analysis import text
from analysis.comparison.campaign import campaign
from analysis.comparison.summary import displayed
from analysis.comparison.work import IS_PROGRAM
from analysis.metrics.epochs import AS_TEXT, numbered
from analysis.runs.reader import once
from parallelbench.errors import count_of

if TYPE_CHECKING:
    from analysis.runs.reader import Runs

UNLIKE = 0.05
"""Relative difference of two sides' printed losses from which their curves part."""
ALIKE = 0.0005
"""Relative difference below which no printed digit of a percentage shows one."""
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
    found = []
    for name, other, windows in _apart(runs):
        if unlike := list(itertools.takewhile(lambda window: window[0] > UNLIKE, windows)):
            found.append(Parting(name, other, unlike[0][0], unlike[-1][1]))
    return found


def how_near(runs: Runs) -> str:
    """Of losses that don't part, how near they are, as a sentence's end."""
    count = printed(runs).select("group", "configuration").n_unique()
    what = f"the losses that {count_of(count, 'configuration')} print{'s' if count == 1 else ''}"
    known = [apart for _, _, windows in _apart(runs) for apart, _ in windows]
    if not known:
        return f"{what} are compared with no other's"
    return f"{what} are alike" if max(known) < ALIKE else f"{what} end within {text.percent(UNLIKE)} of each other"


@once
def _apart(runs: Runs) -> list[tuple[str, str, list[tuple[float, int]]]]:
    """A configuration, what it is compared with, and of each window, the last one first, how far their means are apart
    and its first step.
    """
    known, found = printed(runs), []
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
        found.append((each.name, str(one), last))
    return found
