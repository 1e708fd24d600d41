"""The parity gate: a strategy must train like one device.

From one initial state, `k` steps by the strategy and `k` steps by one device on the same global batches; losses,
gradients, parameters and an evaluation are compared after each. The check always runs in fp64, since it judges the
strategy, not rounding. In fp32, correct strategies differed by up to 4e-3: a sum in another order flips ReLUs, and
Adam turns the noise of gradients near zero into whole steps. In fp64, correct strategies agree to 1e-9 and wrong ones
don't.
"""

from __future__ import annotations

import math
from copy import deepcopy
from itertools import chain, count
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch

from parallelbench.loaders.batch import Shard
from parallelbench.optimizers import Adagrad, Adam
from parallelbench.probes.memory_probe import release
from parallelbench.rank.differences import largest_difference, loss_difference
from parallelbench.rank.numerics import set_precision
from parallelbench.rank.world import World
from parallelbench.strategies.single import Single

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor, nn

    from parallelbench.loaders.batch import Batch
    from parallelbench.loaders.batch_loader import BatchLoader
    from parallelbench.spec.config import Optimizer, RunConfig
    from parallelbench.strategies.replica import Replica

    LoaderOf = Callable[[RunConfig, Shard], BatchLoader]

DIFFERENCES = ("loss_difference", "gradient_difference", "parameter_difference", "evaluation_difference")
"""Columns of `parity` that must not exceed the tolerance."""
_LEAST_EPS = 1e-6
_SAMPLES = 32
"""Approximate samples per step: enough to distinguish a right strategy from a wrong one."""
_TEST_SAMPLES = 37
"""Test samples that are evaluated after each step: a prime number, so that every split makes unequal parts."""
WIDEST_TOLERANCE = 0.05
"""Most that a strategy may ask for (`Strategy.parity_tolerance`): what gradients rounded to bf16 need."""
_EPOCH_STEPS = 2
"""Steps per epoch of the check, so that three steps pass from one epoch to the next."""
_FLIPS = 10
"""A strategy that rounds on purpose flips nearly tied predictions: about this many times more than losses differ."""


