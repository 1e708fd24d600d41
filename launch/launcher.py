"""The launcher interface: where runs are executed, and how they are started, watched and ended there.

A launcher is a subclass of `Launcher`, options (a subclass of `parallelbench.config.sites.LauncherOptions`), and a
YAML file in conf/launcher. The suite's are in `SUITE`. A plugin's class and options are in any modules of its package.
"""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, ClassVar

from parallelbench.errors import ConfigError, raised_at

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path
    from types import ModuleType

    from rich.console import Console

    from launch.preparation import Prepared
    from launch.states import Look
    from launch.sweep import PlannedRun
    from launch.sweep.compose import Extension
    from parallelbench.config.run import RunConfig
    from parallelbench.results.folder import RunFolder, State

SUITE = {
    "local": "launch.local.local_launcher.OnThisMachine",
    "inline": "launch.local.local_launcher.InThisProcess",
    "slurm": "launch.slurm.slurm_launcher.OnSlurm",
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
    """A launcher's information on the runs of some sweeps."""

    runs: Mapping[RunFolder, RunStatus] = field(default_factory=dict)
    notes: Sequence[str] = ()
    """Lines about all of them: hours used, or why the scheduler gave no answer."""


class Launcher(ABC):
    """Where runs are executed. It keeps no records of its own: they are in the sweep's folder."""

    name: ClassVar[str]
    """As in the YAML file."""
    trains_here: ClassVar[bool]
    """Whether runs train on this machine and are over when `submit` returns."""
    reports_afterwards: ClassVar[bool] = False
    """Whether it can queue the report of a sweep after the sweep's jobs (`queue_report`)."""

    @abstractmethod
    def device_type(self, run: RunConfig) -> str:
        """What the run's devices will be: `cpu` or `cuda`."""

    @abstractmethod
    def prepare(self, planned: PlannedRun) -> Prepared:
        """Check a run for where it will train; raises `ConfigError`. Writes nothing."""

    @abstractmethod
    def submit(self, prepared: Sequence[Prepared], options: SubmitOptions, console: Console) -> int:
        """Start or queue the missing runs of one sweep; returns the exit code."""

    def queue_report(self, prepared: Sequence[Prepared], console: Console) -> None:
        """Queue a job that writes the report of a sweep once its jobs are over, and print which."""
        raise NotImplementedError(f"{self.name} says that it can't")

    def show_plan(self, prepared: Sequence[Prepared], states: Sequence[State], console: Console) -> bool:
        """Print what `submit` would do with these runs, beyond their states; returns whether all of them can start."""
        return True

    def submitted(self, sweep: Path) -> bool:
        """Whether this launcher has queued runs of the sweep's folder."""
        return False

    def status(self, sweeps: Mapping[Path, Look]) -> SweepStatus:
        """The runs of sweeps for which `submitted` holds, if this launcher knows more than their folders."""
        return SweepStatus()

    def cancel(self, sweeps: Sequence[Path], console: Console) -> None:
        """End the jobs of sweeps for which `submitted` holds, and print how many."""
        raise NotImplementedError(f"{self.name} queues jobs, so it has to cancel them")

    def cancel_runs(self, runs: Sequence[RunFolder], console: Console) -> None:
        """End the jobs of these runs only, whose sweeps `submitted` holds for, and print how many."""
        raise ConfigError(f"launcher={self.name} cancels whole sweeps only: name {runs[0].path.parent}")

    def holding(self, sweeps: Sequence[Path]) -> AbstractContextManager[None]:
        """Keep others from queueing runs of sweeps for which `submitted` holds; raises `ConfigError` while one does."""
        return nullcontext()

    def logs(self, sweep: Path, run: str) -> list[Path]:
        """Files with what the latest job of a run has printed, besides the logs in the run's folder."""
        return []

    def silence(self, sweep: Path, run: str) -> str:
        """Why the latest job of a run can print nothing; empty where it has only not begun."""
        return ""

    def calibrate(self, prepared: Prepared, path: Path) -> None:
        """Measure the devices and links of a run that is never trained, and write the table to `path`; waits for it.

        Raises `ConfigError` where that fails.
        """
        raise ConfigError(f"launcher={self.name} can't calibrate: choose launcher=local or launcher=slurm")

    def findings(self) -> Iterable[tuple[str, str]]:
        """(what, finding) pairs about where runs are executed, for `doctor`."""
        return ()

    def site_findings(self, overrides: Sequence[str], extension: Extension) -> Iterable[tuple[str, str]]:
        """(what, finding) pairs: whether runs can be executed as the site says that overrides choose."""
        return ()

    def bandwidth(self, overrides: Sequence[str], extension: Extension) -> Iterable[tuple[str, str]]:
        """(what, finding) pairs: how fast the nodes exchange data. Empty where there is only one."""
        return ()


def launcher_of(run: RunConfig) -> Launcher:
    """The launcher of a run; raises `ConfigError` where a plugin has its options but no class for it."""
    name = run.launcher.name
    if name in SUITE:
        return _of_the_suite(name)
    plugin = type(run.launcher).__module__.partition(".")[0]
    for launcher in _of_plugin(_imported(plugin)):
        if launcher.name == name:
            return launcher
    raise ConfigError(
        f"launcher={name}: no module of {plugin} has a launcher of that name: add a subclass of "
        f"launch.launcher.Launcher with name = {name!r}"
    )


def all_launchers(plugin: str | None = None) -> list[Launcher]:
    """Those of the suite and of a plugin's package."""
    own = _of_plugin(_imported(plugin)) if plugin else ()
    return [*map(_of_the_suite, SUITE), *own]


def _of_the_suite(name: str) -> Launcher:
    module, _, cls = SUITE[name].rpartition(".")
    launcher: Launcher = getattr(importlib.import_module(module), cls)()
    return launcher


@cache
def _of_plugin(package: ModuleType) -> tuple[Launcher, ...]:
    """Those that any module of a plugin's package defines."""
    own = [
        value
        for module in _modules(package)
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Launcher) and value.__module__ == module.__name__
    ]
    return tuple(cls() for cls in own if not cls.__abstractmethods__)


def _modules(package: ModuleType) -> Iterator[ModuleType]:
    """A package and all its modules but `__main__`; imports them."""
    yield package
    for found in pkgutil.iter_modules(getattr(package, "__path__", ()), f"{package.__name__}."):
        if not found.name.endswith(".__main__"):
            yield from _modules(_imported(found.name))


def _imported(name: str) -> ModuleType:
    """A plugin's module; raises `ConfigError` for a broken one."""
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        raise ConfigError(f"{name} can't be imported: {raised_at(error)}") from None
