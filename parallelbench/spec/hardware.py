"""What a site's devices and links can do, from public sources: what the advisor starts from."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from parallelbench.spec.structure import Count, Name, Node

Rate = Annotated[float, Meta(gt=0.0)]


class Hardware(Node, frozen=True, kw_only=True):
    """One kind of accelerator in nodes of one kind."""

    accelerator: Name
    """What it is called, e.g. a100_40gb."""
    half_tflops: Rate
    """Dense matrix products in fp16 or bf16 by the data sheet, 10¹² FLOP/s of one device."""
    tf32_tflops: Rate | None = None
    """The same in TF32; null: not known."""
    single_tflops: Rate | None = None
    """The same in fp32, which no tensor cores take; null: not known."""
    matmul_tflops: Rate
    """The most that was measured of them, at any size: power limits keep it below the data sheet."""
    memory_gb_per_s: Rate
    """Bandwidth of a device's memory, 10⁹ bytes/s."""
    memory_gib: Rate
    """Memory of one device, GiB."""
    link_gb_per_s: Rate
    """Links between the devices of a node: 10⁹ bytes/s that one device can send."""
    network_gbit_per_s: Rate
    """Network between nodes: 10⁹ bit/s that one node can send."""
    oversubscription: Annotated[float, Meta(ge=1.0)]
    """Bandwidth of all nodes together ÷ what the network's core carries; 1: full bisection."""
    devices_per_node: Count
    """Devices of a node."""
    source: str
    """Where the figures come from."""
