"""Whether training begins with the seed's parameters, and not with another initialisation or an earlier run's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from parallelbench.rank.findings import Finding
from parallelbench.store.check_tables import INITIAL
from parallelbench.world.numerics import dtype_of, matching, wide

if TYPE_CHECKING:
    from torch import nn

    from parallelbench.spec.config import RunConfig
    from parallelbench.spec.replica import Replica
    from parallelbench.world.world import World


class Initial:
    """Rank 0's copy of the model as the seed gives it."""

    def __init__(self, model: nn.Module, run: RunConfig, world: World) -> None:
        """`model`: as it is built; a strategy may change it afterwards."""
        state = model.state_dict() if world.rank == 0 else {}
        self._state = {name: tensor.detach().clone() for name, tensor in state.items()}
        self._dtype = dtype_of(run.precision)

    def finding(self, replica: Replica) -> Finding:
        """Hold what a replica has before its first step against it; means nothing but on rank 0. A collective."""
        held = replica.full_state_dict()
        unlike = [name for name in self._state.keys() | held.keys() if not self._is_held(name, held.get(name))]
        what = f"tensors, before the first step, that are not those of the seed, of {len(self._state)}"
        return Finding(INITIAL, what, difference=float(len(unlike)), limit=0.0)

    def _is_held(self, name: str, held: torch.Tensor | None) -> bool:
        """As the run's arithmetic has it."""
        own = self._state.get(name)
        if own is None or held is None:
            return False
        return torch.equal(wide(own.to(matching(own.dtype, self._dtype))), wide(held))
