"""torchrun, which also leaves its ranks' exit codes as data: `python -m parallelbench.training.torchrun FILE OPTIONS`.

FILE is where `Exits` are written once something fails; the options are torchrun's, as are its process and what it
prints.
"""

from __future__ import annotations

import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import signal

    from parallelbench.results.exits import Exits


def main(arguments: list[str]) -> None:
    """Be torchrun; raises what it raises."""
    ended: set[int] = set()
    try:
        from torch.distributed.run import main as torchrun

        with suppress(ImportError, AttributeError):  # where a later torch has another class, none is noted
            _note_whom_it_ends(ended)
        torchrun(arguments[1:])
    except Exception as error:
        from parallelbench.results.exits import write_exits  # not before: every run would wait for what it loads

        write_exits(Path(arguments[0]), exits_of(error, ended))
        raise


def _note_whom_it_ends(ended: set[int]) -> None:
    """Add the local ranks that torchrun ends because another has failed: it counts their exits as failures, too."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

    close = SubprocessHandler.close

    def noted(self: SubprocessHandler, death_sig: signal.Signals | None = None) -> None:
        ended.add(self.local_rank_id)
        close(self, death_sig)

    SubprocessHandler.close = noted  # type: ignore[method-assign]


def exits_of(error: Any, ended: set[int]) -> Exits:
    """What an error of torchrun's says: its `ChildFailedError` has the failures by rank."""
    from parallelbench.results.exits import Exits

    if failures := getattr(error, "failures", None):
        return Exits(codes={rank: one.exitcode for rank, one in failures.items() if one.local_rank not in ended})
    # Only the text of an error says that the store's port is taken.
    taken = "EADDRINUSE" in "".join(traceback.format_exception(error))
    return Exits(failure="EADDRINUSE" if taken else type(error).__name__)


if __name__ == "__main__":
    main(sys.argv[1:])
