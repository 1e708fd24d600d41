"""Cores of a job's own, where Slurm binds jobs to none: else each job would pin its ranks to the node's first cores."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from parallelbench.world.devices import this_machine

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def own_cores(device_type: str) -> Iterator[None]:
    """Let this process, and those that it starts, run only on cores that no other job of this suite has taken.

    For ranks on processors, which are pinned to single cores. Where Slurm has bound the job to its cores, or where too
    few are free, everything stays as it is.
    """
    before = os.sched_getaffinity(0)
    needed = int(os.environ.get("SLURM_CPUS_PER_TASK", "0"))
    with ExitStack() as held:
        if device_type == "cpu" and 0 < needed < len(before):
            taken = _taken(needed, held)
            if len(taken) == needed:
                os.sched_setaffinity(0, taken)
            else:
                held.close()
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)


def _taken(needed: int, held: ExitStack) -> set[int]:
    """Up to so many cores, on separate physical ones first; they are free again once `held` is closed."""
    taken: set[int] = set()
    for core in this_machine().cores:
        if len(taken) == needed:
            break
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            # A name that the kernel gives to one process of the machine at a time, and takes back when it ends; a
            # file in /tmp would not do, which clusters may give to each job for itself.
            claim.bind(f"\0parallelbench-core-{core}")
        except OSError:
            claim.close()
            continue
        held.callback(claim.close)
        taken.add(core)
    return taken
