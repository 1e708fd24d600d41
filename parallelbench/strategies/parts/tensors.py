"""Linear layers sharded over a mesh by torch's tensor parallelism, as a model's own plan says.

Only linear layers: DTensor's convolutions give wrong results, silently, where weights or images are sharded.
"""

from __future__ import annotations

from copy import deepcopy
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from parallelbench.loaders.batch import Shard
from parallelbench.models.norms import synchronize_norms
from parallelbench.strategies.parts.replicas import place, share, share_buffers
from parallelbench.strategies.parts.shapes import size_bytes, values_between
from parallelbench.strategies.parts.sharded import ShardedReplica, shard_one_by_one
from parallelbench.strategies.parts.state import local

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from parallelbench.loaders.batch import Batch
    from parallelbench.models.model import Split
    from parallelbench.probes.communication import Traffic
    from parallelbench.rank.world import World
    from parallelbench.spec.config import RunConfig


def planned(model: nn.Module, plan: Mapping[str, Split]) -> dict[str, Split]:
    """The plan with every `*` replaced by the names it stands for; `assert`s that all of them are linear layers."""
    found: dict[str, Split] = {}
    for name, module in model.named_modules():
        for pattern, split in plan.items():
            if name.count(".") == pattern.count(".") and fnmatchcase(name, pattern):
                assert isinstance(module, nn.Linear), f"{name} is no linear layer"
                found[name] = split
    return found


def shard_linears(layers: nn.Module, plan: Mapping[str, Split], mesh: DeviceMesh) -> None:
    """Leave each rank of the mesh its shard of every planned layer; all must hold the same parameters already."""
    styles: dict[str, Any] = {"column": ColwiseParallel, "row": RowwiseParallel}
    for name, split in planned(layers, plan).items():
        parallelize_module(layers.get_submodule(name), mesh, styles[split](), src_data_rank=None)


def place_shards(layers: nn.Module, run: RunConfig, device: torch.device, mesh: DeviceMesh) -> None:
    """Move layers (children, by their names in the model) to a device, where each rank of the mesh keeps its shards.

    A layer leaves the host when those before it have been sharded: the device never holds more than the shards and one
    whole layer.
    """
    for name, layer in layers.named_children():
        place(layer, run, device)
        shard_linears(nn.ModuleDict({name: layer}), run.model.tensor_plan(), mesh)


def share_replicated(module: nn.Module, mesh: DeviceMesh) -> None:
    """Give every rank of a tensor mesh the first one's buffers and those parameters that the plan leaves whole.

    Each rank computes convolutions, norms and their updates by itself, from the same values, so on CPUs all get the
    same bits. On CUDA some kernels add up in an order that changes, and the copies drift apart by rounding. Averaging
    their gradients in every step would prevent that, but send more than the strategy does otherwise where convolutions
    are large; done before an evaluation, outside the training window, this makes what is evaluated and saved one model
    at the cost of one message a tensor and epoch.
    """
    kept = [local(parameter) for parameter in module.parameters() if not _is_cut(parameter)]
    # A data dimension may leave a rank, and the others of its tensor dimension, nothing of a short parameter.
    share([*(values for values in kept if values.numel()), *module.buffers()], mesh.get_group())


def _is_cut(parameter: Tensor) -> bool:
    """Whether the ranks of the tensor dimension hold shards of it; a data dimension doesn't count."""
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    return "tensor" in names and not parameter.placements[names.index("tensor")].is_replicate()


def as_one_rank_sees_it(model: nn.Sequential, plan: Mapping[str, Split], shards: int) -> nn.Sequential:
    """The model on the meta device with ordinary linear layers of a shard's size: for shapes of local values."""
    if not plan:
        return model
    local = deepcopy(model).to("meta")
    for name, split in planned(local, plan).items():
        parent, _, leaf = name.rpartition(".")
        linear = local.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        inputs, outputs = linear.in_features, linear.out_features
        if split == "column":
            outputs //= shards
        else:
            inputs //= shards
        shard = nn.Linear(inputs, outputs, bias=linear.bias is not None, device="meta")
        setattr(local.get_submodule(parent), leaf, shard)
    return local


