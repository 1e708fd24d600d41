"""One attempt, the same under every launcher: claimed, described, trained under watch, then published or judged."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from launch.attempt.outcome import interrupted, judge, publish_if_finished, stopped, unsaved
from launch.attempt.processes import Here, Training, WarmProcess, redacted_log
from launch.attempt.signals import heed, heeding_at_once, noting, rest
from parallelbench.config.plugin import plugin_of
from parallelbench.errors import ConfigError, StorageError, SupersededError
from parallelbench.processes import without_foreign
from parallelbench.results.attempt import HEARTBEAT_S
from parallelbench.results.journal import read_entries_from
from parallelbench.world.allowance import require_run
from parallelbench.world.machine import require_interface, this_machine

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from launch.attempt.processes import Process
    from parallelbench.config.run import RunConfig
    from parallelbench.results.attempt import Attempt, Outcome
    from parallelbench.results.folder import RunFolder, State


@dataclass(frozen=True)
class NotBegun:
    """No attempt was begun."""

    reason: str
    published: Outcome | None = None
    """The outcome of the last attempt, if only its publication was missing."""


def carry_out(
    folder: RunFolder,
    run: RunConfig,
    *,
    device_type: str,
    skip: Callable[[State, Sequence[Attempt]], str],
    train: Callable[[Training], Outcome],
    job: str = "",
    submit: str = "",
    job_ends_at: float | None = None,
    waited_s: float | None = None,
) -> Outcome | NotBegun:
    """One attempt of a run, from its claim to its outcome.

    `skip` gives the reason not to begin one, empty where there is none. `train` runs the described attempt to its end,
    with `supervise` or `in_this_process`. `job` is recorded as the supervisor's, `job_ends_at` (Unix time, s) as when
    the cluster ends it, and `waited_s` as how long it was queued. `submit` identifies the command that asked for the
    attempt: attempts of one command were measured together.
    """
    # Read before the state: if another process begins an attempt after this line, the claim below fails.
    attempts = folder.attempts()
    if reason := skip(folder.state(), attempts):
        return NotBegun(reason)
    if attempts and (outcome := publish_if_finished(folder, _as_executed(attempts[-1], run), attempts[-1])):
        return NotBegun(f"had finished: {outcome.outcome}: {outcome.reason}", outcome)
    if attempts and _lives(attempts[-1], job):
        return NotBegun("runs elsewhere: its heartbeat goes on")
    heed()  # looking may have taken a while
    attempt = folder.claim(after=attempts[-1].number if attempts else 0, job=job)
    if attempt is None:
        return NotBegun("was begun by another process")
    training = Training(folder, run, attempt, device_type)
    with attempt.kept():
        try:
            _describe(training, submit, job_ends_at, waited_s)
        except StorageError:
            attempt.withdraw()
            raise
        refusal = too_small(run, device_type)
        return train(training) if refusal is None else attempt.finish("error", refusal)


def _as_executed(attempt: Attempt, run: RunConfig) -> RunConfig:
    """The run with the launcher and the site that the attempt had, which may be others today."""
    try:
        return attempt.config(*plugin_of(run)[:1])
    except ConfigError:
        return run


def _lives(attempt: Attempt, job: str) -> bool:
    """Whether the attempt before still runs. One of the same Slurm job can't: the cluster ended it before restarting
    the job.
    """
    supervisor = attempt.supervisor()
    of_this_job = bool(job) and supervisor is not None and supervisor.job.rpartition(".")[0] == job.rpartition(".")[0]
    return attempt.outcome() is None and not of_this_job and attempt.stirs()


def too_small(run: RunConfig, device_type: str) -> str | None:
    """Why this machine can't do its share of a run; None where it can."""
    try:
        this_machine().require(**_share(run, device_type), oversubscribe=run.launcher.oversubscribe)
        require_allowed(run, device_type)
        require_interface("nccl.interface", run.nccl.interface)
        if run.nodes > 1:
            require_interface("site.network_interface", run.site.network_interface)
    except ConfigError as error:
        return str(error)
    return None


def require_allowed(run: RunConfig, device_type: str) -> None:
    """Raise `ConfigError` if this user's limits (processes, threads) are too low for this node's share of a run."""
    ranks = run.strategy.processes(run, device_type) // run.nodes
    threads = run.cores_per_device if device_type == "cpu" else 1
    require_run(processes=ranks, threads=threads, cpu=device_type == "cpu", alone=run.nodes == 1)


def _describe(training: Training, submit: str, job_ends_at: float | None, waited_s: float | None) -> None:
    """Record how and on what the attempt is started."""
    run, share = training.run, _share(training.run, training.device_type)
    training.attempt.write_config(run)
    training.attempt.describe(
        processes=training.processes,
        device_type=training.device_type,
        oversubscribed=run.launcher.oversubscribe and not this_machine().suffices(**share),
        warnings=this_machine().caveats(**share),
        submit=submit,
        job_ends_at=job_ends_at,
        waited_s=waited_s,
    )


