"""Whether training begins with the seed's parameters, and not with another initialisation or an earlier run's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from parallelbench.rank.findings import Finding
from parallelbench.store.check_tables import INITIAL

if TYPE_CHECKING:
    from torch import nn

    from parallelbench.spec.replica import Replica
    from parallelbench.world.world import World


class Initial:
    """Rank 0's copy of the model as the seed gives it."""

    def __init__(self, model: nn.Module, world: World) -> None:
        """`model`: as it is built; a strategy may change it afterwards."""
        state = model.state_dict() if world.rank == 0 else {}
        self._state = {name: tensor.detach().clone() for name, tensor in state.items()}

    def finding(self, replica: Replica) -> Finding:
        """Hold what a replica has before its first step against it; means nothing but on rank 0. A collective."""
        held = replica.full_state_dict()
        unlike = [name for name in self._state.keys() | held.keys() if not self._is_held(name, held.get(name))]
        what = f"tensors, before the first step, that are not those of the seed, of {len(self._state)}"
        return Finding(INITIAL, what, difference=float(len(unlike)), limit=0.0)

    def _is_held(self, name: str, held: torch.Tensor | None) -> bool:
        """In fp64 runs, too: what is converted to fp64 stays as it is."""
        own = self._state.get(name)
        return own is not None and held is not None and torch.equal(own.double(), held.double())
