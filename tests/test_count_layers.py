"""What each layer of a model does, against counts by hand and by torch."""

from __future__ import annotations

import math
import resource
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
import torchvision
from torch import nn

from parallelbench.config.build import to_mapping
from parallelbench.config.identity import canonical_json
from parallelbench.config.run import RunConfig
from parallelbench.measure import count_layers
from parallelbench.measure.count_layers import (
    LARGE,
    WINOGRAD,
    count_facts,
    counts_without_values,
    model_counts,
)
from parallelbench.measure.layer_records import Kernels, LayerCount
from parallelbench.strategies.pipeline.partition import layer_costs
from parallelbench.training.torch_session import build_model
from tests.strategies.training import configure

MPT = ("data=tokens", "data.sequence=2048", "data.vocabulary=50257", "data.train_samples=64", "precision=bf16")
IMAGES = ("data=synthetic", "data.channels=1", "data.image_size=28")


decoded = msgspec.json.Decoder(list[LayerCount]).decode


def test_a_perceptron_against_counts_by_hand() -> None:
    first, second = model_counts(configure(*IMAGES, "model=mlp", "model.hidden=[64]")).layers
    # The product of fc1 with its bias, and ReLU; fc2 has no ReLU.
    assert (first.product_flop, first.output_bytes, first.operations) == (2 * 784 * 64, 4 * 2 * 64, 2)
    assert (second.product_flop, second.output_bytes, second.operations) == (2 * 64 * 10, 4 * 10, 1)
    assert (first.kernels, second.kernels) == ({"elementwise": Kernels(operations=1, work=4.0 * 64)}, {})
    assert (first.parameters, first.tensors, first.boundary_bytes) == (784 * 64 + 64, 2, 4 * 64)
    assert (first.unaligned_flop, second.unaligned_flop) == (0.0, second.product_flop), "8 does not divide 10"
    # The plan cuts fc1 by outputs and fc2 by inputs: fc2's outputs are summed; fc1's inputs have no gradient.
    assert (first.shardable_flop, second.shardable_flop) == (first.product_flop, second.product_flop)
    assert (first.exchanged_bytes, second.exchanged_bytes) == (0.0, 4 * 10)
    assert (first.exchanges, second.exchanges) == (0, 1)
    assert (first.shardable_parameters, second.shardable_parameters) == (784 * 64 + 64, 64 * 10 + 10)


@pytest.mark.parametrize("model", ["cnn", "cnn_large", "vit_tiny", "resnet_tiny"])
def test_operations_and_parameters_are_those_that_torch_counts(model: str) -> None:
    run = configure(*IMAGES, f"model={model}")
    counts, built = model_counts(run).layers, build_model(run)
    by_torch = layer_costs(built, run)
    for count, cost in zip(counts, by_torch, strict=True):
        flop = count.product_flop + count.convolution_flop + count.grouped_flop
        assert flop + 1e-6 * count.parameters == pytest.approx(cost, rel=1e-9)
    assert sum(count.parameters for count in counts) == sum(each.numel() for each in built.parameters())
    assert [count.name for count in counts] == list(run.model.layer_names)
    linears = [each for each in built.modules() if isinstance(each, nn.Linear)]
    assert sum(count.shardable_parameters for count in counts) > 0 or not run.model.anatomy().linears.plan
    assert sum(count.shardable_parameters for count in counts) <= sum(
        p.numel() for e in linears for p in e.parameters()
    )


def test_grouped_convolutions_are_counted_apart() -> None:
    counts = {each.name: each for each in model_counts(configure(*IMAGES, "model=cnn_large")).layers}
    assert (counts["conv1"].grouped_flop, counts["conv2"].convolution_flop) == (0.0, 0.0)
    # conv2: 256 channels of 14×14, each from one of 128 groups of one channel, 3×3.
    flop = 2.0 * 256 * 14 * 14 * 9
    assert counts["conv2"].grouped_flop == flop
    assert counts["conv2"].kernels == {
        "grouped": Kernels(operations=1, work=flop, extent=2 * 9.0),
        "elementwise": Kernels(operations=1, work=4.0 * 256 * 14 * 14),
        "max_pool": Kernels(operations=1, work=4.0 * 256 * 7 * 7),
    }


