"""How a step of a run differs from the same step on one device: the columns of `parity`. Loads no framework."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from parallelbench.training.checks.likeness import PARITY_TEST_SAMPLES, granted_tolerance

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from parallelbench.config.run import RunConfig

    Arrays = Mapping[str, NDArray[Any]]


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


def parity_row(step: int, observed: ComparedStep, expected: ComparedStep, *, run: RunConfig) -> dict[str, Any]:
    """The columns of `parity` after a step, the first of which is 1; `run`: as it was checked."""
    samples = min(PARITY_TEST_SAMPLES, run.data.test_samples)
    row = {
        "step": step,
        "loss": observed.loss,
        "loss_reference": expected.loss,
        "loss_difference": loss_difference(observed.loss, expected.loss),
        "evaluation_difference": _evaluation_difference(
            observed.evaluated, expected.evaluated, samples, labels=run.data.labels_per_sample
        ),
        "gradient_difference": largest_difference(observed.gradients, expected.gradients, floor=0.0),
        "parameter_difference": largest_difference(observed.state, expected.state, floor=1.0),
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

    Infinite where names, shapes or counters (integer buffers) differ; NaN where any value is NaN.
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
