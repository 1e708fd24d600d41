"""Trains the runs of a bundle again, with this machine's launcher and site."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from launch.launcher import SubmitOptions, launcher_of
from launch.preparation import prepare_all
from launch.sweep import PlannedRun, one_run
from parallelbench.config.sites import LocalLauncher, SlurmLauncher
from parallelbench.errors import ConfigError
from parallelbench.results.folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from analysis.reader import Runs
    from launch.sweep.compose import Extension
    from parallelbench.config.run import RunConfig

INTERRUPTED = 130
"""Exit code of a launcher that was interrupted."""
_OURS = ("launcher", "site")
"""What may be chosen when runs are trained again: none of it changes what is trained."""


def require_readable(bundled: Runs, bundle: Path) -> None:
    """Raise `ConfigError` for a bundle with results that can't be read, or without any."""
    for skipped in (each for each in bundled.skipped if each.twin is None):
        raise ConfigError(f"{bundle} holds results that can't be read: {skipped.path.name}: {skipped.reason}")
    if bundled.run.filter(state="done").is_empty():
        raise ConfigError(f"{bundle} holds no finished run: there is nothing to train again")


def planned_again(
    bundled: Runs, results: Path, overrides: Sequence[str], extension: Extension
) -> dict[str, PlannedRun]:
    """Bundled run id → the run to train, of those that trained to their end, in the order in which they were measured.

    `overrides` choose launcher and site. Raises `ConfigError` for others, and for runs of a class that is not there.
    """
    for text in overrides:
        if text.partition("=")[0].lstrip("+").partition(".")[0] not in _OURS:
            raise ConfigError(
                f"{text}: a rerun trains what was bundled; only launcher and site are chosen anew, e.g. "
                "site.data_dir=DIR launcher.timeout_s=600"
            )
    here = one_run(overrides, extension).run
    rows = bundled.run.filter(state="done").sort("launched_at", nulls_last=True).select("run_id", "folder").rows()
    plan = {}
    for run_id, folder in rows:
        run = RunFolder(Path(folder)).config(extension.plugin)
        ours = structs.replace(run, results=str(results), launcher=_launcher(run, here), site=here.site)
        plan[run_id] = PlannedRun(ours, (Path(folder) / "overrides.txt").read_text(encoding="utf-8").splitlines())
    return plan


def _launcher(run: RunConfig, here: RunConfig) -> object:
    """This machine's launcher, with those options of the run's that are a part of its id."""
    launcher = structs.replace(here.launcher, oversubscribe=run.launcher.oversubscribe)
    if isinstance(launcher, (LocalLauncher, SlurmLauncher)):
        return structs.replace(launcher, pack=run.launcher.packed)
    return launcher


def train(plan: Sequence[PlannedRun], console: Console) -> int:
    """Check all runs, then train those that are missing, sweep by sweep; `INTERRUPTED`, or the last exit code."""
    launcher = launcher_of(plan[0].run)
    prepared = prepare_all(plan, launcher.prepare)
    code = 0
    by_sweep = sorted(prepared, key=lambda item: str(item.folder.path.parent))
    for _, members in groupby(by_sweep, key=lambda item: item.folder.path.parent):
        code = launcher.submit(list(members), SubmitOptions(), console)
        if code == INTERRUPTED:
            break
    return code
