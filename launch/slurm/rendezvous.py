"""Where the nodes of one attempt meet: the head writes its address to a file, and waits until all others have come.

Only then does any of them start its ranks. A shared file system may show that file a minute later to other nodes, which
is no part of a run's start-up.
"""

from __future__ import annotations

import math
import os
import secrets
import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

import msgspec
import psutil

from launch.attempt.processes import Rendezvous
from launch.attempt.signals import heed
from parallelbench.errors import ConfigError, StorageError
from parallelbench.frameworks.control_group import PatienceError, host_group, join_group
from parallelbench.results.files import write_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from parallelbench.frameworks.control_group import ControlGroup
    from parallelbench.results.attempt import Attempt
    from parallelbench.results.folder import RunFolder

Found = TypeVar("Found")

POLL_S = 0.2
PATIENCE_S = 600.0
"""How long a node waits for what another one writes, and the head for the others."""
_REACH_S = 60.0
"""How long another node tries to reach the head, which listens before it writes where."""


class OutOfTimeError(Exception):
    """The job's time was nearly up before all nodes had met."""


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `rendezvous.json`, mostly in an attempt's folder."""

    start: str
    """The start of the job that meets here."""
    host: str
    port: int
    """Where the head waits for the other nodes."""
    secret: str

    def joined(self, *, node: int, nodes: int, interface: str | None, look: Callable[[], object] = heed) -> Rendezvous:
        """Where the ranks of all nodes meet, once all of these are there; for one besides the head.

        `interface`: the site's. `look` is called again and again meanwhile, and may raise. Raises `ConfigError` where
        the head can't be reached or does not go on, and `ConnectionError` where it ends.
        """
        try:
            group = join_group(
                node,
                nodes,
                (self.host, self.port),
                secret=self.secret,
                timeout_s=PATIENCE_S,
                reach_s=_REACH_S,
                begin_s=PATIENCE_S,
                look=look,
            )
            return self.agreed(group, interface)
        except (PatienceError, ConfigError) as error:
            raise _not_met(of_nodes(error)) from None

    def agreed(self, group: ControlGroup, interface: str | None) -> Rendezvous:
        """What the head tells all nodes. It draws the ranks' port last, so that no other program takes it meanwhile."""
        try:
            port, *_ = group.gather(free_port(self.host) if group.rank == 0 else 0)
        finally:
            group.close()
        return Rendezvous(
            node=group.rank,
            nodes=group.size,
            host=self.host,
            port=port,
            id=self.start,
            secret=self.secret,
            interface=interface_of(interface, nodes=group.size),
        )


def host(
    folder: Path,
    start: str,
    *,
    nodes: int,
    interface: str | None = None,
    until: Callable[[], float] = lambda: math.inf,
) -> Rendezvous:
    """The same for the head: tell the other nodes where it is, and wait until all have come.

    `until`: when it must stop to wait, by the monotonic clock, as it is known at each look. Raises `OutOfTimeError`
    then, `OSError` where this host has no address for the others, `PatienceError` where not all of them come, and
    `ConnectionError` where one of them ends.
    """

    def look() -> None:
        heed()
        if time.monotonic() > until():
            raise OutOfTimeError

    own = address_of(interface, nodes=nodes)
    listening = socket.create_server((own, 0), backlog=nodes)
    offer = Offer(start=start, host=own, port=listening.getsockname()[1], secret=secrets.token_hex(32))
    # Anybody who knows it could join the ranks.
    write_file(folder / "rendezvous.json", msgspec.json.encode(offer), private=True)
    return offer.agreed(host_group(listening, nodes, secret=offer.secret, timeout_s=PATIENCE_S, look=look), interface)


def of_nodes(error: Exception) -> str:
    """What the meeting says of ranks, each of which is a node here."""
    return str(error).replace("rank", "node")


def _not_met(what: str) -> ConfigError:
    return ConfigError(
        f"{what}: node 0 has died, or other nodes can't reach it there (if so, set site.network_interface to one that "
        "connects all nodes, e.g. ib0)"
    )


