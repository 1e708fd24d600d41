from __future__ import annotations

import errno
import functools
import itertools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import raw_data as raw
import torchvision

from parallelbench.data import prepare as prepare_module
from parallelbench.data.prepare import _publish, prepare, temporary_folder
from parallelbench.data.torchvision import MANIFEST, Mnist
from parallelbench.errors import ConfigError, StorageError
from tests.faults import fault

SPAWN = multiprocessing.get_context("spawn")


def silent(line: str) -> None:
    """Report no progress."""


def leftovers(data_dir: Path) -> list[str]:
    return [path.name for path in data_dir.rglob("*") if path.name.endswith(".tmp")]


@pytest.fixture
def mnist_dir(tmp_path: Path) -> Path:
    raw.put(raw.MNIST_FILES, tmp_path / "raw")
    return tmp_path


@pytest.mark.parametrize(
    ("data", "files", "images", "labels", "content"),
    [
        (
            *(raw.tiny_mnist(), raw.MNIST_FILES, [part[:, None] for part in raw.MNIST_IMAGES], raw.MNIST_LABELS),
            "8ba3a6161e8d4b09074410c0d265e4a7126b4b9ab089bba7a0ececad0de5e476",
        ),
        (
            *(raw.TinyCifar10(name="cifar10", augment=False), raw.CIFAR10_FILES, raw.CIFAR_IMAGES, raw.CIFAR10_LABELS),
            "f3f8317f8e36254903c209edf90bdb9700968af34d89448cae9ca1ca62edca16",
        ),
        (
            raw.TinyCifar100(name="cifar100", augment=False),
            *(raw.CIFAR100_FILES, raw.CIFAR_IMAGES, raw.CIFAR100_LABELS),
            "fd3c525dc5b0810906ca53f0193cca728d8f6f7ced4511069213248f47e5f0c6",
        ),
    ],
    ids=["mnist", "cifar10", "cifar100"],
)
def test_arrays_come_back_bit_exact(tmp_path: Path, data, files, images, labels, content: str) -> None:
    """With the content that releases recorded which parsed CIFAR's binary version: runs of another aren't compared."""
    raw.put(files, tmp_path / "raw")
    assert len(data.missing_files(tmp_path)) == 5
    prepare(data, tmp_path, progress=silent)
    assert data.missing_files(tmp_path) == []
    arrays = data.load(tmp_path)
    for part, image, label in zip(("train", "test"), images, labels, strict=True):
        np.testing.assert_array_equal(getattr(arrays, f"{part}_images"), image)
        np.testing.assert_array_equal(getattr(arrays, f"{part}_labels"), label)
    assert (arrays.train_images.dtype, arrays.train_labels.dtype) == (np.uint8, np.int64)
    assert isinstance(arrays.train_images, np.memmap)
    assert data.fingerprint(tmp_path) == content
    assert leftovers(tmp_path) == []
    before, lines = (tmp_path / data.folder).stat().st_ino, list[str]()
    prepare(data, tmp_path, progress=lines.append)
    assert (tmp_path / data.folder).stat().st_ino == before
    assert lines == [f"{data.name}: ready in {tmp_path / data.folder}"]


def test_copies_share_one_folder(mnist_dir: Path) -> None:
    prepare(raw.tiny_mnist(), mnist_dir, progress=silent)
    eight = raw.tiny_mnist(copies=8)
    assert eight.train_samples == 8 * raw.TRAIN
    assert eight.test_samples == raw.TEST
    assert len(eight.load(mnist_dir).train_images) == raw.TRAIN


def test_a_run_never_downloads(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="parallelbench prepare data=mnist") as caught:
        raw.tiny_mnist().load(tmp_path)
    assert "train_images.npy" in str(caught.value)
    assert str(tmp_path / "mnist") in str(caught.value)


