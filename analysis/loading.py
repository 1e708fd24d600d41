"""Loads results: each run once, as a measurement that counts if there is one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from analysis.comparison.environments import environments_of
from analysis.comparison.exclusions import excluded
from analysis.reader import Runs, read_runs
from analysis.same_run import Skipped
from analysis.text import listed
from parallelbench.measure.environment_match import differences

if TYPE_CHECKING:
    from collections.abc import Mapping


def load(path: Path | str, *others: Path | str, plugin: str | None = None) -> Runs:
    """Read all runs at or below `path`: one run's folder, a sweep's, or a folder of sweeps; and below `others`, of the
    same machine (of several machines: `analysis.merging.load_all`).

    Published results are read from Parquet once their sha256 matches the manifest, those of a large sweep from its
    compacted copy (`analysis.compact`) as long as they stay what they are; other runs from the journals of their last
    attempt. `plugin` is an importable package whose classes the unfinished ones may name. Of a run that several sweeps
    have measured, one measurement is read: one that counts, if there is one. What is not read is named in `skipped`.
    Raises `ConfigError` where there is no such folder, or none that may be read.
    """
    runs = read_runs(path, *others, plugin=plugin)
    if not runs.sweeps:
        return runs
    told = tuple(replace(each, reason=f"{each.reason}{_unlike_environment(runs, each.path)}") for each in runs.skipped)
    return _with_counted(replace(runs, skipped=told))


def _with_counted(runs: Runs) -> Runs:
    """The same runs, but of each that does not count another sweep's measurement that does, where there is one."""
    why = dict(excluded(runs).select("run_id", "exclusion").rows())
    chosen: dict[str, Path] = {}
    for sweep, there in sorted(runs.sweeps.items()):
        counted = set(there.run["run_id"]) - set(excluded(there)["run_id"])
        chosen |= dict.fromkeys(counted & why.keys() - chosen.keys(), sweep)
    if not chosen:
        return runs
    instead = runs.run.filter(pl.col("run_id").is_in(list(chosen))).select("folder", "run_id").rows()
    folders = {sweep: dict(runs.sweeps[sweep].run.select("run_id", "folder").rows()) for sweep in chosen.values()}
    read = {Path(old): (Path(folders[chosen[run_id]][run_id]), why[run_id]) for old, run_id in instead}
    return replace(runs, tables=_exchanged(runs, chosen), skipped=_skipped(runs.skipped, read))


def _exchanged(runs: Runs, chosen: Mapping[str, Path]) -> dict[str, pl.DataFrame]:
    """The tables of `runs`, where run ids that are `chosen` have their rows from these sweeps."""
    others = {sweep: [run_id for run_id, of in chosen.items() if of == sweep] for sweep in chosen.values()}
    gone = pl.col("run_id").is_in(list(chosen))
    return {
        name: pl.concat([frame.filter(~gone), *(_rows(runs.sweeps[sweep], name, ids) for sweep, ids in others.items())])
        for name, frame in runs.tables.items()
    }


def _rows(runs: Runs, table: str, run_ids: list[str]) -> pl.DataFrame:
    return runs.tables[table].filter(pl.col("run_id").is_in(run_ids))


def _skipped(skipped: tuple[Skipped, ...], read: Mapping[Path, tuple[Path, str]]) -> tuple[Skipped, ...]:
    """What is skipped, after measurements that do not count were exchanged for others. `read`: old → new, and why."""
    new = {folder for folder, _ in read.values()}
    exchanged = [
        Skipped(
            old,
            f"it does not count ({why}), and the same run in {folder.parent} does, which is read instead",
            twin=folder,
        )
        for old, (folder, why) in read.items()
    ]
    others = [each for each in skipped if each.path not in new]
    kept = [_of_another(each, *read[each.twin]) if each.twin and each.twin in read else each for each in others]
    return tuple(sorted([*exchanged, *kept], key=lambda each: each.path))


def _of_another(skipped: Skipped, folder: Path, _: str) -> Skipped:
    return replace(skipped, reason=f"the same run in {folder.parent} is read", twin=folder)


def _unlike_environment(runs: Runs, folder: Path) -> str:
    """In what the environments of a skipped measurement and the one that is read differ that must match, in words."""
    there = runs.sweeps.get(folder.parent)
    found = there.run.filter(folder=str(folder))["run_id"] if there else pl.Series()
    if there is None or found.is_empty():
        return ""
    unlike = differences(environments_of(runs)[found[0]], environments_of(there)[found[0]])
    shown = listed([f"{key}: {a} and {b}" for key, (a, b) in unlike.items()])
    return f"; their environments differ in {shown}" if unlike else ""
