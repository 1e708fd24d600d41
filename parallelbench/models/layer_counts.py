"""What each layer of a model has to do for one sample, as torch counted it: what predictions of steps start from."""

from __future__ import annotations

import msgspec


class LayerCount(msgspec.Struct, frozen=True, kw_only=True):
    """One layer between two cut points, forward, for one sample. Sizes are those of fp32."""

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


def encode(layers: list[LayerCount]) -> str:
    """As the table `run` keeps them."""
    return msgspec.json.encode(layers).decode()


def decode(text: str) -> list[LayerCount]:
    """The opposite; keys of later releases are ignored."""
    return msgspec.json.decode(text, type=list[LayerCount])
