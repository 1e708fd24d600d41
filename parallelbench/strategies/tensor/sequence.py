"""Norms and residuals on parts of the sequence: sequence parallelism beside tensor parallelism.

Korthikanti et al. 2022, arXiv 2205.05198, §4.2.2. Each tensor rank has its part of the tokens between the divided
layers. The tokens come together after each norm (all-gather), and the sums of row layers are given out in parts
(reduce-scatter), where tensor parallelism alone sums with all-reduces.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from parallelbench.models.plan import matching
from parallelbench.strategies.autograd import exchanged
from parallelbench.strategies.tensor import divides_sequence, divides_vocabulary

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from parallelbench.config.run import RunConfig


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


def parameters_of_parts(module: nn.Module, run: RunConfig) -> list[nn.Parameter]:
    """The norms' parameters: each tensor rank has the gradients of its tokens, to be summed before an update."""
    if not divides_sequence(run):
        return []
    norms = set(matching(module, run.model.anatomy().sequence_norms))
    return [each for name, each in module.named_parameters() if name.rpartition(".")[0] in norms]
