"""The parity check: which steps are compared with one device before training, and how closely. Loads no framework.

A run's session prepares the strategy and what it is compared with: for torch in `before_training.py`.
"""

from __future__ import annotations

import math
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from parallelbench.config.components import EXACT
from parallelbench.config.run import own_reference
from parallelbench.loaders.order import endless
from parallelbench.optim.optimizers import Adagrad, Adam
from parallelbench.strategies.single import Single
from parallelbench.training.checks.comparability import (
    PARITY_TEST_SAMPLES,
    WIDEST_TOLERANCE,
    granted_tolerance,
    local_statistics,
    uncompared,
    why_in_evaluation,
)
from parallelbench.training.observers import metric_sums

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping, Sequence

    from numpy.typing import NDArray

    from parallelbench.config.components import Optimizer, Traits
    from parallelbench.config.run import RunConfig
    from parallelbench.frameworks import RankWorld

    Arrays = Mapping[str, NDArray[Any]]


_LEAST_EPS = 1e-6
_SAMPLES = 32
"""Approximate samples per step: enough to distinguish a right strategy from a wrong one."""
_CLIP_NORM = 1e-4
"""Largest norm that gradients are clipped to: that of an untrained model's is far larger, also of a squared error."""
_EPOCH_STEPS = 2
"""Steps per epoch of the check, so that three steps pass from one epoch to the next."""


def checks_parity(run: RunConfig) -> bool:
    """Whether to check parity; training on one device is left to the closing check."""
    has_reference = run.strategy.equals_one_device(run) or own_reference(run) is not None
    return run.measure.parity and has_reference and not isinstance(run.strategy, Single)


