"""Figures by name: each is declared in a module here (`memory = Bars(…)`; of a kind of its own, `mine = Own(…)`), those
that only reproductions of publications need in `analysis/claims/figures`. A new one is in the next report.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from analysis.figures.chart import Chart
from parallelbench.errors import ConfigError, choices

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import altair as alt
    import polars as pl

    from analysis.runs.reader import Runs

_OF_PUBLICATIONS = "analysis.claims.figures"


@dataclass(frozen=True)
class Figure:
    """A figure of a report."""

    name: str
    title: str
    chart: alt.FacetChart | None
    """None: there is nothing to show, and `finding` says why."""
    finding: str
    """What the figure shows, in one sentence with this sweep's numbers."""
    remark: str = ""
    """What of it is drawn, and what its marks mean: the chart's subtitle, and the finding's second line."""
    values: pl.DataFrame | None = None
    """The numbers behind it as a small table, of all that it could draw: group, panel, configuration, further columns
    that are called as people read them, the median over repeats (called what it is, with its unit), lowest, highest and
    repeats.
    """


def draw(runs: Runs, names: Sequence[str] = ()) -> list[Figure]:
    """Draw the figures of these names, by default all that such runs have, in their order, then in that of their names.

    Raises `ConfigError` for a name that is none.
    """
    return list(drawn(runs, names))


def drawn(runs: Runs, names: Sequence[str] = ()) -> Iterator[Figure]:
    """The same, each once it is asked for."""
    known = _known()
    for name in names:
        if name not in known:
            raise ConfigError(f"{name} is no figure: {choices(name, sorted(known))}")
    chosen = names or [name for name in sorted(known) if known[name].drawn_for(runs)]
    from altair.utils.schemapi import debug_mode

    # Else each part of a chart is held against Vega-Lite's schema over and over. Tests do that.
    with debug_mode(False):
        for name in sorted(chosen, key=lambda name: known[name].order):
            yield _drawn(name, known[name], runs)


def _known() -> dict[str, Chart]:
    found: dict[str, Chart] = {}
    own, of_publications = (__name__, __path__), (_OF_PUBLICATIONS, importlib.import_module(_OF_PUBLICATIONS).__path__)
    for package, folders in (own, of_publications):
        for each in pkgutil.iter_modules(folders):
            module = importlib.import_module(f"{package}.{each.name}")
            found |= {name: value for name, value in vars(module).items() if isinstance(value, Chart)}
    return found


def _drawn(name: str, known: Chart, runs: Runs) -> Figure:
    drawing, finding = known.drawing(runs), known.finding(runs)
    if drawing is None:
        return Figure(name, known.title, None, finding)
    # On the page the title is a heading, and the subtitle would be lost.
    first, *others = finding.split("\n")
    told = "\n".join([first, *filter(None, [drawing.remark]), *others])
    return Figure(name, known.title, drawing.chart, told, drawing.remark, drawing.values)


def specification(chart: alt.FacetChart) -> dict[str, Any]:
    """The chart as Vega-Lite, without the address of its schema."""
    spec: dict[str, Any] = chart.to_dict(validate=False)
    del spec["$schema"]
    return spec | {"datasets": {name: list(rows) for name, rows in spec["datasets"].items()}}


def svg(spec: dict[str, Any]) -> str:
    """A specification as an SVG image."""
    import vl_convert

    image: str = vl_convert.vegalite_to_svg(spec)
    return image
