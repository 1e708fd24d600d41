"""Starts a node's sampler beside its first rank, and ends it with the rank."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import msgspec

from parallelbench.store.telemetry_table import WARNING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from parallelbench.telemetry.sampler import Log, SamplerSettings

GRACE_S = 3.0
"""How long a sampler may take for its last sample: NVML can be slow, and the disk too."""
KILLED_S = 0.1
"""How long the kernel may take to end it."""


@contextmanager
def sampling(settings: SamplerSettings, log: Log) -> Iterator[None]:
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
    process.terminate()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
