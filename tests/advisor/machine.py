"""A made-up machine of round numbers, and hand-made layers, to predict with."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from analysis.advisor.fit import MEASURED
from analysis.advisor.machine import Known, MachineFigures, RateCurve, TierFigures
from launch.sweep import one_run
from parallelbench.config.sites import Hardware
from parallelbench.measure.layer_records import LayerCount

NONE = (
    *("message_s", "tensor_launch_s", "shard_launch_s", "handover_s", "step_s"),
    *("shard_copies", "server_copies", "loss_bytes"),
)
PLAIN = dict.fromkeys(MEASURED, 1.0) | dict.fromkeys(NONE, 0.0)
"""Nothing costs more than it must, and nothing overlaps."""


def machine(**changes: Any) -> MachineFigures:
    """10⁹ FLOP/s, 10⁹ bytes/s of memory, 10⁸ bytes/s of links, 10⁷ of network, no latency, no launches."""

    def known(value: float) -> Known:
        return Known(value, "assumed", "a test")

    figures: dict[str, Any] = {
        "accelerator": "made_up",
        "device_type": "cpu",
        "devices_per_node": 4,
        "peak_flops_per_s": {"fp32": known(2e9)},
        "matmul_flops_per_s": {"fp32": RateCurve((1.0,), (1e9,), "assumed", "a test")},
        "memory_bytes_per_s": known(1e9),
        "memory_bytes": known(2.0**30),
        "launch_s": known(0.0),
        "link": TierFigures(name="link", latency_s=known(0.0), bytes_per_s=known(1e8)),
        "network": TierFigures(name="network", latency_s=known(0.0), bytes_per_s=known(1e7)),
    }
    return MachineFigures(**figures | changes)


@functools.cache
def hardware_of(site: str, *more: str) -> Hardware:
    """The figures of a shipped site's file."""
    hardware = one_run([f"site={site}", *more]).run.site.hardware
    assert hardware is not None
    return hardware


def layer(name: str, **counts: Any) -> LayerCount:
    """A layer of which nothing counts but what is given."""
    zero: dict[str, Any] = dict.fromkeys((field for field in LayerCount.__struct_fields__ if field != "name"), 0)
    return LayerCount(name=name, **zero | {"kernels": None} | counts)


def layers(names: Sequence[str], **counts: Any) -> list[LayerCount]:
    """Equal layers."""
    return [layer(name, **counts) for name in names]
