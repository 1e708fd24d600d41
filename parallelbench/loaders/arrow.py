"""Memory-mapped Arrow files, for data that don't fit on the device: an image is one fixed-size binary value.

The folder of a data set's files is named after their content, so they are never out of date: by the data set's
fingerprint where it has one, else by the sha256 of its arrays. It appears whole or not at all, even when several
processes write it at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from msgspec import Meta

from parallelbench.config.components import Arrays, Loader
from parallelbench.config.dataset_check import checked
from parallelbench.config.sites import prepare_line
from parallelbench.data.content import digest
from parallelbench.data.prepare import remove_stale, storage_errors, temporary_folder
from parallelbench.errors import ConfigError
from parallelbench.results.files import sync

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Unpack

    import numpy as np
    from numpy.typing import NDArray

    from parallelbench.config.components import Data, LoaderArgs
    from parallelbench.loaders.order import BatchLoader

FOLDER = "arrow"
"""Folder of these files below the data folder."""


class Arrow(Loader, frozen=True, kw_only=True):
    """Images stay in a file. A thread gathers each batch as uint8; the device augments and normalises it."""

    writes_files: ClassVar[bool] = True

    prefetch: Annotated[int, Meta(ge=1, le=1000)]
    """Batches that are gathered and moved to the device in advance."""

    def prepare(self, data: Data, data_dir: Path, *, progress: Callable[[str], None] = print) -> None:
        """Convert the data set, once per data folder."""
        convert(data, data_dir, progress=progress)

    def load(self, data: Data, data_dir: Path) -> Arrays:
        """Map the converted files into memory."""
        return open_arrays(data, data_dir)

    def build(self, arrays: Arrays, data: Data, **arguments: Unpack[LoaderArgs]) -> BatchLoader:
        """Build the loader; its thread starts with the first batch."""
        from parallelbench.loaders.stream import StreamedLoader

        return StreamedLoader(arrays, data, prefetch=self.prefetch, **arguments)


def convert(data: Data, data_dir: Path, *, progress: Callable[[str], None] = print) -> None:
    """Write the files of a data set unless they exist. It never loads all images into memory.

    Raises `ConfigError` where the data set is not prepared, `StorageError` where the disk refuses.
    """
    root = Path(data_dir).expanduser() / FOLDER
    fingerprint = data.fingerprint(data_dir)
    arrays = None if fingerprint else checked(data, data.load(data_dir))
    folder = root / _name(data, fingerprint or digest(arrays or checked(data, data.load(data_dir))))
    if not folder.exists():
        arrays = arrays or checked(data, data.load(data_dir))
        progress(f"{data.name}: writing Arrow files for loader=arrow")
        with storage_errors(root):
            root.mkdir(parents=True, exist_ok=True)
            remove_stale(root)
            with temporary_folder(root, folder.name) as temporary:
                _write(temporary / "train.arrow", arrays.train_images, arrays.train_labels)
                _write(temporary / "test.arrow", arrays.test_images, arrays.test_labels)
                sync(temporary)
                _publish(temporary, folder)
    progress(f"{data.name}: Arrow files are in {folder}")


def _publish(temporary: Path, folder: Path) -> None:
    """Rename the folder to its place, unless another process has put the same content there first."""
    try:
        temporary.rename(folder)
    except OSError:
        if not folder.exists():
            raise
        return
    sync(folder.parent)


def open_arrays(data: Data, data_dir: Path) -> Arrays:
    """The arrays of a converted data set, as views of the files; `ConfigError` where these are missing or damaged."""
    fingerprint = data.fingerprint(data_dir) or digest(checked(data, data.load(data_dir)))
    folder = Path(data_dir).expanduser() / FOLDER / _name(data, fingerprint)
    train_images, train_labels = _open(folder / "train.arrow", data)
    test_images, test_labels = _open(folder / "test.arrow", data)
    return Arrays(train_images, train_labels, test_images, test_labels)


def _name(data: Data, fingerprint: str) -> str:
    return f"{data.name}-{fingerprint[:16]}"


def _write(path: Path, images: NDArray[np.uint8], labels: NDArray[np.int64]) -> None:
    """One record batch, straight from where the arrays lie."""
    import numpy as np
    import pyarrow as pa

    images = np.ascontiguousarray(images)
    kind = pa.binary(images[0].nbytes)
    pixels = pa.FixedSizeBinaryArray.from_buffers(kind, len(images), [None, pa.py_buffer(images)])
    shape = "x".join(map(str, images.shape[1:]))
    schema = pa.schema(
        [
            pa.field("image", kind, nullable=False, metadata={"dtype": "uint8", "shape": shape}),
            pa.field("label", pa.int64(), nullable=False),
        ]
    )
    content = pa.record_batch([pixels, pa.array(np.ascontiguousarray(labels))], schema=schema)
    with path.open("wb") as file, pa.ipc.new_file(file, schema) as writer:
        writer.write_batch(content)
    sync(path)


def _open(path: Path, data: Data) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    import numpy as np
    import pyarrow as pa

    try:
        batch = pa.ipc.open_file(pa.memory_map(str(path))).get_batch(0)
        pixels, labels = batch.column("image"), batch.column("label")
    except FileNotFoundError:
        if path.parent.exists():
            raise _damaged(path, "is missing") from None
        line = prepare_line(data.name, path.parents[2], *data.prepare_options, "loader=arrow")
        raise ConfigError(f"{path} is missing: run `{line}`") from None
    except (pa.ArrowException, OSError, KeyError, IndexError) as error:
        raise _damaged(path, f"can't be read ({error})") from None
    width = data.shape[0] * data.shape[1] * data.shape[2]
    if pixels.type != pa.binary(width):
        raise _damaged(path, f"holds images of type {pixels.type}, expected {width} bytes each")
    images = np.frombuffer(pixels.buffers()[1], np.uint8, count=len(pixels) * width)
    return images.reshape(-1, *data.shape), labels.to_numpy()


def _damaged(path: Path, problem: str) -> ConfigError:
    return ConfigError(f"{path} {problem}: delete the folder {path.parent}; the next run writes it again")
