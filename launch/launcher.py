"""What a launcher does: where it takes runs to, and how it looks after them there.

A launcher is a subclass of `Launcher`, options (a subclass of `parallelbench.spec.launchers.LauncherOptions`), and a
YAML file in conf/launcher. The suite's are in `SUITE`. A plugin's class and options are in one module of its package.
"""

from __future__ import annotations

import importlib
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path
    from types import ModuleType

    from rich.console import Console

    from launch.preparation import Prepared
    from launch.states import Look
    from launch.sweep import PlannedRun
    from parallelbench.spec.config import RunConfig
    from parallelbench.store.folder import RunFolder, State

SUITE = {
    "local": "launch.local.local_launcher.OnThisMachine",
    "inline": "launch.local.local_launcher.InThisProcess",
    "slurm": "launch.slurm.slurm_launcher.OnSlurm",
}
"""Name of a launcher → its class."""


@dataclass(frozen=True)
class SubmitOptions:
    """What `submit` was asked for, besides the runs."""

    retry: frozenset[str] = frozenset()
    """Outcomes to try again, besides those that always are."""
    max_gpu_hours: float | None = None
    """Submit nothing if the jobs may use more; None: no limit."""


@dataclass(frozen=True)
class RunStatus:
    """One run: what its folder says, and what its launcher adds."""

    state: State
    job: str = ""
    """The job that works on it; empty: none."""

    @property
    def label(self) -> str:
        """An outcome, or running, queued, missing, unknown."""
        return self.state.label

    @property
    def reason(self) -> str:
        """One line: why it waits, or how it ended."""
        return self.state.outcome.reason if self.state.outcome and self.label != "running" else ""


@dataclass(frozen=True)
class SweepStatus:
    """What a launcher knows of the runs of some sweeps."""

    runs: Mapping[RunFolder, RunStatus] = field(default_factory=dict)
    notes: Sequence[str] = ()
    """Lines about all of them: hours used, or why the scheduler gave no answer."""


class Launcher(ABC):
    """Where runs are taken to. It has no state: what it must remember is in the sweep's folder."""

    name: ClassVar[str]
    """As in the YAML file."""
    trains_here: ClassVar[bool]
    """Whether runs train on this machine and are over when `submit` returns."""

    @abstractmethod
    def device_type(self, run: RunConfig) -> str:
        """What the run's devices will be: `cpu` or `cuda`."""

    @abstractmethod
    def prepare(self, planned: PlannedRun) -> Prepared:
        """Check a run for the place where it will train; raises `ConfigError`. Writes nothing."""

    @abstractmethod
    def submit(self, prepared: Sequence[Prepared], options: SubmitOptions, console: Console) -> int:
        """Start or queue what is missing of one sweep; returns the exit code."""

    def show_plan(self, prepared: Sequence[Prepared], states: Sequence[State], console: Console) -> bool:
        """Print what `submit` would do with these runs, beyond their states; returns whether all of them can start."""
        return True

    def submitted(self, sweep: Path) -> bool:
        """Whether this launcher has queued runs of the sweep's folder."""
        return False

    def status(self, sweeps: Mapping[Path, Look]) -> SweepStatus:
        """The runs of sweeps for which `submitted` holds, as far as this launcher knows more than their folders."""
        return SweepStatus()

    def cancel(self, sweeps: Sequence[Path], console: Console) -> None:
        """End the jobs of sweeps for which `submitted` holds, and print how many."""
        raise NotImplementedError(f"{self.name} queues jobs, so it has to cancel them")

    def logs(self, sweep: Path, run: str) -> list[Path]:
        """Files with what the latest job of a run has printed, besides the logs in the run's folder."""
        return []

    def findings(self) -> Iterable[tuple[str, str]]:
        """(what, finding) pairs about the place where runs are taken to, for `doctor`."""
        return ()

    def bandwidth(self, overrides: Sequence[str]) -> Iterable[tuple[str, str]]:
        """(what, finding) pairs: how fast the nodes exchange data. Empty where there is only one."""
        return ()


def launcher_of(run: RunConfig) -> Launcher:
    """The launcher of a run; raises `ConfigError` where a plugin has options for it and no class."""
    name = run.launcher.name
    if name in SUITE:
        return _of_the_suite(name)
    module = sys.modules[type(run.launcher).__module__]
    for launcher in _defined_in(module):
        if launcher.name == name:
            return launcher
    raise ConfigError(
        f"launcher={name}: {module.__name__} has no launcher of that name: add a subclass of launch.launcher.Launcher "
        f"with name = {name!r}"
    )


def all_launchers(plugin: str | None = None) -> list[Launcher]:
    """Those of the suite and of a plugin's package."""
    own = _defined_in(importlib.import_module(plugin)) if plugin else []
    return [*map(_of_the_suite, SUITE), *own]


def _of_the_suite(name: str) -> Launcher:
    module, _, cls = SUITE[name].rpartition(".")
    launcher: Launcher = getattr(importlib.import_module(module), cls)()
    return launcher


def _defined_in(module: ModuleType) -> list[Launcher]:
    classes = [value for value in vars(module).values() if isinstance(value, type) and value.__module__ != __name__]
    return [cls() for cls in classes if issubclass(cls, Launcher) and not cls.__abstractmethods__]
