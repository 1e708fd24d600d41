from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import raw_data as raw
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_loaders import Coloured, spec
from test_loaders import loader as named_loader

from parallelbench.config.components import Arrays, Batch, Data, Shard
from parallelbench.data.synthetic import Synthetic
from parallelbench.loaders.order import TEST_BATCH_SIZE, evaluation_slices, generator
from parallelbench.loaders.resident import ResidentLoader

TRAIN, TEST, GLOBAL, STEPS = 130, 47, 12, 10
"""As `spec` and `loader` have them."""


class Upright(Coloured, frozen=True, kw_only=True):
    flip = False


def loader(data: Data | None = None, arrays: Arrays | None = None, **changes: Any) -> ResidentLoader:
    data = data or spec()
    found = named_loader("resident", data, arrays or data.load(None), **changes)
    assert isinstance(found, ResidentLoader)
    return found


def images(batches: list[Batch]) -> torch.Tensor:
    return torch.cat([batch.images for batch in batches])


def labels(batches: list[Batch]) -> torch.Tensor:
    return torch.cat([batch.labels for batch in batches])


def normalised(values: np.ndarray, data: Data) -> torch.Tensor:
    mean = torch.tensor(data.mean, dtype=torch.float64).view(-1, 1, 1)
    std = torch.tensor(data.std, dtype=torch.float64).view(-1, 1, 1)
    return ((torch.from_numpy(values).double() / 255 - mean) / std).float()


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("data", [spec(), spec(augment=True)], ids=["plain", "augmented"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_shards_make_up_the_single_device_batch_in_its_order(count: int, data: Data, channels_last: bool) -> None:
    whole = list(loader(data, channels_last=channels_last).train(2))
    shards = [list(loader(data, channels_last=channels_last, shard=Shard(i, count)).train(2)) for i in range(count)]
    assert len(whole) == STEPS
    for step, batch in enumerate(whole):
        parts = [shard[step] for shard in shards]
        assert [part.size for part in parts] == [GLOBAL // count] * count
        assert torch.equal(labels(parts), batch.labels)
        close(images(parts), batch.images)


def test_an_epoch_has_every_sample_at_most_once_and_drops_the_tail() -> None:
    data = spec()
    arrays = data.load(None)
    numbered = Arrays(arrays.train_images, np.arange(TRAIN), arrays.test_images, arrays.test_labels)
    batches = list(loader(data, numbered).train(1))
    seen = labels(batches)
    assert len(seen) == STEPS * GLOBAL == len(seen.unique())
    close(images(batches), normalised(arrays.train_images[seen.numpy()], data))


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    def order(seed: int, epoch: int) -> torch.Tensor:
        return images(list(loader(seed=seed).train(epoch)))

    assert torch.equal(order(3, 1), order(3, 1))
    assert not torch.equal(order(3, 1), order(3, 2))
    assert not torch.equal(order(3, 1), order(4, 1))
    assert not torch.equal(order(3, 2), order(2, 3))


def test_fewer_steps_are_the_beginning_of_the_epoch() -> None:
    data = spec(augment=True)
    few, all_ = list(loader(data, steps_per_epoch=2).train(1)), list(loader(data).train(1))
    assert len(few) == 2
    close(images(few), images(all_[:2]))


def reference(arrays: Arrays, data: Data, *, seed: int, epoch: int) -> torch.Tensor:
    """All training images of an epoch, one at a time, with plain NumPy slicing."""
    order = torch.randperm(TRAIN, generator=generator(seed=seed, epoch=epoch, purpose="order"))
    random = generator(seed=seed, epoch=epoch, purpose="augment")
    padding, size = data.shape[1] // 8, data.shape[1]
    shifts = torch.randint(2 * padding + 1, (2, TRAIN), generator=random)
    flips = torch.randint(2, (TRAIN,), generator=random, dtype=torch.uint8)
    result = []
    for place in range(STEPS * GLOBAL):
        padded = np.pad(arrays.train_images[order[place]], ((0, 0), (padding, padding), (padding, padding)))
        down, right = shifts[:, place].tolist()
        image = padded[:, down : down + size, right : right + size]
        result.append(image[:, :, ::-1] if data.flip and flips[place] else image)
    return normalised(np.stack(result), data)


@pytest.mark.slow
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("cls", [Coloured, Upright])
@pytest.mark.parametrize("size", [16, 31])
def test_augmentation_equals_one_sample_at_a_time(cls: type[Synthetic], channels_last: bool, size: int) -> None:
    data = spec(cls, augment=True, image_size=size)
    arrays = data.load(None)
    ours = images(list(loader(data, arrays, channels_last=channels_last).train(4)))
    close(ours, reference(arrays, data, seed=3, epoch=4))
    assert not torch.allclose(ours, images(list(loader(data, arrays, channels_last=channels_last).train(5))))


def test_test_images_are_never_augmented() -> None:
    data = spec(augment=True)
    found = images(list(loader(data).test()))
    close(found, normalised(data.load(None).test_images, data))
    assert torch.equal(found, images(list(loader(spec(augment=False)).test())))


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-7), (torch.float32, 1e-6), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)],
)
def test_normalisation_is_the_formula_in_every_dtype(dtype: torch.dtype, tolerance: float) -> None:
    data = spec()
    batch = next(loader(data, dtype=dtype).test())
    assert batch.images.dtype == dtype
    assert batch.labels.dtype == torch.int64
    expected = normalised(data.load(None).test_images[: batch.size], data)
    torch.testing.assert_close(batch.images.float(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("augment", [False, True])
def test_channels_last_changes_strides_only(augment: bool) -> None:
    data = spec(augment=augment)
    for kind in ("train", "test"):
        first, last = (
            next(
                loader(data, channels_last=flag).train(1)
                if kind == "train"
                else loader(data, channels_last=flag).test()
            )
            for flag in (False, True)
        )
        assert first.images.is_contiguous()
        assert last.images.is_contiguous(memory_format=torch.channels_last)
        close(last.images, first.images)


def test_copies_repeat_the_stored_samples() -> None:
    data = raw.tiny_mnist(copies=4)
    numbers = np.arange(raw.TRAIN)
    arrays = Arrays(raw.MNIST_IMAGES[0][:, None], numbers, raw.MNIST_IMAGES[1][:, None], np.arange(raw.TEST))
    batches = list(loader(data, arrays, global_batch_size=10, steps_per_epoch=12).train(1))
    assert torch.bincount(labels(batches)).tolist() == [4] * raw.TRAIN
    close(images(batches), normalised(arrays.train_images[labels(batches).numpy()], data))
    assert torch.cat([batch.labels for batch in loader(data, arrays).test()]).tolist() == list(range(raw.TEST))


@pytest.mark.parametrize("augment", [False, True])
def test_a_shard_gets_only_what_it_looks_at(augment: bool) -> None:
    data = spec(augment=augment)
    both = list(loader(data).train(1))
    first = list(loader(data, shard=Shard(labels=False)).train(1))
    last = list(loader(data, shard=Shard(images=False)).train(1))
    middle = loader(data, shard=Shard(images=False, labels=False))
    assert all(batch.labels is None for batch in first)
    close(images(first), images(both))
    assert all(batch.images is None for batch in last)
    assert torch.equal(labels(last), labels(both))
    assert list(middle.train(1)) == [Batch(None, None, GLOBAL)] * STEPS
    assert sum(batch.size for batch in middle.test()) == TEST
    assert all((batch.images, batch.labels) == (None, None) for batch in middle.test())


@pytest.mark.parametrize("batch_size", [64, 32, 512])
def test_evaluation_takes_no_more_at_once_than_training(batch_size: int) -> None:
    """Or its memory would pass for training's."""
    data = spec(train_samples=1024, test_samples=5000)
    found = loader(data, global_batch_size=batch_size, steps_per_epoch=2)
    assert max(batch.size for batch in found.test()) <= found.local_batch_size


@settings(max_examples=60, deadline=None)
@given(samples=st.integers(1, 9000), count=st.integers(1, 9))
def test_evaluation_covers_every_sample_once(samples: int, count: int) -> None:
    shards = [evaluation_slices(samples, index=index, count=count) for index in range(count)]
    assert len({len(slices) for slices in shards}) == 1
    ends = [0, *(stop for step in zip(*shards, strict=True) for _, stop in step)]
    starts = [start for step in zip(*shards, strict=True) for start, _ in step]
    assert starts == ends[:-1]
    assert ends[-1] == samples
    sizes = [[stop - start for start, stop in slices] for slices in shards]
    assert all(size <= TEST_BATCH_SIZE for row in sizes for size in row)
    assert len({size for row in sizes for size in row[:-1]}) <= 1
    assert all(row[-1] <= row[0] for row in sizes)
    assert samples < count or all(row[-1] > 0 for row in sizes)


@settings(max_examples=25, deadline=None)
@given(samples=st.integers(1, 60), count=st.integers(1, 5))
def test_every_test_sample_arrives_exactly_once(samples: int, count: int) -> None:
    data = spec(Synthetic, test_samples=samples, image_size=4, channels=1, train_samples=60)
    arrays = data.load(None)
    numbered = Arrays(arrays.train_images, arrays.train_labels, arrays.test_images, np.arange(samples))
    seen = []
    for index in range(count):
        part = loader(data, numbered, shard=Shard(index, count), global_batch_size=60, steps_per_epoch=1)
        for batch in part.test():
            assert batch.size == len(batch.images) == len(batch.labels)
            close(batch.images, normalised(arrays.test_images[batch.labels.numpy()], data))
            seen += batch.labels.tolist()
    assert sorted(seen) == list(range(samples))
