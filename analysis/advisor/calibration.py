"""A calibration's table as figures of the machine: rates by size, latency and bandwidth of each tier of links."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from analysis.advisor.links import Group, Links, all_reduce_s, gather_s, send_s
from analysis.advisor.machine_figures import Known, MachineFigures, RateCurve, Sharding, TierFigures
from parallelbench.errors import ConfigError, count_of
from parallelbench.results.calibration import read_calibration

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from analysis.advisor.layouts import Values
    from analysis.advisor.machine_figures import Precision, TierName

Row = dict[str, Any]
OUT_OF_CACHE = 0.5
"""Copies at least this large, as a share of the largest one, tell the memory's bandwidth."""
GROWS = 1.5
"""Least time of the largest message ÷ of the smallest, of the operation where it is most."""
_OPERATIONS = ("all_reduce", "all_gather", "send")
"""Those that the formulas of `analysis.advisor.links` know."""


def read_figures(path: Path) -> MachineFigures:
    """The figures of a machine that was calibrated; raises `ConfigError` for a file that holds no calibration."""
    rows, facts = read_calibration(path)
    return figures_of_calibration(rows, facts, source=f"calibration {path.name}")


def figures_of_calibration(rows: Sequence[Row], facts: Mapping[str, Any], *, source: str) -> MachineFigures:
    """Figures from a calibration's rows: those of busy nodes, where several devices of a node were measured."""
    most = max(row["busy"] for row in rows if row["tier"] is None)
    busy = [row for row in rows if row["tier"] is None and row["busy"] == most]

    def known(value: float) -> Known:
        return Known(value, "measured", source)

    copies = [row for row in busy if row["operation"] == "copy"]
    largest = max(row["size_bytes"] for row in copies)
    moved = [2 * row["size_bytes"] / row["time_s"] for row in copies if row["size_bytes"] >= OUT_OF_CACHE * largest]
    launches = [row["time_s"] for row in busy if row["operation"] == "launch"]
    link = _tier("link", rows, facts, link=None, source=source)
    one_each = facts["version"] < 2 and facts["devices_per_node"] > 1
    network = None if one_each else _tier("network", rows, facts, link=link, source=source)
    return MachineFigures(
        accelerator=facts["device_name"],
        device_type=facts["device_type"],
        devices_per_node=facts["devices_per_node"],
        peak_flops_per_s={},
        matmul_flops_per_s=_products(busy, source),
        memory_bytes_per_s=known(min(moved)),
        memory_bytes=known(float(facts["memory_bytes"])),
        launch_s=known(min(launches)),
        link=link or _unmeasured_link(busy, source),
        network=network,
        sharding=_sharding(rows, source),
        notes=tuple(_notes(facts, rows)),
    )


def _notes(facts: Mapping[str, Any], rows: Sequence[Row]) -> Iterator[str]:
    if facts["devices_per_node"] == 1:
        yield "one device was calibrated: links are assumed"
    if facts["version"] < 2 and facts["devices_per_node"] > 1 and facts["nodes"] > 1:
        yield "the network was measured by one device of each node, which tells nothing of whole nodes: calibrate again"
    if facts["devices_per_node"] > 1 and not any(row["operation"] == "shard" for row in rows):
        yield "what sharding a layer costs was not measured: fsdp may take longer than is said; calibrate again"
    if others := facts["others_running"]:
        yield (
            f"{count_of(others, 'other process', 'other processes')} kept the machine busy when the calibration began: "
            "latencies above all are too long; calibrate again when the machine is free"
        )


def _products(busy: Sequence[Row], source: str) -> dict[Precision, RateCurve]:
    """Rates of matrix products by their FLOPs, per precision."""
    found: dict[Precision, RateCurve] = {}
    for precision in dict.fromkeys(row["precision"] for row in busy if row["operation"] == "matmul"):
        points = sorted(
            (row["flop"], row["flop"] / row["time_s"])
            for row in busy
            if row["operation"] == "matmul" and row["precision"] == precision
        )
        sizes, rates = zip(*points, strict=True)
        found[cast("Precision", precision)] = RateCurve(sizes, rates, "measured", source)
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
    messages = _Messages.of(measured, facts, link)
    times = np.array([row["time_s"] for row in measured])
    fastest = max(row["size_bytes"] / row["time_s"] for row in measured)
    found: Any = least_squares(
        lambda logs: np.log(messages.times_s(*np.exp(logs)) / times),
        np.log([times.min(), fastest]),
        bounds=(np.log([1e-9, 1e3]), np.log([10.0, 1e14])),
    )
    latency_s, bytes_per_s = (float(value) for value in np.exp(found.x))
    return TierFigures(
        name=name,
        latency_s=Known(latency_s, "measured", source),
        bytes_per_s=Known(bytes_per_s, "measured", source),
    )


def _growth(rows: Sequence[Row], operation: str) -> float:
    """Time of an operation's largest message ÷ of its smallest."""
    by_size = sorted((row["size_bytes"], row["time_s"]) for row in rows if row["operation"] == operation)
    return float(by_size[-1][1] / by_size[0][1])


@dataclass(frozen=True)
class _Messages:
    """Measured messages of one tier, as the formulas of `analysis.advisor.links` take them."""

    operations: NDArray[np.str_]
    sizes_bytes: Values
    group: Group
    at_once: Values
    """Messages that leave a node at once where one device sends to one other."""
    link: TierFigures | None
    """Of the node, where the messages are between nodes; None: they are inside, or nodes have one device."""
    trees: bool

    @classmethod
    def of(cls, rows: Sequence[Row], facts: Mapping[str, Any], link: TierFigures | None) -> _Messages:
        ranks, nodes = (np.array([float(row[name]) for row in rows]) for name in ("ranks", "nodes"))
        return cls(
            operations=np.array([row["operation"] for row in rows]),
            sizes_bytes=np.array([float(row["size_bytes"]) for row in rows]),
            group=Group(size=ranks, within=ranks / nodes, rings=np.ones(len(rows))),
            at_once=ranks / nodes,
            link=link,
            trees=facts["device_type"] == "cuda",
        )

    def times_s(self, latency_s: float, bytes_per_s: float) -> Values:
        """What the formulas say of a tier's α and β."""
        own = np.array(latency_s), np.array(bytes_per_s)
        near = (
            own if self.link is None else (np.array(self.link.latency_s.value), np.array(self.link.bytes_per_s.value))
        )
        links = Links(
            link_latency_s=near[0],
            link_bytes_per_s=near[1],
            network_latency_s=own[0],
            network_bytes_per_s=own[1],
            trees=self.trees,
        )
        crosses = np.where(self.group.nodes > 1, 1.0, 0.0)
        sent = send_s(self.sizes_bytes, crosses, links, rings=self.at_once)
        gathered, reduced = (cost(self.sizes_bytes, self.group, links) for cost in (gather_s, all_reduce_s))
        result: Values = np.select([self.operations == each for each in _OPERATIONS], [reduced, gathered, sent])
        return result


def _unmeasured_link(busy: Sequence[Row], source: str) -> TierFigures:
    """Links of a node with one device: nothing uses them."""
    copies = max(row["size_bytes"] / row["time_s"] for row in busy if row["operation"] == "copy")
    why = f"{source} had one device: messages are assumed to be as fast as copies"
    return TierFigures(name="link", latency_s=Known(1e-5, "assumed", why), bytes_per_s=Known(copies, "assumed", why))
