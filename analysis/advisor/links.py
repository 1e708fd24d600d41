"""α–β costs of collectives over two tiers: the links inside a node and the network between nodes.

A ring moves (n−1)/n of a message in n−1 turns, and twice that for an all-reduce (Patarasuk and Yuan 2009). All-gathers
and reduce-scatters are rings. An all-reduce is a ring or a tree, as NCCL chooses (src/graph/tuning.cc, whose turns and
whose bandwidth of a tree these are). Where messages were measured, α and β only say what other groups take instead.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from analysis.advisor.layouts import Values
    from analysis.advisor.machine import RateCurve

TREE_SHARE = 0.9
"""Bandwidth of a tree ÷ of a ring (NCCL, src/graph/tuning.cc)."""


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
    trees: bool = True
    """Whether all-reduces may be trees, as NCCL's; gloo's are rings."""
    measured: Mapping[tuple[str, str], RateCurve] = field(default_factory=dict)
    """(tier, operation) → by a message's bytes, the time that α and β say of it ÷ the measured one."""

    def corrected(self, time_s: Values, operation: str, message_bytes: Values, across: NDArray[np.bool_]) -> Values:
        """The time that α and β say, with their error of measured messages of this size taken out; as it was without.

        `across`: whether the network decides, not the links of a node.
        """
        for tier, these in (("link", ~across), ("network", across)):
            if (share := self.measured.get((tier, operation))) is not None:
                time_s = np.where(these, time_s / share.at(message_bytes), time_s)
        return time_s


def group_of(size: Values, stride: Values, devices_per_node: Values, devices: Values) -> Group:
    """Groups whose neighbouring members are `stride` ranks apart, ranks filling node after node."""
    node = np.minimum(devices_per_node, devices)
    within = np.clip(np.floor(node / stride), 1.0, size)
    return Group(size=size, within=within, rings=np.maximum(node / within, 1.0))


def slowest_bytes_per_s(group: Group, links: Links) -> Values:
    """What one ring can move through its slowest tier: groups that cross nodes share each node's network."""
    across = np.minimum(links.link_bytes_per_s, links.network_bytes_per_s / group.rings)
    return np.where(group.nodes > 1, across, links.link_bytes_per_s)


def tree_bytes_per_s(group: Group, links: Links) -> Values:
    """The same of a tree; the two trees of two nodes send half of the message each way, once, where a ring sends twice.

    Two trees: Sanders, Speck and Träff 2009. Two nodes: NCCL counts their links by the speed inside a node.
    """
    faster = np.where(group.nodes == 2, 2.0, 1.0) * links.network_bytes_per_s
    return slowest_bytes_per_s(group, replace(links, network_bytes_per_s=faster))


def ring_turn_s(group: Group, links: Links) -> Values:
    """Latency of once round a ring, n−1 turns: as many leave a node as there are other nodes."""
    return (group.nodes - 1.0) * links.network_latency_s + (group.size - group.nodes) * links.link_latency_s


def tree_turn_s(group: Group, links: Links) -> Values:
    """Latency of once up or down a tree: a chain in each node, and log₂ of the nodes."""
    between = np.log2(np.maximum(group.nodes, 1.0)) * links.network_latency_s
    return between + (group.size / group.nodes - 1.0) * links.link_latency_s


def gather_s(message_bytes: Values, group: Group, links: Links) -> Values:
    """An all-gather or a reduce-scatter of a message that all of the group have in the end, or have had."""
    return links.corrected(_ring_s(message_bytes, group, links), "all_gather", message_bytes, group.nodes > 1)


def _ring_s(message_bytes: Values, group: Group, links: Links) -> Values:
    """Once round it."""
    moved = (group.size - 1.0) / group.size * message_bytes
    return moved / slowest_bytes_per_s(group, links) + ring_turn_s(group, links)


def all_reduce_s(message_bytes: Values, group: Group, links: Links) -> Values:
    """A ring's reduce-scatter and all-gather, or up and down a tree: whichever is faster."""
    once = _ring_s(message_bytes, group, links)
    if links.trees:
        tree = message_bytes / (TREE_SHARE * tree_bytes_per_s(group, links)) + tree_turn_s(group, links)
        once = np.minimum(once, tree)
    return links.corrected(2.0 * once, "all_reduce", message_bytes, group.nodes > 1)


def broadcast_s(message_bytes: Values, group: Group, links: Links) -> Values:
    """A message that one device hands on to the next, and so on, in pieces."""
    time_s = message_bytes / slowest_bytes_per_s(group, links) + ring_turn_s(group, links)
    return links.corrected(time_s, "send", message_bytes, group.nodes > 1)


def all_to_all_s(message_bytes: Values, group: Group, links: Links) -> Values:
    """Each device sends an equal part of its message to each of the group, one after the other (Thakur et al. 2005).

    All groups exchange at once: what leaves a node shares its network.
    """
    part = message_bytes / group.size
    near = (group.within - 1.0) * part / links.link_bytes_per_s
    far = (group.size - group.within) * part * group.within * group.rings / links.network_bytes_per_s
    turns = (group.within - 1.0) * links.link_latency_s + (group.size - group.within) * links.network_latency_s
    return near + far + turns


def send_s(message_bytes: Values, crosses: Values, links: Links, *, rings: Values) -> Values:
    """One message to one other device, a mean where `crosses` is the share of messages that go to another node.

    `rings` is how many such messages leave a node at once.
    """
    near, far = (
        links.corrected(time_s, "send", message_bytes, np.array(across))
        for time_s, across in (
            (message_bytes / links.link_bytes_per_s + links.link_latency_s, False),
            (message_bytes * rings / links.network_bytes_per_s + links.network_latency_s, True),
        )
    )
    return crosses * far + (1.0 - crosses) * near


def chain_crossing(size: Values, stride: Values, devices_per_node: Values) -> Values:
    """Share of a chain's hops that lead to another node; its members are `stride` ranks apart, the first is rank 0."""
    hops = np.maximum(size - 1.0, 1.0)
    return np.minimum(1.0, np.floor(hops * stride / devices_per_node) / hops)
