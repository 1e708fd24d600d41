"""A data set that isn't what it declares never trains: each of these ended in `ok`, with a wrong accuracy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from parallelbench.config.components import Arrays, Data
from parallelbench.config.dataset_check import checked
from parallelbench.data.content import digest
from parallelbench.errors import ConfigError

TRAIN, TEST, CLASSES = 60, 20, 4


class Own(Data, frozen=True, kw_only=True):
    """A user's data set: what it declares, and what it returns."""

    mean: ClassVar[tuple[float, ...]] = (0.5,)
    std: ClassVar[tuple[float, ...]] = (0.25,)
    flip: ClassVar[bool] = False
    returned: ClassVar[Any]

    train_samples: int = TRAIN
    test_samples: int = TEST
    shape: tuple[int, int, int] = (1, 8, 8)
    num_classes: int = CLASSES

    def missing_files(self, data_dir: Path) -> list[Path]:
        return []

    def load(self, data_dir: Path) -> Arrays:
        return self.returned


def arrays(train: int = TRAIN, test: int = TEST) -> Arrays:
    draw = np.random.default_rng(0)
    parts = [(draw.integers(0, 256, (n, 1, 8, 8), np.uint8), np.arange(n) % CLASSES) for n in (train, test)]
    return Arrays(*parts[0], *parts[1])


def own(returned: Any = None, *, declares: dict[str, Any] | None = None, **options: Any) -> Own:
    values = {"returned": arrays() if returned is None else returned} | (declares or {})
    return type("Mine", (Own,), values, frozen=True, kw_only=True)(name="mine", augment=False, **options)


def test_what_is_as_declared_passes_unchanged() -> None:
    data = own()
    assert digest(checked(data, data.returned)) == digest(data.returned)


@pytest.mark.parametrize("kind", [np.int32, np.uint8, np.uint64, ">i8"])
def test_labels_of_any_integer_type_are_the_same_data_set(kind) -> None:
    right = arrays()
    data = own(replace(right, train_labels=right.train_labels.astype(kind), test_labels=right.test_labels.astype(kind)))
    assert digest(checked(data, data.returned)) == digest(right)


@pytest.mark.parametrize(
    ("declared", "problem"),
    [
        ({"test_samples": 200}, r"\(20, 1, 8, 8\), not \(200, 1, 8, 8\) by test_samples=200"),
        ({"test_samples": 10}, r"\(20, 1, 8, 8\), not \(10, 1, 8, 8\) by test_samples=10"),
        ({"train_samples": 100}, "by train_samples=100"),
        ({"train_samples": 30}, "by train_samples=30"),
        ({"shape": (1, 8, 9)}, r"shape=\(1, 8, 9\) is none of images: declare \(channels, side, side\)"),
        ({"shape": (8, 8, 3)}, r"shape=\(8, 8, 3\) is none of images"),
        ({"shape": (1, 9, 9)}, r"have shape \(60, 1, 8, 8\), not \(60, 1, 9, 9\)"),
        ({"num_classes": 3}, "go from 0 to 3; num_classes=3 allows 0 to 2"),
    ],
)
def test_a_declaration_of_something_else_is_refused(declared: dict[str, Any], problem: str) -> None:
    refused(own(**declared), problem)


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("images", lambda a: a / 255, "float64, but uint8 from 0 to 255 is expected"),
        ("images", lambda a: (a / 255).astype(np.uint8), "no pixel above 1"),
        ("images", lambda a: (a > 127).astype(np.uint8), "no pixel above 1"),
        ("images", lambda a: a.astype(np.int16) - 128, "int16, but uint8 from 0 to 255"),
        ("images", lambda a: a.transpose(0, 2, 3, 1), r"have shape \(\d+, 8, 8, 1\), not \(\d+, 1, 8, 8\)"),
        ("images", lambda a: a[:0], r"have shape \(0, 1, 8, 8\)"),
        ("images", lambda a: a.tolist(), "is a list, not a NumPy array"),
        ("labels", lambda a: np.eye(CLASSES, dtype=np.int64)[a], r"have shape \(\d+, 4\), not \(\d+,\)"),
        ("labels", lambda a: a[:, None], r"have shape \(\d+, 1\), not \(\d+,\)"),
        ("labels", lambda a: a.astype(np.float32), "float32, but integers is expected"),
        ("labels", lambda a: a[:-5], r"\w+_labels have shape"),
        ("labels", lambda a: a + 1, "go from 1 to 4; num_classes=4 allows 0 to 3: number from 0"),
        ("labels", lambda a: a - 1, "go from -1 to 2"),
    ],
)
@pytest.mark.parametrize("part", ["train", "test"])
def test_arrays_of_another_kind_are_refused(part: str, name: str, change: Callable[[Any], Any], problem: str) -> None:
    right, field = arrays(), f"{part}_{name}"
    data = own(replace(right, **{field: change(getattr(right, field))}))
    refused(data, problem)
    refused(data, f"{part}_")


def test_other_things_than_arrays_and_impossible_scales_are_refused() -> None:
    refused(own(("images", "labels")), "load returns tuple: return")
    refused(own(declares={"mean": (0.5, 0.5)}), "mean has 2 values: declare one, or 1,")
    refused(own(declares={"mean": (127.5,)}), "mean=.* not on the scale from 0 to 1: divide")
    refused(own(declares={"std": (0.0,)}), r"std=\(0\.0,\) is not above 0: give 1")


def test_a_repeated_training_set_is_declared() -> None:
    data = own(declares={"stored_train_samples": TRAIN}, train_samples=3 * TRAIN)
    assert len(checked(data, data.returned).train_labels) == TRAIN
    refused(own(declares={"stored_train_samples": TRAIN}, train_samples=100), "train_samples=100 is no multiple")


def refused(data: Data, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        checked(data, data.load(Path("nowhere")))
    assert str(caught.value).startswith("data=mine: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["mean", "std"])
def test_what_is_not_declared_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Own, name)
    with pytest.raises(ConfigError, match=f"data=mine: {name} has 0 values: declare one"):
        checked(own(), arrays())
