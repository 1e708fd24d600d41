"""The sampler of one node: reads all sensors at a steady rate and writes rows of `telemetry`."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import msgspec

from parallelbench.results.tables import SUSPENDED, WARNING
from parallelbench.telemetry.host import Host

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from parallelbench.results.journal import Journal
    from parallelbench.results.recording import Recorder
    from parallelbench.telemetry.nvml import SampledGpu


class SamplerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What to sample and where the rows go."""

    recording: str
    run_id: str
    attempt: int
    node: str
    hz: float
    gpus: int
    """The first `gpus` visible GPUs belong to the run."""
    spare_cores: list[int]
    """Cores that no rank is pinned to; empty: there are none, or ranks are not pinned."""
    parent: int
    """Id of the parent process, the node's first rank; the sampler ends when it does."""
    ranks: int = 1
    """Ranks on this node, all of one parent."""
    starts_ranks: bool = False
    """Whether that first rank only watches a program of the user's, whose processes are below it."""


class Sampler:
    """Takes samples of the host and of the run's GPUs."""

    def __init__(
        self,
        settings: SamplerSettings,
        recorder: Recorder,
        *,
        clock: Callable[[], float] = time.time,
        suspensions: Callable[[], Iterable[tuple[float, float]]] = tuple,
    ) -> None:
        """`suspensions`: what was found of them since the last sample."""
        self._recorder, self._clock, self._host, self._suspensions = recorder, clock, Host(), suspensions
        self._keys = {"run_id": settings.run_id, "attempt": settings.attempt, "node": settings.node}
        self._warned: set[tuple[str, str]] = set()
        self._gpus = self._open(settings.gpus) if settings.gpus else []

    def sample(self, *, last: bool = False) -> None:
        """One row per GPU, and one for the host, whose `device_uuid` is null; `last`: include what is read rarely."""
        rows = [gpu.read() for gpu in self._gpus]
        rows.append({"time": self._clock(), **self._host.read(clock=last)})
        self._recorder.record([self._keys | row for row in rows])
        for started_at, ended_at in self._suspensions():
            self._recorder.event(SUSPENDED, **self._keys, started_at=started_at, ended_at=ended_at)

    def _open(self, count: int) -> list[SampledGpu]:
        from parallelbench.telemetry.nvml import opened  # runs without GPUs need no NVML

        return opened(count, warn=self._warn, clock=self._clock)

    def _warn(self, reason: str, device: str) -> None:
        if (reason, device) not in self._warned:
            self._warned.add((reason, device))
            self._recorder.event(WARNING, reason=reason, device=device)


def sample_until(
    stopped: Callable[[float], bool], sampler: Sampler, *, hz: float, clock: Callable[[], float] = time.monotonic
) -> None:
    """Sample `hz` times a second, and once more when stopped, so that the last window lies between two samples.

    `stopped` waits at most this many seconds and returns whether to stop. Late samples are not made up for.
    """
    due = clock()
    while True:
        sampler.sample()
        due = max(due + 1 / hz, clock())
        if stopped(max(0.0, due - clock())):
            sampler.sample(last=True)
            return


GRACE_S = 3.0
"""How long a sampler may take for its last sample: NVML can be slow, and the disk too."""
END = signal.SIGHUP
"""What ends a sampler. Not SIGTERM, which Slurm may send to all processes of a job whose ranks go on for a while."""
KILLED_S = 0.1
"""How long the kernel may take to end it."""


@contextmanager
def sampling(settings: SamplerSettings, log: Journal) -> Iterator[None]:
    """Sample in a separate process during the `with`. If that fails, `log` gets a warning and the run continues."""
    try:
        process = subprocess.Popen(command_line(settings), stdin=subprocess.DEVNULL)
    except OSError as error:
        log.event(WARNING, reason=f"the sampler could not be started ({error})", device=settings.node)
        yield
        return
    try:
        yield
    except BaseException:
        # The error must not wait for the sampler's last sample.
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(KILLED_S)
        raise
    if (code := process.poll()) is not None:
        log.event(WARNING, reason=f"the sampler ended early (exit code {code})", device=settings.node)
    _end(process)


def command_line(settings: SamplerSettings) -> list[str]:
    """The sampler's command."""
    return [sys.executable, "-m", "parallelbench.telemetry", msgspec.json.encode(settings).decode()]


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(END)
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
