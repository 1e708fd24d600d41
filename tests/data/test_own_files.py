"""Files of one's own in the published formats: taken at any size, named by their content, part of the run's id."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import raw_data as raw

from launch.sweep import one_run
from parallelbench.config.build import to_mapping
from parallelbench.config.dataset_check import checked
from parallelbench.config.identity import run_id
from parallelbench.data.prepare import prepare
from parallelbench.data.torchvision import Mnist, PreparedData
from parallelbench.errors import ConfigError

SIZES = (7, 3)


def mnist_files(labels: int = SIZES[0], *, bright: int = 255) -> dict[str, bytes]:
    images = [np.full((n, 28, 28), bright, np.uint8) for n in SIZES]
    parts = (images[0], raw.labels_of(labels, 10) * 0, images[1], raw.labels_of(SIZES[1], 10) * 0)
    names = [Path(file.path).name for file in Mnist.raw_files]
    return dict(zip(names, map(raw.idx_bytes, parts), strict=True))


def mnist(files: str) -> Mnist:
    return Mnist(name="mnist", augment=False, copies=1, files=files)


def prepared(data: PreparedData, data_dir: Path) -> str:
    """Prepare, and return the name that was printed last."""
    lines: list[str] = []
    prepare(data, data_dir, progress=lines.append)
    line, name = lines[-1].rsplit("=", 1)
    assert line.endswith(f"train on them with data={data.name} data.files")
    return name


def test_files_of_another_size_and_checksum_become_a_data_set_of_their_own(tmp_path: Path) -> None:
    raw.put(mnist_files(), tmp_path / "own")
    name = prepared(mnist(str(tmp_path / "own")), tmp_path / "data")
    data = mnist(name)
    assert (data.train_samples, data.test_samples) == SIZES
    assert data.missing_files(tmp_path / "data") == []
    arrays = checked(data, data.load(tmp_path / "data"))
    assert (arrays.train_images == 255).all()
    assert len(arrays.train_labels) == SIZES[0]
    assert data.fingerprint(tmp_path / "data").startswith(name[:12])
    assert Mnist(name="mnist", augment=False, copies=1).missing_files(tmp_path / "data")  # never taken for MNIST
    assert Mnist(name="mnist", augment=False, copies=4, files=name).train_samples == 4 * SIZES[0]
    prepare(data, tmp_path / "data", progress=lambda line: None)  # ready: does nothing


def test_cifar_files_likewise(tmp_path: Path) -> None:
    raw.put(raw.CIFAR10_FILES, tmp_path / "own")
    cls = type("Other", (raw.TinyCifar10,), {"raw_files": raw.Cifar10.raw_files}, frozen=True, kw_only=True)
    name = prepared(cls(name="cifar10", augment=False, files=str(tmp_path / "own")), tmp_path / "data")
    data = raw.Cifar10(name="cifar10", augment=False, files=name)
    np.testing.assert_array_equal(data.load(tmp_path / "data").train_images, raw.CIFAR_IMAGES[0])


def test_the_content_is_part_of_the_runs_id_and_no_files_leave_it_as_it_was(tmp_path: Path) -> None:
    names = []
    for bright in (255, 254):
        raw.put(mnist_files(bright=bright), tmp_path / str(bright))
        names.append(prepared(mnist(str(tmp_path / str(bright))), tmp_path))
    ids = [run_id(one_run(["data=mnist", f"data.files={name}"]).run) for name in names]
    published = one_run(["data=mnist"]).run
    assert len({*names}) == 2
    assert len({*ids, run_id(published)}) == 3
    assert "files" not in to_mapping(published)["data"]  # run ids of earlier releases stay


def test_another_content_in_a_named_folder_is_refused(tmp_path: Path) -> None:
    raw.put(mnist_files(), tmp_path / "own")
    data = mnist(prepared(mnist(str(tmp_path / "own")), tmp_path))
    other = mnist("0" * 12 + data.files[12:])
    data.prepared_dir(tmp_path).rename(other.prepared_dir(tmp_path))
    with pytest.raises(ConfigError, match="another content than its name says: delete the folder"):
        other.fingerprint(tmp_path)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"train-labels-idx1-ubyte.gz": None}, "has no train-labels-idx1-ubyte.gz"),
        ({"train-labels-idx1-ubyte.gz": mnist_files(labels=5)["train-labels-idx1-ubyte.gz"]}, r"\(5,\), expected"),
        ({"train-labels-idx1-ubyte.gz": raw.idx_bytes(raw.images_of(7, 2))}, "wrong magic number 00 00 08 02"),
        ({"train-labels-idx1-ubyte.gz": raw.idx_bytes(np.arange(6, 13, dtype=np.uint8))}, "from 6 to 12"),
        ({"train-images-idx3-ubyte.gz": raw.idx_bytes(raw.images_of(7, 32, 32))}, r"\(7, 1, 32, 32\), expected"),
        (
            {"train-images-idx3-ubyte.gz": mnist_files()["train-images-idx3-ubyte.gz"][:-9]},
            "truncated.*replace",
        ),
    ],
)
def test_files_that_make_no_data_set_are_refused_and_publish_nothing(
    tmp_path: Path, change: dict[str, Any], problem: str
) -> None:
    files = mnist_files() | change
    raw.put({name: content for name, content in files.items() if content is not None}, tmp_path / "own")
    with pytest.raises(ConfigError, match=problem):
        prepare(mnist(str(tmp_path / "own")), tmp_path / "data", progress=lambda line: None)
    assert list((tmp_path / "data").glob("*")) == []


def test_a_run_takes_the_name_and_prepare_the_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.files=own is no name.*prepare data=mnist data\.files=own` first"):
        _ = mnist("own").train_samples
    with pytest.raises(ConfigError, match=r"not prepared in .*data\.files=FOLDER"):
        prepare(mnist("0123456789ab-7-3"), tmp_path, progress=lambda line: None)
    raw.put({Path(path).name: content for path, content in raw.MNIST_FILES.items()}, tmp_path / "own")
    with pytest.raises(ConfigError, match="exactly what is published: leave"):
        prepare(raw.TinyMnist(name="mnist", augment=False, copies=1, files=str(tmp_path / "own")), tmp_path)


def test_a_whole_file_that_is_not_the_published_one_is_told_from_a_damaged_one(tmp_path: Path) -> None:
    raw.put({f"MNIST/raw/{name}": content for name, content in mnist_files().items()}, tmp_path / "raw")
    with pytest.raises(ConfigError, match="is a whole file of this format, but not the published one") as caught:
        prepare(Mnist(name="mnist", augment=False, copies=1), tmp_path, progress=lambda line: None)
    assert f"data.files={tmp_path / 'raw' / 'MNIST' / 'raw'}" in str(caught.value)
