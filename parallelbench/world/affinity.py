"""On which cores a run and its ranks stay: else all runs that nobody binds to cores would take the first ones."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack, contextmanager
from fractions import Fraction
from typing import TYPE_CHECKING

from parallelbench.world.machine import this_machine

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from collections.abc import Set as AbstractSet

    from parallelbench.config.run import RunConfig
    from parallelbench.world.machine import Machine


@contextmanager
def own_cores(device_type: str, *, needed: int | None = None) -> Iterator[None]:
    """Let this process, and those that it starts, run only on cores that no other run of this suite has taken, outside
    of containers that have networks of their own.

    For ranks on processors, which are pinned to single cores, the first ones first. `needed`: so many are taken, and
    what nobody has taken may be used, too; None: as many as Slurm gave the job, and no others. Where Slurm has bound
    the job to its cores, or where too few are free, everything stays as it is.
    """
    before = os.sched_getaffinity(0)
    wanted = int(os.environ.get("SLURM_CPUS_PER_TASK", "0")) if needed is None else needed
    with ExitStack() as held:
        if device_type == "cpu" and 0 < wanted < len(before):
            taken, others = _taken(wanted, held)
            if len(taken) == wanted:
                os.sched_setaffinity(0, taken if needed is None else before - others)
            else:
                held.close()
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)


def _taken(wanted: int, held: ExitStack) -> tuple[set[int], set[int]]:
    """Up to so many cores, on separate physical ones first, which are free again once `held` is closed; and others'."""
    taken, others = set[int](), set[int]()
    for core in this_machine().cores:
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            # A name that the kernel gives to one process of a network namespace at a time, and takes back when it
            # ends: to all jobs of a node, whose /tmp and /dev/shm clusters may give to each job for itself. Containers
            # with networks of their own see neither each other's names nor files.
            claim.bind(f"\0parallelbench-core-{core}")
        except OSError:
            claim.close()
            others.add(core)
            continue
        if len(taken) == wanted:
            claim.close()
            continue
        held.callback(claim.close)
        taken.add(core)
    return taken, others


def pin(run: RunConfig, device_type: str) -> list[int]:
    """Pin this rank to its own cores, before any library counts them; on a CPU a device is that many cores. A process
    that watches a program of the user's is kept off the program's cores, where there are others.

    A rank that drives GPUs gets the cores of their NUMA nodes, where NVML names them, and the job has its share there;
    and as many threads (OMP_NUM_THREADS) as it has cores, less what other ranks on these cores get of them.
    Returns the cores that no rank is pinned to; none where ranks drive GPUs.
    """
    local_rank, machine = int(os.environ.get("LOCAL_RANK", "0")), this_machine()
    processes = run.strategy.started(run, device_type)
    if device_type != "cpu":
        gpus, ranks = run.devices // processes, range(max(1, processes // run.nodes))
        places = [_beside(machine, range(rank * gpus, (rank + 1) * gpus)) for rank in ranks]
        os.sched_setaffinity(0, places[local_rank])
        os.environ["OMP_NUM_THREADS"] = str(_threads(local_rank, places, machine.quota_cores))
        return []
    per_rank = run.devices // processes * run.cores_per_device
    cores, first = machine.cores, local_rank * per_rank
    own = {cores[index % len(cores)] for index in range(first, first + per_rank)}
    spare = list(cores[run.devices // run.nodes * run.cores_per_device :])
    # A process that only watches a program takes none of its cores' time.
    os.sched_setaffinity(0, spare if run.strategy.starts_ranks and spare else own)
    return spare


def _beside(machine: Machine, gpus: range) -> set[int]:
    """The cores of the NUMA nodes of these GPUs, or all cores."""
    near = machine.near(gpus)
    return near if near and len(near) >= len(machine.cores) * len(gpus) // len(machine.gpus) else set(machine.cores)


def _threads(rank: int, places: Sequence[AbstractSet[int]], quota: float | None) -> int:
    """A rank's share of its cores: of each as much as of all ranks that are there; `places`: the cores of each rank."""
    cores = sum(Fraction(1, sum(core in place for place in places)) for core in places[rank])
    return max(1, int(cores if quota is None else min(cores, Fraction(quota) / len(places))))
