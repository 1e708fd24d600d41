"""`data=torch_dataset`: a torch `Dataset` of one's own, read once, checked as other data, and of one package only."""

from __future__ import annotations

import re
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from launch.launcher import launcher_of
from launch.sweep import expand, one_run
from launch.sweep.compose import Extension
from parallelbench.config.build import component_class, from_mapping, to_mapping
from parallelbench.config.dataset_check import checked, require_memory
from parallelbench.config.identity import run_id
from parallelbench.config.plugin import plugin_of, training_plugin
from parallelbench.config.run import RunConfig
from parallelbench.config.run_rules import check_run
from parallelbench.data.content import content_sha256
from parallelbench.data.torch_dataset import _look, _read
from parallelbench.errors import ConfigError
from parallelbench.training.failure import classify
from parallelbench.training.torch_session import build_model
from parallelbench.world.world import World
from tests.faults import fault
from tests.ranks import run_ranks
from tests.strategies.training import drive, prepared

CODE = """
import numpy as np
import torch
from torch.utils.data import Dataset

MADE = []


class Images(Dataset):
    def __init__(self, train, noise=0.0, samples=96):
        MADE.append(train)
        draw = torch.Generator().manual_seed(int(train))
        self.labels = torch.arange(samples if train else 37) % 4
        self.images = torch.randint(256, (len(self.labels), 3, 8, 8), generator=draw, dtype=torch.uint8)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index], int(self.labels[index])


class Grey(Images):
    def __getitem__(self, index):
        return self.images[index, 0].numpy(), self.labels[index]


class Vectors(Images):
    def __getitem__(self, index):
        return self.images[index].flatten()[:5].double() / 100, int(self.labels[index])


class Tokens(Images):
    def __getitem__(self, index):
        tokens = self.images[index].flatten()[:7].long() % 50
        return tokens[:-1], tokens[1:]


class Scaled(Images):
    def __getitem__(self, index):
        return self.images[index] / 255, int(self.labels[index])


class Ragged(Images):
    def __getitem__(self, index):
        return self.images[index, : 1 + index % 2], int(self.labels[index])


class Alone(Images):
    def __getitem__(self, index):
        return self.images[index]


class Named(Images):
    def __getitem__(self, index):
        return {"image": self.images[index], "label": int(self.labels[index])}


class OneHot(Images):
    def __getitem__(self, index):
        return self.images[index], np.eye(4)[self.labels[index]]


class Last(Images):
    def __getitem__(self, index):
        return self.images[index].permute(1, 2, 0), int(self.labels[index])


class Untested(Images):
    def __len__(self):
        return len(self.labels) if len(self.labels) > 37 else 0


class Draws(Images):
    def __getitem__(self, index):
        return torch.randint(256, (3, 8, 8), dtype=torch.uint8), int(self.labels[index])


class Folder(Dataset):
    # As a class folder of images is.
    def __init__(self, train, side=224, items=1_281_167, label=999):
        self.side, self.label, self.items = side, label, items if train else 50_000

    def __len__(self):
        return self.items

    def __getitem__(self, index):
        READ.append(index)
        return np.zeros((3, self.side, self.side), np.uint8), self.label


READ = []


class Lacks(Images):
    def __getitem__(self, index):
        if index == 80:
            raise MemoryError
        return super().__getitem__(index)


class Far(Images):
    def __getitem__(self, index):
        return self.images[index], 10**12 if index == 50 else int(self.labels[index])


class Fails(Images):
    def __init__(self, train):
        raise OSError("no such file")


def nothing():
    pass
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Extension:
    """A package with data sets, as this process imports it."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    component_class.cache_clear()
    _look.cache_clear()
    _read.cache_clear()
    return Extension(None, "mine")


def configured(own: Extension, name: str, *overrides: str) -> RunConfig:
    chosen = [f"data.dataset=mine.{name}", "model=mlp", "model.hidden=[8]", "precision=fp64", "batch_size=24"]
    return one_run(["data=torch_dataset", *chosen, *overrides], own).run


