"""A run folder: its intent, its attempts, its result, and what state these say the run is in.

```
<results>/<sweep>/<slug>/
  config.yaml  overrides.txt     immutable intent, written before anything starts
  attempts/<n>/                  one per start: supervisor.json, config.yaml (as executed), attempt.json, heartbeat,
                                 log.txt, journal-rank<r>.jsonl, error-rank<r>.json, exits-node<k>.json,
                                 outcome.json
  result/                        published once, atomically: one Parquet file per table, manifest.json last
```
A valid manifest is the only proof that a run trained to its end.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import uuid
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from parallelbench.config.identity import slug
from parallelbench.errors import ConfigError, no_permission
from parallelbench.results.attempt import PUBLISHED, RETRYABLE, Attempt, Outcome, decoded, read_config, write_config
from parallelbench.results.files import is_there, storage_errors, sync

if TYPE_CHECKING:
    from collections.abc import Container

    from parallelbench.config.run import RunConfig


WITHOUT_RUNS = ("report", "paper", "exports", "submissions")
"""Folders that a sweep's folder may hold beside its runs."""
ASKED = "# asked: "
"""Begins the line of overrides.txt with the words of the command that asked for the whole sweep."""
FORGOTTEN = ".forgotten"
"""Folder of a sweep that runs are moved to which are to be measured anew. Nobody reads it; delete it when you like."""
_NUMBER = re.compile("[0-9]{1,9}")


class TableEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A manifest's entry of one table."""

    rows: int
    bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What `manifest.json` holds."""

    schema_version: int
    run_id: str
    attempt: int
    outcome: Outcome
    tables: dict[str, TableEntry]


@dataclass(frozen=True)
class State:
    """What a run folder says: `state` is done, failed, running or missing."""

    state: Literal["done", "failed", "running", "missing"]
    outcome: Outcome | None = None
    attempt: int = 0

    @property
    def label(self) -> str:
        """The outcome where there is one, else the state."""
        return self.outcome.outcome if self.outcome else self.state

    @property
    def unsuccessful(self) -> bool:
        """Whether it has ended, and not well."""
        return self.state in ("done", "failed") and self.label != "ok"

    def starts(self, retry: Container[str]) -> bool:
        """Whether submitting starts it, if outcomes in `retry` are tried again, too."""
        return self.to_run or (self.unsuccessful and self.label in retry)

    @property
    def to_run(self) -> bool:
        """Submitting the sweep again should start this run."""
        return self.state == "missing" or (self.state == "failed" and self.label in RETRYABLE)


@dataclass(frozen=True)
class RunFolder:
    """One run folder. Reading raises only where a permission is missing."""

    path: Path

    @classmethod
    def of(cls, run: RunConfig) -> RunFolder:
        """The folder where `run` belongs, whether or not it exists."""
        return cls(run.sweep_folder / slug(run))

    @property
    def result(self) -> Path:
        """The published tables."""
        return self.path / "result"

    def write_intent(self, run: RunConfig, overrides: list[str]) -> None:
        """Write `config.yaml` and `overrides.txt` where they are missing; never change them afterwards."""
        with storage_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        with storage_errors(self.path, verb="read"):
            is_new = not is_there(self.path / "config.yaml")
        if is_new:
            with storage_errors(self.path):
                # For people and for advice, so it is not worth waiting for the disk; its name is durable with the next.
                (self.path / "overrides.txt").write_text("".join(f"{line}\n" for line in overrides))
            write_config(self.path / "config.yaml", run)

    def forget(self) -> Path:
        """Move the run, with all its attempts and its result, out of the sweep: to `FORGOTTEN`; returns where it is.

        Raises `ConfigError` where it is running.
        """
        if self.state().state == "running":
            raise ConfigError(f"{self.path} is running: end it first (Ctrl-C, or `parallelbench cancel`)")
        trash = self.path.parent / FORGOTTEN
        with storage_errors(self.path):
            trash.mkdir(exist_ok=True)
            numbers = (trash / f"{self.path.name}-{number}" for number in count(1))
            target = next(path for path in numbers if not path.exists())
            os.rename(self.path, target)
            sync(self.path.parent)
        return target

    def config(self, plugin: str | None = None) -> RunConfig:
        """The intent; raises `ConfigError` where it is missing, damaged or foreign."""
        return read_config(self.path / "config.yaml", plugin)

    def attempts(self) -> list[Attempt]:
        """All starts, oldest first."""
        home = self.path / "attempts"
        try:
            attempts = [Attempt(home / name) for name in os.listdir(home) if _NUMBER.fullmatch(name)]
        except PermissionError:
            raise
        except OSError:
            return []
        return sorted(attempts, key=lambda attempt: attempt.number)

    def superseded(self, attempt: Attempt) -> bool:
        """Whether a newer attempt has begun: then `attempt` must end, and may not publish."""
        return any(other.number > attempt.number for other in self.attempts())

    def claim(self, *, after: int | None = None, job: str = "") -> Attempt | None:
        """Begin the attempt that follows number `after` (default: the last one there is), for the calling process.

        `job` is the cluster's job that the process belongs to. None where somebody else has begun the attempt: of all
        that try, exactly one gets it, and it never exists without its supervisor and the lock on its heartbeat. A
        caller that decides by the state of the last attempt passes that attempt's number.
        """
        if after is None:
            after = max((attempt.number for attempt in self.attempts()), default=0)
        path = self.path / "attempts" / str(after + 1)
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
        with storage_errors(path), ExitStack() as undo:
            undo.callback(shutil.rmtree, temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            lock = Attempt(temporary).occupy(job)
            try:
                os.rename(temporary, path)  # fails where the folder exists, for it is never empty
            except OSError as error:
                if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
                    return None
                raise
            undo.pop_all()
            sync(path.parent)
        return Attempt(path, lock)

    def manifest(self) -> dict[str, Any] | None:
        """The manifest, if every table it lists has its size; None otherwise."""
        manifest = decoded(self.result / "manifest.json", Manifest)
        if manifest is None or "run" not in manifest.tables:
            return None
        try:
            sizes = {name: (self.result / f"{name}.parquet").stat().st_size for name in manifest.tables}
        except (OSError, ValueError):
            return None
        whole = all(sizes[name] == table.bytes for name, table in manifest.tables.items())
        return msgspec.to_builtins(manifest) if whole else None

    def published(self) -> dict[str, Any] | None:
        """The manifest, if every table it lists has its sha256; None otherwise."""
        manifest = self.manifest()
        if manifest is None:
            return None
        same = (file_sha256(self.result / f"{name}.parquet") == t["sha256"] for name, t in manifest["tables"].items())
        return manifest if all(same) else None

    def state(self) -> State:
        """The state, by the first that decides: manifest, the last attempt's outcome, whether its supervisor lives."""
        try:
            return self._state()
        except PermissionError as error:
            return State("failed", Outcome(outcome="storage", reason=no_permission(error), finished_at=0.0))

    def _state(self) -> State:
        manifest = self.published()
        if manifest is not None:
            return State("done", msgspec.convert(manifest["outcome"], Outcome), manifest["attempt"])
        attempts = self.attempts()
        if not attempts:
            return State("missing")
        number = attempts[-1].number
        outcome = attempts[-1].outcome()
        if outcome is not None and outcome.outcome in PUBLISHED:
            lost = "trained to its end, but the published result is missing or damaged"
            return State("failed", Outcome(outcome="storage", reason=lost, finished_at=outcome.finished_at), number)
        if outcome is not None:
            return State("failed", outcome, number)
        if attempts[-1].supervised():
            return State("running", None, number)
        gone = Outcome(outcome="killed", reason="its supervisor ended without a record", finished_at=0.0)
        return State("failed", gone, number)


