"""What a cluster is made of: its partitions with their kinds of nodes, and its reservations."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from launch.slurm import scheduler
from launch.slurm.hostlist import hosts

if TYPE_CHECKING:
    from collections.abc import Mapping

_RECURRING = {"HOURLY", "DAILY", "WEEKDAY", "WEEKEND", "WEEKLY"}
"""Flags of reservations that come again."""


@dataclass(frozen=True)
class Partition:
    """What a partition offers, as `sinfo` says."""

    name: str
    default: bool
    state: str
    """`up`; `down`: jobs wait until it is up; `drain` and `inact`: it takes none."""
    limit_min: int | None
    """Longest job, minutes; None: no limit."""
    nodes: int
    cpus_per_node: int
    memory_mib: int
    gres: str
    features: str
    names: frozenset[str] = frozenset()
    """Of its nodes; empty: not known."""
    out: int = 0
    """How many of its nodes are down, drained, or about to be."""


def partitions(*, patient: bool = False) -> list[Partition]:
    """All partitions; where their nodes differ, one entry for each kind."""
    text = scheduler.ask(["sinfo", "--noheader", "--format=%R|%P|%a|%l|%D|%c|%m|%G|%f|%F|%N"], patient=patient)
    return [_partition(line) for line in text.splitlines() if line.strip()]


def _partition(line: str) -> Partition:
    name, marked, state, limit, nodes, cpus, memory, gres, features, usage, names = line.strip().split("|")
    return Partition(
        name=name,
        default=marked.endswith("*"),
        state=state,
        limit_min=minutes(limit),
        nodes=int(nodes),
        cpus_per_node=int(cpus.rstrip("+")),
        memory_mib=int(memory.rstrip("+")),
        gres="" if gres == "(null)" else gres,
        features="" if features == "(null)" else features,
        names=hosts(names),
        out=int(usage.split("/")[2]),  # allocated/idle/other/total
    )


def minutes(text: str) -> int | None:
    """Whole minutes of Slurm's `days-hours:minutes:seconds`; None for `infinite`."""
    if text in ("infinite", "UNLIMITED", "n/a"):
        return None
    days, _, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if days:
        hours, minute, second = (*parts, 0, 0)[:3]
    else:
        hours, minute, second = (0, 0, *parts)[-3:] if len(parts) > 1 else (0, parts[0], 0)
    return (int(days or 0) * 24 + hours) * 60 + minute + (1 if second else 0)


@dataclass(frozen=True)
class Reservation:
    """Nodes that are kept for some jobs, as `scontrol` says."""

    name: str
    active: bool
    """Whether its time has begun and is not over."""
    began: str
    """When it begins, as Slurm writes times."""
    minutes: int | None
    """How long it lasts, and so its longest job; None: no limit."""
    left_min: int | None = None
    """While it is active: whole minutes until it ends, and so the longest job that starts now; None: no limit."""
    ends: str = ""
    """When it ends, as Slurm writes times."""
    recurs: bool = False
    """Whether it comes again, at its whole length."""


def reservations() -> list[Reservation]:
    """All that this user may see."""
    text = scheduler.ask(["scontrol", "--oneliner", "show", "reservation"])
    found = (dict(pair.partition("=")[::2] for pair in line.split()) for line in text.splitlines())
    return [_reservation(each) for each in found if "ReservationName" in each]


def _reservation(shown: Mapping[str, str]) -> Reservation:
    # Jobs may outlast a flexible one.
    flags, active = set(shown.get("Flags", "").split(",")), shown.get("State") == "ACTIVE"
    lasts = None if "FLEX" in flags else minutes(shown.get("Duration", "infinite"))
    ends = shown.get("EndTime", "")
    return Reservation(
        name=shown["ReservationName"],
        active=active,
        began=shown.get("StartTime", ""),
        minutes=lasts,
        left_min=_minutes_until(ends) if active and lasts is not None else None,
        ends=ends,
        recurs=bool(flags & _RECURRING),
    )


def _minutes_until(text: str) -> int | None:
    """Whole minutes from now to a time as Slurm writes it, in this machine's zone; None where it names none."""
    try:
        end_s = time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None
    return max(0, int((end_s - time.time()) // 60))
