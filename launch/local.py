"""Runs on this machine, one after the other, and their progress on a terminal."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import msgspec
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from launch.attempt.processes import (
    CALIBRATION,
    WarmWorkers,
    before_the_program,
    calibration_arguments,
    command_line,
    environment,
)
from launch.attempt.signals import action_of, heed, noting
from launch.attempt.supervisor import (
    Interrupted,
    NotBegun,
    carry_out,
    in_this_process,
    require_allowed,
    stoppable,
    supervise,
)
from launch.checks import checked
from launch.launcher import Launcher
from launch.states import resumption
from parallelbench.config.dataset_check import require_memory
from parallelbench.errors import ConfigError, StorageError, count_of, duration, one_line
from parallelbench.world.affinity import own_cores
from parallelbench.world.machine import host_memory_bytes, this_machine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from rich.console import Console

    from launch.attempt.processes import Training
    from launch.launcher import Prepared, SubmitOptions
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
            states = {item.folder: item.folder.state() for item in prepared}
            next_time = resumption(each for each, state in states.items() if state.to_run or state.label == "running")
            console.print(f"interrupted by {interruption}; the same command starts the missing runs{next_time}")
            return EXIT_INTERRUPTED
        return 0 if all(item.folder.state().label in ("ok", "running") for item in prepared) else EXIT_FAILED

    def calibrate(self, prepared: Prepared, path: Path) -> None:
        """In processes of their own, as runs are measured."""
        run, words = prepared.planned.run, calibration_arguments(prepared, path)
        processes = run.strategy.processes(run, run.device)
        variables = environment(run, run.device, os.environ)
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
        both = zip(prepared, states, strict=True)
        to_start = [replace(item, found=state) for item, state in both if state.starts(retry)]
        rest = Counter(state.label for state in states if state.unsuccessful and not state.starts(retry))
        for item in to_start:
            item.write_intent()
        done = len(prepared) - len(to_start) - rest.total()
        submit = secrets.token_hex(8)
        whole = display.sweep(total=len(to_start), done=done, failed=rest)
        with stoppable(), _Stop().heeding(display.stopping) as stop, WarmWorkers() as workers, whole:
            for item in to_start:
                heed()  # also what came while the run before was judged
                train = partial(self._train_shown, display, workers, stop)
                outcome = self._start(item, retry, train, submit=submit)
                if isinstance(outcome, NotBegun):
                    display.not_started(item.folder.path.name, outcome.reason)
                stop.raise_any()

    def _start(
        self, item: Prepared, retry: frozenset[str], train: Callable[[Training], Outcome], *, submit: str
    ) -> Outcome | NotBegun:
        """Run one attempt, unless another process does."""
        item.folder.write_intent(item.planned.run, item.planned.recorded)  # it may have been forgotten while it waited
        run = item.planned.run
        with own_cores(run.device, needed=run.devices * run.cores_per_device):
            return carry_out(
                item.folder,
                run,
                device_type=run.device,
                skip=lambda state, _: "" if state.starts(retry) and state.state != "done" else f"is {state.label}",
                train=train,
                submit=submit,
            )

    def _train_shown(self, display: Display, workers: WarmWorkers, stop: _Stop, training: Training) -> Outcome:
        name, begun_at = training.folder.path.name, time.monotonic()
        with stop.of(training), display.run(name, epochs=training.run.epochs):
            outcome = self._train(training, display, workers)
            display.report(name, outcome, time.monotonic() - begun_at)
        return outcome

    def _train(self, training: Training, display: Display, workers: WarmWorkers) -> Outcome:
        return supervise(training, watcher=display.event, begin=workers.start)


class InThisProcess(OnThisMachine):
    """The calling process trains: `breakpoint()` and debuggers work."""

    name = "inline"

    def _train(self, training: Training, display: Display, workers: WarmWorkers) -> Outcome:
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
    memories = [gpu.memory_bytes for gpu in machine.gpus[: run.devices] if gpu.memory_bytes is not None]
    require_memory(run, node_bytes=host_memory_bytes(), device_bytes=min(memories, default=None))
    require_allowed(run, run.device)
    return prepared


class _Stop:
    """What a signal does that asks to stop: a run that saves checkpoints trains its epoch to the end, and saves.

    A second signal ends the run at once, as Ctrl-C does in any case.
    """

    def __init__(self) -> None:
        self._training: Training | None = None
        self._asked_by: signal.Signals | None = None

    @contextmanager
    def heeding(self, tell: Callable[[str, str], object]) -> Iterator[_Stop]:
        """Within `stoppable`. `tell` is called with the name of a run that is asked to stop, and with the signal's."""

        def ask(number: signal.Signals) -> None:
            training = self._training
            if number is signal.SIGHUP is self._asked_by:  # a shell may send it again as it ends
                return
            if self._asked_by is not None or training is None or not _saves(training.run):
                raise Interrupted(number.name)
            try:
                training.attempt.ask_to_stop()
            except StorageError:
                raise Interrupted(number.name) from None
            self._asked_by = number
            tell(training.folder.path.name, number.name)

        # An ignored signal stays ignored.
        with noting([each for each in (signal.SIGTERM, signal.SIGHUP) if action_of(each)], ask):
            yield self

    @contextmanager
    def of(self, training: Training) -> Iterator[None]:
        """While a run trains."""
        self._training = training
        try:
            yield
        finally:
            self._training = None

    def raise_any(self) -> None:
        """Raise `Interrupted` where a run was asked to stop: no other one begins."""
        if self._asked_by is not None:
            raise Interrupted(self._asked_by.name)


