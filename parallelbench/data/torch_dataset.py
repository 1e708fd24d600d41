"""A torch `Dataset` of one's own: read whole into arrays to train on. To plan, only a few items are looked at."""

from __future__ import annotations

import functools
import importlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from parallelbench.config.components import Arrays, Data
from parallelbench.config.structure import Count  # noqa: TC001 - msgspec reads the annotations
from parallelbench.errors import ConfigError, raised_at

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from parallelbench.config.components import Kind

    Rows = tuple[NDArray[Any], NDArray[Any]]
    """All samples, and all labels; or those of one item."""


READ_TO_PLAN_BYTES = 2**28
"""A data set of no more is read whole to plan, for the number of its labels and tokens; of a larger one it is asked."""
_MOST_DIFFERENT = 2**16
"""So many different labels, or tokens, are believed although fewer are there in all."""
_CHUNK_BYTES = 2**26


class Part(NamedTuple):
    """The training items, or the test items, without reading them all."""

    items: int
    few: dict[int, Rows]
    """The first, the middle and the last one."""


@dataclass(frozen=True)
class Looked:
    """What a few items say of a data set."""

    train: Part
    test: Part
    kind: Kind
    shape: tuple[int, ...]
    label_shape: tuple[int, ...]
    item_bytes: int
    """Of a sample and its labels, as arrays hold them."""


@dataclass(frozen=True)
class ReadItems:
    """What a data set turned out to hold."""

    arrays: Arrays
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: int
    vocabulary: int


class TorchDataset(Data, frozen=True, kw_only=True):
    """Any class with `__len__` and `__getitem__`, called with `train=True` and `train=False`, as torchvision's are.

    An item is a sample and its label, the same each time. Samples are images, uint8 of (channels, height, width) or
    (height, width); vectors, floats of (features,); or tokens, integers of (positions,). A label is an integer, or one
    at each position. Mean and deviation are those of the training samples. Each process reads all items into its
    memory.
    """

    names_classes: ClassVar[tuple[str, ...]] = ("dataset",)
    flip: ClassVar[bool] = False

    dataset: str | None = None
    """The class, as package.module.Class; its package is that of `--plugin`. Null: none is chosen yet."""
    arguments: dict[str, bool | int | float | str | None] | None = None
    """What the class is called with besides `train`; null: nothing."""
    classes: Count | None = None
    """Number of labels, where not all occur, or the data set is large; null: the largest label there is, and 1."""
    vocabulary_size: Count | None = None
    """Number of different tokens, where not all occur, or the data set is large; null: the largest there is, and 1."""

    @property
    def _source(self) -> tuple[str, str]:
        if self.dataset is None:
            raise ConfigError(
                f"data={self.name} names no class: choose data.dataset=PACKAGE.Class, and the package with --plugin"
            )
        return self.dataset, json.dumps(self.arguments or {}, sort_keys=True)

    @property
    def _looked(self) -> Looked:
        return _look(*self._source)

    @property
    def _found(self) -> ReadItems:
        return _read(*self._source)

    @property
    def kind(self) -> Kind:
        """By type and dimensions of a few samples."""
        return self._looked.kind

    @property
    def mean(self) -> tuple[float, ...]:  # type: ignore[override]
        """Of the training samples."""
        return self._found.mean

    @property
    def std(self) -> tuple[float, ...]:  # type: ignore[override]
        """Of the training samples."""
        return self._found.std

    @property
    def shape(self) -> tuple[int, ...]:
        return self._looked.shape

    @property
    def label_shape(self) -> tuple[int, ...]:
        return self._looked.label_shape

    @property
    def vocabulary(self) -> int:
        """The largest token there is, and 1, unless it is given."""
        if self.kind != "tokens":
            return 0
        if self.vocabulary_size:
            return self.vocabulary_size
        return self._believed(self._counted.vocabulary, "tokens", "vocabulary_size", of_each=math.prod(self.shape))

    @property
    def num_classes(self) -> int:
        if self.classes:
            return self.classes
        return self._believed(self._counted.classes, "labels", "classes", of_each=self.labels_per_sample)

    @property
    def train_samples(self) -> int:
        return self._looked.train.items

    @property
    def test_samples(self) -> int:
        return self._looked.test.items

    @property
    def loaded_bytes(self) -> int:
        return (self.train_samples + self.test_samples) * self._looked.item_bytes

    def option_of(self, declared: str) -> str:
        return {"num_classes": "data.classes", "vocabulary": "data.vocabulary_size"}.get(declared, declared)

    def load(self, data_dir: Path) -> Arrays:
        return self._found.arrays

    @property
    def _counted(self) -> ReadItems:
        """All items, for the number of labels and tokens; `ConfigError` where they are too many to read to plan."""
        if self.loaded_bytes <= READ_TO_PLAN_BYTES:
            return self._found
        tokens = " data.vocabulary_size=N" if self.kind == "tokens" and not self.vocabulary_size else ""
        labels = "data.classes=N" if not self.classes else ""
        raise ConfigError(
            f"data.dataset={self.dataset} has {self.train_samples + self.test_samples:,} items, "
            f"{self.loaded_bytes / 2**30:,.1f} GiB, too many to read for the number of different labels: choose "
            f"{(labels + tokens).strip()}"
        )

    def _believed(self, found: int, what: str, option: str, *, of_each: int) -> int:
        """A number of different labels or tokens; `ConfigError` where it can't be one."""
        there = (self.train_samples + self.test_samples) * of_each
        if found > max(there, _MOST_DIFFERENT):
            raise ConfigError(
                f"data.dataset={self.dataset} has {there:,} {what}, of which the largest is {found - 1:,}: number them "
                f"from 0, or choose data.{option}=N where there are so many"
            )
        return found


