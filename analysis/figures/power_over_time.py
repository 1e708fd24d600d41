"""Power of the GPUs over time, from the stored samples of one run of each configuration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from analysis import text
from analysis.comparison.summary import displayed
from analysis.figures.chart import NAMES, drawn_panels
from analysis.figures.finding import Sentence
from analysis.figures.lines import Axis, Lines
from analysis.runs.reader import once, read_samples
from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    import numpy.typing as npt

    from analysis.runs.reader import Runs

    Values = npt.NDArray[np.float64]

_MOST_POINTS, _FEWEST_OF_LINE, _MOST_OF_LINE = 6_000, 30, 240
"""Of all lines together, and of one."""
GAP = 10
"""Nothing is known between samples that lie this many times as far apart as half of a GPU's samples do at most."""


def _known_lines(runs: Runs) -> pl.DataFrame:
    """None where none was measured."""
    data = lines(runs)
    return data if data["value"].count() else data.clear()


def _finding(runs: Runs) -> str:
    """What the GPUs of each drawn run draw on average, and for how long."""
    return "No run that counts measured the power of its GPUs." if lines(runs).is_empty() else _told(runs)


def _means(runs: Runs) -> pl.DataFrame:
    rows = lines(runs).drop_nulls("value").group_by("group", "configuration", maintain_order=True)
    return rows.agg(pl.col("value").mean(), pl.col("length_s", "disturbed", "resumed").first())


_told = Sentence(
    rows=_means,
    by="value",
    each=lambda row: (
        f"{text.number(row['value'])} W on average for {text.seconds(row['length_s'])} with {row['configuration']}"
        f"{' (after its last interruption)' if row['resumed'] else ''}"
    ),
    whole="from the first epoch's start to the last one's end, the GPUs draw {}",
    nothing=(
        "The samples of the GPUs' power can't be read or lie too far apart to be drawn. "
        "measure.telemetry_hz says how many are taken a second."
    ),
)


def lines(runs: Runs) -> pl.DataFrame:
    """A row per point of the drawn lines, and one without a value per run that is not drawn.

    Columns: panel, group, configuration, variant, strategy, devices, repeat, disturbed, resumed; length_s, from the
    first epoch's start to the last one's end, of a resumed run in its last attempt; x, the middle of an interval of it,
    in s; value, the mean power of all GPUs together in that interval, in W, or null where a GPU was not sampled.
    """
    chosen = _one_of_each(runs)
    return _lines(runs, tuple(drawn_panels(chosen)))


_POINTS = {"run_id": pl.String, "length_s": pl.Float64, "x": pl.Float64, "value": pl.Float64}


