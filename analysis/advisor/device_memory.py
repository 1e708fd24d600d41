"""What a device holds of a model while it trains, and the most of it at once: a walk through one step.

What libraries take comes on top and is not in here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from parallelbench.config.components import StateShards

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from parallelbench.measure.counting import LayerMemory

WHOLE = StateShards.even(1)
"""A copy of everything."""


class Left(NamedTuple):
    """Shares of a layer, 0 to 1."""

    parameters: float
    activations: float


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """What a device has of a job: layers, samples, and the shares of their state that it keeps."""

    layers: Sequence[LayerMemory]
    samples: float
    """Of a micro-batch."""
    input_bytes: float
    """Of all the input that it holds at once."""
    loss: LayerMemory | None
    """None where another device computes it."""
    states: int
    """States of the optimizer per parameter."""
    sent_bytes: float = 0.0
    """Of the output that it sends on, and of the gradient that comes back: held until its backward pass ends."""
    in_flight: int = 1
    """Micro-batches whose activations it keeps at once."""
    shares: StateShards = WHOLE
    """Shares of the layers' parameters, gradients and optimizer states that stay."""
    update_bytes: float = 0.0
    """The most that an update allocates for a moment."""
    gradients_stay: bool = False
    """Whether gradients keep their memory between steps, in buckets."""
    gathers: bool = False
    """Whether a layer's parameters are whole only while it works."""
    gathered_stay: bool = False
    """Whether they stay whole from forward to backward."""
    left: Mapping[str, Left] = field(default_factory=dict)
    """Layer → what a tensor group leaves of it to each device; layers that it does not cut are missing."""

    @property
    def peak_bytes(self) -> float:
        """Forward layer by layer, the loss, backward layer by layer, the update: the most that is held at once."""
        return max(*self._forward(), *self._backward(), self._update())

    def _left(self, layer: LayerMemory) -> Left:
        """All of it where no tensor group cuts it."""
        return self.left.get(layer.name, Left(1.0, 1.0))

    def _parameters(self, layer: LayerMemory) -> float:
        """Bytes of a layer's parameters, as they are computed with."""
        return self._left(layer).parameters * layer.parameter_bytes

    def _kept(self, layer: LayerMemory) -> float:
        return self._left(layer).activations * layer.kept.at(self.samples)

    @property
    def _whole(self) -> float:
        return float(sum(map(self._parameters, self.layers)))

    @property
    def _between_steps(self) -> float:
        """Parameters, buffers, states, gradients that stay, and the batch."""
        gradients = self.shares.gradients if self.gradients_stay else 0.0
        state = self.shares.parameters + self.shares.states * self.states + gradients
        return state * self._whole + sum(layer.buffer_bytes for layer in self.layers) + self.input_bytes

    def _update(self) -> float:
        gradients = 0.0 if self.gradients_stay else self.shares.gradients * self._whole
        return self._between_steps + gradients + self.update_bytes

    @property
    def _others_kept(self) -> float:
        """Activations of the other micro-batches in flight."""
        return (self.in_flight - 1) * sum(map(self._kept, self.layers))

    def _forward(self) -> Iterator[float]:
        """While each layer's forward pass works, and the loss. What a layer gathers arrives in a buffer first."""
        held = self._between_steps + self._others_kept
        for layer in self.layers:
            own = self._parameters(layer) if self.gathers else 0.0
            yield held + 2.0 * own + self._left(layer).activations * layer.forward_peak.at(self.samples)
            held += self._kept(layer) + (own if self.gathered_stay else 0.0)
        if self.loss is not None:
            kept, backward = self.loss.kept.at(self.samples), self.loss.backward_peak.at(self.samples)
            yield held + max(self.loss.forward_peak.at(self.samples), kept + backward)

    def _backward(self) -> Iterator[float]:
        """While each layer's backward pass works, from the last to the first."""
        return self._backward_of_shards() if self.gathers else self._backward_of_copies()

    def _backward_of_copies(self) -> Iterator[float]:
        """In a pipeline, gradients of earlier micro-batches are there already."""
        held = self._between_steps + self._others_kept + sum(map(self._kept, self.layers)) + self.sent_bytes
        there = self.in_flight > 1
        if there:
            held += self.shares.gradients * self._whole
        for layer in reversed(self.layers):
            own = self._parameters(layer)
            yield held + max(self._values(layer) + own, 0.0) - (own if self.gradients_stay else 0.0)
            held -= self._kept(layer)
            if not self.gradients_stay and not there:
                held += self.shares.gradients * own

    def _backward_of_shards(self) -> Iterator[float]:
        """A layer is gathered while the one behind it works. Its gradient is copied into what is scattered, which is
        held until the next layer's is; then a shard of it stays.
        """
        held = self._between_steps + sum(map(self._kept, self.layers))
        held += self._whole if self.gathered_stay else 0.0
        scattered = 0.0
        for place, layer in reversed([*enumerate(self.layers)]):
            own = self._parameters(layer)
            ahead = 0.0 if self.gathered_stay or place == 0 else self._parameters(self.layers[place - 1])
            if not self.gathered_stay:
                yield held + scattered + 2.0 * own
                held += own
            yield held + scattered + ahead + max(self._values(layer) + own, 0.0)
            held -= self._kept(layer) + own
            yield held + ahead + 2.0 * own
            held += self.shares.gradients * own
            yield held + ahead + own
            scattered = own

    def _values(self, layer: LayerMemory) -> float:
        """What its backward pass holds beyond what was kept and the gradients of its parameters."""
        return self._left(layer).activations * (layer.backward_peak.at(self.samples) - layer.parameter_bytes)
