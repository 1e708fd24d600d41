"""How figures show runs that others disturbed."""

from __future__ import annotations

from typing import Any

import altair as alt
import polars as pl

from analysis.cells import DISTURBED_MARK

DISTURBED = f"Paler, hollow or marked {DISTURBED_MARK}: others disturbed these runs. They are compared with nothing."
HOLLOW: Any = alt.condition("datum.disturbed", alt.value(0.0), alt.value(0.45))
"""How filled a point of lines is: disturbed runs have none."""


def disturbed(data: pl.DataFrame) -> pl.Series:
    """Of each row, whether others disturbed its run; rows of no run were not."""
    known = data["disturbed"] if "disturbed" in data.columns else pl.repeat(False, data.height, eager=True)
    return known.fill_null(False)


def pale(value: float) -> Any:
    """An opacity, or less of it for disturbed runs."""
    return alt.condition("datum.disturbed", alt.value(value / 2), alt.value(value))


def mark(data: pl.DataFrame) -> pl.Series:
    """What stands behind the label of each row."""
    return disturbed(data).replace_strict({True: DISTURBED_MARK, False: ""}, return_dtype=pl.String)


SHAPES = ("circle", "triangle-up", "square", "diamond", "cross", "triangle-down")
"""By number of devices, the fewest first."""


def shapes(data: pl.DataFrame, legend: alt.Legend) -> alt.Shape:
    """A shape for each number of devices."""
    of = dict(data.select("configuration", "devices").unique(maintain_order=True).rows())
    levels = sorted(set(of.values()))
    shapes = [SHAPES[levels.index(devices) % len(SHAPES)] for devices in of.values()]
    return alt.Shape("configuration:N", scale=alt.Scale(domain=list(of), range=shapes), legend=legend)
