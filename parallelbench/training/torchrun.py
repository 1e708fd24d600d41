"""torchrun, which also leaves its ranks' exit codes as data: `python -m parallelbench.training.torchrun FILE OPTIONS`.

FILE is where `Exits` are written as soon as a rank fails; the options are torchrun's, as are its process and what it
prints.
"""

from __future__ import annotations

import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any


def main(arguments: list[str]) -> None:
    """Be torchrun; raises what it raises."""
    file, codes = Path(arguments[0]), dict[int, int]()
    try:
        from torch.distributed.run import main as torchrun

        with suppress(ImportError, AttributeError):  # where a later torch has another class, its error tells at the end
            _record_failures(file, codes)
        torchrun(arguments[1:])
    except Exception as error:
        failures = getattr(error, "failures", {})  # of a `ChildFailedError`, by rank
        codes = codes or {rank: one.exitcode for rank, one in failures.items()}
        _write(file, codes, failure="" if failures else _name(error))
        raise


def _record_failures(file: Path, codes: dict[int, int]) -> None:
    """Record at once the ranks that have failed by themselves: before torchrun ends the others, which may take long.

    It waits for those that hang for half a minute, may be killed meanwhile, and counts their exits as failures, too.
    """
    from torch.distributed.elastic.multiprocessing.api import SubprocessContext

    close, closed = SubprocessContext.close, set[SubprocessContext]()

    blocked = signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, [])  # in Slurm's jobs

    def noted(self: SubprocessContext, *arguments: Any, **options: Any) -> None:
        if self not in closed:
            closed.add(self)
            exits = {int(self.envs[local]["RANK"]): one.proc.poll() for local, one in self.subprocess_handlers.items()}
            codes.update({rank: code for rank, code in exits.items() if code})
            if codes:
                _write(file, codes)
        if blocked:  # else it would wait for half a minute before it kills them
            close(self, signal.SIGKILL)
        else:
            close(self, *arguments, **options)

    SubprocessContext.close = noted  # type: ignore[assignment,method-assign]


def _write(file: Path, codes: dict[int, int], *, failure: str = "") -> None:
    from parallelbench.results.exits import Exits, write_exits  # not before: every run would wait for what it loads

    write_exits(file, Exits(codes=codes, failure=failure))


def _name(error: Exception) -> str:
    """An error's class; only the text says that the store's port is taken."""
    return "EADDRINUSE" if "EADDRINUSE" in "".join(traceback.format_exception(error)) else type(error).__name__


if __name__ == "__main__":
    main(sys.argv[1:])
