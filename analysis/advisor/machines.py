"""Devices and links as columns, in SI units: the machine that each candidate runs on."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from analysis.advisor.layouts import Values
    from parallelbench.config.sites import Hardware


@dataclass(frozen=True, kw_only=True)
class Machines:
    """One element per candidate, from public sources."""

    peak_flops_per_s: Values
    """Dense half-precision matrix products of one device by the data sheet: what MFU refers to."""
    flops_per_s: Values
    """The most that was measured of them."""
    memory_bytes_per_s: Values
    """One device's memory."""
    memory_bytes: Values
    """One device's memory."""
    link_bytes_per_s: Values
    """Sent by one device to others of its node."""
    network_bytes_per_s: Values
    """Sent by one node to others, divided by the oversubscription."""
    devices_per_node: Values

    def take(self, rows: NDArray[np.bool_] | NDArray[np.int64]) -> Machines:
        """Only these rows."""
        return Machines(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})


def machines_of(hardware: Sequence[Hardware]) -> Machines:
    """One row per element."""
    columns = {
        "peak_flops_per_s": [1e12 * each.half_tflops for each in hardware],
        "flops_per_s": [1e12 * each.matmul_tflops for each in hardware],
        "memory_bytes_per_s": [1e9 * each.memory_gb_per_s for each in hardware],
        "memory_bytes": [2.0**30 * each.memory_gib for each in hardware],
        "link_bytes_per_s": [1e9 * each.link_gb_per_s for each in hardware],
        "network_bytes_per_s": [1e9 / 8 * each.network_gbit_per_s / each.oversubscription for each in hardware],
        "devices_per_node": [float(each.devices_per_node) for each in hardware],
    }
    return Machines(**{name: np.array(values, dtype=np.float64) for name, values in columns.items()})
