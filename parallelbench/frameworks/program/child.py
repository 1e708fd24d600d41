"""A user's program as a tree of processes: how it is started, watched and ended."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from parallelbench.frameworks.program import filled, numbers
from parallelbench.measure.processor import read_cores
from parallelbench.processes import inherited
from parallelbench.world.machine import descendants, text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from parallelbench.config.run import RunConfig
    from parallelbench.frameworks.program import Program


SHIM = Path(__file__).with_name("shim")
"""The folder that processes of the program have first on PYTHONPATH."""
STEPS, ENOUGH, STEPS_OF = "PARALLELBENCH_STEPS", "PARALLELBENCH_ENOUGH", "PARALLELBENCH_STEPS_OF"
"""Variables that the shim reads: the folder of its journals, how many steps are enough, which optimizer marks one."""
COMPARED_FROM = "PARALLELBENCH_COMPARED_FROM"
"""Likewise: the step after which it first looks at the parameters."""
CORES, MARK = "PARALLELBENCH_CORES", "PARALLELBENCH_MARK"
"""Likewise: the cores of each local rank; and, of every program, the file that takes marks."""
_OF_THE_SUITE = ("PYTHONSAFEPATH", "PYTHONIOENCODING", "PARALLELBENCH_LAUNCHED_AT", "PARALLELBENCH_WATCHED_BY")
"""Variables of the suite's own processes that change what a program does."""
_GRACE_S = 10.0
"""How long a program may take to end after SIGTERM."""
_LOOK_S = 0.02
_GUARDIAN = Path(__file__).with_name("guardian.py")


class Place(NamedTuple):
    """What a program is told of where it runs."""

    node_rank: int
    head: str
    port: int
    attempt: Path
    """A folder of this attempt's own."""


def script(run: RunConfig, place: Place) -> str:
    """The lines of shell that a node executes: the set-up lines, then the command."""
    program: Program = run.strategy  # type: ignore[assignment]
    values = numbers(run) | {key: shlex.quote(str(value)) for key, value in place._asdict().items()}
    setup = [filled(line, values, key="program.setup") for line in program.setup]
    # The user's lines may set PYTHONPATH, as modules do.
    shim = f'export PYTHONPATH="{SHIM}${{PYTHONPATH:+:$PYTHONPATH}}"'
    return "\n".join([*setup, shim, filled(program.command, values, key="program.command")])


def environment(run: RunConfig, variables: Mapping[str, str], *, cuda: bool, threads: int) -> dict[str, str]:
    """Variables of the program: the user's own, and what makes one device start like several.

    torchrun sets OMP_NUM_THREADS=1 where it starts more than one process, and nothing for one.
    """
    own = {name: value for name, value in inherited(variables).items() if name not in _OF_THE_SUITE}
    if "srun" not in re.findall(r"[\w-]+", getattr(run.strategy, "command", "")):
        # What reads them (Lightning, mpirun) takes the job's shape for that of a launcher that isn't there.
        own = {name: value for name, value in own.items() if not name.startswith(("SLURM_", "PMI_", "PMIX_"))}
    own["PATH"] = path_of(own)
    own["OMP_NUM_THREADS"] = str(threads)
    here = run.devices // run.nodes
    visible = [each for each in own.get("CUDA_VISIBLE_DEVICES", "").split(",") if each] or list(map(str, range(here)))
    own["CUDA_VISIBLE_DEVICES"] = ",".join(visible[:here]) if cuda else ""
    return own


def path_of(variables: Mapping[str, str]) -> str:
    """PATH of a program: the user's; where it has no torchrun, and the set-up lines bring none, the suite's own has."""
    return ":".join(filter(None, [variables.get("PATH"), str(Path(sys.executable).parent)]))


