"""Random numbers that a model draws: which operations draw them, how many, and from which point of a stream."""

from __future__ import annotations

import hashlib
import random
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from parallelbench.world.generators import held_generators, state_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn


class Drawing(TorchDispatchMode):
    """Within its context, what draws from torch's generators, the global ones of NumPy and Python, and those of NumPy
    and Python that a model holds.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__()
        self.names: list[str] = []
        """Of torch's operations, as they were called; generators whose state is another one at the end follow."""
        self.generators: list[torch.Generator] = []
        """Those that operations are given: none of the global ones."""
        held = {} if model is None else held_generators(model)
        # Those of torch are noticed operation by operation.
        self._held = {path: each for path, each in held.items() if not isinstance(each, torch.Generator)}

    def __enter__(self) -> Self:
        """Listen to this thread, and to those that autograd starts for it."""
        self._before = self._states()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """Stop listening."""
        super().__exit__(*error)
        self._moved = [name for name, state in self._states().items() if state != self._before[name]]
        self.names += self._moved

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let the operation happen, and note it if it draws."""
        given = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | (kwargs or {})
        # Attention is tagged whether it drops something or not.
        if torch.Tag.nondeterministic_seeded not in func.tags or given.get("dropout_p") == 0.0:
            return func(*args, **(kwargs or {}))
        self.names.append(func._schema.name)
        self.generators += filter(None, [given.get("generator")])
        self.begins(given)
        result = func(*args, **(kwargs or {}))
        self.ends(result)
        return result

    def _states(self) -> dict[str, object]:
        return states() | {path: state_of(generator) for path, generator in self._held.items()}

    def begins(self, given: Mapping[str, Any]) -> None:
        """An operation with these arguments draws next."""

    def ends(self, result: Any) -> None:
        """This is what it gave."""


class DrawnNumbers(Drawing):
    """Also how many there are, and where in their streams they begin."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0
        """Values of the results of what draws; of NumPy's and Python's generators, one for each that has moved."""
        self.streams: set[int] = set()
        """The point of the stream at which each operation began, or at which NumPy's and Python's generators ended."""

    def __exit__(self, *error: Any) -> None:
        """Stop listening."""
        super().__exit__(*error)
        after = self._states()
        for name in set(self._moved) - {"torch"}:
            self.numbers += 1
            self.streams.add(_digest(repr(after[name]).encode()))

    def begins(self, given: Mapping[str, Any]) -> None:
        """Note the state of the operation's generator."""
        generator = given.get("generator")
        tensors = [each for each in given.values() if isinstance(each, Tensor)]
        device = tensors[0].device if tensors else torch.device(given.get("device") or "cpu")
        if generator is not None:
            state = generator.get_state()
        else:
            state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
        self.streams.add(_digest(state.numpy().tobytes()))

    def ends(self, result: Any) -> None:
        """Count the values of its first tensor."""
        first = result[0] if isinstance(result, (tuple, list)) else result
        self.numbers += first.numel()


def _digest(state: bytes) -> int:
    return int.from_bytes(hashlib.sha256(state).digest()[:6], "big")  # a float holds it


def states() -> dict[str, object]:
    """Of the generators that are not noticed operation by operation, and of torch's on the CPU."""
    algorithm, key, *rest = np.random.get_state()
    with no_dispatch():  # not even among tensors without values does this one have none
        of_torch = torch.get_rng_state().numpy().tobytes()
    return {
        "torch": of_torch,
        "numpy": (algorithm, np.asarray(key).tobytes(), *rest),
        "random": random.getstate(),
    }
