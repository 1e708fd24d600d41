"""What a framework brings: the interface between a rank and the loop that all frameworks share. See
docs/adding-a-framework.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path


class RankWorld(Protocol):
    """One rank's place among the processes of a run, and what its framework does for it on the host."""

    @property
    def rank(self) -> int:
        """0 … size − 1."""

    @property
    def size(self) -> int:
        """Ranks of the run: processes that keep a journal."""

    @property
    def local_rank(self) -> int:
        """Rank within its node."""

    @property
    def device_type(self) -> str:
        """cpu or cuda."""

    @property
    def devices(self) -> tuple[Any, ...]:
        """torch's devices that this rank drives; empty for other frameworks."""

    def synchronize(self) -> None:
        """Wait until this rank's devices are idle."""

    def barrier(self) -> None:
        """Wait for all ranks, on the host."""

    def total(self, values: Sequence[float]) -> list[float]:
        """Sum numbers over all ranks, in fp64; every rank gets the same bits."""

    def checksum(self, copied: Iterable[Any]) -> int:
        """A number that depends on all bits of what `Replica.copied` gives."""

    def exchange_counter(self) -> Callable[[], int]:
        """Says how many collectives, sends and receives this rank has begun; always 0 where they can't be counted."""

    def random_state(self) -> Any:
        """The state of the framework's random numbers, as part of a checkpoint."""

    def set_random_state(self, states: Any) -> None:
        """Go on with that."""

    def write_state(self, state: dict[str, Any], file: BinaryIO) -> None:
        """Write what `Replica.local_state` gives; raises `OSError` where the disk is full."""

    def read_state(self, path: Path) -> dict[str, Any]:
        """Read it, to the host; raises where the file is damaged."""

    def leave(self) -> None:
        """Leave the other ranks."""
