"""Two data sets of one name may hold other samples: the sha256 of what they hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import raw_data as raw

from parallelbench.config.components import Arrays
from parallelbench.data import content
from parallelbench.data.content import content_sha256
from parallelbench.data.prepare import prepare
from tests.helpers import configured


class Unmarked:
    """A user's data set, which has no fingerprint of its own."""

    def fingerprint(self, data_dir: Path) -> None:
        return None


MINE: Any = Unmarked()
SAMPLES = np.arange(2 * 1 * 4 * 4, dtype=np.uint8).reshape(2, 1, 4, 4)
LABELS = np.array([0, 1])


def in_memory(samples: Any = SAMPLES) -> Arrays:
    return Arrays(samples, LABELS, samples, LABELS)


def mapped(folder: Path, samples: Any = SAMPLES) -> Arrays:
    for name, array in (("images", samples), ("labels", LABELS)):
        np.save(folder / f"{name}.npy", array)
    images, labels = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("images", "labels"))
    return Arrays(images, labels, images, labels)


def test_a_single_other_pixel_is_another_content(tmp_path: Path) -> None:
    other = SAMPLES.copy()
    other[1, 0, 3, 3] += 1
    digests = [content_sha256(MINE, tmp_path, in_memory(samples)) for samples in (SAMPLES, SAMPLES.copy(), other)]
    assert digests[0] == digests[1] != digests[2]
    assert content_sha256(MINE, tmp_path, mapped(tmp_path)) == digests[0], "wherever it lies"
    assert content_sha256(MINE, tmp_path, in_memory(SAMPLES.reshape(2, 1, 2, 8))) != digests[0]


def test_what_identifies_itself_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "digest", lambda _: pytest.fail("it was read"))
    data = configured("data=synthetic").data
    assert content_sha256(data, tmp_path, in_memory()) == data.fingerprint(tmp_path)


def test_a_prepared_file_that_was_edited_in_place_is_another_content(tmp_path: Path) -> None:
    raw.put(raw.MNIST_FILES, tmp_path / "raw")
    data = raw.tiny_mnist()
    prepare(data, tmp_path, progress=lambda _: None)
    file = data.prepared_dir(tmp_path) / "train_images.npy"
    right = file.read_bytes()
    contents = []
    for held in (right, right[:-1] + bytes([right[-1] ^ 1]), right):
        file.write_bytes(held)
        contents.append(content_sha256(data, tmp_path, data.load(tmp_path)))
    assert contents[0] == contents[2] != contents[1]