def as_checked(run: RunConfig) -> RunConfig:
    """The run to check: fp64, small batches, short epochs, and no batch statistics that depend on the split.

    A schedule's changes are moved into the few steps that are compared; gradients are clipped to less than their norms.
    """
    checked = msgspec.structs.replace(
        run,
        precision="fp64",
        compile=False,
        batch_size=_batch_size(run),
        scaling="strong",
        optimizer=_checked_optimizer(run),
        measure=msgspec.structs.replace(
            run.measure,
            steps_per_epoch=_EPOCH_STEPS,
            parity_steps=max(run.measure.parity_steps, run.strategy.least_parity_steps(run)),
        ),
    )
    if run.clip_norm is not None:
        checked = msgspec.structs.replace(checked, clip_norm=min(run.clip_norm, _CLIP_NORM))
    if run.lr_schedule.changes:
        steps = checked.steps_per_epoch
        epochs = -(-checked.measure.parity_steps // steps)
        schedule = run.lr_schedule.shortened(1 / steps)
        checked = msgspec.structs.replace(checked, epochs=epochs, lr_schedule=schedule)
    if local_statistics(run):
        # Micro-batches pass a layer one after the other, so not even synchronised statistics cover the whole batch.
        norm = "sync" if run.strategy.micro_batches_per_step(run) == 1 else "group"
        checked = msgspec.structs.replace(checked, model=msgspec.structs.replace(run.model, norm=norm))
    return checked


def _checked_optimizer(run: RunConfig) -> Optimizer:
    """The run's optimizer with its rate as used, and a denominator that makes no steps of noise.

    Where a gradient is zero in truth (an attention's key bias), Adagrad with eps=1e-10 makes whole steps of its last
    bits, which no two ways of summing share.
    """
    changes: dict[str, Any] = {"lr": run.optimizer.scaled_lr(run), "lr_rule": "constant"}
    if isinstance(run.optimizer, (Adam, Adagrad)):
        changes["eps"] = max(run.optimizer.eps, _LEAST_EPS)
    return msgspec.structs.replace(run.optimizer, **changes)


def _batch_size(run: RunConfig) -> int:
    """A small global batch, so that the check needs little memory and time.

    Where an epoch is one step, the strategy may need the whole training set at once; that is made smaller, too, if it
    can be (`excerpt`).
    """
    return run.global_batch_size if run.steps_per_epoch == 1 else checked_batch_size(run)


def checked_batch_size(run: RunConfig) -> int:
    """A global batch that every split divides, where the training set has more."""
    pieces = run.strategy.data_parallel_degree(run) * run.strategy.micro_batches_per_step(run)
    pieces = math.lcm(pieces, run.devices)
    return min(run.global_batch_size, pieces * -(-_SAMPLES // pieces))


def parity_rows(
    replica: Any,
    loader: Any,
    *,
    run: RunConfig,
    world: RankWorld,
    reference: Callable[[Mapping[str, Any] | None], ComparedStep | None],
    besides: Container[str] = (),
) -> list[dict[str, Any]]:
    """Take the steps of `run`, as it is checked: rows of `parity` on rank 0, elsewhere none. A collective.

    `reference` gives one device's next step, None where there is none. It may begin at the state that the strategy has
    reached, so that a difference is that step's; where it gets None, at its own. `besides`: buffers that are not
    compared.
    """
    rows: list[dict[str, Any]] = []
    before = None
    for step, batch in enumerate(islice(endless(loader), run.measure.parity_steps), start=1):
        expected = reference(before)
        loss, gradients, state = gathered(replica, replica.step(batch), run, world)
        sums = replica.evaluate(loader.test(PARITY_TEST_SAMPLES))
        metric_sums(sums, run)  # refuses a replica that leaves them out
        evaluated = world.total([0.0] * (2 + run.metric_size) if sums is None else sums.tolist())
        if expected is None:
            continue
        observed = ComparedStep(loss, as_arrays(gradients), as_arrays(state), evaluated)
        rows.append(row := _row(step, observed, expected, run=run, besides=besides))
        before = state if math.isfinite(row["parameter_difference"]) else None  # of other shapes, or no numbers
    return rows


def gathered(
    replica: Any, stepped: Any, run: RunConfig, world: RankWorld
) -> tuple[float, dict[str, Any], dict[str, Any]]:
    """What a step has left: the mean loss over the global batch, and on rank 0 gradients and state. A collective.

    `stepped`: what the replica's step has returned.
    """
    loss_sum, _ = world.total([0.0, 0.0] if stepped is None else stepped.tolist())
    return loss_sum / run.global_batch_size, replica.full_gradients(), replica.full_state_dict()


def as_arrays(tensors: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """The same numbers on the host, without a copy where they are there already."""
    return {name: np.asarray(each.detach().cpu() if hasattr(each, "cpu") else each) for name, each in tensors.items()}


DIFFERENCES = ("loss_difference", "gradient_difference", "parameter_difference", "evaluation_difference")
"""Columns of `parity` that must not exceed the tolerance."""
_GROWTH, _MOST_GROWTH = 100.0, 1e5
"""What a further step may make of the rounding of another framework's kernels, and all steps together: deep networks
magnify it, ResNet-50 up to 1,700 times in a step. What is wrong in a step is seen in that step, or in the first."""
_FLIPS = 10
"""A strategy that rounds on purpose flips nearly tied predictions: about this many times more than losses differ."""


class ComparedStep(NamedTuple):
    """What is compared after each step; tensors under torch's names, in torch's layout."""

    loss: float
    """Mean over the global batch."""
    gradients: Arrays
    state: Arrays
    evaluated: Sequence[float]
    """Summed loss and correct predictions of the test samples, and the sums of the run's metric."""


def _row(
    step: int, observed: ComparedStep, expected: ComparedStep, *, run: RunConfig, besides: Container[str]
) -> dict[str, Any]:
    """The columns of `parity` after a step, the first of which is 1."""
    samples = min(PARITY_TEST_SAMPLES, run.data.test_samples)
    states = ({name: each for name, each in step.state.items() if name not in besides} for step in (observed, expected))
    row = {
        "step": step,
        "loss": observed.loss,
        "loss_reference": expected.loss,
        "loss_difference": loss_difference(observed.loss, expected.loss),
        "evaluation_difference": _evaluation_difference(
            observed.evaluated, expected.evaluated, samples, labels=run.data.labels_per_sample
        ),
        "gradient_difference": largest_difference(observed.gradients, expected.gradients, floor=0.0),
        "parameter_difference": largest_difference(*states, floor=1.0),
    }
    return row | _verdict(row, _tolerance(run, step))


def _tolerance(run: RunConfig, step: int) -> float:
    granted = granted_tolerance(run)
    return granted if run.strategy.framework == "torch" else granted * min(_GROWTH ** (step - 1), _MOST_GROWTH)


def _verdict(differences: Mapping[str, float], tolerance: float) -> dict[str, Any]:
    # A NaN compares as False, so it fails.
    return {"tolerance": tolerance, "passed": all(differences[name] <= tolerance for name in DIFFERENCES)}


def loss_difference(loss: float, expected: float) -> float:
    """|loss − expected| ÷ |expected|, or ÷ 1 where that is larger."""
    return abs(loss - expected) / max(1.0, abs(expected))


def _evaluation_difference(
    evaluated: Sequence[float], reference: Sequence[float], samples: int, *, labels: int = 1
) -> float:
    """The largest difference: of the mean loss, or of the accuracy and each of the metric's means ÷ `_FLIPS`.

    `labels`: of each sample. An author's own reference may know nothing of the metric.
    """
    (loss, *sums), (expected_loss, *expected) = evaluated, reference
    pairs = zip(sums, expected, strict=False)
    flipped = [abs(value - other) / max(samples * labels, abs(other)) / _FLIPS for value, other in pairs]
    # numpy's max, unlike Python's, keeps a NaN.
    return float(np.max([loss_difference(loss / samples, expected_loss / samples), *flipped]))


def largest_difference(values: Arrays, expected: Arrays, *, floor: float) -> float:
    """Largest |difference| of a value over all tensors ÷ the largest |expected| value, or ÷ `floor` if that is larger.

    Infinite where names, shapes or counters (integer buffers) differ; NaN where any value is NaN. Not the judge's
    `relative_difference`: one wrong value of a large tensor hardly moves its norm (by 0.001 where a weight's gradient
    is off by 5 % of the largest), and a strategy that rounds may differ by more (`WIDEST_TOLERANCE`).
    """
    if values.keys() != expected.keys() or any(values[name].shape != expected[name].shape for name in expected):
        return float("inf")
    floats = [name for name in expected if np.issubdtype(expected[name].dtype, np.inexact)]
    if any(not np.array_equal(values[name], expected[name]) for name in expected.keys() - set(floats)):
        return float("inf")
    # numpy's max, unlike Python's, keeps a NaN.
    pairs = [(_wide(values[name]), _wide(expected[name])) for name in floats]
    worst = float(np.max([np.abs(value - reference).max(initial=0.0) for value, reference in pairs]))
    scale = max(floor, float(np.max([np.abs(reference).max(initial=0.0) for _, reference in pairs])))
    return worst / scale if scale else worst


def _wide(values: NDArray[Any]) -> NDArray[Any]:
    return values.astype(np.result_type(values.dtype, np.float64), copy=False)


def statistics_warnings(run: RunConfig) -> list[str]:
    """Why a run does not train like one device, although its strategy could."""
    if not local_statistics(run):
        return []
    piece = "data shard" if run.strategy.micro_batches_per_step(run) == 1 else "micro-batch"
    norm, like_one_device = run.model.norm, as_checked(run).model.norm  # type: ignore[attr-defined]
    text = f"model.norm={norm} normalises each {piece} by its own statistics, so training differs from one device"
    if not checks_parity(run):
        return [text]
    return [f"{text}; parity was checked with model.norm={like_one_device}: choose that to train like one device"]


def tolerance_warnings(run: RunConfig) -> list[str]:
    """What a strategy asks of the checks, where that is more than an exact one needs."""
    asked = run.strategy.parity_tolerance()
    if asked <= EXACT or not checks_parity(run):
        return []
    granted = "" if asked <= WIDEST_TOLERANCE else f", of which {WIDEST_TOLERANCE:g} was granted"
    return [f"parity was checked with the tolerance {asked:g} that the strategy asks for, not {EXACT:g}{granted}"]


def traits_warnings(run: RunConfig, traits: Traits) -> list[str]:
    """What a reader must know of a model of one's own."""
    texts = []
    if why := why_in_evaluation(run, traits):
        checked = "parity was not checked, as it does so in evaluation, too"
        if not traits.draws_in_evaluation:
            checked = f"{'parity' if checks_parity(run) else 'the closing check'} compared it in evaluation mode"
        texts.append(f"{why}; {checked}")
    if traits.generators and run.devices > 1:
        texts.append(
            f"model={run.model.name} holds generators of its own ({', '.join(traits.generators)}): all ranks draw the "
            "same from them"
        )
    if traits.draws_elsewhere:
        texts.append(
            f"model={run.model.name} draws from a torch.Generator that none of its modules holds, so a resumed run "
            "draws other numbers: make it an attribute of the module that draws"
        )
    if left_out := uncompared(run, traits):
        texts.append(f"{', '.join(left_out)} count micro-batches, so they were not compared with one device's")
    if held := (*traits.complex_parameters, *traits.complex_buffers):
        kind = "complex128" if run.precision == "fp64" else "complex64"
        texts.append(f"{', '.join(held)} of model={run.model.name} are complex: they are {kind} in training")
    return texts


def parity_reference(run: RunConfig) -> str | None:
    """The class of the author's own reference that parity is checked against; None: one device, or not checked."""
    reference = own_reference(run) if checks_parity(run) else None
    return None if reference is None else f"{type(reference).__module__}.{type(reference).__qualname__}"


def reference_warnings(run: RunConfig) -> list[str]:
    """What a run was held against, where that is not one device."""
    name = parity_reference(run)
    if name is None:
        return []
    return [f"parity was checked against the strategy's own reference, {name}, which its author gives: not one device"]
