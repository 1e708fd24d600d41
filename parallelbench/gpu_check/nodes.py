"""Checks on several nodes: the first one leads, and the others start their share of what it starts.

They meet in a folder that all of them see. On the others: `-m parallelbench.gpu_check.nodes FOLDER NODE`.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from parallelbench.processes import inherited
from parallelbench.world.allowance import MEETING_HERE

if TYPE_CHECKING:
    from collections.abc import Iterator


_POLL_S = 0.2
_GRACE_S = 10.0
"""How long a node's processes may outlive the first node's."""
_END = "end"


def torchrun(program: list[str], processes: int, *, options: list[str] | None = None) -> list[str]:
    """The command that starts ranks of a program (a module and its arguments) on this node."""
    meeting = options or [*MEETING_HERE]
    return [
        *(sys.executable, "-m", "torch.distributed.run", *meeting, f"--nproc-per-node={processes}", "-m"),
        *program,
    ]


class _Launch(msgspec.Struct):
    """What all nodes start together."""

    program: list[str]
    processes: int
    nodes: int
    variables: dict[str, str]
    host: str
    port: int

    def command(self, node: int) -> list[str]:
        meeting = [f"--nnodes={self.nodes}", f"--node-rank={node}"]
        meeting += [f"--master-addr={self.host}", f"--master-port={self.port}"]
        return torchrun(self.program, self.processes, options=meeting)


@dataclass
class Nodes:
    """All nodes of a job, on the first one of them."""

    count: int
    host: str
    """This node's address, which the others reach."""
    folder: Path
    """All nodes see it."""
    _begun: int = 0

    @contextmanager
    def taking_part(self, program: list[str], processes: int, variables: dict[str, str]) -> Iterator[list[str]]:
        """Let the other nodes start their share of the ranks, with these variables; yields this node's command."""
        self._begun += 1
        with socket.socket() as probe:
            probe.bind((self.host, 0))
            port = probe.getsockname()[1]
        launch = _Launch(program, processes, self.count, variables, self.host, port)
        _put(self.folder / f"launch-{self._begun}", msgspec.json.encode(launch))
        try:
            yield launch.command(0)
        finally:
            _put(self.folder / f"over-{self._begun}", b"")

    def end(self) -> None:
        """Let the other nodes go."""
        _put(self.folder / _END, b"")


def _put(path: Path, content: bytes) -> None:
    """Write a file that others see whole or not at all."""
    temporary = path.with_name(f".{path.name}")
    temporary.write_bytes(content)
    temporary.replace(path)


def main(arguments: list[str]) -> int:
    """Start this node's share of whatever the first node starts, until it ends."""
    folder, node = Path(arguments[0]), int(arguments[1])
    for number in count(1):
        launch = folder / f"launch-{number}"
        while not launch.exists():
            if (folder / _END).exists() or not folder.exists():
                return 0
            time.sleep(_POLL_S)
        _follow(msgspec.json.decode(launch.read_bytes(), type=_Launch), node, over=folder / f"over-{number}")
    return 0


def _follow(launch: _Launch, node: int, *, over: Path) -> None:
    process = subprocess.Popen(
        launch.command(node),
        env=inherited(os.environ) | launch.variables,
        stdout=subprocess.DEVNULL,  # the first rank that fails leaves its error in a file
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    while process.poll() is None and not over.exists():
        time.sleep(_POLL_S)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_S if over.exists() else None)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
