"""The launcher interface: where runs are executed, how they are checked before, and started there.

A launcher is a subclass of `Launcher`, options (a subclass of `parallelbench.config.sites.LauncherOptions`), and a
YAML file in conf/launcher. What only Slurm has, a queue that is looked at and cancelled, is in `launch.slurm.launcher`.
"""

from __future__ import annotations

import importlib
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import msgspec

from parallelbench.config.build import to_mapping
from parallelbench.config.identity import canonical_json
from parallelbench.config.run_rules import check_run
from parallelbench.config.sites import expanded
from parallelbench.environments import interpreter, require
from parallelbench.errors import ConfigError, Refusals, count_of, refuse_token
from parallelbench.measure.environment_match import flatten
from parallelbench.redaction import kind_of_token
from parallelbench.results.folder import Manifest, RunFolder, State, find_runs

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from rich.console import Console

    from launch.sweep import PlannedRun
    from parallelbench.config.run import RunConfig


LAUNCHERS = {
    "local": "launch.local.OnThisMachine",
    "inline": "launch.local.InThisProcess",
    "slurm": "launch.slurm.launcher.OnSlurm",
}
"""Name of a launcher → its class."""


@dataclass(frozen=True)
class SubmitOptions:
    """Options of `submit`, besides the runs."""

    retry: frozenset[str] = frozenset()
    """Outcomes to try again, besides those that are always tried again."""
    max_gpu_hours: float | None = None
    """Submit nothing if the jobs may use more; None: no limit."""


@dataclass(frozen=True)
class RunStatus:
    """One run: the state of its folder, and what its launcher knows."""

    state: State
    label: str
    """An outcome, or running, queued, missing, unknown."""
    reason: str = ""
    """One line: why it waits, or how it ended."""
    job: str = ""
    """The job that works on it, or did; empty: none."""
    hidden: bool = False
    """It is unknown and stays so from here: another user's job, or on a machine without the scheduler."""

    @property
    def live(self) -> bool:
        """Whether it will go on without another submission, or may, and this is known sooner or later."""
        return self.label in ("running", "queued", "unknown") and not self.hidden

    @classmethod
    def of_folder(cls, state: State) -> RunStatus:
        """What the folder alone says."""
        reason = state.outcome.reason if state.outcome and state.label != "running" else ""
        return cls(state, state.label, reason)


@dataclass(frozen=True)
class SweepStatus:
    """Runs at one moment, as their folders and their launchers describe them."""

    runs: Mapping[RunFolder, RunStatus] = field(default_factory=dict)
    notes: Sequence[str] = ()
    """Lines about all of them: hours used, or why the scheduler gave no answer."""
    disturbed: Collection[RunFolder] | None = None
    """Those whose times count in no comparison; None: nobody has judged."""

    @property
    def live(self) -> bool:
        """Whether any run will go on without another submission."""
        return any(status.live for status in self.runs.values())


class Launcher(ABC):
    """Where runs are executed. It keeps no records of its own: they are in the sweep's folder."""

    name: ClassVar[str]
    """As in the YAML file."""
    trains_here: ClassVar[bool]
    """Whether runs train on this machine and are over when `submit` returns."""

    @abstractmethod
    def device_type(self, run: RunConfig) -> str:
        """What the run's devices will be: `cpu` or `cuda`."""

    @abstractmethod
    def prepare(self, planned: PlannedRun) -> Prepared:
        """Check a run for where it will train; raises `ConfigError`. Writes nothing."""

    @abstractmethod
    def submit(self, prepared: Sequence[Prepared], options: SubmitOptions, console: Console) -> int:
        """Start or queue the missing runs of one sweep; returns the exit code."""

    def show_plan(
        self, prepared: Sequence[Prepared], states: Sequence[State], console: Console
    ) -> tuple[bool, list[bool]]:
        """Print what `submit` would do with these runs, beyond their states; returns whether it could start all that it
        would, and of each run whether it would.
        """
        return True, [state.to_run for state in states]

    def wait_s(self, prepared: Prepared) -> float | None:
        """How long a run would wait if it were submitted now, s; None: nobody says."""
        return None

    def calibrate(self, prepared: Prepared, path: Path) -> None:
        """Measure the devices and links of a run that is never trained, and write the table to `path`; waits for it.

        Raises `ConfigError` where that fails.
        """
        raise ConfigError(f"launcher={self.name} can't calibrate: choose launcher=local or launcher=slurm")