@functools.cache
def _look(name: str, arguments: str) -> Looked:
    """Make both parts, and read three items of each; once in a process."""
    train, test = (_part(_made(name, arguments, train=part), name) for part in (True, False))
    samples, labels = zip(*(*train.few.values(), *test.few.values()), strict=True)
    for what, values in (("sample", samples), ("label", labels)):
        _require_alike(values, what, name)
    kind = _kind(samples[0], name)
    if labels[0].shape != samples[0].shape and all(map(_one_hot, labels)):
        raise ConfigError(f"data.dataset={name} has one-hot labels: return the number of the class, label.argmax()")
    shape = samples[0].shape
    return Looked(
        train=train,
        test=test,
        kind=kind,
        shape=(1, *shape) if kind == "images" and len(shape) == 2 else shape,
        label_shape=labels[0].shape,
        item_bytes=samples[0].size * _dtype(samples[0], kind).itemsize + 8 * labels[0].size,  # labels are int64
    )


@functools.cache
def _read(name: str, arguments: str) -> ReadItems:
    """Read both parts; once in a process."""
    looked = _look(name, arguments)
    (train, train_labels), (test, test_labels) = (
        _rows(_made(name, arguments, train=part), looked, name, few=few)
        for part, few in ((True, looked.train.few), (False, looked.test.few))
    )
    mean, std = _scale(train, looked.kind)
    return ReadItems(
        arrays=Arrays(train, train_labels, test, test_labels),
        mean=mean,
        std=std,
        classes=_largest(train_labels, test_labels),
        vocabulary=_largest(train, test) if looked.kind == "tokens" else 0,
    )


def _made(name: str, arguments: str, *, train: bool) -> Any:
    module, _, attribute = name.rpartition(".")
    given = json.loads(arguments)
    try:
        dataset = getattr(importlib.import_module(module), attribute)(train=train, **given)
        items = len(dataset)
    except MemoryError:
        raise
    except (Exception, SystemExit) as error:  # a user's class may raise anything
        raise ConfigError(
            f"data.dataset={name} can't be made with train={train} and data.arguments={given}: {raised_at(error)}"
        ) from None
    if not items:
        raise ConfigError(f"data.dataset={name} has no items with train={train}: give it at least one")
    return dataset


