"""Arrays of one's own in an .npz file: taken at any size, named by their content, part of the run's id."""

from __future__ import annotations

from collections.abc import Callable
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
from parallelbench.data.torchvision import Cifar10, Mnist, PreparedData
from parallelbench.errors import ConfigError

SIZES = (7, 3)


def arrays(*, bright: int = 255) -> dict[str, np.ndarray]:
    """As the layout of MNIST has them, but for the labels' type."""
    parts = zip(("train", "test"), SIZES, strict=True)
    images = {f"{part}_images": np.full((n, 1, 28, 28), bright, np.uint8) for part, n in parts}
    return images | {f"{part}_labels": np.zeros(n, np.uint8) for part, n in zip(("train", "test"), SIZES, strict=True)}


def saved(path: Path, held: dict[str, Any]) -> str:
    """An .npz file of these arrays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **held)
    return str(path)


def mnist(files: str) -> Mnist:
    return Mnist(name="mnist", augment=False, copies=1, files=files)


def prepared(data: PreparedData, data_dir: Path) -> str:
    """Prepare, and return the name that was printed last."""
    lines: list[str] = []
    prepare(data, data_dir, progress=lines.append)
    line, name = lines[-1].rsplit("=", 1)
    assert line.endswith(f"train on them with data={data.name} data.files")
    return name


def test_arrays_become_a_data_set_of_their_own(tmp_path: Path) -> None:
    name = prepared(mnist(saved(tmp_path / "own.npz", arrays())), tmp_path / "data")
    assert name == "13b640f4234f-7-3", "as an earlier release named the same arrays"
    data = mnist(name)
    assert (data.train_samples, data.test_samples) == SIZES
    assert data.missing_files(tmp_path / "data") == []
    held = checked(data, data.load(tmp_path / "data"))
    assert (held.train_images == 255).all()
    assert (len(held.train_labels), held.train_labels.dtype) == (SIZES[0], np.int64)
    assert data.fingerprint(tmp_path / "data").startswith(name[:12])
    assert Mnist(name="mnist", augment=False, copies=1).missing_files(tmp_path / "data")  # never taken for MNIST
    assert Mnist(name="mnist", augment=False, copies=4, files=name).train_samples == 4 * SIZES[0]
    prepare(data, tmp_path / "data", progress=lambda line: None)  # ready: does nothing


def test_cifars_likewise(tmp_path: Path) -> None:
    held = arrays() | {f"{part}_images": raw.CIFAR_IMAGES[i] for i, part in enumerate(("train", "test"))}
    held |= {f"{part}_labels": raw.CIFAR10_LABELS[i] for i, part in enumerate(("train", "test"))}
    own = saved(tmp_path / "own.npz", held)
    name = prepared(Cifar10(name="cifar10", augment=False, files=own), tmp_path / "data")
    data = Cifar10(name="cifar10", augment=False, files=name)
    np.testing.assert_array_equal(data.load(tmp_path / "data").train_images, raw.CIFAR_IMAGES[0])


def test_the_content_is_part_of_the_runs_id_and_no_files_leave_it_as_it_was(tmp_path: Path) -> None:
    names = []
    for bright in (255, 254):
        names.append(prepared(mnist(saved(tmp_path / "own.npz", arrays(bright=bright))), tmp_path))
    ids = [run_id(one_run(["data=mnist", f"data.files={name}"]).run) for name in names]
    published = one_run(["data=mnist"]).run
    assert len({*names}) == 2
    assert len({*ids, run_id(published)}) == 3
    assert "files" not in to_mapping(published)["data"]  # run ids of earlier releases stay


def test_another_content_in_a_named_folder_is_refused(tmp_path: Path) -> None:
    data = mnist(prepared(mnist(saved(tmp_path / "own.npz", arrays())), tmp_path))
    other = mnist("0" * 12 + data.files[12:])
    data.prepared_dir(tmp_path).rename(other.prepared_dir(tmp_path))
    with pytest.raises(ConfigError, match="another content than its name says: delete the folder"):
        other.fingerprint(tmp_path)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"train_labels": None}, "it lacks train_labels, and holds train_images, test_images, test_labels"),
        ({"train_labels": np.zeros(5, int)}, r"train_labels int64 \(5,\), expected int64 \(7,\)"),
        ({"train_labels": np.arange(6, 13)}, "train_labels from 6 to 12, expected 0 … 9"),
        ({"train_labels": np.zeros(7)}, "train_labels float64"),
        ({"test_labels": np.int64(1)}, r"test_labels int64 \(1,\), expected int64 \(3,\)"),
        ({"train_labels": np.array([None] * 7)}, "Object arrays cannot be loaded"),
        ({"train_images": np.zeros((7, 1, 32, 32), np.uint8)}, r"\(7, 1, 32, 32\), expected uint8 \(7, 1, 28, 28\)"),
        ({"test_images": np.zeros((0, 1, 28, 28), np.uint8)}, "nothing in test_images"),
    ],
    ids=["lacking", "fewer", "range", "floats", "number", "pickled", "size", "empty"],
)
def test_arrays_that_make_no_data_set_are_refused_and_publish_nothing(
    tmp_path: Path, change: dict[str, Any], problem: str
) -> None:
    held = {name: array for name, array in (arrays() | change).items() if array is not None}
    with pytest.raises(ConfigError, match=problem) as caught:
        prepare(mnist(saved(tmp_path / "own.npz", held)), tmp_path / "data", progress=lambda line: None)
    assert "numpy.savez(FILE, train_images=…" in str(caught.value)
    assert list((tmp_path / "data").glob("*")) == []


@pytest.mark.parametrize(
    "damage",
    [
        *(lambda b: b"", lambda b: b[:-9], lambda b: b"<html>", lambda b: b[:90] + b"?" + b[91:]),
        lambda b: b.replace(b"}", b" "),  # a header without an end
    ],
)
def test_a_damaged_file_likewise(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    path = Path(saved(tmp_path / "own.npz", arrays()))
    path.write_bytes(damage(path.read_bytes()))
    for own in (path, tmp_path / "none.npz", tmp_path):
        with pytest.raises(ConfigError, match=rf"data\.files={own} is no \.npz file.*numpy\.savez"):
            prepare(mnist(str(own)), tmp_path / "data", progress=lambda line: None)


def test_too_little_memory_is_no_fault_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **_options: object) -> None:
        raise MemoryError

    own = saved(tmp_path / "own.npz", arrays())
    monkeypatch.setattr(np, "load", full)
    with pytest.raises(MemoryError):
        prepare(mnist(own), tmp_path / "data", progress=lambda line: None)


def test_a_run_takes_the_name_and_prepare_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.files=own is no name.*prepare data=mnist data\.files=own` first"):
        _ = mnist("own").train_samples
    with pytest.raises(ConfigError, match=r"not prepared in .*data\.files=FILE\.npz"):
        prepare(mnist("0123456789ab-7-3"), tmp_path, progress=lambda line: None)
