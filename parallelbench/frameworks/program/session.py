"""One node's part of a program's run: it starts the command, counts steps, ends it, and writes the tables."""

from __future__ import annotations

import math
import os
import select
import signal
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from parallelbench.errors import ConfigError, count_of
from parallelbench.frameworks.program import amount, numbers
from parallelbench.frameworks.program.child import (
    COMPARED_FROM,
    CORES,
    ENOUGH,
    MARK,
    STEPS,
    STEPS_OF,
    Child,
    Place,
    environment,
    load,
    own_bytes,
    script,
)
from parallelbench.frameworks.program.sources import written_since
from parallelbench.frameworks.program.steps import Marks, Output, RankSteps, Window, between, curve, durations, windows
from parallelbench.frameworks.program.told import Told, as_nvml_writes
from parallelbench.frameworks.program.world import ProgramWorld
from parallelbench.results.sensor_columns import NOTHING
from parallelbench.results.tables import TABLES
from parallelbench.training.session import Session
from parallelbench.world.machine import node_name, this_machine

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from parallelbench.config.run import RunConfig
    from parallelbench.frameworks.program import Program
    from parallelbench.frameworks.program.child import Load
    from parallelbench.measure.clock import StartUp
    from parallelbench.results.attempt import Attempt
    from parallelbench.results.journal import Journal, Row


_UNLIKE_RATE = 0.05
"""Relative difference of a printed rate from the measured one that is told."""
_LAG_S = 30.0
"""How long GPUs may take for steps that their hosts have launched."""
_LATE_S = 60.0
"""How long after the first rank's first step the others may begin."""
_WARNED_S = 3.0
"""How long a supervisor may take to pass on why a program was signalled."""
_LOOK_S = 0.5
"""How often the program's processes and journals are looked at."""
_LOOKS_AT_MEMORY = 20
"""Looks from one at the memory of the ranks' own processes to the next."""


