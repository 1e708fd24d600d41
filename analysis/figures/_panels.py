"""The panels of a figure: wrapped facets, so that the report can give them as many columns as there is room for."""

from __future__ import annotations

import contextlib
import json
import re
import textwrap
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import altair as alt
import polars as pl
import polars.selectors as cs
from altair.utils.schemapi import debug_mode

from analysis import text
from analysis.figures._marks import DISTURBED, disturbed
from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

INK = "#333333"
PANEL_WIDTH = 330
COLUMNS = 2
MOST_PANELS = 24
"""Most panels of a figure that are drawn."""
BETWEEN = " — "
"""Stands between the kind of work and what a panel shows of it."""
_WORDS: ContextVar[str | None] = ContextVar("words of the panels that are drawn", default=None)
_MOST_NAMED = 6
"""Panels that an error names, the nearest first."""
_HEADING_LETTERS = 42
"""Letters of a panel's heading that are no wider than the narrowest panel."""


def panels(
    chart: alt.LayerChart | alt.FacetChart, data: pl.DataFrame, *, title: str, own_axes: bool = False
) -> alt.FacetChart:
    """Lay out one panel per value of the column `panel`, with its own axes under `own_axes`, and style it.

    Where not all are drawn, a subtitle says which are not, and how to get them; so it does what marks disturbed runs.
    """
    order = drawn_panels(data)
    header = alt.Header(
        title=None,
        labelFontSize=13,
        labelFontWeight="bold",
        labelAnchor="start",
        labelColor=INK,
        labelLimit=600,
        labelExpr=f"({json.dumps({name: _heading(name) for name in order})})[datum.label]",
    )
    axis: dict[str, Any] = dict.fromkeys(("labelColor", "titleColor"), INK)
    axis |= dict.fromkeys(("labelFontSize", "titleFontSize"), 12)
    axis |= dict.fromkeys(("domainColor", "tickColor"), "#999999")
    facet = alt.Facet("panel:N", sort=order, header=header)
    laid_out: alt.FacetChart = (
        chart.facet(facet=facet, columns=min(COLUMNS, len(order)))
        .properties(title=_title(title, data, disturbed=bool(disturbed(data).any())), spacing=28)
        .configure(font="Arial, Helvetica, 'Liberation Sans', sans-serif", background="white")
        .configure_axis(
            **axis,
            titleFontWeight="normal",
            gridColor="#e6e6e6",
            labelLimit=260,
            labelOverlap="greedy",
            labelSeparation=6,
        )
        .configure_legend(labelFontSize=12, orient="top", columns=4, labelLimit=370, labelColor=INK)
        .configure_view(stroke=None)
    )
    laid_out.usermeta = _omitted(data, order)
    if own_axes:
        laid_out.resolve = alt.Resolve(scale={"x": "independent", "y": "independent"})
    return laid_out


def _omitted(data: pl.DataFrame, order: Sequence[str]) -> Any:
    """How many panels are not drawn, by which the page's script tells why a filter leaves nothing."""
    omitted = data["panel"].n_unique() - len(order) if _WORDS.get() is None else 0
    return {"omitted": omitted} if omitted else alt.Undefined


def _heading(panel: str | None) -> list[str]:
    """The lines of a panel's heading: none is wider than the panel, which would make the whole figure smaller.

    Rows of results that are older than the panel's column have none.
    """
    spaced = (panel or "").replace(" ", "\u00a0").replace("\u00a0·\u00a0", "\u00a0· ")  # lines end where a term does
    lines: list[str] = []
    for part in spaced.split(BETWEEN.replace(" ", "\u00a0")):
        for terms in textwrap.wrap(part, _HEADING_LETTERS, break_on_hyphens=False, break_long_words=False) or [part]:
            plain = terms.replace("\u00a0", " ")  # of a term that is longer than a line, lines end where a word does
            lines += textwrap.wrap(plain, _HEADING_LETTERS, break_on_hyphens=False) or [plain]
    return lines


