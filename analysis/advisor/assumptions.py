"""What is taken for granted of a machine that nobody measured or described: round numbers that err on neither side."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from analysis.advisor.machine_figures import Known, MachineFigures, RateCurve, TierFigures, figures_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from analysis.advisor.machine_figures import Precision, TierName
    from parallelbench.config.sites import Site

WHY = "nothing was measured here, and no site file describes it"
CORE_FLOPS_PER_S, CORE_BYTES_PER_S, CORE_LAUNCH_S = 3e10, 5e9, 1e-5
"""One processor core: products in fp32, memory, one operation of torch."""
GPU_FLOPS_PER_S, GPU_BYTES_PER_S, GPU_LAUNCH_S = 1e13, 1e12, 1e-5
"""One GPU, in fp32."""
CORE_RATES: Mapping[Precision, float] = {"fp64": 0.5, "fp32": 1.0, "bf16": 1.0, "fp16": 1.0}
GPU_RATES: Mapping[Precision, float] = {"fp64": 0.5, "fp32": 1.0, "tf32": 4.0, "bf16": 8.0, "fp16": 8.0}
"""Rates of products in a precision ÷ in fp32."""
LINK: dict[Literal["cpu", "cuda"], tuple[float, float]] = {"cpu": (5e-5, 1e9), "cuda": (5.7e-6, 2e10)}
"""α in seconds and β in bytes/s within a node; a GPU's are PCI Express', its α NCCL's (src/graph/tuning.cc)."""
NETWORK = (5e-5, 1e9)
"""The same between nodes: 10 Gb/s Ethernet, about."""
LIBRARIES_BYTES: dict[Literal["cpu", "cuda"], float] = {"cpu": 0.5 * 2**30, "cuda": 1.5 * 2**30}
"""Memory of a device that torch and the libraries of communication take."""


def assumed_figures(
    device_type: Literal["cpu", "cuda"], *, devices_per_node: int, memory_bytes: float | None
) -> MachineFigures:
    """A machine of which only the kind, the number of its devices and their memory are known."""
    cpu = device_type == "cpu"

    def known(value: float) -> Known:
        return Known(value, "assumed", WHY)

    def tier(name: TierName, figures: tuple[float, float]) -> TierFigures:
        return TierFigures(name=name, latency_s=known(figures[0]), bytes_per_s=known(figures[1]))

    rate = CORE_FLOPS_PER_S if cpu else GPU_FLOPS_PER_S
    faster = CORE_RATES if cpu else GPU_RATES
    return MachineFigures(
        accelerator="a processor core" if cpu else "a GPU",
        device_type=device_type,
        devices_per_node=devices_per_node,
        peak_flops_per_s={},
        matmul_flops_per_s={name: RateCurve((1.0,), (rate * by,), "assumed", WHY) for name, by in faster.items()},
        memory_bytes_per_s=known(CORE_BYTES_PER_S if cpu else GPU_BYTES_PER_S),
        memory_bytes=None if memory_bytes is None else Known(memory_bytes, "measured", "what the system reports"),
        launch_s=known(CORE_LAUNCH_S if cpu else GPU_LAUNCH_S),
        link=tier("link", LINK[device_type]),
        network=tier("network", NETWORK),
        overhead_bytes=known(LIBRARIES_BYTES[device_type]),
    )


def site_figures(site: Site) -> MachineFigures | None:
    """The figures of a site file, with what libraries take assumed; None where it has none."""
    if site.hardware is None:
        return None
    found = figures_of(site.hardware)
    taken = Known(LIBRARIES_BYTES[found.device_type], "assumed", "usual for torch with its libraries")
    return replace(found, overhead_bytes=taken)
