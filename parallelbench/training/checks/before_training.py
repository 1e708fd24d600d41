"""torch's checks before training: parity with one device, threads that compute what one does, the seed's parameters."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from parallelbench.config.components import TRAITS, Shard
from parallelbench.config.run import own_reference
from parallelbench.errors import ConfigError
from parallelbench.loaders.order import endless
from parallelbench.measure.memory import release
from parallelbench.results.tables import INITIAL
from parallelbench.training.checks.comparability import (
    PARITY_TEST_SAMPLES,
    Finding,
    as_reference,
    uncompared,
    why_in_evaluation,
)
from parallelbench.training.checks.parity import ComparedStep, as_arrays, parity_rows
from parallelbench.training.checks.plain import PlainTraining, stay_in_evaluation
from parallelbench.training.checks.plain_step import Judge
from parallelbench.training.replica import new_replica
from parallelbench.world.numerics import dtype_of, matching, set_precision, wide
from parallelbench.world.world import World

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor, nn

    from parallelbench.config.components import Batch, Traits
    from parallelbench.config.replica import Replica
    from parallelbench.config.run import RunConfig
    from parallelbench.loaders.order import LoaderOf


def check_parity(
    model: nn.Sequential,
    run: RunConfig,
    world: World,
    loader_of: LoaderOf,
    *,
    traits: Traits = TRAITS,
) -> list[dict[str, Any]] | None:
    """Compare the strategy of `run` (see `as_checked`) with its `Reference`.

    Returns the rows of `parity` on rank 0 and an empty list elsewhere; None where the model doesn't fit one device, so
    that there is no reference. `model` is the initial state, on the CPU and identical on every rank; it is left as it
    is, but for its mode (`why_in_evaluation`).
    """
    set_precision(run.precision)
    if why_in_evaluation(run, traits):
        stay_in_evaluation(model)
    replica = new_replica(deepcopy(model), run, world)
    reference = Reference(model, run, world, loader_of) if world.rank == 0 else None

    loader = loader_of(run, replica.data_shard)
    rows = parity_rows(
        replica,
        loader,
        run=run,
        world=world,
        reference=lambda before: None if reference is None else reference.step(before),
        besides=uncompared(run, traits),
    )
    replica.close()
    loader.close()
    if reference is not None:
        reference.close()
    return None if reference is not None and reference.out_of_memory else rows


class Reference:
    """One device's training on the first of rank 0's devices, outside any process group.

    It is plain code, or the replica of a reference that the strategy's author gives, which has a state of its own.
    """

    def __init__(self, model: nn.Sequential, run: RunConfig, world: World, loader_of: LoaderOf) -> None:
        self._run, self.out_of_memory = as_reference(run), False
        self._is_plain = own_reference(run) is None
        self._fitting(lambda: self._begin(model, world, loader_of))

    def _begin(self, model: nn.Sequential, world: World, loader_of: LoaderOf) -> None:
        alone = World(device_type=world.device_type, devices=world.devices[:1])
        prepare = PlainTraining if self._is_plain else self._run.strategy.prepare
        self.training: Any = prepare(deepcopy(model), self._run, alone)
        self._loader = loader_of(self._run, Shard())
        self._batches = endless(self._loader)

    def close(self) -> None:
        """Close its loader, and let all go."""
        if hasattr(self, "_loader"):
            self._loader.close()
        for name in ("training", "_batches", "_loader"):
            self.__dict__.pop(name, None)

    def _fitting(self, call: Callable[[], Any]) -> Any:
        """What is returned; None where the memory is too small, and from then on.

        It is left to the strategy: the other ranks go on, and wait for this one in its collectives. Not while the
        error is handled, since its traceback holds the tensors of the step.
        """
        if self.out_of_memory:
            return None
        try:
            return call()
        except torch.OutOfMemoryError:
            self.out_of_memory = True
        self.close()
        release()
        return None

    def step(self, before: Mapping[str, Tensor] | None = None) -> ComparedStep | None:
        """Train on the next batch and evaluate: from the state `before`, where there is one and plain code trains."""
        take = self._plain if self._is_plain else self._own
        step: ComparedStep | None = self._fitting(lambda: take(next(self._batches), before))
        return step

    def _plain(self, batch: Batch, before: Mapping[str, Tensor] | None) -> ComparedStep:
        plain = self.training
        loss, gradients = plain.train(plain.state() if before is None else before, batch)
        test = self._loader.test(PARITY_TEST_SAMPLES)
        evaluated = plain.evaluate(plain.state(), test, precision=self._run.precision)
        return ComparedStep(loss, as_arrays(gradients), as_arrays(plain.state()), evaluated)

    def _own(self, batch: Batch, _: object) -> ComparedStep:
        replica = self.training
        loss = replica.step(batch)[0].item() / batch.size
        evaluated = replica.evaluate(self._loader.test(PARITY_TEST_SAMPLES)).tolist()
        return ComparedStep(loss, as_arrays(replica.full_gradients()), as_arrays(replica.full_state_dict()), evaluated)


_SAMPLES_OF_ARITHMETIC = 32
"""Most samples of the step: one thread in fp64 is slow."""


def check_arithmetic(model: nn.Module, run: RunConfig, loader_of: LoaderOf) -> None:
    """Raise `ConfigError` where a step on all of this rank's CPU threads is not the step that one thread computes.

    `model`: the initial one, which is consumed.
    """
    own = run.global_batch_size // run.strategy.data_parallel_degree(run)
    small = msgspec.structs.replace(as_reference(run), batch_size=min(own, _SAMPLES_OF_ARITHMETIC))
    judge = Judge(model, small, World(), loader_of)
    try:
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        wrong = [finding for finding in judge.threads(state) if finding.row(1)["passed"] is False]
    finally:
        judge.close()
    if wrong:
        what = ", ".join(f"{each.check} by {each.difference:.2g} (limit {each.limit:.2g})" for each in wrong)
        threads = torch.get_num_threads()
        raise ConfigError(
            f"one step in {run.precision} on {threads} threads differs from the same step on one thread, {what}: a "
            "library computes something else with several threads here; choose cores_per_device=1, and precision=fp64 "
            "to see whether other kernels do better"
        )


class Initial:
    """Rank 0's copy of the model as the seed gives it."""

    def __init__(self, model: nn.Module, run: RunConfig, world: World) -> None:
        """`model`: as it is built; a strategy may change it afterwards."""
        state = model.state_dict() if world.rank == 0 else {}
        filled = {name: tensor.detach().clone() for name, tensor in state.items() if not tensor.is_meta}
        self._state = filled if len(filled) == len(state) else None
        self._dtype = dtype_of(run.precision)

    def finding(self, replica: Replica, build: Callable[[], nn.Module] | None = None) -> Finding:
        """Hold what a replica has before its first step against it; means nothing but on rank 0. A collective.

        `build`: what builds the model with all its values at once, if it was given without.
        """
        held = replica.full_state_dict()
        if self._state is None:
            assert build is not None
            self._state = build().state_dict()
        unlike = [name for name in self._state.keys() | held.keys() if not self._is_held(name, held.get(name))]
        what = f"tensors, before the first step, that are not those of the seed, of {len(self._state)}"
        return Finding(INITIAL, what, difference=float(len(unlike)), limit=0.0)

    def _is_held(self, name: str, held: torch.Tensor | None) -> bool:
        """As the run's arithmetic has it."""
        own = (self._state or {}).get(name)
        if own is None or held is None:
            return False
        own = own.to(matching(own.dtype, self._dtype))
        return torch.equal(own, held) if own.dtype == held.dtype else torch.equal(wide(own), wide(held))
