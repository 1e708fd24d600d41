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
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from torch import nn

from parallelbench.models.plan import matching, planned
from parallelbench.models.recomputation import repeats_forward
from parallelbench.strategies.pipeline.partition import values_between
from parallelbench.strategies.state import size_bytes
from parallelbench.strategies.tensor import divides_sequence, divides_vocabulary, plan_of
from parallelbench.strategies.tensor.vocabulary import loss_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    import torch
    from torch import Tensor

    from parallelbench.config.components import Split
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
    """What tensor ranks exchange for so many samples; of `layers` only, if given. `model` is the whole one."""
    found = _SeenExchanges(model, run)
    values_between(model, run, device, samples)
    found.remove()
    last = run.model.layer_names[-1]
    found.summed[last] += loss_bytes(run, samples=samples)
    own = [name for name in run.model.layer_names if layers is None or name in layers]
    return Exchanged(sum(found.summed[name] for name in own), sum(found.in_parts[name] for name in own))


class _SeenExchanges:
    """Bytes of what is exchanged within each layer of a model, seen by hooks while samples pass.

    What backward computes again sends its messages of the forward pass again.
    """

    def __init__(self, model: nn.Sequential, run: RunConfig) -> None:
        self._forwards = {name: 2 if repeats_forward(run, name) else 1 for name in run.model.layer_names}
        self.summed: Counter[str] = Counter()
        self.in_parts: Counter[str] = Counter()
        self._by_tokens, self._divided = divides_sequence(run), divides_vocabulary(run)
        first, *_, self._last = run.model.layer_names
        hooks = {name: self._of_split(split) for name, split in planned(model, plan_of(run)).items()}
        if self._by_tokens:
            hooks |= dict.fromkeys(matching(model, run.model.anatomy().sequence_norms), self._of_norm)
            hooks[first] = self._of_first
        self._handles = [
            model.get_submodule(name).register_forward_hook(partial(hook, name.partition(".")[0]))
            for name, hook in hooks.items()
        ]

    def _of_split(self, split: Split) -> Callable[..., None]:
        return self._of_column if split == "column" else self._of_row

    def _of_column(self, layer: str, _module: nn.Module, inputs: tuple[Tensor, ...], _output: Tensor) -> None:
        """The gradient of its input is summed (Shoeybi et al. 2019, §3: f); images and tokens have none."""
        if inputs[0].requires_grad and not self._by_tokens:
            self.summed[layer] += size_bytes(inputs[0])

    def _of_row(self, layer: str, module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Its output is summed (g), or scattered as sums, and its gradient gathered."""
        if self._by_tokens and not isinstance(module, nn.Embedding):
            self.in_parts[layer] += (self._forwards[layer] + 1) * size_bytes(output)
        else:
            self.summed[layer] += self._forwards[layer] * size_bytes(output)

    def _of_norm(self, layer: str, _module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Its output is gathered, and its gradient scattered as sums; a whole head leaves it whole."""
        backwards = 0 if layer == self._last and not self._divided else 1
        self.in_parts[layer] += (self._forwards[layer] + backwards) * size_bytes(output)

    def _of_first(self, layer: str, _module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """The gradient of what it cuts is gathered."""
        self.in_parts[layer] += size_bytes(output)

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
