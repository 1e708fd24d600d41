"""The sampler's process: `python -m parallelbench.telemetry SETTINGS`, ended by `END`, and by its parent's death."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

import msgspec

from parallelbench.processes import die_with_parent
from parallelbench.telemetry.sampler import END, Sampler, SamplerSettings, sample_until
from parallelbench.telemetry.suspension import Watch


def main(settings_json: str) -> int:
    """Sample until `END` comes."""
    settings = msgspec.json.decode(settings_json, type=SamplerSettings)
    _step_aside(settings.spare_cores)
    # After that, since these imports are the largest piece of work of this process.
    from parallelbench.errors import StorageError
    from parallelbench.results.recording import Recorder

    die_with_parent()
    if os.getppid() != settings.parent:  # the parent died before the kernel was asked to watch it
        return 1
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, END})
    with contextlib.suppress(StorageError):  # the run continues without telemetry; its ranks report a full disk
        recorder, watch = (
            Recorder(Path(settings.recording)),
            Watch(settings.parent, settings.ranks, below=settings.starts_ranks),
        )
        sampler = Sampler(settings, recorder, suspensions=watch.taken)
        watch.start()
        sample_until(_stopped, sampler, hz=settings.hz)
        recorder.close()
    return 0


def _step_aside(spare_cores: list[int]) -> None:
    """Keep off the ranks' cores; where there are no others, give the ranks priority."""
    if spare_cores:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, spare_cores)
    else:
        os.nice(19)


def _stopped(timeout_s: float) -> bool:
    came = signal.sigtimedwait({END}, timeout_s)
    # Python returns something else where another signal interrupts the wait after its end, as SIGCONT does.
    return came is not None and came.si_signo == END


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
