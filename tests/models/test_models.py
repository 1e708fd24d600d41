"""Models: published sizes, named layers, torchvision's own numbers, and errors that carry the fix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from torch import nn

import conf
from parallelbench.config import build
from parallelbench.config.components import Model
from parallelbench.errors import ConfigError
from parallelbench.models.modules import Dense, sequence
from parallelbench.models.norms import SyncBatchNorm

FILES = sorted(Path(conf.__file__).parent.glob("model/*.yaml"))
NAMES = [path.stem for path in FILES if not path.stem.startswith(("gpt", "mpt"))]  # those are in test_gpt.py
SMALL = [name for name in NAMES if name not in ("resnet50", "vit_b_16")]


def spec(name: str, **options: Any) -> Model:
    """The model of a YAML file, with some options changed."""
    with initialize_config_module("conf", version_base=None):
        node = OmegaConf.to_container(compose(f"model/{name}"))
    assert isinstance(node, dict)
    model: Model = build.build({**node["model"], **options}, "model")
    assert isinstance(model, Model)
    return model


def built(model: Model, *, channels: int = 3, size: int = 32, classes: int = 10, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return model.build(in_channels=channels, image_size=size, num_classes=classes)


def parameters(model: Model, *, channels: int, size: int) -> int:
    with torch.device("meta"):
        layers = model.build(in_channels=channels, image_size=size, num_classes=10)
    return sum(p.numel() for p in layers.parameters())


def images(count: int, *, channels: int = 3, size: int = 32, dtype: torch.dtype | None = None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, channels, size, size, generator=generator, dtype=dtype)


CONVOLUTIONS = [(3, 64), (64, 64), (64, 128), (128, 128), (128, 256), (256, 256)]
BLOCK = 4 * (256 * 256 + 256) + 2 * 2 * 256 + 256 * 1024 + 1024 + 1024 * 256 + 256


@pytest.mark.parametrize(
    ("name", "channels", "size", "count"),
    [
        ("logistic_regression", 1, 28, 7_850),
        ("logistic_regression", 3, 32, 30_730),
        ("mlp", 1, 32, 1024 * 512 + 512 + 512 * 256 + 256 + 256 * 128 + 128 + 128 * 10 + 10),
        ("cnn_small", 1, 28, 402_442),
        ("cnn_large", 1, 28, 2_636_554),
        ("cnn_large_dense", 1, 28, 4_104_202),
        ("cnn", 3, 32, sum(9 * i * o + 2 * o for i, o in CONVOLUTIONS) + 256 * 4 * 4 * 10 + 10),
        ("resnet50", 3, 32, 23_528_522),
        ("resnet_tiny", 3, 32, 5_266),
        ("vit", 3, 32, (3 * 16 * 256 + 256) + 256 + 65 * 256 + 6 * BLOCK + 2 * 256 + 256 * 10 + 10),
        ("vit_tiny", 3, 32, 21_162),
        ("vit_b_16", 3, 32, 85_658_890),
    ],
)
def test_number_of_parameters(name: str, channels: int, size: int, count: int) -> None:
    assert parameters(spec(name), channels=channels, size=size) == count


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.cases("cnn_small", "mlp", "*_tiny")
def test_a_seed_decides_the_weights_and_every_parameter_gets_a_gradient_from_every_sample_alone(name: str) -> None:
    model = spec(name)
    torch.set_default_dtype(torch.float64)
    try:
        layers, again, other = (built(model, classes=7, seed=seed) for seed in (3, 3, 4))
    finally:
        torch.set_default_dtype(torch.float32)
    assert tuple(child for child, _ in layers.named_children()) == model.layer_names
    first, second, third = (each.state_dict() for each in (layers, again, other))
    assert {value.dtype for value in first.values() if value.is_floating_point()} == {torch.float64}
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert any(not torch.equal(first[key], third[key]) for key in first)
    x = images(3, dtype=torch.float64).requires_grad_()
    logits = layers.eval()(x)
    assert logits.shape == (3, 7)
    logits[1].sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layers.parameters())
    assert x.grad is not None
    assert x.grad[1].abs().max() > 0
    assert x.grad[[0, 2]].abs().max() == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name != "vit_b_16"])
@pytest.mark.cases("cnn_small", "mlp", "*_tiny")
def test_models_take_the_28_pixel_grey_images_of_the_digits(name: str) -> None:
    x = images(2, channels=1, size=28)
    assert built(spec(name), channels=1, size=28)(x).shape == (2, 10)


@pytest.mark.cases("options1-resnet18")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "reference"), [({}, "resnet50"), ({"block": "basic", "blocks": [2, 2, 2, 2]}, "resnet18")]
)
def test_resnets_are_torchvisions(options: dict[str, Any], reference: str) -> None:
    torch.manual_seed(0)
    theirs = getattr(torchvision.models, reference)(num_classes=10)
    ours = built(spec("resnet50", **options))
    pairs = list(zip(theirs.state_dict().values(), ours.state_dict().values(), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs), "one seed must give the same weights"
    x = images(2, size=64)
    assert torch.equal(theirs(x), ours(x))
    assert torch.equal(theirs.eval()(x), ours.eval()(x))


@pytest.mark.exhaustive
def test_vit_b_16_with_copied_weights_gives_torchvisions_logits() -> None:
    torch.manual_seed(5)
    theirs = torchvision.models.vit_b_16(image_size=48, num_classes=10)
    nn.init.normal_(theirs.heads.head.weight)  # torchvision's zeros would make all logits equal
    ours = built(spec("vit_b_16"), size=48)
    weights = {_vit_key(key): value for key, value in theirs.state_dict().items()}
    assert not torch.equal(weights["embed.patches.weight"], ours.state_dict()["embed.patches.weight"])
    ours.load_state_dict(weights)
    x = images(2, size=48)
    assert torch.equal(theirs(x), ours(x))
    assert theirs(x).abs().max() > 0


def _vit_key(key: str) -> str:
    """torchvision's name of a parameter → ours."""
    prefixes = {
        "class_token": "embed.class_token",
        "conv_proj": "embed.patches",
        "encoder.pos_embedding": "embed.positions",
        "encoder.ln": "head.norm",
        "heads.head": "head.linear",
        **{f"encoder.layers.encoder_layer_{i}.": f"block{i + 1}." for i in range(12)},
    }
    theirs = next(prefix for prefix in prefixes if key.startswith(prefix))
    return prefixes[theirs] + key.removeprefix(theirs)


