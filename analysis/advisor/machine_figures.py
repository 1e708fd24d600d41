"""What devices and links can do, each figure with what it rests on: calibration's output and ranking's input.

A figure was measured on the machine, stands in a site file, or is assumed. Sizes and rates are in SI units. Nothing
here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from parallelbench.config.sites import Hardware

Origin = Literal["measured", "site", "assumed"]
"""measured: on this machine. site: stands in a site file, from public sources. assumed: nobody knows."""
Precision = Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8"]
"""The suite's names."""
TierName = Literal["link", "network"]
"""link: between the devices of a node. network: between nodes."""


@dataclass(frozen=True)
class Known:
    """One figure, and what it rests on."""

    value: float
    origin: Origin
    source: str
    """The file, the data sheet, or why it is assumed."""


@dataclass(frozen=True)
class RateCurve:
    """Rates that depend on the size of a piece of work, such as FLOP/s of products by their FLOPs."""

    sizes: tuple[float, ...]
    """Ascending."""
    rates: tuple[float, ...]
    """Per second, one per size."""
    origin: Origin
    source: str

    def __post_init__(self) -> None:
        """Hold sizes and rates against each other."""
        assert len(self.sizes) == len(self.rates) > 0, f"{len(self.sizes)} sizes for {len(self.rates)} rates"
        assert all(a < b for a, b in zip(self.sizes, self.sizes[1:], strict=False)), "sizes are not ascending"

    def at(self, sizes: NDArray[np.float64] | float) -> NDArray[np.float64]:
        """Rates at any sizes, straight between logarithms; beyond the ends, those of the ends."""
        logs = np.interp(np.log(np.maximum(sizes, 1e-30)), np.log(self.sizes), np.log(self.rates))
        result: NDArray[np.float64] = np.exp(logs)
        return result


@dataclass(frozen=True, kw_only=True)
class TierFigures:
    """α–β of one tier of links, by what collectives reach: T = turns · α + bytes ÷ β."""

    name: TierName
    latency_s: Known
    """α: one turn of a collective."""
    bytes_per_s: Known
    """β: what one device sends within a node; what one node sends to others, divided by the oversubscription."""


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """What a layer's forward and backward pass take longer where devices of a node share its parameters."""

    sizes_bytes: tuple[float, ...]
    """Of the layer's parameters; ascending."""
    times_s: tuple[float, ...]
    ranks: int
    """Devices that shared them."""
    origin: Origin
    source: str

    def layers_s(self, sizes_bytes: NDArray[np.float64]) -> NDArray[np.float64]:
        """For layers of any sizes, straight between logarithms; below the smallest its time, beyond the largest ∝."""
        logs = np.interp(np.log(np.maximum(sizes_bytes, 1.0)), np.log(self.sizes_bytes), np.log(self.times_s))
        result: NDArray[np.float64] = np.exp(logs) * np.maximum(sizes_bytes / self.sizes_bytes[-1], 1.0)
        return result


@dataclass(frozen=True, kw_only=True)
class MachineFigures:
    """One kind of device in nodes of one kind."""

    accelerator: str
    """What it is called, e.g. a100_40gb, or the processor's name."""
    device_type: Literal["cpu", "cuda"]
    devices_per_node: int
    peak_flops_per_s: Mapping[Precision, Known]
    """Dense matrix products by the data sheet, of one device: what MFU refers to. Precisions not given are unknown."""
    matmul_flops_per_s: Mapping[Precision, RateCurve]
    """What products reach, by FLOPs of one product, while all devices of a node compute."""
    memory_bytes_per_s: Known
    """What elementwise work reaches of one device's memory, bytes read and written, while all devices work."""
    memory_bytes: Known | None
    """Memory of one device; None: not known."""
    launch_s: Known
    """Host time of one operation, forward; decides where operations are small."""
    link: TierFigures
    network: TierFigures | None
    """None: there is one node."""
    sharding: Sharding | None = None
    """None: never measured; copies and messages are then all that sharding is taken to cost."""
    power_w: Known | None = None
    """One device's power while it computes, its share of the host's not counted; None: never measured."""
    idle_power_w: Known | None = None
    """One device's power while it waits; None: never measured."""
    overhead_bytes: Known | None = None
    """Memory of a device that libraries take (context, communication buffers); None: not known."""
    notes: tuple[str, ...] = field(default=())
    """What a reader must know of all figures together."""

    def matmul(self, precision: Precision) -> RateCurve | None:
        """Products in a precision; where it is not known, in the next wider one that is."""
        for each in _WIDER[precision]:
            if each in self.matmul_flops_per_s:
                return self.matmul_flops_per_s[each]
        return None

    @property
    def tiers(self) -> tuple[TierFigures, ...]:
        """Those that there are."""
        return (self.link,) if self.network is None else (self.link, self.network)


