"""Processor time and memory of a loader's worker processes, which the rank's other probes don't include."""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

    from parallelbench.loaders.batch_loader import BatchLoader


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
