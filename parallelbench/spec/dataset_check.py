"""Holds what a data set returns against what it declares: another size or scale means a wrong accuracy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from parallelbench.errors import ConfigError
from parallelbench.spec.dataset import Arrays

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from parallelbench.spec.dataset import Data

_CHUNK = 256
"""Images that are looked at together, until one has a pixel above 1; for most data sets, the first ones."""


def checked(data: Data, arrays: Any) -> Arrays:
    """The arrays that a data set returned, with labels of any integer type as int64.

    Raises `ConfigError` where sizes, types, shapes, scale or labels are not what the data set declares. It reads all
    labels, and of the images as many as it takes to find a pixel above 1.
    """
    try:
        _check_declaration(data)
        if not isinstance(arrays, Arrays):
            raise ConfigError(f"load returns {type(arrays).__name__}: return parallelbench.spec.dataset.Arrays")
        _check_images("train", arrays.train_images, data.shape)
        _check_images("test", arrays.test_images, data.shape)
        _check_size("train", len(arrays.train_images), data.stored_train_samples)
        _check_size("test", len(arrays.test_images), data.test_samples)
        return Arrays(
            train_images=arrays.train_images,
            train_labels=_as_labels("train", arrays.train_labels, len(arrays.train_images), data.num_classes),
            test_images=arrays.test_images,
            test_labels=_as_labels("test", arrays.test_labels, len(arrays.test_images), data.num_classes),
        )
    except ConfigError as error:
        raise ConfigError(f"data={data.name}: {error}") from None


def _check_declaration(data: Data) -> None:
    channels, height, width = data.shape
    if height != width:
        raise ConfigError(f"shape={data.shape} declares images of {height}×{width}: pad or crop them to squares")
    if data.stored_train_samples < 1 or data.train_samples % data.stored_train_samples:
        raise ConfigError(
            f"train_samples={data.train_samples} is no multiple of stored_train_samples={data.stored_train_samples}: "
            "an epoch takes every stored image equally often"
        )
    for name in ("mean", "std"):
        values = getattr(data, name)
        if len(values) not in (1, channels):
            raise ConfigError(f"{name} has {len(values)} values for {channels} channels: give one, or one per channel")
        if not all(0 <= value <= 1 for value in values) or (name == "std" and 0 in values):
            raise ConfigError(f"{name}={values} is not on the scale from 0 to 1: divide what you have by 255")


def _check_images(part: str, images: NDArray[Any], shape: tuple[int, int, int]) -> None:
    """Refuse other types, shapes and scales."""
    import numpy as np

    name = f"{part}_images"
    _check_array(name, images)
    if images.dtype != np.uint8:
        span = f" from {images.min():g} to {images.max():g}" if images.size and images.dtype.kind in "iuf" else ""
        times = "(255 * images).round()" if images.dtype.kind == "f" and images.size and images.max() <= 1 else "images"
        raise ConfigError(f"{name} are {images.dtype}{span}; uint8 from 0 to 255 is expected: {times}.astype(np.uint8)")
    if images.shape[1:] != shape:
        raise ConfigError(
            f"{name} have shape {images.shape}; (n, channels, height, width) is expected, with shape={shape}"
        )
    if not any(images[start : start + _CHUNK].max() > 1 for start in range(0, len(images), _CHUNK)):
        raise ConfigError(
            f"{name} have no pixel above 1, on a scale from 0 to 255: were they floats from 0 to 1? "
            "Multiply by 255 before astype(np.uint8)"
        )


def _check_size(part: str, found: int, declared: int) -> None:
    if found != declared:
        key = "test_samples" if part == "test" else "stored_train_samples, by default train_samples,"
        raise ConfigError(f"load returns {found} {part}_images; {key} declares {declared}: declare {found}")


def _as_labels(part: str, labels: NDArray[Any], images: int, num_classes: int) -> NDArray[np.int64]:
    """One label per image, as int64."""
    import numpy as np

    name = f"{part}_labels"
    _check_array(name, labels)
    if labels.ndim == 2 and labels.shape[1] == num_classes:
        raise ConfigError(f"{name} have shape {labels.shape}, one-hot; one integer each is expected: labels.argmax(1)")
    if labels.ndim != 1:
        raise ConfigError(f"{name} have shape {labels.shape}; one integer each is expected: labels.reshape(-1)")
    if labels.dtype.kind not in "iu":
        raise ConfigError(f"{name} are {labels.dtype}; integers are expected: labels.astype(np.int64)")
    if len(labels) != images:
        raise ConfigError(f"there are {len(labels)} {name} for {images} {part}_images: give one for each")
    low, high = labels.min(), labels.max()
    if low < 0 or high >= num_classes:
        raise ConfigError(
            f"{name} go from {low} to {high}; num_classes={num_classes} allows 0 to {num_classes - 1}: "
            "number the classes from 0, or correct num_classes"
        )
    return labels.astype(np.int64, copy=False)


def _check_array(name: str, array: Any) -> None:
    import numpy as np

    if not isinstance(array, np.ndarray):
        raise ConfigError(f"{name} is a {type(array).__name__}, not a NumPy array: return np.asarray(…) of it")
