"""Measured figures of a machine: from a calibration's table, or from what every run probes.

A calibration has rates by size, latency and bandwidth of each tier of links; a run probes one product, one copy, a
ring's latency and bandwidth.
"""

from __future__ import annotations

import math
from statistics import median
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from analysis.advisor.links import Group, Links, all_reduce_s, gather_s, send_s
from analysis.advisor.machine import (
    GPU_RATES,
    LATENCY_S,
    LAUNCH_S,
    KernelRates,
    Known,
    MachineFigures,
    RateCurve,
    Sharding,
    TierFigures,
    assumed_link,
)
from parallelbench.errors import ConfigError, count_of
from parallelbench.results.calibration import BACKWARD, read_calibration

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from analysis.advisor.layouts import Values
    from analysis.advisor.machine import Precision, TierName


Row = dict[str, Any]
OUT_OF_CACHE = 0.5
"""Copies at least this large, as a share of the largest one, tell the memory's bandwidth."""
GROWS = 1.5
"""Least time of the largest message ÷ of the smallest, of the operation where it is most."""
_OF_HOST = ("launch", "train_launch", "step")
_OPERATIONS = ("all_reduce", "all_gather", "send")
"""Those that the formulas of `analysis.advisor.links` know."""


def read_figures(path: Path) -> MachineFigures:
    """The figures of a machine that was calibrated; raises `ConfigError` for a file that holds no calibration."""
    rows, facts = read_calibration(path)
    return figures_of_calibration(rows, facts, source=f"calibration {path.name}")


def figures_of_calibration(rows: Sequence[Row], facts: Mapping[str, Any], *, source: str) -> MachineFigures:
    """Figures from a calibration's rows."""
    busy = [row for row in rows if row["tier"] is None]

    def known(value: float) -> Known:
        return Known(value, "measured", source)

    copies = [row for row in busy if row["operation"] == "copy"]
    largest = max(row["size_bytes"] for row in copies)
    moved = [2 * row["size_bytes"] / row["time_s"] for row in copies if row["size_bytes"] >= OUT_OF_CACHE * largest]
    alone = {name: [row["time_s"] for row in busy if row["operation"] == name] for name in _OF_HOST}
    launch_s, train_launch_s, step_s = (known(min(each)) if each else None for each in alone.values())
    assert launch_s is not None, "every calibration has it"
    link = _tier("link", rows, facts, link=None, source=source)
    network = _tier("network", rows, facts, link=link, source=source)
    used, kind = facts["devices_per_node"], facts["device_type"]
    products = _products(busy, source)
    shared = used if kind == "cpu" else 1
    return MachineFigures(
        accelerator=facts["device_name"],
        device_type=kind,
        devices_per_node=max(used, _devices_of_node(facts)),
        multiprocessors=facts.get("multiprocessors"),
        busy_devices=used,
        peak_flops_per_s={},
        matmul_flops_per_s=products,
        memory_bytes_per_s=known(min(moved)),
        memory_bytes=known(float(shared * facts["memory_bytes"])),
        launch_s=launch_s,
        train_launch_s=train_launch_s,
        step_s=step_s,
        unaligned=_unaligned(busy, products),
        link=link or assumed_link(kind, f"{source} had one device"),
        network=network,
        kernels=_kernels(busy, source),
        sharding=_sharding(rows, source),
        notes=tuple(_notes(facts)),
    )


def _notes(facts: Mapping[str, Any]) -> Iterator[str]:
    if facts["devices_per_node"] == 1:
        yield "one device was calibrated: links are assumed"
    if (whole := _devices_of_node(facts)) > facts["devices_per_node"]:
        yield f"{facts['devices_per_node']} of a node's {whole} devices were calibrated: more may slow each other down"
    if others := facts["others_running"]:
        yield (
            f"{count_of(others, 'other process', 'other processes')} kept the machine busy when the calibration began: "
            "latencies above all are too long; calibrate again when the machine is free"
        )


