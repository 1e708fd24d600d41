"""Whether others disturbed a run: they took its ranks' cores, computed on its GPUs, or made its ranks stand still.

A run is judged by windows: its first epoch, its second, its steady epochs, its whole training. A metric declares the
window that it is measured in (`Column.window`). The limits are chosen, not derived: a test shows that a planted busy
program exceeds them, and a quiet machine does not. See docs/measurement.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

import polars as pl

from analysis.metrics.columns import WARM_UP, facts_columns, per_epoch_columns
from analysis.metrics.epochs import AS_TEXT, measured, numbered, numbered_epochs
from analysis.runs.reader import once
from parallelbench.results.declaration import Window
from parallelbench.results.tables import TABLES

if TYPE_CHECKING:
    from analysis.runs.reader import Runs


SHARE = 0.05
"""Share of a window for which others may take a core, ranks may stand still, or a GPU may be shared."""
SHARE_OF_FURTHER_CORES = 0.01
"""The same of each further core of a rank."""
UNSURE_S = 0.03
"""What others may take besides: the kernel counts in steps of 10 ms, at both ends of an epoch."""
UNSURE_OF_EACH_S = 0.015
"""Times √(n·c) the same of n epochs on c cores together, where that is more: 3.7 standard deviations of these errors.
"""
WINDOWS: dict[Window, pl.Expr] = {
    "first": pl.col("epoch") == 1,
    "second": (pl.col("epoch") == 2) & ~pl.col("warm_up"),
    "steady": ~pl.col("warm_up"),
    "whole": pl.lit(True),
}
"""The epochs of each."""
assert set(WINDOWS) == set(get_args(Window))


def is_disturbed(runs: Runs, metric: str) -> frozenset[str]:
    """The ids of the runs whose value of this metric was measured in a disturbed window.

    `metric`: a column of `facts` or of `per_epoch`; of an epoch's the steady window is meant.
    """
    window = _window_of(metric)
    return frozenset() if window is None else _disturbed_in(runs, window)


def undisturbed_epochs(runs: Runs, metric: str) -> pl.DataFrame:
    """`per_epoch` of numbered runs, without the epochs whose value of this metric was measured in a disturbed window.

    That is the whole training for what adds up from its start, and otherwise each window that the epoch lies in.
    """
    rows, window = numbered_epochs(runs), _window_of(metric)
    if window is None:
        return rows
    windows: tuple[Window, ...] = ("whole",) if window == "whole" else ("first", "second", "steady")
    flags = rows.select("run_id", "epoch", "warm_up").join(
        disturbances(runs), on="run_id", how="left", maintain_order="left"
    )
    disturbed = (WINDOWS[each] & pl.col(f"{each}_disturbed").fill_null(value=False) for each in windows)
    return rows.filter(~flags.select(pl.any_horizontal(disturbed)).to_series())


@once
def partly_unmeasured(runs: Runs) -> frozenset[str]:
    """The ids of the runs of which not every steady epoch's load was measured."""
    return _ids(_judged(runs).filter(pl.col("disturbed").is_null(), window="steady"))


@once
def causes(runs: Runs) -> pl.DataFrame:
    """`run_id`, and which limits the steady epochs exceed: `taken` of cores, `stopped` ranks, `shared` GPUs."""
    return _judged(runs).filter(window="steady").select(AS_TEXT, *_CAUSES)


@once
def disturbances(runs: Runs) -> pl.DataFrame:
    """A row per run that has epochs: `run_id` (numbered), and of each window `…_lost_share` and `…_disturbed`."""
    found = _judged(runs)
    whole = found.filter(window="whole").select("run_id")
    for window in WINDOWS:
        columns = {f"{window}_{name}": pl.col(name) for name in ("lost_share", "disturbed")}
        part = found.filter(window=window).select("run_id", **columns)
        whole = whole.join(part, on="run_id", how="left", maintain_order="left")
    return whole