@once
def _lines(runs: Runs, drawn: tuple[str, ...]) -> pl.DataFrame:
    """`lines` in these panels: of other runs no samples are read, which may be millions."""
    chosen = _one_of_each(runs)
    if chosen.is_empty():
        return chosen.with_columns(value=pl.lit(None, pl.Float64))
    shown = chosen.filter(pl.col("panel").is_in(drawn))
    of_line = min(_MOST_OF_LINE, max(_FEWEST_OF_LINE, _MOST_POINTS // shown.height))
    windows = {row["run_id"]: row for row in _windows(runs, shown["run_id"]).iter_rows(named=True)}
    known = [row for row in shown.iter_rows(named=True) if row["run_id"] in windows]
    points = [_points(row, windows[row["run_id"]], of_line) for row in known]
    joined = chosen.join(
        pl.concat([pl.DataFrame(schema=_POINTS), *points]), on="run_id", how="left", maintain_order="left_right"
    )
    return joined.drop("run_id", "folder")


def _one_of_each(runs: Runs) -> pl.DataFrame:
    """The first repeat of each configuration whose GPUs' power is known, in the panel of its group: one that trained
    without an interruption, if there is one.
    """
    power = runs.select("epochs", "run_id", "gpu_power_max_w").drop_nulls()
    rows = (
        displayed(runs)
        .select("run_id", "folder", *NAMES, resumed=pl.col("resumed_after").is_not_null())
        .join(power.select("run_id").unique(), on="run_id", how="semi")
    )
    of_one = ["group", "configuration"]
    rows = rows.filter(~pl.col("resumed") | pl.col("resumed").all().over(of_one))
    rows = rows.unique(of_one, keep="first", maintain_order=True)
    return rows.with_columns(panel=pl.col("group"))


def _windows(runs: Runs, run_ids: pl.Series) -> pl.DataFrame:
    """Of each run's last attempt: `length_s` of its training, and for each rank's `device_uuid`s, in `started_at`, when
    it began by the clock of their node.

    Results that are older than these columns have no row.
    """
    edges = ("training_started_at", "training_ended_at")
    ranks = runs.select("ranks", "run_id", "attempt", "node", *edges, "device_uuid")
    ranks = ranks.filter(pl.col("run_id").is_in(run_ids.implode())).drop_nulls()
    ranks = ranks.filter(pl.col("attempt") == pl.col("attempt").max().over("run_id"))
    ranks = ranks.with_columns(started_at=pl.col("training_started_at").min().over("run_id", "node"))
    of_ranks = ranks.unique(("run_id", "node", "device_uuid")).select("run_id", "device_uuid", "started_at")
    whole = ranks.group_by("run_id").agg(
        pl.col("attempt").first(), length_s=(pl.col("training_ended_at") - pl.col("started_at")).max()
    )
    return whole.join(of_ranks.group_by("run_id").agg("device_uuid", "started_at"), on="run_id")


def _points(row: dict[str, Any], window: dict[str, Any], of_line: int) -> pl.DataFrame:
    """The columns `run_id`, `length_s`, `x` and `value` of one run."""
    began = {
        uuid: started_at
        for of_rank, started_at in zip(window["device_uuid"], window["started_at"], strict=True)
        for uuid in of_rank.split(",")
        if uuid.startswith("GPU-")
    }
    length_s = window["length_s"]
    try:
        samples = read_samples(Path(row["folder"])).drop_nulls(["device_uuid", "power_w"])
    except ConfigError:  # damaged since: the other runs are drawn
        samples = pl.DataFrame(schema={"attempt": pl.Int32, "device_uuid": pl.String})
    samples = samples.filter(pl.col("attempt") == window["attempt"], pl.col("device_uuid").is_in(sorted(began)))
    of_gpus = samples.partition_by("device_uuid", as_dict=True)
    edges = np.linspace(0.0, length_s, 1 + min([of_line, *(of_gpu.height for of_gpu in of_gpus.values())]))
    total_w = np.full(len(edges) - 1, np.nan if len(of_gpus) < max(1, len(began)) else 0.0)
    for (uuid,), of_gpu in of_gpus.items():
        ordered = of_gpu.sort("time")
        total_w += means((ordered["time"] - began[str(uuid)]).to_numpy(), ordered["power_w"].to_numpy(), edges)
    middles = (edges[1:] + edges[:-1]) / 2
    columns = {"length_s": length_s, "x": middles.round(3), "value": total_w.round(2)}
    return pl.DataFrame({"run_id": row["run_id"]} | columns).with_columns(pl.col("value").fill_nan(None))


def means(times: Values, powers: Values, edges: Values) -> Values:
    """Mean of the power between each two edges, by the trapezoid rule as of energies; NaN where it is not known."""
    every = np.union1d(times, edges)
    watts = np.interp(every, times, powers)
    joules = np.concatenate([[0.0], np.cumsum(np.diff(every) * (watts[1:] + watts[:-1]) / 2)])
    found: Values = np.diff(joules[np.searchsorted(every, edges)]) / np.diff(edges)
    apart = np.diff(times)
    wide = apart > GAP * np.median(apart) if len(apart) else np.zeros(0, bool)
    unknown = (edges[:-1] < times[0]) | (edges[1:] > times[-1])
    for start, end in zip(times[:-1][wide], times[1:][wide], strict=True):
        unknown |= (edges[:-1] < end) & (edges[1:] > start)
    found[unknown] = np.nan
    return found


power_over_time = Lines(
    order=10,
    title="Power of all GPUs over time, one run of each configuration",
    rows=_known_lines,
    x=Axis("linear", "Seconds since the first epoch began"),
    y=Axis("zero", "Power of all GPUs (W)"),
    own_axes=True,
    points=False,
    finding=_finding,
)
