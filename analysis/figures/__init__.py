"""One file per figure: `TITLE`, `figure(runs)` and `finding(runs)`. A new file here is in the next report."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import altair as alt

    from analysis.load import Runs


@dataclass(frozen=True)
class Figure:
    """A figure of a report."""

    name: str
    title: str
    chart: alt.FacetChart | None
    """None: there is nothing to show, and `finding` says why."""
    finding: str
    """What the figure shows, in one sentence with this sweep's numbers."""


def all_figures(runs: Runs) -> list[Figure]:
    """Draw every figure of this package, in the order of the modules' `ORDER`, then of their names."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    return [
        Figure(module.__name__.rpartition(".")[2], module.TITLE, module.figure(runs), module.finding(runs))
        for module in sorted(modules, key=lambda module: module.ORDER)
    ]