def _share(run: RunConfig, device_type: str) -> dict[str, Any]:
    """The devices and cores that a run needs on each of its nodes."""
    devices = run.devices // run.nodes
    return {"devices": devices, "device_type": device_type, "cores_per_device": run.cores_per_device}


_READ_S = 1.0
"""Between two looks into the journal, which may be on a shared disk."""


class Interrupted(KeyboardInterrupt):
    """The user or the system has sent this process a signal to stop."""


@contextmanager
def stoppable() -> Iterator[None]:
    """Let SIGINT, SIGTERM and SIGHUP raise `Interrupted` at the next `heed`, so that ranks are ended and recorded."""

    def interrupt(number: signal.Signals) -> None:
        raise Interrupted(number.name)

    # An ignored signal stays ignored, as nohup requires.
    heeded = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
    with noting(heeded, interrupt):
        yield


Watcher = Callable[[dict[str, Any]], None]
"""Gets each journal entry of rank 0, an event or a row of `epochs`, to show a run's progress."""


def supervise(
    training: Training,
    *,
    watcher: Watcher | None = None,
    begin: Callable[[Training, Any], Process] | None = None,
    until: Callable[[], float] = lambda: math.inf,
) -> Outcome:
    """Run one described attempt to its end; returns its outcome, which is also on disk.

    `begin` starts its processes, which print to a log; None: on this machine. `until`: when they must end, by the
    monotonic clock, as it is known at each look.

    Raises `Interrupted` after the ranks have been ended and the outcome `killed` has been recorded.
    """
    folder, run, attempt = training.folder, training.run, training.attempt
    try:
        with noting([signal.SIGCHLD], lambda _: None), redacted_log(attempt.log) as log:
            process = (begin or Here().start)(training, log)
            try:
                out_of_time = _watch(process, training, watcher, until)
            finally:
                process.end()
    except Interrupted as interruption:
        if publish_if_finished(folder, run, attempt) is None:
            attempt.finish(*interrupted(attempt, training.processes, f"interrupted by {interruption}"))
        raise
    except SupersededError as error:
        return attempt.finish("killed", str(error))
    except StorageError as error:
        return attempt.finish("storage", str(error))
    if published := publish_if_finished(folder, run, attempt):
        return published
    if out_of_time and stopped(attempt) is None:
        why = unsaved(attempt)
        return attempt.finish(
            "timeout", f"{out_of_time}; the epochs before could not be saved: {why}" if why else out_of_time
        )
    return attempt.finish(*judge(attempt, training.processes, process.wait()))


def in_this_process(training: Training) -> Outcome:
    """Run the attempt in this process, for debuggers. Its threads, cores and seeds stay changed."""
    from parallelbench.training.worker import work

    folder, run, attempt = training.folder, training.run, training.attempt
    try:
        with heeding_at_once(), without_foreign():
            code = work(attempt, time.time(), *plugin_of(run)[:1])
    except Interrupted as interruption:
        attempt.finish("killed", f"interrupted by {interruption}")
        raise
    return publish_if_finished(folder, run, attempt) or attempt.finish(*judge(attempt, 1, code))


def _watch(process: Process, training: Training, watcher: Watcher | None, until: Callable[[], float]) -> str:
    """Sleep until the process ends, or its time is over; returns the reason for the latter, else nothing.

    Raises `SupersededError` if another supervisor considered this one dead and began the next attempt, and
    `Interrupted`.
    """
    journal, next_byte = training.attempt.path / "journal-rank0.jsonl", 0
    limit_s = training.run.launcher.timeout_s or math.inf
    deadline = time.monotonic() + limit_s
    next_read = next_look = 0.0
    while True:
        ended = process.poll() is not None
        heed()
        now = time.monotonic()
        if ended or now >= next_read:
            if watcher is not None:
                fresh, next_byte = read_entries_from(journal, next_byte)
                for entry in fresh:
                    if "event" in entry or entry["table"] == "epochs":
                        watcher(entry)
            next_read = now + _READ_S
        if ended:
            return ""
        if now > deadline:
            return f"not done after launcher.timeout_s={limit_s:g}"
        if now > until():
            return "ended within an epoch, since the time of its job was nearly up"
        if now > next_look:
            if training.folder.superseded(training.attempt):
                raise SupersededError
            next_look = now + HEARTBEAT_S
        # A child's end comes as a signal, that of a warm process's fork as a message: wait for both.
        rest(min(next_read, deadline, until()) - now, *([process] if isinstance(process, WarmProcess) else []))