class Called(nn.Module):
    """Takes an image's rows for tokens, and gives the layer them as it wants them."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        rows = images[:, 0]
        attends = isinstance(self.layer, nn.MultiheadAttention)
        result: Any = self.layer(rows, rows, rows, need_weights=False) if attends else self.layer(rows)
        values: torch.Tensor = result[0] if isinstance(result, tuple) else result
        return values


class Squared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Bilinear(28, 28, 3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = self.both(rows, rows)
        return values


class Weighed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.ones(28))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.mv(rows[0], self.by)


PROJECTIONS, ATTENTION = 4 * 28 * 28, 2 * 28 * 28
"""Multiply-adds of a token in attention over 28 tokens 28 wide."""


@pytest.mark.parametrize("without_values", [False, True], ids=["values", "no values"])
@pytest.mark.parametrize(
    ("layer", "per_token"),
    [
        (lambda: nn.MultiheadAttention(28, 4, batch_first=True), PROJECTIONS + ATTENTION),
        (lambda: nn.TransformerEncoderLayer(28, 4, 64, batch_first=True), PROJECTIONS + ATTENTION + 2 * 28 * 64),
        (lambda: nn.LSTM(28, 16, batch_first=True), 4 * 16 * (28 + 16)),
        (Squared, 28 * 28 * 3),
        (Weighed, 28),
    ],
    ids=["attention", "encoder", "lstm", "bilinear", "vector"],
)
def test_layers_that_torch_calls_whole_are_counted(
    layer: Callable[[], nn.Module], per_token: int, without_values: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without gradients, or by oneDNN, one operation does what training does in several."""
    run = configure(*IMAGES, "model=mlp")
    monkeypatch.setattr(count_layers, "built", lambda *_: nn.Sequential(OrderedDict(only=Called(layer()))))
    before = torch.backends.mha.get_fastpath_enabled(), torch.backends.mkldnn.enabled
    (count,) = counts_without_values(run).layers if without_values else model_counts(run).layers
    assert count.product_flop == 2 * 28 * per_token
    assert (torch.backends.mha.get_fastpath_enabled(), torch.backends.mkldnn.enabled) == before


