"""Pipeline schedules without torch: which there are, what they need, where stages go, how long devices must idle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta

from parallelbench.errors import count_of
from parallelbench.strategies.pipeline.partition import valid_map
from parallelbench.strategies.shared_refusals import SCALES_ALONE, no_fp16

if TYPE_CHECKING:
    from collections.abc import Mapping

    from parallelbench.config.rule import Rules
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

    def rules(self, run: RunConfig, stage_map: Mapping[str, int] | None, *, batch_size: int) -> Rules:
        """What the schedule can't do.

        `batch_size`: the samples per step of this pipeline; 0 where pipelines can't share a batch, which is refused
        for itself.
        """
        who, names, v = f"strategy={run.strategy.name}", run.model.layer_names, self.stages_per_rank
        schedule = f"strategy.schedule={self.schedule}"
        yield (
            self.devices < 2,
            f"{who} needs two stages or more, on a device each",
            ("devices=2", "strategy=single devices=1"),
        )
        needed = 1 if self.schedule in _ONE_STAGE else 2 if self.schedule in _V else v
        yield (
            v != needed,
            f"{schedule} puts {count_of(needed, 'stage')} on each device, not strategy.stages_per_rank={v}",
            ("strategy.stages_per_rank", "strategy.schedule"),
        )
        yield from valid_map(stage_map, run, parts=self.stages, part="stage")
        stages = [stage_map[name] for name in names if name in stage_map] if stage_map else []
        yield (
            stages != sorted(stages),
            f"strategy.stage_map goes back to an earlier stage ({stages} in the order of the layers): stages are runs "
            "of consecutive layers, so number them in order; strategy=model_parallel can go back",
            ("strategy.stage_map",),
        )
        if batch_size:
            yield from self._pieces(batch_size)
        yield from no_fp16(run, SCALES_ALONE)
        yield (
            run.compile and self.splits_backward,
            f"{schedule} cuts backward in two, which compile=true doesn't allow",
            ("compile", "strategy.schedule"),
        )

    def _pieces(self, batch_size: int) -> Rules:
        p, m = self.devices, self.micro_batches
        keys, number = ("strategy.micro_batches", "batch_size", "devices"), f"strategy.micro_batches={m}"
        least = {"gpipe": 1, "zbv": 2 * p - 1, "dualpipev": 2 * p}.get(self.schedule, p)
        yield (
            m < least,
            f"{number} is too few for strategy.schedule={self.schedule} with {self.stages} stages, which needs {least}",
            keys,
        )
        rounds = m // p
        yield (
            m >= least and self.schedule in _IN_ROUNDS and m % rounds,
            f"{number} can't be cut into {rounds} equal rounds by strategy.schedule={self.schedule}",
            keys,
        )
        yield batch_size % m, f"{number} doesn't divide the batch of {batch_size} samples of a pipeline", keys