def as_checked(run: RunConfig) -> RunConfig:
    """The run to check: fp64, small batches, short epochs, and no batch statistics that depend on the split."""
    checked = msgspec.structs.replace(
        run,
        precision="fp64",
        compile=False,
        batch_size=_batch_size(run),
        scaling="strong",
        optimizer=_checked_optimizer(run),
        measure=msgspec.structs.replace(run.measure, steps_per_epoch=_EPOCH_STEPS),
    )
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
    """A global batch that every split divides, small so that the check needs little memory and time.

    Where an epoch is one step, the strategy may need the whole training set at once.
    """
    if run.steps_per_epoch == 1:
        return run.global_batch_size
    pieces = run.strategy.data_parallel_degree(run) * run.strategy.micro_batches_per_step(run)
    pieces = math.lcm(pieces, run.devices)
    return min(run.global_batch_size, pieces * -(-_SAMPLES // pieces))


def granted_tolerance(run: RunConfig) -> float:
    """What the strategy asks for, up to the most that one may."""
    return min(run.strategy.parity_tolerance(), WIDEST_TOLERANCE)


def statistics_pieces(run: RunConfig) -> int | None:
    """Equal pieces of a global batch that batch normalisation takes its statistics of; None where pieces overlap."""
    norm, micro_batches = getattr(run.model, "norm", None), run.strategy.micro_batches_per_step(run)
    if norm == "batch":
        return run.strategy.data_parallel_degree(run) * micro_batches
    return None if norm == "sync" and micro_batches > 1 else 1


def local_statistics(run: RunConfig) -> bool:
    """Whether batch normalisation sees only a part of each global batch, so that no split can equal one device."""
    return statistics_pieces(run) != 1


def as_reference(run: RunConfig) -> RunConfig:
    """The same training on one device."""
    return msgspec.structs.replace(
        run,
        strategy=Single(name="single"),
        optimizer=msgspec.structs.replace(run.optimizer, lr=run.optimizer.scaled_lr(run), lr_rule="constant"),
        batch_size=run.global_batch_size,
        scaling="strong",
        devices=1,
        nodes=1,
        graph=False,
    )


def check_parity(
    model: nn.Sequential, run: RunConfig, world: World, loader_of: LoaderOf
) -> list[dict[str, Any]] | None:
    """Compare the strategy of `run` (see `as_checked`) with one device.

    Returns the rows of `parity` on rank 0 and an empty list elsewhere; None where the model doesn't fit one device, so
    that there is no reference. `model` is the initial state, on the CPU and identical on every rank; it is
    left as it is.
    """
    set_precision(run.precision)
    replica = run.strategy.prepare(deepcopy(model), run, world)
    reference = _Reference(model, run, world, loader_of) if world.rank == 0 else None
    rows: list[dict[str, Any]] = []
    loader = loader_of(run, replica.data_shard)
    batches = endless(loader)
    for step in range(1, run.measure.parity_steps + 1):
        stepped = replica.step(next(batches))
        loss_sum = _over_ranks(None if stepped is None else stepped.tensor(), world)[0]
        gradients, state = replica.full_gradients(), replica.full_state_dict()
        evaluated = _over_ranks(replica.evaluate(loader.test(_TEST_SAMPLES)), world)
        expected = None if reference is None else reference.step()
        if expected is not None:
            observed = _Step(loss_sum / run.global_batch_size, gradients, state, evaluated)
            row = _differences(observed, expected, samples=min(_TEST_SAMPLES, run.data.test_samples))
            rows.append({"step": step, **row, **_verdict(row, granted_tolerance(run))})
    replica.close()
    loader.close()
    if reference is not None:
        reference.close()
    return None if reference is not None and reference.out_of_memory else rows


class _Step(NamedTuple):
    """What is compared after each step."""

    loss: float
    """Mean over the global batch."""
    gradients: Mapping[str, Tensor]
    state: Mapping[str, Tensor]
    evaluated: list[float]
    """Summed loss and correct predictions of the test samples."""


class _Reference:
    """One device's training on the first of rank 0's devices, outside any process group."""

    def __init__(self, model: nn.Sequential, run: RunConfig, world: World, loader_of: LoaderOf) -> None:
        self._run, self.out_of_memory = as_reference(run), False
        self._loader: BatchLoader | None = None
        alone = World(device_type=world.device_type, devices=world.devices[:1])
        try:
            self.replica: Replica = self._run.strategy.prepare(deepcopy(model), self._run, alone)
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

    def step(self) -> _Step | None:
        """Train on the next batch and evaluate; None after the memory was too small."""
        if self.out_of_memory:
            return None
        try:
            return self._stepped()
        except torch.OutOfMemoryError:
            self.out_of_memory = True
        self._give_up()
        return None

    def _stepped(self) -> _Step:
        assert self._loader is not None
        sums = self.replica.step(next(self._batches))
        evaluated = self.replica.evaluate(self._loader.test(_TEST_SAMPLES))
        assert sums is not None
        assert evaluated is not None
        loss = sums[0].item() / self._run.global_batch_size
        return _Step(loss, self.replica.full_gradients(), self.replica.full_state_dict(), evaluated.tolist())


def _over_ranks(result: Tensor | None, world: World) -> list[float]:
    """Loss and correct predictions, summed over all ranks."""
    total: list[float] = world.sum(torch.zeros(2, dtype=torch.float64) if result is None else result.cpu()).tolist()
    return total


def _differences(observed: _Step, expected: _Step, *, samples: int) -> dict[str, float]:
    return {
        "loss": observed.loss,
        "loss_reference": expected.loss,
        "loss_difference": loss_difference(observed.loss, expected.loss),
        "evaluation_difference": _evaluation_difference(observed.evaluated, expected.evaluated, samples),
        "gradient_difference": largest_difference(observed.gradients, expected.gradients, floor=0.0),
        "parameter_difference": largest_difference(observed.state, expected.state, floor=1.0),
    }


def endless(loader: BatchLoader, *, first: int = 1) -> Iterator[Batch]:
    """Batches of one epoch after the other: some epochs have fewer steps than the check."""
    return chain.from_iterable(map(loader.train, count(first)))


def _evaluation_difference(evaluated: list[float], reference: list[float], samples: int) -> float:
    """The difference of the mean loss, or that of the accuracy ÷ `_FLIPS`, whichever is larger."""
    (loss, correct), (expected_loss, expected_correct) = evaluated, reference
    flipped = abs(correct - expected_correct) / samples / _FLIPS
    # A NaN, which can only be in the loss, comes first: it stays where the other is compared with it.
    return max(loss_difference(loss / samples, expected_loss / samples), flipped)


def _verdict(differences: Mapping[str, float], tolerance: float) -> dict[str, Any]:
    # A NaN compares as False, so it fails.
    return {"tolerance": tolerance, "passed": all(differences[name] <= tolerance for name in DIFFERENCES)}
