"""What devices and links can do, each figure with what it rests on: calibration's output and ranking's input.

A figure was measured on the machine, stands in a site file, or is assumed: round numbers that err on neither side.
Nothing is predicted of a site by figures that can't be its own. Sizes and rates are in SI units. Loads no torch.
"""

from __future__ import annotations

import math
import re
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from parallelbench.errors import ConfigError, count_of
from parallelbench.measure.layer_records import IMAGES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from analysis.advisor.layouts import Values
    from parallelbench.config.run import RunConfig
    from parallelbench.config.sites import Hardware, Site


MULTIPROCESSORS = 108
"""Of a GPU of which nobody says: an A100's."""
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

    def scaled(self, times: float, *, most: float = math.inf) -> RateCurve:
        """With so many times these rates, and `most` at most."""
        return replace(self, rates=tuple(min(most, times * rate) for rate in self.rates))

    def at(self, sizes: NDArray[np.float64] | float) -> NDArray[np.float64]:
        """Rates at any sizes, straight between logarithms; beyond the ends, those of the ends."""
        logs = np.interp(np.log(np.maximum(sizes, 1e-30)), np.log(self.sizes), np.log(self.rates))
        return np.exp(logs)


@dataclass(frozen=True)
class KernelRates:
    """Work per second of a kind of operations, by bytes of a convolution's group of weights, of the keys of attention's
    head, or that one operation writes.
    """

    forward: RateCurve
    backward: RateCurve
    """Forward's work, for the gradients of all that it takes."""


@dataclass(frozen=True, kw_only=True)
class TierFigures:
    """α–β of one tier of links, by what collectives reach: T = turns · α + bytes ÷ β."""

    name: TierName
    latency_s: Known
    """α: one turn of a collective."""
    bytes_per_s: Known
    """β: what one device sends within a node; what one node sends to others, divided by the oversubscription."""
    measured: Mapping[str, RateCurve] = field(default_factory=dict)
    """Operation → by a message's bytes, the time that α and β say of it ÷ the measured one."""


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
        return np.exp(logs) * np.maximum(sizes_bytes / self.sizes_bytes[-1], 1.0)


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
    """Memory of one GPU, or of a node whose processors share it; None: not known."""
    launch_s: Known
    """Host time of one plain operation; decides where operations are small."""
    link: TierFigures
    network: TierFigures | None
    """None: there is one node."""
    kernels: Mapping[str, Mapping[Precision, KernelRates]] = field(default_factory=dict)
    """Kind of operations (`measure.layer_records`) → what was measured in which precision; of others see `kernel`."""
    train_launch_s: Known | None = None
    """Host time of one operation of a GPU's training, forward; None: not measured, see `TRAINED`."""
    step_s: Known | None = None
    """Host time of a GPU's step besides its model's operations; None: not measured, see `STEP_LAUNCHES`."""
    unaligned: Mapping[Precision, float] = field(default_factory=dict)
    """Time of a large product whose sides 8 does not divide ÷ of another; where it is not known see `UNALIGNED`."""
    sharding: Sharding | None = None
    """None: never measured; copies and messages are then all that sharding is taken to cost."""
    multiprocessors: int | None = None
    """Streaming multiprocessors of a GPU; None: not known."""
    busy_devices: int | None = None
    """Devices of a node that worked at once while they were measured; None: all."""
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

    def kernel(self, kind: str, precision: Precision = "fp32") -> KernelRates:
        """What a kind of operations reaches: of convolutions and attention in this precision, of others in fp32."""
        if kind not in SLOWER:
            precision = "fp32"
        known = self.kernels.get(kind, {})
        for each in _LIKE[precision]:
            if each in known:
                return self._as_in(precision, known[each], each)
        products = self.matmul(precision)
        if kind in SLOWER and products is not None:
            rate, backward = max(products.rates) / SLOWER[kind], 1.0 if kind == IMAGES else 2.0
        else:
            rate, backward = self.memory_bytes_per_s.value / READ_AND_WRITTEN, 1.5
        forward, back = (RateCurve((1.0,), (each,), "assumed", "not measured") for each in (rate, rate / backward))
        return KernelRates(forward, back)

    def _as_in(self, precision: Precision, measured: KernelRates, other: Precision) -> KernelRates:
        """Rates in a precision by those in another one.

        In a faster one they gain what products gain. In a slower one the kernel moves more bytes, or computes as fast
        as products do, whichever takes longer: kernels far from the speed of products don't lose what these lose.
        """
        own, others = (max(curve.rates) if (curve := self.matmul(each)) else None for each in (precision, other))
        if own is None or others is None or own == others:
            return measured
        if own > others:
            return KernelRates(*(each.scaled(own / others) for each in (measured.forward, measured.backward)))
        moved = min(1.0, _BYTES[other] / _BYTES[precision])
        return KernelRates(*(each.scaled(moved, most=own) for each in (measured.forward, measured.backward)))

    @property
    def tiers(self) -> tuple[TierFigures, ...]:
        """Those that there are."""
        return (self.link,) if self.network is None else (self.link, self.network)


