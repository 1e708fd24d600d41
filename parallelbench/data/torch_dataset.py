"""A torch `Dataset` of one's own: read once, whole, into arrays, from which everything else is taken."""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from parallelbench.config.components import Arrays, Data
from parallelbench.config.structure import Count  # noqa: TC001 - msgspec reads the annotations
from parallelbench.errors import ConfigError, raised_at

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from parallelbench.config.components import Kind

    Rows = tuple[NDArray[Any], NDArray[Any]]
    """All samples, and all labels."""


@dataclass(frozen=True)
class ReadItems:
    """What a data set turned out to hold."""

    arrays: Arrays
    kind: Kind
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: int
    vocabulary: int


class TorchDataset(Data, frozen=True, kw_only=True):
    """Any class with `__len__` and `__getitem__`, called with `train=True` and `train=False`, as torchvision's are.

    An item is a sample and its label, the same each time. Samples are images, uint8 of (channels, height, width) or
    (height, width); vectors, floats of (features,); or tokens, integers of (positions,). A label is an integer, or one
    at each position. Mean and deviation are those of the training samples.
    """

    names_classes: ClassVar[tuple[str, ...]] = ("dataset",)
    flip: ClassVar[bool] = False

    dataset: str | None = None
    """The class, as package.module.Class; its package is that of `--plugin`. Null: none is chosen yet."""
    arguments: dict[str, bool | int | float | str | None] | None = None
    """What the class is called with besides `train`; null: nothing."""
    classes: Count | None = None
    """Number of labels, where not all occur; null: the largest label there is, and 1."""

    @property
    def _found(self) -> ReadItems:
        if self.dataset is None:
            raise ConfigError(
                f"data={self.name} names no class: choose data.dataset=PACKAGE.Class, and the package with --plugin"
            )
        return _read(self.dataset, json.dumps(self.arguments or {}, sort_keys=True))

    @property
    def kind(self) -> Kind:
        """By type and dimensions of the first sample."""
        return self._found.kind

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
        return self._found.arrays.train_images.shape[1:]

    @property
    def label_shape(self) -> tuple[int, ...]:
        return self._found.arrays.train_labels.shape[1:]

    @property
    def vocabulary(self) -> int:
        """The largest token there is, and 1."""
        return self._found.vocabulary

    @property
    def num_classes(self) -> int:
        return self.classes or self._found.classes

    @property
    def train_samples(self) -> int:
        return len(self._found.arrays.train_labels)

    @property
    def test_samples(self) -> int:
        return len(self._found.arrays.test_labels)

    def load(self, data_dir: Path) -> Arrays:
        return self._found.arrays


@functools.cache
def _read(name: str, arguments: str) -> ReadItems:
    """Read both parts; once in a process."""
    import numpy as np

    module, _, attribute = name.rpartition(".")
    made = functools.partial(_made, getattr(importlib.import_module(module), attribute), name, json.loads(arguments))
    (train, train_labels), (test, test_labels) = (_rows(made(train=part), name) for part in (True, False))
    for part, rows in ((True, (train, train_labels)), (False, (test, test_labels))):
        _check_again(made(train=part), rows, name)
    kind = _kind(train, name)
    if train_labels.shape[1:] != train.shape[1:] and _one_hot(train_labels):
        raise ConfigError(f"data.dataset={name} has one-hot labels: return the number of the class, label.argmax()")
    if kind == "images" and train.ndim == 3:
        train, test = train[:, np.newaxis], test[:, np.newaxis]
    if kind == "vectors":
        train, test = train.astype(np.float32), test.astype(np.float32)
    mean, std = _scale(train, kind)
    return ReadItems(
        arrays=Arrays(train, train_labels, test, test_labels),
        kind=kind,
        mean=mean,
        std=std,
        classes=_largest(train_labels, test_labels),
        vocabulary=_largest(train, test) if kind == "tokens" else 0,
    )


