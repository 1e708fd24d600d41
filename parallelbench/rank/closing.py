"""The closing check: after the last epoch, the trained replica is held against plain code on one device.

The parity check before training sees three small steps in fp64. This one sees what trained: at the run's own batch
size and precision, after all of its steps. So it finds a fault that begins after any step, that needs a large batch, or
that only another number format shows. It evaluates the parameters that were gathered, and then compares further steps,
each from the very state that the replica has reached: errors don't add up, so the limits are tight.

What is compared, and how closely: `parallelbench/rank/judge.py`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from parallelbench.optimizers import FirstOrder, Lbfgs
from parallelbench.probes.counted_bytes import CountedBytes
from parallelbench.rank.findings import Finding
from parallelbench.rank.judge import Judge, Taken, pieces_of
from parallelbench.rank.parity import endless

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor, nn

    from parallelbench.loaders.batch import Shard
    from parallelbench.loaders.batch_loader import BatchLoader
    from parallelbench.rank.world import World
    from parallelbench.spec.config import RunConfig
    from parallelbench.strategies.replica import Replica

    LoaderOf = Callable[[RunConfig, Shard], BatchLoader]

STEPS = 3
"""Further steps that are compared: a strategy that idles every other step idles in one of them."""
BYTES_LIMIT = 0.01
"""Largest share by which bytes that a strategy reports may differ from those that are counted."""


class ClosingCheck:
    """One rank's part."""

    def __init__(
        self, replica: Replica, loader: BatchLoader, *, run: RunConfig, world: World, loader_of: LoaderOf
    ) -> None:
        self._replica, self._loader, self._run, self._world, self._loader_of = replica, loader, run, world, loader_of
        self._findings: list[Finding] = []
        self._judge: Judge | None = None
        self.gloo_bytes_per_step_sum: float | None = None
        """Bytes that all ranks sent in a step, as gloo sends them; None where another library, or nobody, sent them."""

    def findings(self, model: nn.Module, *, loss: float, accuracy: float, sent_bytes: float) -> list[Finding]:
        """Compare; what is found is on rank 0, elsewhere nothing. A collective.

        `model`: the run's model as it is built, on the CPU, which is consumed.
        `loss` and `accuracy`: as evaluated after the last epoch. `sent_bytes`: what this rank has reported per step.
        """
        state = self._replica.full_state_dict()
        if self._world.rank == 0:
            self._judge = Judge(model, self._run, self._world, self._loader_of)
            self._findings += self._judge.evaluation(state, loss=loss, accuracy=accuracy)
        reason = self._why_no_steps()
        if reason is None:
            self._steps(state, sent_bytes)
        else:
            self._findings += [Finding("steps", reason), Finding("bytes", reason)]
        if self._judge is not None:
            self._judge.close()
        return self._findings if self._world.rank == 0 else []

    def _why_no_steps(self) -> str | None:
        run = self._run
        if not run.strategy.equals_one_device(run):
            return "the strategy does not train like one device"
        if pieces_of(run) is None:
            return f"model.norm={run.model.norm} under micro-batches"  # type: ignore[attr-defined]
        return None

    def _steps(self, state: Mapping[str, Tensor], sent_bytes: float) -> None:
        """Train further steps, and let rank 0 judge each."""
        counted, reported_bytes = CountedBytes(), 0.0
        self._take_optimizer()
        self._replica.traffic.take()
        batches = endless(self._loader, first=self._run.epochs + 1)
        for step in range(1, STEPS + 1):
            batch, scale = next(batches), _scale(self._replica) if self._run.precision == "fp16" else 1.0
            if self._run.compile:
                result = self._replica.step(batch)
            else:
                with counted:
                    result = self._replica.step(batch)
            reported_bytes += sum(self._replica.traffic.take().values())
            loss_sum = self._over_ranks([0.0 if result is None else result[0].item()])[0]
            gradients, after = self._replica.full_gradients(), self._replica.full_state_dict()
            if self._judge is not None:
                loss = loss_sum / self._run.global_batch_size
                number = self._run.epochs * self._run.steps_per_epoch + step
                taken = Taken(number, loss, gradients, state, after, scale)
                self._findings += self._judge.step(taken)
            state = after
        if self._judge is not None:
            self._findings += self._judge.rounding()
        self._bytes(reported_bytes / STEPS, counted, trained=sent_bytes)

    def _take_optimizer(self) -> None:
        """Give rank 0's optimizer the state of the replica's: once, so that it shows if later steps lose theirs."""
        optimizer = self._run.optimizer
        keys = optimizer.kept() if isinstance(optimizer, FirstOrder) else None
        kept = {key: self._replica.full_optimizer_state(key) for key in keys or ()}
        if self._judge is not None and keys is not None:
            self._judge.begin_updates({key: tensors for key, tensors in kept.items() if tensors is not None}, keys)

    def _bytes(self, reported: float, counted: CountedBytes, *, trained: float) -> None:
        """Hold the bytes per step that strategies report, here and in the last epoch, against those counted.

        Small messages may be in the report or not: statistics of norms and control messages are not, biases are.
        """
        gloo_bytes = math.nan if counted.gloo_bytes is None else counted.gloo_bytes
        counts = [each / STEPS for each in (counted.sent_bytes, counted.control_bytes, gloo_bytes)]
        counts.append(float(len(counted.unknown)))
        reported, trained, large, small, on_gloo, unknown = self._over_ranks([reported, trained, *counts])
        why = self._why_bytes_not_counted()
        if unknown and not why:
            names = ", ".join(sorted(counted.unknown)) or "on ranks other than the first"
            why = f"operations of torch.distributed whose bytes are not known: {names}"
        if why:
            self._findings.append(Finding("bytes", why))
            return
        self.gloo_bytes_per_step_sum = None if math.isnan(on_gloo) else on_gloo
        if isinstance(self._run.optimizer, Lbfgs):
            trained = reported  # each line search evaluates as often as it needs
        off = max(max(large - each, each - large - small, 0.0) for each in (reported, trained)) / max(large, 1.0)
        what = f"{trained:.0f} bytes per step reported, {large:.0f} and {small:.0f} in messages below 1 KiB counted"
        self._findings.append(Finding("bytes", what, difference=off, limit=BYTES_LIMIT))

    def _why_bytes_not_counted(self) -> str:
        """Empty: they are. Only what passes torch's dispatcher can be counted."""
        if self._world.size == 1:
            return "one process sends nothing through torch.distributed"
        return "compile=true" if self._run.compile else "graph=true" if self._run.graph else ""

    def _over_ranks(self, values: list[float]) -> list[float]:
        return self._world.sum(torch.tensor(values, dtype=torch.float64)).tolist()


def _scale(replica: Replica) -> float:
    """The factor of the loss in the next step's backward: that of the fp16 scaler, where there is one."""
    scale: float = (replica.local_state().get("scaler") or {}).get("scale", 1.0)
    return scale
