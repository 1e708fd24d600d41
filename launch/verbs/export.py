"""The verb `export`: finished runs for MLflow or Weights & Biases."""

from __future__ import annotations

import importlib
import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from launch.verbs.console import existing, say
from parallelbench.errors import ConfigError, count_of, one_line
from parallelbench.results.files import storage_errors

if TYPE_CHECKING:
    from launch.sweep.compose import Extension


class _Tracker(NamedTuple):
    """A program that shows runs."""

    package: str
    """What pip installs; also the extra's name in pyproject.toml, but for MLflow's."""
    module: str
    next_command: str
    """What shows or uploads the folder."""


TRACKERS = {
    "mlflow": _Tracker("mlflow-skinny", "mlflow", "MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri {}"),
    "wandb": _Tracker("wandb", "wandb", "wandb sync {}/wandb/offline-run-*"),
}


def export(folder: str, extension: Extension, *, to: str, out: str | None) -> int:
    """Write the finished runs below a folder to a new folder, and print what shows it."""
    from analysis import format_exclusions, load
    from analysis.comparison.exclusions import require_finished
    from analysis.export import exported_runs, write_mlflow, write_wandb

    tracker = TRACKERS[to]
    root = existing(folder)
    _require_installed(to, tracker)
    runs = load(root, plugin=extension.plugin)
    require_finished(runs)
    final = Path(out).expanduser() if out else runs.root / "exports" / to
    _require_free(final)
    exported = exported_runs(runs)
    write = {"mlflow": write_mlflow, "wandb": write_wandb}[to]
    with storage_errors(final, option="--out DIR"):
        final.mkdir(parents=True, exist_ok=True)
        try:
            write(exported, final)
        except BaseException:
            shutil.rmtree(final, ignore_errors=True)
            raise
    unfinished = runs.run.height - len(exported)
    left = f"; {count_of(unfinished, 'run')} without a result left out" if unfinished else ""
    doubtful = sum(run.tags["counts"] == "false" for run in exported)
    marked = f"; {doubtful} marked, which {'does' if doubtful == 1 else 'do'} not count" if doubtful else ""
    say(f"{count_of(len(exported), 'run')} exported{left}{marked}.")
    for line in format_exclusions(runs) if doubtful else []:
        say(line)
    say(f"Next: {tracker.next_command.format(shlex.quote(str(final)))}")
    print(final)
    return 0


def _require_installed(to: str, tracker: _Tracker) -> None:
    """Raise `ConfigError` that says what to install."""
    try:
        importlib.import_module(tracker.module)
    except ImportError as error:
        fix = f"pip install --upgrade {tracker.package}"
        raise ConfigError(f"--to {to} needs {tracker.package}: {one_line(str(error))}; {fix}") from None


def _require_free(final: Path) -> None:
    if final.exists() and not (final.is_dir() and not any(final.iterdir())):
        raise ConfigError(f"{final} exists and is not empty: delete it, or choose another folder with --out DIR")