def _made(cls: Any, name: str, arguments: dict[str, Any], *, train: bool) -> Any:
    try:
        dataset = cls(train=train, **arguments)
        items = len(dataset)
    except (Exception, SystemExit) as error:  # a user's class may raise anything
        raise ConfigError(
            f"data.dataset={name} can't be made with train={train} and data.arguments={arguments}: {raised_at(error)}"
        ) from None
    if not items:
        raise ConfigError(f"data.dataset={name} has no items with train={train}: give it at least one")
    return dataset


def _rows(dataset: Any, name: str) -> Rows:
    """All samples and all labels of one part."""
    import numpy as np

    samples, labels = [], []
    for index in range(len(dataset)):
        sample, label = _item(dataset, index, name)
        samples.append(sample)
        labels.append(label)
    for what, values in (("sample", samples), ("label", labels)):
        if len({(each.shape, each.dtype) for each in values}) != 1:
            found = ", ".join(sorted({f"{each.dtype} {each.shape}" for each in values})[:3]) or "nothing"
            raise ConfigError(f"data.dataset={name} has {what}s of {found}: every {what} needs one shape and type")
    return np.stack(samples), np.stack(labels)


def _item(dataset: Any, index: int, name: str) -> Rows:
    import numpy as np

    try:
        item = dataset[index]
        if not isinstance(item, Mapping):
            sample, label = item
            return np.asarray(sample), np.asarray(label)
        problem = f"it is a {type(item).__name__} of {', '.join(map(str, item))}"
    except (Exception, SystemExit) as error:  # a user's class may raise anything
        problem = raised_at(error)
    raise ConfigError(
        f"data.dataset={name}: item {index} is no sample with a label: {problem}; let __getitem__ return "
        "(sample, label)"
    )


def _check_again(dataset: Any, rows: Rows, name: str) -> None:
    """Refuse items that differ from one reading to the next: each rank reads for itself."""
    import numpy as np

    for index in {0, len(rows[0]) // 2, len(rows[0]) - 1}:
        if not all(map(np.array_equal, _item(dataset, index, name), (each[index] for each in rows))):
            raise ConfigError(
                f"data.dataset={name} has another item {index} each time it is made: give its random numbers a seed, "
                "and leave random transforms to data.augment=true"
            )


def _kind(samples: NDArray[Any], name: str) -> Kind:
    """What the samples are, by type and dimensions."""
    kinds: dict[tuple[str, int], Kind] = {
        ("u1", 4): "images",
        ("u1", 3): "images",
        ("f", 2): "vectors",
        ("i", 2): "tokens",
        ("u", 2): "tokens",
    }
    of_type = "u1" if samples.dtype.name == "uint8" and samples.ndim > 2 else samples.dtype.kind
    found = kinds.get((of_type, samples.ndim))
    if found is None:
        raise ConfigError(
            f"data.dataset={name} has samples of {samples.dtype} {samples.shape[1:]}: return images of uint8 "
            "(channels, height, width), without ToTensor or Normalize; vectors of floats (features,); or tokens of "
            "integers (positions,)"
        )
    return found


def _one_hot(labels: NDArray[Any]) -> bool:
    return labels.ndim == 2 and bool((((labels == 0) | (labels == 1)).all(1) & (labels.sum(1) == 1)).all())


def _scale(samples: NDArray[Any], kind: Kind) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation: per channel from 0 to 1, or per feature; where all are alike, a deviation of 1."""
    import numpy as np

    if kind == "tokens":
        return (), ()
    if kind == "vectors":
        mean, std = samples.mean(0, dtype=np.float64), samples.std(0, dtype=np.float64)
    else:
        over = (0, 2, 3)
        mean, std = (each(over, dtype=np.float64) / 255 for each in (samples.mean, samples.std))
    return tuple(mean.tolist()), tuple(np.where(std > 0, std, 1.0).tolist())


def _largest(*arrays: NDArray[np.integer[Any]]) -> int:
    """The largest number in them, and 1; 0 where they are none."""
    whole = all(array.dtype.kind in "iu" and array.size for array in arrays)
    return 1 + max(int(array.max()) for array in arrays) if whole else 0