def _devices_of_node(facts: Mapping[str, Any]) -> int:
    """How many devices the node has that recorded its environment: not only those in use; 0: it does not say."""
    environment = facts["environment"]
    if facts["device_type"] == "cuda":
        cuda = environment.get("cuda") or {}
        # The driver lists a node's GPUs where torch sees those of the job alone.
        return max(len(cuda.get("devices") or ()), len((cuda.get("power_limit_w") or "").split()))
    cores, quota = environment.get("logical_cores") or 0, environment.get("cpu_quota_cores")
    usable = cores if quota is None else min(cores, int(quota))
    return int(usable // (facts.get("cores_per_device") or 1))


def _curve(points: Iterable[tuple[float, float]], source: str) -> RateCurve:
    """Measured rates by size."""
    sizes, rates = zip(*sorted(points), strict=True)
    return RateCurve(sizes, rates, "measured", source)


def _products(busy: Sequence[Row], source: str) -> dict[Precision, RateCurve]:
    """Rates of matrix products by their FLOPs, per precision."""
    points: dict[Precision, list[tuple[float, float]]] = {}
    for row in busy:
        if row["operation"] == "matmul":
            points.setdefault(row["precision"], []).append((row["flop"], row["flop"] / row["time_s"]))
    return {precision: _curve(each, source) for precision, each in points.items()}


def _unaligned(busy: Sequence[Row], products: Mapping[Precision, RateCurve]) -> dict[Precision, float]:
    """How much longer a large product takes whose sides 8 does not divide, per precision."""
    rows = [row for row in busy if row["operation"] == "unaligned"]
    usual_s = [row["flop"] / float(products[row["precision"]].at(row["flop"])) for row in rows]
    return {row["precision"]: max(1.0, row["time_s"] / usual) for row, usual in zip(rows, usual_s, strict=True)}


def _kernels(busy: Sequence[Row], source: str) -> dict[str, dict[Precision, KernelRates]]:
    """Of each kind that was measured forward and backward, in each precision, by what its rate depends on."""
    points: dict[tuple[str, Precision, str], list[tuple[float, float]]] = {}
    for row in busy:
        kind, way = row["operation"].removesuffix(BACKWARD), row["operation"]
        size = row["size_bytes"] or row["flop"]
        if size is not None:
            rate = float((row["flop"] or row["size_bytes"]) / row["time_s"])
            points.setdefault((kind, row["precision"] or "fp32", way), []).append((size, rate))

    found: dict[str, dict[Precision, KernelRates]] = {}
    for kind, precision, way in points:
        if way == kind + BACKWARD:
            forward, backward = (_curve(points[kind, precision, each], source) for each in (kind, way))
            found.setdefault(kind, {})[precision] = KernelRates(forward, backward)
    return found


def _sharding(rows: Sequence[Row], source: str) -> Sharding | None:
    """What sharding costs by a layer's size; None where it was not measured."""
    points = sorted((row["size_bytes"], row["time_s"], row["ranks"]) for row in rows if row["operation"] == "shard")
    if not points:
        return None
    sizes, times, ranks = zip(*points, strict=True)
    return Sharding(sizes_bytes=sizes, times_s=times, ranks=ranks[0], origin="measured", source=source)


def _tier(
    name: TierName, rows: Sequence[Row], facts: Mapping[str, Any], *, link: TierFigures | None, source: str
) -> TierFigures | None:
    """α and β of a tier by least squares on log time, with the formulas that predict with them (Hockney 1994).

    None where nothing of the tier was measured.
    """
    from scipy.optimize import least_squares

    measured = [row for row in rows if row["tier"] == name and row["operation"] in _OPERATIONS]
    if not measured:
        return None
    if max(_growth(measured, operation) for operation in {row["operation"] for row in measured}) < GROWS:
        raise ConfigError(
            f"{source}: the times of messages between devices don't grow with their size: "
            "the machine was disturbed; calibrate again"
        )
    times = np.array([row["time_s"] for row in measured])

    def shares(logs: Values) -> Values:
        """What the formulas say of α and β ÷ what was measured."""
        latency_s, bytes_per_s = np.exp(logs)
        said_s = _said_s(measured, latency_s, bytes_per_s, link=link, trees=facts["device_type"] == "cuda")
        return np.asarray(said_s / times)

    fastest = max(row["size_bytes"] / row["time_s"] for row in measured)
    found: Any = least_squares(
        lambda logs: np.log(shares(logs)),
        np.log([times.min(), fastest]),
        bounds=(np.log([1e-9, 1e3]), np.log([10.0, 1e14])),
    )
    latency_s, bytes_per_s = (Known(value, "measured", source) for value in np.exp(found.x).tolist())
    errors = dict(_by_operation(measured, shares(found.x), source))
    return TierFigures(name=name, latency_s=latency_s, bytes_per_s=bytes_per_s, measured=errors)


def _by_operation(rows: Sequence[Row], shares: Values, source: str) -> Iterator[tuple[str, RateCurve]]:
    """The shares of each operation by size: gloo and NCCL change their ways with both."""
    operations, every = (np.array([row[name] for row in rows]) for name in ("operation", "size_bytes"))
    for operation in np.unique(operations).tolist():
        own = operations == operation
        # Of many ranks the smallest messages are equally large: each rank has a number at least.
        sizes, places = np.unique(every[own].astype(np.float64), return_inverse=True)
        logs = [np.log(shares[own])[places == place].mean() for place in range(len(sizes))]
        yield operation, RateCurve(tuple(sizes.tolist()), tuple(np.exp(logs).tolist()), "measured", source)


def _growth(rows: Sequence[Row], operation: str) -> float:
    """Time of an operation's largest message ÷ of its smallest."""
    by_size = sorted((row["size_bytes"], row["time_s"]) for row in rows if row["operation"] == operation)
    return float(by_size[-1][1] / by_size[0][1])


def _said_s(
    rows: Sequence[Row], latency_s: float, bytes_per_s: float, *, link: TierFigures | None, trees: bool
) -> Values:
    """What `analysis.advisor.links` says of a tier's messages; `link`: of the node, where they go between nodes."""
    ranks, nodes, sizes = (np.array([float(row[name]) for row in rows]) for name in ("ranks", "nodes", "size_bytes"))
    near = (latency_s, bytes_per_s) if link is None else (link.latency_s.value, link.bytes_per_s.value)
    links = Links(
        link_latency_s=np.array(near[0]),
        link_bytes_per_s=np.array(near[1]),
        network_latency_s=np.array(latency_s),
        network_bytes_per_s=np.array(bytes_per_s),
        trees=trees,
    )
    group = Group(size=ranks, within=ranks / nodes, rings=np.ones(len(rows)))
    said = {
        "all_reduce": all_reduce_s(sizes, group, links),
        "all_gather": gather_s(sizes, group, links),
        # Each device of a node sends to one of the other.
        "send": send_s(sizes, np.where(group.nodes > 1, 1.0, 0.0), links, rings=group.within),
    }
    operations = np.array([row["operation"] for row in rows])
    return np.select([operations == each for each in said], list(said.values()))


PROBED_FLOP = {"cpu": 2.0 * 256**3, "cuda": 2.0 * 4096**3}
"""FLOPs of the matrix product that every run probes its devices with."""
LINK_SHARE = 0.25
"""Speed of messages ÷ of memory where no ring was probed: an assumption."""
_SOURCE = "probes of the measured runs"
Rows = list[dict[str, Any]]


def probed_figures(rows: Rows) -> MachineFigures:
    """From rows of the table `run`; raises `ConfigError` where none of them probed its device."""
    first = rows[0]
    products, memory = (_faster(rows, name) for name in ("matmul_flop_per_s", "memory_bytes_per_s"))
    if products is None or memory is None:
        raise ConfigError(
            "these runs probed no device (measure.probe), so the machine's speed is not known: "
            "add a table of `parallelbench calibrate` with --from FILE.parquet"
        )
    kind, otherwise = first["device_type"], LINK_SHARE * memory
    here, across = ([row for row in rows if (row["nodes"] > 1) is each] for each in (False, True))
    # The column is the time of a small all-reduce ÷ a ring's 2(n−1) turns.
    link = _probed_tier("link", here, otherwise, [float(row["probed_latency_s"]) for row in _timed(here)])
    turns = [_network_turn_s(row, link.latency_s.value, trees=kind == "cuda") for row in _timed(across)]
    used = max(row["devices"] // row["nodes"] for row in rows)
    return MachineFigures(
        accelerator=first["device_name"],
        device_type=kind,
        devices_per_node=max(used, *map(_devices_of_run, rows)),
        busy_devices=used,
        peak_flops_per_s={},
        matmul_flops_per_s=_probed_products(kind, products),
        memory_bytes_per_s=Known(memory, "measured", _SOURCE),
        memory_bytes=None,
        launch_s=Known(LAUNCH_S, "assumed", "no launches were measured"),
        link=link,
        network=_probed_tier("network", across, otherwise, turns) if across else None,
        notes=tuple(_probed_notes(kind)),
    )


def _devices_of_run(row: Mapping[str, Any]) -> int:
    """Devices of a node by the run's site; where the site is whatever machine there was, by its environment."""
    site = msgspec.json.decode(row["config_json"])["site"]
    if site["name"] != "default":
        return int((site.get("hardware") or site)["devices_per_node"])
    return _devices_of_node({**row, "environment": msgspec.json.decode(row["environment_json"])})


def _probed_notes(kind: str) -> Iterator[str]:
    yield "no calibration was given: the machine is known by the runs' own probes"
    if kind == "cuda":
        yield "the runs probed products in fp16 only: rates in other precisions are assumed shares of it"


def _probed_products(kind: str, probed: float) -> dict[Precision, RateCurve]:
    """The probed product's rate; of a GPU those in other precisions by their assumed ratios to it."""
    sizes = (PROBED_FLOP[kind],)
    if kind == "cpu":
        return {"fp32": RateCurve(sizes, (probed,), "measured", _SOURCE)}
    shares = {name: times / GPU_RATES["fp16"] for name, times in GPU_RATES.items()}
    return {
        name: RateCurve(sizes, (share * probed,), "assumed", f"{share:g} of the probed rate in fp16")
        for name, share in shares.items()
    } | {"fp16": RateCurve(sizes, (probed,), "measured", _SOURCE)}


def _timed(rows: Rows) -> Rows:
    """Those that probed a ring's latency."""
    return [row for row in rows if row["probed_latency_s"]]


def _network_turn_s(row: Mapping[str, Any], link_s: float, *, trees: bool) -> float:
    """One turn between nodes: what is left of a small all-reduce without the turns inside nodes.

    The longer of what a ring and a tree say, since the faster of them ran.
    """
    ranks, nodes = float(row["processes"]), float(row["nodes"])
    once_s = (ranks - 1.0) * float(row["probed_latency_s"])
    ring_s = (once_s - (ranks - nodes) * link_s) / (nodes - 1.0)
    tree_s = (once_s - (ranks / nodes - 1.0) * link_s) / math.log2(nodes)
    return max(ring_s, tree_s if trees else 0.0, 0.0)


def _probed_median(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    known = [row[name] for row in rows if row[name]]
    return median(known) if known else None


def _faster(rows: Rows, name: str) -> float | None:
    """Medians over the runs at their start and end, the faster of them: the other may have been disturbed."""
    known = [
        speed for moment in ("start", "end") if (speed := _probed_median(rows, f"probed_{moment}_{name}")) is not None
    ]
    return max(known, default=None)


def _probed_tier(name: TierName, rows: Rows, otherwise: float, turns: Sequence[float]) -> TierFigures:
    def known(value: float | None, assumed: float) -> Known:
        return Known(assumed, "assumed", "no ring was probed") if value is None else Known(value, "measured", _SOURCE)

    return TierFigures(
        name=name,
        latency_s=known(median(turns) if turns else None, LATENCY_S[name]),
        bytes_per_s=known(_probed_median(rows, "probed_bandwidth_bytes_per_s"), otherwise),
    )
