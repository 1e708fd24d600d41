"""α–β costs of collectives over two tiers: the links inside a node and the network between nodes.

Thakur et al. 2005, "Optimization of collective communication operations in MPICH": a ring moves (n−1)/n of a message in
n−1 turns, and twice that for an all-reduce; a tree takes log₂ n turns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from analysis.advisor.layouts import Values


@dataclass(frozen=True, kw_only=True)
class Group:
    """Equal groups of devices that communicate at the same time, one element per candidate."""

    size: Values
    """Devices of one group."""
    within: Values
    """Devices of one group that share a node."""
    rings: Values
    """Groups that share each node's network."""

    @property
    def nodes(self) -> Values:
        """Nodes of one group."""
        return np.ceil(self.size / self.within)


@dataclass(frozen=True, kw_only=True)
class Links:
    """What the two tiers deliver: bytes/s, and seconds per turn."""

    link_bytes_per_s: Values
    network_bytes_per_s: Values
    link_latency_s: Values
    network_latency_s: Values


def group_of(size: Values, stride: Values, devices_per_node: Values, devices: Values) -> Group:
    """Groups whose neighbouring members are `stride` ranks apart, ranks filling node after node."""
    node = np.minimum(devices_per_node, devices)
    within = np.clip(np.floor(node / stride), 1.0, size)
    return Group(size=size, within=within, rings=np.maximum(node / within, 1.0))


def slowest_bytes_per_s(group: Group, links: Links) -> Values:
    """What one ring can move through its slowest tier: groups that cross nodes share each node's network."""
    across = np.minimum(links.link_bytes_per_s, links.network_bytes_per_s / group.rings)
    result: Values = np.where(group.nodes > 1, across, links.link_bytes_per_s)
    return result


def turn_s(group: Group, links: Links) -> Values:
    """Latency of a collective's turns: log₂ of the devices in a node, and of the nodes."""
    inside = np.log2(np.maximum(group.within, 1.0)) * links.link_latency_s
    between = np.log2(np.maximum(group.nodes, 1.0)) * links.network_latency_s
    return inside + between


def gather_s(message_bytes: Values, group: Group, links: Links) -> Values:
    """An all-gather or a reduce-scatter of a message that all of the group have in the end, or have had."""
    moved = (group.size - 1.0) / group.size * message_bytes
    return moved / slowest_bytes_per_s(group, links) + turn_s(group, links)


def all_reduce_s(message_bytes: Values, group: Group, links: Links) -> Values:
    """A reduce-scatter and an all-gather of the same message."""
    return 2.0 * gather_s(message_bytes, group, links)


def send_s(message_bytes: Values, crosses: Values, links: Links, *, rings: Values) -> Values:
    """One message to one other device; `crosses` is 1 where it is of another node, whose network `rings` share."""
    near = message_bytes / links.link_bytes_per_s + links.link_latency_s
    far = message_bytes * rings / links.network_bytes_per_s + links.network_latency_s
    result: Values = np.where(crosses > 0, far, near)
    return result
