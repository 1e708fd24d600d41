"""Counts what each layer of a run's model does for one sample, and what training takes at least."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from parallelbench.config.build import from_mapping
from parallelbench.errors import program
from parallelbench.measure.layer_records import ELEMENTWISE, KINDS, Kernels, LayerCount
from parallelbench.models.modules import blank, built, parameters_by_layer
from parallelbench.models.plan import planned

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from parallelbench.config.components import Split
    from parallelbench.config.run import RunConfig


WINOGRAD = 4.0
"""By how much the fastest algorithm in use multiplies less in a convolution of 3×3: F(4×4, 3×3) of Lavin and Gray 2016
(arXiv 1509.09308). Larger kernels may be transformed by FFT, which saves no more than all values of a kernel but one.
"""
_SAVED = {1: 1.0, 9: WINOGRAD}
"""Values of a kernel → by how much fewer multiplications there may be."""
LEFT = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1, "aten::_grouped_mm": 0}
LEFT |= {"aten::mv": 0, "aten::addmv": 1, "aten::_trilinear": 1}
"""Matrix products → which argument is the left matrix; of `nn.Bilinear` the matrices of all outputs."""


FP32 = 4
"""Bytes of a number."""
ALIGNED = 8
"""Tensor cores take matrices of half precision at full speed where this divides their sides (cuBLAS: 16 bytes)."""


LARGE = 50_000_000
"""Parameters from which a model is counted on tensors without values: these load sympy, for a second; values take
memory that a model's devices have and the host may not.
"""


def count_facts(run: RunConfig, *, parameters: int) -> dict[str, Any]:
    """Columns of the table `run`, counted in one pass; `parameters`: the model's."""
    counted = counts_without_values(run) if parameters >= LARGE else model_counts(run)
    layers = msgspec.json.encode(counted.layers).decode()
    return {"least_flop_per_sample": counted.least_flop, "layers_json": layers}


class Counts(NamedTuple):
    """What was counted while one sample passed."""

    layers: list[LayerCount]
    least_flop: float | None
    """What training takes at least: forward, and backward for weights and inputs; None where nothing counts.

    Only matrix products, those of attention included, and convolutions count. The input of the first that is trained
    needs no gradient, and frozen weights need none: of a layer that is partly frozen, no weights count.
    """


def model_counts(run: RunConfig) -> Counts:
    """Counted on the CPU."""
    with torch.random.fork_rng(devices=[]), torch.no_grad(), _one_by_one():
        model = built(run, torch.float32).eval()
        values = blank(run.data, 1)
        plan, rows, least_flop, is_trained = run.model.anatomy().linears.plan, list[LayerCount](), list[float](), False
        for (name, layer), own in zip(model.named_children(), parameters_by_layer(model), strict=True):
            values, row, forward = _counted(name, layer, values, plan, is_trained=is_trained)
            rows.append(msgspec.structs.replace(row, parameters=sum(each.numel() for each in own), tensors=len(own)))
            trained = [each.requires_grad for each in layer.parameters()]
            begins = any(trained) and not is_trained
            is_trained |= any(trained)
            # Forward, for inputs, and for weights or, where there are none, for the other factor.
            ways = 1 + is_trained + (is_trained and all(trained))
            least_flop += [ways * each for each in forward]
            if begins and forward:
                least_flop.append(-forward[0])
    return Counts(rows, sum(least_flop) if least_flop else None)


@contextmanager
def _one_by_one() -> Iterator[None]:
    """Let torch call operations one by one where it has one for a whole layer, whose products nobody would see.

    Attention and encoder layers have one for when nothing has a gradient, so that training calls it never; LSTMs have
    oneDNN's.
    """
    attention, mkldnn = torch.backends.mha, torch.backends.mkldnn
    before = attention.get_fastpath_enabled(), mkldnn.enabled
    attention.set_fastpath_enabled(False)
    mkldnn.enabled = False  # type: ignore[assignment] # a property of the module
    try:
        yield
    finally:
        attention.set_fastpath_enabled(before[0])
        mkldnn.enabled = before[1]


def _counted(
    name: str, layer: nn.Module, values: torch.Tensor, plan: Mapping[str, Split], *, is_trained: bool
) -> tuple[torch.Tensor, LayerCount, list[float]]:
    """What a layer does; `is_trained`: whether one before it is, so that its input has a gradient."""
    planned = _Planned(name, layer, plan, is_trained=is_trained)
    with _LayerCounter() as counted:
        values = layer(values)
    planned.remove()
    row = LayerCount(
        name=name,
        product_flop=counted.product_flop,
        convolution_flop=counted.convolution_flop,
        grouped_flop=counted.grouped_flop,
        output_bytes=float(FP32 * counted.values),
        operations=counted.operations,
        parameters=0,
        tensors=0,
        boundary_bytes=float(FP32 * values.numel()),
        shardable_flop=planned.flop,
        shardable_parameters=planned.parameters,
        exchanged_bytes=float(FP32 * planned.exchanged_values),
        exchanges=planned.exchanges,
        unaligned_flop=counted.unaligned_flop,
        kernels=counted.kernels,
    )
    return values, row, counted.least_flop


