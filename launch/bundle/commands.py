"""The exact commands that measure bundled runs again, one by one."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from analysis.comparison.remedy import as_overrides
from launch.sweep import one_run
from parallelbench.config.identity import run_id
from parallelbench.config.sites import prepare_line, shipped
from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from analysis.reader import Runs
    from parallelbench.config.run import RunConfig

_NOWHERE = Path("/nonexistent")


def commands(runs: Runs, *, bundle: str) -> str:
    """A shell script: what prepares the data sets, then a command per run, each of which was held against its run id.

    A run whose settings are not all of the suite's shipped files has none, and says so.
    """
    rows = runs.run.sort("launched_at", nulls_last=True).select("run_id", "slug", "sweep", "config_json").rows()
    found = {slug: _command(msgspec.json.decode(config), known, sweep) for known, slug, sweep, config in rows}
    prepares = dict.fromkeys(line for made in found.values() if made for line in _prepares(made[0]))
    lines = [shlex.join(made[1]) if made else f"# {slug}: {_ONLY_RERUN}" for slug, made in found.items()]
    return "\n".join(
        ["#!/bin/sh", f"# All of this, and what agrees: parallelbench rerun {bundle}", *prepares, *lines, ""]
    )


_ONLY_RERUN = "not all of its settings are of shipped files, so only `parallelbench rerun` runs it again"


def _command(config: dict[str, Any], known: str, sweep: str) -> tuple[RunConfig, tuple[str, ...]] | None:
    """The run as the command would train it, and the words of the command; None where it would train another one."""
    chosen = as_overrides(config)
    if chosen is None:
        return None
    words = [f"{key}={value}" for key, value in chosen.items()]
    words += [f"repeat={config['repeat']}", f"sweep.name={sweep}", *_of_identity(config["launcher"])]
    try:
        planned = one_run(words).run
    except ConfigError:
        return None
    return (planned, ("parallelbench", "run", *words)) if run_id(planned) == known else None


def _of_identity(launcher: dict[str, Any]) -> Iterator[str]:
    """The launcher's options that are a part of the run id."""
    for key in ("oversubscribe", "pack"):
        if launcher.get(key):
            yield f"launcher.{key}=true"
    if launcher.get("name") == "inline":
        yield "launcher=inline"


def _prepares(run: RunConfig) -> list[str]:
    """The command that prepares its data set, where that makes files."""
    if not (run.data.made_by_prepare and run.data.missing_files(_NOWHERE)):
        return []
    usual = (shipped("site", "default") or {})["data_dir"]
    return [prepare_line(run.data.name, Path(usual), *run.data.prepare_options)]
