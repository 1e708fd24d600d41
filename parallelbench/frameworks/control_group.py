"""The ranks of a framework that lacks torch.distributed meet here: sums of a few numbers over TCP, through rank 0.

Only what the training loop itself needs goes this way (sums between epochs, addresses at the start), never gradients.
"""

from __future__ import annotations

import socket
import struct
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

_LENGTH = struct.Struct("!I")
_KEEP_ALIVE = {
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): 60,
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): 15,
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT): 4,
}
"""Options of a connection on which nothing may come for long: asked for a sign of life after so many seconds."""


class PatienceError(Exception):
    """Ranks did not arrive in time."""


class ControlGroup:
    """One rank's connections. Each method is a collective; all ranks call the same ones in the same order."""

    def __init__(self, rank: int, size: int, connections: Sequence[socket.socket], *, timeout_s: float) -> None:
        """`connections`: on rank 0 those of ranks 1 …; elsewhere the one to rank 0."""
        self.rank, self.size = rank, size
        self._connections, self._timeout_s = tuple(connections), timeout_s

    def total(self, values: Sequence[float]) -> list[float]:
        """The sum over all ranks, added in the order of the ranks: every rank gets the same bits."""
        rows = self.gather(list(map(float, values)))
        return [sum(column[1:], column[0]) for column in zip(*rows, strict=True)]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in the order of the ranks, on every rank. Raises `PatienceError` that names who lacks."""
        if self.size == 1:
            return [value]
        if self.rank:
            _send(self._connections[0], value)
            (answer,) = self._received(["rank 0"])
            values: list[Any] = answer
            return values
        values = [value, *self._received([f"rank {rank}" for rank in range(1, self.size)])]
        for connection in self._connections:
            _send(connection, values)
        return values

    def _received(self, names: Sequence[str]) -> list[Any]:
        """One message of each connection."""
        deadline, found, late = time.monotonic() + self._timeout_s, [], []
        for name, connection in zip(names, self._connections, strict=True):
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                found.append(_receive(connection))
            except TimeoutError:
                late.append(name)
        if late:
            raise PatienceError(f"{' and '.join(late)} did not arrive within {self._timeout_s:g} s")
        return found

    def address(self) -> str:
        """host:port of a port that is free here now, at the address by which the other ranks reach this one."""
        host = self._connections[0].getsockname()[0]
        with socket.create_server((host, 0)) as free:
            return f"{host}:{free.getsockname()[1]}"

    def close(self) -> None:
        """Close the connections."""
        for connection in self._connections:
            with suppress(OSError):
                connection.close()


def host_group(listening: socket.socket, size: int, *, timeout_s: float) -> ControlGroup:
    """Rank 0's side: waits until ranks 1 … `size` − 1 have connected, and lets them begin.

    Raises `PatienceError` that names who has not.
    """
    connections: dict[int, socket.socket] = {}
    deadline = time.monotonic() + timeout_s
    with listening:
        while len(connections) < size - 1:
            listening.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection, _ = listening.accept()
            except TimeoutError:
                lacking = " and ".join(f"rank {rank}" for rank in range(1, size) if rank not in connections)
                raise PatienceError(f"{lacking} did not join within {timeout_s:g} s") from None
            connection.settimeout(timeout_s)
            with suppress(OSError, ValueError, msgspec.DecodeError):  # somebody else who found the port
                rank = _receive(connection)
                if isinstance(rank, int) and 0 < rank < size:
                    connections[rank] = connection
    for connection in connections.values():
        _send(connection, size)
    return ControlGroup(0, size, [connections[rank] for rank in range(1, size)], timeout_s=timeout_s)


def join_group(rank: int, size: int, address: tuple[str, int], *, timeout_s: float) -> ControlGroup:
    """The side of every other rank: connects as soon as the first node listens, and waits until rank 0 has met all.

    Only the first has a time limit: torch's part, which may take long, comes between them. Where the first node ends
    meanwhile, its kernel resets the connection; where it vanishes, this rank's own notices.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            connection = socket.create_connection(address, timeout=max(0.01, deadline - time.monotonic()))
            break
        except OSError:
            if time.monotonic() > deadline:
                raise PatienceError(f"rank 0 did not listen at {address[0]} within {timeout_s:g} s") from None
            time.sleep(0.05)
    _send(connection, rank)
    connection.settimeout(None)
    for option, value in _KEEP_ALIVE.items():
        connection.setsockopt(*option, value)
    _receive(connection)
    return ControlGroup(rank, size, [connection], timeout_s=timeout_s)


def _send(connection: socket.socket, value: Any) -> None:
    content = msgspec.msgpack.encode(value)
    connection.sendall(_LENGTH.pack(len(content)) + content)


def _receive(connection: socket.socket) -> Any:
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    return msgspec.msgpack.decode(_exactly(connection, length))


def _exactly(connection: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(size - len(parts))
        if not part:
            raise ConnectionResetError("connection reset by peer")
        parts += part
    return bytes(parts)
