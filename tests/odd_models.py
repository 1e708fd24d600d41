"""Small models of one's own, each with something that plain ones lack."""

from __future__ import annotations

import random
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from parallelbench.config.components import Anatomy, Linears, Model
from parallelbench.models.modules import Dense, sequence

Oddity = Literal[
    "dropout",
    "stochastic_depth",
    "draws_always",
    "own_generators",
    "float64_buffer",
    "float64_model",
    "default_dtype",
    "batch_norm",
    "frozen_norm",
    "frozen_norm_of_the_model",
    "frozen_first",
    "frozen_middle",
    "unused",
    "scalar",
    "empty",
    "counter",
    "complex_buffer",
    "complex_parameter",
    "tied",
    "tied_and_said",
    "tuple_in_training",
    "bare",
]
WIDTH = 16
Unfit = Literal["lazy", "weight_norm", "generator", "not_persistent", "attribute", "tensor", "detached"]
"""What no strategy can train as it stands; the sentence that refuses it names the remedy."""


class Odd(Model, frozen=True, kw_only=True):
    """Four layers, the third of which is odd; the first two are a pair that can be sharded."""

    oddity: Oddity

    @property
    def layer_names(self) -> tuple[str, ...]:
        return ("inputs", "hidden", "odd", "out")

    def anatomy(self) -> Anatomy:
        linears = Linears({"inputs.linear": "column", "hidden.linear": "row"}, units=WIDTH)
        return Anatomy(linears, tied=("hidden", "odd") if self.oddity == "tied_and_said" else ())

    def build(self, *, in_channels: int, image_size: int, num_classes: int) -> nn.Sequential:
        if self.oddity == "default_dtype":
            torch.set_default_dtype(torch.float64)
        inputs = Dense(in_channels * image_size**2, WIDTH, relu=True)
        hidden, out = Dense(WIDTH, WIDTH, relu=True), Dense(WIDTH, num_classes, relu=False)
        middle: nn.Module = OddLayer(self.oddity)
        if self.oddity == "batch_norm":
            middle = nn.BatchNorm1d(WIDTH)
        if self.oddity.startswith("frozen_norm"):
            middle = (FrozenNorm if self.oddity == "frozen_norm" else nn.BatchNorm1d)(WIDTH)
        if self.oddity == "bare":
            middle = nn.ReLU()
        if self.oddity in ("tied", "tied_and_said"):
            middle = Dense(WIDTH, WIDTH, relu=True)
            middle.linear.weight = hidden.linear.weight
        if self.oddity == "frozen_first":
            inputs.requires_grad_(False)
            hidden.requires_grad_(False)
        model = sequence(self.layer_names, [inputs, hidden, middle, out])
        if self.oddity == "frozen_norm_of_the_model":
            model.__class__ = FreezesNorm
        return model.double() if self.oddity == "float64_model" else model


class FrozenNorm(nn.BatchNorm1d):
    """Keeps its running statistics, as backbones that are fine-tuned do."""

    def train(self, mode: bool = True) -> FrozenNorm:
        """Stay in evaluation mode."""
        super().train(False)
        return self


class FreezesNorm(nn.Sequential):
    """The whole model keeps its norm in evaluation mode."""

    def train(self, mode: bool = True) -> FreezesNorm:
        """All but the norm."""
        super().train(mode)
        self.odd.eval()
        return self


class OddLayer(nn.Module):
    """(batch, width) → the same."""

    buffer: Tensor

    def __init__(self, oddity: Oddity) -> None:
        super().__init__()
        self.oddity = oddity
        self.linear = nn.Linear(WIDTH, WIDTH)
        if oddity == "own_generators":
            self.generators: dict[str, Any] = {"torch": torch.Generator().manual_seed(1), "python": [random.Random(2)]}
            self.of_numpy = np.random.default_rng(3)
            self.calls = 0
        if oddity == "float64_buffer":
            self.register_buffer("buffer", torch.linspace(0.1, 1.0, WIDTH, dtype=torch.float64) / 3)
        if oddity == "counter":
            self.register_buffer("buffer", torch.zeros((), dtype=torch.int64))
        if oddity == "complex_buffer":
            self.register_buffer("buffer", torch.polar(torch.ones(WIDTH // 2), torch.linspace(0.1, 1.0, WIDTH // 2)))
        if oddity == "complex_parameter":
            self.more = nn.Parameter(torch.polar(torch.ones(WIDTH // 2), torch.linspace(0.1, 1.0, WIDTH // 2)))
        if oddity == "unused":
            self.more = nn.Parameter(torch.ones(3, 3))
        if oddity == "scalar":
            self.more = nn.Parameter(torch.tensor(1.5))
        if oddity == "empty":
            self.more = nn.Parameter(torch.ones(0, 3))
        if oddity == "frozen_middle":
            self.linear.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Linear, and what is odd."""
        y: Tensor = self.linear(x).relu()
        if self.oddity == "dropout":
            return nn.functional.dropout(y, 0.5, self.training)
        if self.oddity == "own_generators" and self.training:
            self.calls += 1
            factor = self.generators["python"][0].random() + self.of_numpy.random() + 1 / self.calls
            return y + 0.1 * factor * torch.randn(y.shape, generator=self.generators["torch"]).to(y)
        if self.oddity == "draws_always":
            return y + 0.1 * torch.randn_like(y)
        if self.oddity == "stochastic_depth":
            return x if self.training and torch.rand(()) < 0.5 else x + y
        if self.oddity == "counter":
            self.buffer += self.training
        if self.oddity == "float64_buffer":
            return y * self.buffer.to(y.dtype)
        if self.oddity in ("complex_buffer", "complex_parameter"):
            turned = torch.view_as_complex(y.view(-1, WIDTH // 2, 2))
            turned = turned * (self.buffer if self.oddity == "complex_buffer" else self.more)
            return torch.view_as_real(turned).flatten(1)
        if self.oddity == "scalar":
            return y * self.more
        if self.oddity == "empty":
            return y + self.more.sum()
        return (y, x) if self.oddity == "tuple_in_training" and self.training else y


class Misfit(Odd, frozen=True, kw_only=True):
    """The same four layers, the third of which is unfit."""

    unfit: Unfit
    oddity: Oddity = "bare"

    def build(self, *, in_channels: int, image_size: int, num_classes: int) -> nn.Sequential:
        model = Odd.build(self, in_channels=in_channels, image_size=image_size, num_classes=num_classes)
        model.odd = UnfitLayer(self.unfit)
        return model


class UnfitLayer(nn.Module):
    """(batch, width) → the same."""

    def __init__(self, unfit: Unfit) -> None:
        super().__init__()
        self.unfit, self.steps = unfit, 0
        self.linear: nn.Module = nn.LazyLinear(WIDTH) if unfit == "lazy" else nn.Linear(WIDTH, WIDTH)
        if unfit == "weight_norm":
            nn.utils.weight_norm(self.linear)
        if unfit == "generator":
            self.made = (each for each in range(3))
        if unfit == "not_persistent":
            self.register_buffer("mean", torch.zeros(WIDTH), persistent=False)
        if unfit == "tensor":
            self.mean = torch.zeros(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Linear, and what is unfit."""
        y: Tensor = self.linear(x)
        if self.unfit in ("not_persistent", "tensor"):
            if self.training:
                self.mean = 0.9 * self.mean.to(y) + 0.1 * y.detach().mean(0)
            return y - self.mean
        if self.unfit == "attribute":
            self.steps += self.training
            return y / (1 + self.steps)
        return y.detach() if self.unfit == "detached" else y