def test_vit_with_torchvisions_weights_gives_torchvisions_logits() -> None:
    torch.manual_seed(5)
    theirs = torchvision.models.VisionTransformer(
        image_size=32, patch_size=4, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=64, num_classes=10
    ).double()
    nn.init.normal_(theirs.heads.head.weight)
    ours = built(spec("vit_tiny")).double()
    weights: dict[str, torch.Tensor] = {}
    for key, value in theirs.state_dict().items():
        name = _vit_key(key).replace("ln_1", "norm1").replace("ln_2", "norm2")
        name = name.replace("mlp.0", "fc1").replace("mlp.3", "fc2").replace("self_attention.out_proj", "attention.out")
        if "in_proj" in name:
            for part, third in zip(("query", "key", "value"), value.chunk(3), strict=True):
                weights[name.replace("self_attention.in_proj_", f"attention.{part}.")] = third
        else:
            weights[name] = value
    ours.load_state_dict(weights)
    x = images(2, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cnn", "resnet_tiny"])
@pytest.mark.parametrize(
    ("norm", "kind"), [("batch", nn.BatchNorm2d), ("sync", SyncBatchNorm), ("group", nn.GroupNorm)]
)
def test_the_norm_option_replaces_every_norm(name: str, norm: str, kind: type[nn.Module]) -> None:
    layers = built(spec(name, norm=norm))
    norms = [m for m in layers.modules() if isinstance(m, nn.BatchNorm2d | nn.GroupNorm)]
    assert len(norms) == {"cnn": 6, "resnet_tiny": 6}[name]
    assert {type(m) for m in norms} == {kind}
    assert layers(images(2)).isfinite().all()


def test_the_cifar_stem_keeps_the_resolution() -> None:
    x = images(2)
    assert built(spec("resnet_tiny")).stem(x).shape == (2, 8, 32, 32)
    assert built(spec("resnet_tiny", stem="imagenet")).stem(x).shape == (2, 8, 8, 8)


def test_only_the_last_dense_layer_has_no_activation() -> None:
    layers = built(spec("mlp", hidden=[8, 4]), channels=1)
    assert [type(layer.activation) for layer in layers] == [nn.ReLU, nn.ReLU, nn.Identity]
    assert [layer.linear.out_features for layer in layers] == [8, 4, 10]


def test_a_sequence_needs_a_name_for_every_layer() -> None:
    layer = Dense(1, 1, relu=False)
    with pytest.raises(ConfigError, match=r"1 layer for the names .*: let layer_names give each layer"):
        sequence(["a", "b"], [layer])
    with pytest.raises(ConfigError, match="one name of its own"):
        sequence(["a", "a"], [layer, layer])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), [("cnn_small", 2), ("cnn_large", 8), ("cnn", 8), ("vit", 4)])
def test_the_smallest_images_are_taken(name: str, size: int) -> None:
    assert built(spec(name), size=size)(images(2, size=size)).shape == (2, 10)
