"""The closing check: after the last epoch, the trained replica is held against plain code on one device.

The parity check before training sees three small steps in fp64. This one sees what trained: at the run's own batch
size and precision, after all of its steps. So it finds a fault that begins after any step, that needs a large batch, or
that only another number format shows. It evaluates the parameters that were gathered, and then compares further steps,
each from the very state that the replica has reached: errors don't add up, so the limits are tight.

A limit is `MARGIN` times the difference that the number format makes on one device in the very same step, and at
least a floor for what another order of sums adds to it. In gradients that is mostly ReLUs that flip: of right
strategies some steps differ by 2 %, while most agree to 1e-7 (fp32). So each step has a wide limit, which idle steps,
lost samples and gradients that are not averaged exceed by far, and the best of the steps has a narrow one, which every
coarser number format exceeds.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from parallelbench.loaders.batch import Shard
from parallelbench.optimizers import Lbfgs
from parallelbench.probes.counted_bytes import CountedBytes
from parallelbench.rank.findings import Finding
from parallelbench.rank.parity import WIDEST_TOLERANCE, endless
from parallelbench.rank.plain import PlainModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from parallelbench.loaders.batch import Batch
    from parallelbench.loaders.batch_loader import BatchLoader
    from parallelbench.rank.plain import PlainStep
    from parallelbench.rank.world import World
    from parallelbench.spec.config import RunConfig
    from parallelbench.strategies.replica import Replica

    LoaderOf = Callable[[RunConfig, Shard], BatchLoader]

STEPS = 3
"""Further steps that are compared: a strategy that idles every other step idles in one of them."""
MARGIN = 8.0
STEP_FLOOR = 0.1
"""Least limit of the gradients of each step, relative."""
GRADIENT_FLOORS = {"fp64": 1e-9, "fp32": 5e-3, "tf32": 1e-2, "fp16": 2e-2, "bf16": 5e-2}
"""Least limit of the gradients of the best step, relative."""
LOSS_FLOORS = {"fp64": 1e-9, "fp32": 1e-4, "tf32": 1e-2, "fp16": 1e-2, "bf16": 5e-2}
"""Least limit of losses, of an evaluation, and of buffers, relative; predictions may differ by as large a share."""
BYTES_LIMIT = 0.01
"""Largest share by which bytes that a strategy reports may differ from those that are counted."""
_NOISE = 1e-9
"""A gradient in fp64 that is this much smaller than the largest is rounding: in truth it may be zero, as an attention's
key bias's is, and a strategy that rounds gradients leaves such a tensor where it began."""
_LEAST_SHARE = 0.01
"""A tensor counts at least as this share of all gradients: one that is zero in truth holds nothing but rounding."""


class ClosingCheck:
    """One rank's part."""

    def __init__(
        self, replica: Replica, loader: BatchLoader, *, run: RunConfig, world: World, loader_of: LoaderOf
    ) -> None:
        self._replica, self._loader, self._run, self._world, self._loader_of = replica, loader, run, world, loader_of
        self._findings: list[Finding] = []
        self._judge: _Judge | None = None
        self.gloo_bytes_per_step_sum: float | None = None
        """Bytes that all ranks sent in a step, as gloo sends them; None where another library, or nobody, sent them."""

    def findings(self, model: nn.Module, *, loss: float, accuracy: float, sent_bytes: float) -> list[Finding]:
        """Compare; what is found is on rank 0, elsewhere nothing. A collective.

        `model`: the run's model as it is built, on the CPU, which is consumed.
        `loss` and `accuracy`: as evaluated after the last epoch. `sent_bytes`: what this rank has reported per step.
        """
        state = self._replica.full_state_dict()
        if self._world.rank == 0:
            self._judge = _Judge(model, self._run, self._world, self._loader_of)
            self._findings += self._judge.evaluation(state, loss=loss, accuracy=accuracy)
        reason = self._why_no_steps()
        if reason is None:
            self._steps(state, sent_bytes)
        else:
            self._findings.append(Finding("steps", reason))
        if self._judge is not None:
            self._judge.close()
        return self._findings if self._world.rank == 0 else []

    def _why_no_steps(self) -> str | None:
        run = self._run
        if not run.strategy.equals_one_device(run):
            return "the strategy does not train like one device"
        if _pieces(run) is None:
            return f"model.norm={run.model.norm} under micro-batches"  # type: ignore[attr-defined]
        return None

    def _steps(self, state: Mapping[str, Tensor], sent_bytes: float) -> None:
        """Train further steps, and let rank 0 judge each."""
        counted, reported_bytes = CountedBytes(), 0.0
        self._replica.traffic.take()
        batches = endless(self._loader, first=self._run.epochs + 1)
        for step in range(1, STEPS + 1):
            batch = next(batches)
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
                self._findings += self._judge.step(_Taken(number, loss, gradients, state, after))
            state = after
        if self._judge is not None:
            self._findings += self._judge.rounding()
        self._bytes(reported_bytes / STEPS, counted, trained=sent_bytes)

    def _bytes(self, reported: float, counted: CountedBytes, *, trained: float) -> None:
        """Hold the bytes per step that strategies report, here and in the last epoch, against those counted.

        Small messages may be in the report or not: statistics of norms and control messages are not, biases are.
        """
        gloo_bytes = math.nan if counted.gloo_bytes is None else counted.gloo_bytes
        counts = [each / STEPS for each in (counted.sent_bytes, counted.control_bytes, gloo_bytes)]
        reported, trained, large, small, on_gloo = self._over_ranks([reported, trained, *counts])
        if why := self._why_bytes_not_counted():
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


