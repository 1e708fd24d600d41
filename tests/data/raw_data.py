"""Small data sets in the genuine raw formats, and what processes of their own do with them."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import signal
import tarfile
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from parallelbench.data.prepare import prepare
from parallelbench.data.torchvision import Cifar10, Cifar100, Mnist, RawFile

if TYPE_CHECKING:
    from pathlib import Path

TRAIN, TEST = 30, 10
NOWHERE = "http://127.0.0.1:9/"  # the discard port: refused at once
RANDOM = np.random.default_rng(5)


def labels_of(samples: int, classes: int) -> np.ndarray:
    return RANDOM.integers(0, classes, samples, dtype=np.uint8)


def images_of(samples: int, *shape: int) -> np.ndarray:
    return RANDOM.integers(0, 256, (samples, *shape), dtype=np.uint8)


def idx_bytes(array: np.ndarray, *, magic: bytes = b"\0\0\x08") -> bytes:
    header = magic + bytes([array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    return gzip.compress(header + array.tobytes(), mtime=0)


def cifar_bytes(images: np.ndarray, *labels: np.ndarray) -> bytes:
    return np.concatenate([*(label[:, None] for label in labels), images.reshape(len(images), -1)], axis=1).tobytes()


def archive_bytes(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w") as tar,
    ):
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def raw_files(contents: dict[str, bytes], *, url: str = NOWHERE) -> tuple[RawFile, ...]:
    return tuple(
        RawFile(path, hashlib.md5(content).hexdigest(), (url + path.rpartition("/")[2],))
        for path, content in contents.items()
    )


def put(contents: dict[str, bytes], raw_dir: Path) -> None:
    for path, content in contents.items():
        (raw_dir / path).parent.mkdir(parents=True, exist_ok=True)
        (raw_dir / path).write_bytes(content)


MNIST_IMAGES = images_of(TRAIN, 28, 28), images_of(TEST, 28, 28)
MNIST_LABELS = labels_of(TRAIN, 10), labels_of(TEST, 10)
MNIST_FILES = dict(
    zip(
        (raw.path for raw in Mnist.raw_files),
        map(idx_bytes, (MNIST_IMAGES[0], MNIST_LABELS[0], MNIST_IMAGES[1], MNIST_LABELS[1])),
        strict=True,
    )
)


class TinyMnist(Mnist, frozen=True, kw_only=True):
    published_train_samples: ClassVar[int] = TRAIN
    published_test_samples: ClassVar[int] = TEST
    raw_files: ClassVar[tuple[RawFile, ...]] = raw_files(MNIST_FILES)


def tiny_mnist(*, copies: int = 1, **changes: Any) -> TinyMnist:
    """TinyMnist, with class attributes replaced: its files, checksums or sizes."""
    cls = type("Changed", (TinyMnist,), changes, frozen=True, kw_only=True) if changes else TinyMnist
    return cls(name="mnist", augment=False, copies=copies)


CIFAR_IMAGES = images_of(TRAIN, 3, 32, 32), images_of(TEST, 3, 32, 32)
CIFAR10_LABELS = labels_of(TRAIN, 10), labels_of(TEST, 10)
CIFAR10_FILES = {
    "cifar-10-binary.tar.gz": archive_bytes(
        {
            "cifar-10-batches-bin/test_batch.bin": cifar_bytes(CIFAR_IMAGES[1], CIFAR10_LABELS[1]),
            "cifar-10-batches-bin/readme.html": b"not a batch",
            **{
                f"cifar-10-batches-bin/data_batch_{part + 1}.bin": cifar_bytes(
                    CIFAR_IMAGES[0][part * 6 : part * 6 + 6], CIFAR10_LABELS[0][part * 6 : part * 6 + 6]
                )
                for part in reversed(range(5))
            },
        }
    )
}


class TinyCifar10(Cifar10, frozen=True, kw_only=True):
    published_train_samples: ClassVar[int] = TRAIN
    published_test_samples: ClassVar[int] = TEST
    raw_files: ClassVar[tuple[RawFile, ...]] = raw_files(CIFAR10_FILES)


CIFAR100_LABELS = labels_of(TRAIN, 100), labels_of(TEST, 100)
CIFAR100_FILES = {
    "cifar-100-binary.tar.gz": archive_bytes(
        {
            f"cifar-100-binary/{name}.bin": cifar_bytes(CIFAR_IMAGES[i], CIFAR100_LABELS[i] // 5, CIFAR100_LABELS[i])
            for i, name in enumerate(("train", "test"))
        }
    )
}


class TinyCifar100(Cifar100, frozen=True, kw_only=True):
    published_train_samples: ClassVar[int] = TRAIN
    published_test_samples: ClassVar[int] = TEST
    raw_files: ClassVar[tuple[RawFile, ...]] = raw_files(CIFAR100_FILES)


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
