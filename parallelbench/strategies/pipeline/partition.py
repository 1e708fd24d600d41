"""Which layer goes to which device, what each costs, and what flows between them; loads torch only when it counts.

The layers are given by an explicit map, or cut into contiguous parts of nearly equal cost.
"""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING

from parallelbench.config.alternatives import deeper_models
from parallelbench.errors import ConfigError, choices, count_of
from parallelbench.strategies.refusals import check_two_devices

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import Tensor, nn

    from parallelbench.config.run import RunConfig


def check_split(run: RunConfig, device_map: Mapping[str, int] | None) -> None:
    """Refuse a split that leaves a device without layers, or a layer without a device."""
    check_two_devices(run)
    names, parts = run.model.layer_names, run.devices
    if parts > len(names):
        fewer = f"{len(names)} or fewer" if device_map is None else f"{len({*device_map.values()})}, as the map has"
        advice = f"choose devices={fewer}" if len(names) > 1 else "choose strategy=ddp"
        if models := deeper_models(run, layers=parts):
            advice += f", or model={models}"
        layers = f"{count_of(len(names), 'layer')} ({', '.join(names)})"
        raise ConfigError(
            f"strategy={run.strategy.name} can't cut model={run.model.name} into devices={parts} parts: it has "
            f"{layers}: {advice}"
        )
    if device_map is not None:
        check_map(device_map, run, parts=parts, option="strategy.device_map", part="device")
    check_tied(run, device_map, part="device")


def check_map(layers: Mapping[str, int], run: RunConfig, *, parts: int, option: str, part: str) -> None:
    """Refuse an explicit map from layers to parts that misses a layer or a part, or names one that doesn't exist.

    `option` is the map's name, `part` the word for one part.
    """
    names = run.model.layer_names
    for name in layers:
        if name not in names:
            raise ConfigError(f"{option} names {name}, which model={run.model.name} lacks: {choices(name, names)}")
    if missing := [name for name in names if name not in layers]:
        raise ConfigError(f"{option} leaves out {', '.join(missing)}: give each layer a {part}")
    if set(layers.values()) != set(range(parts)):
        used = sorted(set(layers.values()))
        raise ConfigError(f"{option} uses the {part}s {used}: with devices={run.devices} use each of 0 … {parts - 1}")


def check_tied(run: RunConfig, layers: Mapping[str, int] | None, *, part: str) -> None:
    """Refuse to part layers that share their weights. Without a map, parts are contiguous, so the ends are parted."""
    tied = run.model.tied_layers
    if tied and (layers is None or len({layers[name] for name in tied}) > 1):
        raise ConfigError(
            f"strategy={run.strategy.name} puts {' and '.join(tied)} of model={run.model.name} on one {part} each, but "
            f"they share their weights, so their gradients would have to be summed: {_instead_of_tied(run, part)}"
        )


def _instead_of_tied(run: RunConfig, part: str) -> str:
    """What to choose: a model of one's own need not have the option."""
    if "tied" in run.model.__struct_fields__:
        return "choose model.tied=false"
    return (
        f"put them on one {part} by strategy.{'stage' if part == 'stage' else 'device'}_map, give each layer weights "
        "of its own, or choose strategy=ddp"
    )


def assign(
    model: nn.Sequential, run: RunConfig, layers: Mapping[str, int] | None, parts: int | None = None
) -> dict[str, int]:
    """Part of every layer, in the order of the layers; `parts` defaults to the number of devices."""
    names = run.model.layer_names
    if layers is not None:
        return {name: layers[name] for name in names}
    return dict(zip(names, balance(layer_costs(model, run), parts or run.devices), strict=True))


def layer_costs(model: nn.Sequential, run: RunConfig) -> list[float]:
    """Floating-point operations of each layer for one image, counted on shapes alone; parameters break ties."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from parallelbench.models.modules import blank
    from parallelbench.world.numerics import in_arithmetic

    value = blank(run.data, 1, dtype=torch.float32, device="meta")
    costs = []
    for layer in model:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            value = in_arithmetic(deepcopy(layer), torch.float32, "meta").eval()(value)
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


def values_between(model: nn.Sequential, run: RunConfig, device: torch.device, batch_size: int) -> list[Tensor]:
    """The input of each layer for `batch_size` images, and the last one's output, as empty contiguous meta tensors.

    Under autocast some layers give half precision and others don't, by rules that depend on the device. So the forward
    pass runs as on that device, on tensors without contents. `model` may be anywhere and is not changed.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.func import functional_call

    from parallelbench.models.modules import blank
    from parallelbench.world.numerics import Numerics

    numerics, modes = Numerics(run.precision, device.type), [(each, each.training) for each in model.modules()]
    for module, _ in modes:
        module.training = False  # a layer may decide by what it draws, which has no value here
    with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad(), numerics.autocast():
        value = blank(run.data, batch_size, dtype=numerics.dtype, device=device)
        values = [value]
        for layer in model:
            value = functional_call(layer, _empty_state(layer, numerics.dtype, device), (value,))
            values.append(value)
    for module, training in modes:
        module.training = training
    return [torch.empty(value.shape, dtype=value.dtype, device="meta") for value in values]


def _empty_state(layer: nn.Module, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    import torch

    from parallelbench.world.numerics import matching

    return {
        name: torch.empty(
            tensor.shape,
            dtype=matching(tensor.dtype, dtype),
            device=device,
            requires_grad=tensor.requires_grad,
        )
        for name, tensor in (
            *layer.named_parameters(remove_duplicate=False),
            *layer.named_buffers(remove_duplicate=False),
        )
    }


def example_of(value: Tensor, *, requires_grad: bool) -> Tensor:
    """A tensor of the same shape, apart from the other's graph."""
    return value.detach().clone().requires_grad_(requires_grad)


def piece_sizes(size: int, count: int) -> list[int]:
    """Sizes of at most `count` nearly equal pieces, none of them empty."""
    return [piece for i in range(count) if (piece := size * (i + 1) // count - size * i // count)]
