"""The sampler's process: `python -m parallelbench.telemetry SETTINGS`, ended by SIGTERM, and by its parent's death."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

import msgspec

from parallelbench.telemetry.sampler import Sampler, SamplerSettings, sample_until

_PR_SET_PDEATHSIG = 1


def main(settings_json: str) -> int:
    """Sample until SIGTERM comes."""
    settings = msgspec.json.decode(settings_json, type=SamplerSettings)
    _step_aside(settings.spare_cores)
    # Only then: these imports are most of the work that this process ever does at once.
    from parallelbench.errors import StorageError
    from parallelbench.store.journal import Journal

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != settings.parent:  # it died before the kernel was asked to watch it
        return 1
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever started this
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    with contextlib.suppress(StorageError):  # a run goes on without telemetry; its ranks have their own troubles
        journal = Journal(Path(settings.journal))
        sample_until(_stopped, Sampler(settings, journal), hz=settings.hz)
        journal.commit()
        journal.close()
    return 0


def _step_aside(spare_cores: list[int]) -> None:
    """Keep off the cores that ranks are pinned to; where there are no others, let the ranks go first."""
    if spare_cores:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, spare_cores)
    else:
        os.nice(19)


def _stopped(timeout_s: float) -> bool:
    return signal.sigtimedwait({signal.SIGTERM}, timeout_s) is not None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
