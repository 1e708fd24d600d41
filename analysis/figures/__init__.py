"""One file per figure: `TITLE`, `figure(runs)` and `finding(runs)`. A new file here is in the next report."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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


def draw(runs: Runs, names: Sequence[str] = ()) -> list[Figure]:
    """Draw the figures of these names, by default all, in the order of the modules' `ORDER`, then of their names.

    Raises `ConfigError` for a name that is none.
    """
    known = sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))
    for name in names:
        if name not in known:
            raise ConfigError(f"{name} is no figure: {choices(name, known)}")
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names or known]
    return [_drawn(module, runs) for module in sorted(modules, key=lambda module: module.ORDER)]


def _drawn(module: Any, runs: Runs) -> Figure:
    chart, finding = module.figure(runs), module.finding(runs)
    subtitle = chart.title.subtitle if chart is not None else None
    if isinstance(subtitle, str):  # on the page the title is a heading, and this would be lost
        finding = f"{finding}\n{subtitle}"
    return Figure(module.__name__.rpartition(".")[2], module.TITLE, chart, finding)


def specification(chart: alt.FacetChart) -> dict[str, Any]:
    """The chart as Vega-Lite, without the address of its schema."""
    spec: dict[str, Any] = chart.to_dict()
    del spec["$schema"]
    return spec | {"datasets": {name: list(rows) for name, rows in spec["datasets"].items()}}


def svg(spec: dict[str, Any]) -> str:
    """A specification as an SVG image."""
    import vl_convert

    image: str = vl_convert.vegalite_to_svg(spec)
    return image