class Child:
    """The program of this node; a context, at whose end nothing of it is left."""

    def __init__(
        self,
        script: str,
        *,
        folder: Path,
        variables: Mapping[str, str],
        cores: Sequence[int],
        on_line: Callable[[float, str], object],
    ) -> None:
        """`cores`: those it may use; none: this process's. `on_line`: told of each line of output with its time."""
        self.started_at = time.time()
        alive, self._alive = os.pipe()
        self._told, told = os.pipe()
        guardian = [sys.executable, "-I", "-S", str(_GUARDIAN), str(alive), str(told)]
        self._process = subprocess.Popen(
            [*guardian, "bash", "-c", script],
            cwd=folder,
            env=dict(variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[alive, told],
            preexec_fn=(lambda: os.sched_setaffinity(0, cores)) if cores else None,
        )
        os.close(alive)
        os.close(told)
        self._reader = threading.Thread(target=self._copy, args=(on_line,), daemon=True)
        self._reader.start()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.end(signal.SIGKILL)
        os.close(self._told)

    def code(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.poll()

    def end_of_command(self) -> tuple[int, float, float]:
        """Of a command that has ended: how many processes were left, and the Unix times of its start and end."""
        left, *times = os.read(self._told, 200).split() or [b"0", b"nan", b"nan"]
        started_at, ended_at = map(float, times)
        return int(left), started_at, ended_at

    def pids(self) -> list[int]:
        """Ids of all its processes."""
        return [self._process.pid, *descendants(self._process.pid)] if self._process.poll() is None else []

    def end(self, number: signal.Signals, *, ranks: Collection[int] = ()) -> bool:
        """End all its processes; returns whether the `ranks` (process ids) ended by that signal in time.

        What is left then, a launcher that waits for them, say, is killed.
        """
        in_time = False
        if number != signal.SIGKILL:
            for pid in self.pids():
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            in_time = self._gone_within(_GRACE_S, ranks)
        if self._alive >= 0:
            os.close(self._alive)
            self._alive = -1
        self._process.wait()
        self._reader.join(_GRACE_S)
        return in_time

    def _gone_within(self, seconds: float, ranks: Collection[int]) -> bool:
        deadline = time.monotonic() + seconds
        while any(pid in ranks for pid in self.pids()) if ranks else self._process.poll() is None:
            if time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_S)
        return True

    def _copy(self, on_line: Callable[[float, str], object]) -> None:
        """Print what the program prints, line by line, with the time of its arrival told."""
        assert self._process.stdout is not None
        held = b""
        while chunk := os.read(self._process.stdout.fileno(), 65_536):
            now = time.time()
            *lines, held = re.split(rb"[\r\n]", held + chunk)  # progress bars end their lines by \r
            for line in lines:
                on_line(now, line.decode(errors="replace"))
            with suppress(OSError):
                sys.stdout.buffer.write(chunk)
                sys.stdout.buffer.flush()
        if held:
            on_line(time.time(), held.decode(errors="replace"))


class Spent(NamedTuple):
    """What a process has used since it began, with all that it has started and that has ended."""

    time_s: float
    """Processor time."""
    peak_bytes: int | None
    """Peak of its own resident memory."""
    parent: int = 0
    """Process id of who has started it."""


class Load(NamedTuple):
    """What the program's cores and its processes have done until a moment, s."""

    at: float
    """Unix time."""
    busy_s: float | None
    """Of its cores, by all programs; None: it has no cores of its own."""
    own_s: float
    """By the program's processes, those that have ended included, and by this one where it may run on these cores."""
    processes: Mapping[int, Spent]
    """By process id."""

    def below(self, pid: int) -> list[int]:
        """Processes that it has started, and those that these have."""
        found = [pid]
        for parent in found:  # which grows meanwhile
            found += [child for child, each in self.processes.items() if each.parent == parent]
        return found[1:]


def load(child: Child, cores: Sequence[int]) -> Load:
    """What they have done until now."""
    processes = {pid: spent for pid in child.pids() if (spent := _spent(pid)) is not None}
    mine = os.times()
    here = sum(mine[:2]) if os.sched_getaffinity(0) & set(cores) else 0.0
    own_s = here + sum(mine[2:4]) + sum(each.time_s for each in processes.values())
    account = read_cores(Path("/proc/stat"), cores) if cores else {}
    known = len(account) == len(cores) > 0
    busy = sum(core.total_s - core.idle_s - core.interrupts_s for core in account.values()) if known else None
    return Load(time.time(), busy, own_s, processes)


_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def _spent(pid: int) -> Spent | None:
    """proc_stat(5): utime, stime, cutime and cstime come eleven fields after the name; None where it has ended."""
    stat, status = text_of(f"/proc/{pid}/stat"), text_of(f"/proc/{pid}/status")
    if not stat:
        return None
    fields = stat.rpartition(")")[2].split()
    peak = re.search(r"^VmHWM:\s*(\d+) kB", status or "", re.MULTILINE)
    return Spent(sum(map(int, fields[11:15])) * _TICK_S, int(peak[1]) * 1024 if peak else None, int(fields[1]))


def own_bytes(pids: Collection[int]) -> int | None:
    """Memory that only these processes hold, each for itself, summed over them; None where one has ended, or is
    somebody else's: what forked processes share with their parent counts for that.
    """
    found = 0
    for pid in pids:
        private = re.findall(r"^Private_\w+:\s*(\d+) kB", text_of(f"/proc/{pid}/smaps_rollup") or "", re.MULTILINE)
        if not private:
            return None
        found += 1024 * sum(map(int, private))
    return found