def all_reduced_bytes(
    model: nn.Sequential, plan: Mapping[str, Split], run: RunConfig, device: torch.device, batch_size: int
) -> dict[str, int]:
    """Bytes summed over the tensor ranks in one step, by planned layer.

    A row layer's output is summed in forward, the gradient of a column layer's input in backward (Shoeybi et al. 2019,
    §3: f and g). No gradient is taken of images. `model` is whole.
    """
    summed: dict[str, int] = {}
    if not plan:
        return summed
    handles = []

    def note(name: str, split: Split) -> Any:
        def hook(_layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            column = size_bytes(inputs[0]) if inputs[0].requires_grad else 0
            summed[name] = column if split == "column" else size_bytes(output)

        return hook

    for name, split in planned(model, plan).items():
        handles.append(model.get_submodule(name).register_forward_hook(note(name, split)))
    values_between(model, run, device, batch_size)
    for handle in handles:
        handle.remove()
    return summed


def optimizer_of(parameters: Iterable[nn.Parameter], run: RunConfig, device_type: str) -> torch.optim.Optimizer:
    """The run's optimizer; updates of several tensors at once (foreach, fused) can't mix meshes or plain tensors."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    alike: Any = [{"params": group} for group in groups.values()]
    return run.optimizer.build(alike, run, device_type)


class TensorReplica(ShardedReplica):
    """A module of which several ranks, reading the same samples, hold shards; the first of them owns the loss."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh, *, run: RunConfig, world: World, **options: Any) -> None:
        optimizer = optimizer_of(module.parameters(), run, world.device_type)
        super().__init__(module, run=run, world=world, optimizer=optimizer, **options)
        self._mesh = mesh

    def step(self, batch: Batch) -> Tensor | None:
        """Forward, backward, update."""
        return self._owned(super().step(batch))

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> Tensor | None:
        """Sums over the samples, on their owner."""
        share_replicated(self._module, self._mesh)
        return self._owned(super().evaluate(batches))

    def _owned(self, result: Tensor | None) -> Tensor | None:
        return result if self._mesh.get_local_rank() == 0 else None


def shard_whole(model: nn.Sequential, run: RunConfig, world: World, mesh: DeviceMesh) -> TensorReplica:
    """Shard linear layers over all ranks."""
    batch_size = run.global_batch_size
    summed_bytes = sum(all_reduced_bytes(model, run.model.tensor_plan(), run, world.device, batch_size).values())
    place_shards(model, run, world.device, mesh)
    return TensorReplica(
        model,
        mesh,
        run=run,
        world=world,
        data_shard=Shard(),
        count_step=lambda traffic: traffic.all_reduce("activation", summed_bytes, world.size),
    )


def shard_twice(
    model: nn.Sequential, run: RunConfig, world: World, mesh: DeviceMesh, *, reshard_after_forward: bool
) -> TensorReplica:
    """Shard linear layers over `mesh["tensor"]`, then every layer over `mesh["data"]`."""
    plan, tensor, data = run.model.tensor_plan(), mesh["tensor"], mesh["data"]
    shard = Shard(data.get_local_rank(), data.size())
    local_batch = run.global_batch_size // shard.count
    summed_bytes = sum(all_reduced_bytes(model, plan, run, world.device, local_batch).values())
    synchronize_norms(model, data.get_group())
    padded_bytes = shard_one_by_one(
        model,
        run,
        world.device,
        data,
        reshard_after_forward=reshard_after_forward,
        first=lambda name, layer: shard_linears(nn.ModuleDict({name: layer}), plan, tensor),
    )

    def count_step(traffic: Traffic) -> None:
        traffic.all_reduce("activation", summed_bytes, tensor.size())
        for _ in range(2 if reshard_after_forward else 1):
            traffic.all_gather("parameter", padded_bytes, shard.count)
        traffic.reduce_scatter("gradient", padded_bytes, shard.count)

    return TensorReplica(
        model,
        tensor,
        run=run,
        world=world,
        data_shard=shard,
        before_evaluation=lambda: share_buffers(model),
        count_step=count_step,
    )
