"""Where the nodes of one attempt meet: the head picks a free port and writes it to a file."""

from __future__ import annotations

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
from parallelbench.results.files import write_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from parallelbench.results.attempt import Attempt
    from parallelbench.results.folder import RunFolder

Found = TypeVar("Found")

POLL_S = 0.2
PATIENCE_S = 600.0
"""How long a node waits for what another one writes."""


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `rendezvous.json` in an attempt's folder."""

    start: str
    """The start of the job that meets here."""
    host: str
    port: int
    secret: str

    def meeting(self, *, node: int, nodes: int, interface: str | None) -> Rendezvous:
        """It, as this one of the nodes takes part; `interface`: the site's."""
        return Rendezvous(
            node=node,
            nodes=nodes,
            host=self.host,
            port=self.port,
            id=self.start,
            secret=self.secret,
            interface=interface_of(interface, nodes=nodes),
        )


def offer(folder: Path, start: str, *, nodes: int, interface: str | None = None) -> Rendezvous:
    """Choose a free port of this host, and tell the other nodes."""
    host = address_of(interface, nodes=nodes)
    with socket.socket() as probe:
        probe.bind((host, 0))
        port = probe.getsockname()[1]
    offered = Offer(start=start, host=host, port=port, secret=secrets.token_hex(32))
    # Anybody who knows it could join the ranks.
    write_file(folder / "rendezvous.json", msgspec.json.encode(offered), private=True)
    return offered.meeting(node=0, nodes=nodes, interface=interface)


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
) -> tuple[Attempt | None, Rendezvous | None]:
    """Wait for the head's offer; (None, None) where the head ends the attempt without one, or takes too long."""

    def offered() -> tuple[Attempt | None, Rendezvous | None] | None:
        if (attempt := begun(folder, start)) is None:
            return None
        if attempt.outcome() is not None:
            return None, None
        if (here := read(attempt.path)) is None:
            return None
        return attempt, here.meeting(node=node, nodes=nodes, interface=interface)

    return awaited(offered) or (None, None)


def begun(folder: RunFolder, start: str) -> Attempt | None:
    """The attempt that the head has begun in this start of the job."""
    for attempt in reversed(folder.attempts()):
        if (supervisor := attempt.supervisor()) is not None and supervisor.job == start:
            return attempt
    return None


def awaited(look: Callable[[], Found | None]) -> Found | None:
    """What `look` finds first of what another node writes; None where that takes too long."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        heed()
        if (found := look()) is not None:
            return found
        time.sleep(POLL_S)
    return None


def read(folder: Path) -> Offer | None:
    """The rendezvous that `offer` wrote to a folder; None: nothing yet."""
    try:
        return msgspec.json.decode((folder / "rendezvous.json").read_bytes(), type=Offer)
    except (OSError, msgspec.DecodeError):
        return None