class _Taken(NamedTuple):
    """A step that the replica has taken."""

    number: int
    loss: float
    gradients: Mapping[str, Tensor]
    before: Mapping[str, Tensor]
    after: Mapping[str, Tensor]


class _Judge:
    """Rank 0's plain code, on the first of its devices. What doesn't fit its memory is not checked."""

    def __init__(self, model: nn.Module, run: RunConfig, world: World, loader_of: LoaderOf) -> None:
        self._run, self._loader_of = run, loader_of
        self._plain = PlainModel(model, device=world.device, pieces=_pieces(run) or 1)
        self._what = f"{run.global_batch_size} samples in {run.precision}, against fp64 on one device"
        asked = min(run.strategy.parity_tolerance(), WIDEST_TOLERANCE)
        self._least_gradient = max(GRADIENT_FLOORS[run.precision], asked)
        self._least_loss = max(LOSS_FLOORS[run.precision], asked)
        self._gradients: list[tuple[float, float]] = []
        """Of each step, the difference of the gradients, and that of the number format alone."""
        self._loader: BatchLoader | None = None
        self._batches: Iterator[Batch] = iter(())

    def close(self) -> None:
        """Close the loader."""
        if self._loader is not None:
            self._loader.close()

    def evaluation(self, state: Mapping[str, Tensor], *, loss: float, accuracy: float) -> list[Finding]:
        """Hold the last epoch's evaluation against that of the gathered parameters."""
        run = self._run
        try:
            self._loader = self._loader_of(run, Shard())
            self._batches = endless(self._loader, first=run.epochs + 1)
            expected = self._plain.evaluate(state, self._loader.test(), precision=run.precision)
        except torch.OutOfMemoryError:
            return [Finding("evaluation", "one device has too little memory")]
        what = f"{run.data.test_samples} test samples in {run.precision}, gathered parameters"
        floor = LOSS_FLOORS[run.precision]
        off = abs(loss - expected[0]) / max(1.0, abs(expected[0]))
        tie = 1.5 / run.data.test_samples  # one sample whose two best classes are nearly tied
        return [
            Finding("evaluation loss", what, difference=off, limit=floor),
            Finding("evaluation accuracy", what, difference=abs(accuracy - expected[1]), limit=floor + tie),
        ]

    def step(self, taken: _Taken) -> list[Finding]:
        """Hold one step against plain code."""
        try:
            batch = next(self._batches)
            exact = self._plain.step(taken.before, batch, precision="fp64")
            own = exact
            if self._run.precision != "fp64":
                own = self._plain.step(taken.before, batch, precision=self._run.precision)
        except (torch.OutOfMemoryError, StopIteration):
            return [Finding("steps", "one device has too little memory", step=taken.number)]
        gradients = _unscaled(taken.gradients, exact.gradients) if self._run.precision == "fp16" else taken.gradients
        if self._run.precision == "fp16" and not all(g.isfinite().all() for g in gradients.values()):
            return [Finding("steps", "gradients overflowed fp16, so the scaler skipped the step", step=taken.number)]
        return self._compared(taken, gradients, exact=exact, own=own)

    def _compared(
        self, taken: _Taken, gradients: Mapping[str, Tensor], *, exact: PlainStep, own: PlainStep
    ) -> list[Finding]:
        run, findings = self._run, []

        def found(check: str, off: float, rounded: float, floor: float) -> None:
            limit = max(floor, MARGIN * rounded)
            findings.append(Finding(check, self._what, step=taken.number, difference=off, limit=limit))

        loss, own_loss = (_loss_difference(each, exact.loss) for each in (taken.loss, own.loss))
        found("loss", loss, own_loss, self._least_loss)
        if isinstance(run.optimizer, Lbfgs):  # its line search leaves the gradient and statistics of its last point
            return findings
        off, rounded = (relative_difference(each, exact.gradients) for each in (gradients, own.gradients))
        self._gradients.append((off, rounded))
        found("gradients", off, rounded, STEP_FLOOR if run.precision != "fp64" else self._least_gradient)
        stayed = _stayed(taken, exact.gradients, run.optimizer.scaled_lr(run))
        what = "tensors with a gradient that the step left as they were"
        findings.append(Finding("update", what, step=taken.number, difference=float(stayed), limit=0.0))
        if exact.buffers and run.strategy.micro_batches_per_step(run) == 1:
            after = {name: taken.after[name].double() for name in exact.buffers}
            off, rounded = (relative_difference(each, exact.buffers) for each in (after, own.buffers))
            found("buffers", off, rounded, self._least_loss)
        return findings

    def rounding(self) -> list[Finding]:
        """Hold the best of all steps' gradients against what the number format explains."""
        if not self._gradients:
            return []
        off, rounded = min(self._gradients)
        limit = max(self._least_gradient, MARGIN * rounded)
        return [Finding("rounding", f"gradients of the best of {STEPS} steps, {self._what}", None, off, limit)]