class ProgramSession(Session):
    """A node's monitor of the program."""

    _world: ProgramWorld

    def __init__(
        self, run: RunConfig, attempt: Attempt, *, device_type: str, journal: Journal, startup: StartUp
    ) -> None:
        super().__init__(run, attempt, journal=journal, startup=startup)
        self._program: Program = run.strategy  # type: ignore[assignment]
        self._startup.done("imports")
        self._world = ProgramWorld(run, device_type)
        self._startup.done("process_group")
        here = run.devices // run.nodes
        self._cores = list(this_machine().cores[: here * run.cores_per_device]) if device_type == "cpu" else []
        self._ranks_here = here if self._program.one_process_per == "device" else 1
        self._marks: Marks | None = None
        self._loads: list[Load] = []
        self._command_times: list[float] = []
        """Unix times of the command's start and end, where it ended by itself."""
        self._began_at = 0.0
        """When the first rank's first step was seen, by the monotonic clock."""
        self._left_behind = 0
        """Processes that still ran when the command had ended."""
        self._peaks: dict[int, int] = {}
        """Process id → its peak of resident memory, bytes."""
        self._workers: dict[int, int] = {}
        """Process id of a rank → most memory that only the processes below it held, bytes."""
        program = self._program
        self._output = Output(step=program.step_pattern, loss=program.loss_pattern, rate=program.rate_pattern)
        self._told = Told(attempt.path / f"steps-node{self._world.node}")

    def train(self) -> None:
        """Run the command until all ranks have taken enough steps, or to its end; then write what it did."""
        program = self._program
        place = Place(self._world.node, self._world.head, self._world.port, self._attempt.path / "own")
        place.attempt.mkdir(exist_ok=True)
        self._phase("start of the program")
        print(f"in {program.working_folder}:\n{script(self._run, place)}", flush=True)  # the log's first lines
        with ExitStack() as stack:
            if program.steps_by == "mark":
                self._marks = Marks(self._marks_file)
                stack.callback(self._marks.close)
            child = stack.enter_context(self._started(place))
            ended = self._followed(child)
            self._world.barrier()  # where one node's share has ended by itself, the others' may still run
            if ended is None:  # it still runs, and has taken enough steps
                number = signal.SIGTERM if program.on_enough == "term" else signal.SIGKILL
                if not child.end(number, ranks=self._told.pids) and number is signal.SIGTERM:
                    self._warn("the program did not end within 10 s of SIGTERM, so it was killed")
            ended_at = time.time()
        self._told.poll()
        self._record(child.started_at, ended_at, ended)

    @property
    def _marks_file(self) -> Path:
        """A pipe, of this node alone."""
        return self._attempt.path / f"marks-node{self._world.node}"

    def _started(self, place: Place) -> Child:
        cuda, here = self._world.device_type == "cuda", self._ranks_here
        threads = (
            max(1, int(os.environ.get("OMP_NUM_THREADS", "1")) // here) if cuda else max(1, len(self._cores) // here)
        )
        variables = environment(self._run, os.environ, cuda=cuda, threads=threads)
        variables[STEPS] = str(self._told.folder)
        variables[STEPS_OF] = "" if self._program.optimizer is None else str(self._program.optimizer)
        variables[ENOUGH] = "" if self._program.enough is None else str(self._program.enough)
        # The last step of the warm-up may take longer for it: no window holds that.
        variables[COMPARED_FROM] = str(self._program.warmup_steps - 1)
        if self._cores:
            groups = [self._cores[rank * threads : (rank + 1) * threads] for rank in range(here)]
            variables[CORES] = ";".join(",".join(map(str, group)) for group in groups)
        if self._marks is not None:
            variables[MARK] = str(self._marks_file)
        return Child(
            script(self._run, place),
            folder=self._program.working_folder,
            variables=variables,
            cores=self._cores,
            on_line=self._output.line,
        )

    def _followed(self, child: Child) -> int | None:
        """Wait until all ranks have taken enough steps, or the program ends; returns its exit code in that case."""
        enough, before, steps, reached_at = self._program.enough, 0, 0, 0.0
        whole = self._program.steps_by == "command"
        limit_s, moved_at = math.inf if whole else self._program.start_timeout_s, time.monotonic()
        while (code := child.code()) is None:
            if self._attempt.stop_requested():
                self._stop(child)
            self._look(child)
            steps = self._steps_done()
            if steps != before:
                if not before:
                    self._phase("warm-up")
                before, moved_at = steps, time.monotonic()
                # A program that runs to its end may evaluate and save for long after its last step.
                limit_s = self._run.launcher.collective_timeout_s if enough is not None else math.inf
            if enough is not None and steps >= enough:
                reached_at = reached_at or time.monotonic()
                # The host may have launched them long before the GPUs take them.
                if not self._told.lags(enough) or time.monotonic() - reached_at > _LAG_S:
                    self._look(child, last=True)
                    return None
            if time.monotonic() - moved_at > limit_s:
                raise ConfigError(self._hangs(before, limit_s))
            self._wait_for_marks(_LOOK_S)
        self._look(child)
        if code in (128 + signal.SIGTERM, 128 + signal.SIGKILL):  # Slurm may signal all processes of a job at once
            deadline = time.monotonic() + _WARNED_S
            while time.monotonic() < deadline and not self._attempt.stop_requested():
                time.sleep(0.1)
            if self._attempt.stop_requested():
                self._stop(child)
        self._left_behind, *self._command_times = child.end_of_command()
        child.end(signal.SIGKILL)  # after the last lines of its output
        self._take_marks()
        self._told.poll()
        return code

    def _wait_for_marks(self, seconds: float) -> None:
        """Wait so long, and note when each mark comes."""
        until = time.monotonic() + seconds
        while (left_s := until - time.monotonic()) > 0:
            files = [self._marks] if self._marks is not None else []
            if select.select(files, [], [], left_s)[0]:
                self._take_marks()

    def _look(self, child: Child, *, last: bool = False) -> None:
        seen = load(child, self._cores)
        self._loads.append(seen)
        self._peaks |= {pid: each.peak_bytes for pid, each in seen.processes.items() if each.peak_bytes}
        if last or len(self._loads) % _LOOKS_AT_MEMORY == 0:  # the kernel walks through all of their pages
            for rank in self._told.pids:
                if (below := seen.below(rank)) and (held := own_bytes(below)) is not None:
                    self._workers[rank] = max(held, self._workers.get(rank, 0))

    def _take_marks(self) -> None:
        if self._marks is not None:
            now = time.time()
            for rank in self._marks.take():
                self._told.mark(rank, now)

    def _steps_done(self) -> int:
        """Steps that all of this node's ranks have taken."""
        if self._program.steps_by == "pattern":
            return len(self._output.steps_at)
        self._told.poll()
        taken = self._told.taken
        if taken and not self._began_at:
            self._began_at = time.monotonic()
        lacking = self._program.steps_by == "optimizer" and len(taken) < self._ranks_here
        # Where others have not begun for so long, none will: the program is ended, and refused for it.
        if lacking and not (taken and time.monotonic() - self._began_at > _LATE_S):
            return 0
        return min(taken, default=0)

    def _hangs(self, steps: int, limit_s: float) -> str:
        seen = count_of(len(self._told.taken), "process", "processes")
        if steps:
            return (
                f"the program hangs: no step within {limit_s:g} s after step {steps} "
                "(launcher.collective_timeout_s says how long it may take)"
            )
        return (
            f"no step of {count_of(self._ranks_here, 'rank')} within program.start_timeout_s={limit_s:g} s ({seen} "
            f"trained): {_NO_STEPS[self._program.steps_by]}"
        )

    def _stop(self, child: Child) -> None:
        child.end(signal.SIGTERM)
        if self._world.rank == 0:
            self._journal.event("stopped", epoch=0, epochs=self._run.epochs, saved=0)
            self._journal.commit()
        raise ConfigError("stopped, as requested")

    # --- what it did

    def _record(self, started_at: float, ended_at: float, code: int | None) -> None:
        """Write the tables, after what was asked for is held against what was done."""
        program, run = self._program, self._run
        ranks = self._ranks(started_at, ended_at)
        steps = min((len(rank.ends_at) for rank in ranks), default=0)
        self._require_success(code, steps)
        steps = min(self._world.gather(steps))
        everywhere = [rank for of_node in self._world.gather([rank.rank for rank in ranks]) for rank in of_node]
        if len(everywhere) > len({*everywhere}) and program.steps_by == "mark":
            raise ConfigError(
                "ranks of several nodes wrote the same number to the file that $PARALLELBENCH_MARK names: begin each "
                "line with RANK, which counts over all nodes, and not with LOCAL_RANK"
            )
        self._told.require(run, self._world, ranks_here=self._ranks_here)
        foreign = self._told.environment
        if "threads" in foreign:  # of a process that drives several devices, those of each
            foreign["threads"] = foreign["threads"] * self._ranks_here // (run.devices // run.nodes)
        self._trained_with["foreign"] = foreign
        self._record_environment()
        parts = windows(
            steps if program.steps is None else program.enough or steps,
            warmup=program.warmup_steps,
            parts=program.windows,
        )
        if program.steps_by == "command":
            parts = [Window(1, 1), Window(1, 2)]  # nothing is warmed up; the whole command
        samples = amount(program.samples_per_step, numbers(run), key="program.samples_per_step")
        self._describe_program(started_at, ranks, parts, samples)
        for epoch, window in enumerate(parts, start=1):
            self._write_window(epoch, window, ranks, samples)
        self._world.barrier()
        taken = sum(window.steps for window in parts[1:])
        whole = program.steps_by == "command"
        self._finished(None, done="timed the whole command" if whole else f"timed {count_of(taken, 'step')}")

    def _require_success(self, code: int | None, steps: int) -> None:
        program = self._program
        needed = program.enough or (0 if program.steps_by == "command" else program.warmup_steps + program.windows)
        said = f"; its last words: {words}" if (words := self._output.last_words) else "; it printed nothing"
        how = "" if code is None else f"ended with exit code {code}" if code >= 0 else f"was ended by signal {-code}"
        # What goes on behind a command that has ended is in no time of it.
        if self._left_behind and (steps < needed or program.steps_by == "command"):
            raise ConfigError(
                f"the command has ended, but left {count_of(self._left_behind, 'process', 'processes')} behind, which "
                "were ended: let it wait for what it starts (without & or nohup)"
            )
        if code in (126, 127) and not steps:
            raise ConfigError(
                f"the command could not be started (exit code {code}): it is none, or not on PATH after program.setup"
                f"{said}"
            )
        if code and (steps < needed or program.enough is None):
            raise ConfigError(f"the program {how} after {count_of(steps, 'step')}{said}")
        if not steps:
            raise ConfigError(f"the program {how} before its first step: {_NO_STEPS[program.steps_by]}{said}")
        if steps < needed:
            raise ConfigError(
                f"the program {how} after {count_of(steps, 'step')}, but program.warmup_steps={program.warmup_steps} "
                f"and program.steps={program.steps} need {needed}: choose fewer, or let it train longer"
            )

    def _ranks(self, started_at: float, ended_at: float) -> list[RankSteps]:
        """This node's ranks, as what tells steps here knows them."""
        if self._program.steps_by == "command":
            # On several nodes each one's share of the command stands for a rank.
            node = self._world.node
            return [RankSteps(rank=node, ends_at=self._command_times or [started_at, ended_at])]
        if self._program.steps_by == "pattern":
            return [RankSteps(ends_at=self._output.steps_at)]
        return self._told.ranks()

    def _describe_program(
        self, started_at: float, ranks: Sequence[RankSteps], parts: Sequence[Window], samples: int | None
    ) -> None:
        program, steady = self._program, parts[-1]
        told = (
            *self._told.warnings(self._run, ranks),
            *self._printed_rate(parts, ranks, samples),
            *self._written(started_at),
        )
        for line in told:
            self._warn(line)
        first_at = min(rank.ends_at[0] for rank in ranks)
        launched_at = self._startup.parts["startup_launch_s"]
        # The first window begins at the end of the first step, so that step is a part of the start-up alone.
        parts_s: Row = {"startup_launch_s": launched_at, "startup_first_step_s": 0.0} | {
            name: value for name, value in self._startup.parts.items() if name != "startup_launch_s"
        }
        parts_s["startup_model_s"] = 0.0 if program.steps_by == "command" else first_at - started_at
        facts: Row = parts_s | {"startup_s": sum(value or 0.0 for value in parts_s.values())}
        self._facts(
            **facts,
            packed=False,
            device_name=self._world.device_name,
            steps_per_epoch=steady.steps,
            train_samples=None if samples is None else samples * steady.steps,
            loader_samples_per_step=self._told.loader_samples(self._run.nodes),
            processes=len(ranks) * self._run.nodes if self._program.steps_by == "optimizer" else None,
        )
        self._record_warnings()

    def _written(self, started_at: float) -> Iterator[str]:
        """That it wrote into its folder: a later run may begin from that."""
        if names := written_since(self._program.working_folder, started_at):
            more = f" and {count_of(len(names) - 3, 'more file')}" if len(names) > 3 else ""
            yield (
                f"it wrote {', '.join(names[:3])}{more} into its folder, where a later run may find it: {{attempt}} "
                "names a folder of each attempt's own"
            )

    def _printed_rate(self, parts: Sequence[Window], ranks: Sequence[RankSteps], samples: int | None) -> Iterator[str]:
        """That the program prints another rate than was measured."""
        first, last = ranks[0].ends_at[parts[1].first - 1], ranks[0].ends_at[parts[-1].last - 1]
        rates = sorted(rate for at, rate in self._output.rates if first <= at <= last)
        of_step = amount(self._program.tokens_per_step, numbers(self._run), key="program.tokens_per_step") or samples
        steps = parts[-1].last - parts[1].first
        if not rates or not of_step or not steps:
            return
        printed, measured = rates[len(rates) // 2], of_step * steps / (last - first)
        if abs(printed / measured - 1) > _UNLIKE_RATE:
            yield (
                f"the program prints {printed:,.4g} per second (median), but {measured:,.4g} was measured: is one of "
                "them per device, or without accumulation?"
            )

    def _write_window(self, epoch: int, window: Window, ranks: Sequence[RankSteps], samples: int | None) -> None:
        started_at = min(rank.ends_at[window.first - 1] for rank in ranks)
        finished_at = max(rank.ends_at[window.last - 1] for rank in ranks)
        busy_s, own_s, of_each = between(self._loads, started_at, finished_at)
        others_s = None if busy_s is None or own_s is None else busy_s - own_s
        rows = []
        for rank in ranks:
            row: Row = dict.fromkeys(_COLUMNS["ranks"])
            row |= {"epoch": epoch, "rank": rank.rank, "local_rank": rank.local_rank, "node": node_name()}
            uuids = [as_nvml_writes(each.uuid) for each in rank.memory if each.uuid]
            row["device_uuid"] = ",".join(uuids) or self._world.devices_of(rank.local_rank, rank.cores or self._cores)
            begin, end = rank.ends_at[window.first - 1], rank.ends_at[window.last - 1]
            row |= {"epoch_time_s": math.fsum(durations(rank, window)) if rank.device_s else end - begin}
            row |= {"training_started_at": begin, "training_ended_at": end}
            row["cpu_time_s"] = of_each.get(rank.pid) if rank.pid is not None else own_s
            if others_s is not None:  # of all cores together: each rank's part of it
                row["others_time_s"] = others_s / len(ranks)
            if rank.waits_s:
                row["data_wait_s"] = sum(rank.waits_s[window.first : window.last])
                row["data_wait_share"] = row["data_wait_s"] / row["epoch_time_s"]
            if rank.before_s and self._told.saw_backwards:
                row["forward_s"] = sum(rank.before_s[window.first : window.last])
            if rank.memory:  # from the start of the process
                for kind in ("allocated", "reserved"):
                    held = [getattr(each, f"peak_{kind}_bytes") for each in rank.memory]
                    row[f"peak_{kind}_bytes"] = sum(held)
                    row[f"peak_{kind}_bytes_by_device"] = ",".join(map(str, held))
            row["host_peak_rss_bytes"] = self._peaks.get(rank.pid or 0)
            if below := self._below(rank.pid, started_at, finished_at):
                row["loader_cpu_time_s"] = math.fsum(of_each.get(pid, 0.0) for pid in below)
                row["loader_memory_bytes"] = self._workers.get(rank.pid or 0)
            rows.append({name: row[name] for name in _COLUMNS["ranks"]})
        self._journal.write("ranks", rows)
        self._journal.write("steps", self._step_rows(epoch, window, ranks))
        if self._output.losses:
            self._journal.write(
                "losses", [{"epoch": epoch, **row} for row in curve(self._output.losses, ranks[0], window)]
            )
        self._journal.commit()
        self._world.barrier()
        if self._world.rank == 0:
            row = dict.fromkeys(_COLUMNS["epochs"]) | NOTHING
            taken = None if samples is None else samples * window.steps
            row |= {"epoch": epoch, "steps": window.steps, "train_samples": taken, "finished_at": finished_at}
            self._journal.write("epochs", [row])
            self._journal.commit()

    def _below(self, rank: int | None, started_at: float, finished_at: float) -> set[int]:
        """Processes that a rank had in a window, as a DataLoader's workers are."""
        looks = [each for each in self._loads if started_at <= each.at <= finished_at + _LOOK_S]
        return {pid for each in looks for pid in each.below(rank)} if rank is not None else set()

    def _step_rows(self, epoch: int, window: Window, ranks: Sequence[RankSteps]) -> list[Row]:
        count = min(window.steps, self._run.measure.steps_sampled)
        chosen = sorted({round(i * (window.steps - 1) / max(1, count - 1)) for i in range(count)})
        times = {rank.rank: durations(rank, window) for rank in ranks}
        return [
            {"epoch": epoch, "step": index + 1, "rank": rank, "step_time_s": taken[index]}
            for rank, taken in times.items()
            for index in chosen
        ]


_COLUMNS = {
    table: [column.name for column in TABLES[table] if column.name not in ("run_id", "attempt")]
    for table in ("ranks", "epochs")
}
_NO_STEPS = {
    "optimizer": "no optimizer of torch's took one in a process that the suite could look into. Where updates are "
    "written by hand, or come from JAX, TensorFlow or a CUDA graph, choose program.steps_by=pattern, mark or command; "
    "`python -I`, `-E`, a cleared environment (srun --export=NONE, apptainer --cleanenv) and "
    "TORCH_DEVICE_BACKEND_AUTOLOAD=0 keep the suite out",
    "pattern": "no line of its output matches program.step_pattern",
    "mark": "nothing was written to the file that $PARALLELBENCH_MARK names",
    "command": "it has not ended",
}
