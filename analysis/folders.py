"""Reads several folders into one report: those of several machines, or of sweeps that have measured the same runs.

Each folder stands for itself. A run that lies in two of them is kept by both, and nothing is paired between them: the
folder is a part of the work that is compared (`analysis.comparison.work`).
"""

from __future__ import annotations

import os
import shlex
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from analysis import text
from analysis.runs.published import LOADED, Tables
from analysis.runs.reader import Runs, Skipped, load
from parallelbench.errors import ConfigError, count_of
from parallelbench.results.folder import no_runs, require_folder

if TYPE_CHECKING:
    from collections.abc import Sequence


def load_all(paths: Sequence[Path | str], *, plugin: str | None = None) -> Runs:
    """Read all runs at or below these folders, as `analysis.load` does with each.

    Of several folders, run ids end in `@FOLDER`, and groups are those of one folder. What can't be read, and copies of
    what an earlier folder holds, are in `skipped`. Raises `ConfigError` for a folder that lies in another one, or
    without runs.
    """
    if len(paths) == 1:
        return load(paths[0], plugin=plugin)
    _require_apart(paths)
    parts = [load(path, plugin=plugin) for path in paths]
    for runs in parts:
        if runs.run.is_empty() and not any(skipped.is_run for skipped in runs.skipped):
            raise ConfigError(no_runs(runs.root))
    parts = _without_copies(parts)
    last = [runs.root.resolve().name for runs in parts]
    names = [name if last.count(name) == 1 else str(runs.root) for name, runs in zip(last, parts, strict=True)]
    of_names = dict(zip(names, parts, strict=True))
    own_id = pl.col("run_id")
    return Runs(
        root=Path(os.path.commonpath([runs.root.absolute() for runs in parts])),
        tables=Tables(
            {
                table: pl.concat(runs.scan(table).with_columns(own_id + f"@{name}") for name, runs in of_names.items())
                for table in LOADED
            }
        ),
        skipped=tuple(skipped for runs in parts for skipped in runs.skipped),
        notes=tuple(dict.fromkeys(note for runs in parts for note in runs.notes)),
        folders=tuple(runs.root for runs in parts),
        own_folder={f"{run_id}@{name}": name for name, runs in of_names.items() for run_id in runs.run["run_id"]},
        plugin=plugin,
    )


def _require_apart(paths: Sequence[Path | str]) -> None:
    """Refuse folders that hold the same runs because one is, or lies in, another."""
    roots = [Path(path).expanduser() for path in paths]
    for root in roots:
        require_folder(root)
    for place, root in enumerate(roots):
        for other in (*roots[:place], *roots[place + 1 :]):
            if root.resolve() == other.resolve():
                raise ConfigError(f"{root} and {other} are the same folder: name it once")
            if root.resolve().is_relative_to(other.resolve()):
                raise ConfigError(f"{root} lies in {other}, whose runs include its own: name one of them")


def _without_copies(parts: Sequence[Runs]) -> list[Runs]:
    """The same without copies of what an earlier folder holds: runs of one id that began at one time of day."""
    read: dict[tuple[str, float], Path] = {}
    kept = []
    for runs in parts:
        started = runs.select("ranks", "run_id", "training_started_at").drop_nulls().group_by("run_id").min()
        rows = runs.run.select("run_id", "folder", "launched_at").join(
            started, on="run_id", how="left", maintain_order="left"
        )
        began = rows.select("run_id", pl.coalesce("training_started_at", "launched_at"), "folder")  # not all trained
        own = {(run_id, at): Path(folder) for run_id, at, folder in began.drop_nulls().rows()}
        copies = {key: folder for key, folder in own.items() if key in read}
        others = ~pl.col("run_id").is_in([run_id for run_id, _ in copies])
        skipped = [
            Skipped(
                folder,
                f"copied from {read[key].parent}, or to there (equal times of day): it counts once",
                is_twin=True,
            )
            for key, folder in copies.items()
        ]
        tables = Tables({table: runs.scan(table).filter(others) for table in LOADED})
        kept.append(replace(runs, tables=tables, skipped=(*runs.skipped, *skipped)) if copies else runs)
        read = own | read
    return kept


def replications(runs: Runs) -> list[str]:
    """Which folders the runs are of, and how many are of several; empty where one folder was read."""
    if not runs.folders:
        return []
    shown = [f"{name} ({count_of(count, 'run')})" for name, count in Counter(runs.own_folder.values()).items()]
    counts = Counter(run_id.removesuffix(f"@{name}") for run_id, name in runs.own_folder.items())
    several = sum(count > 1 for count in counts.values())
    command = shlex.join(("parallelbench", "compare", *map(str, runs.folders[:2])))
    lines = [
        f"Runs of {len(runs.folders)} folders: {text.listed(shown, most=8)}. Within this report each is compared with "
        f"runs of its own folder only; `{command}` compares folders."
    ]
    replicated = "are in more than one of them: replications, of which each folder's counts by itself."
    return [*lines, f"{count_of(several, 'run')} {replicated}"] if several else lines
