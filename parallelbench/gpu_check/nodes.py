"""Checks on several nodes: the first one leads, and the others start their share of what it starts.

They meet in a folder that all of them see. On the others: `-m parallelbench.gpu_check.nodes FOLDER NODE`.
"""

from __future__ import annotations

import socket
import sys
import time
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from parallelbench.gpu_check.attempts import WarmProcesses
from parallelbench.gpu_check.results import FailedError
from parallelbench.results.files import write_file
from parallelbench.training.warm import ForkRequest, Meeting

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


_POLL_S = 0.2
_GRACE_S = 10.0
"""How long a node's processes may outlive the first node's."""
_END = "end"


class _Launch(msgspec.Struct):
    """What all nodes start together."""

    request: ForkRequest
    """The first node's."""
    variables: dict[str, str]


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
    def taking_part(self, request: ForkRequest, variables: Mapping[str, str]) -> Iterator[ForkRequest]:
        """Let the other nodes fork their share of the ranks, with these variables; yields what this node forks."""
        self._begun += 1
        with socket.socket() as probe:
            probe.bind((self.host, 0))
            meeting = Meeting(self.host, probe.getsockname()[1], self.count)
        request = msgspec.structs.replace(request, meeting=meeting)
        write_file(self.folder / f"launch-{self._begun}", msgspec.json.encode(_Launch(request, dict(variables))))
        try:
            yield request
        finally:
            write_file(self.folder / f"over-{self._begun}", b"")

    def end(self) -> None:
        """Let the other nodes go."""
        write_file(self.folder / _END, b"")


def main(arguments: list[str]) -> int:
    """Start this node's share of whatever the first node starts, until it ends."""
    folder, node = Path(arguments[0]), int(arguments[1])
    with closing(WarmProcesses()) as warm:
        for number in count(1):
            launch = folder / f"launch-{number}"
            while not launch.exists():
                if (folder / _END).exists() or not folder.exists():
                    return 0
                time.sleep(_POLL_S)
            try:
                _follow(msgspec.json.decode(launch.read_bytes(), type=_Launch), node, warm, folder / f"over-{number}")
            except FailedError as failed:  # of this run: the first node's ranks wait for this node's in vain
                print(f"gpu-check: on node {node}: {failed}", file=sys.stderr)
    return 0


def _follow(launch: _Launch, node: int, warm: WarmProcesses, over: Path) -> None:
    """Returns once this node's ranks have ended: they may outlive the first node's for a while."""
    assert launch.request.meeting is not None
    meeting = msgspec.structs.replace(launch.request.meeting, node=node)
    request = msgspec.structs.replace(launch.request, meeting=meeting)
    log = Path(request.arguments[0], "attempts", request.arguments[1], f"log-node{node}.txt")
    seen_at: list[float] = []

    def is_over() -> bool:
        if over.exists() and not seen_at:
            seen_at.append(time.monotonic())
        return bool(seen_at) and time.monotonic() > seen_at[0] + _GRACE_S

    warm.run(request, launch.variables, log, is_over)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
