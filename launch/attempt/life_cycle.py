"""The life of one attempt, the same under every launcher: claim, describe, train, then publish or judge."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from launch.attempt.outcome import publish_if_finished
from launch.attempt.processes import Training
from launch.attempt.signals import heed
from parallelbench.errors import ConfigError, StorageError
from parallelbench.world.allowance import require_run
from parallelbench.world.machine import require_interface, this_machine

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
) -> Outcome | NotBegun:
    """One attempt of a run, from its claim to its outcome.

    `skip` gives the reason not to begin one, empty where there is none. `train` runs the described attempt to its end,
    with `supervise` or `in_this_process`. `job` is recorded as the supervisor's. `submit` identifies the command that
    asked for the attempt: attempts of one command were measured together.
    """
    # Read before the state: if another process begins an attempt after this line, the claim below fails.
    attempts = folder.attempts()
    if reason := skip(folder.state(), attempts):
        return NotBegun(reason)
    if attempts and (outcome := publish_if_finished(folder, run, attempts[-1])):
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
            _describe(training, submit)
        except StorageError:
            attempt.withdraw()
            raise
        refusal = too_small(run, device_type)
        return train(training) if refusal is None else attempt.finish("error", refusal)


def _lives(attempt: Attempt, job: str) -> bool:
    """Whether the attempt before shows a sign of life after all; one of the same job was ended by the cluster."""
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
    """Refuse a node's share of a run that limits of this user keep from beginning; raises `ConfigError`."""
    ranks = run.strategy.processes(run, device_type) // run.nodes
    threads = run.cores_per_device if device_type == "cpu" else 1
    require_run(processes=ranks, threads=threads, cpu=device_type == "cpu", alone=run.nodes == 1)


def _describe(training: Training, submit: str) -> None:
    """Record how and on what the attempt is started."""
    run, share = training.run, _share(training.run, training.device_type)
    training.attempt.write_config(run)
    training.attempt.describe(
        processes=training.processes,
        device_type=training.device_type,
        oversubscribed=run.launcher.oversubscribe and not this_machine().suffices(**share),
        warnings=this_machine().caveats(**share),
        submit=submit,
    )


def _share(run: RunConfig, device_type: str) -> dict[str, Any]:
    """The devices and cores that a run needs on each of its nodes."""
    devices = run.devices // run.nodes
    return {"devices": devices, "device_type": device_type, "cores_per_device": run.cores_per_device}