class _Planned:
    """The linear layers of a model's tensor plan below one of its layers, seen by hooks."""

    def __init__(self, name: str, layer: nn.Module, plan: Mapping[str, Split], *, is_trained: bool) -> None:
        # A model that begins with a linear layer gives it the data, and no gradient of them is exchanged.
        self._first = None if is_trained else next(layer.parameters(), None)
        self.flop, self.parameters, self.exchanged_values, self.exchanges = 0.0, 0, 0, 0
        self._handles = []
        whole = nn.ModuleDict({name: layer})
        for path, split in planned(whole, plan).items():
            linear = whole.get_submodule(path)
            self._handles.append(linear.register_forward_hook(self._hook(split)))
            self.parameters += sum(each.numel() for each in linear.parameters())

    def _hook(self, split: Split) -> Any:
        def see(linear: nn.Linear, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
            self.flop += 2.0 * output.numel() * linear.in_features
            if split == "row" or linear.weight is not self._first:
                self.exchanged_values += output.numel() if split == "row" else inputs[0].numel()
                self.exchanges += 1

        return see

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()


class _LayerCounter(TorchDispatchMode):
    """Counts what is computed and written."""

    def __init__(self) -> None:
        super().__init__()
        self.product_flop = self.unaligned_flop = self.convolution_flop = self.grouped_flop = 0.0
        self.values = self.operations = 0
        self.least_flop: list[float] = []
        self.kernels: dict[str, Kernels] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let the operation happen, and count it."""
        result, name = func(*args, **(kwargs or {})), func._schema.name
        if name in LEFT:
            left = args[LEFT[name]]
            inputs = left[0].numel() if name == "aten::_trilinear" else left.shape[-1]
            outputs = result.shape[-1]
            flop = 2.0 * result.numel() * inputs
            if name == "aten::_grouped_mm":  # groups divide what is summed over, or the outputs, of which each has one
                flop = min(flop, 2.0 * left.numel() * outputs)
            self.product_flop += flop
            if inputs % ALIGNED or outputs % ALIGNED:
                self.unaligned_flop += flop
            self.least_flop.append(flop)
        elif name == "aten::convolution":
            kernel, is_transposed = args[1], args[6]
            # A transposed one spreads each value of its input, where others collect each of their output.
            places, size = args[0].numel() if is_transposed else result.numel(), kernel[0, 0].numel()
            flop = 2.0 * places * kernel[0].numel()
            self.least_flop.append(flop / _SAVED.get(size, size))
            grouped, weights = args[-1] > 1, float(kernel.numel() / args[-1])
            if grouped:
                self.grouped_flop += flop
            else:
                self.convolution_flop += flop
            self._add("grouped" if grouped else "convolution", flop, weights)
        elif name.startswith("aten::_scaled_dot_product"):
            queries, keys = args[0], args[1]
            # Scores, and their product with the values.
            flop = 2.0 * (queries.numel() + _tensors(result)[0].numel()) * keys.shape[-2]
            self.product_flop += flop
            self.least_flop.append(flop * (_seen(queries, keys) if _given(func, args, kwargs, "is_causal") else 1.0))
            self._add("attention", flop, float(keys.shape[-2] * keys.shape[-1]))
        elif _writes(func):
            self._add(KINDS.get(name, ELEMENTWISE), float(FP32 * sum(each.numel() for each in _tensors(result)[:1])))
        if _writes(func):
            self.operations += 1
            self.values += sum(each.numel() for each in _tensors(result))
        return result

    def _add(self, kind: str, work: float, extent: float = 0.0) -> None:
        found = Kernels(operations=1, work=work, extent=extent)
        self.kernels[kind] = found if kind not in self.kernels else found.joined(self.kernels[kind])


def _given(func: Any, args: Any, kwargs: Any, name: str) -> Any:
    """The argument of this name; None where it was left out."""
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **(kwargs or {})}.get(name)


def _seen(queries: torch.Tensor, keys: torch.Tensor) -> float:
    """Share of the pairs of a query and a key that a causal mask leaves; the kernels for it pass over the others."""
    asked, there = queries.shape[-2], keys.shape[-2]
    return sum(min(query + 1, there) for query in range(asked)) / (asked * there)


def _writes(func: Any) -> bool:
    """Whether an operation makes something; of a tensor without values, asking for its device is one, too."""
    return not _is_view(func) and not func._schema.name.startswith("prim::")


def _is_view(func: Any) -> bool:
    """Whether an operation returns other words for the memory of its input."""
    return any(value.alias_info is not None and not value.alias_info.is_write for value in func._schema.returns)


def _tensors(result: Any) -> list[torch.Tensor]:
    values = result if isinstance(result, (tuple, list)) else [result]
    return [each for each in values if isinstance(each, torch.Tensor)]


def main(arguments: Sequence[str]) -> int:
    """Count the layers of the configuration on standard input."""
    run = from_mapping(msgspec.json.decode(sys.stdin.buffer.read()), arguments[0] if arguments else None)
    print(msgspec.json.encode(counts_without_values(run).layers).decode())
    return 0


def counts_without_values(run: RunConfig) -> Counts:
    """The same, of a model that may be too large for this machine; takes seconds more of imports."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            return model_counts(run)
    except Exception:  # a user's model may look at values; where it is broken, this raises the same
        return model_counts(run)


if __name__ == "__main__":
    sys.exit(program(lambda: main(sys.argv[1:])))
