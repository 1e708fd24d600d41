"""Which layer goes to which device, what each costs, and what flows between them; loads torch only when it counts.

The layers are given by an explicit map, or cut into contiguous parts of nearly equal cost.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from parallelbench.errors import choices, count_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch
    from torch import Tensor, nn

    from parallelbench.config.rule import Rules
    from parallelbench.config.run import RunConfig


def valid_map(layers: Mapping[str, int] | None, run: RunConfig, *, parts: int, part: str) -> Rules:
    """Refuses more parts than layers; maps from layers to parts that miss a layer or a part, or name one that doesn't
    exist; and to part layers that share their weights. Without a map, parts are contiguous, so the ends are parted.

    `part`: the word for one part, "device" or "stage".
    """
    names, tied, option = run.model.layer_names, run.model.anatomy().tied, f"strategy.{part}_map"
    yield (
        parts > len(names),
        f"strategy={run.strategy.name} can't cut model={run.model.name} into parts for {count_of(parts, part)}: it has "
        f"{count_of(len(names), 'layer')} ({', '.join(names)})",
        ("devices", "model", "strategy.stages_per_rank", "strategy.stages", "strategy"),
    )
    if layers is not None:
        unknown = [name for name in layers if name not in names]
        for name in unknown[:1]:
            yield True, f"{option} names {name}, which model={run.model.name} lacks: {choices(name, names)}", (option,)
        missing = [name for name in names if name not in layers]
        yield missing and not unknown, f"{option} leaves out {', '.join(missing)}: give each layer a {part}", (option,)
        if unknown or missing:
            return
        used = sorted(set(layers.values()))
        yield (
            used != list(range(parts)),
            f"{option} uses the {part}s {used}: with devices={run.devices} use each of 0 … {parts - 1}",
            (option, "devices"),
        )
    yield (
        tied and (layers is None or len({layers[name] for name in tied}) > 1),
        f"strategy={run.strategy.name} puts {' and '.join(tied)} of model={run.model.name} on one {part} each, but "
        f"they share their weights, so their gradients would have to be summed; {option} may put them on one",
        ("model.tied", option, "strategy"),
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
    from torch.func import functional_call
    from torch.utils.flop_counter import FlopCounterMode

    from parallelbench.models.modules import blank

    value = blank(run.data, 1, dtype=torch.float32, device="meta")
    costs = []
    for layer in model:
        state = _empty_state(layer, torch.float32, torch.device("meta"))
        with _as_in_evaluation(layer), torch.no_grad(), FlopCounterMode(display=False) as counter:
            value = functional_call(layer, state, (value,))
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

    numerics, fakes = Numerics(run.precision, device.type), FakeTensorMode(allow_non_fake_inputs=True)
    with _as_in_evaluation(model), fakes, torch.enable_grad(), numerics.autocast():
        value = blank(run.data, batch_size, dtype=numerics.dtype, device=device)
        values = [value]
        for layer in model:
            value = functional_call(layer, _empty_state(layer, numerics.dtype, device), (value,))
            values.append(value)
    return [torch.empty(value.shape, dtype=value.dtype, device="meta") for value in values]


@contextmanager
def _as_in_evaluation(model: nn.Module) -> Iterator[None]:
    """In training a layer may decide by what it draws, which has no value here."""
    modes = [(each, each.training) for each in model.modules()]
    for module, _ in modes:
        module.training = False
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


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


def piece_sizes(size: int, count: int) -> list[int]:
    """Sizes of at most `count` nearly equal pieces, none of them empty."""
    return [piece for i in range(count) if (piece := size * (i + 1) // count - size * i // count)]
