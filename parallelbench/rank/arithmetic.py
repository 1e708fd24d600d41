"""Whether several threads compute what one does: one step in the run's own arithmetic, before training.

The parity check is in fp64, where other kernels compute, and plain code of the closing check computes on the same
threads as the run: neither sees kernels that go wrong with several of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import torch

from parallelbench.errors import ConfigError
from parallelbench.rank.checked_run import as_reference
from parallelbench.rank.judge import Judge
from parallelbench.world.world import World

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from parallelbench.loaders.batch_loader import BatchLoader
    from parallelbench.spec.batch import Shard
    from parallelbench.spec.config import RunConfig

    LoaderOf = Callable[[RunConfig, Shard], BatchLoader]

_SAMPLES = 32
"""Most samples of the step: one thread in fp64 is slow."""


def check_arithmetic(model: nn.Module, run: RunConfig, loader_of: LoaderOf) -> None:
    """Raise `ConfigError` where a step on all of this rank's CPU threads is not the step that one thread computes.

    `model`: the initial one, which is consumed.
    """
    own = run.global_batch_size // run.strategy.data_parallel_degree(run)
    small = msgspec.structs.replace(as_reference(run), batch_size=min(own, _SAMPLES))
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
