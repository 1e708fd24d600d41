"""What the cluster offers: compared with what jobs ask for, and shown by `doctor`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from launch.slurm import scheduler
from launch.slurm.limits import allowed
from launch.slurm.scheduler import Partition, SchedulerError
from launch.slurm.shape import slurm

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from launch.slurm.submit import JobGroup


def refusals(batch: JobGroup, partitions: Sequence[Partition]) -> list[str]:
    """Why the cluster would not run the jobs of a batch; [] where some kind of its nodes can."""
    kinds = _wanted(batch, partitions)
    if not kinds:
        names = ", ".join(sorted({kind.name for kind in partitions}))
        return [f"site.partition={batch.runs[0].planned.run.site.partition} is not one of this cluster: {names}"]
    found = [list(_refusals(batch, kind)) for kind in kinds]
    return min(found, key=len)


def warnings(batch: JobGroup, partitions: Sequence[Partition]) -> list[str]:
    """What will keep the jobs of a batch waiting, although the cluster takes them."""
    down = sorted({kind.name for kind in _wanted(batch, partitions) if kind.state == "down"})
    return [f"the partition {name} is down: jobs wait until it is up" for name in down]


def _wanted(batch: JobGroup, partitions: Sequence[Partition]) -> list[Partition]:
    wanted = batch.runs[0].planned.run.site.partition
    return [kind for kind in partitions if (kind.name == wanted if wanted else kind.default)]


def _refusals(batch: JobGroup, kind: Partition) -> Iterator[str]:
    shape, limit = batch.shape, slurm(batch.runs[0].planned.run).time_limit_min
    if kind.state not in ("up", "down"):
        yield f"the partition {kind.name} takes no jobs now (sinfo says {kind.state})"
    if kind.limit_min is not None and limit > kind.limit_min:
        yield f"launcher.time_limit_min={limit}, but {kind.name} allows {kind.limit_min}"
    if shape.nodes > kind.nodes:
        yield f"{shape.nodes} nodes, but {kind.name} has {kind.nodes} of a kind"
    if shape.cpus_per_node > kind.cpus_per_node:
        yield f"{shape.cpus_per_node} cores of a node, but those of {kind.name} have {kind.cpus_per_node}"
    if shape.memory_mib_per_node > kind.memory_mib:
        yield (
            f"{shape.memory_mib_per_node / 1024:g} GiB of a node, but those of {kind.name} have "
            f"{kind.memory_mib / 1024:.1f}: lower launcher.memory_gib_per_device"
        )
    gpus = gpus_in(kind.gres, batch.runs[0].planned.run.site.gpu_type)
    if shape.gpus_per_node > gpus:
        yield f"{shape.gpus_per_node} GPUs of a node, but those of {kind.name} have {gpus} ({kind.gres or 'none'})"


def gpus_in(gres: str, kind: str | None) -> int:
    """GPUs in a `Gres` such as `gpu:a100:4(S:0-1),gpu:v100:2`, of one type or all."""
    found = re.findall(r"gpu(?::([A-Za-z0-9_.-]*[A-Za-z][A-Za-z0-9_.-]*))?:(\d+)", gres)
    return sum(int(count) for type_, count in found if kind is None or type_ == kind)


def findings() -> Iterator[tuple[str, str]]:
    """(what, finding) pairs about the cluster, for `doctor`."""
    try:
        kinds = scheduler.partitions()
        settings = scheduler.configuration()
    except SchedulerError as error:
        yield "Slurm", f"sbatch is here, but gives no answer: {error}"
        return
    yield "Slurm", f"{settings.get('SLURM_VERSION', 'of unknown version')}, cluster {settings.get('ClusterName', '?')}"
    for kind in kinds:
        limit = f"{kind.limit_min} min" if kind.limit_min is not None else "no time limit"
        mark = " (default)" if kind.default else ""
        yield (
            f"partition {kind.name}{mark}",
            f"{kind.nodes} node(s) with {kind.cpus_per_node} cores, {kind.memory_mib / 1024:.0f} GiB, "
            f"{kind.gres or 'no GPUs'}, {limit}{'' if kind.state == 'up' else f', {kind.state.upper()}'}"
            + (f", features {kind.features}" if kind.features else ""),
        )
    kept = (
        "how jobs ended is known" if scheduler.accounting() else "a job that leaves no outcome is judged by its folder"
    )
    yield "accounting", kept
    try:
        yield from found.findings() if (found := allowed()) else ()
    except SchedulerError as error:
        yield "accounts", f"the limits of yours could not be checked: {error}"
    yield "arrays", f"up to {settings.get('MaxArraySize', '?')} tasks; longer sweeps go in several"
