"""Run a sweep on this machine, one run after the other."""

from __future__ import annotations

import os
import secrets
import subprocess
from collections import Counter
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

import msgspec

from launch.attempt.command import CALIBRATION, calibration_arguments, command_line, environment
from launch.attempt.life_cycle import carry_out, require_allowed
from launch.attempt.processes import before_the_program
from launch.attempt.signals import heed
from launch.attempt.supervise import Interrupted, in_this_process, stoppable, supervise
from launch.attempt.warm_workers import WarmWorkers
from launch.launcher import Launcher
from launch.local.progress import Display
from launch.preparation import checked
from launch.slurm.own_cores import own_cores
from launch.states import resumption
from parallelbench.errors import ConfigError, one_line
from parallelbench.world.machine import this_machine, threads_here

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from rich.console import Console

    from launch.attempt.processes import Training
    from launch.launcher import SubmitOptions
    from launch.local.progress import RunWatcher
    from launch.preparation import Prepared
    from launch.sweep import PlannedRun
    from parallelbench.config.run import RunConfig
    from parallelbench.results.attempt import Outcome
    from parallelbench.world.machine import Machine

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

    def calibrate(self, prepared: Prepared, path: Path) -> None:
        """In processes of their own, as runs are measured."""
        run, words = prepared.planned.run, calibration_arguments(prepared, path)
        processes = run.strategy.processes(run, prepared.device_type)
        variables = environment(run, prepared.device_type, os.environ, cores=threads_here())
        done = subprocess.run(
            command_line(words, processes, program=CALIBRATION),
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=before_the_program,
        )
        if done.returncode:
            raise ConfigError(f"the calibration failed: {one_line(done.stdout.decode(errors='replace')[-500:])}")

    def _run_all(self, prepared: Sequence[Prepared], retry: frozenset[str], display: Display) -> None:
        states = [item.folder.state() for item in prepared]
        to_start = [item for item, state in zip(prepared, states, strict=True) if state.starts(retry)]
        rest = Counter(state.label for state in states if state.unsuccessful and not state.starts(retry))
        for item in to_start:
            item.write_intent()
        done = len(prepared) - len(to_start) - rest.total()
        submit = secrets.token_hex(8)
        with stoppable(), WarmWorkers() as workers, display.sweep(total=len(to_start), done=done, failed=rest):
            for item in to_start:
                heed()  # also what came while the run before was judged
                train = partial(self._train_shown, display, workers)
                self._start(item, retry, train, submit=submit)

    def _start(
        self, item: Prepared, retry: frozenset[str], train: Callable[[Training], Outcome], *, submit: str
    ) -> None:
        """Run one attempt, unless another process does."""
        item.folder.write_intent(item.planned.run, item.planned.overrides)  # it may have been pruned while it waited
        run = item.planned.run
        with own_cores(item.device_type, needed=run.devices * run.cores_per_device):
            carry_out(
                item.folder,
                run,
                device_type=item.device_type,
                skip=lambda state, _: "" if state.starts(retry) and state.state != "done" else f"is {state.label}",
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


def prepare_here(planned: PlannedRun, machine: Machine) -> Prepared:
    """Check one run for this machine."""
    run = msgspec.structs.replace(planned.run, device=machine.device_type(planned.run.device))
    if run.nodes > 1:
        raise ConfigError(f"nodes={run.nodes}, but launcher={run.launcher.name} uses one machine only: choose nodes=1")
    try:
        oversubscribed = machine.require(
            devices=run.devices,
            device_type=run.device,
            cores_per_device=run.cores_per_device,
            oversubscribe=run.launcher.oversubscribe,
        )
    except ConfigError as error:
        if machine.suffices(devices=run.devices, device_type=run.device, cores_per_device=run.cores_per_device):
            raise  # what is there can't be used
        raise ConfigError(f"{error}; to plan for a cluster, add launcher=slurm site=…") from None
    prepared = checked(replace(planned, run=run), oversubscribed=oversubscribed)
    require_allowed(run, run.device)
    return prepared
