"""Holds what a data set returns against what it declares: another size or scale means a wrong accuracy."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

from parallelbench.config.build import package_of
from parallelbench.config.components import Arrays
from parallelbench.errors import ConfigError, count_of, place_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from parallelbench.config.components import Data
    from parallelbench.config.run import RunConfig


_CHUNK = 256
"""Samples that are looked at together; of images, until one has a pixel above 1: for most data sets, the first ones."""
_SHAPES = {"images": "(channels, side, side)", "vectors": "(features,)", "tokens": "(positions,)"}
_TYPES = {"images": "uint8 from 0 to 255", "vectors": "float32", "tokens": "integers"}


def checked(data: Data, arrays: Any) -> Arrays:
    """The arrays that a data set returned, with labels of any integer type as int64.

    Raises `ConfigError` where sizes, types, shapes, scale or labels are not what the data set declares. It reads all
    labels, vectors and tokens, and of images as many as it takes to find a pixel above 1.
    """
    import numpy as np

    if (problem := next(chain(_of_declaration(data), _of_arrays(data, arrays)), None)) is not None:
        own = package_of(type(data)) != "parallelbench"
        raise ConfigError(f"data={data.name}: {problem}{f' ({place_of(type(data).load)})' if own else ''}")
    return Arrays(
        train_images=arrays.train_images,
        train_labels=arrays.train_labels.astype(np.int64, copy=False),
        test_images=arrays.test_images,
        test_labels=arrays.test_labels.astype(np.int64, copy=False),
    )


def require_memory(run: RunConfig, *, node_bytes: float | None, device_bytes: float | None, more: str = "") -> None:
    """Refuse data that the memory of a node, or of a GPU where the loader keeps them there, is too small for.

    None: it is not known how much there is. `more`: the option that asks for more of a node's.
    """
    data, loaded, resident = run.data, run.data.loaded_bytes, run.loader.on_device
    processes = -(-run.strategy.processes(run, run.device) // run.nodes)
    if loaded is not None:
        copies = 2 if resident and run.device == "cpu" else 1  # a device on a CPU has its copy in the same memory
        needed = loaded * (processes + copies - 1)
        if node_bytes is not None and needed > node_bytes:
            copy = f" with the copy of loader={run.loader.name}" if copies > 1 else ""
            raise ConfigError(
                f"data={data.name} takes {_gib(loaded)} in each process: {_gib(needed)} for "
                f"{count_of(processes, 'process', 'processes')} on a node{copy}, but it has {_gib(node_bytes)}: "
                f"{f'raise {more}, ' if more else ''}"
                "choose fewer devices on a node or less data, or write a Data of your own whose load maps files "
                "(numpy.load(…, mmap_mode='r'))"
            )
    if resident and run.device == "cuda" and device_bytes is not None and data.stored_bytes > device_bytes:
        raise ConfigError(
            f"data={data.name} takes {_gib(data.stored_bytes)} of each GPU with loader={run.loader.name}, but a GPU "
            f"has {_gib(device_bytes)}: choose loader=dataloader"
        )


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / 2**30:,.1f} GiB"


def _of_declaration(data: Data) -> Iterator[str]:
    """What is wrong with what a data set says of itself."""
    kind, shape, labels, stored = data.kind, data.shape, data.label_shape, data.stored_train_samples
    square = kind != "images" or shape[1:2] == shape[2:]
    if len(shape) != (3 if kind == "images" else 1) or min(shape) < 1 or not square:
        yield f"shape={shape} is none of {kind}: declare {_SHAPES[kind]}"
    if kind == "tokens" and data.vocabulary < 1:
        yield "vocabulary=0 declares no token: declare how many different tokens there are"
    if len(labels) > 1 or min(labels, default=1) < 1:
        yield f"label_shape={labels} is not valid: declare (), or (positions,)"
    if stored < 1 or data.train_samples % stored:
        yield (
            f"train_samples={data.train_samples} is no multiple of stored_train_samples={stored}: an epoch takes every "
            "stored sample equally often"
        )
    if data.test_samples < 1:
        yield f"test_samples={data.test_samples} declares none: declare at least one"
    for name in ("mean", "std") if kind != "tokens" else ():
        values = getattr(data, name, ())
        if len(values) not in (1, shape[0]):
            yield f"{name} has {len(values)} values: declare one, or {shape[0]}, one for each of shape's first number"
        if name == "std" and not all(value > 0 for value in values):
            yield f"std={values} is not above 0: give 1 where all samples are the same, or leave that out"
        if kind == "images" and not all(0 <= value <= 1 for value in values):
            yield f"{name}={values} is not on the scale from 0 to 1: divide what you have by 255"


def _of_arrays(data: Data, arrays: Any) -> Iterator[str]:
    """What is wrong with what it returned."""
    if not isinstance(arrays, Arrays):
        yield f"load returns {type(arrays).__name__}: return parallelbench.config.components.Arrays"
        return
    stored = "train_samples" if data.stored_train_samples == data.train_samples else "stored_train_samples"
    yield from _of_part(data, "train", arrays.train_images, arrays.train_labels, key=stored)
    yield from _of_part(data, "test", arrays.test_images, arrays.test_labels, key="test_samples")


def _of_part(data: Data, part: str, samples: Any, labels: Any, *, key: str) -> Iterator[str]:
    """The same of one part; `key` declares how many samples it has."""
    import numpy as np

    count = getattr(data, key)
    name, declared = f"{part}_images", f"{key}={count}"
    yield from _of_array(name, samples, _TYPES[data.kind], (count, *data.shape), f"{declared} and shape={data.shape}")
    if data.kind == "tokens":
        yield from _of_range(name, samples, data.option_of("vocabulary"), data.vocabulary)
    elif data.kind == "vectors" and not all(
        np.isfinite(samples[start : start + _CHUNK]).all() for start in range(0, len(samples), _CHUNK)
    ):
        yield f"{name} hold infinities, or numbers that are none (NaN): fill or drop these samples"
    elif data.kind == "images" and not any(
        samples[start : start + _CHUNK].max() > 1 for start in range(0, len(samples), _CHUNK)
    ):
        yield f"{name} have no pixel above 1, on a scale from 0 to 255: were they floats from 0 to 1?"
    name, shape = f"{part}_labels", data.label_shape
    yield from _of_array(name, labels, "integers", (count, *shape), f"{declared} and label_shape={shape}")
    yield from _of_range(name, labels, data.option_of("num_classes"), data.num_classes)


def _of_array(name: str, array: Any, kind: str, shape: tuple[int, ...], declared: str) -> Iterator[str]:
    import numpy as np

    if not isinstance(array, np.ndarray):
        yield f"{name} is a {type(array).__name__}, not a NumPy array: return np.asarray(…) of it"
    elif not (array.dtype.kind in "iu" if kind == "integers" else array.dtype == kind.split()[0]):
        yield f"{name} are {array.dtype}, but {kind} is expected: convert them"
    elif array.shape != shape:
        yield f"{name} have shape {array.shape}, not {shape} by {declared}: correct these, or what load returns"


def _of_range(name: str, values: Any, key: str, end: int) -> Iterator[str]:
    low, high = values.min(), values.max()
    if low < 0 or high >= end:
        yield f"{name} go from {low} to {high}; {key}={end} allows 0 to {end - 1}: number from 0, or correct {key}"
