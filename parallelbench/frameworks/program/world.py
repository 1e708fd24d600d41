"""One node's place among the nodes of a program's run: `parallelbench.frameworks.RankWorld` as far as it is needed."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

from parallelbench.frameworks import HEAD
from parallelbench.frameworks.control_group import meet
from parallelbench.world.machine import cpu_name, visible_gpus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from parallelbench.config.run import RunConfig


def _free_port() -> int:
    with socket.create_server(("", 0)) as free:
        return int(free.getsockname()[1])


class ProgramWorld:
    """A node's monitor, and the other nodes'."""

    def __init__(self, run: RunConfig, device_type: str) -> None:
        self.size, here = run.nodes, run.devices // run.nodes
        self.rank = self.node = int(os.environ.get("RANK", "0"))
        self.local_rank, self.device_type = 0, device_type
        self._gpus = visible_gpus()[:here] if device_type == "cuda" else ()
        self._group = meet(self.rank, self.size, timeout_s=run.launcher.collective_timeout_s)
        self.head = os.environ.get(HEAD) or "127.0.0.1"
        """Host of the first node."""
        self.port: int = self.gather(_free_port())[0]
        """For the program's own ranks to meet at; free on the first node a moment ago."""

    def gpus(self) -> list[tuple[str, str]]:
        """Name and UUID of each GPU of this node that belongs to the run."""
        return [(gpu.name, gpu.uuid) for gpu in self._gpus]

    def memory_bytes(self) -> list[int | None]:
        """As the driver has it, a little more than a program gets."""
        return [gpu.memory_bytes for gpu in self._gpus]

    @property
    def device_name(self) -> str:
        """Name of the GPUs or of the processor."""
        return self._gpus[0].name if self._gpus else cpu_name()

    def devices_of(self, local_rank: int, cores: Sequence[int]) -> str:
        """What `ranks` says of a rank's devices: as far as they follow from its number."""
        if self._gpus:
            return self._gpus[local_rank % len(self._gpus)].uuid
        return "cores " + ",".join(map(str, cores))

    def barrier(self) -> None:
        """Wait for all nodes."""
        self._group.total([0.0])

    def gather(self, value: Any) -> list[Any]:
        """Every node's value."""
        return self._group.gather(value)

    def leave(self) -> None:
        """Leave the other nodes."""
        self._group.close()
