"""Holds what a data set returns against what it declares: another size or scale means a wrong accuracy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from parallelbench.config.components import Arrays
from parallelbench.errors import ConfigError, count_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from parallelbench.config.components import Data


_CHUNK = 256
"""Images that are looked at together, until one has a pixel above 1; for most data sets, the first ones."""
_MOST_CHANNELS = 4
"""Where an image's last dimension is at most this, and its first is more, the channels come last."""


def checked(data: Data, arrays: Any) -> Arrays:
    """The arrays that a data set returned, with labels of any integer type as int64.

    Raises `ConfigError` where sizes, types, shapes, scale or labels are not what the data set declares. It reads all
    labels, vectors and tokens, and of images as many as it takes to find a pixel above 1.
    """
    try:
        _check_declaration(data)
        if not isinstance(arrays, Arrays):
            raise ConfigError(f"load returns {type(arrays).__name__}: return parallelbench.config.components.Arrays")
        _check_samples("train", arrays.train_images, data)
        _check_samples("test", arrays.test_images, data)
        _check_size("train", len(arrays.train_images), data.stored_train_samples)
        _check_size("test", len(arrays.test_images), data.test_samples)
        return Arrays(
            train_images=arrays.train_images,
            train_labels=_as_labels("train", arrays.train_labels, len(arrays.train_images), data),
            test_images=arrays.test_images,
            test_labels=_as_labels("test", arrays.test_labels, len(arrays.test_images), data),
        )
    except ConfigError as error:
        raise ConfigError(f"data={data.name}: {error}") from None


def _check_declaration(data: Data) -> None:
    _check_shape(data)
    if data.stored_train_samples < 1 or data.train_samples % data.stored_train_samples:
        raise ConfigError(
            f"train_samples={data.train_samples} is no multiple of stored_train_samples={data.stored_train_samples}: "
            "an epoch takes every stored image equally often"
        )
    if data.kind == "tokens":
        return
    what = "channel" if data.kind == "images" else "feature"
    for name in ("mean", "std"):
        values = getattr(data, name, None)
        if values is None:
            raise ConfigError(f"{type(data).__qualname__} declares no {name}: give one value, or one per {what}")
        if len(values) not in (1, data.shape[0]):
            raise ConfigError(
                f"{name} has {len(values)} values for {data.shape[0]} {what}s: give one, or one per {what}"
            )
        if name == "std" and not all(value > 0 for value in values):
            alike = "leave a feature out" if data.kind == "vectors" else "give 1 for a channel"
            raise ConfigError(f"std={values} is not above 0: {alike} that is the same in all samples")
        if data.kind == "images" and not all(0 <= value <= 1 for value in values):
            raise ConfigError(f"{name}={values} is not on the scale from 0 to 1: divide what you have by 255")


def _check_shape(data: Data) -> None:
    """Refuse shapes that are not of the data's kind."""
    dimensions = {"images": 3, "vectors": 1, "tokens": 1}[data.kind]
    if len(data.shape) != dimensions or min(data.shape) < 1:
        needed = count_of(dimensions, "number")
        raise ConfigError(f"shape={data.shape} is none of {data.kind}: it needs {needed} of at least 1")
    if data.kind == "images" and data.shape[1] != data.shape[2]:
        channels, height, width = data.shape
        if width <= _MOST_CHANNELS < channels:
            raise ConfigError(
                f"shape={data.shape} seems to be (height, width, channels): give images as (channels, height, width), "
                f"image.transpose(2, 0, 1), here {(width, channels, height)}"
            )
        raise ConfigError(f"shape={data.shape} declares images of {height}×{width}: pad or crop them to squares")
    if data.kind == "tokens" and data.vocabulary < 1:
        raise ConfigError("vocabulary=0 declares no token: declare how many different tokens there are")
    if len(data.label_shape) > 1 or (data.label_shape and min(data.label_shape) < 1):
        raise ConfigError(f"label_shape={data.label_shape} is not valid: declare (), or (positions,)")


