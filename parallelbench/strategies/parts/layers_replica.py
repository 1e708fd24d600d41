"""The replica of strategies that give each rank some of the model's layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from parallelbench.strategies.parts.base_replica import BaseReplica
from parallelbench.strategies.parts.state import kept_by, whole
from parallelbench.world.numerics import dtype_of, matching

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

    from parallelbench.config.components import Shard
    from parallelbench.config.run import RunConfig
    from parallelbench.strategies.parts.clipping import Groups


class LayersReplica(BaseReplica):
    """Some of the model's layers on this rank, the others on other ranks; subclasses set `_optimizer`.

    `owners` says on which rank each layer is.
    """

    _optimizer: torch.optim.Optimizer

    def __init__(
        self, model: nn.Sequential, owners: Mapping[str, int], *, data_shard: Shard, rank: int, run: RunConfig
    ) -> None:
        super().__init__(data_shard, run)
        self._compiles_update = run.compiles_step
        dtype = dtype_of(run.precision)
        self._owners, self._rank = owners, rank
        self._layers = nn.ModuleDict({name: layer for name, layer in model.named_children() if owners[name] == rank})
        self._parameter_names = [name for name, _ in model.named_parameters()]
        self._trainable_names = [name for name, each in model.named_parameters() if each.requires_grad]
        self._template = {
            name: tensor.to("meta", matching(tensor.dtype, dtype)) for name, tensor in model.state_dict().items()
        }
        """Parameters and buffers of the whole model: meta tensors."""

    def trained(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """This rank's layers and their optimizer."""
        return self._layers, self._optimizer

    def _counted(self) -> tuple[Iterable[Tensor], Groups]:
        """A parameter that layers of several ranks share counts on the rank that has its first name."""
        names = set(self._parameter_names)
        return [parameter for name, parameter in self._layers.named_parameters() if name in names], (self._ranks_group,)

    def _uncounted(self) -> Iterable[Tensor]:
        """Those that count on the rank that has their first name."""
        names = set(self._parameter_names)
        return [parameter for name, parameter in self._layers.named_parameters() if name not in names]

    @property
    def _ranks_group(self) -> dist.ProcessGroup:
        """The ranks that hold one copy of the model together."""
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    def full_state_dict(self) -> dict[str, Tensor]:
        """Rank 0 receives the other ranks' tensors, in the model's order."""
        return self._gather(self._layers.state_dict(), self._template)

    def full_gradients(self) -> dict[str, Tensor]:
        """As the last step left them, before it clipped them."""
        gradients = {name: p.grad for name, p in self._layers.named_parameters() if p.grad is not None}
        return self._gather(self._unclipped(gradients), self._trainable_names)

    def full_optimizer_state(self, key: str) -> dict[str, Tensor] | None:
        """Likewise."""
        return self._gather(kept_by(self._optimizer, self._layers.named_parameters(), key), self._parameter_names)

    def _gather(self, own: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
        """Collect the ranks' tensors on rank 0's CPU in the order of `names`; all owners of layers must call it."""
        own = {name: whole(tensor.detach()) for name, tensor in own.items()}
        gathered: dict[str, Tensor] = {}
        if min(self._owners.values()) > 0:
            return gathered  # these ranks hold a copy, which rank 0 has no part in
        for name in names:
            owner = self._owners[name.partition(".")[0]]
            if owner == self._rank == 0:
                gathered[name] = own[name].to("cpu", copy=True)
            elif owner == self._rank:
                dist.send(own[name].cpu().contiguous(), 0)
            elif self._rank == 0:
                template = self._template[name]
                gathered[name] = torch.empty_like(template, device="cpu", memory_format=torch.contiguous_format)
                dist.recv(gathered[name], owner)
        return gathered
