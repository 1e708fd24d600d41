"""The launcher interface: where runs are executed, how they are checked before, and started there.

A launcher is a subclass of `Launcher`, options (a subclass of `parallelbench.config.sites.LauncherOptions`), and a
YAML file in conf/launcher. What only Slurm has, a queue that is looked at and cancelled, is in `launch.slurm.launcher`.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rich.console import Console

    from launch.sweep import PlannedRun
    from parallelbench.config.run import RunConfig
    from parallelbench.results.folder import RunFolder, State


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
