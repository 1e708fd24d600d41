"""Norms and residuals on parts of the sequence: sequence parallelism beside tensor parallelism.

Korthikanti et al. 2022, arXiv 2205.05198, §4.2.2. Each tensor rank has its part of the tokens between the divided
layers. The tokens come together after each norm (all-gather), and the sums of row layers are given out in parts
(reduce-scatter), where tensor parallelism alone sums with all-reduces.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed import _functional_collectives as collectives
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from parallelbench.models.plan import matching
from parallelbench.strategies.autograd import exchanged
from parallelbench.strategies.state import local
from parallelbench.strategies.tensor import divides_sequence, divides_vocabulary

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from parallelbench.config.run import RunConfig
    from parallelbench.measure.traffic import Traffic


# torch 2.15 has this name, and warns of the one that older versions have.
_all_gather = getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor


def _own_part(values: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's part of the tokens; backward the gradients of all."""
    return exchanged(
        values,
        there=lambda whole: whole.chunk(mesh.size(), dim=1)[mesh.get_local_rank()].clone(),
        back=lambda gradient: _all_gather(gradient.contiguous(), 1, mesh.get_group()),
    )


def cut_sequence(layer: nn.Module, name: str, run: RunConfig, mesh: DeviceMesh) -> None:
    """Give the layer of this name a part of the tokens where it has norms; the model's first layer cuts them."""
    first, *_, last = run.model.layer_names
    whole = nn.ModuleDict({name: layer})
    for norm in matching(whole, run.model.anatomy().sequence_norms):
        whole.get_submodule(norm).register_forward_hook(_gathering(mesh, run, is_last=name == last))
    if name == first:
        layer.register_forward_hook(lambda _layer, _inputs, values: _own_part(values, mesh))


def _gathering(mesh: DeviceMesh, run: RunConfig, *, is_last: bool) -> Any:
    """A hook that puts the ranks' tokens together.

    Column layers take the result as a DTensor, whose gradient stays a sum in parts until the norm scatters it. The last
    layer's head takes it as a tensor: a whole one has its whole gradient, a divided one a part of the sum.
    """
    part = Partial() if divides_vocabulary(run) else Replicate()

    def hook(_norm: nn.Module, _inputs: tuple[Tensor, ...], values: Tensor) -> Tensor:
        parts = DTensor.from_local(values, mesh, [Shard(1)], run_check=False)
        whole = parts.redistribute(placements=[Replicate()])
        return whole.to_local(grad_placements=[part]) if is_last else whole

    return hook


def parts_between(values: list[Tensor], run: RunConfig, shards: int) -> list[Tensor]:
    """The values between layers as a tensor rank has them: all but the first input and the last output in parts."""
    if not divides_sequence(run):
        return values
    between = [each.new_empty(each.shape[0], each.shape[1] // shards, *each.shape[2:]) for each in values[1:-1]]
    return [values[0], *between, values[-1]]


class NormGradients:
    """Gradients of the norms' parameters, of which each tensor rank has the part of its tokens."""

    def __init__(self, module: nn.Module, run: RunConfig, mesh: DeviceMesh) -> None:
        norms = set(matching(module, run.model.anatomy().sequence_norms))
        named = module.named_parameters()
        self._parameters = [each for name, each in named if name.rpartition(".")[0] in norms and each.requires_grad]
        self._mesh = mesh

    @torch.no_grad()
    def sum_over_ranks(self, traffic: Traffic) -> None:
        """Add them up, in one message."""
        gradients = [local(each.grad) for each in self._parameters if each.grad is not None]
        if not gradients:
            return
        flat = _flatten_dense_tensors(gradients)
        dist.all_reduce(flat, group=self._mesh.get_group())
        traffic.all_reduce("gradient", flat.nbytes, self._mesh.size())
        for gradient, total in zip(gradients, _unflatten_dense_tensors(flat, gradients), strict=True):
            gradient.copy_(total)


def norm_gradients(module: nn.Module, run: RunConfig, mesh: DeviceMesh | None) -> NormGradients | None:
    """What has to be summed before an update; None: each rank has whole gradients, or its stage has no norms."""
    if mesh is None or not divides_sequence(run) or not matching(module, run.model.anatomy().sequence_norms):
        return None
    return NormGradients(module, run, mesh)
