"""What a cluster offers, and what it refuses or lets wait: asked once, then held against each group of jobs."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from launch.slurm import scheduler
from launch.slurm.limits import allowed
from launch.slurm.scheduler import SchedulerError, hosts, minutes
from launch.slurm.shape import slurm
from parallelbench.errors import ConfigError, count_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from launch.slurm.arrays import JobGroup
    from launch.slurm.limits import Allowed


@dataclass(frozen=True)
class ClusterLimits:
    """What a cluster offers and allows; None where unknown."""

    kinds: list[Partition] | None = None
    longest: int | None = None
    """Most tasks of an array."""
    allowed: Allowed | None = None
    reserved: list[Reservation] | None = None
    in_all: bool = False
    """Whether Slurm refuses a job that one of its partitions can't run, although another can."""
    unknown: str = ""
    """What is unknown, and why; empty: everything is known."""

    def refusals(self, group: JobGroup) -> list[str]:
        """Why the jobs of a group would be refused, or would wait for ever."""
        each = in_each_partition(group)
        closed = [text for one in each for text in self._closed(one)]
        found = [self._in_one(one) for one in each]
        if not closed and not all(found) and not (self.in_all and any(found)):
            found = []
        return list(dict.fromkeys([*closed, *self._unreserved(group), *(text for texts in found for text in texts)]))

    def notes(self, group: JobGroup) -> Iterator[str]:
        """Why the jobs of a group will wait, or run in some of its partitions only."""
        each = in_each_partition(group)
        found = {one.runs[0].planned.run.site.partition: self._in_one(one) for one in each}
        if not self.in_all and not all(found.values()):
            for name, texts in found.items():
                if texts:
                    yield f"the jobs never run in {name}: {'; '.join(texts)}"
        waiting = [text for one in each for text in warnings(one, self.kinds or ())]
        yield from waiting if len(waiting) == len(each) else (f"{text}, or run elsewhere" for text in waiting)
        for reservation in self._of(group):
            if not reservation.active:
                yield f"the reservation {reservation.name} is not active: jobs wait for it (begins {reservation.began})"
            elif reservation.recurs and (text := _outlasts(group, reservation)):
                yield f"{text}, and Slurm ends what runs then"

    def notes_on_all(self, groups: Sequence[JobGroup]) -> Iterator[str]:
        """Why jobs can't be queued yet, or wait in the queue; of several partitions the first one's limits count."""
        if self.allowed is not None:
            yield from self.allowed.warnings([in_each_partition(group)[0] for group in groups])

    def _in_one(self, group: JobGroup) -> list[str]:
        """Why one partition does not run the jobs."""
        found = [] if self.kinds is None else refusals(group, self.kinds)
        charged = whole_nodes(group, self.kinds or ())
        return [*found, *(self.allowed.refusals(charged) if self.allowed else ())]

    def _closed(self, group: JobGroup) -> Iterator[str]:
        """Why sbatch takes no job that names the partition, whatever others it names."""
        name = group.runs[0].planned.run.site.partition
        if self.kinds is not None and name and all(kind.name != name for kind in self.kinds):
            yield from refusals(group, self.kinds)
        elif self.allowed is not None:
            yield from self.allowed.closed(group)

    def _of(self, group: JobGroup) -> list[Reservation]:
        """The reservation that the jobs name, if there is one of this name."""
        name = group.runs[0].planned.run.site.reservation
        return [each for each in self.reserved or () if each.name == name]

    def _unreserved(self, group: JobGroup) -> Iterator[str]:
        """Why the jobs don't run within the reservation that they name."""
        run, found = group.runs[0].planned.run, self._of(group)
        if run.site.reservation and self.reserved is not None and not found:
            names = ", ".join(each.name for each in self.reserved) or "there is none"
            yield f"site.reservation={run.site.reservation} is no reservation of this cluster: {names}"
        limit = slurm(run).time_limit_min
        for each in found:
            if each.minutes is not None and limit > each.minutes:
                yield f"launcher.time_limit_min={limit}, but the reservation {each.name} lasts {each.minutes}"
            elif not each.recurs and (text := _outlasts(group, each)):
                lower = f"lower it to {each.left_min} or less" if each.left_min else "name another, or none"
                yield f"{text}, and Slurm ends what runs then: {lower}"


def _outlasts(group: JobGroup, reservation: Reservation) -> str:
    """How much is left of a reservation that a job which starts now would outlast; empty: it would not."""
    limit, left = slurm(group.runs[0].planned.run).time_limit_min, reservation.left_min
    if left is None or limit <= left:
        return ""
    return (
        f"launcher.time_limit_min={limit}, but {left} min are left of the reservation {reservation.name} (ends "
        f"{reservation.ends})"
    )


