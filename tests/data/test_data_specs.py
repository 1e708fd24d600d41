from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch.nn import functional as F

import conf
from parallelbench.config.build import build
from parallelbench.config.components import Data
from parallelbench.data.sklearn import DIGITS, Digits, resize
from parallelbench.data.synthetic import Synthetic


def spec(stem: str, **changes: object) -> Data:
    path = Path(conf.__file__).parent / "data" / f"{stem}.yaml"
    return build({**yaml.safe_load(path.read_text()), **changes}, "data")


def test_sizes_are_the_published_ones() -> None:
    assert (spec("mnist").train_samples, spec("mnist").test_samples) == (60_000, 10_000)
    assert spec("mnist", copies=8).train_samples == 480_000
    assert (spec("cifar100").train_samples, spec("cifar100").num_classes) == (50_000, 100)


def test_digits_are_split_by_class_and_complete() -> None:
    data = spec("digits")
    arrays = data.load(Path("nowhere"))
    assert arrays.train_images.shape == (data.train_samples, 1, 28, 28)
    assert arrays.test_images.shape == (data.test_samples, 1, 28, 28)
    assert data.train_samples + data.test_samples == DIGITS
    shares = np.bincount(arrays.test_labels) / np.bincount(np.r_[arrays.train_labels, arrays.test_labels])
    assert shares.min() > 0.19
    assert shares.max() <= 0.2
    assert arrays.train_images.max() == 255
    assert (arrays.train_images.dtype, arrays.train_labels.dtype) == (np.uint8, np.int64)


@pytest.mark.slow
def test_digits_are_scikit_learns() -> None:
    load_digits = pytest.importorskip("sklearn.datasets").load_digits
    arrays = spec("digits", image_size=8).load(Path("nowhere"))
    theirs = load_digits()
    both = np.r_[arrays.train_images, arrays.test_images][:, 0]
    expected = np.floor(theirs.images * 255 / 16 + 0.5)
    assert sorted(map(bytes, both)) == sorted(map(bytes, expected.astype(np.uint8)))


def test_digits_loading_imports_neither_sklearn_nor_torch() -> None:
    code = (
        "import sys; from pathlib import Path; from parallelbench.data.sklearn import Digits; "
        "Digits(name='digits', augment=False, image_size=28).load(Path()); "
        "assert not {'torch', 'sklearn'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_digits_mean_and_std_are_the_documented_ones() -> None:
    images = spec("digits").load(Path("nowhere")).train_images / 255
    assert Digits.mean == (round(float(images.mean()), 4),)
    assert Digits.std == (round(float(images.std()), 4),)


@pytest.mark.parametrize("size", [8, 9, 28, 37, 64])
def test_resize_is_bilinear(size: int) -> None:
    images = np.random.default_rng(0).integers(0, 17, (20, 8, 8))
    ours = torch.from_numpy(resize(images, size=size)).double()
    exact = torch.from_numpy(images)[:, None].double() * 255 / 16
    exact = F.interpolate(exact, size=(size, size), mode="bilinear", align_corners=False)[:, 0]
    assert (ours - exact).abs().max() <= 0.5 + 1e-9


SYNTHETIC = {"train_samples": 500, "test_samples": 203, "image_size": 9, "num_classes": 7}


def test_synthetic_is_as_asked_and_repeatable() -> None:
    data = spec("synthetic", channels=2, **SYNTHETIC)
    first, second = data.load(Path("nowhere")), data.load(Path("nowhere"))
    assert first.train_images.shape == (500, 2, 9, 9)
    assert first.test_images.shape == (203, 2, 9, 9)
    np.testing.assert_array_equal(first.train_images, second.train_images)
    assert np.ptp(np.bincount(first.train_labels, minlength=7)) <= 1
    assert len(np.unique(first.train_images, axis=0)) == 500
    other = spec("synthetic", channels=2, data_seed=1, **SYNTHETIC).load(Path("nowhere"))
    assert (other.train_images != first.train_images).any()


def test_synthetic_chunks_make_no_seams(monkeypatch: pytest.MonkeyPatch) -> None:
    data = spec("synthetic", channels=2, **{**SYNTHETIC, "image_size": 8})
    whole = data.load(Path("nowhere"))
    monkeypatch.setattr("parallelbench.data.synthetic.CHUNK_BYTES", 1000)
    np.testing.assert_array_equal(data.load(Path("nowhere")).train_images, whole.train_images)


def test_synthetic_is_learnable_and_noise_makes_it_harder() -> None:
    def accuracy(noise: float) -> float:
        arrays = spec("synthetic", noise=noise, **SYNTHETIC).load(Path("nowhere"))
        train = arrays.train_images.reshape(500, -1).astype(float)
        means = np.stack([train[arrays.train_labels == label].mean(0) for label in range(7)])
        test = arrays.test_images.reshape(203, 1, -1).astype(float)
        return float((((test - means) ** 2).sum(-1).argmin(-1) == arrays.test_labels).mean())

    assert accuracy(0.5) == 1.0
    assert accuracy(1.0) < 0.4


def test_synthetic_mean_and_std_are_about_right() -> None:
    data = spec("synthetic", train_samples=2000, test_samples=1)
    images = data.load(Path("nowhere")).train_images / 255
    assert isinstance(data, Synthetic)
    assert images.mean() == pytest.approx(data.mean[0], abs=0.05)
    assert images.std() == pytest.approx(data.std[0], abs=0.1)
