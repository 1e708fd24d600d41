"""The judge: a step of a run beside the same step in plain code on one device, and the limits of what may differ."""

from __future__ import annotations

import math
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch

from parallelbench.config.components import EXACT, TRAITS, Shard
from parallelbench.loaders.order import endless
from parallelbench.optim.optimizers import Lbfgs
from parallelbench.training.checks.comparability import Finding, granted_tolerance, pieces_of
from parallelbench.training.checks.parity import loss_difference
from parallelbench.training.checks.plain import PlainModel, PlainOptimizer, TooSlowError, clipped, kept_of_one
from parallelbench.world.generators import Generators
from parallelbench.world.numerics import as_real, wide

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor, nn

    from parallelbench.config.components import Batch, Traits
    from parallelbench.config.run import RunConfig
    from parallelbench.loaders.order import BatchLoader, LoaderOf
    from parallelbench.training.checks.plain import PlainStep
    from parallelbench.world.world import World


_NOISE = 1e-9
"""A gradient in fp64 that is this much smaller than the largest is rounding: in truth it may be zero, as an attention's
key bias's is, and a strategy that rounds gradients leaves such a tensor where it began."""
_LEAST_SHARE = 0.01
"""A tensor counts at least as this share of all gradients: one that is zero in truth holds nothing but rounding."""