def _saves(run: RunConfig) -> bool:
    return run.launcher.checkpoint != "never" and not run.launcher.in_this_process and run.epochs > 1


_STYLES = {"ok": "green", "parity_failed": "yellow"}


class Display:
    """Shows a sweep's progress, which is that of one run after the other."""

    def __init__(self, console: Console) -> None:
        self.console = console
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
        )
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._sweep: TaskID | None = None
        self._run = TaskID(0)
        self._accuracy: float | None = None
        self._total = self._started = 0
        self._begun_at = 0.0

    @contextmanager
    def sweep(self, *, total: int, done: int, failed: Mapping[str, int]) -> Iterator[None]:
        """A context around all runs. Those `done` are not started, nor those that `failed`: outcome → how many."""
        self._total, self._begun_at = total, time.monotonic()
        if done:
            verb = "is" if done == 1 else "are"
            self.console.print(f"{count_of(done, 'run')} {verb} done or running already; {total} to start")
        if failed:
            counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(failed.items()))
            self.console.print(f"not started: {counts} (--retry {','.join(sorted(failed))} tries again)")
        with self._progress:
            if total > 1:
                self._sweep = self._progress.add_task("sweep", total=total, note="")
            yield

    @contextmanager
    def run(self, name: str, *, epochs: int) -> Iterator[None]:
        """A context around one run."""
        self._started, self._accuracy = self._started + 1, None
        self._run = self._progress.add_task(name, total=epochs, note="starting")
        try:
            yield
        finally:
            self._progress.remove_task(self._run)

    def event(self, event: dict[str, Any]) -> None:
        """A line of the run's journal: a phase that begins, or an epoch that is done."""
        if event.get("table") == "epochs":
            row = event["row"]
            self._accuracy = row["test_accuracy"]
            note = f"epoch {row['epoch']}: the loss is not finite"
            if row["test_loss"] is not None and row["train_loss"] is not None:
                note = f"epoch {row['epoch']}: test accuracy {row['test_accuracy']:.1%}, loss {row['test_loss']:.3f}"
            self._progress.update(self._run, completed=row["epoch"], note=note)
        elif event["event"] == "phase" and self._accuracy is None:
            epoch = f" {event['epoch']}/{event['epochs']}" if "epoch" in event else ""
            self._progress.update(self._run, note=f"{event['phase']}{epoch}")

    def not_started(self, name: str, reason: str) -> None:
        """One line for a run that another process has taken up, or ended, since this one chose it."""
        self.console.print(f"not started: {escape(name)} {escape(reason)}", highlight=False)

    def stopping(self, name: str, asked_by: str) -> None:
        """One line for a run that was asked to stop."""
        self.console.print(
            f"{asked_by}: {escape(name)} stops after its epoch, and saves; a second signal, or Ctrl-C, ends it at once",
            highlight=False,
        )

    def report(self, name: str, outcome: Outcome, seconds: float) -> None:
        """One lasting line per finished run."""
        style = _STYLES.get(outcome.outcome, "red")
        count = f"[{self._started}/{self._total}] " if self._total > 1 else ""
        result = "" if self._accuracy is None else f"test accuracy {self._accuracy:.1%}, "
        reason = "" if outcome.outcome == "ok" else f"  {escape(outcome.reason)}"
        self.console.print(
            f"{count}[{style}]{outcome.outcome}[/] {name}  {result}{seconds:.1f} s{reason}", highlight=False
        )
        if self._sweep is not None:
            left_s = (time.monotonic() - self._begun_at) / self._started * (self._total - self._started)
            self._progress.update(self._sweep, completed=self._started, note=f"about {duration(left_s)} left")
