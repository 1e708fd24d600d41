"""Figures by name: each is declared in a module here (`memory = Bars(…)`; of a kind of its own, `staleness = Own(…)`).
A new one is in the next report.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from analysis.figures.chart import Chart
from parallelbench.errors import ConfigError, choices

if TYPE_CHECKING:
    from collections.abc import Sequence

    import altair as alt

    from analysis.runs.reader import Runs


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
    """What the chart's subtitle says: the finding's second line."""


def draw(runs: Runs, names: Sequence[str] = ()) -> list[Figure]:
    """Draw the figures of these names, by default all, in their order, then in that of their names.

    Raises `ConfigError` for a name that is none.
    """
    known = _known()
    for name in names:
        if name not in known:
            raise ConfigError(f"{name} is no figure: {choices(name, sorted(known))}")
    chosen = sorted(names or sorted(known), key=lambda name: known[name].order)
    from altair.utils.schemapi import debug_mode

    # Else each part of a chart is held against Vega-Lite's schema over and over. Tests do that.
    with debug_mode(False):
        return [_drawn(name, known[name], runs) for name in chosen]


def _known() -> dict[str, Chart]:
    found: dict[str, Chart] = {}
    for each in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{each.name}")
        found |= {name: value for name, value in vars(module).items() if isinstance(value, Chart)}
    return found


def _drawn(name: str, known: Chart, runs: Runs) -> Figure:
    chart, finding = known.figure(runs), known.finding(runs)
    subtitle = chart.title.subtitle if chart is not None else None
    if not isinstance(subtitle, str):
        return Figure(name, known.title, chart, finding)
    # On the page the title is a heading, and the subtitle would be lost.
    first, *others = finding.split("\n")
    return Figure(name, known.title, chart, "\n".join([first, subtitle, *others]), subtitle)


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
