"""Figures of a machine from what every run probes: one product, one copy, a ring's latency and bandwidth."""

from __future__ import annotations

import math
from statistics import median
from typing import TYPE_CHECKING, Any

from analysis.advisor.assumptions import GPU_RATES
from analysis.advisor.machine_figures import LATENCY_S, LAUNCH_S, Known, MachineFigures, RateCurve, TierFigures
from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from analysis.advisor.machine_figures import Precision, TierName

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
    kind, across = first["device_type"], [row for row in rows if row["nodes"] > 1]
    link = _tier("link", [row for row in rows if row["nodes"] == 1], LINK_SHARE * memory, _turn_s)

    def between_s(row: Mapping[str, Any]) -> float:
        return _network_turn_s(row, link.latency_s.value, trees=kind == "cuda")

    return MachineFigures(
        accelerator=first["device_name"],
        device_type=kind,
        devices_per_node=max(row["devices"] // row["nodes"] for row in rows),
        peak_flops_per_s={},
        matmul_flops_per_s=_products(kind, products),
        memory_bytes_per_s=Known(memory, "measured", _SOURCE),
        memory_bytes=None,
        launch_s=Known(LAUNCH_S, "assumed", "no launches were measured"),
        link=link,
        network=_tier("network", across, LINK_SHARE * memory, between_s) if across else None,
        notes=tuple(_notes(kind)),
    )


def _notes(kind: str) -> Iterator[str]:
    yield "no calibration was given: the machine is known by the runs' own probes"
    if kind == "cuda":
        yield "the runs probed products in fp16 only: rates in other precisions are assumed shares of it"


def _products(kind: str, probed: float) -> dict[Precision, RateCurve]:
    """The probed product's rate; of a GPU those in other precisions by their assumed ratios to it."""
    sizes = (PROBED_FLOP[kind],)
    if kind == "cpu":
        return {"fp32": RateCurve(sizes, (probed,), "measured", _SOURCE)}
    found: dict[Precision, RateCurve] = {"fp16": RateCurve(sizes, (probed,), "measured", _SOURCE)}
    for name, times in GPU_RATES.items():
        if name != "fp16":
            share = times / GPU_RATES["fp16"]
            found[name] = RateCurve(sizes, (share * probed,), "assumed", f"{share:g} of the probed rate in fp16")
    return found


def _turn_s(row: Mapping[str, Any]) -> float:
    """One turn inside a node: the column is the time of a small all-reduce ÷ a ring's 2(n−1) turns."""
    return float(row["probed_latency_s"])


def _network_turn_s(row: Mapping[str, Any], link_s: float, *, trees: bool) -> float:
    """One turn between nodes: what is left of a small all-reduce without the turns inside nodes.

    The longer of what a ring and a tree say, since the faster of them ran.
    """
    ranks, nodes = float(row["processes"]), float(row["nodes"])
    once_s = (ranks - 1.0) * float(row["probed_latency_s"])
    ring_s = (once_s - (ranks - nodes) * link_s) / (nodes - 1.0)
    tree_s = (once_s - (ranks / nodes - 1.0) * link_s) / math.log2(nodes)
    return max(ring_s, tree_s if trees else 0.0, 0.0)


def _median(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    known = [row[name] for row in rows if row[name]]
    return median(known) if known else None


def _faster(rows: Rows, name: str) -> float | None:
    """Medians over the runs at their start and end, the faster of them: the other may have been disturbed."""
    known = [speed for moment in ("start", "end") if (speed := _median(rows, f"probed_{moment}_{name}")) is not None]
    return max(known, default=None)


def _tier(name: TierName, rows: Rows, otherwise: float, turn_s: Callable[[Mapping[str, Any]], float]) -> TierFigures:
    turns = [turn_s(row) for row in rows if row["probed_latency_s"]]
    return TierFigures(
        name=name,
        latency_s=_known(median(turns) if turns else None, LATENCY_S[name]),
        bytes_per_s=_known(_median(rows, "probed_bandwidth_bytes_per_s"), otherwise),
    )


def _known(value: float | None, otherwise: float) -> Known:
    return Known(otherwise, "assumed", "no ring was probed") if value is None else Known(value, "measured", _SOURCE)