def in_each_partition(group: JobGroup) -> list[JobGroup]:
    """The group as if its site named one of its partitions only."""
    first, *rest = group.runs
    site = first.planned.run.site
    names = (site.partition or "").split(",")
    if len(names) == 1:
        return [group]
    runs = [msgspec.structs.replace(first.planned.run, site=msgspec.structs.replace(site, partition=n)) for n in names]
    firsts = [replace(first, planned=replace(first.planned, run=run)) for run in runs]
    return [replace(group, runs=[one, *rest]) for one in firsts]


def cluster_limits(groups: Sequence[JobGroup], *, patient: bool = False) -> ClusterLimits:
    """Ask the cluster; raises `SchedulerError` where the controller gives no answer."""
    if not (kinds := partitions(patient=patient)):
        return ClusterLimits(unknown="sinfo lists no partition, so the cluster's limits were not checked")
    settings = scheduler.configuration(patient=patient)
    named = any(group.runs[0].planned.run.site.reservation for group in groups)
    cluster = ClusterLimits(
        kinds,
        scheduler.max_array_size(patient=patient),
        reserved=reservations() if named else None,
        in_all=settings.get("EnforcePartLimits") == "ALL",
    )
    try:
        default = next((kind.name for kind in kinds if kind.default), "")
        return replace(cluster, allowed=allowed(default))
    except SchedulerError as error:
        return replace(cluster, unknown=f"the limits of your account could not be checked: {error}")


def known_limits(groups: Sequence[JobGroup]) -> ClusterLimits:
    """What is known of the cluster; where nothing is, `unknown` says why."""
    if not scheduler.available():
        text = "there is no Slurm here, so its limits were not checked: plan again on the login node"
        return ClusterLimits(unknown=text)
    try:
        return cluster_limits(groups)
    except SchedulerError as error:
        return ClusterLimits(unknown=f"the cluster's limits could not be checked: {error}")


def require_accepted(groups: Sequence[JobGroup]) -> None:
    """Raise `ConfigError` for jobs that the cluster would refuse, and `SchedulerError` where it gives no answer."""
    if not groups:
        return
    cluster = cluster_limits(groups, patient=True)
    if texts := list(dict.fromkeys(text for group in groups for text in cluster.refusals(group))):
        raise ConfigError(f"refused by the cluster, nothing was submitted: {'; '.join(texts)}")


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


def refusals(batch: JobGroup, offered: Sequence[Partition]) -> list[str]:
    """Why the cluster would not run the jobs of a batch, whose site names one partition at most; [] if it can.

    It can if there are enough nodes of the kinds that suit, or, where the site names nodes, if all of these do.
    """
    site = batch.runs[0].planned.run.site
    kinds = _wanted(batch, offered)
    if not kinds:
        names = ", ".join(sorted({kind.name for kind in offered}))
        return [f"site.partition={site.partition} is no partition of this cluster: {names}"]
    named = hosts(site.nodelist)
    if foreign := named - frozenset().union(*(kind.names for kind in kinds)):
        verb = "does" if len(foreign) == 1 else "do"
        return [f"site.nodelist={site.nodelist}: {', '.join(sorted(foreign))} {verb} not belong to {kinds[0].name}"]
    if len(named) > batch.shape.nodes:
        return [
            f"site.nodelist={site.nodelist} are {len(named)} nodes, all of which every job gets, but these jobs have "
            f"{batch.shape.nodes}: name as many as a job has; site.exclude leaves a choice"
        ]
    of_named = [kind for kind in kinds if kind.names & named]
    if named and (worst := max((list(_of_each_node(batch, kind)) for kind in of_named), key=len)):
        return worst
    suiting = of_named or _suiting(batch, kinds)
    if not suiting:
        return min((list(_of_each_node(batch, kind)) for kind in kinds), key=len)
    return list(_too_few(batch, suiting))


def warnings(batch: JobGroup, offered: Sequence[Partition]) -> list[str]:
    """Why the jobs of a batch will wait, although the cluster takes them."""
    kinds = _wanted(batch, offered)
    if down := sorted({kind.name for kind in kinds if kind.state == "down"}):
        return [f"the partition {name} is down: jobs wait until it is up" for name in down]
    suiting = _suiting(batch, kinds)
    out, nodes = (sum(getattr(kind, key) for kind in suiting) for key in ("out", "nodes"))
    if not nodes - out < batch.shape.nodes <= nodes:
        return []
    are = "is" if out == 1 else "are"
    return [
        f"{out} of {count_of(nodes, 'node')} of {suiting[0].name} {are} down or drained: jobs wait until enough are up"
    ]


def _wanted(batch: JobGroup, offered: Sequence[Partition]) -> list[Partition]:
    name = batch.runs[0].planned.run.site.partition
    return [kind for kind in offered if (kind.name == name if name else kind.default)]


