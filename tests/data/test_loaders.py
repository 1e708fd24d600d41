"""All loaders feed the same batches; none leaves a process, a thread or half a file behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import raw_data as raw
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.sweep.compose import group_choices
from parallelbench.config.build import build
from parallelbench.config.components import Arrays, Batch, Data, Shard
from parallelbench.data.prepare import prepare
from parallelbench.data.synthetic import Synthetic
from parallelbench.errors import ConfigError
from parallelbench.loaders import torch_loader
from parallelbench.loaders.order import BatchLoader
from parallelbench.training.failure import classify
from tests.faults import fault
from tests.helpers import configured, plain
from tests.ranks import idle_ranks

LOADERS = group_choices()["loader"]
IN_PROCESS = {"dataloader": {"workers": 0}, "tensor_dataset": {"workers": 0}}


class Coloured(Synthetic, frozen=True, kw_only=True):
    """Synthetic with what CIFAR has: flips, and other statistics for each channel."""

    mean = (0.1, 0.5, 0.7)
    std = (0.2, 0.25, 0.3)
    flip = True


def spec(cls: type[Synthetic] = Coloured, **changes: Any) -> Synthetic:
    options = {"channels": 3, "image_size": 16, "num_classes": 5, "train_samples": 130, "test_samples": 47}
    return cls(**{"name": "x", "augment": False, "noise": 0.9, "data_seed": 0, **options, **changes})


def loader(name: str, data: Data, arrays: Arrays, options: dict[str, Any] | None = None, **changes: Any) -> BatchLoader:
    node = plain(f"loader={name}")["loader"] | (IN_PROCESS.get(name, {}) if options is None else options)
    feed: dict[str, Any] = {
        "device": "cpu",
        "dtype": torch.float32,
        "seed": 3,
        "global_batch_size": 12,
        "shard": Shard(),
        "channels_last": False,
        "steps_per_epoch": 10,
        **changes,
    }
    found: BatchLoader = build(node, "loader").build(arrays, data, **feed)
    return found


def synthetic(name: str, options: dict[str, Any] | None = None) -> BatchLoader:
    data = spec()
    return loader(name, data, data.load(Path("nowhere")), options)


def assert_equal(found: list[Batch], expected: list[Batch]) -> None:
    """The same bits in the same layout: kernels are chosen by it, and round by it."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.size == other.size
        for mine, theirs in ((one.images, other.images), (one.labels, other.labels)):
            assert (mine is None) == (theirs is None)
            if mine is not None:
                assert (mine.dtype, mine.shape, mine.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
                assert torch.equal(mine, theirs)


def batches(one: BatchLoader) -> list[Batch]:
    with closing(one):
        return [*one.train(1), *one.test(), *one.train(2), *one.test(37)]


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_all_loaders_feed_the_same_bits(data: st.DataObject) -> None:
    """Over shards and what they look at, augmentation, layouts, sizes, epochs, and tails that are dropped."""
    count = data.draw(st.integers(1, 4), "shards")
    shard = Shard(data.draw(st.integers(0, count - 1)), count, data.draw(st.booleans()), data.draw(st.booleans()))
    samples, per_shard = data.draw(st.integers(20, 60), "samples"), data.draw(st.integers(1, 5), "per shard")
    batch = per_shard * count
    images = spec(
        augment=data.draw(st.booleans(), "augment"),
        channels=3,
        image_size=data.draw(st.sampled_from([5, 8, 13]), "size"),
        train_samples=samples,
        test_samples=data.draw(st.integers(1, 40), "test samples"),
    )
    feed = {
        "shard": shard,
        "seed": data.draw(st.integers(0, 5), "seed"),
        "global_batch_size": batch,
        "steps_per_epoch": data.draw(st.integers(1, samples // batch), "steps"),
        "channels_last": data.draw(st.booleans(), "channels last"),
        "dtype": data.draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16])),
    }
    arrays = images.load(Path("nowhere"))
    expected = batches(loader("resident", images, arrays, **feed))
    for name in LOADERS:
        assert_equal(batches(loader(name, images, arrays, **feed)), expected)


@pytest.mark.parametrize("name", LOADERS)
def test_copies_of_the_stored_samples_are_fed_alike(name: str) -> None:
    data = raw.tiny_mnist(copies=4)
    arrays = Arrays(raw.MNIST_IMAGES[0][:, None], np.arange(30), raw.MNIST_IMAGES[1][:, None], np.arange(10))
    expected = batches(loader("resident", data, arrays))
    assert_equal(batches(loader(name, data, arrays)), expected)


