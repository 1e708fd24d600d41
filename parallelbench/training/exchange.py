"""What torch's processes and the ranks of another framework hand each other: files in the attempt's folder.

```
reference/
  facts.npz              columns of the `run` table that torch knows
  initial.npz            the initial parameters and buffers, under torch's names, in torch's layout
  order-<epoch>.npz      the samples of every step: samples, and where images are augmented down, right, flip
  checked/               the same of the run that the parity check trains, and
    expected-<step>.npz  what torch computes on one device in each of its steps
  optimizer.npz          what the optimizer keeps after the last epoch: torch's key / parameter
  closing-<k>.npz        what was trained after the last epoch (k = 0), and after each of some further steps
```
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from parallelbench.results.attempt import Attempt
    from parallelbench.training.checks.parity import ComparedStep


State = dict[str, "NDArray[Any]"]
_GRADIENT, _STATE = "gradient/", "state/"


class Order(NamedTuple):
    """One epoch's samples in training order, over all ranks; each of shape (steps, global batch)."""

    samples: NDArray[np.int32]
    down: NDArray[np.int32] | None = None
    right: NDArray[np.int32] | None = None
    flip: NDArray[np.uint8] | None = None


class Exchange(NamedTuple):
    """The files of one attempt, or of its checked run."""

    folder: Path

    @classmethod
    def of(cls, attempt: Attempt) -> Exchange:
        """Those of an attempt."""
        return cls(attempt.path / "reference")

    @property
    def checked(self) -> Exchange:
        """Those of the run that the parity check trains."""
        return Exchange(self.folder / "checked")

    def write(self, name: str, arrays: Mapping[str, Any]) -> None:
        """Hand over arrays, or numbers, by name."""
        self.folder.mkdir(parents=True, exist_ok=True)
        savez: Any = np.savez  # its keywords are arrays' names
        savez(self.folder / f"{name}.npz", **arrays)

    def read(self, name: str) -> State:
        """What was handed over."""
        with np.load(self.folder / f"{name}.npz") as read:
            return {array: read[array] for array in read.files}

    def has(self, name: str) -> bool:
        """Whether this was handed over."""
        return (self.folder / f"{name}.npz").exists()

    def write_order(self, epoch: int, order: Order) -> None:
        """Hand over an epoch's order."""
        self.write(f"order-{epoch}", {name: each for name, each in order._asdict().items() if each is not None})

    def order(self, epoch: int) -> Order:
        """An epoch's order."""
        return Order(**self.read(f"order-{epoch}"))

    def write_step(self, name: str, step: ComparedStep) -> None:
        """Hand over a step: expected-1 …, closing-0 …"""
        tensors = {f"{_GRADIENT}{key}": value for key, value in step.gradients.items()}
        tensors |= {f"{_STATE}{key}": value for key, value in step.state.items()}
        self.write(name, {"loss": step.loss, "evaluated": step.evaluated, **tensors})

    def step(self, name: str) -> ComparedStep:
        """A step that was handed over."""
        from parallelbench.training.checks.parity import ComparedStep

        read = self.read(name)
        gradients, state = (
            {key.removeprefix(part): value for key, value in read.items() if key.startswith(part)}
            for part in (_GRADIENT, _STATE)
        )
        return ComparedStep(float(read["loss"]), gradients, state, read["evaluated"].tolist())