def _suiting(batch: JobGroup, kinds: Sequence[Partition]) -> list[Partition]:
    """The kinds of nodes that a job can use; it may have nodes of several."""
    return [kind for kind in kinds if not list(_of_each_node(batch, kind))]


def _too_few(batch: JobGroup, kinds: Sequence[Partition]) -> Iterator[str]:
    """Whether these kinds, all of one partition, have fewer nodes than a job needs."""
    wanted, exclude = batch.shape.nodes, batch.runs[0].planned.run.site.exclude
    nodes = sum(kind.nodes for kind in kinds)
    left = nodes - len(frozenset().union(*(kind.names for kind in kinds)) & hosts(exclude))
    if wanted > nodes:
        yield f"{count_of(wanted, 'node')}, but {kinds[0].name} has {nodes} that suit"
    elif wanted > left:
        yield f"{count_of(wanted, 'node')}, but site.exclude={exclude} leaves {left} of {kinds[0].name}"


def _of_each_node(batch: JobGroup, kind: Partition) -> Iterator[str]:
    """What a job needs of each of its nodes, and those of this kind don't have."""
    shape, run = batch.shape, batch.runs[0].planned.run
    limit = slurm(run).time_limit_min
    if kind.state not in ("up", "down"):
        yield f"the partition {kind.name} takes no jobs now (sinfo says {kind.state})"
    if kind.limit_min is not None and limit > kind.limit_min:
        yield f"launcher.time_limit_min={limit}, but {kind.name} allows {kind.limit_min}"
    if shape.cpus_per_node > kind.cpus_per_node:
        yield f"{count_of(shape.cpus_per_node, 'core')} of a node, but those of {kind.name} have {kind.cpus_per_node}"
    if shape.memory_mib_per_node > kind.memory_mib:
        yield (
            f"{shape.memory_mib_per_node / 1024:g} GiB of a node, but those of {kind.name} have "
            f"{kind.memory_mib / 1024:.1f}: lower launcher.memory_gib_per_device"
        )
    gpus = gpus_in(kind.gres, run.site.gpu_type)
    if shape.gpus_per_node > gpus:
        needed = count_of(shape.gpus_per_node, "GPU")
        yield f"{needed} of a node, but those of {kind.name} have {gpus} ({kind.gres or 'none'})"


def whole_nodes(batch: JobGroup, offered: Sequence[Partition]) -> JobGroup:
    """The batch as its account is charged for it: exclusive jobs for all cores and GPUs of their nodes."""
    site = batch.runs[0].planned.run.site
    kinds = _suiting(batch, _wanted(batch, offered))
    if not (site.exclusive and kinds):
        return batch
    least = min(kinds, key=lambda kind: kind.cpus_per_node)
    gpus = gpus_in(least.gres, site.gpu_type) if batch.shape.gpus_per_node else 0
    return replace(batch, shape=replace(batch.shape, cpus_per_node=least.cpus_per_node, gpus_per_node=gpus))


def gpus_in(gres: str, kind: str | None) -> int:
    """GPUs in a `Gres` such as `gpu:a100:4(S:0-1),gpu:v100:2`, of one type or all."""
    entries = re.findall(r"gpu(?::([A-Za-z0-9_.-]*[A-Za-z][A-Za-z0-9_.-]*))?:(\d+)", gres)
    return sum(int(count) for type_, count in entries if kind is None or type_ == kind)


def findings() -> Iterator[tuple[str, str]]:
    """(what, finding) pairs about the cluster, for `doctor`."""
    try:
        kinds = partitions()
        settings = scheduler.configuration()
    except SchedulerError as error:
        yield "Slurm", f"sbatch is here, but gives no answer: {error}"
        return
    yield "Slurm", f"{settings.get('SLURM_VERSION', 'of unknown version')}, cluster {settings.get('ClusterName', '?')}"
    for kind in kinds:
        limit = f"{kind.limit_min} min" if kind.limit_min is not None else "no time limit"
        mark = " (default)" if kind.default else ""
        out = f" ({kind.out} down or drained)" if kind.out else ""
        yield (
            f"partition {kind.name}{mark}",
            f"{count_of(kind.nodes, 'node')}{out} with {count_of(kind.cpus_per_node, 'core')}, "
            f"{kind.memory_mib / 1024:.0f} GiB, "
            f"{kind.gres or 'no GPUs'}, {limit}{'' if kind.state == 'up' else f', {kind.state.upper()}'}"
            + (f", features {kind.features}" if kind.features else ""),
        )
    kept = (
        "how jobs ended is known" if scheduler.accounting() else "a job that leaves no outcome is judged by its folder"
    )
    yield "accounting", kept
    try:
        yield from limits.findings() if (limits := allowed()) else ()
    except SchedulerError as error:
        yield "accounts", f"your limits could not be checked: {error}"
    yield "arrays", f"up to {settings.get('MaxArraySize', '?')} tasks; longer sweeps take several arrays"
