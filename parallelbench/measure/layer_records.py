"""What was counted of a model's layers: what each has to do for a sample, and what it holds. Loads no torch."""

from __future__ import annotations

import msgspec

ELEMENTWISE, IMAGES = "elementwise", "image_convolution"
"""What no other kind is; and convolutions of a model's input, which needs no gradient."""
KINDS = {
    "aten::gelu": "gelu",
    "aten::silu": "gelu",
    "aten::native_layer_norm": "layer_norm",
    "aten::native_group_norm": "layer_norm",
    "aten::native_batch_norm": "batch_norm",
    "aten::max_pool2d_with_indices": "max_pool",
}
"""Torch's operations that a calibration measures apart from others that write as much."""


class Kernels(msgspec.Struct, frozen=True, kw_only=True):
    """Operations of one kind in a layer, forward, for one sample."""

    operations: int
    work: float
    """Floating-point operations of convolutions and of attention; of all other kinds bytes that are written."""
    extent: float = 0.0
    """What decides about their rate, a mean: weights of a convolution's group, keys of attention's head; else 0."""

    def joined(self, other: Kernels) -> Kernels:
        """Both together."""
        count = self.operations + other.operations
        extent = (self.operations * self.extent + other.operations * other.extent) / count
        return Kernels(operations=count, work=self.work + other.work, extent=extent)


class LayerCount(msgspec.Struct, frozen=True, kw_only=True):
    """One layer between two cut points, forward, for one sample. Sizes are those of fp32.

    A list of these is kept as JSON in the table `run`; keys of later releases are ignored.
    """

    name: str
    product_flop: float
    """Of matrix products and attention, two per multiply-add."""
    convolution_flop: float
    """Of convolutions whose outputs use all input channels, by definition: no algorithm that saves any."""
    grouped_flop: float
    """The same of grouped ones, which reach a small part of the others' speed."""
    output_bytes: float
    """Written by all operations of the layer; views write nothing."""
    operations: int
    """Operations that write something: each is launched, however many samples there are."""
    parameters: int
    tensors: int
    """Parameters, as tensors: what an optimizer or a message per tensor has to go through."""
    boundary_bytes: float
    """Handed to the next layer."""
    shardable_flop: float
    """That part of `product_flop` which tensor parallelism cuts: the layers of the model's own plan."""
    shardable_parameters: int
    """Likewise of the parameters."""
    exchanged_bytes: float
    """What tensor parallelism all-reduces for it: outputs of row layers forward, inputs of column layers backward."""
    exchanges: int = 0
    """Of how many messages these are; 0 in results of older releases."""
    unaligned_flop: float = 0.0
    """That part of `product_flop` whose inputs or outputs 8 does not divide, such as a head's of 50,257 words."""
    kernels: dict[str, Kernels] | None = None
    """All operations but products, by kind: convolution, grouped, attention, those of `KINDS`, elementwise; null in
    results of older releases."""


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