def free_port(host: str) -> int:
    """A port of this host's address that is free now."""
    with socket.create_server((host, 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


def address_of(interface: str | None, *, nodes: int) -> str:
    """This host's address for the other ones of so many nodes."""
    host = address(interface)
    return _address_of_route() if nodes > 1 and interface is None and host.startswith("127.") else host


def interface_of(interface: str | None, *, nodes: int) -> str | None:
    """The interface that gloo must be told: by itself it takes that of the host's name, which may be loopback."""
    if nodes == 1 or interface is not None:
        return interface
    with suppress(OSError):  # a name without any address means loopback to it, too
        if not socket.gethostbyname(socket.gethostname()).startswith("127."):
            return None
    with suppress(OSError):
        route = _address_of_route()
        named = psutil.net_if_addrs().items()
        return next((name for name, each in named if any(item.address == route for item in each)), None)
    return None


def address(interface: str | None) -> str:
    """This host's address on an interface; where none is named, the one that its name resolves to."""
    if interface is None:
        return _address_of_name()
    addresses = psutil.net_if_addrs().get(interface, [])
    address: str | None = next((item.address for item in addresses if item.family == socket.AF_INET), None)
    if address is None:
        raise OSError(f"site.network_interface={interface} has no address on {socket.gethostname()}")
    return address


def _address_of_name() -> str:
    names = list(dict.fromkeys([os.environ.get("SLURMD_NODENAME", ""), socket.gethostname()]))
    for name in filter(None, names):
        with suppress(OSError):
            return socket.gethostbyname(name)
    raise OSError(f"this host's name ({' or '.join(filter(None, names))}) has no address: set site.network_interface")


def _address_of_route() -> str:
    """This host's address on its default route. Debian maps the host's name to loopback, which others can't reach."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # an address for documentation; connecting a datagram socket sends nothing
        address: str = probe.getsockname()[0]
        if not address.startswith("127."):
            return address
    raise OSError(
        f"the name of this host, {socket.gethostname()}, resolves to an address that other nodes can't reach: "
        "set site.network_interface, e.g. ib0"
    )


def join(
    folder: RunFolder, start: str, *, node: int, nodes: int, interface: str | None
) -> tuple[Attempt, Rendezvous] | None:
    """Meet the head and the others; None where the head has ended the attempt first.

    Raises `StorageError` where no offer is seen in time, and `ConfigError` as `Offer.joined`.
    """

    def offered() -> tuple[Attempt, Offer | None] | None:
        if (attempt := begun(folder, start)) is None:
            return None
        if attempt.outcome() is not None:
            return attempt, None
        return None if (offer := read(attempt.path, start)) is None else (attempt, offer)

    if (found := awaited(offered, PATIENCE_S)) is None:
        raise unseen(folder.path, PATIENCE_S)
    attempt, offer = found
    if offer is None:
        return None

    def look() -> None:
        heed()
        if attempt.outcome() is not None:
            raise ConnectionError

    try:
        return attempt, offer.joined(node=node, nodes=nodes, interface=interface, look=look)
    except ConnectionError:
        # A head that ends the attempt hangs up first; one that is dead writes nothing, nor does another program.
        if awaited(attempt.outcome, _REACH_S) is None:
            raise _not_met(f"{offer.host}:{offer.port} has hung up") from None
        return None


def begun(folder: RunFolder, start: str) -> Attempt | None:
    """The attempt that the head has begun in this start of the job."""
    for attempt in reversed(folder.attempts()):
        if (supervisor := attempt.supervisor()) is not None and supervisor.job == start:
            return attempt
    return None


def awaited(look: Callable[[], Found | None], patience_s: float) -> Found | None:
    """What `look` finds first of what another node writes; None where that takes longer. It looks at least once."""
    deadline = time.monotonic() + patience_s
    while True:
        heed()
        if (found := look()) is not None or time.monotonic() > deadline:
            return found
        time.sleep(POLL_S)


def read(folder: Path, start: str) -> Offer | None:
    """What `host` wrote to a folder in this start of the job; None: nothing yet."""
    try:
        offer = msgspec.json.decode((folder / "rendezvous.json").read_bytes(), type=Offer)
    except (OSError, msgspec.DecodeError):
        return None
    return offer if offer.start == start else None


def unseen(folder: Path, patience_s: float) -> StorageError:
    """Of an offer that another node did not see in time."""
    return StorageError(f"{folder} showed no address of node 0 within {patience_s:g} s: do all nodes see that folder?")
