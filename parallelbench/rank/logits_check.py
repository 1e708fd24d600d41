"""Whether a model gives what losses and metrics take: a logit per class for every label."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from parallelbench.errors import ConfigError, count_of, raised_at
from parallelbench.models.inputs import blank
from parallelbench.models.modules import built

if TYPE_CHECKING:
    from torch import nn

    from parallelbench.spec.config import RunConfig

_SAMPLES = 4
"""Or a whole global batch where that is smaller: what removes dimensions of one sees the training's samples."""
_LARGE = 1_000_000
"""Parameters from which a model is called on tensors without values."""


def check_logits(run: RunConfig) -> None:
    """Raise `ConfigError` unless the model maps blank samples to (samples, *label_shape, classes).

    Fewer classes than the data have can't be labels; more would be trained on what no sample is. A language model that
    declares its own vocabulary has that many.
    """
    samples = min(_SAMPLES, run.global_batch_size)
    asked = count_of(samples, "blank sample")
    called = f"model={run.model.name}, built for num_classes={run.data.num_classes} and called on {asked}"
    try:
        found = _output(run, samples)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # a user's model may raise anything
        raise ConfigError(f"{called}, fails: {raised_at(error)}; mend it, or choose another model") from None
    expected = (samples, *run.data.label_shape, run.logits_per_label)
    if not isinstance(found, torch.Tensor):
        raise ConfigError(f"{called}, gives {type(found).__name__}: return one tensor, of shape {expected}")
    if found.shape != expected:
        raise ConfigError(f"{called}, gives shape {tuple(found.shape)}, not {expected}: {_fix(run, found, expected)}")


def _fix(run: RunConfig, found: torch.Tensor, expected: tuple[int, ...]) -> str:
    classes = expected[-1]
    if found.shape[:-1] != expected[:-1]:
        per = "for each position of each sample" if run.data.label_shape else "for each sample"
        return f"return {classes} logits {per}, and no other dimensions"
    if run.data.label_shape and found.shape[-1] > classes:
        return f"let its last layer give {classes} logits, or declare vocabulary_entries={found.shape[-1]} in the model"
    return f"let its last layer give {classes} logits, or correct num_classes of data={run.data.name}"


def _output(run: RunConfig, samples: int) -> Any:
    """What the model gives in evaluation."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # optimizers have loaded it

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        # A user's model may look at values; then it has to get some.
        with contextlib.suppress(Exception), FakeTensorMode(allow_non_fake_inputs=True):
            model = _built(run)
            if sum(each.numel() for each in model.parameters()) >= _LARGE:
                return model(blank(run.data, samples))
        # Small ones get values at once: what code keeps outside its model (a mask in a cache) can be used again.
        return _built(run)(blank(run.data, samples))


def _built(run: RunConfig) -> nn.Sequential:
    return built(run, torch.float32).eval()