def find_runs(root: Path) -> list[RunFolder]:
    """All folders below `root` (or `root` itself) that hold a run or were made for one, in a stable order.

    Includes folders without permission, unless their name shows that they hold no run; their state says so.
    """
    if _may_be_run(str(root)):
        return [RunFolder(root)]
    runs = []
    for folder in subfolders(root):
        if _may_be_run(folder):
            runs.append(folder)
            continue
        try:
            runs += [below for below in subfolders(folder) if _may_be_run(below)]
        except PermissionError:
            runs += [folder] if _may_hold_runs(folder) else []
    return [RunFolder(Path(path)) for path in sorted(runs, key=lambda path: path.split(os.sep))]


def _may_be_run(folder: str) -> bool:
    try:
        os.stat(f"{folder}/config.yaml")
    except PermissionError:
        return _may_hold_runs(folder)
    except OSError:
        return False
    return True


def _may_hold_runs(folder: str) -> bool:
    name = os.path.basename(folder)
    return name not in WITHOUT_RUNS and not name.startswith(".")


def subfolders(path: Path | str) -> list[str]:
    """Its folders but `FORGOTTEN` and the like; [] where it is none; raises where a permission is missing."""
    try:
        with os.scandir(path) as entries:
            return [entry.path for entry in entries if not entry.name.startswith(FORGOTTEN) and entry.is_dir()]
    except PermissionError:
        raise
    except OSError:
        return []


def other_folders(root: Path, runs: list[RunFolder]) -> list[Path]:
    """The folders beside these runs below `root` that are none: half-written, or of something else."""
    if any(run.path == root for run in runs):
        return []
    expected: dict[Path, set[str]] = {root: set()}
    for run in runs:
        expected.setdefault(run.path.parent, set()).add(run.path.name)
    return [
        Path(path)
        for home, names in expected.items()
        for path in subfolders(home)
        if os.path.basename(path) not in names and _may_hold_runs(path) and Path(path) not in expected
    ]


NO_CONFIGURATION = "no config.yaml: half-written, or not a run"
"""What is said of such a folder."""


def file_sha256(path: Path) -> str:
    """sha256 of a file's content, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


WHAT_TO_NAME = "name a results folder, a sweep's folder, or a run's"


def require_folder(path: Path) -> None:
    """Raise `ConfigError` where there is no such folder, or no permission to read it."""
    try:
        os.scandir(path).close()
        os.stat(f"{path}/.")  # to list a folder is one permission, to enter it is another
    except PermissionError as error:
        raise ConfigError(no_permission(error)) from None
    except OSError:
        raise ConfigError(f"{path} is no folder: {WHAT_TO_NAME}") from None


def is_configuration_of_run(folder: Path | str) -> bool:
    """Whether the `config.yaml` of a folder is that of a run, as far as a glance tells."""
    try:
        return b"sweep_name:" in Path(f"{folder}/config.yaml").read_bytes()
    except OSError:
        return False


def no_runs(root: Path) -> str:
    """That a folder holds no runs, and the remedy."""
    return f"{root} holds no runs: {WHAT_TO_NAME}, or start runs first, e.g. parallelbench submit sweep=demo"
