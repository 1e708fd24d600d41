"""The advisor's predictions beside what was measured, and scaling curves continued to more devices than were measured.

Each measured configuration is predicted by a fit that lacked it. What lies beyond is a prediction and no measurement.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import altair as alt
import numpy as np
import polars as pl

from analysis import text
from analysis.advisor.forecast import forecast
from analysis.comparison.work import configuration_label, natural
from analysis.figures.chart import LEGEND, PANEL_WIDTH, THEORY, Own, panel, panels, records, scale, tips, variants
from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from analysis.advisor.forecast import Forecast, Further
    from analysis.advisor.sweep_evidence import MeasuredStep
    from analysis.runs.reader import Runs
    from parallelbench.config.run import RunConfig

STEPS, CURVES = "Step (ms): predicted ↑, measured →", "Samples/s ↑, devices →"


def _predicted(runs: Runs) -> pl.DataFrame:
    """The marks of two panels per group; none where the advisor can't be fitted."""
    try:
        found = forecast(runs)
    except ConfigError:
        return pl.DataFrame()
    steps = list(_steps(found))
    rows = [*steps, *_equal(steps), *_curves(found)]
    data = panel(pl.DataFrame(rows, infer_schema_length=None), pl.col("kind"))
    return data.sort(natural("group"), "place", maintain_order=True)


def _steps(found: Forecast) -> Iterator[dict[str, Any]]:
    """Measured against predicted time of a step, in ms."""
    width = float(np.exp(found.half_width))
    for step, predicted_s in zip(found.check.steps, found.check.predicted_s.tolist(), strict=True):
        y = 1e3 * predicted_s
        times = {"x": 1e3 * step.step_s, "y": y, "low": y / width, "high": y * width}
        yield _named(step, step.run) | {"place": 0, "kind": STEPS, "mark": "predicted"} | times


def _equal(steps: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The line on which predictions equal measurements."""
    for group in dict.fromkeys(row["group"] for row in steps):
        times = [row[axis] for row in steps if row["group"] == group for axis in ("x", "y")]
        for end in (0.8 * min(times), 1.25 * max(times)):
            yield {"group": group, "place": 0, "kind": STEPS, "mark": "equal", "x": end, "y": end}


def _curves(found: Forecast) -> Iterator[dict[str, Any]]:
    """Throughput of measured configurations, and of the same on more devices."""
    for step in found.steps:
        yield _rated(step, step.run, step.step_s, "measured")
    joined: set[tuple[str, str]] = set()
    for each in found.further:
        step, batch = each.of, each.run.global_batch_size
        if (step.work, step.variant) not in joined:
            joined.add((step.work, step.variant))
            yield _rated(step, step.run, step.step_s, "start")
        interval = {"low": batch / each.high_s, "high": batch / each.low_s}
        yield _rated(step, each.run, each.step_s, "predicted") | interval


def _rated(step: MeasuredStep, run: RunConfig, step_s: float, mark: str) -> dict[str, Any]:
    at = {"x": float(run.devices), "y": run.global_batch_size / step_s}
    return _named(step, run) | {"place": 1, "kind": CURVES, "mark": mark} | at


def _named(step: MeasuredStep, run: RunConfig) -> dict[str, Any]:
    names = {"group": step.work, "variant": step.variant, "strategy": step.strategy}
    return names | {"configuration": configuration_label(step.variant, run.devices, run.nodes)}


def _draw(data: pl.DataFrame, runs: Runs) -> alt.FacetChart:
    colours = variants(data.drop_nulls("variant"), runs)
    key = alt.Color("variant:N", scale=scale(colours), legend=LEGEND)
    axes: dict[str, Any] = {
        "title": None,
        "scale": alt.Scale(type="log", nice=False, padding=14),
        "axis": alt.Axis(tickCount=5, format=",.3~r"),
    }
    x, y = alt.X("x:Q", **axes), alt.Y("y:Q", **axes)
    tooltip = [*tips("configuration:N", "mark:N"), *(alt.Tooltip(f"{name}:Q", format=".4~g") for name in ("x", "y"))]
    base = alt.Chart(records(data)).properties(width=PANEL_WIDTH, height=260)
    seen, predicted, equal = (
        base.transform_filter(f"datum.mark == '{name}'") for name in ("measured", "predicted", "equal")
    )
    beyond = base.transform_filter("datum.place == 1 && (datum.mark == 'predicted' || datum.mark == 'start')")
    diagonal = equal.mark_line(color=THEORY, strokeDash=[5, 4]).encode(x=x, y=y)
    lines = [
        seen.mark_line(strokeWidth=2.2).encode(x=x, y=y, color=key),
        beyond.mark_line(strokeWidth=1.6, strokeDash=[4, 3]).encode(x=x, y=y, color=key),
    ]
    bars = predicted.mark_rule(strokeWidth=1.6, opacity=0.55)
    bars = bars.encode(x=x, y=alt.Y("low:Q", title=None), y2="high:Q", color=key)
    points = [
        predicted.mark_point(fill="white", size=52, strokeWidth=1.8, opacity=1),
        seen.mark_point(filled=True, size=60, opacity=1),
    ]
    marks = [diagonal, *lines, bars, *(each.encode(x=x, y=y, color=key, tooltip=tooltip) for each in points)]
    return panels(alt.layer(*marks), data, own_axes=True)


def _finding(runs: Runs) -> str:
    """How far the predictions were off, and what is predicted beyond the measured devices; or why nothing is."""
    try:
        found = forecast(runs)
    except ConfigError as error:
        return f"Nothing is predicted, since the advisor can't be fitted to these runs: {error}."
    errors = np.abs(found.check.predicted_s / found.check.measured_s - 1.0)
    median, largest = (text.percent(float(value)) for value in (np.median(errors), errors.max()))
    lines = [
        f"{len(errors)} of {len(found.steps)} measured configurations were each predicted by a fit that lacked them: "
        f"the predictions are off by {median} in the median and {largest} at most.",
        *(f"{each}." for each in found.left_out),
        *["Too few configurations were left out to know the intervals: a factor of 2 both ways is assumed."]
        * found.assumed,
        *_beyond(found),
    ]
    return "\n".join(lines)


def _beyond(found: Forecast) -> Iterator[str]:
    """The fastest prediction on the most devices of each work."""
    best: dict[str, Further] = {}
    for each in found.further:
        now = best.get(each.of.work)
        if now is None or (each.run.devices, _rate(each)) > (now.run.devices, _rate(now)):
            best[each.of.work] = each
    for group, each in best.items():
        batch = each.run.global_batch_size
        ends = text.span(batch / each.high_s, batch / each.low_s)
        name = f"{group}: " if len(best) > 1 else ""
        label = configuration_label(each.of.variant, each.run.devices, each.run.nodes)
        yield f"{name}Prediction, not measured: {label} trains {text.number(_rate(each))} ({ends}) samples/s."
    if any(each.beyond_node for each in found.further):
        yield "More devices than a measured node has are predicted as several such nodes; their network is assumed."


def _rate(each: Further) -> float:
    return each.run.global_batch_size / each.step_s


predictions = Own(
    order=18,
    title="Predictions by the advisor beside what was measured",
    remark="Filled points: measured. Hollow points: predicted. Bars: 90 % intervals of predictions.",
    rows=_predicted,
    draw=_draw,
    finding=_finding,
)