@pytest.mark.parametrize(
    ("name", "kind", "shape", "classes", "labels"),
    [
        ("Images", "images", (3, 8, 8), 4, ()),
        ("Grey", "images", (1, 8, 8), 4, ()),
        ("Vectors", "vectors", (5,), 4, ()),
        ("Tokens", "tokens", (6,), 50, (6,)),
    ],
)
def test_what_it_is_follows_from_its_items(
    name: str, kind: str, shape: Any, classes: int, labels: Any, own: Extension
) -> None:
    run = configured(own, name)
    data = run.data
    assert (data.kind, data.shape, data.label_shape) == (kind, shape, labels)
    assert (data.num_classes, data.train_samples, data.test_samples) == (classes, 96, 37)
    assert data.vocabulary == (50 if kind == "tokens" else 0)
    arrays = checked(data, data.load(Path("nowhere")))
    original = sys.modules["mine"].__dict__[name](train=True)
    for index in (0, 50, 95):
        sample, label = original[index]
        np.testing.assert_allclose(arrays.train_images[index].reshape(np.shape(sample)), np.asarray(sample), rtol=1e-6)
        np.testing.assert_array_equal(arrays.train_labels[index], np.asarray(label))
    if kind == "images":
        whole = arrays.train_images / 255
        np.testing.assert_allclose(data.mean, whole.mean((0, 2, 3)))
        np.testing.assert_allclose(data.std, whole.std((0, 2, 3)))
    if kind == "vectors":
        assert arrays.train_images.dtype == np.float32
        np.testing.assert_allclose(data.std, arrays.train_images.std(0), rtol=1e-5)


def test_it_is_read_once_in_a_process_and_its_content_is_known(own: Extension, tmp_path: Path) -> None:
    run = configured(own, "Images")
    check_run(run, "cpu")
    assert build_model(run)[0].linear.in_features == 3 * 64  # type: ignore[union-attr]
    arrays = run.data.load(tmp_path)
    assert run.data.load(tmp_path) is arrays
    assert sys.modules["mine"].MADE == [1, 0, 1, 0], "the second time to see that it is the same"
    digests = {content_sha256(each.data, tmp_path, each.data.load(tmp_path)) for each in (run, configured(own, "Grey"))}
    assert len(digests) == 2


@pytest.mark.exhaustive
def test_arguments_and_classes_are_a_part_of_the_run(own: Extension) -> None:
    runs = [
        configured(own, "Images", *more)
        for more in ([], ["data.arguments={samples:48}"], ["data.classes=9"], ["data.dataset=mine.Grey"])
    ]
    assert len({run_id(run) for run in runs}) == 4
    assert [run.data.train_samples for run in runs] == [96, 48, 96, 96]
    assert runs[2].data.num_classes == 9
    for run in runs:
        assert from_mapping(to_mapping(run), "mine") == run


def test_its_package_is_the_runs_plugin(own: Extension, tmp_path: Path) -> None:
    run = configured(own, "Images")
    assert plugin_of(run) == ["mine", str(tmp_path)]
    assert training_plugin(run) == "mine"
    assert run.plugin_sources.startswith("mine@")
    assert to_mapping(run)["data"]["plugin_sources"] == run.plugin_sources, "so a change of its code is another run"


@fault(
    "storage and input",
    "A data set of one's own has other items than a sample and a label: dicts, one-hot labels, none at all",
    injection="classes with such items",
    outcome="refused before anything starts, with what helps",
)
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("os.path.join", "data.dataset='os.path.join' is refused: it must be package.module.Class of the package mine"),
        ("torch.utils.data.Dataset", "is refused"),
        ("mine", "is refused"),
        ("mine.Missing", "data.dataset=mine.Missing does not exist, or is no class"),
        ("mine.nothing", "is no class"),
    ],
)
def test_only_classes_of_the_users_package_are_taken(name: str, message: str, own: Extension) -> None:
    with pytest.raises(ConfigError, match=message):
        configured(own, "Images", f"data.dataset={name}")


