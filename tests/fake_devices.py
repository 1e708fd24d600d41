"""GPUs that are not there: CUDA tensors without values (`FakeTensorMode`), on devices that torch tells apart.

torch's own backward pass has a thread for each GPU, which it can't start here; so the graph is walked in this thread.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch._dynamo.polyfills.loader  # looks at torch's own functions, in whose place others stand later
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode


class AnyNumber(TorchDispatchMode):
    """The host reads 1 wherever it asks a tensor for a number: there are no values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name == "aten::_local_scalar_dense":
            return 1.0 if args[0].is_floating_point() else 1
        return True if func._schema.name == "aten::equal" else func(*args, **(kwargs or {}))


def moved(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """In place of `Module._apply`, which wants to swap the memory of parameters that have none."""
    for child in module.children():
        moved(child, function)
    for name, parameter in module.named_parameters(recurse=False):
        module.register_parameter(name, nn.Parameter(function(parameter.detach()), parameter.requires_grad))
    for name, buffer in module.named_buffers(recurse=False):
        setattr(module, name, function(buffer))
    return module


def backward(tensors: Any, grad_tensors: Any = None, *_: Any, **__: Any) -> None:
    """In place of `torch.autograd.backward`: the same nodes, each once all that it needs is there."""
    roots: Sequence[Tensor] = [tensors] if isinstance(tensors, Tensor) else tensors
    given = [grad_tensors] if isinstance(grad_tensors, Tensor) else grad_tensors or [None] * len(roots)
    waiting: dict[Any, int] = defaultdict(int)
    seen, left = set(), [root.grad_fn for root in roots]
    while left:
        if (node := left.pop()) in seen or node is None:
            continue
        seen.add(node)
        for following, _ in node.next_functions:
            waiting[following] += 1
            left.append(following)
    arrived: dict[Any, dict[int, Tensor]] = defaultdict(dict)
    for root, gradient in zip(roots, given, strict=True):
        arrived[root.grad_fn][root.output_nr] = torch.ones_like(root) if gradient is None else gradient
    ready = [node for node in dict.fromkeys(root.grad_fn for root in roots) if not waiting[node]]
    with torch.no_grad():
        while ready:
            node = ready.pop()
            for (following, slot), gradient in _called(node, arrived.pop(node)):
                if gradient is not None:
                    expected = following._input_metadata[slot]
                    assert gradient.device == expected.device, (node, gradient.device, expected.device)
                    gradient = gradient.sum_to_size(expected.shape).to(expected.dtype)  # as an engine does
                    before = arrived[following].get(slot)
                    arrived[following][slot] = gradient if before is None else before + gradient
                waiting[following] -= 1
                if not waiting[following]:
                    ready.append(following)


def _called(node: Any, arrived: dict[int, Tensor]) -> Iterator[tuple[tuple[Any, int], Tensor | None]]:
    """Where the gradients go of what the node's forward pass was given, and these."""
    edges = [edge for edge in node.next_functions if edge[0] is not None]
    if hasattr(node, "variable"):
        _accumulate(node.variable, arrived[0])
        return
    gradients = [arrived.get(slot) for slot in range(len(node._input_metadata))]
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        found = node.apply(*gradients)
        found = found if isinstance(found, tuple) else (found,)
        found = [gradient for gradient, needed in zip(found, node.needs_input_grad, strict=False) if needed]
    else:
        found = node(*gradients)
        found = found if isinstance(found, tuple) else (found,)
        found = [each for each, (following, _) in zip(found, node.next_functions, strict=True) if following is not None]
    yield from zip(edges, found, strict=True)


def _accumulate(variable: Tensor, gradient: Tensor) -> None:
    variable.grad = gradient.detach() if variable.grad is None else variable.grad + gradient
    for hook in (variable._post_accumulate_grad_hooks or {}).values():  # type: ignore[attr-defined]
        hook(variable)


class NoReducer(nn.Module):
    """In place of DDP, whose reducer is written in C++ and needs memory."""

    def __init__(self, module: nn.Module, **_: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any) -> Any:
        return self.module(*inputs)

    def no_sync(self) -> Any:
        return nullcontext()

    def register_comm_hook(self, *_: Any) -> None: ...

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(*_: Any) -> None: ...


_ASKED = ("Stream", "Event", "current_stream", "stream", "set_rng_state", "set_device")
"""What torch's strategies ask of CUDA, which nothing here waits for."""


@contextmanager
def without_values(own: int = 0) -> Iterator[None]:
    """Within the context all tensors are without values, and may be on any GPU; `own`: the number of this thread's."""
    with (
        mock.patch.object(nn.Module, "_apply", moved),
        mock.patch.object(Tensor, "backward", lambda self, gradient=None, **_: backward(self, gradient)),
        mock.patch.object(torch.autograd, "backward", backward),
        mock.patch.object(nn.parallel, "DistributedDataParallel", NoReducer),
        mock.patch.multiple(torch.cuda, **dict.fromkeys(_ASKED, mock.MagicMock())),
        mock.patch.multiple(torch.cuda, current_device=lambda: own, get_rng_state=lambda *_: torch.zeros(1)),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(8, 0)),
        FakeTensorMode(allow_non_fake_inputs=True),
        AnyNumber(),
    ):
        yield
