"""Collectives of the suite's strategies over a machine's two tiers, in seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from analysis.advisor.links import Group, Links, all_reduce_s, chain_crossing, gather_s, group_of, send_s
from analysis.advisor.step_model import overlapped

if TYPE_CHECKING:
    from collections.abc import Callable

    from analysis.advisor.layouts import Values
    from analysis.advisor.suite_step import SuiteJob


_SHARDING_MESSAGES = 3.0
"""Of a layer whose parameters are gathered for each pass, and whose gradients are scattered."""


def scalar(value: float) -> Values:
    """A number as the formulas for many candidates take it."""
    return np.asarray(value, dtype=np.float64)


def exposed_s(compute_s: float, moved_s: float, gamma: float) -> float:
    """What messages add to the computation that hides a part of them."""
    return float(overlapped(scalar(compute_s), scalar(moved_s), gamma)) - compute_s


@dataclass(frozen=True)
class Collectives:
    """What messages of a job take; groups are given by their size and by how far neighbours are apart, in ranks."""

    job: SuiteJob

    @property
    def _links(self) -> Links:
        figures = self.job.figures
        network = figures.link if figures.network is None else figures.network
        return Links(
            link_bytes_per_s=scalar(figures.link.bytes_per_s.value),
            network_bytes_per_s=scalar(network.bytes_per_s.value),
            link_latency_s=scalar(figures.link.latency_s.value),
            network_latency_s=scalar(network.latency_s.value),
            trees=figures.device_type == "cuda",
        )

    def _group(self, size: int, stride: int) -> Group:
        job = self.job
        return group_of(scalar(size), scalar(stride), scalar(self._per_node), scalar(job.run.devices))

    @property
    def _per_node(self) -> int:
        run = self.job.run
        return min(self.job.figures.devices_per_node, max(1, run.devices // run.nodes))

    def all_reduce(self, message_bytes: float, size: int, *, stride: int = 1, messages: float = 1) -> float:
        """Sums of `message_bytes` altogether, in so many messages."""
        return self._several(all_reduce_s, message_bytes, size, stride=stride, messages=messages)

    def gather(self, message_bytes: float, size: int, *, stride: int = 1, messages: float = 1) -> float:
        """All-gathers, or reduce-scatters, of `message_bytes` altogether."""
        return self._several(gather_s, message_bytes, size, stride=stride, messages=messages)

    def _several(
        self,
        cost: Callable[[Values, Group, Links], Values],
        message_bytes: float,
        size: int,
        *,
        stride: int,
        messages: float,
    ) -> float:
        if size < 2 or not messages:
            return 0.0
        once = float(cost(scalar(message_bytes / messages), self._group(size, stride), self._links))
        scales = self.job.scales
        return messages * (scales["link_scale"] * once + scales["message_s"])

    def sharding_s(self, layers_bytes: Values, *, times: float) -> float:
        """What sharing layers of these sizes takes besides messages, of which each layer has so many.

        By the calibration, in which each layer is gathered twice and scattered once. Without it only copies are known.
        """
        scales, figures = self.job.scales, self.job.figures
        if figures.sharding is None:
            return scales["shard_copies"] * times * float(layers_bytes.sum()) / figures.memory_bytes_per_s.value
        ranks = scalar(figures.sharding.ranks)
        messages = _SHARDING_MESSAGES * gather_s(
            layers_bytes, Group(size=ranks, within=ranks, rings=scalar(1.0)), self._links
        )
        besides = np.maximum(figures.sharding.layers_s(layers_bytes) - messages, 0.0)
        return scales["sharding_scale"] * times / _SHARDING_MESSAGES * float(besides.sum())

    def hop(self, message_bytes: float, size: int, *, stride: int = 1) -> float:
        """A message from one member of a chain of `size` to the next, `stride` ranks further; a mean over the hops."""
        crossing = float(chain_crossing(scalar(size), scalar(stride), scalar(self._per_node)))
        return self._sent(message_bytes, crossing, at_once=stride)

    def exchange(self, message_bytes: float, workers: int, servers: int) -> float:
        """A message between a worker and a server, which stand behind the workers; a mean over all pairs."""
        near = sum(
            max(0, min(workers, first + self._per_node) - first)
            * max(0, min(workers + servers, first + self._per_node) - max(workers, first))
            for first in range(0, workers, self._per_node)
        )
        # Workers take turns; only servers of one node share its network.
        return self._sent(message_bytes, 1.0 - near / (workers * servers), at_once=servers)

    def _sent(self, message_bytes: float, crossing: float, *, at_once: int) -> float:
        share = scalar(crossing if self.job.run.nodes > 1 else 0.0)
        rings = scalar(min(at_once, self._per_node))
        return self.job.scales["link_scale"] * float(send_s(scalar(message_bytes), share, self._links, rings=rings))
