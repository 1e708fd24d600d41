"""One figure, or some of its panels, in the width of a paper's column."""

from __future__ import annotations

import copy
import re
from typing import TYPE_CHECKING, Any

from analysis.figures import draw, specification, svg
from analysis.figures.chart import only
from parallelbench.errors import ConfigError
from parallelbench.results.files import storage_errors
from parallelbench.world.allowance import require_figures

if TYPE_CHECKING:
    from pathlib import Path

    import altair as alt

    from analysis.figures import Figure
    from analysis.runs.reader import Runs


COLUMN_MM, PAGE_MM = 85, 175
"""Widths of one column and of both."""
_UNITS_PER_MM = 4.5
"""So many units of the drawing make a millimetre: its words of 12 units are set in 7.6 points."""
_POINTS_PER_MM = 72 / 25.4
_PIXELS_PER_INCH = 300
_NARROWEST = 100
_GAP = 4
_LEGENDS = (4, 2, 1)
"""Columns of a legend, the most that fit."""


def write_figure(runs: Runs, name: str, *, panel: str | None, width_mm: int, out: Path) -> tuple[Figure, list[Path]]:
    """Write the figure, or its panels that the words name, as PDF, SVG and PNG; returns it and the files.

    Raises `ConfigError` for a figure or panel that does not exist,
    and for a figure that these runs can't fill; `StorageError`.
    """
    require_figures()
    with only(panel):
        (figure,) = draw(runs, [name])
    if figure.chart is None:
        raise ConfigError(f"{name} can't be drawn from these runs: {figure.finding}")
    image = fitted(captioned(figure.chart), width_mm=width_mm)
    words = list(dict.fromkeys(re.findall(r"\w+", (panel or "").lower())))
    stem = "-".join([name, *words, f"{width_mm}mm"])
    with storage_errors(out, option="--out DIR"):
        out.mkdir(parents=True, exist_ok=True)
        return figure, [_written(out / f"{stem}.{kind}", image) for kind in ("pdf", "svg", "png")]


def captioned(chart: alt.FacetChart) -> dict[str, Any]:
    """The chart as Vega-Lite as it stands beside a caption: without a title, and with legends of what is drawn."""
    spec = specification(chart)
    spec.pop("title", None)
    rows = [row for data in spec["datasets"].values() for row in data]
    _prune(spec["spec"], {row.get(name) for row in rows for name in ("variant", "configuration")})
    return spec


def _written(path: Path, image: str) -> Path:
    import vl_convert

    if path.suffix == ".svg":
        # In millimetres, so that all programs place it in its size.
        sized = re.sub(r'(width|height)="([\d.]+)"', _in_mm, image, count=2)
        path.write_text(sized, encoding="utf-8")
    elif path.suffix == ".pdf":
        path.write_bytes(vl_convert.svg_to_pdf(image))
    else:
        path.write_bytes(vl_convert.svg_to_png(image, ppi=_PIXELS_PER_INCH))
    return path


def _in_mm(size: re.Match[str]) -> str:
    return f'{size[1]}="{float(size[2]) / _POINTS_PER_MM:.2f}mm"'


def fitted(spec: dict[str, Any], *, width_mm: int) -> str:
    """The drawing as SVG, as wide as that: its size is in points, its panels are as wide as axes and legend leave."""
    room, count = width_mm * _UNITS_PER_MM, len(spec["facet"]["sort"])
    columns = 1 if width_mm < PAGE_MM else min(2, count)
    spec = copy.deepcopy(spec)
    spec["columns"] = columns
    for legend_columns in _LEGENDS:
        spec["config"]["legend"]["columns"] = legend_columns
        image = _drawn(spec, panel_width=_NARROWEST)
        if _size(image)[0] <= room:
            break
    # What axes and gaps take is known once drawn: draw, measure, and draw again with what is left.
    left = (room - _size(_bare(spec))[0] - _GAP) / columns + _NARROWEST
    image = _drawn(spec, panel_width=max(_NARROWEST, left))
    width, height = _size(image)
    points = width_mm * _POINTS_PER_MM
    sizes = iter((points, height * points / width))
    return re.sub(r'(width|height)="[\d.]+"', lambda size: f'{size[1]}="{next(sizes):.4f}"', image, count=2)


def _prune(node: Any, present: set[Any]) -> None:
    """Let legends name only what is drawn; what is drawn keeps its colour."""
    if isinstance(node, list):
        for child in node:
            _prune(child, present)
    if not isinstance(node, dict):
        return
    domain, values = node.get("domain"), node.get("range")
    if isinstance(domain, list) and isinstance(values, list) and present.intersection(map(str, domain)):
        kept = [place for place, name in enumerate(domain) if name in present]
        node |= {"domain": [domain[place] for place in kept], "range": [values[place] for place in kept]}
    for child in node.values():
        _prune(child, present)


def _bare(spec: dict[str, Any]) -> str:
    """Without legends and headings, which may be wider than narrow panels."""
    bare = copy.deepcopy(spec)
    _drop_legends(bare["spec"])
    bare["facet"]["header"]["labelExpr"] = "''"
    return _drawn(bare, panel_width=_NARROWEST)


def _drop_legends(node: Any) -> None:
    """A legend that a chart asks for is drawn, whatever its configuration says."""
    if isinstance(node, dict) and "legend" in node:
        node["legend"] = None
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        _drop_legends(child)


def _drawn(spec: dict[str, Any], *, panel_width: float) -> str:
    spec["spec"]["width"] = panel_width
    return svg(spec)


def _size(image: str) -> tuple[float, float]:
    width, height = (float(size) for size in re.findall(r'(?:width|height)="([\d.]+)"', image)[:2])
    return width, height
