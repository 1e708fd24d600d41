"""The ranks of a framework that lacks torch.distributed meet here: sums of a few numbers over TCP, through rank 0.

Only what the training loop itself needs goes this way (sums between epochs, addresses at the start), never gradients.
Before both sides have proved that they know the attempt's secret, nothing is read but so many bytes of a proof. A
watchdog ends a rank that waits for ever inside its framework's runtime, where no exception reaches it.
"""

from __future__ import annotations

import hmac
import math
import os
import secrets
import socket
import struct
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import msgspec

from parallelbench.errors import ConfigError
from parallelbench.frameworks import CONTROL_ADDRESS, CONTROL_FD, CONTROL_SECRET

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


_LENGTH = struct.Struct("!I")
_NONCE_BYTES = _PROOF_BYTES = 32
_ANSWER = struct.Struct(f"!I{_NONCE_BYTES}s{_PROOF_BYTES}s")
"""Who a rank is, what rank 0 must prove itself by, and the rank's own proof."""
_SILENCE_S = 60.0
"""How long somebody who has connected may take for the proof; nobody waits for it."""
_LOOK_S = 0.2
"""How long who waits may not look whether it must end."""
_TRY_S = 1.0
"""The same while it connects: a network that is slow to answer needs some time for each try."""
_KEEP_ALIVE = {
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): 60,
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): 15,
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT): 4,
}
"""Options of a connection on which nothing may come for long: asked for a sign of life after so many seconds."""


class PatienceError(Exception):
    """Ranks did not arrive in time."""


class PeerLostError(ConnectionResetError):
    """Another rank has ended or vanished."""


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
        """Every rank's value, in the order of the ranks, on every rank.

        Raises `PatienceError` that names who lacks, and `PeerLostError` where another rank has ended or vanished.
        """
        if self.size == 1:
            return [value]
        if self.rank:
            self._send(self._connections[0], value)
            (answer,) = self._received(["rank 0"])
            values: list[Any] = answer
            return values
        values = [value, *self._received([f"rank {rank}" for rank in range(1, self.size)])]
        for connection in self._connections:
            self._send(connection, values)
        return values

    def _send(self, connection: socket.socket, value: Any) -> None:
        content = msgspec.msgpack.encode(value)
        _send(connection, _LENGTH.pack(len(content)) + content, timeout_s=self._timeout_s)

    def _received(self, names: Sequence[str]) -> list[Any]:
        """One message of each connection."""
        deadline, found, late = time.monotonic() + self._timeout_s, [], []
        for name, connection in zip(names, self._connections, strict=True):
            try:
                (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size, deadline=deadline))
                content = _exactly(connection, length, deadline=deadline)
                found.append(msgspec.msgpack.decode(content))
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


def meet(rank: int, size: int, *, timeout_s: float) -> ControlGroup:
    """This rank's side, as the variables of its environment say where the ranks meet."""
    if size == 1:
        return ControlGroup(0, 1, [], timeout_s=timeout_s)
    secret = os.environ.pop(CONTROL_SECRET)
    if rank == 0:
        listening = socket.socket(fileno=int(os.environ[CONTROL_FD]))
        return host_group(listening, size, secret=secret, timeout_s=timeout_s)
    host, _, port = os.environ[CONTROL_ADDRESS].rpartition(":")
    return join_group(rank, size, (host, int(port)), secret=secret, timeout_s=timeout_s)


def host_group(listening: socket.socket, size: int, *, secret: str, timeout_s: float) -> ControlGroup:
    """Rank 0's side: waits until ranks 1 … `size` − 1 have proved to know the secret, and lets them begin.

    Raises `PatienceError` that names who has not, and `PeerLostError` where one of them has ended since.
    """
    joined: dict[int, tuple[socket.socket, bytes]] = {}
    deadline = time.monotonic() + timeout_s
    listening.settimeout(_LOOK_S)
    with listening:
        while len(joined) < size - 1:
            if time.monotonic() > deadline:
                lacking = " and ".join(f"rank {rank}" for rank in range(1, size) if rank not in joined)
                raise PatienceError(f"{lacking} did not join within {timeout_s:g} s")
            with suppress(TimeoutError):
                connection, _ = listening.accept()
                # Beside the others, so that a stranger who says nothing keeps nobody waiting.
                threading.Thread(target=_examine, args=(connection, secret, joined), daemon=True).start()
    for connection, nonce in joined.values():
        _send(connection, _proof(secret, b"begin", nonce), timeout_s=timeout_s)
    return ControlGroup(0, size, [joined[rank][0] for rank in range(1, size)], timeout_s=timeout_s)


