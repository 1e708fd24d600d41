"""Where the nodes of one attempt meet: at an address of the first one, chosen before their processes are started."""

from __future__ import annotations

import os
import secrets
import socket
from contextlib import suppress

import psutil

from launch.attempt.processes import Rendezvous

_MEETING = "PARALLELBENCH_MEETING"
"""Variable of a step: where its tasks meet."""


def choose(start: str, *, nodes: int, interface: str | None) -> Rendezvous:
    """The first node's part in the rendezvous of a start of a job; `interface`: the site's.

    The port is free now. Raises `OSError` where this host has no address for the others.
    """
    host = address_of(interface, nodes=nodes)
    secret, own = secrets.token_hex(32), interface_of(interface, nodes=nodes)
    return Rendezvous(0, nodes, host, free_port(host), start, secret, own)


def to_environment(meeting: Rendezvous) -> dict[str, str]:
    """The variable that tells the tasks of a step where they meet, without the arguments that everybody can see."""
    return {_MEETING: f"{meeting.host}:{meeting.port} {meeting.id} {meeting.secret}"}


def from_environment(interface: str | None) -> Rendezvous:
    """The part of this task of a step, of as many nodes; `interface`: the site's."""
    address, start, secret = os.environ.pop(_MEETING).split(" ")
    host, _, port = address.rpartition(":")
    node, nodes = int(os.environ["SLURM_NODEID"]), int(os.environ["SLURM_NTASKS"])
    return Rendezvous(node, nodes, host, int(port), start, secret, interface_of(interface, nodes=nodes))


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
