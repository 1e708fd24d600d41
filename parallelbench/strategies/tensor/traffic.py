"""Bytes that tensor ranks exchange in a step, by the shapes of what they compute.

Of `gpt`, with values of tokens × width, four all-reduces per block (Shoeybi et al. 2019, §3): two sums forward, and
backward the gradients of what attention and the perceptron take (five with `swiglu`, whose gate takes it, too); of
`vit`, whose queries, keys and values are layers of their own, six. With parts of the sequence each of n ranks sends
(n−1)/n of 8 × tokens × width per block of `gpt` instead; per step the same share of the embedding's gradient and of
what enters the head (tokens × width each; with a divided vocabulary the latter twice), and 2(n−1)/n of the norms'
gradients. A divided vocabulary all-reduces tokens × width twice, and `loss_bytes`.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from torch import nn

from parallelbench.models.plan import matching, planned
from parallelbench.models.recomputation import repeats_forward
from parallelbench.strategies.pipeline.partition import values_between
from parallelbench.strategies.tensor import divides_sequence, divides_vocabulary, plan_of
from parallelbench.strategies.tensor.vocabulary import loss_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    import torch
    from torch import Tensor

    from parallelbench.config.run import RunConfig
    from parallelbench.measure.traffic import Traffic


@dataclass(frozen=True)
class Exchanged:
    """Bytes of whole messages of a forward and a backward pass."""

    all_reduced: int
    in_parts: int
    """All-gathered or reduce-scattered."""

    def count(self, traffic: Traffic, ranks: int, *, passes: int = 1) -> None:
        """Count what a rank of so many sends in so many passes."""
        traffic.all_reduce("activation", passes * self.all_reduced, ranks)
        traffic.all_gather("activation", passes * self.in_parts, ranks)


def exchanged_bytes(
    model: nn.Sequential,
    run: RunConfig,
    device: torch.device,
    *,
    samples: int,
    layers: Container[str] | None = None,
) -> Exchanged:
    """What tensor ranks exchange for so many samples; of `layers` only, if given. `model` is the whole one.

    Seen by hooks while samples pass. What backward computes again sends its messages of the forward pass again.
    """
    by_tokens, (first, *_, last) = divides_sequence(run), run.model.layer_names
    summed, in_parts = Counter[str](), Counter[str]()

    def of_column(layer: str, _: int, _module: nn.Module, inputs: tuple[Tensor, ...], _output: Tensor) -> None:
        """The gradient of its input is summed (Shoeybi et al. 2019, §3: f); images and tokens have none."""
        if inputs[0].requires_grad and not by_tokens:
            summed[layer] += inputs[0].nbytes

    def of_row(layer: str, forwards: int, module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Its output is summed (g), or scattered as sums, and its gradient gathered."""
        if by_tokens and not isinstance(module, nn.Embedding):
            in_parts[layer] += (forwards + 1) * output.nbytes
        else:
            summed[layer] += forwards * output.nbytes

    def of_norm(layer: str, forwards: int, _module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Its output is gathered, and its gradient scattered as sums; a whole head leaves it whole."""
        backwards = 0 if layer == last and not divides_vocabulary(run) else 1
        in_parts[layer] += (forwards + backwards) * output.nbytes

    def of_first(layer: str, _: int, _module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """The gradient of what it cuts is gathered."""
        in_parts[layer] += output.nbytes

    hooks: dict[str, Callable[..., None]] = {
        name: of_column if split == "column" else of_row for name, split in planned(model, plan_of(run)).items()
    }
    if by_tokens:
        hooks |= dict.fromkeys(matching(model, run.model.anatomy().sequence_norms), of_norm) | {first: of_first}
    with ExitStack() as hooked:
        for name, hook in hooks.items():
            layer = name.partition(".")[0]
            forwards = 2 if repeats_forward(run, layer) else 1
            hooked.enter_context(model.get_submodule(name).register_forward_hook(partial(hook, layer, forwards)))
        values_between(model, run, device, samples)
    summed[last] += loss_bytes(run, samples=samples)
    own = [name for name in run.model.layer_names if layers is None or name in layers]
    return Exchanged(sum(summed[name] for name in own), sum(in_parts[name] for name in own))
