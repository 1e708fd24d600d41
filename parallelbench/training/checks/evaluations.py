"""An evaluation before the last, kept for the closing check: best accuracies, and times to one, rest on those."""

from __future__ import annotations

import hashlib
import tempfile
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any

import torch

from parallelbench.measure.memory import release_host
from parallelbench.training.observers import Observer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from parallelbench.config.replica import Replica
    from parallelbench.config.run import RunConfig
    from parallelbench.training.observers import Row
    from parallelbench.world.world import World


def drawn_epoch(run: RunConfig, first: int) -> int | None:
    """The epoch from `first` to the last but one whose evaluation is kept; None: there is none.

    Drawn anew for each repeat, and for each attempt that goes on.
    """
    if first >= run.epochs:
        return None
    digest = hashlib.sha256(f"evaluation/{run.effective_seed}/{first}/{run.epochs}".encode()).digest()
    return first + int.from_bytes(digest[:8], "big") % (run.epochs - first)


class DrawnEvaluation(Observer):
    """Keeps the parameters that a drawn evaluation had, as one device would hold them, in a file without a name.

    In memory they would be in all later peaks.
    """

    def __init__(self, replica: Replica, run: RunConfig, world: World, *, first: int) -> None:
        """`first`: the epoch that this attempt begins with."""
        self._replica, self._world = replica, world
        self.epoch = drawn_epoch(run, first)
        self.why_not_kept = ""
        """Empty on the first rank: it is kept."""
        self._file: IO[bytes] | None = None

    def epoch_starts(self, epoch: int) -> None:
        """Note which it is."""
        self._epoch = epoch

    def epoch_evaluated(self, evaluated: Any) -> Row:
        """Keep the parameters of the drawn one; then a collective."""
        if self._epoch == self.epoch:
            self._keep(self._replica.full_state_dict())
            release_host()  # a later peak must not hold the copy
        return {}

    def _keep(self, state: Mapping[str, Tensor]) -> None:
        if self._world.rank:
            return
        try:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 - `close` closes it
            self._world.write_state(dict(state), self._file)
            self._file.flush()  # where the disk is full, it says so here
        except OSError as error:
            self.close()
            self.why_not_kept = f"its parameters could not be kept in {tempfile.gettempdir()}: {error.strerror}"

    def state(self) -> dict[str, Tensor] | None:
        """Parameters and buffers, on the first rank; None where they were not kept."""
        if self._file is None:
            return None
        self._file.seek(0)
        state: dict[str, Tensor] = torch.load(self._file, weights_only=True)
        self.close()
        return state

    def close(self) -> None:
        """Let the file go, also where what it has still buffered finds no room."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()
