"""Losses that users' programs print, against their steps. What they compute is theirs: no curve is judged."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from analysis import text
from analysis.comparison.losses import how_near, partings, printed
from analysis.figures.chart import panel
from analysis.figures.lines import Axis, Lines

if TYPE_CHECKING:
    from analysis.runs.reader import Runs

_MOST_STEPS = 100
"""Most points of a curve: of more steps, means over equally many."""


def _curves(runs: Runs) -> pl.DataFrame:
    losses = printed(runs)
    if losses.is_empty():
        return losses
    together = -(-int(losses["program_step"].max()) // _MOST_STEPS)  # type: ignore[arg-type]
    first = (pl.col("program_step") - 1) // together * together + 1
    keys = ("group", "configuration", "variant", "strategy", "repeat", "disturbed")
    means = losses.group_by("run_id", *keys, x=first, maintain_order=True).agg(value=pl.col("loss").mean())
    return panel(means.drop("run_id"), "Of single steps" if together == 1 else f"Means over {together} steps")


def _finding(runs: Runs) -> str:
    parted = [f"{each.name} from {each.other} from step {each.step:,} on" for each in partings(runs)]
    if parted:
        return f"Curves part: {text.listed(parted)}."
    if printed(runs).is_empty():
        return "No program printed a loss that program.loss_pattern finds."
    return text.sentence(how_near(runs))


printed_losses = Lines(
    order=5,
    title="Losses that the programs print",
    rows=_curves,
    x=Axis("linear", "Step of the program", whole=True),
    y=Axis("linear", "Printed loss"),
    finding=_finding,
    points=False,
    drawn_for=lambda runs: bool(printed(runs).height),
)
