"""What a step computes with, as torch's dispatcher sees it: what a run claims is observed, not copied."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    import torch

_PRODUCTS = ("convolution", "mm", "addmm", "bmm", "baddbmm", "linear")
_WAYS = ("fused", "foreach")


class ObservedWork(TorchDispatchMode):
    """Listens to this thread, and to those that autograd starts for it."""

    def __init__(self) -> None:
        super().__init__()
        self.products: set[torch.dtype] = set()
        """Formats of the results of products and convolutions."""
        self.updates: set[str] = set()
        """Ways of updating many tensors at once that were seen: fused, foreach."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let the operation happen, and look at it."""
        result = func(*args, **(kwargs or {}))
        if func.namespace == "aten":
            name = func._schema.name.partition("::")[2]
            if name in _PRODUCTS:
                self.products.add(result.dtype.to_real())
            self.updates.update(way for way in _WAYS if name.startswith(f"_{way}_"))
        return result