def _check_samples(part: str, samples: NDArray[Any], data: Data) -> None:
    """Refuse other types, shapes, and scales or values."""
    name = f"{part}_images"
    _check_array(name, samples)
    if not len(samples):
        raise ConfigError(f"{name} are empty, with shape {samples.shape}: give at least one sample")
    {"images": _check_images, "vectors": _check_vectors, "tokens": _check_tokens}[data.kind](name, samples, data)


def _check_images(name: str, images: NDArray[Any], data: Data) -> None:
    import numpy as np

    if images.dtype != np.uint8:
        span = f" from {images.min():g} to {images.max():g}" if images.size and images.dtype.kind in "iuf" else ""
        times = "(255 * images).round()" if images.dtype.kind == "f" and images.size and images.max() <= 1 else "images"
        raise ConfigError(f"{name} are {images.dtype}{span}; uint8 from 0 to 255 is expected: {times}.astype(np.uint8)")
    if images.shape[1:] != data.shape:
        last = images.ndim == 4 and (images.shape[3], *images.shape[1:3]) == data.shape
        raise ConfigError(
            f"{name} have shape {images.shape}; (n, channels, height, width) is expected, with shape={data.shape}"
            + (": images.transpose(0, 3, 1, 2)" if last else "")
        )
    if not any(images[start : start + _CHUNK].max() > 1 for start in range(0, len(images), _CHUNK)):
        raise ConfigError(
            f"{name} have no pixel above 1, on a scale from 0 to 255: were they floats from 0 to 1? "
            "Multiply by 255 before astype(np.uint8)"
        )


def _check_vectors(name: str, vectors: NDArray[Any], data: Data) -> None:
    import numpy as np

    if vectors.dtype != np.float32:
        raise ConfigError(f"{name} are {vectors.dtype}; vectors of float32 are expected: vectors.astype(np.float32)")
    if vectors.shape[1:] != data.shape:
        raise ConfigError(f"{name} have shape {vectors.shape}; (n, features) is expected, with shape={data.shape}")
    if not np.isfinite(vectors).all():
        raise ConfigError(f"{name} hold infinities, or numbers that are none (NaN): fill or drop these samples")


def _check_tokens(name: str, tokens: NDArray[Any], data: Data) -> None:
    if tokens.dtype.kind not in "iu":
        raise ConfigError(f"{name} are {tokens.dtype}; tokens are integers: tokens.astype(np.int64)")
    if tokens.shape[1:] != data.shape:
        raise ConfigError(f"{name} have shape {tokens.shape}; (n, positions) is expected, with shape={data.shape}")
    if tokens.size and (tokens.min() < 0 or tokens.max() >= data.vocabulary):
        raise ConfigError(
            f"{name} go from {tokens.min()} to {tokens.max()}; vocabulary={data.vocabulary} allows 0 to "
            f"{data.vocabulary - 1}: number the tokens from 0, or correct vocabulary"
        )


def _check_size(part: str, found: int, declared: int) -> None:
    if found != declared:
        key = "test_samples" if part == "test" else "stored_train_samples, by default train_samples,"
        raise ConfigError(f"load returns {found} {part}_images; {key} declares {declared}: declare {found}")


def _as_labels(part: str, labels: NDArray[Any], images: int, data: Data) -> NDArray[np.int64]:
    """The labels of each sample, as int64."""
    import numpy as np

    name, num_classes, positions = f"{part}_labels", data.num_classes, data.label_shape
    _check_array(name, labels)
    if not positions and labels.ndim == 2 and labels.shape[1] == num_classes:
        raise ConfigError(f"{name} have shape {labels.shape}, one-hot; one integer each is expected: labels.argmax(1)")
    if labels.shape[1:] != positions:
        expected = f"(n, {positions[0]}), by label_shape={positions}," if positions else "one integer each"
        raise ConfigError(
            f"{name} have shape {labels.shape}; {expected} is expected"
            + ("" if positions else ": labels.reshape(-1), or declare label_shape")
        )
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
