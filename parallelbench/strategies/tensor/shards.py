"""Linear layers sharded over a mesh by torch's tensor parallelism, as a model's own plan says.

Only linear layers: DTensor's convolutions give wrong results, silently, where weights or images are sharded.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from parallelbench.models.plan import planned
from parallelbench.strategies.fsdp.shards import reshard
from parallelbench.strategies.replica import ModuleReplica, share, sum_gradients, to_device
from parallelbench.strategies.state import local
from parallelbench.strategies.tensor import divides_sequence, divides_vocabulary, plan_of
from parallelbench.strategies.tensor.sequence import cut_sequence, parameters_of_parts
from parallelbench.strategies.tensor.vocabulary import divide, divided_loss, tie_again, ties_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

    from parallelbench.config.components import Shard as DataShard
    from parallelbench.config.components import Split
    from parallelbench.config.run import RunConfig
    from parallelbench.measure.traffic import Traffic
    from parallelbench.world.world import World


def shard_linears(layers: nn.Module, plan: Mapping[str, Split], mesh: DeviceMesh, *, gives: Placement) -> None:
    """Keep this rank's shard of every planned layer; all ranks of the mesh must hold the same parameters before.

    `gives`: what row layers give, their sum on every rank or a part of its tokens.
    """
    for name, split in planned(layers, plan).items():
        style = ColwiseParallel() if split == "column" else RowwiseParallel(output_layouts=gives)
        parallelize_module(layers.get_submodule(name), mesh, style, src_data_rank=None)


def place_shards(layers: nn.Module, run: RunConfig, device: torch.device, mesh: DeviceMesh) -> None:
    """Move layers (children, by their names in the model) to a device, and keep this rank's shards of them.

    A layer moves to the device after the layers before it have been sharded, so the device never holds more than the
    shards and one whole layer.
    """
    shard = sharding(layers, run, mesh)
    for name, layer in layers.named_children():
        to_device(layer, run, device)
        shard(name, layer)


def sharding(layers: nn.Module, run: RunConfig, mesh: DeviceMesh) -> Callable[[str, nn.Module], None]:
    """A function that keeps this rank's shards of one of the layers, given its name; what they share stays shared."""
    plan, ties = run.model.anatomy().linears.plan, ties_of(layers)
    vocabulary = run.model.anatomy().vocabulary.plan if divides_vocabulary(run) else {}
    by_tokens = divides_sequence(run)

    def shard(name: str, layer: nn.Module) -> None:
        whole = nn.ModuleDict({name: layer})
        shard_linears(whole, plan, mesh, gives=Shard(1) if by_tokens else Replicate())
        for each in planned(whole, vocabulary):
            path, _, leaf = each.rpartition(".")
            part = divide(whole.get_submodule(each), mesh, sums_gradient=not by_tokens)
            setattr(whole.get_submodule(path), leaf, part)
        tie_again(layers, ties)
        if by_tokens:
            cut_sequence(layer, name, run, mesh)

    return shard


def share_replicated(module: nn.Module, mesh: DeviceMesh) -> None:
    """Give every rank of a tensor mesh the first rank's buffers, and its parameters that the plan leaves whole.

    Each rank computes convolutions, norms and their updates by itself, from the same values, so on CPUs all get the
    same bits. On CUDA some kernels add in a changing order, and the copies drift apart by rounding. Averaging their
    gradients in every step would prevent that, but with large convolutions it would send more than all the rest of the
    strategy. Called before an evaluation, outside the training window, this makes sure that one model is evaluated and
    saved, for a few messages per epoch.
    """
    uncut = [local(parameter) for parameter in module.parameters() if not _is_cut(parameter)]
    # Of a short parameter, a data dimension may leave a rank, and the others of its tensor dimension, nothing.
    share([*(values for values in uncut if values.numel()), *module.buffers()], mesh.get_group())


def _is_cut(parameter: Tensor) -> bool:
    """Whether the tensor dimension's ranks hold shards of it; a data dimension doesn't count."""
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    return "tensor" in names and not parameter.placements[names.index("tensor")].is_replicate()


def local_values(values: list[Tensor], model: nn.Module, run: RunConfig, shards: int) -> list[Tensor]:
    """The values between layers as a tensor rank has them: shards behind a column layer, or parts of the tokens.

    `values`: those of the whole model, the first input and the last output included, which have all tokens.
    """
    local_ones, splits, cut = list(values), planned(model, plan_of(run)), False
    for index, layer in enumerate(run.model.layer_names, start=1):
        own = [split for name, split in splits.items() if name.partition(".")[0] == layer]
        cut = own[-1] == "column" if own else cut  # a layer that has none gives what it takes: a shard of a shard
        if cut:
            local_ones[index] = values[index][..., : values[index].shape[-1] // shards].contiguous()
    if divides_sequence(run):
        local_ones[1:-1] = [each[:, : each.shape[1] // shards].contiguous() for each in local_ones[1:-1]]
    return local_ones


def optimizer_of(parameters: Iterable[nn.Parameter], run: RunConfig, device_type: str) -> torch.optim.Optimizer:
    """The run's optimizer, with a group per mesh: one update of several tensors (foreach, fused) can't mix meshes.

    Of layers without parameters one that has no values: torch wants one.
    """
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    groups = groups or {None: [nn.Parameter(torch.empty(0, device=device_type))]}
    alike: Any = [{"params": group} for group in groups.values()]
    return run.optimizer.build(alike, run, device_type)


def new_replica(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    run: RunConfig,
    world: World,
    data_shard: DataShard,
    count_step: Callable[[Traffic], None],
    before_evaluation: Callable[[], None] | None = None,
) -> ModuleReplica:
    """The replica of a module whose layers are sharded over a mesh of ranks that read the same samples."""
    in_parts = parameters_of_parts(module, run)

    def share_all() -> None:
        share_replicated(module, mesh)
        if before_evaluation is not None:
            before_evaluation()

    return ModuleReplica(
        module,
        run=run,
        world=world,
        data_shard=data_shard,
        optimizer=optimizer_of(module.parameters(), run, world.device_type),
        loss=divided_loss(run, mesh),
        before_evaluation=share_all,
        after_evaluation=lambda: reshard(module),
        count_step=count_step,
        after_backward=partial(sum_gradients, in_parts, mesh.get_group()) if in_parts else None,
        alike=mesh,
    )