_WIDER: Mapping[Precision, tuple[Precision, ...]] = {
    "fp8": ("fp8", "bf16", "fp16", "fp32"),
    "bf16": ("bf16", "fp16", "fp32"),
    "fp16": ("fp16", "bf16", "fp32"),
    "tf32": ("tf32", "fp32"),
    "fp32": ("fp32", "fp64"),
    "fp64": ("fp64",),
}
"""Kinds of arithmetic that are no faster, the likest first."""
REACHED = {"matmul": 0.7, "memory": 0.7, "link": 0.7, "network": 0.7}
"""Share of a data sheet's figure that work reaches, where nothing was measured: an assumption."""
LATENCY_S: Mapping[TierName, float] = {"link": 3.4e-6, "network": 9.6e-6}
"""One turn of a ring of GPUs where nothing was measured: NCCL's own assumption (src/graph/tuning.cc)."""
LAUNCH_S = 1e-5
"""Host time of one operation where nothing was measured: an assumption."""


def figures_of(hardware: Hardware) -> MachineFigures:
    """The figures of a site file: data sheets, of which `REACHED` says how much is reached."""

    def known(value: float) -> Known:
        return Known(value, "site", hardware.source)

    def reached(kind: str, value: float) -> Known:
        share = REACHED[kind]
        return Known(share * value, "assumed", f"{share:g} of the site file's {value:.3g} ({hardware.source})")

    def tier(name: TierName, bytes_per_s: float) -> TierFigures:
        latency = Known(LATENCY_S[name], "assumed", "no latency was measured")
        return TierFigures(name=name, latency_s=latency, bytes_per_s=reached(name, bytes_per_s))

    products = reached("matmul", 1e12 * hardware.matmul_tflops)
    curve = RateCurve((1.0,), (products.value,), products.origin, products.source)
    peaks: dict[Precision, float] = dict.fromkeys(("fp16", "bf16"), hardware.half_tflops)
    rates: dict[Precision, RateCurve] = dict.fromkeys(("fp16", "bf16"), curve)
    others: dict[Precision, float | None] = {"tf32": hardware.tf32_tflops, "fp32": hardware.single_tflops}
    for precision, tflops in others.items():
        if tflops is not None:
            once = reached("matmul", 1e12 * tflops)
            peaks[precision] = tflops
            rates[precision] = RateCurve((1.0,), (once.value,), once.origin, once.source)
    return MachineFigures(
        accelerator=hardware.accelerator,
        device_type="cuda",
        devices_per_node=hardware.devices_per_node,
        peak_flops_per_s={precision: known(1e12 * tflops) for precision, tflops in peaks.items()},
        matmul_flops_per_s=rates,
        memory_bytes_per_s=reached("memory", 1e9 * hardware.memory_gb_per_s),
        memory_bytes=known(2.0**30 * hardware.memory_gib),
        launch_s=Known(LAUNCH_S, "assumed", "no launches were measured"),
        link=tier("link", 1e9 * hardware.link_gb_per_s),
        network=tier("network", 1e9 / 8 * hardware.network_gbit_per_s / hardware.oversubscription),
    )