@pytest.mark.cases("tensor_dataset-True")
@pytest.mark.slow
@pytest.mark.parametrize(("name", "persistent"), [("dataloader", False), ("tensor_dataset", True)])
def test_workers_feed_the_same_bits_epoch_after_epoch(name: str, persistent: bool) -> None:
    data = spec(augment=True)
    arrays = data.load(Path("nowhere"))
    options = {"workers": 3, "persistent_workers": persistent}
    assert_equal(batches(loader(name, data, arrays, options)), batches(loader("resident", data, arrays)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dataloader", "tensor_dataset"])
def test_an_epoch_that_was_left_leaves_nothing_for_the_next(name: str) -> None:
    """As `torch.compile`'s rehearsal leaves it after one batch, with evaluation in between as the parity check has."""
    data = spec(augment=True)
    arrays = data.load(Path("nowhere"))
    with closing(loader(name, data, arrays, {"workers": 2})) as ours, closing(loader("resident", data, arrays)) as fine:
        next(ours.train(1))
        pass_ = ours.train(1)
        found = [next(pass_)]
        assert_equal(list(ours.test(9)), list(fine.test(9)))
        assert_equal([*found, *pass_], list(fine.train(1)))


@pytest.mark.parametrize("name", ["dataloader", "tensor_dataset"])
def test_a_pass_that_another_has_ended_does_not_seem_short(name: str) -> None:
    ours = synthetic(name)
    first, second = ours.train(1), ours.train(2)
    next(first), next(second)
    with pytest.raises(AssertionError, match="a newer iteration"):
        next(first)


@pytest.mark.parametrize("name", LOADERS)
def test_nothing_is_drawn_from_the_generator_of_the_model(name: str) -> None:
    """Or a user's dropout would differ from loader to loader."""
    data = spec(augment=True)
    arrays = data.load(Path("nowhere"))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    batches(loader(name, data, arrays))
    assert torch.equal(torch.get_rng_state(), before)


KINDS = {"images": (), "vectors": ("data=breast_cancer",), "tokens": ("data=tokens", "data.train_samples=130")}


@fault(
    "storage and input",
    "A model changes the batches that it is given, in place",
    injection="every image, vector, token and label of each loader's batches is overwritten",
    outcome="the next epoch and evaluation are fed as if nothing had happened: batches are memory of their own",
)
@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for name in LOADERS for kind in build(plain(f"loader={name}")["loader"], "loader").feeds],
)
def test_batches_are_their_own_memory(name: str, kind: str) -> None:
    data = configured(*KINDS[kind]).data if KINDS[kind] else spec()
    arrays = data.load(Path("nowhere"))
    with closing(loader(name, data, arrays)) as ours:
        first, second = list(ours.train(1))[:2]
        kept = first.images.clone()
        second.images.zero_()
        assert torch.equal(first.images, kept)
        for batch in (*ours.train(1), *ours.test()):
            batch.images.add_(1)
            batch.labels.add_(1)
        assert_equal([*ours.train(1), *ours.test()], batches(loader(name, data, arrays))[: 10 + len(list(ours.test()))])


# --- what is left behind


@pytest.mark.slow
@pytest.mark.parametrize(("name", "persistent"), [("dataloader", True), ("tensor_dataset", False)])
def test_closing_ends_the_workers_also_within_an_epoch(name: str, persistent: bool) -> None:
    ours = synthetic(name, {"workers": 2, "persistent_workers": persistent})
    pass_ = ours.train(1)
    next(pass_), next(ours.test())
    pids = ours.worker_pids()
    assert len(pids) == 4
    ours.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert ours.worker_pids() == []


def test_the_gathering_thread_ends_with_the_epoch_and_when_it_is_left() -> None:
    ours = synthetic("streamed")
    before = set(threading.enumerate())  # other tests' threads, which may end at any time

    def started() -> int:
        return len(set(threading.enumerate()) - before)

    list(ours.train(1))
    assert started() == 0
    left = ours.train(2)
    next(left)
    assert started() == 1
    left.close()
    assert started() == 0


def test_what_goes_wrong_in_the_gathering_thread_is_raised_where_batches_are_used() -> None:
    data = spec()
    arrays = data.load(Path("nowhere"))
    broken = Arrays(np.empty((0, 3, 16, 16), np.uint8), arrays.train_labels, arrays.test_images, arrays.test_labels)
    with pytest.raises(IndexError):
        next(loader("streamed", data, broken).train(1))


def _rank(name: str, pipe: Any) -> None:
    ours = synthetic(name, {"workers": 2})
    kept = ours.train(1)
    next(kept)
    pipe.send(ours.worker_pids())
    signal.pause()


