"""The frameworks that runs train with. Importing this loads none of them. See docs/adding-a-framework.md."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from parallelbench.world.machine import DeviceMemory


class Framework(NamedTuple):
    """Where a framework's parts are."""

    session: str
    """Its `RankSession`, as module:name, by which an import that fails within the module is told as it is."""
    entries: str
    """Likewise the function that gives its part of a run's environment."""
    one_device: str
    """Its strategy on one device, with which its others are compared."""
    is_held_against_torch: bool = False
    """Whether torch hands over what its ranks start from, and judges what they have trained."""
    tells_training: bool = True
    """Whether it is known what its runs compute, so that they can be held against one device; else steps alone are."""


FRAMEWORKS = {
    "torch": Framework(
        "parallelbench.training.torch_session:Session", "parallelbench.measure.torch_environment:entries", "single"
    ),
    "tensorflow": Framework(
        "parallelbench.frameworks.tensorflow.session:TensorFlowSession",
        "parallelbench.frameworks.tensorflow.world:entries",
        "tf_single",
        is_held_against_torch=True,
    ),
    "program": Framework(
        "parallelbench.frameworks.program.session:ProgramSession",
        "parallelbench.frameworks.program.told:entries",
        "program",
        tells_training=False,
    ),
}
"""Name, as in `Strategy.framework` → its parts."""

CONTROL_FD = "PARALLELBENCH_CONTROL_FD"
"""Environment variable of rank 0: the descriptor of the socket on which it waits for the other ranks."""
CONTROL_ADDRESS = "PARALLELBENCH_CONTROL_ADDRESS"
"""Environment variable of the other ranks: host:port of that socket."""
CONTROL_SECRET = "PARALLELBENCH_CONTROL_SECRET"
"""Environment variable of all ranks: by what they know each other when they meet there."""
HEAD = "PARALLELBENCH_HEAD"
"""Environment variable of ranks on several nodes: the first node's host."""
RENDEZVOUS = "PARALLELBENCH_RENDEZVOUS"
"""Environment variable of the ranks' starter, with several nodes: its node's number, the first one's host:port, and the
secret."""


def session_class(framework: str) -> Any:
    """The class of a rank's session; loads the framework."""
    return resolve_name(FRAMEWORKS[framework].session)


def entries_of(framework: str) -> dict[str, Any]:
    """The framework's part of the environment of the calling process: `packages`, and `cuda` where it has GPUs."""
    entries: dict[str, Any] = resolve_name(FRAMEWORKS[framework].entries)()
    return entries


class Meeting(Protocol):
    """One process's place among those of a run that keep a journal."""

    @property
    def rank(self) -> int:
        """0 … size − 1."""

    @property
    def size(self) -> int:
        """Processes of the run that keep a journal."""

    @property
    def local_rank(self) -> int:
        """Rank within its node."""

    @property
    def device_type(self) -> str:
        """cpu or cuda."""

    def gpus(self) -> list[tuple[str, str]]:
        """Name, and UUID as NVML writes it, of each GPU that this rank drives; none on processors."""

    def memory_bytes(self) -> list[int | None]:
        """Memory of each of these GPUs; None where nothing says it. None on processors."""

    def barrier(self) -> None:
        """Wait for all ranks, on the host."""

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in the order of the ranks, on every rank: of text, numbers, lists and None."""

    def leave(self) -> None:
        """Leave the other ranks."""


class RankWorld(Meeting, Protocol):
    """One rank's place among the processes of a run that train, and what its framework does for it on the host."""

    def reset_peaks(self) -> None:
        """Forget earlier peaks of these GPUs' memory."""

    def peaks(self) -> list[DeviceMemory]:
        """Peaks of each GPU's memory since then."""

    def synchronize(self) -> None:
        """Wait until this rank's devices are idle."""

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
