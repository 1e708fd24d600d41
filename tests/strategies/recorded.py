"""What the process groups were asked to carry, taken from the collectives' own operators."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Recorded(TorchDispatchMode):
    """Bytes that collectives carry and how many there are, by name, as they are called."""

    def __init__(self) -> None:
        super().__init__()
        self.carried: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # comes again as plain tensors
        namespace, _, operator = str(function.overloadpacket).partition(".")
        name = operator.strip("_").replace("all_reduce", "allreduce")
        if namespace == "c10d" or (namespace == "_c10d_functional" and not name.startswith(("wait", "wrap"))):
            # Whichever of input and output is the whole message.
            sizes = [value.numel() * value.element_size() for value in tree_leaves(args) if torch.is_tensor(value)]
            self.carried[name] += max(sizes)
            self.calls[name] += 1
        return function(*args, **(kwargs or {}))