def launcher_of(run: RunConfig) -> Launcher:
    """The launcher of a run."""
    module, _, cls = LAUNCHERS[run.launcher.name].rpartition(".")
    launcher: Launcher = getattr(importlib.import_module(module), cls)()
    return launcher


@dataclass(frozen=True)
class Prepared:
    """A run that was checked for where it will train."""

    planned: PlannedRun
    """Its run's `device` is the type that it will have, `cpu` or `cuda`."""
    folder: RunFolder
    oversubscribed: bool = False
    found: State | None = None
    """What it was when it was chosen to be started, which may be a while ago; None: not chosen yet."""

    @property
    def overtaken(self) -> bool:
        """Whether a result has come in since the run was chosen, so that nothing is to be started."""
        now = self.folder.state()
        return now.state == "done" and now != self.found

    def write_intent(self) -> Path | None:
        """Write what is to be trained. The result that was chosen to be measured anew is moved out of the sweep before.

        Returns where it is then; None: there was none.
        """
        former = self.put_aside()
        self.folder.write_intent(self.planned.run, self.planned.recorded)
        return former

    def put_aside(self) -> Path | None:
        """Move the result that was chosen to be measured anew out of the sweep, and no other; returns where it is."""
        chosen = self.found is not None and self.found.state == "done"
        return self.folder.forget() if chosen and self.folder.state() == self.found else None


def checked(planned: PlannedRun, *, oversubscribed: bool = False) -> Prepared:
    """The checks of every launcher, for a run whose device type is decided; raises `ConfigError`. Writes nothing."""
    run = planned.run
    _refuse_secrets(run)
    check_run(run, run.device)
    check_data(run)
    require(run.strategy.framework, run.device)
    check_engine(run)
    return Prepared(planned, RunFolder.of(run), oversubscribed)


def _refuse_secrets(run: RunConfig) -> None:
    """Refuse a configuration that holds a token; it would be in every run's folder, in reports and in bundles."""
    plain = to_mapping(run)
    if kind_of_token(canonical_json(plain)):
        for key, value in flatten(plain).items():
            refuse_token(str(value), where=key)


def prepare_all(plan: Sequence[PlannedRun], prepare: Callable[[PlannedRun], Prepared]) -> list[Prepared]:
    """Check every run before any starts; raises `ConfigError` that names all that are refused. Writes nothing."""
    checked = prepare_each(plan, prepare)
    prepared = [item for item in checked if isinstance(item, Prepared)]
    refusals, advice = Refusals(), "; the other runs could start without it" if prepared else ""
    for planned, item in zip(plan, checked, strict=True):
        if isinstance(item, ConfigError):
            run = planned.run
            name = f"{run.data.name}, {run.model.name}, {run.strategy.name} × {run.devices}: "
            refusals.add(item, before=name if len(plan) > 1 else "", after=advice)
    refusals.raise_any()
    check_results(prepared)
    return prepared


def prepare_each(plan: Sequence[PlannedRun], prepare: Callable[[PlannedRun], Prepared]) -> list[Prepared | ConfigError]:
    """Each run, checked for where it will train, or why it is refused."""
    checked: list[Prepared | ConfigError] = []
    for planned in plan:
        try:
            checked.append(prepare(planned))
        except ConfigError as error:
            checked.append(error)
    return checked


