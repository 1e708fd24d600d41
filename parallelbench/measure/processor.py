"""Processor time: what kept a rank off its processor, and what its loader's workers took."""

from __future__ import annotations

import functools
import gzip
import os
import resource
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from parallelbench.world.machine import run_delay_s, text_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    import psutil

    from parallelbench.loaders.order import BatchLoader


_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_UNSURE_S = 0.1
"""How much the kernel's account of a core may miss of a window."""


class Core(NamedTuple):
    """What a core has done since the system started, s (proc_stat(5))."""

    idle_s: float
    """Idle, waiting for input and output included."""
    stolen_s: float
    """Time that the hypervisor gave to other machines."""
    interrupts_s: float
    """In interrupts, those of the rank's own messages included."""
    total_s: float


class Account(NamedTuple):
    """What a rank and its cores have done until a moment."""

    time_s: float
    own_s: float
    """Processor time of this process, all threads."""
    cores: Mapping[int, Core]
    delay_s: float | None
    """How long the calling thread was ready to run, and did not."""


class ProcessorShare:
    """Processor time that others took from a rank between `start` and `stop`, s; null where it can't be known.

    `own_cores`: the cores that this rank is pinned to, and nobody else of the run; none where ranks are not pinned.
    On these cores, what is neither idle nor the rank's own was taken by others. A rank that waits by design (a
    pipeline's stage, a parameter server) leaves its cores idle, so its waiting is not counted. The delay of a thread
    (schedstat) would count how the rank's own threads wait for each other, and it does not see the hypervisor.
    Interrupts are nobody's where the kernel keeps them apart from processes: many are the rank's own messages.
    """

    def __init__(
        self, own_cores: Collection[int], *, proc: Path = Path("/proc"), interrupts_apart: bool | None = None
    ) -> None:
        """`interrupts_apart`: processes' times leave out the interrupts that came meanwhile; None: ask the kernel."""
        self._own, self._proc = frozenset(own_cores), proc
        self._apart = interrupts_are_apart() if interrupts_apart is None else interrupts_apart

    def start(self) -> None:
        """Begin to count."""
        self._before = self._read()

    def stop(self, *, children_s: float = 0.0) -> dict[str, float | None]:
        """Columns of `ranks`. `children_s`: processor time of the rank's own child processes since `start`."""
        before, after = self._before, self._read()
        length_s = after.time_s - before.time_s
        spent = {core: _since(before.cores[core], after.cores[core]) for core in before.cores.keys() & after.cores}
        columns: dict[str, float | None] = dict.fromkeys(("others_time_s", "stolen_time_s", "run_delay_s"))
        if before.delay_s is not None and after.delay_s is not None:
            columns["run_delay_s"] = after.delay_s - before.delay_s
        if self._own and spent.keys() == self._own and all(_credible(core, length_s) for core in spent.values()):
            busy_s = sum(length_s - core.idle_s - core.interrupts_s * self._apart for core in spent.values())
            columns["others_time_s"] = busy_s - (after.own_s - before.own_s) - children_s
            columns["stolen_time_s"] = sum(core.stolen_s for core in spent.values())
        return columns

    def _read(self) -> Account:
        cores = read_cores(self._proc / "stat", self._own) if self._own else {}
        return Account(
            time.perf_counter(), time.process_time(), cores, run_delay_s(self._proc / "thread-self/schedstat")
        )


def _since(before: Core, after: Core) -> Core:
    return Core(*(now - then for then, now in zip(before, after, strict=True)))


def _credible(core: Core, length_s: float) -> bool:
    """Whether the kernel accounts for the whole window: some sandboxes show zeros, or another machine's cores."""
    return abs(core.total_s - length_s) <= _UNSURE_S + 0.2 * length_s


@functools.cache
def interrupts_are_apart(folders: tuple[str, str] = ("/proc", "/boot")) -> bool:
    """Whether the kernel leaves interrupts out of the time of the process that they interrupt, as many are built to.

    Also where it can't be known: others are rather missed than accused of a rank's own messages.
    """
    built_in, beside = (Path(folder) for folder in folders)
    for file, opened in ((built_in / "config.gz", gzip.open), (beside / f"config-{os.uname().release}", open)):
        try:
            with opened(file, "rt") as lines:
                return any(line.startswith("CONFIG_IRQ_TIME_ACCOUNTING=y") for line in lines)
        except OSError:
            continue
    return True


def read_cores(stat: Path, cores: Collection[int]) -> dict[int, Core]:
    """The kernel's account of these cores; without those it does not list."""
    found = {}
    for line in (text_of(stat) or "").splitlines():
        name, *ticks = line.split()
        number = name.removeprefix("cpu")
        if name.startswith("cpu") and number.isdigit() and int(number) in cores and len(ticks) >= 8:
            user, nice, system, idle, waiting, interrupts, soft, stolen = (int(tick) * _TICK_S for tick in ticks[:8])
            total_s = user + nice + system + idle + waiting + interrupts + soft + stolen
            found[int(number)] = Core(idle + waiting, stolen, interrupts + soft, total_s)
    return found


class WorkerProbe:
    """Processor time and memory of one rank's loader workers in a window; null where there are none."""

    def __init__(self, loader: BatchLoader) -> None:
        self._loader = loader

    def start(self) -> None:
        """Begin to count."""
        self._before_s = self._cpu_s()

    def stop(self) -> dict[str, float | int | None]:
        """Processor time since `start`, s, and memory now, bytes."""
        if not self._loader.workers:
            return {"loader_cpu_time_s": None, "loader_memory_bytes": None}
        return {"loader_cpu_time_s": self._cpu_s() - self._before_s, "loader_memory_bytes": self._memory_bytes()}

    def _cpu_s(self) -> float:
        """Processor time of living workers and of all ended children: workers move from the first to the second."""
        living = [worker.cpu_times() for worker in self._living()]  # listing them reaps the ended ones
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        return ended.ru_utime + ended.ru_stime + float(sum(times.user + times.system for times in living))

    def _memory_bytes(self) -> int | None:
        """Memory of the workers alone, without the pages they share with the rank that they were forked from."""
        living = self._living()
        return sum(worker.memory_full_info().uss for worker in living) if living else None

    def _living(self) -> list[psutil.Process]:
        pids = self._loader.worker_pids()
        if not pids:
            return []
        import psutil  # a compiled package, which gpu-check does without

        return [psutil.Process(pid) for pid in pids]
