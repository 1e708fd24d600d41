"""Pipeline schedules without torch: which there are, what they need, where stages go, how long devices must idle."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal, get_args

from msgspec import Meta

from parallelbench.config.alternatives import any_of, deeper_models
from parallelbench.errors import ConfigError, count_of
from parallelbench.strategies.pipeline.partition import check_map, check_tied
from parallelbench.strategies.refusals import SCALES_ALONE, check_no_fp16

if TYPE_CHECKING:
    from collections.abc import Mapping

    from parallelbench.config.run import RunConfig


Schedule = Literal["gpipe", "1f1b", "looped_bfs", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"]
"""The order in which stages take up micro-batches.

gpipe: all forward, then all backward (Huang et al. 2019, arXiv 1811.06965). 1f1b: one forward, one backward
(PipeDream-Flush, Narayanan et al. 2021, arXiv 2006.09503). looped_bfs: several stages per device, breadth first
(Lamy-Poirier 2022, arXiv 2211.05953). interleaved_1f1b: several stages per device (Narayanan et al. 2021, arXiv
2104.04473). interleaved_zero_bubble: ZB1P, the gradients of weights fill the bubble (Qi et al. 2023, arXiv 2401.10241).
zbv: the same with two stages per device in a V. dualpipev: forward of one micro-batch beside backward of another, in a
V (DeepSeek-AI 2024, arXiv 2412.19437).
"""

StageMap = Annotated[dict[str, Annotated[int, Meta(ge=0)]], Meta(min_length=1)]
"""Layer name → stage, counted from 0."""

_ONE_STAGE = ("gpipe", "1f1b")
"""Schedules of one stage per device; then those in a V, those that cut backward in two, those that work in rounds."""
_V = ("zbv", "dualpipev")
_SPLIT_BACKWARD = ("interleaved_zero_bubble", "zbv", "dualpipev")
_IN_ROUNDS = ("interleaved_1f1b", "interleaved_zero_bubble")


@dataclass(frozen=True)
class Pipeline:
    """One pipeline: a schedule and its sizes."""

    schedule: Schedule
    micro_batches: int
    stages_per_rank: int
    devices: int

    @property
    def stages(self) -> int:
        """Stages on all devices together."""
        return self.devices * self.stages_per_rank

    def stage_devices(self) -> list[int]:
        """Device of each stage: round and round, or down and up again under a V schedule."""
        down = list(range(self.devices))
        return [*down, *reversed(down)] if self.schedule in _V else down * self.stages_per_rank

    def bubble(self) -> float:
        """Largest idle share of a device's step, from its first work to its last.

        Where forward, backward by input and backward by weight last T each, a device with v stages works 3·v·m·T. It
        idles 3(p−1)T under GPipe and 1F1B and, of stages a v-th as long, when interleaved or looped (Narayanan et al.
        2021, §2.2); (p−1)(T_F+T_B−T_W) under ZB1P, nothing under ZB-V (Qi et al. 2023); and 2(p−1)T under
        DualPipeV as torch does it: nothing overlaps, and both halves of a pair send their results at the end.
        One test simulates torch's orders, another measures them with stages that sleep.
        """
        work = 3 * self.stages_per_rank * self.micro_batches
        idle = {"interleaved_zero_bubble": 1, "zbv": 0, "dualpipev": 2}.get(self.schedule, 3) * (self.devices - 1)
        return idle / (work + idle)

    @property
    def splits_backward(self) -> bool:
        """Whether backward by input and backward by weight are apart."""
        return self.schedule in _SPLIT_BACKWARD

    def check(self, run: RunConfig, stage_map: Mapping[str, int] | None, *, batch_size: int) -> None:
        """Refuse what the schedule can't do; `batch_size` is the number of samples per step in this pipeline."""
        who = f"strategy={run.strategy.name}"
        if self.devices < 2:
            raise ConfigError(f"{who} needs two stages or more, on a device each: choose devices=2, or strategy=single")
        self._check_stages(run, who)
        if stage_map is not None:
            check_map(stage_map, run, parts=self.stages, option="strategy.stage_map", part="stage")
            _check_order(stage_map, run)
        check_tied(run, stage_map, part="stage")
        self._check_micro_batches(run, batch_size)
        check_no_fp16(run, SCALES_ALONE)
        if run.compile and self.splits_backward:
            raise ConfigError(
                f"strategy.schedule={self.schedule} cuts backward in two, which compile=true doesn't allow: "
                "choose compile=false or strategy.schedule=interleaved_1f1b"
            )

    def _check_stages(self, run: RunConfig, who: str) -> None:
        v, names = self.stages_per_rank, run.model.layer_names
        needed = self._stages_of(self.schedule)
        if v != needed:
            others = any_of([name for name in get_args(Schedule) if self._could_be(name)])
            raise ConfigError(
                f"strategy.schedule={self.schedule} puts {count_of(needed, 'stage')} on each device, not "
                f"strategy.stages_per_rank={v}: choose strategy.stages_per_rank={needed}"
                + (f", or strategy.schedule={others}" if others else "")
            )
        if self.stages > len(names):
            models = deeper_models(run, layers=self.stages)
            deeper = f", or model={models}" if models else ""
            raise ConfigError(
                f"{who} can't cut model={run.model.name} into {count_of(self.stages, 'stage')} "
                f"({count_of(self.devices, 'device')} × strategy.stages_per_rank={v}): it has "
                f"{count_of(len(names), 'layer')} ({', '.join(names)}): choose fewer devices or stages{deeper}"
            )

    def _stages_of(self, schedule: str) -> int:
        """Stages that a schedule puts on each device; as asked for where it takes any number."""
        return 1 if schedule in _ONE_STAGE else 2 if schedule in _V else self.stages_per_rank

    def _could_be(self, schedule: Schedule) -> bool:
        """Whether another schedule takes as many stages on each device, and as many micro-batches."""
        other = replace(self, schedule=schedule)
        return self._stages_of(schedule) == self.stages_per_rank and not other._obstacle(self.micro_batches)

    def _check_micro_batches(self, run: RunConfig, batch_size: int) -> None:
        if batch_size == 0:  # of a pipeline among more than there are samples: check_fit refuses the batch_size
            return
        m, option = self.micro_batches, f"strategy.micro_batches={self.micro_batches}"
        valid = self._suiting(batch_size)
        if m in valid:
            return
        why = self._obstacle(m) or f"doesn't divide the batch of {batch_size} samples (batch_size={run.batch_size})"
        if valid:
            nearest = sorted(sorted(valid, key=lambda n: abs(n - m))[:2])
            advice = f"choose strategy.micro_batches={' or '.join(map(str, nearest))}, or another batch_size"
        else:
            larger, number = self._larger_batch_size(run)
            advice = (
                f"no number suits the batch of {batch_size} samples: choose batch_size={larger} "
                f"strategy.micro_batches={number}, or fewer devices"
            )
        raise ConfigError(f"{option} {why}: {advice}")

    def _suiting(self, batch_size: int) -> list[int]:
        """Numbers of micro-batches that a batch of one pipeline can be cut into."""
        return [n for n in range(1, batch_size + 1) if batch_size % n == 0 and not self._obstacle(n)]

    def _larger_batch_size(self, run: RunConfig) -> tuple[int, int]:
        """The next one whose batches, one for each pipeline, can be cut into micro-batches; and their number."""
        per, pipelines = run.global_batch_size // run.batch_size, run.strategy.data_parallel_degree(run)
        larger = (size for size in itertools.count(run.batch_size + 1) if size * per % pipelines == 0)
        both = ((size, self._suiting(size * per // pipelines)) for size in larger)
        size, numbers = next(found for found in both if found[1])
        return size, min(numbers, key=lambda n: abs(n - self.micro_batches))

    def _obstacle(self, m: int) -> str | None:
        """Why the schedule can't take `m` micro-batches; None where it can."""
        p = self.devices
        least = {"gpipe": 1, "zbv": 2 * p - 1, "dualpipev": 2 * p}.get(self.schedule, p)
        if m < least:
            return f"is too few for strategy.schedule={self.schedule} with {self.stages} stages, which needs {least}"
        rounds = m // p
        if self.schedule in _IN_ROUNDS and m % rounds:
            return f"can't be cut into {rounds} equal rounds by strategy.schedule={self.schedule}"
        return None


def _check_order(stage_map: Mapping[str, int], run: RunConfig) -> None:
    stages = [stage_map[name] for name in run.model.layer_names]
    if stages != sorted(stages):
        raise ConfigError(
            f"strategy.stage_map goes back to an earlier stage ({stages} in the order of the layers): "
            "stages are runs of consecutive layers, so number them in order; strategy=model_parallel can go back"
        )
