"""What a wrong gradient is, where it is one that strategies return by mistake: one rank's own, or a multiple."""

from __future__ import annotations

from copy import deepcopy
from itertools import chain, count
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from parallelbench.config.components import TRAITS, Shard
from parallelbench.measure.memory import release
from parallelbench.training.checks.differences import ComparedStep, largest_difference, parity_row
from parallelbench.training.checks.likeness import PARITY_TEST_SAMPLES, as_reference, uncompared, why_in_evaluation
from parallelbench.training.checks.plain import stay_in_evaluation
from parallelbench.training.observers import metric_sums
from parallelbench.training.replica import new_reference, new_replica
from parallelbench.world.numerics import set_precision
from parallelbench.world.world import World

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Mapping

    from numpy.typing import NDArray
    from torch import Tensor, nn

    from parallelbench.config.components import Batch, Traits
    from parallelbench.config.replica import Replica
    from parallelbench.config.run import RunConfig
    from parallelbench.loaders.order import BatchLoader

    Arrays = Mapping[str, NDArray[Any]]
    LoaderOf = Callable[[RunConfig, Shard], BatchLoader]


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


def check_parity(
    model: nn.Sequential,
    run: RunConfig,
    world: World,
    loader_of: LoaderOf,
    *,
    hint: Callable[[str], None] | None = None,
    traits: Traits = TRAITS,
) -> list[dict[str, Any]] | None:
    """Compare the strategy of `run` (see `as_checked`) with its reference (see `as_reference`).

    Returns the rows of `parity` on rank 0 and an empty list elsewhere; None where the model doesn't fit one device, so
    that there is no reference. `model` is the initial state, on the CPU and identical on every rank; it is
    left as it is, but for its mode (`why_in_evaluation`). `hint` is called with what a wrong gradient is, where that is
    known.
    """
    set_precision(run.precision)
    if why_in_evaluation(run, traits):
        stay_in_evaluation(model)
    left_out = uncompared(run, traits)
    replica = new_replica(deepcopy(model), run, world)
    reference = Reference(model, run, world, loader_of) if world.rank == 0 else None
    rows: list[dict[str, Any]] = []
    loader = loader_of(run, replica.data_shard)
    batches = endless(loader)
    for step in range(1, run.measure.parity_steps + 1):
        batch = next(batches)
        stepped = replica.step(batch)
        loss_sum = _over_ranks(None if stepped is None else stepped.tensor(), world, size=2)[0]
        gradients, state = replica.full_gradients(), replica.full_state_dict()
        evaluated = _over_ranks(_evaluated(replica, loader, run), world, size=2 + run.metric_size)
        expected = None if reference is None else reference.step()
        if expected is not None:
            loss = loss_sum / run.global_batch_size
            observed = ComparedStep(loss, on_the_host(gradients), _without(left_out, on_the_host(state)), evaluated)
            expected = expected._replace(state=_without(left_out, expected.state))
            rows.append(parity_row(step, observed, expected, run=run))
            if step == 1 and hint is not None and rows[-1]["gradient_difference"] > rows[-1]["tolerance"]:
                found = gradient_hint(model, batch, observed=observed, expected=expected, run=run, world=world)
                if found is not None:
                    hint(found)
    replica.close()
    loader.close()
    if reference is not None:
        reference.close()
    return None if reference is not None and reference.out_of_memory else rows


class Reference:
    """One device's training on the first of rank 0's devices, outside any process group."""

    def __init__(self, model: nn.Sequential, run: RunConfig, world: World, loader_of: LoaderOf) -> None:
        self._run, self.out_of_memory = as_reference(run), False
        self._loader: BatchLoader | None = None
        alone = World(device_type=world.device_type, devices=world.devices[:1])
        try:
            self.replica: Replica = new_reference(deepcopy(model), self._run, alone)
            self._loader = loader_of(self._run, Shard())
            self._batches = endless(self._loader)
        except torch.OutOfMemoryError:
            self.out_of_memory = True
        if self.out_of_memory:
            self._give_up()

    def close(self) -> None:
        """Close its loader."""
        if self._loader is not None:
            self._loader.close()
        self._loader = None

    def _give_up(self) -> None:
        """Leave the memory to the strategy: the other ranks go on, and wait for this one in its collectives.

        Not while the error is handled, since its traceback holds the tensors of the step.
        """
        self.close()
        for name in ("replica", "_batches"):
            self.__dict__.pop(name, None)
        release()

    def step(self) -> ComparedStep | None:
        """Train on the next batch and evaluate; None after the memory was too small."""
        if self.out_of_memory:
            return None
        try:
            return self._stepped()
        except torch.OutOfMemoryError:
            self.out_of_memory = True
        self._give_up()
        return None

    def _stepped(self) -> ComparedStep:
        assert self._loader is not None
        sums = self.replica.step(next(self._batches))
        evaluated = self.replica.evaluate(self._loader.test(PARITY_TEST_SAMPLES))
        assert sums is not None
        assert evaluated is not None
        loss = sums[0].item() / self._run.global_batch_size
        gradients, state = on_the_host(self.replica.full_gradients()), on_the_host(self.replica.full_state_dict())
        return ComparedStep(loss, gradients, state, evaluated.tolist())


def _evaluated(replica: Replica, loader: BatchLoader, run: RunConfig) -> Tensor | None:
    """A rank's sums; refuses a replica that leaves the metric's out."""
    sums = replica.evaluate(loader.test(PARITY_TEST_SAMPLES))
    metric_sums(sums, run)
    return sums


def _over_ranks(result: Tensor | None, world: World, *, size: int) -> list[float]:
    """Loss, correct predictions and what follows them, summed over all ranks."""
    total: list[float] = world.sum(torch.zeros(size, dtype=torch.float64) if result is None else result.cpu()).tolist()
    return total


def _without(names: Container[str], arrays: Mapping[str, NDArray[np.generic]]) -> dict[str, NDArray[np.generic]]:
    return {name: array for name, array in arrays.items() if name not in names}


def endless(loader: BatchLoader, *, first: int = 1) -> Iterator[Batch]:
    """Batches of one epoch after the other: some epochs have fewer steps than the check."""
    return chain.from_iterable(map(loader.train, count(first)))


def on_the_host(tensors: Mapping[str, Tensor]) -> dict[str, NDArray[np.generic]]:
    """The same numbers as arrays, without a copy where they are on the CPU already."""
    return {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}
