"""Real against theoretical scaling: the speed-up over one device, labelled with the efficiency in per
cent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import altair as alt
import polars as pl

from analysis import text
from analysis.comparison.baseline import limited, refused
from analysis.comparison.configurations import gains, summary
from analysis.comparison.verdict import SpeedVerdict
from analysis.figures.bars import Bars
from analysis.figures.chart import (
    INK,
    LEGEND,
    PANEL_WIDTH,
    RATIO_MEDIAN,
    THEORY,
    Sentence,
    legible,
    lines_of,
    panel,
    panels,
    records,
    scale,
    tips,
    variant_dashes,
    variants,
    written,
)
from analysis.metrics.runs import efficiency

if TYPE_CHECKING:
    from collections.abc import Callable

    from analysis.runs.reader import Runs

IDEAL = "theoretical"
_MOST_LINES = 7
"""Most variants that are drawn as lines; with more, bars are drawn, each with its name beside it."""
_LINEAR_UP_TO = 8
"""Most devices with linear axes; with more, axes are logarithmic."""
_UP = ["Speed-up over one device (×),", "labelled with the efficiency"]
"""The axis, in two lines: panels are low."""
_KINDS = {"steady": "Steady state", "with_startup": "Including start-up"}


class Scaling(Bars):
    """Lines over devices, or bars of very many variants."""

    def drawn(self, data: pl.DataFrame, runs: Runs) -> alt.FacetChart:
        """A line per variant, or a bar per configuration; `rows` has the column devices, too."""
        return super().drawn(data, runs) if data["variant"].n_unique() > _MOST_LINES else _lines(data, runs)


def _speed_ups(runs: Runs) -> pl.DataFrame:
    """Speed-ups in steady state and with start-up; none of a kind that one device alone has."""
    data = gains(runs).filter(pl.col("devices").max().over("group", "kind") > 1)
    return panel(data, pl.col("kind").replace(_KINDS))


def _lines(data: pl.DataFrame, runs: Runs) -> alt.FacetChart:
    """A line per variant, labelled with its efficiencies."""
    data = lines_of(data)
    colours, dashes = variants(data, runs), variant_dashes(data, runs)
    devices = sorted(set(data["devices"]) | {1})
    data = pl.concat([_origins(data), _labelled(data), _ideal(data, devices)], how="diagonal")
    inks = {name: legible(colour) for name, colour in colours.items()}
    data = data.with_columns(ink=pl.col("variant").replace_strict(inks, default=INK))
    key = alt.Color("variant:N", scale=scale(colours | {IDEAL: THEORY}), legend=LEGEND)
    dash = alt.StrokeDash("variant:N", scale=scale(dashes | {IDEAL: [1, 0]}), legend=LEGEND)
    x, y = _axes(data, devices)
    base = alt.Chart(records(data)).properties(width=PANEL_WIDTH, height=300)
    medians = base.transform_filter("datum.first")
    line = medians.mark_line(strokeWidth=2.2).encode(x=x, y=y("median"), color=key, strokeDash=dash)
    real = "datum.repeat != null"
    dots = medians.transform_filter(real).mark_point(filled=True, size=70, opacity=1)
    dots = dots.encode(x=x, y=y("median"), color=key)
    tooltip = [*tips("variant:N", "devices:Q", "repeat:Q"), alt.Tooltip("value:Q", title="speed-up", format=".3f")]
    repeats = base.transform_filter(real).mark_point(size=46, opacity=0.7)
    repeats = repeats.encode(x=x, y=y("value"), color=key, tooltip=tooltip)
    labels = medians.transform_filter(real).encode(x=x, y=y("label_y"), text=alt.Text("label:N"))
    look: dict[str, Any] = {"align": "left", "dx": 9, "dy": 10, "fontSize": 12, "fontWeight": "bold"}
    around = labels.mark_text(**look, color="white", stroke="white", strokeWidth=4, strokeJoin="round")
    texts = labels.mark_text(**look).encode(color=alt.Color("ink:N", scale=None))
    return panels(alt.layer(line, around, repeats, dots, texts), data)


def _labelled(data: pl.DataFrame) -> pl.DataFrame:
    """Add the text of each median (its efficiency), and a height for it that keeps texts apart."""
    at = ("panel", "variant", "devices")
    data = data.with_columns(median=RATIO_MEDIAN.over(at), first=pl.int_range(pl.len()).over(at) == 0)
    apart = 0.055 * max(float(data["value"].max()), float(data["devices"].max()))  # type: ignore[arg-type]
    placed: list[dict[str, Any]] = []
    heights: dict[tuple[str, int], float] = {}
    for row in data.filter("first").select(*at, "median").sort("median", maintain_order=True).iter_rows(named=True):
        place = row["panel"], row["devices"]
        heights[place] = max(row["median"], heights.get(place, float("-inf")) + apart)
        share = efficiency(row["median"], devices=row["devices"])
        label = "" if row["devices"] == 1 else text.percent(share)
        placed.append({name: row[name] for name in at} | {"label_y": heights[place], "label": label})
    return data.join(pl.DataFrame(placed, schema_overrides={"devices": pl.Int32}), on=list(at), maintain_order="left")


def _origins(data: pl.DataFrame) -> pl.DataFrame:
    """The starts of lines without a run on one device: the baseline, which is 1 by definition."""
    lines = data.group_by("panel", "variant", maintain_order=True).agg(pl.col("devices").min())
    return lines.filter(pl.col("devices") > 1).with_columns(
        devices=pl.lit(1, pl.Int32), value=1.0, median=1.0, first=pl.lit(True)
    )


def _ideal(data: pl.DataFrame, devices: list[int]) -> pl.DataFrame:
    """n devices, n times as fast."""
    rows = [
        {"panel": panel, "variant": IDEAL, "devices": n, "value": float(n), "median": float(n), "first": True}
        for panel in data["panel"].unique(maintain_order=True)
        for n in devices
    ]
    return pl.DataFrame(rows, schema_overrides={"devices": pl.Int32})


def _axes(data: pl.DataFrame, devices: list[int]) -> tuple[alt.X, Callable[[str], alt.Y]]:
    top = devices[-1]
    least, most = data.select(least=pl.col("value").min(), most=pl.col("value").max()).row(0)
    if top <= _LINEAR_UP_TO:
        across = alt.Scale(domain=[1 - 0.08 * top, top * 1.22], nice=False)
        up = alt.Scale(domain=[0, max(most, top) * 1.08], nice=False)
    else:
        across = alt.Scale(type="log", base=2, domain=[0.9, top * 1.8], nice=False)
        up = alt.Scale(type="log", base=2, domain=[min(least, 1) * 0.9, max(most, top) * 1.15], nice=False)
    x = alt.X("devices:Q", title="Devices", scale=across, axis=alt.Axis(values=devices, format="d", grid=False))

    axis = alt.Axis(titleColor=INK, tickCount=6)
    return x, lambda name: alt.Y(f"{name}:Q", title=_UP, scale=up, axis=axis)


def _with_startup(row: dict[str, Any]) -> str:
    """Nothing where it is not known, or where no difference is shown: there a share says something with its interval
    alone.
    """
    if row["verdict"] == SpeedVerdict.NO_DIFFERENCE or row["efficiency_with_startup"] is None:
        return ""
    return f"{text.percent(row['efficiency_with_startup'])} including start-up and "


def _told(row: dict[str, Any]) -> str:
    """The interval of an efficiency in steady state, and what the verdict says of the speed behind it."""
    if row["speed_up_low"] is None:
        return ""
    low, high = (row[f"speed_up_{end}"] / row["devices"] for end in ("low", "high"))
    ends = text.ends(low, high) if text.is_wide(low, high) else f"{text.percent(low)}–{text.percent(high)}"
    alike = row["verdict"] in (SpeedVerdict.NO_DIFFERENCE, SpeedVerdict.EQUAL)
    return f" ({ends}{'; beside one device ' + row['verdict'] if alike else ''})"


def _achieved(row: dict[str, Any]) -> str:
    share = text.percent(row["efficiency"])
    return f"{row['configuration']} achieves {_with_startup(row)}{share} in steady state{_told(row)}"


scaling = Scaling(
    order=2,
    title="Real against theoretical scaling",
    rows=_speed_ups,
    unit="Speed-up over one device (bar), theoretical (line), ×",
    label=written(
        lambda row: f"{row['median']:.2f}, {text.percent(efficiency(row['median'], devices=row['devices']))}",
        "median",
        "devices",
    ),
    goal="devices",
    room=1.35,
    median=RATIO_MEDIAN,
    finding=Sentence(
        rows=lambda runs: (
            summary(runs)
            .filter(pl.col("devices") > 1)
            .drop_nulls("efficiency")
            .filter(pl.col("devices") == pl.col("devices").max().over("group"))
        ),
        by="efficiency",
        descending=True,
        each=_achieved,
        whole="of theoretical scaling, {}",
        ranks=False,
        more=lambda runs: [*refused(runs, brief=True), *limited(runs, brief=True)],
        nothing="Scaling needs single × 1 and a run on several devices.",
    ),
)
