"""The generators that a model of a user's own may draw from: torch's, NumPy's and Python's global ones, and its own."""

from __future__ import annotations

import random
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn

    Held = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
    """A generator that is not a global one."""


@dataclass(frozen=True)
class Generators:
    """Those of this process, and of its GPUs: set, saved and restored together.

    `numpy.random.default_rng()` without a seed begins anew from the system's entropy each time; nobody can set it.
    """

    gpus: Sequence[torch.device] = ()

    def seed(self, seed: int) -> None:
        """Begin all of them from one number, from 0 to 2³² − 1."""
        torch.manual_seed(seed)  # GPUs included
        np.random.seed(seed)
        random.seed(seed)

    def state(self) -> dict[str, Any]:
        """Where they are, as tensors and plain numbers, which `torch.load` reads without executing anything."""
        of_numpy: Any = np.random.get_state()
        name, keys, *place = of_numpy
        return {
            "torch": [torch.get_rng_state(), *map(torch.cuda.get_rng_state, self.gpus)],
            "numpy": [name, keys.tolist(), *place],
            "python": random.getstate(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        host, *of_gpus = state["torch"]
        torch.set_rng_state(host)
        for gpu, of_gpu in zip(self.gpus, of_gpus, strict=False):  # a CPU run has saved none of a GPU
            torch.cuda.set_rng_state(of_gpu, gpu)
        if "numpy" in state:  # checkpoints of earlier releases hold torch's only
            np.random.set_state(tuple(state["numpy"]))
            random.setstate(state["python"])

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Restore them at the end."""
        before = self.state()
        try:
            yield
        finally:
            self.restore(before)


_HELD = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_OF_ALL_MODULES = frozenset(vars(torch.nn.Module()))
"""Attributes that every module has: parameters, hooks and the like."""


def attributes_of(owner: object) -> dict[str, Any]:
    """What an author gives a module, or another object, besides what torch gives all modules."""
    return {name: value for name, value in vars(owner).items() if name not in _OF_ALL_MODULES}


def held_generators(module: nn.Module) -> dict[str, Held]:
    """Generators in attributes of a module and those below it, also in lists, tuples and dicts, by their paths."""
    found: dict[str, Held] = {}
    for path, owner in module.named_modules():
        for name, value in attributes_of(owner).items():
            found |= _generators_in(value, f"{path}.{name}".lstrip("."))
    return found


def _generators_in(value: Any, path: str) -> dict[str, Held]:
    if isinstance(value, _HELD):
        return {path: value}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    return {key: each for name, inner in items for key, each in _generators_in(inner, f"{path}.{name}").items()}


def state_of(generator: Held) -> Any:
    """Where a generator is, as a tensor or plain numbers."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return _plain(generator.get_state(legacy=False))
    return _plain(generator.bit_generator.state)


def restore(generator: Held, state: Any) -> None:
    """Go on from a state that `state_of` gave."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return value.tolist() if isinstance(value, np.ndarray) else value