def _title(title: str, data: pl.DataFrame, *, disturbed: bool) -> alt.Title:
    words = alt.Title(title, anchor="start", fontSize=15, offset=12, color=INK)
    known, drawn = data["panel"].unique(maintain_order=True).to_list(), drawn_panels(data)
    left = text.listed([name.replace(BETWEEN, ", ") for name in known if name not in drawn])
    told = (
        f"{len(drawn)} of {len(known)} panels are drawn, not {left}; the tables are whole. "
        "report --figure NAME --panel WORDS draws any."
    )
    lines = [told] * (bool(left) and _WORDS.get() is None)
    if lines := [*lines, *[DISTURBED] * disturbed]:
        words.subtitle = " ".join(lines)
    return words


def drawn_panels(data: pl.DataFrame) -> list[str]:
    """The panels that are drawn, in the data's order: all; of more than `MOST_PANELS`, those of works that lie evenly
    among all works; inside `only`, those that its words name.
    """
    names: list[str] = data["panel"].unique(maintain_order=True).to_list()
    if (words := _WORDS.get()) is not None:
        return named(words, names)
    if len(names) <= MOST_PANELS:
        return names
    works = list(dict.fromkeys(name.partition(BETWEEN)[0] for name in names))
    each = -(-len(names) // len(works))
    kept = max(1, MOST_PANELS // each)
    chosen = {works[round(place * (len(works) - 1) / max(1, kept - 1))] for place in range(kept)}
    return [name for name in names if name.partition(BETWEEN)[0] in chosen][:MOST_PANELS]


def named(words: str, names: Sequence[str]) -> list[str]:
    """The panel of exactly this heading, else those whose headings hold each of these words; raises `ConfigError`."""
    wanted = _letters(words)
    exact = [name for name in names if _letters(name) == wanted]
    found = exact or [name for name in names if wanted and set(wanted) <= set(_letters(name))]
    if not found:
        near = sorted(names, key=lambda name: -len(set(wanted) & set(_letters(name))))
        told = "; ".join(name.replace(BETWEEN, ", ") for name in near[:_MOST_NAMED])
        more = f"; and {len(near) - _MOST_NAMED} more" if len(near) > _MOST_NAMED else ""
        asked = words if wanted else repr(words)
        raise ConfigError(f"no panel's heading holds {asked}: choose words of one of these: {told}{more}")
    return found


def _letters(heading: str) -> list[str]:
    return re.sub(r"[·—,]", " ", heading).lower().split()


@contextlib.contextmanager
def only(words: str | None) -> Iterator[None]:
    """Figures that are made inside draw the panels that these words name; None: as ever."""
    token = _WORDS.set(words)
    try:
        yield
    finally:
        _WORDS.reset(token)


def panel(data: pl.DataFrame, label: str | pl.Expr) -> pl.DataFrame:
    """Add the column `panel`: the label, below the group where there are several."""
    label = pl.lit(label) if isinstance(label, str) else label
    return data.with_columns(panel=pl.format("{} — {}", "group", label) if data["group"].n_unique() > 1 else label)


def shown(data: pl.DataFrame) -> pl.DataFrame:
    """The rows of the panels that are drawn. Very many would take minutes to draw."""
    return data.filter(pl.col("panel").is_in(pl.Series(drawn_panels(data)).implode()))


def records(data: pl.DataFrame) -> alt.Data:
    """The rows of the panels that are drawn, inlined. What has no place on an axis, and none in JSON, is null."""
    data = data.with_columns(pl.when(cs.float().is_finite()).then(cs.float()))
    with debug_mode(False):  # else every value is checked against the schema of Vega-Lite, which takes most of the time
        # Altair copies lists, with all that is in them, for each part of a chart; a tuple it takes as it is.
        return alt.InlineData(values=tuple(shown(data).to_dicts()))
