"""Run a sweep on this machine, one run after the other."""

from __future__ import annotations

import secrets
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

import msgspec

from launch.attempt.life_cycle import carry_out
from launch.attempt.supervise import Interrupted, in_this_process, stoppable, supervise
from launch.attempt.warm_workers import WarmWorkers
from launch.launcher import Launcher
from launch.local.progress import Display
from launch.preparation import checked
from launch.states import resumption
from parallelbench.errors import ConfigError
from parallelbench.rank.devices import this_machine

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import Console

    from launch.attempt.processes import Training
    from launch.launcher import SubmitOptions
    from launch.local.progress import RunWatcher
    from launch.preparation import Prepared
    from launch.sweep import PlannedRun
    from parallelbench.rank.devices import Machine
    from parallelbench.spec.config import RunConfig
    from parallelbench.store.attempt import Outcome
    from parallelbench.store.folder import State

EXIT_FAILED, EXIT_INTERRUPTED = 1, 130


class OnThisMachine(Launcher):
    """Processes of their own, on this machine."""

    name, trains_here = "local", True

    @cached_property
    def _machine(self) -> Machine:
        """This machine, looked at once for all runs of a plan: a look asks NVML and every core's topology."""
        return this_machine()

    def device_type(self, run: RunConfig) -> str:
        """CUDA where this machine has it, unless the run chooses a device."""
        return run.device if run.device != "auto" else self._machine.device_type("auto")

    def prepare(self, planned: PlannedRun) -> Prepared:
        """Check a run for this machine."""
        return prepare_here(planned, self._machine)

    def submit(self, prepared: Sequence[Prepared], options: SubmitOptions, console: Console) -> int:
        """Train the missing runs and those to try again; 0 if all runs are ok, or running elsewhere."""
        if options.max_gpu_hours is not None:
            raise ConfigError(f"--max-gpu-hours is for queued jobs, and launcher={self.name} queues none: leave it out")
        try:
            self._run_all(prepared, options.retry, Display(console))
        except Interrupted as interruption:
            over = [item.folder for item in prepared if item.folder.state().label not in ("killed", "running")]
            next_time = resumption(item.folder for item in prepared if item.folder not in over)
            console.print(f"interrupted by {interruption}; the same command starts the missing runs{next_time}")
            return EXIT_INTERRUPTED
        return 0 if all(item.folder.state().label in ("ok", "running") for item in prepared) else EXIT_FAILED

    def _run_all(self, prepared: Sequence[Prepared], retry: frozenset[str], display: Display) -> None:
        states = [item.folder.state() for item in prepared]
        to_start = [item for item, state in zip(prepared, states, strict=True) if _starts(state, retry)]
        failed = sum(state.state == "failed" and not _starts(state, retry) for state in states)
        for item in to_start:
            item.folder.write_intent(item.planned.run, item.planned.overrides)
        done = len(prepared) - len(to_start) - failed
        submit = secrets.token_hex(8)
        with WarmWorkers() as workers, stoppable(), display.sweep(total=len(to_start), done=done, failed=failed):
            for item in to_start:
                train = partial(self._train_shown, display, workers)
                self._start(item, retry, train, submit=submit)

    def _start(
        self, item: Prepared, retry: frozenset[str], train: Callable[[Training], Outcome], *, submit: str
    ) -> None:
        """Run one attempt, unless another process does."""
        carry_out(
            item.folder,
            item.planned.run,
            device_type=item.device_type,
            skip=lambda state, _: "" if _starts(state, retry) else f"is {state.label}",
            train=train,
            submit=submit,
        )

    def _train_shown(self, display: Display, workers: WarmWorkers, training: Training) -> Outcome:
        with display.run(training.folder.path.name, epochs=training.run.epochs) as watcher:
            outcome = self._train(training, watcher, workers)
            watcher.finished(outcome)
        return outcome

    def _train(self, training: Training, watcher: RunWatcher, workers: WarmWorkers) -> Outcome:
        return supervise(training, watcher=watcher, begin=workers.start)


class InThisProcess(OnThisMachine):
    """The calling process trains: `breakpoint()` and debuggers work."""

    name = "inline"

    def _train(self, training: Training, watcher: RunWatcher, workers: WarmWorkers) -> Outcome:
        return in_this_process(training)


def _starts(state: State, retry: frozenset[str]) -> bool:
    return state.to_run or (state.state == "failed" and state.label in retry)


def prepare_here(planned: PlannedRun, machine: Machine) -> Prepared:
    """Check one run for this machine."""
    run = msgspec.structs.replace(planned.run, device=machine.device_type(planned.run.device))
    if run.nodes > 1:
        raise ConfigError(f"nodes={run.nodes}, but launcher={run.launcher.name} uses one machine only: choose nodes=1")
    oversubscribed = machine.require(
        devices=run.devices,
        device_type=run.device,
        cores_per_device=run.cores_per_device,
        oversubscribe=run.launcher.oversubscribe,
    )
    return checked(replace(planned, run=run), oversubscribed=oversubscribed)