def _examine(connection: socket.socket, secret: str, joined: dict[int, tuple[socket.socket, bytes]]) -> None:
    """Let somebody who has connected join as the rank that it proves to be; else close the connection."""
    challenge = secrets.token_bytes(_NONCE_BYTES)
    with suppress(OSError):
        _send(connection, challenge, timeout_s=_SILENCE_S)
        answer = _exactly(connection, _ANSWER.size, deadline=time.monotonic() + _SILENCE_S)
        rank, nonce, proof = _ANSWER.unpack(answer)
        if hmac.compare_digest(proof, _proof(secret, challenge, nonce, rank.to_bytes(4))):
            joined[rank] = connection, nonce
            return
    connection.close()


def _proof(secret: str, *parts: bytes) -> bytes:
    return hmac.digest(secret.encode(), b"".join(parts), "sha256")


def join_group(
    rank: int,
    size: int,
    address: tuple[str, int],
    *,
    secret: str,
    timeout_s: float,
) -> ControlGroup:
    """The side of every other rank: connects as soon as the first node listens, and waits until rank 0 has met all.

    The first may take as long as a collective, the second however long: torch's part comes between them. Where the
    first node ends meanwhile, its kernel resets the connection; where it vanishes, this rank's own notices.

    Raises `PatienceError`, `PeerLostError` where rank 0 has ended or vanished, and `ConfigError` where it is another
    program that answers.
    """
    where = f"{address[0]}:{address[1]}"
    connection = _connected(address, timeout_s)
    for option, value in _KEEP_ALIVE.items():
        connection.setsockopt(*option, value)
    nonce = secrets.token_bytes(_NONCE_BYTES)
    challenge = _exactly(connection, _NONCE_BYTES, deadline=math.inf)
    proof = _proof(secret, challenge, nonce, rank.to_bytes(4))
    _send(connection, _ANSWER.pack(rank, nonce, proof), timeout_s=timeout_s)
    begin = _exactly(connection, _PROOF_BYTES, deadline=math.inf)
    if not hmac.compare_digest(begin, _proof(secret, b"begin", nonce)):
        raise ConfigError(f"who listens at {where} is not rank 0 of this attempt")
    return ControlGroup(rank, size, [connection], timeout_s=timeout_s)


def _connected(address: tuple[str, int], reach_s: float) -> socket.socket:
    deadline = time.monotonic() + reach_s
    while True:
        left_s = deadline - time.monotonic()
        try:
            return socket.create_connection(address, timeout=max(0.01, min(_TRY_S, left_s)))
        except OSError:
            if left_s <= 0:
                where = f"{address[0]}:{address[1]}"
                raise PatienceError(f"rank 0 did not listen at {where} within {reach_s:g} s") from None
            time.sleep(0.05)


def _send(connection: socket.socket, content: bytes, *, timeout_s: float) -> None:
    connection.settimeout(timeout_s)
    with _losing_peer():
        connection.sendall(content)


def _exactly(connection: socket.socket, size: int, *, deadline: float) -> bytes:
    """So many bytes: all that is received here is received by this loop.

    Raises `TimeoutError` after the deadline, by the monotonic clock, and `PeerLostError` for a lost other side.
    """
    parts = bytearray()
    while len(parts) < size:
        left_s = deadline - time.monotonic()
        connection.settimeout(max(0.01, min(_LOOK_S, left_s)))
        try:
            with _losing_peer():
                part = connection.recv(size - len(parts))
        except TimeoutError:
            if left_s <= 0:
                raise
            continue
        if not part:
            raise PeerLostError("connection reset by peer")
        parts += part
    return bytes(parts)


@contextmanager
def _losing_peer() -> Iterator[None]:
    """Make one kind of all errors of a lost peer: of one that has vanished the kernel says ETIMEDOUT or EHOSTUNREACH.

    Python's own `TimeoutError`, which has no number, only says that nothing has come yet.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise PeerLostError(f"connection reset by peer: {error.strerror}") from None


_LOOKS = 4
"""How often it looks within the time that a rank may wait."""


class Watchdog:
    """A context, entered again and again; `bite` is called in a thread of its own where one lasts too long."""

    def __init__(self, timeout_s: float, bite: Callable[[], None]) -> None:
        self._timeout_s, self._bite = timeout_s, bite
        self._deadline = math.inf
        threading.Thread(target=self._watch, daemon=True).start()

    def __enter__(self) -> None:
        self._deadline = time.monotonic() + self._timeout_s

    def __exit__(self, *_: object) -> None:
        self._deadline = math.inf

    def _watch(self) -> None:
        while time.monotonic() < self._deadline:
            time.sleep(self._timeout_s / _LOOKS)
        self._bite()
