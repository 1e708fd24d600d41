"""What training takes at least, against counts by hand."""

from __future__ import annotations

import math

import pytest

from parallelbench.measure.layers import WINOGRAD, least_flop_per_sample
from tests.strategies.training import configure


@pytest.mark.parametrize(
    ("model", "by_hand"),
    [
        (["model=logistic_regression"], 2 * 2 * 28 * 28 * 10),
        (["model=mlp", "model.hidden=[64,32]"], 2 * (2 * 784 * 64 + 3 * 64 * 32 + 3 * 32 * 10)),
    ],
)
def test_products_count_twice_in_the_first_layer_and_three_times_in_others(model: list[str], by_hand: int) -> None:
    run = configure("data=synthetic", "data.channels=1", "data.image_size=28", *model)
    assert least_flop_per_sample(run) == by_hand


@pytest.mark.parametrize("model", ["cnn_small", "resnet_tiny"])
def test_convolutions_count_as_much_as_the_fastest_algorithm_leaves(model: str) -> None:
    run = configure("data=synthetic", "data.channels=1", "data.image_size=28", f"model={model}")
    names = [(name, type(layer).__name__) for name, layer in _layers(run)]
    assert WINOGRAD == 4.0
    assert least_flop_per_sample(run) == _by_hand(run), names


def _layers(run):  # type: ignore[no-untyped-def]
    return run.model.build(in_channels=1, image_size=28, num_classes=10).named_modules()


def _by_hand(run):  # type: ignore[no-untyped-def]
    """From the shapes that hooks see."""
    import torch
    from torch import nn

    found = []

    def hook(module, inputs, output):  # type: ignore[no-untyped-def]
        each = module.weight[0].numel() * 2 * output.numel()
        values = math.prod(getattr(module, "kernel_size", ()))
        found.append(each / {1: 1, 9: 4}.get(values, values))

    model = run.model.build(in_channels=1, image_size=28, num_classes=10)
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            module.register_forward_hook(hook)
    model(torch.zeros(1, 1, 28, 28))
    return 2 * found[0] + 3 * sum(found[1:])