def test_no_network_says_what_to_fetch_and_where_to_put_it(tmp_path: Path) -> None:
    data = raw.tiny_mnist()
    with pytest.raises(ConfigError) as caught:
        prepare(data, tmp_path, progress=silent)
    for path, content in raw.MNIST_FILES.items():
        assert raw.NOWHERE + Path(path).name in str(caught.value)
        assert f"{tmp_path / 'raw' / path}  (MD5 {raw.md5(content)})" in str(caught.value)
    assert not (tmp_path / "mnist").exists()
    assert leftovers(tmp_path) == []
    with pytest.raises(ConfigError, match=f"{raw.NOWHERE}cifar-10-python.tar.gz\n.*{tmp_path}/raw/cifar-10-python"):
        prepare(raw.TinyCifar10(name="cifar10", augment=False), tmp_path, progress=silent)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The address of a web server for `tmp_path`."""
    handler = functools.partial(QuietHandler, directory=tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
        thread.join()


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        """Log nothing."""


def test_downloads_from_the_first_intact_mirror(tmp_path: Path, server: str) -> None:
    files = {Path(path).name: content for path, content in raw.MNIST_FILES.items()}
    raw.put(dict.fromkeys(files, b"<html>moved</html>"), tmp_path / "broken")
    raw.put(files, tmp_path / "intact")
    folders = ["absent", "broken", "intact"]
    if tuple(map(int, torchvision.__version__.split(".")[:2])) < (0, 27):
        folders.remove("broken")  # where older ones give up, and `prepare` says what to fetch by hand
    mirrors = [raw.NOWHERE, *(f"{server}/{folder}/" for folder in folders)]
    data = raw.tiny_mnist(source=lambda self: raw.torchvisions_mnist(mirrors))
    prepare(data, tmp_path / "data", progress=silent)
    assert len(data.load(tmp_path / "data").train_labels) == raw.TRAIN
    assert leftovers(tmp_path) == []


def test_what_was_downloaded_is_used_the_next_time(tmp_path: Path, server: str) -> None:
    files = {Path(path).name: content for path, content in raw.MNIST_FILES.items()}
    *first, last = files
    raw.put({name: files[name] for name in first}, tmp_path)
    data = raw.tiny_mnist(source=lambda self: raw.torchvisions_mnist([f"{server}/"]))
    with pytest.raises(ConfigError, match=f"/raw/{last} ") as caught:
        prepare(data, tmp_path / "data", progress=silent)
    assert not any(f"/raw/{name} " in str(caught.value) for name in first), "these are there now"
    raw.put({f"MNIST/raw/{last}": files[last]}, tmp_path / "data" / "raw")
    prepare(raw.tiny_mnist(), tmp_path / "data", progress=silent)


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b"", lambda b: b[:-6] + b"??" + b[-4:]])
def test_a_file_that_is_not_the_published_one_is_refused_by_name(mnist_dir: Path, damage) -> None:
    path = max(mnist_dir.glob("raw/MNIST/raw/*"))
    path.write_bytes(damaged := damage(path.read_bytes()))
    with pytest.raises(ConfigError, match=rf"{path} is not the published file: its MD5 is.*Delete it and run `paral"):
        prepare(raw.tiny_mnist(), mnist_dir, progress=silent)
    assert not (mnist_dir / "mnist").exists()
    assert path.read_bytes() == damaged, "it is the user's"


def test_what_torchvision_left_unpacked_is_not_taken_for_the_published_files(mnist_dir: Path) -> None:
    """It would not look at their content."""
    for path in raw.MNIST_FILES:
        (mnist_dir / "raw" / path).with_suffix("").write_bytes(b"half")
    prepare(raw.tiny_mnist(), mnist_dir, progress=silent)
    np.testing.assert_array_equal(raw.tiny_mnist().load(mnist_dir).train_labels, raw.MNIST_LABELS[0])


def test_arrays_of_another_size_are_refused(mnist_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"train_images uint8 \(30, 1, 28, 28\), expected uint8 \(31,"):
        prepare(raw.tiny_mnist(published_train_samples=31), mnist_dir, progress=silent)


def truncate(folder: Path) -> None:
    path = folder / "test_images.npy"
    path.write_bytes(path.read_bytes()[:-7])


def wrong_dtype(folder: Path) -> None:
    path = folder / "train_labels.npy"
    np.save(path, np.load(path).astype(np.float64))


def pickled(folder: Path) -> None:
    path = folder / "train_labels.npy"
    size = path.stat().st_size
    path.write_bytes(b"\x80\x04N.".ljust(size, b"\0"))


def endless_header(folder: Path) -> None:
    path = folder / "train_images.npy"
    path.write_bytes(path.read_bytes().replace(b"}", b" ", 1))


@pytest.mark.parametrize("damage", [truncate, wrong_dtype, pickled, endless_header])
def test_damaged_arrays_are_refused_and_replaced(mnist_dir: Path, damage) -> None:
    data = raw.tiny_mnist()
    prepare(data, mnist_dir, progress=silent)
    damage(mnist_dir / "mnist")
    with pytest.raises(ConfigError, match=f"run `parallelbench prepare data=mnist site.data_dir={mnist_dir}` again"):
        data.load(mnist_dir)
    prepare(data, mnist_dir, progress=silent)
    np.testing.assert_array_equal(data.load(mnist_dir).train_labels, raw.MNIST_LABELS[0])
    assert leftovers(mnist_dir) == []


def test_a_flipped_bit_is_found_by_prepare(mnist_dir: Path) -> None:
    data = raw.tiny_mnist()
    prepare(data, mnist_dir, progress=silent)
    path = mnist_dir / "mnist" / "train_images.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    prepare(data, mnist_dir, progress=silent)
    np.testing.assert_array_equal(data.load(mnist_dir).train_images[:, 0], raw.MNIST_IMAGES[0])
    manifest = mnist_dir / "mnist" / MANIFEST
    manifest.write_bytes((whole := manifest.read_bytes())[:40])
    prepare(data, mnist_dir, progress=silent)
    assert manifest.read_bytes() == whole


def test_a_full_disk_is_a_storage_error_and_publishes_nothing(mnist_dir: Path, monkeypatch) -> None:
    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(prepare_module, "sync", full)
    with pytest.raises(StorageError, match=rf"{mnist_dir}/\..*\.npy can't.*No space left.*site\.data_dir"):
        prepare(raw.tiny_mnist(), mnist_dir, progress=silent)
    assert sorted(path.name for path in mnist_dir.iterdir()) == ["raw"]


@fault(
    "storage and input",
    "Stale temporary files",
    injection="temporary folders of a crash, old and fresh",
    outcome="old ones are removed, fresh ones belong to somebody",
)
def test_stale_temporary_folders_are_removed_and_fresh_ones_left_alone(mnist_dir: Path) -> None:
    stale, fresh = mnist_dir / ".mnist.00.tmp", mnist_dir / ".mnist.11.tmp"
    stale.mkdir()
    fresh.mkdir()
    os.utime(stale, (0, 0))
    prepare(raw.tiny_mnist(), mnist_dir, progress=silent)
    assert leftovers(mnist_dir) == [fresh.name]


def test_the_folder_obeys_the_umask(mnist_dir: Path) -> None:
    before = os.umask(0o002)
    try:
        prepare(raw.tiny_mnist(), mnist_dir, progress=silent)
    finally:
        os.umask(before)
    assert (mnist_dir / "mnist").stat().st_mode & 0o777 == 0o775


@fault(
    "storage and input",
    "A data set's preparation is killed",
    injection="SIGKILL while files are downloaded or converted",
    outcome="nothing that looks finished; preparing again completes it",
)
@pytest.mark.slow
@pytest.mark.parametrize("kill_at", [0, 1, 3, 5])
def test_a_killed_prepare_leaves_nothing_that_looks_finished(mnist_dir: Path, kill_at: int) -> None:
    process = SPAWN.Process(target=raw.prepare_until_killed, args=(mnist_dir, kill_at))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    data = raw.tiny_mnist()
    assert not (mnist_dir / "mnist").exists()
    with pytest.raises(ConfigError, match="not prepared"):
        data.load(mnist_dir)
    prepare(data, mnist_dir, progress=silent)
    np.testing.assert_array_equal(data.load(mnist_dir).test_labels, raw.MNIST_LABELS[1])


@pytest.mark.cases("True")
@fault(
    "storage and input",
    "Two preparations of one data set at once",
    injection="two processes, with and without damaged files from before",
    outcome="both end well, with intact arrays",
)
@pytest.mark.slow
@pytest.mark.parametrize("damaged_before", [False, True])
def test_two_prepares_at_once_are_safe(mnist_dir: Path, damaged_before: bool) -> None:
    data = raw.tiny_mnist()
    if damaged_before:
        prepare(data, mnist_dir, progress=silent)
        truncate(mnist_dir / "mnist")
    barrier = SPAWN.Barrier(2)
    processes = [SPAWN.Process(target=raw.prepare_in_step, args=(mnist_dir, barrier)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    np.testing.assert_array_equal(data.load(mnist_dir).train_images[:, 0], raw.MNIST_IMAGES[0])
    assert leftovers(mnist_dir) == []


class Turns:
    """Two threads that go on in a given order of steps, and freely once it is used up or the other has ended."""

    def __init__(self, order: Sequence[int]) -> None:
        self._order, self._changed, self._ended = list(order), threading.Condition(), set[int]()
        self._own = threading.local()

    def step(self) -> None:
        me = getattr(self._own, "index", None)
        if me is None:
            return
        with self._changed:
            assert self._changed.wait_for(lambda: self._may_go_on(me), timeout=60)
            if self._order and self._order[0] == me:
                self._order.pop(0)
            self._changed.notify_all()

    def _may_go_on(self, me: int) -> bool:
        return not self._order or self._order[0] == me or 1 - me in self._ended

    def run(self, index: int, action: Callable[[], None]) -> None:
        self._own.index = index
        try:
            action()
        finally:
            with self._changed:
                self._ended.add(index)
                self._changed.notify_all()


@pytest.mark.slow
@pytest.mark.parametrize("before", ["nothing", "damaged", "whole", "file"])
def test_two_publish_at_once_in_every_order_of_their_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    """Each rename, and each look at what is there, may come before or after any of the other's."""
    data, rename = raw.tiny_mnist(), Path.rename
    for order in itertools.product((0, 1), repeat=7):
        turns, root = Turns(order), tmp_path / "".join(map(str, order))
        final = data.prepared_dir(root)
        root.mkdir()
        if before == "file":
            final.write_text("")
        elif before != "nothing":
            final.mkdir()
            (final / ("whole" if before == "whole" else "half")).touch()

        def stepping(path: Path, target: Path, turns: Turns = turns) -> Path:
            turns.step()
            return rename(path, target)

        def is_whole(data: Mnist, root: Path, turns: Turns = turns) -> bool:
            turns.step()
            return (data.prepared_dir(root) / "whole").exists()

        def publish(root: Path = root) -> None:
            with temporary_folder(root, "mnist") as temporary:
                (temporary / "whole").touch()
                _publish(data, temporary, root=root)

        monkeypatch.setattr(Path, "rename", stepping)
        monkeypatch.setattr(prepare_module, "is_complete", is_whole)
        with ThreadPoolExecutor(2) as pool:
            for done in [pool.submit(turns.run, index, publish) for index in range(2)]:
                done.result()
        assert [path.name for path in root.iterdir()] == ["mnist"]
        assert [path.name for path in final.iterdir()] == ["whole"]
