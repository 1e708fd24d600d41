"""What each rank executes: `python -m parallelbench.training.worker RUN_DIR ATTEMPT [PLUGIN FOLDER]`,
alone or under torchrun.

Heavy imports happen inside, after the process is pinned to its cores, and are timed.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from parallelbench.config.identity import run_id
from parallelbench.config.plugin import require_sources
from parallelbench.frameworks import session_class
from parallelbench.processes import die_with_parent, leave, noticing_exits, withstand_sigterm
from parallelbench.results.attempt import Attempt
from parallelbench.results.journal import Journal
from parallelbench.telemetry.sampler import SamplerSettings, sampling
from parallelbench.training.failure import LINGER_S, record
from parallelbench.world.affinity import pin
from parallelbench.world.machine import node_name

if TYPE_CHECKING:
    from parallelbench.config.run import RunConfig


WATCHED_BY = "PARALLELBENCH_WATCHED_BY"
"""Environment variable: process id of the worker's supervisor on this machine."""
LAUNCHED_AT = "PARALLELBENCH_LAUNCHED_AT"
"""Environment variable: Unix time at which this rank, or what starts it on its node, was started; without it, the
attempt's counts.
"""


def main(arguments: list[str]) -> int:
    """Run one rank; every failure leaves an error file for the supervisor."""
    entered_at = time.time()
    attempt = Attempt(Path(arguments[0]) / "attempts" / arguments[1])
    # A torchrun that is killed can't end its workers: the kernel does.
    die_with_parent()
    withstand_sigterm()
    plugin = arguments[2] if len(arguments) > 2 else None
    sys.path.extend(arguments[3:])  # the plugin's folder; last, so that it shadows nothing
    return 1 if _orphaned() else work(attempt, entered_at, plugin)


def _orphaned() -> bool:
    """Whether the supervisor died before the kernel was asked to watch it."""
    watcher = os.environ.get(WATCHED_BY)
    return watcher is not None and all(str(parent.pid) != watcher for parent in psutil.Process().parents())


def work(attempt: Attempt, entered_at: float, plugin: str | None = None) -> int:
    """Train one run as this process's rank; returns the exit code."""
    rank = int(os.environ.get("RANK", "0"))
    try:
        with noticing_exits():
            _train(attempt.config(plugin), attempt, rank, entered_at)
    except (Exception, SystemExit) as error:  # a user's code may end the program, which is no success
        kind = record(attempt, rank, error)
        with contextlib.suppress(OSError):  # the log may be on the disk that is full
            traceback.print_exc()
        if kind in ("waited", "heartbeat"):
            time.sleep(LINGER_S)
        return 1
    return 0


def _train(run: RunConfig, attempt: Attempt, rank: int, entered_at: float) -> None:
    info = attempt.info()
    assert info is not None, "the supervisor describes an attempt before it starts ranks"
    require_sources(run)
    run.strategy.require_sources()
    keys = {"run_id": run_id(run), "attempt": attempt.number}
    journal = Journal(attempt.path / f"journal-rank{rank}.jsonl", keys=keys)
    journal.event("phase", phase="imports", pid=os.getpid())
    spare_cores = pin(run, info.device_type)

    with _sampler(run, attempt, journal, device_type=info.device_type, spare_cores=spare_cores):
        from parallelbench.measure.clock import StartUp

        startup = StartUp(float(os.environ.get(LAUNCHED_AT, info.launched_at)), entered_at)
        new_session = session_class(run.strategy.framework)
        session = new_session(run, attempt, device_type=info.device_type, journal=journal, startup=startup)
        session.train()
    session.leave()


def _sampler(
    run: RunConfig, attempt: Attempt, journal: Journal, *, device_type: str, spare_cores: list[int]
) -> contextlib.AbstractContextManager[None]:
    """One sampler per node, beside the node's first rank."""
    if int(os.environ.get("LOCAL_RANK", "0")) > 0 or not run.measure.telemetry_hz:
        return contextlib.nullcontext()
    node = int(os.environ.get("RANK", "0")) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    settings = SamplerSettings(
        recording=str(attempt.path / f"telemetry-node{node}.bin"),
        run_id=run_id(run),
        attempt=attempt.number,
        node=node_name(),
        hz=run.measure.telemetry_hz,
        gpus=run.devices // run.nodes if device_type == "cuda" else 0,
        spare_cores=spare_cores,
        parent=os.getpid(),
        ranks=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        starts_ranks=run.strategy.starts_ranks,
    )
    return sampling(settings, journal)


if __name__ == "__main__":
    sys.exit(leave(main(sys.argv[1:])))