READ_AND_WRITTEN = 3.0
"""Bytes that elementwise work moves ÷ the bytes that it writes, an assumption: it reads about two values for each."""
SLOWER = {IMAGES: 1.5, "convolution": 1.5, "grouped": 5.0, "attention": 1.5}
"""Time of operations ÷ of matrix products of as many FLOPs, an assumption."""
_WIDER: Mapping[Precision, tuple[Precision, ...]] = {
    "fp8": ("fp8", "bf16", "fp16", "fp32"),
    "bf16": ("bf16", "fp16", "fp32"),
    "fp16": ("fp16", "bf16", "fp32"),
    "tf32": ("tf32", "fp32"),
    "fp32": ("fp32", "fp64"),
    "fp64": ("fp64",),
}
"""Kinds of arithmetic that are no faster, the likest first."""
_LIKE: Mapping[Precision, tuple[Precision, ...]] = {
    "fp8": ("bf16", "fp16", "tf32", "fp32"),
    "bf16": ("bf16", "fp16", "tf32", "fp32"),
    "fp16": ("fp16", "bf16", "tf32", "fp32"),
    "tf32": ("tf32", "bf16", "fp16", "fp32"),
    "fp32": ("fp32", "tf32", "bf16", "fp16"),
    "fp64": ("fp64", "fp32", "tf32", "bf16", "fp16"),
}
"""Kinds of arithmetic by which others are known, the likest first."""
_BYTES: Mapping[Precision, int] = {"fp8": 1, "bf16": 2, "fp16": 2, "tf32": 4, "fp32": 4, "fp64": 8}
"""Of a number."""
REACHED = 0.7
"""Share of a data sheet's figure that work reaches, where nothing was measured: an assumption."""
LATENCY_S: Mapping[TierName, float] = {"link": 3.4e-6, "network": 9.6e-6}
"""One turn of a ring of GPUs where nothing was measured: NCCL's own assumption (src/graph/tuning.cc)."""
LAUNCH_S = 1e-5
"""Host time of one operation where nothing was measured: an assumption."""
TRAINED, STEP_LAUNCHES = 3.0, 35.0
"""Host time of an operation of training ÷ of a plain one, and of a step besides its operations ÷ of one of these: as on
an H200's host, where eight of the suite's steps took 28 µs per operation and 1 ms besides, and an addition 9 µs.
"""
UNALIGNED: Mapping[Precision, float] = {"bf16": 2.5, "fp16": 2.5}
"""Time of a GPU's large product whose sides 8 does not divide ÷ of another: an assumption; of other precisions 1."""


def figures_of(hardware: Hardware) -> MachineFigures:
    """The figures of a site file: data sheets, of which `REACHED` says how much is reached; what libraries take is
    assumed.
    """

    def known(value: float) -> Known:
        return Known(value, "site", hardware.source)

    def reached(value: float) -> Known:
        return Known(REACHED * value, "assumed", f"{REACHED:g} of the site file's {value:.3g} ({hardware.source})")

    def tier(name: TierName, bytes_per_s: float) -> TierFigures:
        latency = Known(LATENCY_S[name], "assumed", "no latency was measured")
        return TierFigures(name=name, latency_s=latency, bytes_per_s=reached(bytes_per_s))

    def products(tflops: float) -> RateCurve:
        once, limit = reached(1e12 * tflops), hardware.clock_share
        source = once.source + (f", and {limit:.3g} of that under the power limit" if limit < 1 else "")
        return RateCurve((1.0,), (limit * once.value,), once.origin, source)

    half = hardware.half_tflops, hardware.matmul_tflops
    sheet: dict[Precision, tuple[float, float]] = {"fp16": half, "bf16": half}
    if (tf32 := hardware.tf32_tflops) is not None:
        sheet["tf32"] = tf32, tf32
    if (fp32 := hardware.single_tflops) is not None:
        sheet["fp32"] = fp32, fp32
    return MachineFigures(
        accelerator=hardware.accelerator,
        device_type="cuda",
        devices_per_node=hardware.devices_per_node,
        peak_flops_per_s={precision: known(1e12 * peak) for precision, (peak, _) in sheet.items()},
        matmul_flops_per_s={precision: products(most) for precision, (_, most) in sheet.items()},
        memory_bytes_per_s=reached(1e9 * hardware.memory_gb_per_s),
        memory_bytes=known(2.0**30 * hardware.memory_gib),
        launch_s=Known(LAUNCH_S, "assumed", "no launches were measured"),
        multiprocessors=hardware.multiprocessors,
        link=tier("link", 1e9 * hardware.link_gb_per_s),
        network=tier("network", 1e9 / 8 * hardware.network_gbit_per_s / hardware.oversubscription),
        overhead_bytes=Known(LIBRARIES_BYTES["cuda"], "assumed", "usual for torch with its libraries"),
    )


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