@once
def rank_windows(runs: Runs) -> pl.DataFrame:
    """A row per run, rank and window: `run_id` (numbered), `rank`, `window`, `cores` of the rank's own, and of the
    window's `epochs` together their time `time_s`, what others took `others_s`, and the processor time of the rank with
    its loader's workers `used_s`; `unmeasured`: epochs in which it is not known what others took; `measured_s`: the
    time of the others.

    Where ranks have no cores of their own, others took what the training thread waited for a core. Loader workers may
    make it wait, so nothing is known of a rank that has some.
    """
    waited_s = pl.when(pl.col("loader_cpu_time_s").is_null()).then("run_delay_s")
    sources = ("epoch_time_s", "others_time_s", "run_delay_s", "cpu_time_s", "loader_cpu_time_s")
    rows = numbered(runs, "ranks", "attempt", "epoch", "rank", *sources).lazy()
    rows = rows.with_columns(
        warm_up=WARM_UP,
        others_s=pl.coalesce("others_time_s", waited_s),
        used_s=pl.col("cpu_time_s") + pl.col("loader_cpu_time_s").fill_null(0.0),
    )
    parts = [
        rows.filter(inside)
        .group_by("run_id", "rank")
        .agg(
            pl.col("others_s", "used_s").sum(),
            time_s=pl.col("epoch_time_s").sum(),
            epochs=pl.len(),
            unmeasured=pl.col("others_s").null_count(),
            measured_s=pl.col("epoch_time_s").filter(pl.col("others_s").is_not_null()).sum(),
            unused=pl.col("used_s").null_count(),
        )
        .with_columns(window=pl.lit(window))
        for window, inside in WINDOWS.items()
    ]
    of_runs = numbered(runs, "run", "devices", "processes", "cores_per_device").select("run_id", cores=_cores())
    together = pl.concat(parts).collect(engine="streaming").join(of_runs, on="run_id", how="left")
    return together.with_columns(
        others_s=pl.when(pl.col("unmeasured") < pl.col("epochs")).then("others_s"),
        used_s=pl.when(pl.col("unused") < pl.col("epochs")).then("used_s"),
    ).drop("unused")


def taken() -> pl.Expr:
    """Whether others took more than they may of a rank's cores in the measured epochs, of rows of `rank_windows`."""
    allowed = SHARE + SHARE_OF_FURTHER_CORES * (pl.col("cores") - 1)
    return pl.col("others_s") > allowed * pl.col("measured_s") + unsure_s(pl.col("epochs") - pl.col("unmeasured"))


def unsure_s(epochs: pl.Expr = pl.col("epochs")) -> pl.Expr:  # noqa: B008
    """What the kernel may miscount of a rank's `cores` in so many epochs."""
    return pl.max_horizontal(pl.lit(UNSURE_S), UNSURE_OF_EACH_S * (epochs * pl.col("cores")).sqrt())


def _cores() -> pl.Expr:
    """Cores of a rank, those of all its devices; one where ranks have none of their own."""
    of_devices = pl.col("devices") // pl.col("processes") * pl.col("cores_per_device")
    return pl.max_horizontal(of_devices.fill_null(1), pl.lit(1))


_CAUSES = ("taken", "stopped", "shared")


@once
def _judged(runs: Runs) -> pl.DataFrame:
    """A row per run and window that has epochs: `lost_share`, and whether it is `disturbed`; null where it was
    not measured on all ranks and in all of its epochs what others took, and what is known does not exceed the limits.
    Which limits are exceeded is in `_CAUSES`.
    """
    of_ranks = (
        rank_windows(runs)
        .group_by("run_id", "window")
        .agg(
            lost_share=(pl.col("others_s").clip(0.0) / pl.col("measured_s")).max(),
            taken=taken().any(),
            known=(pl.col("unmeasured") == 0).all(),
        )
    )
    shared_s = pl.col("time_s").filter(pl.col("gpu_processes_max") > 1)
    epochs = measured(runs).lazy().with_columns(time_s=pl.col("slowest_epoch_time_s"))
    parts = [
        epochs.filter(inside)
        .group_by("run_id")
        .agg(
            stopped=pl.col("suspended_s").sum() > SHARE * pl.col("time_s").sum() + UNSURE_S,
            shared=shared_s.sum() > SHARE * pl.col("time_s").sum(),
            watched=pl.col("gpu_processes_max").null_count() == 0,
        )
        .with_columns(window=pl.lit(window))
        for window, inside in WINDOWS.items()
    ]
    both = pl.concat(parts).collect().join(of_ranks, on=("run_id", "window"), how="left")
    both = both.with_columns(pl.col(_CAUSES).fill_null(value=False))
    known = pl.any_horizontal(pl.col("known", "watched").fill_null(value=False))
    disturbed = pl.when(pl.any_horizontal(_CAUSES)).then(pl.lit(True)).when(known).then(pl.lit(False))
    return both.select("run_id", "window", "lost_share", *_CAUSES, disturbed=disturbed)


def _disturbed_in(runs: Runs, window: Window) -> frozenset[str]:
    return _ids(_judged(runs).filter("disturbed", window=window))


def _ids(rows: pl.DataFrame) -> frozenset[str]:
    return frozenset(rows.select(AS_TEXT).to_series().to_list())


def _window_of(metric: str) -> Window | None:
    columns = (*facts_columns(), *per_epoch_columns(), *TABLES["epochs"])
    return next((column.window for column in columns if column.name == metric), None)
