"""All that a cluster refuses, or lets wait: asked once, then held against each group of jobs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from launch.slurm import scheduler
from launch.slurm.limits import allowed
from launch.slurm.partitions import partitions, reservations
from launch.slurm.scheduler import SchedulerError
from launch.slurm.shape import slurm
from launch.slurm.site import refusals, warnings, whole_nodes
from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from launch.slurm.job_group import JobGroup
    from launch.slurm.limits import Allowed
    from launch.slurm.partitions import Partition, Reservation


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