def test_without_a_package_nothing_is_imported(own: Extension) -> None:
    plain = to_mapping(configured(own, "Images"))
    del sys.modules["mine"]
    with pytest.raises(ConfigError, match="your own package: name it with --plugin PACKAGE"):
        from_mapping(plain)
    assert "mine" not in sys.modules


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Scaled", r"samples of float32 \(3, 8, 8\): return images of uint8.*without ToTensor"),
        ("Ragged", "every sample needs one shape and type"),
        ("Alone", r"item 0 is no sample with a label.*return \(sample, label\)"),
        ("Named", r"item 0 is no sample with a label: it is a dict of image, label; let __getitem__ return \(sample, "),
        ("OneHot", r"has one-hot labels: .*label\.argmax\(\)"),
        ("Untested", "has no items with train=False"),
        ("Draws", "has another item .* each time it is made: give its random numbers a seed"),
        ("Fails", r"can't be made with train=True.*OSError: no such file"),
    ],
)
def test_other_items_are_refused_in_words(name: str, message: str, own: Extension) -> None:
    with pytest.raises(ConfigError, match=message):
        check_run(configured(own, name), "cpu")


def test_to_plan_a_large_one_a_few_items_are_read(own: Extension) -> None:
    """1,331,167 images of 147 KiB and 8 bytes of a label: 186.6 GiB."""
    with pytest.raises(ConfigError, match=r"1,331,167 items, 186\.6 GiB, too many to read .*choose data\.classes=N$"):
        check_run(configured(own, "Folder"), "cpu")
    run = configured(own, "Folder", "data.classes=1000", "strategy=ddp", "devices=4", "nodes=2")
    check_run(run, "cpu")
    assert (run.data.train_samples, run.data.test_samples, run.data.num_classes) == (1_281_167, 50_000, 1000)
    assert run.data.loaded_bytes == 1_331_167 * (3 * 224 * 224 + 8)
    assert sorted(sys.modules["mine"].READ) == [0, 0, 25_000, 49_999, 640_583, 1_281_166]


GIB = 2**30


@pytest.mark.parametrize(
    ("overrides", "device", "memory", "device_memory", "said"),
    [
        ("loader=dataloader", "cpu", 186, None, "takes 186.6 GiB in each process: 186.6 GiB for 1 process on a node"),
        ("loader=dataloader", "cpu", 187, None, ""),
        ("loader=resident", "cpu", 187, None, "373.3 GiB for 1 process on a node with the copy of loader=resident"),
        ("loader=dataloader strategy=ddp devices=4 nodes=2", "cpu", 256, None, "373.3 GiB for 2 processes on a node"),
        ("loader=resident", "cuda", 1000, 80, "takes 186.6 GiB of each GPU with loader=resident, but a GPU has 80.0"),
        ("loader=dataloader", "cuda", 1000, 80, ""),
        ("loader=resident", "cuda", None, None, ""),
        ("data.arguments={items:10000,side:8}", "cpu", 1, None, ""),
    ],
)
def test_data_that_no_memory_holds_are_refused_with_the_figure(
    overrides: str, device: str, memory: int | None, device_memory: int | None, said: str, own: Extension
) -> None:
    run = configured(own, "Folder", "data.classes=1000", *overrides.split())
    run = msgspec.structs.replace(run, device=device)
    node_bytes, device_bytes = (None if each is None else each * GIB for each in (memory, device_memory))
    with pytest.raises(ConfigError, match=re.escape(said)) if said else nullcontext():
        require_memory(run, node_bytes=node_bytes, device_bytes=device_bytes)