def _pieces(run: RunConfig) -> int | None:
    """Slices of a global batch that plain code computes one after the other.

    Where batch statistics are local, each slice has its own, as in training; None where they can't be had so.
    Elsewhere slices only save memory.
    """
    norm, micro_batches = getattr(run.model, "norm", None), run.strategy.micro_batches_per_step(run)
    if norm == "batch":
        return run.strategy.data_parallel_degree(run) * micro_batches
    if norm == "sync":
        return 1 if micro_batches == 1 else None
    return math.gcd(run.global_batch_size, run.devices)


def relative_difference(values: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Over all tensors the largest ‖value − expected‖ ÷ ‖expected‖; infinite where names or shapes differ.

    A tensor smaller than 1 % of all together counts as 1 %. NaN where any value is NaN.
    """
    if values.keys() != expected.keys() or any(values[name].shape != expected[name].shape for name in expected):
        return float("inf")
    norms = torch.stack([tensor.double().norm() for tensor in expected.values()])
    errors = torch.stack([(values[name].double() - expected[name].double()).norm() for name in expected])
    # torch's max, unlike Python's, keeps a NaN.
    return (errors / norms.clamp(min=max(_LEAST_SHARE * norms.norm().item(), 1e-300))).max().item()


def _loss_difference(loss: float, expected: float) -> float:
    return abs(loss - expected) / max(1.0, abs(expected))


def _unscaled(gradients: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Gradients without the loss scale, a power of two that a fused optimizer leaves in them."""
    size, right = (torch.stack([g.double().norm() for g in each.values()]).norm() for each in (gradients, expected))
    if not (size.isfinite() and size > 0 and right > 0):
        return gradients
    scale = 2.0 ** torch.log2(size / right).round().item()
    return {name: gradient / scale for name, gradient in gradients.items()}


def _stayed(taken: _Taken, gradients: Mapping[str, Tensor], lr: float) -> int:
    """Tensors that a step left as they were, though the rate times their gradient is far above their last bit."""
    stayed, largest = 0, max((gradient.abs().max().item() for gradient in gradients.values()), default=0.0)
    for name, gradient in gradients.items():
        if gradient.abs().max().item() <= _NOISE * largest:
            continue
        before, after = taken.before[name], taken.after[name]
        visible = 1024 * torch.finfo(before.dtype).eps * before.abs().max().item()
        if lr * gradient.abs().max().item() > visible:
            stayed += torch.equal(before, after)
    return stayed
