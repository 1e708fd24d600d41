"""Bytes that tensor ranks exchange in a step, by the shapes of what they compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from parallelbench.models.recomputation import repeats_forward
from parallelbench.models.tensor_plans import planned
from parallelbench.strategies.parts.divided_vocabulary import loss_bytes
from parallelbench.strategies.parts.meshes import plan_of
from parallelbench.strategies.parts.partition import size_bytes, values_between

if TYPE_CHECKING:
    from collections.abc import Container

    import torch
    from torch import Tensor, nn

    from parallelbench.marks.traffic import Traffic
    from parallelbench.spec.config import RunConfig
    from parallelbench.spec.model import Split


@dataclass(frozen=True)
class Exchanged:
    """Bytes of whole messages of a forward and a backward pass."""

    all_reduced: int

    def count(self, traffic: Traffic, ranks: int, *, passes: int = 1) -> None:
        """Count what a rank of so many sends in so many passes."""
        traffic.all_reduce("activation", passes * self.all_reduced, ranks)


def exchanged_bytes(
    model: nn.Sequential,
    run: RunConfig,
    device: torch.device,
    *,
    samples: int,
    layers: Container[str] | None = None,
) -> Exchanged:
    """What tensor ranks exchange for so many samples; of `layers` only, if given. `model` is the whole one."""
    summed = _all_reduced_bytes(model, run, device, samples=samples)
    last = next(reversed(run.model.layer_names))
    summed[last] = summed.get(last, 0) + loss_bytes(run, samples=samples)
    return Exchanged(sum(size for layer, size in summed.items() if layers is None or layer in layers))


def _all_reduced_bytes(model: nn.Sequential, run: RunConfig, device: torch.device, *, samples: int) -> dict[str, int]:
    """Bytes that are all-reduced within the model, by layer.

    A row layer's output is summed in forward, the gradient of a column layer's input in backward (Shoeybi et al. 2019,
    §3: f and g). Images and tokens have no gradient. What backward computes again is summed again.
    """
    summed: dict[str, int] = {}
    handles = []

    def note(layer: str, split: Split) -> Any:
        def hook(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            column = size_bytes(inputs[0]) if inputs[0].requires_grad else 0
            times = 2 if repeats_forward(run, layer) else 1
            summed[layer] = summed.get(layer, 0) + (column if split == "column" else times * size_bytes(output))

        return hook

    for name, split in planned(model, plan_of(run)).items():
        handles.append(model.get_submodule(name).register_forward_hook(note(name.partition(".")[0], split)))
    values_between(model, run, device, samples)
    for handle in handles:
        handle.remove()
    return summed