def test_a_plan_refuses_what_a_jobs_memory_can_not_hold(own: Extension, monkeypatch: pytest.MonkeyPatch) -> None:
    """128 GiB of a job on Slurm, 64 here."""
    run = ("data.classes=1000", "loader=dataloader")
    slurm = ("launcher=slurm", "site=local_cluster", "site.data_dir=/tmp", "launcher.memory_gib_per_device=128")
    monkeypatch.setattr("launch.local.host_memory_bytes", lambda: 64 * GIB)
    for more, has in (((), "but it has 64.0 GiB: choose "), (slurm, "128.0 GiB: raise launcher.memory_gib_per_device")):
        planned = expand(["data=torch_dataset", "data.dataset=mine.Folder", "model=mlp", *run, *more], own)
        with pytest.raises(ConfigError, match=has):
            launcher_of(planned[0].run).prepare(planned[0])


def test_a_lack_of_memory_is_no_fault_of_an_item(own: Extension) -> None:
    data = configured(own, "Lacks").data
    assert data.train_samples == 96, "which reads a few"
    with pytest.raises(MemoryError) as caught:
        data.load(Path("nowhere"))
    assert classify(caught.value)[0] == "oom"


@pytest.mark.parametrize("given", ["", "data.classes=4"])
def test_one_label_out_of_range_is_named_with_its_option(given: str, own: Extension) -> None:
    """Else a head of 10¹² outputs would be built: 64 TB."""
    said = r"has 133 labels, of which the largest is 1,000,000,000,000: number them from 0, or choose data\.classes=N"
    if given:
        said = r"train_labels go from 0 to 1000000000000; data\.classes=4 allows 0 to 3: .*correct data\.classes"
    data = configured(own, "Far", *given.split()).data
    arrays = data.load(Path("nowhere"))
    with pytest.raises(ConfigError, match=said):
        checked(data, arrays)


def test_deviations_of_many_chunks_are_those_of_all(own: Extension, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parallelbench.data.torch_dataset._CHUNK_BYTES", 8 * 3 * 64 * 7)
    data = configured(own, "Images").data
    whole = data.load(Path("nowhere")).train_images / 255
    np.testing.assert_allclose(data.mean, whole.mean((0, 2, 3)), rtol=1e-14)
    np.testing.assert_allclose(data.std, whole.std((0, 2, 3)), rtol=1e-14)


def test_channels_that_come_last_are_refused(own: Extension) -> None:
    data = configured(own, "Last").data
    with pytest.raises(ConfigError, match=r"declare \(channels, side, side\)"):
        checked(data, data.load(Path("nowhere")))


@pytest.mark.slow
def test_arguments_that_it_does_not_take_are_refused(own: Extension) -> None:
    with pytest.raises(ConfigError, match=r"can't be made with train=True and .*'size': 3"):
        check_run(configured(own, "Images", "data.arguments={size:3}"), "cpu")


@pytest.mark.slow
def test_it_trains_on_two_ranks_like_one_device(own: Extension, tmp_path: Path) -> None:
    run = configured(own, "Vectors", "strategy=ddp", "devices=2", "optimizer=sgd")
    check_run(run, "cpu")
    (tmp_path / "ranks").mkdir()
    ranks = run_ranks(train_own, 2, tmp_path / "ranks", to_mapping(run), str(tmp_path))
    single = configured(own, "Vectors", "strategy=single", "optimizer=sgd")
    expected = drive(single.strategy.prepare(build_model(single), single, World()), single)
    for name, value in expected["state"].items():
        np.testing.assert_allclose(ranks[0]["state"][name], value, rtol=0, atol=1e-9)


def train_own(rank: int, size: int, plain: dict[str, Any], folder: str) -> dict[str, Any]:
    """What a worker does, which gets the package's folder and name."""
    sys.path.insert(0, folder)
    run = from_mapping(plain, "mine")
    return drive(prepared(run, rank, size), run)
