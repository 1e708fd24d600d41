"""What the cluster offers: compared with what jobs ask for, and shown by `doctor`."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from launch.slurm import scheduler
from launch.slurm.hostlist import hosts
from launch.slurm.limits import allowed
from launch.slurm.partitions import partitions
from launch.slurm.scheduler import SchedulerError
from launch.slurm.shape import slurm
from parallelbench.errors import count_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from launch.slurm.job_group import JobGroup
    from launch.slurm.partitions import Partition


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
