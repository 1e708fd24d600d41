"""Parameters, gradients and optimizer state in shards, by torch's `fully_shard` (FSDP).

Rajbhandari et al. 2020, "ZeRO" (arXiv 1910.02054); Zhao et al. 2023, "PyTorch FSDP" (arXiv 2304.11277).
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import cache
from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from parallelbench.config.components import Shard
from parallelbench.models.norms import synchronize_norms
from parallelbench.strategies.graph import CapturedReplica
from parallelbench.strategies.mesh import device_mesh
from parallelbench.strategies.replica import ModuleReplica, share_buffers, to_device
from parallelbench.strategies.state import local

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from parallelbench.config.run import RunConfig
    from parallelbench.measure.traffic import Traffic
    from parallelbench.strategies.context.tokens import OwnTokens
    from parallelbench.world.world import World


def shard_layers(
    model: nn.Sequential,
    run: RunConfig,
    world: World,
    *,
    shards: int,
    reshard_after_forward: bool,
    gather: str,
    micro_batches: int = 1,
    tokens: OwnTokens | None = None,
    data_shard: Shard | None = None,
) -> ModuleReplica:
    """Shard every layer over groups of `shards` neighbouring ranks; the groups hold copies of each other.

    `gather`, `micro_batches`: as those of `ShardedStrategy`. Each micro-batch gathers the parameters again.
    `tokens`: as that of `ModuleReplica`. `data_shard`: what this rank reads, None: a slice like each other rank.
    """
    copies = world.size // shards
    sizes = {"shard": shards} if copies == 1 else {"replicate": copies, "shard": shards}
    synchronize_norms(model, dist.group.WORLD)
    mesh = device_mesh(world, **sizes)
    padded = shard_one_by_one(
        model, run, world.device, mesh, reshard_after_forward=reshard_after_forward, gather=gather
    )

    def count_step(traffic: Traffic) -> None:
        gathered_bytes = padded.gathered / (2 if gather == "bf16" else 1)
        traffic.all_gather("parameter", micro_batches * gathered_bytes, shards)
        traffic.reduce_scatter("gradient", padded.gradients, shards)
        traffic.all_reduce("gradient", padded.gradients / shards, copies)

    kind = CapturedReplica if run.graph else ModuleReplica
    return kind(
        model,
        run=run,
        world=world,
        data_shard=data_shard or Shard(world.rank, world.size),
        before_evaluation=lambda: share_buffers(model),
        after_evaluation=lambda: reshard(model),
        count_step=count_step,
        micro_batches=micro_batches,
        no_sync=lambda: _whole_gradients(model),
        tokens=tokens,
    )


def reshard(module: nn.Module) -> None:
    """Free the parameters that layers gathered: without reshard_after_forward, only a backward would."""
    for layer in module.modules():
        if isinstance(layer, FSDPModule):
            layer.reshard()


@contextmanager
def _whole_gradients(module: nn.Module) -> Iterator[None]:
    """Within, whole gradients stay on each rank; after the backward that follows they are scattered, once."""
    assert isinstance(module, FSDPModule)
    module.set_requires_gradient_sync(False)
    yield
    module.set_requires_gradient_sync(True)


def shard_one_by_one(
    model: nn.Sequential,
    run: RunConfig,
    device: torch.device,
    mesh: DeviceMesh,
    *,
    reshard_after_forward: bool,
    gather: str = "stored",
    first: Callable[[str, nn.Module], None] | None = None,
) -> PaddedBytes:
    """Shard the parameters of every layer over a mesh; returns the bytes of all shards with their padding.

    `fully_shard` cuts along the first dimension and pads it to a multiple of the shards: a position embedding
    (1, tokens, values) is sent once per shard. Layers that share parameters with each other are gathered together, from
    the first to the last use of the model.

    A layer moves to the device after the layers before it have been sharded, so the device never holds more than the
    shards and one whole layer. `first` is called with the name of each layer and the layer on the device, before it is
    sharded. Weights stay contiguous under `channels_last`, as `fully_shard` demands; images are channels last anyway.
    """
    contiguous, tied = msgspec.structs.replace(run, channels_last=False), run.model.anatomy().tied
    policy = MixedPrecisionPolicy()
    if gather == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for module in model.modules():
            read_as_stored(module)
    shards, gathered, gradients, trained = mesh.size(mesh.ndim - 1), 0, 0, False
    of_tied: dict[nn.Parameter, int] = {}  # others' whole parameters must not be held: shards replace them
    for name, layer in model.named_children():
        to_device(layer, contiguous, device)
        if first is not None:
            first(name, layer)
        own = {each: _padded_bytes(local(each), shards) for each in layer.parameters()}
        trained = trained or any(each.requires_grad for each in own)
        if name in tied:
            of_tied |= own
        elif own:
            gradients += sum(size for each, size in own.items() if each.requires_grad)
            # No gradient passes a layer that only frozen ones precede.
            gathered += sum(own.values()) * (2 if reshard_after_forward and trained else 1)
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=policy)
        del own
    left = nn.ModuleDict({name: layer for name, layer in model.named_children() if name in tied})
    gathered += sum(of_tied[each] for each in left.parameters())  # once for the whole model, whatever the option says
    gradients += sum(size for each, size in of_tied.items() if each.requires_grad)
    fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=policy if tied else MixedPrecisionPolicy())
    return PaddedBytes(gathered, gradients)


def read_as_stored(module: nn.Module) -> None:
    """Let a module's code find parameters that were gathered in bf16 in the type of the optimizer's, rounded.

    So it computes as under every other strategy: autocast chooses the type of each operation, and the values between
    layers, and those kept for backward, have the same one. Layers whose parameters autocast would round anyway take
    them as they are.
    """
    kind: Any = type(module)
    module.__class__ = _reading_as_stored(kind)


@cache
def _reading_as_stored(cls: type[nn.Module]) -> type[nn.Module]:
    rounds_itself = cls.forward in (nn.Linear.forward, nn.Conv1d.forward, nn.Conv2d.forward, nn.Conv3d.forward)

    def found(self: nn.Module, name: str) -> Any:
        value = genuine(self, name)
        if name not in self._parameters or value is None or value.dtype != torch.bfloat16:
            return value
        return value if rounds_itself and torch.is_autocast_enabled(value.device.type) else value.float()

    genuine: Any = cls.__getattr__
    return type(f"Gathered{cls.__name__}", (cls,), {"__getattr__": found, "__module__": cls.__module__})


class PaddedBytes(NamedTuple):
    """Bytes of all shards of a model with their padding, in the parameters' own dtype."""

    gathered: int
    """What a step gathers."""
    gradients: int
    """Of all parameters that are trained."""


def _padded_bytes(values: Tensor, shards: int) -> int:
    """Bytes of all shards of a tensor together."""
    rows = values.shape[0]
    return values.nbytes // max(1, rows) * ceil(rows / shards) * shards
