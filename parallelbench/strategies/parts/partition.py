"""Which layer goes to which device: an explicit map, or contiguous parts of nearly equal cost."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING

from parallelbench.errors import ConfigError, choices

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from parallelbench.spec.config import RunConfig


def check_split(run: RunConfig, device_map: Mapping[str, int] | None) -> None:
    """Refuse a split that leaves a device without layers, or a layer without a device."""
    names, parts = run.model.layer_names, run.devices
    who = f"strategy={run.strategy.name}"
    if parts < 2:
        raise ConfigError(f"{who} needs two devices or more: choose devices=2, or strategy=single for one device")
    if parts > len(names):
        advice = f"choose devices={len(names)} or fewer" if len(names) > 1 else "choose strategy=ddp, or a deeper model"
        layers = f"{len(names)} layer{'s' * (len(names) > 1)} ({', '.join(names)})"
        raise ConfigError(
            f"{who} can't cut model={run.model.name} into devices={parts} parts: it has {layers}: {advice}"
        )
    if device_map is not None:
        check_map(device_map, run, parts=parts, option="strategy.device_map", part="device")


def check_map(layers: Mapping[str, int], run: RunConfig, *, parts: int, option: str, part: str) -> None:
    """Refuse an explicit map from layers to parts (`part` is their singular) that fits the model or the parts badly."""
    names = run.model.layer_names
    for name in layers:
        if name not in names:
            raise ConfigError(f"{option} names {name}, which model={run.model.name} lacks: {choices(name, names)}")
    if missing := [name for name in names if name not in layers]:
        raise ConfigError(f"{option} leaves out {', '.join(missing)}: give each layer a {part}")
    if set(layers.values()) != set(range(parts)):
        used = sorted(set(layers.values()))
        raise ConfigError(f"{option} uses the {part}s {used}: with devices={run.devices} use each of 0 … {parts - 1}")


def assign(
    model: nn.Sequential, run: RunConfig, layers: Mapping[str, int] | None, parts: int | None = None
) -> dict[str, int]:
    """Part of every layer, in the order of the layers; `parts` is the number of devices unless given."""
    names = run.model.layer_names
    if layers is not None:
        return {name: layers[name] for name in names}
    return dict(zip(names, balance(layer_costs(model, run), parts or run.devices), strict=True))


def layer_costs(model: nn.Sequential, run: RunConfig) -> list[float]:
    """Floating-point operations of each layer for one image, counted on shapes alone; parameters break ties."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    value = torch.zeros(1, *run.data.shape, device="meta")
    costs = []
    for layer in model:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            value = deepcopy(layer).to("meta").float().eval()(value)
        parameters = sum(parameter.numel() for parameter in layer.parameters())
        costs.append(counter.get_total_flops() + 1e-6 * parameters)
    return costs


def balance(costs: Sequence[float], parts: int) -> list[int]:
    """Cut `costs` into `parts` contiguous, non-empty pieces so that the dearest piece is as cheap as possible.

    Returns the piece of every element. Dynamic programming over the last cut; of equally good cuts the earliest.
    """
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    count = len(costs)
    # best[end] = (cost of the dearest piece, cuts) of the first `end` elements
    best: dict[int, tuple[float, tuple[int, ...]]] = {end: (total[end], ()) for end in range(1, count + 1)}
    for pieces in range(2, parts + 1):
        best = {
            end: min(
                (max(best[cut][0], total[end] - total[cut]), (*best[cut][1], cut)) for cut in range(pieces - 1, end)
            )
            for end in range(pieces, count + 1)
        }
    cuts = best[count][1]
    return [sum(index >= cut for cut in cuts) for index in range(count)]