def relative_difference(values: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Over all tensors the largest ‖value − expected‖ ÷ ‖expected‖; infinite where names or shapes differ.

    A tensor smaller than 1 % of all together counts as 1 %. NaN where any value is NaN. Not parity's
    `largest_difference`: limits here may be 0.4, and where a small tensor is wrong as a whole, that differs by less
    (0.18 where cnn_small's smallest gradient is missing, and 1.0 by this).
    """
    if (pairs := _pairs(values, expected)) is None:
        return float("inf")
    norms = torch.stack([tensor.norm() for _, tensor in pairs])
    errors = torch.stack([(value - tensor).norm() for value, tensor in pairs])
    return (errors / norms.clamp(min=max(_LEAST_SHARE * norms.norm().item(), 1e-300))).max().item()


def least_difference(values: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The smallest ‖value − expected‖ ÷ ‖expected‖ of a tensor; infinite where names or shapes differ.

    A ReLU that flips changes the gradients before it, but not those after it: the last layer's differ by no more than
    the number format explains. Gradients that were rounded to be sent all differ by more.
    """
    if (pairs := _pairs(values, expected)) is None:
        return float("inf")
    sized = [(value, tensor) for value, tensor in pairs if tensor.any()]
    return min(((value - tensor).norm() / tensor.norm()).item() for value, tensor in sized) if sized else 0.0


def size_difference(values: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """|⟨values, expected⟩ ÷ ⟨expected, expected⟩ − 1| of all tensors together: of noise, little lies along `expected`.

    Infinite where names or shapes differ; NaN where any value is NaN.
    """
    if (pairs := _pairs(values, expected)) is None:
        return float("inf")
    along = sum((value * tensor).sum().item() for value, tensor in pairs)
    square = sum(tensor.square().sum().item() for _, tensor in pairs)
    return abs(along - square) / max(square, 1e-300)


def update_difference(updates: Mapping[str, tuple[Tensor, Tensor, Tensor]], *, limit: float) -> float:
    """Over all tensors the largest ‖after − expected‖ ÷ (‖expected − before‖ + 2ε ‖after‖ ÷ limit).

    `updates`: of each tensor its values before and after a step, and those expected after it, in fp64. ε, the unit
    roundoff of what is stored, bounds what rounding does to `after`. So it alone never makes a difference of more than
    half of `limit`, however small the step. NaN where any value is NaN.
    """
    differences = []
    for before, after, expected in updates.values():
        unseen = torch.finfo(after.dtype).eps * wide(after).norm() / limit
        size = (expected - wide(before)).norm() + unseen
        differences.append((wide(after) - expected).norm() / size.clamp(min=1e-300))
    return torch.stack(differences).max().item() if differences else 0.0


def unmoved(
    before: Mapping[str, Tensor], after: Mapping[str, Tensor], gradients: Mapping[str, Tensor], lr: float
) -> int:
    """Tensors that a step left as they were, though the rate times their gradient is far above their last bit."""
    filled = {name: gradient for name, gradient in gradients.items() if gradient.numel()}
    stayed, largest = 0, max((gradient.abs().max().item() for gradient in filled.values()), default=0.0)
    for name, gradient in filled.items():
        if gradient.abs().max().item() <= _NOISE * largest:
            continue
        visible = 1024 * torch.finfo(before[name].dtype).eps * before[name].abs().max().item()
        if lr * gradient.abs().max().item() > visible:
            stayed += torch.equal(before[name], after[name])
    return stayed


def _pairs(values: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]] | None:
    """Each value with the one expected, in fp64; None where names or shapes differ."""
    pairs = [(wide(values[name]), wide(tensor)) for name, tensor in expected.items() if name in values]
    same = values.keys() == expected.keys() and all(value.shape == tensor.shape for value, tensor in pairs)
    return pairs if same else None


RESOLUTION = "resolution"
"""The check that sees a coarser number format, as of messages."""

DRAWS_ALWAYS = "the model draws random numbers in evaluation, too"

MARGIN = 8.0
LARGEST_LIMIT = 0.4
"""No limit is larger: gradients half as large as they should be, or twice, or none, differ by 0.5 or more."""
COARSEST = 0.1
"""Where the number format alone changes more than this share, tensors say nothing about the strategy."""
STEP_FLOOR = 0.1
"""Least limit of the gradients of each step, relative: a ReLU that flips changes them by 2 %."""
GRADIENT_FLOORS = {"fp64": 1e-9, "fp32": 5e-3, "tf32": 1e-2, "fp16": 2e-2, "bf16": 5e-2}
"""Least limit of the gradients of the best step, relative."""
LOSS_FLOORS = {"fp64": 1e-9, "fp32": 1e-4, "tf32": 1e-2, "fp16": 1e-2, "bf16": 5e-2}
"""Least limit of losses, of an evaluation, and of buffers, relative; predictions may differ by as large a share."""
LEAST_FLOORS = {"fp32": 5e-5}
"""Least limit of the tensor that agrees best, relative. Rounding to fp16 changes a tensor by 1.9e-4, to bf16 by eight
times as much; fp32 itself changes the last layer's gradient by some 1e-6, with torch's kernels on both sides."""
UPDATE_LIMITS = {"fp64": 1e-9}
"""Largest difference of an update, from the gradients that the step has left; of other precisions `_UPDATE_LIMIT`."""
_UPDATE_LIMIT = 1e-3


class Taken(NamedTuple):
    """A step that the replica has taken."""

    number: int
    loss: float
    gradients: Mapping[str, Tensor]
    before: Mapping[str, Tensor]
    after: Mapping[str, Tensor]
    scale: float
    """Factor of the loss in its backward (fp16)."""


_TOO_LITTLE = "one device has too little memory"


class Judge:
    """Rank 0's plain code, on the first of its devices. What doesn't fit its memory, or its time, is not checked."""

    def __init__(
        self,
        model: nn.Module,
        run: RunConfig,
        world: World,
        loader_of: LoaderOf,
        *,
        traits: Traits = TRAITS,
        budget_s: float = math.inf,
    ) -> None:
        """`budget_s`: for each step and each evaluation, while other ranks wait."""
        self._budget_s, self._is_slow = budget_s, False
        self._run, self._loader_of, self._traits = run, loader_of, traits
        loss = run.model.with_own_loss(run.loss.build())
        self._model = model
        self._plain = PlainModel(model, loss, device=world.device, pieces=pieces_of(run, traits) or 1)
        formats = " and ".join(dict.fromkeys(("fp64", run.precision)))
        self._what = f"{run.global_batch_size} samples in {run.precision}, against one device in {formats}"
        if traits.draws:
            self._what += "; in evaluation mode, since the model draws random numbers"
        granted = granted_tolerance(run)
        self._least_gradient = max(GRADIENT_FLOORS[run.precision], granted)
        self._least_loss = max(LOSS_FLOORS[run.precision], granted)
        self._optimizer: PlainOptimizer | None = None
        self._why_no_updates = ""
        self._gradients: list[tuple[float, float]] = []
        """Of each step, the difference of the gradients, and that of the number format alone."""
        self._least: list[tuple[float, float]] = []
        """Likewise, of the tensor that agrees best."""
        self._loader: BatchLoader | None = None
        self._batches: Iterator[Batch] = iter(())

    def close(self) -> None:
        """Close the loader."""
        if self._loader is not None:
            self._loader.close()

    def evaluation(self, state: Mapping[str, Tensor], loss: float, accuracy: float) -> list[Finding]:
        """Hold an evaluation against that of the gathered parameters."""
        run = self._run
        try:
            if self._loader is None:
                self._loader = self._loader_of(run, Shard())
                self._batches = endless(self._loader, first=run.epochs + 1)
            self._begin()
            loss_sum, correct = self._plain.evaluate(state, self._loader.test(), precision=run.precision)
        except torch.OutOfMemoryError:
            return [Finding("evaluation", _TOO_LITTLE)]
        except TooSlowError:
            self._is_slow = True
            return [Finding("evaluation", self._too_slow)]
        if self._traits.draws_in_evaluation:
            return [Finding("evaluation", DRAWS_ALWAYS)]
        what = f"{run.data.test_samples} test samples in {run.precision}, gathered parameters"
        floor = LOSS_FLOORS[run.precision]
        off = loss_difference(loss, loss_sum / run.data.test_samples)
        off_by = abs(accuracy - correct / (run.data.test_samples * run.data.labels_per_sample))
        tie = 1.5 / run.data.test_samples  # one sample whose two best classes are nearly tied
        return [
            Finding("evaluation loss", what, difference=off, limit=floor),
            Finding("evaluation accuracy", what, difference=off_by, limit=floor + tie),
        ]

    def _begin(self) -> None:
        self._plain.deadline = time.perf_counter() + self._budget_s

    @property
    def _too_slow(self) -> str:
        return (
            f"one device alone takes longer than {self._budget_s:g} s for it, half of what ranks wait for each other "
            "(launcher.collective_timeout_s)"
        )

    def threads(self, state: Mapping[str, Tensor]) -> list[Finding]:
        """Hold one step from `state` on all threads of this process against the same step on one, in fp64 too."""
        precision = self._run.precision
        self._loader = self._loader_of(self._run, Shard())
        batch = next(endless(self._loader))

        def step(precision: str) -> PlainStep:
            generators = Generators()
            with generators.unchanged():
                generators.seed(0)  # all steps draw the same numbers
                return self._plain.step(state, batch, precision=precision)

        several = step(precision)
        with _one_thread():
            exact, own = step("fp64"), step(precision)
        taken = Taken(1, several.loss, several.gradients, state, state, 1.0)
        off, rounded = (loss_difference(each.loss, exact.loss) for each in (several, own))
        loss = self._finding("loss", 1, off, rounded=rounded, floor=self._least_loss)
        return [loss, self._held_gradients(taken, exact=exact, own=own)]

    def begin_updates(self, state: Mapping[str, Mapping[str, Tensor]], *, before: int) -> None:
        """Update as the run's optimizer does from here on, from its gathered state: key → parameter → tensor; `before`:
        steps that it has taken.
        """
        examples, why = kept_of_one(self._run)
        self._why_no_updates = why or (
            "" if state.keys() == examples.keys() else "the strategy does not gather its state"
        )
        if not self._why_no_updates:
            # In fp16 the scaler skips steps.
            steps = None if self._run.precision == "fp16" else before
            self._optimizer = PlainOptimizer(self._run, self._model, state, examples, steps=steps)

    def step(self, taken: Taken) -> list[Finding]:
        """Hold one step against plain code."""
        run = self._run
        if self._is_slow:
            return [Finding("steps", self._too_slow, step=taken.number)]
        try:
            self._begin()
            batch = next(self._batches)
            exact = self._plain.step(taken.before, batch, precision="fp64")
            own = exact
            if run.precision != "fp64":
                own = self._plain.step(taken.before, batch, precision=run.precision, scale=taken.scale)
        except (torch.OutOfMemoryError, StopIteration):
            return [Finding("steps", _TOO_LITTLE, step=taken.number)]
        except TooSlowError:
            self._is_slow = True
            return [Finding("steps", self._too_slow, step=taken.number)]
        if run.precision == "fp16":
            taken = taken._replace(gradients=_unscaled(taken.gradients, taken.scale, exact.gradients))
            if not all(gradient.isfinite().all() for gradient in taken.gradients.values()):
                return [Finding("steps", "gradients overflowed fp16, so the scaler skipped the step", taken.number)]
        return self._compared(taken, exact=exact, own=own)

    def _compared(self, taken: Taken, *, exact: PlainStep, own: PlainStep) -> list[Finding]:
        run = self._run
        off, rounded = (loss_difference(each, exact.loss) for each in (taken.loss, own.loss))
        findings = [self._finding("loss", taken.number, off, rounded=rounded, floor=self._least_loss)]
        if isinstance(run.optimizer, Lbfgs):
            why = "a line search leaves the gradient and statistics of its last point"
            return [*findings, Finding("gradients", why, taken.number), Finding("update", why, taken.number)]
        findings += [self._held_gradients(taken, exact=exact, own=own), self._update(taken, exact)]
        gathered = exact.buffers.keys() & taken.after.keys()  # what is not persistent is in no state
        if gathered and run.strategy.micro_batches_per_step(run) == 1:
            expected, after, rounding = (
                {name: each[name] for name in gathered} for each in (exact.buffers, taken.after, own.buffers)
            )
            off = relative_difference({name: as_real(each) for name, each in after.items()}, expected)
            rounded = relative_difference(rounding, expected)
            findings.append(self._finding("buffers", taken.number, off, rounded=rounded, floor=self._least_loss))
        return findings

    def _held_gradients(self, taken: Taken, *, exact: PlainStep, own: PlainStep) -> Finding:
        """Tensor by tensor; where the number format leaves nothing to see in them, their size as a whole."""
        rounded = relative_difference(own.gradients, exact.gradients)
        off = min(relative_difference(taken.gradients, each.gradients) for each in (exact, own))
        self._gradients.append((off, rounded))
        least = min(least_difference(taken.gradients, each.gradients) for each in (exact, own))
        self._least.append((least, least_difference(own.gradients, exact.gradients)))
        floor = STEP_FLOOR if self._run.precision != "fp64" else self._least_gradient
        found = self._finding("gradients", taken.number, off, rounded=rounded, floor=floor)
        if found.limit is not None:
            return found
        size = min(size_difference(taken.gradients, each.gradients) for each in (exact, own))
        by_format = size_difference(own.gradients, exact.gradients)
        limit = min(max(STEP_FLOOR, MARGIN * by_format), LARGEST_LIMIT)
        return found._replace(detail=f"{found.detail}; their size as a whole", difference=size, limit=limit)

    def _finding(self, check: str, step: int | None, off: float, *, rounded: float, floor: float) -> Finding:
        """`rounded`: what the number format alone changes."""
        if not (off <= floor or rounded <= COARSEST):
            return Finding(check, f"{self._run.precision} alone changes this on one device by {rounded:.2g}", step)
        limit = min(max(floor, MARGIN * rounded), LARGEST_LIMIT)
        return Finding(check, self._what, step, difference=off, limit=limit)

    def _update(self, taken: Taken, exact: PlainStep) -> Finding:
        """Hold what the step changed against the optimizer's update by the gradients that the step has left."""
        if self._optimizer is None:
            rate = self._run.optimizer.scaled_lr(self._run)
            stayed = unmoved(taken.before, taken.after, clipped(exact.gradients, self._run.clip_norm), rate)
            what = "tensors with a gradient that the step left as they were; how far it moves them is not checked"
            what = ": ".join(filter(None, (what, self._why_no_updates)))
            return Finding("update", what, taken.number, difference=float(stayed), limit=0.0)
        expected = self._optimizer.step(taken.before, clipped(taken.gradients, self._run.clip_norm))
        moved = {name: (taken.before[name], taken.after[name], each) for name, each in expected.items()}
        what = f"against {self._run.optimizer.name} in fp64, from the gathered state and gradients"
        limit = UPDATE_LIMITS.get(self._run.precision, _UPDATE_LIMIT)
        return Finding("update", what, taken.number, difference=update_difference(moved, limit=limit), limit=limit)

    def rounding(self) -> list[Finding]:
        """Hold the best of all steps' gradients against what the number format explains."""
        if not self._gradients:
            return []
        off, rounded = min(self._gradients)
        found = self._finding("rounding", None, off, rounded=rounded, floor=self._least_gradient)
        best = f"of the best of {len(self._gradients)} steps: {found.detail}"
        findings = [found._replace(detail=f"gradients {best}")]
        floor = LEAST_FLOORS.get(self._run.precision) if self._run.strategy.framework == "torch" else None
        if floor is not None and granted_tolerance(self._run) <= EXACT:
            off, rounded = min(self._least)
            found = self._finding(RESOLUTION, None, off, rounded=rounded, floor=floor)
            findings.append(found._replace(detail=f"the gradient that agrees best, {best}"))
        return findings


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _unscaled(gradients: Mapping[str, Tensor], scale: float, expected: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Gradients without the loss scale, which a fused optimizer leaves in them and another one doesn't."""
    both = (gradients, {name: gradient / scale for name, gradient in gradients.items()})
    return min(both, key=lambda each: relative_difference(each, expected))