def _part(dataset: Any, name: str) -> Part:
    items = len(dataset)
    return Part(items, {index: _item(dataset, index, name) for index in (0, items // 2, items - 1)})


def _rows(dataset: Any, looked: Looked, name: str, *, few: dict[int, Rows]) -> Rows:
    """All samples and all labels of one part, which has the same items as when a few were looked at."""
    import numpy as np

    items = len(dataset)
    sample, label = few[0]
    samples = np.empty((items, *looked.shape), _dtype(sample, looked.kind))
    labels = np.empty((items, *label.shape), label.dtype)
    for index in range(items):
        item = _item(dataset, index, name)
        for what, value, first in (("sample", item[0], sample), ("label", item[1], label)):
            _require_alike((first, value), what, name)
        if index in few and not all(map(np.array_equal, item, few[index])):  # each rank reads for itself
            raise ConfigError(
                f"data.dataset={name} has another item {index} each time it is made: give its random numbers a seed, "
                "and leave random transforms to data.augment=true"
            )
        samples[index], labels[index] = item
    return samples, labels


def _item(dataset: Any, index: int, name: str) -> Rows:
    import numpy as np

    try:
        item = dataset[index]
        if not isinstance(item, Mapping):
            sample, label = item
            return np.asarray(sample), np.asarray(label)
        problem = f"it is a {type(item).__name__} of {', '.join(map(str, item))}"
    except MemoryError:
        raise
    except (Exception, SystemExit) as error:  # a user's class may raise anything
        problem = raised_at(error)
    raise ConfigError(
        f"data.dataset={name}: item {index} is no sample with a label: {problem}; let __getitem__ return "
        "(sample, label)"
    )


def _require_alike(values: Sequence[NDArray[Any]], what: str, name: str) -> None:
    if len({(each.shape, each.dtype) for each in values}) > 1:
        found = ", ".join(sorted({f"{each.dtype} {each.shape}" for each in values})[:3])
        raise ConfigError(f"data.dataset={name} has {what}s of {found}: every {what} needs one shape and type")


def _dtype(sample: NDArray[Any], kind: Kind) -> np.dtype[Any]:
    """In which arrays hold samples."""
    import numpy as np

    return np.dtype(np.float32) if kind == "vectors" else sample.dtype


def _kind(sample: NDArray[Any], name: str) -> Kind:
    """What the samples are, by type and dimensions."""
    kinds: dict[tuple[str, int], Kind] = {
        ("u1", 3): "images",
        ("u1", 2): "images",
        ("f", 1): "vectors",
        ("i", 1): "tokens",
        ("u", 1): "tokens",
    }
    of_type = "u1" if sample.dtype.name == "uint8" and sample.ndim > 1 else sample.dtype.kind
    found = kinds.get((of_type, sample.ndim))
    if found is None:
        raise ConfigError(
            f"data.dataset={name} has samples of {sample.dtype} {sample.shape}: return images of uint8 "
            "(channels, height, width), without ToTensor or Normalize; vectors of floats (features,); or tokens of "
            "integers (positions,)"
        )
    return found


def _one_hot(label: NDArray[Any]) -> bool:
    return label.ndim == 1 and bool(((label == 0) | (label == 1)).all() and label.sum() == 1)


def _scale(samples: NDArray[Any], kind: Kind) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation: per channel from 0 to 1, or per feature; where all are alike, a deviation of 1.

    In two passes over chunks: no second array of all samples is made.
    """
    import numpy as np

    if kind == "tokens":
        return (), ()
    over, unit = ((0, 2, 3), 255.0) if kind == "images" else ((0,), 1.0)
    count = samples.size // samples.shape[1]
    mean = sum(chunk.sum(over, dtype=np.float64) for chunk in _chunks(samples)) / count
    centred = mean.reshape((-1,) + (1,) * (samples.ndim - 2))
    squares = sum(((chunk - centred) ** 2).sum(over) for chunk in _chunks(samples))
    std = np.sqrt(squares / count) / unit
    return tuple((mean / unit).tolist()), tuple(np.where(std > 0, std, 1.0).tolist())


def _chunks(samples: NDArray[Any]) -> Iterator[NDArray[Any]]:
    step = max(1, _CHUNK_BYTES // (8 * samples[0].size))
    return (samples[start : start + step] for start in range(0, len(samples), step))


def _largest(*arrays: NDArray[np.integer[Any]]) -> int:
    """The largest number in them, and 1; 0 where they are none."""
    whole = all(array.dtype.kind in "iu" and array.size for array in arrays)
    return 1 + max(int(array.max()) for array in arrays) if whole else 0