class Upsampling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(1, 6, 4, stride=2, padding=1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = self.up(images)
        return values


class Experts(nn.Module):
    """Two linear layers, from 32 to 16 values, each for half of an image's rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(2, 32, 16))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        rows = nn.functional.pad(images[0, 0], (0, 4)).bfloat16()
        ends = torch.tensor([14, 28], dtype=torch.int32)
        return torch._grouped_mm(rows, self.weights.bfloat16(), offs=ends)


class Summing(nn.Module):
    """Two groups, of the first and the last 14 rows, sum over their own."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        rows = nn.functional.pad(images[0, 0], (0, 4)).bfloat16()
        return torch._grouped_mm(rows.T, rows, offs=torch.tensor([14, 28], dtype=torch.int32))


@pytest.mark.parametrize(
    ("kind", "flop"), [(Upsampling, 2 * 28 * 28 * 6 * 16), (Experts, 2 * 28 * 32 * 16), (Summing, 2 * 28 * 32 * 32)]
)
def test_what_a_users_model_may_do_is_counted(
    kind: type[nn.Module], flop: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = configure(*IMAGES, "model=mlp")
    monkeypatch.setattr(count_layers, "built", lambda *_: nn.Sequential(OrderedDict(only=kind())))
    (count,) = model_counts(run).layers
    assert count.product_flop + count.convolution_flop == flop


@pytest.mark.slow
def test_torchvisions_transformer_takes_what_its_authors_say() -> None:
    """17.56 GFLOPS of multiply-adds, of which one is two operations here."""
    run = configure(
        "data=synthetic", "data.channels=3", "data.image_size=224", "data.train_samples=24", "model=vit_b_16"
    )
    counts = counts_without_values(run).layers
    said = torchvision.models.ViT_B_16_Weights.IMAGENET1K_V1.meta["_ops"]
    head = 768 * (1000 - 10)
    assert sum(each.product_flop + each.convolution_flop for each in counts) == pytest.approx(
        2 * (said * 1e9 - head), rel=1e-3
    )


@pytest.mark.exhaustive
def test_a_program_counts_for_those_who_load_no_torch() -> None:
    run = configure(*IMAGES, "model=mlp", "model.hidden=[64]")
    words = [sys.executable, "-m", "parallelbench.measure.count_layers"]
    done = subprocess.run(words, input=canonical_json(to_mapping(run)).encode(), capture_output=True, check=True)
    assert decoded(done.stdout) == model_counts(run).layers


@pytest.mark.slow
@pytest.mark.parametrize("model", ["cnn", "cnn_large", "vit_tiny", "resnet_tiny", "gpt_tiny", "gpt_moe_tiny"])
def test_without_values_the_same_is_counted(model: str) -> None:
    run = configure(*(("data=tokens",) if model.startswith("gpt") else IMAGES), f"model={model}")
    assert counts_without_values(run).layers == model_counts(run).layers
    assert count_facts(run, parameters=LARGE) == count_facts(run, parameters=0), "also what training takes at least"


def test_a_model_that_looks_at_values_is_counted_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    run = configure(*IMAGES, "model=mlp", "model.hidden=[64]")
    plain, build = model_counts(run).layers, type(run.model).build

    class Looking(nn.Linear):
        def forward(self, values: torch.Tensor) -> torch.Tensor:
            assert float(values.detach().sum()) < 1e9
            return super().forward(values)

    def looking(self: Any, **sizes: int) -> nn.Sequential:
        model = build(self, **sizes)
        next(each for each in model.modules() if isinstance(each, nn.Linear)).__class__ = Looking
        return model

    monkeypatch.setattr(type(run.model), "build", looking)
    assert [each.product_flop for each in counts_without_values(run).layers] == [each.product_flop for each in plain]


@pytest.mark.exhaustive
def test_a_model_that_fits_nowhere_is_counted() -> None:
    """70 billion parameters take 280 GB; the program may have 12 GiB of addresses."""
    run = configure(*MPT, "model=mpt_70b")
    limits = (12 * 2**30, 12 * 2**30)
    done = subprocess.run(
        [sys.executable, "-m", "parallelbench.measure.count_layers"],
        input=canonical_json(to_mapping(run)).encode(),
        capture_output=True,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, limits),
    )
    counts = decoded(done.stdout)
    assert 6.4e10 < sum(each.parameters for each in counts) < 7.2e10
    assert [each.name for each in counts] == list(run.model.layer_names)


# --- what training takes at least


@pytest.mark.parametrize(
    ("model", "by_hand"),
    [
        (["model=logistic_regression"], 2 * 2 * 28 * 28 * 10),
        (["model=mlp", "model.hidden=[64,32]"], 2 * (2 * 784 * 64 + 3 * 64 * 32 + 3 * 32 * 10)),
    ],
)
def test_products_count_twice_in_the_first_layer_and_three_times_in_others(model: list[str], by_hand: int) -> None:
    run = configure(*IMAGES, *model)
    assert model_counts(run).least_flop == by_hand


@pytest.mark.parametrize(
    ("frozen", "by_hand"),
    [
        ((0,), 2 * (784 * 64 + 2 * 64 * 32 + 3 * 32 * 10)),
        ((0, 1), 2 * (784 * 64 + 64 * 32 + 2 * 32 * 10)),
        ((1,), 2 * (2 * 784 * 64 + 2 * 64 * 32 + 3 * 32 * 10)),
        ((2,), 2 * (2 * 784 * 64 + 3 * 64 * 32 + 2 * 32 * 10)),
    ],
)
def test_frozen_weights_need_no_gradient(
    frozen: tuple[int, ...], by_hand: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do the inputs of all layers up to the first that is trained."""
    run = configure(*IMAGES, "model=mlp", "model.hidden=[64,32]")
    built = count_layers.built

    def partly_frozen(*arguments: Any) -> nn.Sequential:
        model = built(*arguments)
        for layer in frozen:
            model[layer].requires_grad_(False)
        return model

    monkeypatch.setattr(count_layers, "built", partly_frozen)
    assert model_counts(run).least_flop == by_hand


@pytest.mark.parametrize("model", ["cnn_small", "resnet_tiny"])
def test_convolutions_count_as_much_as_the_fastest_algorithm_leaves(model: str) -> None:
    run = configure(*IMAGES, f"model={model}")
    assert WINOGRAD == 4.0
    assert model_counts(run).least_flop == _least_by_hand(run)


class Attending(nn.Module):
    """Four heads attend from an image's 28 rows to one another, after three projections that learn."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.all_three = way, nn.Linear(28, 3 * 28)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.unflatten(-1, (4, 7)).transpose(1, 2) for each in self.all_three(images[:, 0]).chunk(3, dim=-1))
        if self.way == "by hand":
            return (q @ k.mT / 7**0.5).softmax(dim=-1) @ v
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.way == "causal")


@pytest.mark.parametrize(
    ("way", "pairs"), [("by hand", 28 * 28), ("fused", 28 * 28), ("causal", 28 * 29 // 2)], ids=lambda each: str(each)
)
def test_attention_counts_alike_however_a_model_spells_it(
    way: str, pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores and weighted values: two multiply-adds for each pair of rows and each of 28 values."""
    monkeypatch.setattr(count_layers, "built", lambda *_: nn.Sequential(OrderedDict(only=Attending(way))))
    counts = model_counts(configure(*IMAGES, "model=mlp"))
    projections = 2 * 28 * 28 * 3 * 28
    assert counts.least_flop == 2 * projections + 3 * 2 * 2 * pairs * 28
    assert counts.layers[0].product_flop == projections + 2 * 2 * 28 * 28 * 28, "MFU counts attention in full"


def _least_by_hand(run: RunConfig) -> float:
    """From the shapes that hooks see."""
    found = []

    def hook(module: Any, inputs: Any, output: torch.Tensor) -> None:
        each = module.weight[0].numel() * 2 * output.numel()
        values = math.prod(getattr(module, "kernel_size", ()))
        found.append(each / {1: 1, 9: 4}.get(values, values))

    model = run.model.build(in_channels=1, image_size=28, num_classes=10)
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            module.register_forward_hook(hook)
    model(torch.zeros(1, 1, 28, 28))
    return 2 * found[0] + 3 * sum(found[1:])
