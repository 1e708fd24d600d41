"""What a wrong gradient is, where it is one that strategies return by mistake: one rank's own, or a multiple."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING

import numpy as np
import torch

from parallelbench.rank.checked_run import as_reference
from parallelbench.rank.step_differences import largest_difference
from parallelbench.world.world import World

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from numpy.typing import NDArray
    from torch import nn

    from parallelbench.rank.step_differences import ComparedStep
    from parallelbench.spec.batch import Batch
    from parallelbench.spec.config import RunConfig

    Arrays = Mapping[str, NDArray[Any]]

_SAME = 1e-6
"""Two gradients in fp64 point the same way if they differ by at most this, once they are of one length."""


def gradient_hint(
    model: nn.Sequential, batch: Batch, *, observed: ComparedStep, expected: ComparedStep, run: RunConfig, world: World
) -> str | None:
    """What rank 0's gradient of the first step is instead of the mean over the global batch; None: not known.

    `model`: the initial one; `batch`: what rank 0 was given of the global batch. Called on rank 0 alone.
    """
    times = _multiple(observed.gradients, expected.gradients)
    if times is not None:
        if abs(times - 1) <= _SAME:
            return None  # something else is wrong
        return f"the gradient is {times:.4g} times the mean over the global batch: return the mean, not a sum"
    if batch.images is None or batch.labels is None or len(batch.labels) == run.global_batch_size:
        return None
    own = _own_gradients(model, batch, run, world)
    if own is None or _multiple(observed.gradients, own) is None:
        return None
    return (
        f"the gradient is that of rank 0's own {len(batch.labels)} samples, not the mean over all "
        f"{run.global_batch_size}: average it over the ranks before the step, and return the mean from full_gradients"
    )


def _own_gradients(model: nn.Sequential, batch: Batch, run: RunConfig, world: World) -> Arrays | None:
    """What one device has of this part of a batch, up to a factor; None where its memory is too small."""
    alone = World(device_type=world.device_type, devices=world.devices[:1])
    reference = as_reference(run)
    try:
        replica = reference.strategy.prepare(deepcopy(model), reference, alone)
        replica.step(batch)
        return {name: tensor.detach().cpu().numpy() for name, tensor in replica.full_gradients().items()}
    except torch.OutOfMemoryError:
        return None


def _multiple(values: Arrays, of: Arrays) -> float | None:
    """The factor by which `values` are a multiple of other gradients; None where they are none."""
    if values.keys() != of.keys() or any(values[name].shape != of[name].shape for name in of):
        return None
    along = sum(float(np.vdot(values[name], of[name])) for name in of)
    square = sum(float(np.vdot(of[name], of[name])) for name in of)
    factor = along / square if square else 0.0
    if not factor:
        return None
    same = largest_difference(values, {name: factor * array for name, array in of.items()}, floor=0.0)
    return factor if same <= _SAME else None