def assumed_link(device_type: Literal["cpu", "cuda"], why: str) -> TierFigures:
    """Links that nobody measured."""
    latency_s, bytes_per_s = (Known(value, "assumed", why) for value in LINK[device_type])
    return TierFigures(name="link", latency_s=latency_s, bytes_per_s=bytes_per_s)


def assumed_figures(
    device_type: Literal["cpu", "cuda"], *, devices_per_node: int, memory_bytes: float | None
) -> MachineFigures:
    """A machine of which only the kind, the number of its devices and the memory are known."""
    cpu = device_type == "cpu"

    def known(value: float) -> Known:
        return Known(value, "assumed", WHY)

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
        link=assumed_link(device_type, WHY),
        network=TierFigures(name="network", latency_s=known(NETWORK[0]), bytes_per_s=known(NETWORK[1])),
        overhead_bytes=known(LIBRARIES_BYTES[device_type]),
    )


@dataclass(frozen=True, kw_only=True)
class Machines:
    """One element per candidate, from public sources."""

    peak_flops_per_s: Values
    """Dense half-precision matrix products of one device by the data sheet: what MFU refers to."""
    flops_per_s: Values
    """The most that was measured of them, under the power limit."""
    memory_bytes_per_s: Values
    """One device's memory."""
    link_bytes_per_s: Values
    """Sent by one device to others of its node."""
    network_bytes_per_s: Values
    """Sent by one node to others, divided by the oversubscription."""
    devices_per_node: Values
    multiprocessors: Values
    """Streaming multiprocessors of a GPU, each of which computes one tile of a product at a time."""
    launch_s: Values
    """Host time of one operation, forward; of the suite's training on GPUs, of transformers and on processors plain."""
    link_latency_s: Values
    """One turn of a collective in a node."""
    network_latency_s: Values
    """The same between nodes."""
    step_s: Values
    """Host time of a step besides its model's operations."""
    crowded: Values
    """0: the device works alone in its node, 1: with as many others as while it was measured."""
    curve: RateCurve | None = None
    """Rates of products by size, where they were measured; None: `flops_per_s`."""
    sharding: Sharding | None = None
    messages: Mapping[tuple[str, str], RateCurve] = field(default_factory=dict)
    """`Links.measured`."""
    host_computes: bool = False
    """Whether what launches operations computes them too, as processors do."""
    runs_ahead: bool = False
    """Whether the host launches a whole step while the device computes, as the suite's loop lets it on GPUs; published
    steps of transformers are sums of layers."""

    def rates(self, flop: Values) -> Values:
        """FLOP/s of products of so many FLOPs, [candidate, layer]."""
        return self.flops_per_s[:, None] if self.curve is None else self.curve.at(flop)

    def take(self, rows: NDArray[np.bool_] | NDArray[np.int64]) -> Machines:
        """Only these rows."""
        return replace(self, **{name: getattr(self, name)[rows] for name in COLUMNS})


COLUMNS = tuple(each.name for each in fields(Machines) if each.default is each.default_factory is MISSING)
"""Of machines, one element per candidate."""


def machines_of(hardware: Sequence[Hardware]) -> Machines:
    """One row per element."""
    columns: dict[str, list[float]] = {
        "peak_flops_per_s": [1e12 * each.half_tflops for each in hardware],
        "flops_per_s": [1e12 * each.matmul_tflops * each.clock_share for each in hardware],
        "memory_bytes_per_s": [1e9 * each.memory_gb_per_s for each in hardware],
        "link_bytes_per_s": [1e9 * each.link_gb_per_s for each in hardware],
        "network_bytes_per_s": [1e9 / 8 * each.network_gbit_per_s / each.oversubscription for each in hardware],
        "devices_per_node": [float(each.devices_per_node) for each in hardware],
        "multiprocessors": [float(each.multiprocessors) for each in hardware],
    }
    return made_of(columns)