@pytest.mark.exhaustive
@fault(
    "workers",
    "A rank whose loader has worker processes is killed",
    injection="SIGKILL to the rank within an epoch",
    outcome="the kernel ends the workers with it",
)
@pytest.mark.parametrize("name", ["dataloader", "tensor_dataset"])
def test_workers_end_with_a_rank_that_is_killed(name: str) -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    rank = context.Process(target=_rank, args=(name, there))
    rank.start()
    assert here.poll(120)
    workers = [psutil.Process(pid) for pid in here.recv()]
    assert len(workers) == 2
    os.kill(rank.pid, signal.SIGKILL)
    rank.join()
    gone, alive = psutil.wait_procs(workers, timeout=60)
    assert (len(gone), alive) == (2, [])


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> Iterator[BatchLoader]:
    """A loader whose worker processes have not begun; those that nobody tells to end, since the error that a test
    expects holds torch's iterator, are killed soon.
    """
    monkeypatch.setattr(torch_loader, "_PATIENCE_S", 0.2)
    ours = synthetic("dataloader", {"workers": 2})
    yield ours
    ours.close()


@pytest.mark.timeout(60)  # torch looks for it every 5 s
@fault(
    "workers",
    "A loader's worker process is killed",
    injection="SIGKILL to one of two workers of torch's DataLoader",
    outcome="killed, so submitting again tries again; said where a batch is waited for, never in between",
)
def test_a_worker_that_is_killed_is_said_to_be(fed: BatchLoader) -> None:
    pass_ = fed.train(1)
    next(pass_)
    handler = signal.getsignal(signal.SIGCHLD)
    os.kill(fed.worker_pids()[0], signal.SIGKILL)
    with pytest.raises(RuntimeError) as raised:
        list(pass_)
    assert handler == signal.SIG_DFL, "torch raises at no other place"
    kind, reason = classify(raised.value)
    assert (kind, "Killed" in reason) == ("killed", True)


def _raise(error: Exception) -> Any:
    raise error


@pytest.mark.slow
@fault(
    "storage and input",
    "/dev/shm is too small for a loader's workers",
    injection="the error of a worker that gets no shared memory",
    outcome="the reason is the error itself, with what to do, and no beginning of a traceback",
)
def test_too_little_shared_memory_is_said_with_the_remedy(fed: BatchLoader, monkeypatch: pytest.MonkeyPatch) -> None:
    full = "unable to allocate shared memory(shm) for file </torch_1_2_0>: No space left on device (28)"
    monkeypatch.setattr(torch_loader._Samples, "__getitem__", lambda *_: _raise(RuntimeError(full)))
    with pytest.raises(RuntimeError) as raised:
        next(fed.train(1))
    kind, reason = classify(raised.value)
    assert kind == "error"
    assert reason.startswith(full)
    assert "loader.workers=0" in reason
    assert "Traceback" not in reason


@pytest.mark.slow
@fault(
    "workers",
    "TMPDIR is longer than a socket's path may be",
    injection="a temporary folder of 90 characters",
    outcome="workers use a short one for their sockets; what can't be sent ends the run with the reason",
)
def test_workers_send_batches_however_long_the_temporary_folder_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    monkeypatch.delitem(multiprocessing.current_process()._config, "tempdir", raising=False)  # type: ignore[attr-defined]
    ours = synthetic("dataloader", {"workers": 2})
    assert len(list(ours.train(1))) == 10
    assert tempfile.gettempdir() == str(long)
    ours.close()


@pytest.mark.slow
def test_a_batch_that_a_worker_can_not_send_is_not_waited_for(
    fed: BatchLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiprocessing.reduction, "DupFd", lambda _: _raise(OSError("AF_UNIX path too long")))
    with pytest.raises(OSError, match="AF_UNIX path too long"):
        next(fed.train(1))


@pytest.mark.slow
def test_workers_that_do_not_begin_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_loader, "_START_S", 0.1)
    monkeypatch.setattr(torch_loader, "_begin", lambda *_: None)
    ours = synthetic("dataloader", {"workers": 2})
    with pytest.raises(ConfigError, match=r"began within 0\.1 s: choose loader\.workers=0"):
        next(ours.train(1))
    ours.close()


@pytest.fixture
def mnist_dir(tmp_path: Path) -> Path:
    raw.put(raw.MNIST_FILES, tmp_path / "raw")
    prepare(raw.tiny_mnist(), tmp_path, progress=lambda _: None)
    return tmp_path


def test_a_prepared_data_set_is_streamed_from_its_files(mnist_dir: Path) -> None:
    data = raw.tiny_mnist(copies=4)
    feed = {"global_batch_size": 12, "steps_per_epoch": data.train_samples // 12}
    streamed = loader("streamed", data, data.load(mnist_dir), **feed)
    assert isinstance(streamed._arrays.train_images, np.memmap)  # type: ignore[attr-defined]
    assert_equal(batches(streamed), batches(loader("resident", data, data.load(mnist_dir), **feed)))


@pytest.fixture(autouse=True)
def no_leftovers() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    gc.collect()  # of a loader that nobody holds any more
    assert set(multiprocessing.active_children()) <= idle_ranks()
