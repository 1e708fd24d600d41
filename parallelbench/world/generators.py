"""The generators that a model of a user's own may draw from, all of them: torch's, NumPy's global one, and Python's."""

from __future__ import annotations

import random
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


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
