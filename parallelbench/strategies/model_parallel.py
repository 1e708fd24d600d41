"""Naive model parallelism: whole layers on different devices, one device at work at a time.

On GPUs one process moves activations from device to device, as in the tutorial "Model Parallelism vs Data
Parallelism: Examples". On CPUs, where `.to("cpu:1")` stays where it is, each part has a process of its own.
Either way the arithmetic is that of one device, bit for bit; the speed-up is at most 1.
"""

from __future__ import annotations

import operator
from itertools import accumulate
from typing import TYPE_CHECKING, Annotated, ClassVar

from msgspec import Meta

from parallelbench.config.components import Shard, Strategy
from parallelbench.errors import ConfigError
from parallelbench.strategies.parts.partition import assign, check_split, size_bytes, values_between
from parallelbench.strategies.parts.refusals import SCALES_ALONE, check_no_fp16, first_of, why_shared, why_untouched

if TYPE_CHECKING:
    import torch
    from torch import nn

    from parallelbench.config.components import Traits
    from parallelbench.config.replica import Replica
    from parallelbench.config.run import RunConfig
    from parallelbench.world.world import World


class ModelParallel(Strategy, frozen=True, kw_only=True):
    """Layers spread over the devices, without micro-batches."""

    updates_as_asked: ClassVar[bool] = True

    device_map: dict[str, Annotated[int, Meta(ge=0)]] | None
    """Layer name → device index; null: contiguous parts with nearly equal counts of floating-point operations."""

    def processes(self, run: RunConfig, device_type: str) -> int:
        """One process drives all GPUs; on CPUs each part has its own."""
        return 1 if device_type == "cuda" else run.devices

    def data_parallel_degree(self, run: RunConfig) -> int:
        """One: every part sees the whole batch."""
        return 1

    def check(self, run: RunConfig, device_type: str) -> None:
        """Refuse splits that don't fit, several nodes of GPUs, and fp16 on CPUs."""
        check_split(run, self.device_map)
        if run.nodes > 1 and device_type == "cuda":
            raise ConfigError(
                f"strategy={self.name} drives all GPUs from one process and so needs nodes=1, not nodes={run.nodes}"
            )
        if device_type == "cpu":
            check_no_fp16(run, f"on CPUs {SCALES_ALONE}")

    def why_not_model(self, run: RunConfig, traits: Traits) -> str:
        """Each part waits for the gradient of what it sent."""
        return first_of(why_untouched(traits), why_shared(run, traits))

    def bubble(self, run: RunConfig) -> float:
        """(p−1)/p on p devices: one works while the others wait, as under GPipe with one micro-batch."""
        return 1 - 1 / run.devices

    def prepare(self, model: nn.Sequential, run: RunConfig, world: World) -> Replica:
        """Spread the layers."""
        from parallelbench.strategies.parts.layer_split import LayerSplitReplica
        from parallelbench.strategies.parts.replicas import ModuleReplica

        layers = assign(model, run, self.device_map)
        if world.device_type == "cpu":
            return LayerSplitReplica(model, layers, run=run, world=world)
        step_bytes = crossing_bytes(model, layers, run, world)
        return ModuleReplica(
            spread(model, layers, run, world.devices),
            run=run,
            world=world,
            data_shard=Shard(),
            count_step=lambda traffic: traffic.send("activation", step_bytes),
        )


def crossing_bytes(model: nn.Sequential, layers: dict[str, int], run: RunConfig, world: World) -> int:
    """Bytes that a step moves from device to device: at each cut the activation onwards, and its gradient back where
    there is one.
    """
    values, parts = values_between(model, run, world.device, run.global_batch_size), list(layers.values())
    trained = list(accumulate((any(p.requires_grad for p in layer.parameters()) for layer in model), operator.or_))
    cuts = [i for i in range(1, len(parts)) if parts[i] != parts[i - 1]]
    return sum(size_bytes(values[i]) * (2 if trained[i - 1] else 1) for i in cuts)


def spread(
    model: nn.Sequential, layers: dict[str, int], run: RunConfig, devices: tuple[torch.device, ...]
) -> nn.Sequential:
    """Put each layer on its device, and let it fetch its input from the device of the layer before."""
    from parallelbench.strategies.parts.replicas import to_device

    def fetch_to(device: torch.device) -> object:
        return lambda _layer, inputs: (inputs[0].to(device, non_blocking=True),)

    for (name, index), layer in zip(layers.items(), model, strict=True):
        # Layer by layer from the host: the whole model need not fit on any one device.
        setattr(model, name, to_device(layer, run, devices[index]))
        getattr(model, name).register_forward_pre_hook(fetch_to(devices[index]))
    return model
