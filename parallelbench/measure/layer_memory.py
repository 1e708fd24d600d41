"""Counts what each layer of a run's model holds while it trains, on tensors without values.

As a program: `python -m parallelbench.measure.layer_memory [PLUGIN]` reads a run's configuration as JSON and prints the
counts as JSON. Layers are counted at two numbers of samples; everything is a straight line between and beyond.
"""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parallelbench.config.build import from_mapping
from parallelbench.errors import program
from parallelbench.measure.layer_records import LayerMemory, Linear, ModelMemory
from parallelbench.models.modules import blank, built, parameters_by_layer
from parallelbench.models.recomputation import recomputing
from parallelbench.world.numerics import Numerics

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from parallelbench.config.run import RunConfig


SAMPLES = (8, 16)
"""Counted at; small enough for the counting, large enough that no dimension is 1."""
Counts = tuple[float, float, float]
"""Bytes kept, and the peaks of forward and backward."""
NO_UPDATE = {"cpu": 0.0, "cuda": 0.0}
"""Of what has no parameters, by type of device."""


def model_memory(run: RunConfig) -> ModelMemory:
    """Counted layer by layer, forward and backward, under the run's precision."""
    numerics = Numerics(run.precision, "cpu", loss=run.loss.build())
    usual = torch.get_default_dtype()
    with FakeTensorMode(allow_non_fake_inputs=True):
        torch.set_default_dtype(numerics.dtype)
        try:
            model = built(run, numerics.dtype).train()
            model = recomputing(model, run)
        finally:
            torch.set_default_dtype(usual)
        few, many = ([*_counted(model, run, numerics, samples=count)] for count in SAMPLES)
        owned = parameters_by_layer(model)
        alike = {_sizes(own): own for own in owned}  # many blocks are: each is updated once
        peaks = {sizes: _update_peaks(own, run) for sizes, own in alike.items()}
        updates = [peaks[_sizes(own)] for own in owned]
        together = _update_peaks([*model.parameters()], run)
    names = [*dict(model.named_children()), "loss"]
    modules: list[nn.Module | None] = [*model, None]
    counted = zip(few, many, strict=True)
    parts = zip(names, modules, counted, [*updates, NO_UPDATE], [*owned, []], strict=True)
    rows = [_row(name, layer, counts, updates=update, own=own) for name, layer, counts, update, own in parts]
    sample = float(blank(run.data, 1, dtype=numerics.dtype).nbytes)
    at_once = {kind: peak > max(layer[kind] for layer in updates) for kind, peak in together.items()}
    return ModelMemory(layers=rows[:-1], loss=rows[-1], input_bytes=sample, updates_at_once=at_once)


def _row(
    name: str,
    layer: nn.Module | None,
    counts: tuple[Counts, Counts],
    *,
    updates: dict[str, float],
    own: Sequence[nn.Parameter],
) -> LayerMemory:
    first, second = SAMPLES
    slopes = [(b - a) / (second - first) for a, b in zip(*counts, strict=True)]
    kept, forward, backward = (Linear(a - slope * first, slope) for a, slope in zip(counts[0], slopes, strict=True))
    return LayerMemory(
        name=name,
        tensors=[p.numel() * p.element_size() for p in own],
        buffer_bytes=0 if layer is None else sum(b.numel() * b.element_size() for b in layer.buffers()),
        kept=kept,
        forward_peak=forward,
        backward_peak=backward,
        update_peaks=updates,
    )


def _counted(model: nn.Sequential, run: RunConfig, numerics: Numerics, *, samples: int) -> list[Counts]:
    """Each layer's counts, and the loss's, in a pass over the whole model that is cut between layers."""
    counts: list[Counts] = []
    values = blank(run.data, samples, dtype=numerics.dtype)
    labels = torch.zeros(samples, *run.data.label_shape, dtype=torch.int64)
    for layer in model:
        values, found = _layer_counts(layer, values, numerics, first=not counts)
        counts.append(found)
    return [*counts, _loss_counts(values, labels, numerics)]


def _layer_counts(layer: nn.Module, values: Tensor, numerics: Numerics, *, first: bool) -> tuple[Tensor, Counts]:
    """Forward and backward of one layer. Its input belongs to the layer before."""
    given = values.detach().requires_grad_(not first)
    with Live([given, *layer.parameters(), *layer.buffers()]) as live:
        with numerics.autocast():
            output = layer(given)
        kept, forward = live.now, live.peak
        following = {"size": output.shape, "dtype": output.dtype}
        # Nobody but the graph may refer to the output and its gradient, as in a step.
        total = (output * 1.0).sum()
        del output
        live.peak = live.now
        total.backward()
        backward = live.peak - kept
    for parameter in layer.parameters():
        parameter.grad = None
    return torch.empty(**following), (kept, forward, backward)


def _loss_counts(values: Tensor, labels: Tensor, numerics: Numerics) -> Counts:
    logits = values.detach().requires_grad_()
    with Live([logits, labels]) as live:
        loss = numerics.loss(logits, labels)
        kept, forward = live.now, live.peak
        live.peak = live.now
        loss.backward()
        backward = live.peak - kept
    return kept, forward, backward


def _sizes(parameters: Sequence[nn.Parameter]) -> tuple[tuple[torch.Size, torch.dtype, bool], ...]:
    """All that an update's memory depends on."""
    return tuple((each.shape, each.dtype, each.requires_grad) for each in parameters)


def _update_peaks(parameters: Sequence[nn.Parameter], run: RunConfig) -> dict[str, float]:
    """What the second update allocates beyond the states that the first one made, in bytes, by type of device."""
    return {kind: _update_peak(parameters, run, kind) if parameters else 0.0 for kind in NO_UPDATE}


def _update_peak(parameters: Sequence[nn.Parameter], run: RunConfig, device_type: str) -> float:
    optimizer = run.optimizer.build(parameters, run, device_type)
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    held = [*parameters, *(p.grad for p in parameters if p.grad is not None)]
    held += [each for each in tree_leaves(list(optimizer.state.values())) if isinstance(each, torch.Tensor)]
    with Live(held) as live:
        optimizer.step()
        return float(live.peak)


class Live(TorchDispatchMode):
    """Bytes of the storages that operations have made and that are still referred to."""

    def __init__(self, known: Sequence[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen = {each.untyped_storage()._cdata for each in known}
        self._known = list(known)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let the operation happen, and count what it made."""
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self._hold(value.untyped_storage())
        return result

    def _hold(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._seen:
            return
        key, size = storage._cdata, storage.nbytes()
        self._seen.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


def main(arguments: Sequence[str]) -> int:
    """Count the memory of the configuration on standard input."""
    run = from_mapping(msgspec.json.decode(sys.stdin.buffer.read()), arguments[0] if arguments else None)
    print(msgspec.json.encode(model_memory(run)).decode())
    return 0


if __name__ == "__main__":
    sys.exit(program(lambda: main(sys.argv[1:])))