def made_of(columns: Mapping[str, Any], **more: Any) -> Machines:
    """Machines from columns, or one from numbers; what is not said of the host and of latencies is assumed."""
    usual = {"launch_s": LAUNCH_S, "step_s": 0.0, "crowded": 1.0}
    usual |= {f"{tier}_latency_s": latency_s for tier, latency_s in LATENCY_S.items()}
    arrays = [np.atleast_1d(np.asarray(value, dtype=np.float64)) for value in (usual | dict(columns)).values()]
    return Machines(**dict(zip(usual | dict(columns), np.broadcast_arrays(*arrays), strict=True)), **more)


def machine_of_job(figures: MachineFigures, run: RunConfig) -> Machines:
    """What a machine can do while a run is on it, by what was measured; raises `ConfigError` for unknown speeds."""
    curve = figures.matmul(run.precision)
    if curve is None:
        raise ConfigError(
            f"no speed of products in precision={run.precision} is known for {figures.accelerator}: "
            "calibrate this machine, or choose another precision"
        )
    busy, most = max(1, run.devices // run.nodes), max(figures.busy_devices or figures.devices_per_node, 2)
    network = figures.link if figures.network is None else figures.network
    cpu, launch_s, step_s = figures.device_type == "cpu", figures.launch_s.value, 0.0
    if not cpu:
        launch_s = TRAINED * launch_s if figures.train_launch_s is None else figures.train_launch_s.value
        step_s = STEP_LAUNCHES * launch_s if figures.step_s is None else figures.step_s.value
    columns = {
        "peak_flops_per_s": np.nan,  # the figures say it where MFU refers to it
        "flops_per_s": max(curve.rates),
        "memory_bytes_per_s": figures.memory_bytes_per_s.value,
        "link_bytes_per_s": figures.link.bytes_per_s.value,
        "network_bytes_per_s": network.bytes_per_s.value,
        "devices_per_node": float(min(figures.devices_per_node, busy)),
        "multiprocessors": float(figures.multiprocessors or MULTIPROCESSORS),
        "launch_s": launch_s,
        "step_s": step_s,
        "link_latency_s": figures.link.latency_s.value,
        "network_latency_s": network.latency_s.value,
        "crowded": (min(busy, most) - 1) / (most - 1),
    }
    messages = {(tier.name, name): share for tier in figures.tiers for name, share in tier.measured.items()}
    of_all = {"curve": curve, "sharding": figures.sharding, "messages": messages}
    return made_of(columns, **of_all, host_computes=cpu, runs_ahead=not cpu)


UNLIKE_MEMORY = 0.15
"""Share by which a device's memory may differ from the site file's: drivers take some."""


def require_site(figures: MachineFigures, site: Site, device: str, *, whole_nodes: bool) -> None:
    """Raise `ConfigError` where device type, name, memory or devices per node contradict the site.

    `device` is the run's. `whole_nodes`: all devices of a node were measured; runs may have taken fewer. The site
    "default" is whatever machine was measured.
    """
    if site.name == "default":
        return
    for why in _contradictions(figures, site, device, whole_nodes=whole_nodes):
        raise ConfigError(
            f"--from was measured on {figures.accelerator} ({figures.device_type}), but site={site.name} {why}: "
            "calibrate that site, or leave --from or site=… out"
        )


def devices_of_node(site: Site) -> int:
    """By the hardware where it is described."""
    return site.devices_per_node if site.hardware is None else site.hardware.devices_per_node


def _contradictions(figures: MachineFigures, site: Site, device: str, *, whole_nodes: bool) -> Iterator[str]:
    kind = "cuda" if site.hardware is not None else site.device if device == "auto" else device
    if figures.device_type != kind:
        yield f"has {kind} devices"
    named = (site.gpu_type or "") if site.hardware is None else site.hardware.accelerator
    family = re.search(r"[a-z]+\d+", re.sub(r"[^a-z0-9]", " ", named.lower()))
    if kind == "cuda" and family is not None and family[0] not in re.sub(r"[^a-z0-9]", "", figures.accelerator.lower()):
        yield f"has {named}"
    if site.hardware is not None and figures.memory_bytes is not None:
        expected, found = site.hardware.memory_gib, figures.memory_bytes.value / 2**30
        if abs(found / expected - 1.0) > UNLIKE_MEMORY:
            yield f"has {expected:g} GiB on each device, not {found:.3g}"
    # A node may have more devices, hyperthreads among them, than a site hands out: those that worked are compared.
    node, worked = devices_of_node(site), figures.busy_devices or figures.devices_per_node
    if worked > node or (whole_nodes and worked != node):
        yield f"has {count_of(node, 'device')} per node, not {worked}"
