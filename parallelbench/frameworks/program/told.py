"""What the processes of a program tell of themselves: their ranks and steps, held against what was asked for."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from parallelbench.errors import ConfigError, count_of
from parallelbench.frameworks.program.journals import Journals
from parallelbench.frameworks.program.steps import RankSteps

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from parallelbench.config.run import RunConfig
    from parallelbench.frameworks.program import Program
    from parallelbench.frameworks.program.journals import Journal, Process
    from parallelbench.frameworks.program.world import ProgramWorld


class Told:
    """This node's processes that train."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self._journals = Journals(folder)
        self._training: list[Journal] = []
        """Of the processes that have taken steps, in the order of their ranks."""
        self._marked: dict[int, RankSteps] = {}

    def poll(self) -> None:
        """Read what is new."""
        trained = [journal for journal in self._journals.poll() if journal.steps and journal.process]
        self._training = sorted(trained, key=lambda each: _rank(each, 0))

    def mark(self, rank: int, at: float) -> None:
        """Take a mark that the program wrote: the end of a step."""
        self._marked.setdefault(rank, RankSteps(rank=rank, local_rank=rank)).ends_at.append(at)

    @property
    def pids(self) -> set[int]:
        """Of the processes that train."""
        return {each.pid for each in self._training}

    @property
    def saw_backwards(self) -> bool:
        """Whether steps are told by backward passes."""
        return any(journal.saw_backwards for journal in self._training)

    @property
    def _on_gpus(self) -> list[Journal]:
        return [each for each in self._training if each.process and "cuda" in each.process.device_types]

    def lags(self, step: int) -> bool:
        """Whether some GPU has not yet told that it has taken a step."""
        return any(max(journal.device_ns, default=0) < step for journal in self._on_gpus)

    @property
    def taken(self) -> list[int]:
        """Steps of each rank."""
        if self._marked:
            return [len(rank.ends_at) for rank in self._marked.values()]
        return [len(journal.steps) for journal in self._training]

    def ranks(self) -> list[RankSteps]:
        """The ranks with their steps; by marks, where there are any."""
        if self._marked:
            return [self._marked[rank] for rank in sorted(self._marked)]
        found = []
        for number, journal in enumerate(self._training):
            state, local_rank = journal.state, journal.process.local_rank if journal.process else None
            found.append(
                RankSteps(
                    rank=_rank(journal, number),
                    local_rank=number if local_rank is None else local_rank,
                    ends_at=[journal.unix_s(step.ended_ns) for step in journal.steps],
                    waits_s=[step.wait_ns / 1e9 for step in journal.steps] if state and state.loaders else [],
                    before_s=[step.before_ns / 1e9 for step in journal.steps],
                    device_s={step: time_ns / 1e9 for step, time_ns in journal.device_ns.items()},
                    pid=journal.pid,
                    memory=state.memory if state else [],
                    cores=journal.process.cores if journal.process else [],
                )
            )
        return found

    def require(self, run: RunConfig, world: ProgramWorld, *, ranks_here: int) -> None:
        """Raise `ConfigError` where other processes trained than were asked for, or ranks that never met."""
        program: Program = run.strategy  # type: ignore[assignment]
        if program.steps_by != "optimizer":
            return
        processes = self._training
        if before := max((each.process.steps_before or 0 for each in processes if each.process), default=0):
            raise ConfigError(
                f"its optimizer had taken {before:,} steps before the first here: it went on from what an earlier run "
                "left. Let it write into {attempt}, a folder of each attempt's own, or keep it from resuming"
            )
        trained = count_of(len(processes), "process trained", "processes trained")
        if len(processes) != ranks_here:
            fix = (
                "let the command start one per device (torchrun --nproc-per-node={devices_per_node}), or, where one "
                "process drives all of its node's devices, choose program.one_process_per=node"
            )
            raise ConfigError(
                f"{trained}, but devices={run.devices} on nodes={run.nodes} need {ranks_here} here: {fix}"
            )
        whole = ranks_here * run.nodes
        facts = [journal.process for journal in processes if journal.process]
        sizes = {each.world_size or 1 for each in facts}
        alone = [each for each in facts if whole > 1 and each.rank_from != "distributed"]
        if alone:
            raise ConfigError(
                f"{trained}, each for itself: {count_of(len(alone), 'rank')} never called "
                "torch.distributed.init_process_group, so nothing was exchanged between them"
            )
        if sizes != {whole}:
            told = ", ".join(map(str, sorted(sizes)))
            raise ConfigError(
                f"{trained} in a group of {told} ranks, but devices={run.devices} on nodes={run.nodes} need {whole}"
            )
        ranks = [each.rank for each in facts]
        if whole > 1 and len(set(ranks)) < len(ranks):
            raise ConfigError(f"{trained} as ranks {sorted(map(str, ranks))}: several are the same one")
        for journal in processes:
            numbers = [step.number for step in journal.steps]
            if journal.unreadable or numbers != list(range(1, len(numbers) + 1)):
                raise ConfigError(f"what a rank said of its steps is damaged ({journal.path}): submit again")
        if world.device_type == "cuda":
            self._require_gpus(run, processes)
        self._require_changes(world)

    def _require_changes(self, world: ProgramWorld) -> None:
        """Raise `ConfigError` where no parameter of any rank has changed: hooks fire for steps that do nothing, too."""
        seen = [each.changed for each in self._training if each.changed]
        whole = len(seen) == len(self._training)
        # A node's ranks may hold frozen layers only.
        changed = sum(world.gather(sum(each.changed for each in seen) if whole else 1))
        if seen and not changed:
            raise ConfigError(
                f"steps {seen[0].first + 1:,} to {seen[0].last:,} changed no parameter of its optimizers: their times "
                "are not those of training. Is the learning rate 0, the loss detached, every gradient None or NaN, or "
                "does the optimizer hold other parameters than the model's?"
            )

    def _require_gpus(self, run: RunConfig, processes: Sequence[Journal]) -> None:
        held = [each for journal in processes if journal.state for each in journal.state.memory]
        used = {as_nvml_writes(each.uuid) if each.uuid else str(each.index) for each in held}
        here = run.devices // run.nodes
        if len(used) != here:
            raise ConfigError(
                f"{count_of(len(used), 'GPU')} held tensors of the program, but devices={run.devices} on "
                f"nodes={run.nodes} are {here} here: let each rank take the GPU of its LOCAL_RANK"
            )

    def loader_samples(self, nodes: int) -> int | None:
        """Samples that the DataLoaders of all ranks gave for a step; each node has as many ranks. None: not known.

        A batch per process that is taken for a global one turns weak scaling into strong.
        """
        total = 0
        for journal in self._training:
            loaders = [each for each in (journal.state.loaders if journal.state else ()) if each.backwards]
            if not loaders:
                return None
            most = max(loaders, key=lambda each: each.backwards)
            total += (most.largest_batch or 0) * max(1, round(most.batches / len(journal.steps)))
        return nodes * total or None

    def warnings(self, run: RunConfig, ranks: Sequence[RankSteps]) -> Iterator[str]:
        """What a reader must know of how its steps were counted, and of what they hold."""
        program: Program = run.strategy  # type: ignore[assignment]
        if program.steps_by != "optimizer":
            yield f"its steps are told by program.steps_by={program.steps_by}"
            return
        processes = self._training
        if not self.saw_backwards:
            yield "no backward pass was seen: each outermost update of an optimizer counts as a step"
        first, counts = processes[0].state, {len(rank.ends_at) for rank in ranks}
        marking = [each for each in first.optimizers if each.marks] if first else []
        marks = [each.marks for each in marking]
        if len(marks) > 1 and program.optimizer is None and sum(marks) > 1.5 * max(marks):
            told = ", ".join(f"{each.name} {each.marks}" for each in marking)
            yield (
                f"several optimizers update after backward passes of their own ({told}), and each update counts as a "
                "step: program.optimizer=0 counts those of the first"
            )
        if first and (first.captured or first.whole_graph):
            yield "some updates are in a CUDA graph or in one compiled graph, where nobody can count them"
        untimed = [each for each in self._on_gpus if len(each.device_ns) < (program.enough or len(each.steps)) - 1]
        still = [str(_rank(each, 0)) for each in processes if each.changed and not each.changed.changed]
        if still:
            yield f"no parameter of {count_of(len(still), 'rank')} changed (rank {', '.join(still)}), but others' did"
        if untimed:
            yield (
                f"the GPUs of {count_of(len(untimed), 'rank')} did not tell when they took each step, so windows are "
                "timed where the host launched them: it may be ahead"
            )
        if faults := [journal.state.fault for journal in processes if journal.state and journal.state.fault]:
            yield f"counting failed at times within the program: {faults[0]}"
        if run.devices > 1 and (silent := [each for each in processes if _exchanges_nothing(each)]):
            yield (
                f"{count_of(len(silent), 'rank')} began no collective operation of torch's from the first step on: if "
                "nothing else carries gradients between them, each trained for itself"
            )
        if len(counts) > 1 and program.steps is None:
            yield f"ranks took unequally many steps ({', '.join(map(str, sorted(counts)))}): the fewest count"

    def _noted(self, facts: Process) -> dict[str, Any]:
        """What ran, and how its steps were counted: of each optimizer all updates, and those that are steps."""
        first = self._training[0]
        updates = (
            {f"{each.number}: {each.name}": [each.raw, each.counted] for each in first.state.optimizers}
            if first.state
            else {}
        )
        return {
            "executable": facts.executable,
            "omp_num_threads": facts.omp_num_threads,
            "cuda_visible_devices": facts.cuda_visible_devices,
            "updates": updates,
            "noting_s_per_step": statistics.fmean(step.own_ns for step in first.steps) / 1e9,
        }

    @property
    def environment(self) -> dict[str, Any]:
        """What the first rank says of its libraries, as entries of the run's environment."""
        if not self._training or (facts := self._training[0].process) is None:
            return {}
        found: dict[str, Any] = {
            "packages": {"torch": facts.torch} | facts.packages,
            "python": facts.python,
            "threads": facts.threads,
            "float32_matmul_precision": facts.matmul_precision,
            "cudnn_benchmark": facts.cudnn_benchmark,
            "cudnn_deterministic": facts.cudnn_deterministic,
            "deterministic_algorithms": facts.deterministic,
            "interop_threads": facts.interop_threads,
            "program": self._noted(facts),
        }
        if facts.cudnn is not None:
            found["cuda"] = {"version": facts.cuda, "cudnn": facts.cudnn, "nccl": facts.nccl}
        return found


def as_nvml_writes(uuid: str) -> str:
    """The UUID of a GPU as torch gives it, with the prefix that NVML and the telemetry have."""
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


def _rank(journal: Journal, otherwise: int) -> int:
    rank = journal.process.rank if journal.process else None
    return otherwise if rank is None else rank


def _exchanges_nothing(journal: Journal) -> bool:
    """Whether it took steps without a collective. A group alone is no sign that ranks exchange anything."""
    first, last = journal.first_state, journal.state
    if first is None or last is None or last.steps <= first.steps + 1:
        return False
    return first.collectives is not None and first.collectives == last.collectives


def entries() -> dict[str, Any]:
    """The part of a program's environment that is known without it: nothing."""
    return {"packages": {}}
