"""Real against theoretical scaling: the speed-up over the baseline, labelled with the efficiency in per cent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import polars as pl

from analysis import text
from analysis.comparison.baseline import BESIDE_SPEED_UPS, in_words, limits, refusals
from analysis.comparison.notes import write
from analysis.comparison.summary import gains, summary
from analysis.comparison.verdict import SpeedVerdict
from analysis.figures.chart import RATIO_MEDIAN, panel, written
from analysis.figures.finding import Sentence
from analysis.figures.lines import Axis, Lines

if TYPE_CHECKING:
    from analysis.runs.reader import Runs

IDEAL = "theoretical"
_KINDS = {"steady": "Steady state", "with_startup": "Including start-up"}


def over_baseline(gained: pl.DataFrame) -> pl.DataFrame:
    """Rows of `gains` with `ideal`, the theoretical speed-up: devices ÷ those of the baseline; null beside several
    devices of another strategy.
    """
    return gained.with_columns(ideal=pl.when("tells_scaling").then(pl.col("devices") / pl.col("baseline_devices")))


def _speed_ups(runs: Runs) -> pl.DataFrame:
    """Speed-ups in steady state and with start-up; none of a kind that baselines alone have.

    A disturbed configuration is compared with nothing, so none of these rows is.
    """
    data = over_baseline(gains(runs)).filter(
        (pl.col("devices") != pl.col("baseline_devices")).any().over("group", "kind")
    )
    return panel(data, pl.col("kind").replace(_KINDS)).with_columns(disturbed=pl.lit(False))


def _ideal(data: pl.DataFrame) -> pl.DataFrame:
    """A line per panel: n times the baseline's devices, n times as fast; its name says of which strategy, where that
    has several devices.
    """
    devices = pl.DataFrame({"x": sorted({*data["devices"], *data["baseline_devices"]})})
    one = data.filter(pl.col("baseline_devices").n_unique().over("panel") == 1)  # else no line is the ideal of all
    own = data.filter(configuration=pl.col("baseline"))["variant"].unique().to_list()
    name = f"{IDEAL}, {own[0]}" if len(own) == 1 and (data["baseline_devices"] > 1).all() else IDEAL
    least = one.group_by("panel", maintain_order=True).agg(pl.col("baseline_devices").first())
    return least.join(devices, how="cross").select(
        "panel", "x", line=pl.lit(name), value=pl.col("x") / pl.col("baseline_devices")
    )


def _with_startup(row: dict[str, Any]) -> str:
    """Nothing where it is not known, or where no difference is shown: there a share says something with its interval
    alone.
    """
    if row["verdict"] == SpeedVerdict.NO_DIFFERENCE or row["efficiency_with_startup"] is None:
        return ""
    return f"{text.percent(row['efficiency_with_startup'])} including start-up and "


def _told(row: dict[str, Any]) -> str:
    """The interval of an efficiency in steady state, and what the verdict says of the speed behind it."""
    low, high = row["efficiency_low"], row["efficiency_high"]
    if low is None:
        return ""
    ends = text.ends(low, high) if text.is_wide(low, high) else f"{text.percent(low)}–{text.percent(high)}"
    alike = row["verdict"] in (SpeedVerdict.NO_DIFFERENCE, SpeedVerdict.EQUAL)
    beside = f"; beside {in_words(row['baseline'])} {row['verdict']}" if alike else ""
    return f" ({ends}{beside})"


def _achieved(row: dict[str, Any]) -> str:
    share = text.percent(row["efficiency"])
    return f"{row['configuration']} achieves {_with_startup(row)}{share} in steady state{_told(row)}"


def _efficiency(row: dict[str, Any]) -> str:
    return text.percent(row["median"] / row["ideal"]) if row["ideal"] is not None and row["ideal"] > 1 else ""


scaling = Lines(
    order=2,
    title="Real against theoretical scaling",
    rows=_speed_ups,
    x=Axis("devices", "Devices"),
    y=Axis("devices", "Speed-up over the baseline (×)"),
    origins=True,
    references=_ideal,
    labels=written(_efficiency, "median", "ideal"),
    median=RATIO_MEDIAN,
    finding=Sentence(
        rows=lambda runs: (
            summary(runs)
            .filter(pl.col("devices") > 1, pl.col("verdict").ne_missing(SpeedVerdict.BASELINE.value))
            .drop_nulls("efficiency")
            .filter(pl.col("devices") == pl.col("devices").max().over("group"))
        ),
        by="efficiency",
        descending=True,
        each=_achieved,
        whole="of theoretical scaling, {}",
        ranks=False,
        more=lambda runs: write([*refusals(runs), *limits(runs, BESIDE_SPEED_UPS)], brief=True),
        nothing="Scaling needs a baseline, single × 1 by default, and a run on more devices; beside several devices, "
        "of the baseline's own strategy.",
    ),
)