def check_results(prepared: Iterable[Prepared]) -> None:
    """Refuse runs whose results can't be written."""
    for results in dict.fromkeys(item.planned.run.results for item in prepared):
        check_writable(expanded(results, "results"))


def check_data(run: RunConfig) -> None:
    """Refuse a run whose data set is not prepared."""
    run.data.require_files(run.site.data_folder)


def check_engine(run: RunConfig) -> None:
    """Refuse a run whose preprocessing engine is not installed here, or in another version."""
    if run.preprocess.engine != "none":
        interpreter(run.preprocess.engine)


def check_writable(path: Path, *, option: str = "results=") -> None:
    """Refuse a folder that can't be written, without writing; `option` chooses it."""
    # os.path.exists is also right about folders that can't be looked into and names that are too long.
    existing = next(parent for parent in (path.absolute(), *path.absolute().parents) if os.path.exists(parent))
    if too_long := [part for part in path.parts if len(os.fsencode(part)) > os.pathconf(existing, "PC_NAME_MAX")]:
        raise ConfigError(f"{option}{path} can't be written: {too_long[0][:20]}… is too long a name")
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK) or _read_only(existing):
        raise ConfigError(f"{option}{path} can't be written ({existing}): choose another folder with {option}DIR")


def _read_only(path: Path) -> bool:
    return bool(os.statvfs(path).f_flag & os.ST_RDONLY)


Look = Sequence[tuple["RunFolder", "State"]]
"""Runs of one sweep, whose folders have been read."""
_MANIFEST = msgspec.json.Decoder(Manifest)


def states_below(root: Path) -> list[tuple[RunFolder, State]]:
    """All runs below a folder and their states, at a glance; see `glance`."""
    return [(folder, glance(folder)) for folder in find_runs(root)]


def states_of(folders: Iterable[RunFolder]) -> list[State]:
    """The states of runs that may not have been begun, at a glance; looks once into every folder they belong in."""
    begun: dict[Path, set[str]] = {}
    states = []
    for folder in folders:
        sweep = folder.path.parent
        if sweep not in begun:
            begun[sweep] = _names(sweep)
        states.append(glance(folder) if folder.path.name in begun[sweep] else State("missing"))
    return states


def _names(folder: Path) -> set[str]:
    try:
        return set(os.listdir(folder))
    except OSError:
        return set()


def resumption(folders: Iterable[RunFolder]) -> str:
    """How unfinished runs that have begun resume when they are submitted again, as the end of a sentence."""
    begun = [folder for folder in folders if folder.attempts()]
    kept = sum(map(saved, begun))
    parts = []
    if kept:
        parts.append(f"{count_of(kept, 'run')} {'resumes' if kept == 1 else 'resume'} after the last saved epoch")
    if lost := len(begun) - kept:
        parts.append(f"{count_of(lost, 'run')} {'starts' if lost == 1 else 'start'} over because nothing was saved")
    return f": {'; '.join(parts)}" if parts else ""


def saved(folder: RunFolder) -> bool:
    """Whether there is a checkpoint from which a later attempt can resume."""
    return any(folder.path.glob("checkpoints/*/manifest.json"))


def glance(folder: RunFolder) -> State:
    """`RunFolder.state`, but for published tables of the right sizes their content is not read.

    Enough for looking: tables are published whole, by one rename. Code that starts runs or reads results compares their
    sha256, and treats a changed table as damaged.
    """
    # Strings and plain calls: with paths, 10,000 runs would take three times as long.
    result = os.path.join(folder.path, "result")
    try:
        manifest = _MANIFEST.decode(Path(f"{result}/manifest.json").read_bytes())
        tables = manifest.tables
        whole = all(os.stat(f"{result}/{name}.parquet").st_size == table.bytes for name, table in tables.items())
    except (OSError, ValueError, RecursionError):  # msgspec's errors are ValueErrors
        return folder.state()
    return State("done", manifest.outcome, manifest.attempt) if whole and "run" in tables else folder.state()
