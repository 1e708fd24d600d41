"""What torch's processes and the ranks of another framework hand each other: files in the attempt's folder.

```
reference/
  facts.json             columns of the `run` table that torch knows
  initial.npz            the initial parameters and buffers, under torch's names, in torch's layout
  order-<epoch>.npz      the samples of every step: samples, and where images are augmented down, right, flip
  checked/               the same of the run that the parity check trains, and
    expected-<step>.npz  what torch computes on one device in each of its steps
  optimizer.npz          what the optimizer keeps after the last epoch
  closing-<k>.npz        what was trained after the last epoch (k = 0), and after each of some further steps
```
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
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

    def write_initial(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Hand over the initial state."""
        self.folder.mkdir(parents=True, exist_ok=True)
        _write(self.folder / "initial.npz", state)

    def initial(self) -> State:
        """The initial state."""
        return _read(self.folder / "initial.npz")

    def write_order(self, epoch: int, order: Order) -> None:
        """Hand over an epoch's order."""
        known = {name: values for name, values in order._asdict().items() if values is not None}
        _write(self.folder / f"order-{epoch}.npz", known)

    def order(self, epoch: int) -> Order:
        """An epoch's order."""
        return Order(**_read(self.folder / f"order-{epoch}.npz"))

    def write_step(self, name: str, step: ComparedStep) -> None:
        """Hand over a step: expected-1 …, closing-0 …"""
        tensors = {f"{_GRADIENT}{key}": value for key, value in step.gradients.items()}
        tensors |= {f"{_STATE}{key}": value for key, value in step.state.items()}
        numbers = {"loss": np.array(step.loss), "evaluated": np.array(step.evaluated)}
        _write(self.folder / f"{name}.npz", numbers | tensors)

    def step(self, name: str) -> ComparedStep:
        """A step that was handed over."""
        from parallelbench.training.checks.parity import ComparedStep

        read = _read(self.folder / f"{name}.npz")
        gradients, state = (
            {key.removeprefix(part): value for key, value in read.items() if key.startswith(part)}
            for part in (_GRADIENT, _STATE)
        )
        return ComparedStep(float(read["loss"]), gradients, state, read["evaluated"].tolist())

    def write_optimizer(self, kept: Mapping[str, Mapping[str, NDArray[Any]]]) -> None:
        """Hand over what the optimizer keeps of each parameter: torch's key → parameter → array."""
        _write(
            self.folder / "optimizer.npz",
            {f"{key}/{name}": value for key, tensors in kept.items() for name, value in tensors.items()},
        )

    def optimizer(self) -> dict[str, State]:
        """The same."""
        kept: dict[str, State] = {}
        for path, value in _read(self.folder / "optimizer.npz").items():
            key, _, name = path.partition("/")
            kept.setdefault(key, {})[name] = value
        return kept

    def write_facts(self, facts: Mapping[str, Any]) -> None:
        """Hand over columns of the `run` table that torch knows."""
        (self.folder / "facts.json").write_bytes(msgspec.json.encode(facts))

    def facts(self) -> dict[str, Any]:
        """Columns of the `run` table."""
        facts: dict[str, Any] = msgspec.json.decode((self.folder / "facts.json").read_bytes())
        return facts

    def has(self, name: str) -> bool:
        """Whether this step was handed over."""
        return (self.folder / f"{name}.npz").exists()


def _write(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    savez: Any = np.savez  # its keywords are arrays' names
    savez(path, **arrays)


def _read(path: Path) -> State:
    with np.load(path) as read:
        return {name: read[name] for name in read.files}
