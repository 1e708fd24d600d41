"""What each layer of a model holds while it trains, as torch's allocations were counted: a line in the samples each."""

from __future__ import annotations

import msgspec


class Linear(msgspec.Struct, frozen=True):
    """Bytes that grow with the samples of a micro-batch."""

    fixed: float
    per_sample: float

    def at(self, samples: float) -> float:
        """For so many samples."""
        return self.fixed + self.per_sample * samples


class LayerMemory(msgspec.Struct, frozen=True, kw_only=True):
    """One layer between two cut points."""

    name: str
    tensors: list[int]
    """Bytes of each of its parameters."""
    buffer_bytes: int
    kept: Linear
    """Held from its forward pass to its backward pass, its output included."""
    forward_peak: Linear
    """The most that its forward pass allocates, its output and what is kept included."""
    backward_peak: Linear
    """The most that its backward pass holds beyond what was kept, gradients of its parameters and input included."""
    update_peaks: dict[str, float]
    """The most that an update of its parameters allocates for a moment, as devices of a type do it ("cpu", "cuda")."""

    @property
    def parameter_bytes(self) -> int:
        """Bytes of its parameters together."""
        return sum(self.tensors)


class ModelMemory(msgspec.Struct, frozen=True, kw_only=True):
    """A model's layers, and what the loss adds."""

    layers: list[LayerMemory]
    loss: LayerMemory
    input_bytes: float
    """Of one sample."""
    updates_at_once: dict[str, bool]
    """Whether devices of a type update all layers at once, and not one tensor after the other."""


def encode_memory(memory: ModelMemory) -> str:
    """As JSON."""
    return msgspec.json.encode(memory).decode()


def decode_memory(text: str) -> ModelMemory:
    """The opposite."""
    return msgspec.json.decode(text, type=ModelMemory)
