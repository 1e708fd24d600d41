"""Small data sets in the genuine raw formats, and what processes of their own do with them."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import pickle
import signal
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torchvision import datasets

from parallelbench.data.prepare import prepare
from parallelbench.data.torchvision import Cifar10, Cifar100, Mnist

TRAIN, TEST = 30, 10
NOWHERE = "http://127.0.0.1:9/"  # the discard port: refused at once
RANDOM = np.random.default_rng(5)


def labels_of(samples: int, classes: int) -> np.ndarray:
    return RANDOM.integers(0, classes, samples, dtype=np.uint8)


def images_of(samples: int, *shape: int) -> np.ndarray:
    return RANDOM.integers(0, 256, (samples, *shape), dtype=np.uint8)


def idx_bytes(array: np.ndarray) -> bytes:
    header = b"\0\0\x08" + bytes([array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    return gzip.compress(header + array.tobytes(), mtime=0)


def archive_bytes(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as zipped, tarfile.open(fileobj=zipped, mode="w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def put(contents: dict[str, bytes], raw_dir: Path) -> None:
    for path, content in contents.items():
        (raw_dir / path).parent.mkdir(parents=True, exist_ok=True)
        (raw_dir / path).write_bytes(content)


MNIST_IMAGES = images_of(TRAIN, 28, 28), images_of(TEST, 28, 28)
MNIST_LABELS = labels_of(TRAIN, 10), labels_of(TEST, 10)
MNIST_FILES = {
    f"MNIST/raw/{name}": idx_bytes(array)
    for (name, _), array in zip(
        datasets.MNIST.resources, (MNIST_IMAGES[0], MNIST_LABELS[0], MNIST_IMAGES[1], MNIST_LABELS[1]), strict=True
    )
}


def torchvisions_mnist(mirrors: Sequence[str] = (NOWHERE,)) -> Any:
    """torchvision's class, but for what is published where."""
    resources = [(path.rpartition("/")[2], md5(content)) for path, content in MNIST_FILES.items()]
    return type("MNIST", (datasets.MNIST,), {"resources": resources, "mirrors": list(mirrors)})


class TinyMnist(Mnist, frozen=True, kw_only=True):
    published_train_samples: ClassVar[int] = TRAIN
    published_test_samples: ClassVar[int] = TEST

    def source(self) -> Any:
        return torchvisions_mnist()


def tiny_mnist(*, copies: int = 1, **changes: Any) -> TinyMnist:
    """TinyMnist, with class attributes replaced: its source or sizes."""
    cls = type("Changed", (TinyMnist,), changes, frozen=True, kw_only=True) if changes else TinyMnist
    return cls(name="mnist", augment=False, copies=copies)


CIFAR_IMAGES = images_of(TRAIN, 3, 32, 32), images_of(TEST, 3, 32, 32)
CIFAR10_LABELS = labels_of(TRAIN, 10), labels_of(TEST, 10)


def batch(images: np.ndarray, **labels: np.ndarray) -> bytes:
    """A file of CIFAR's Python version."""
    content = {key: values.tolist() for key, values in labels.items()}
    return pickle.dumps({"data": images.reshape(len(images), -1), **content}, protocol=2)


def torchvisions_cifar(cls: Any, batches: dict[str, bytes]) -> tuple[dict[str, bytes], Any]:
    """The published archive of these batches, and torchvision's class, which knows their checksums."""
    batches[cls.meta["filename"]] = pickle.dumps({cls.meta["key"]: []})
    archive = archive_bytes({f"{cls.base_folder}/{name}": content for name, content in batches.items()})
    known = {
        "url": NOWHERE + cls.filename,
        "tgz_md5": md5(archive),
        "train_list": [[name, md5(batches[name])] for name, _ in cls.train_list],
        "test_list": [[name, md5(batches[name])] for name, _ in cls.test_list],
        "meta": {**cls.meta, "md5": md5(batches[cls.meta["filename"]])},
    }
    return {cls.filename: archive}, type(cls.__name__, (cls,), known)


CIFAR10_FILES, TORCHVISIONS_CIFAR10 = torchvisions_cifar(
    datasets.CIFAR10,
    {
        "test_batch": batch(CIFAR_IMAGES[1], labels=CIFAR10_LABELS[1]),
        **{
            f"data_batch_{part + 1}": batch(
                CIFAR_IMAGES[0][part * 6 : part * 6 + 6], labels=CIFAR10_LABELS[0][part * 6 : part * 6 + 6]
            )
            for part in reversed(range(5))
        },
    },
)


class TinyCifar10(Cifar10, frozen=True, kw_only=True):
    published_train_samples: ClassVar[int] = TRAIN
    published_test_samples: ClassVar[int] = TEST

    def source(self) -> Any:
        return TORCHVISIONS_CIFAR10


CIFAR100_LABELS = labels_of(TRAIN, 100), labels_of(TEST, 100)
CIFAR100_FILES, TORCHVISIONS_CIFAR100 = torchvisions_cifar(
    datasets.CIFAR100,
    {
        name: batch(CIFAR_IMAGES[i], coarse_labels=CIFAR100_LABELS[i] // 5, fine_labels=CIFAR100_LABELS[i])
        for i, name in enumerate(("train", "test"))
    },
)


class TinyCifar100(Cifar100, frozen=True, kw_only=True):
    published_train_samples: ClassVar[int] = TRAIN
    published_test_samples: ClassVar[int] = TEST

    def source(self) -> Any:
        return TORCHVISIONS_CIFAR100


def prepare_until_killed(data_dir: Path, kill_at: int) -> None:
    """Prepare in this process, which kills itself when progress is reported for the `kill_at`-th time."""
    calls = iter(range(1000))

    def progress(line: str) -> None:
        if next(calls) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    prepare(tiny_mnist(), data_dir, progress=progress)


def prepare_in_step(data_dir: Path, barrier: Any) -> None:
    """Prepare, but wait for the others just before publishing."""

    def progress(line: str) -> None:
        if "publishing" in line:
            barrier.wait(timeout=60)

    prepare(tiny_mnist(), data_dir, progress=progress)
