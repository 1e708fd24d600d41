"""Files that are there whole or not at all, on disks that are full and for writers that are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from parallelbench.errors import StorageError
from parallelbench.results.files import fill, reserve, storage_errors, write_file
from tests.faults import fault
from tests.helpers import fill_disk


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_file_is_replaced_and_nothing_else_remains(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content in (b"old", b"", b"new" * 1000):
        write_file(path, content)
        assert path.read_bytes() == content
    assert names(tmp_path) == {"file"}


FULL = OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("step", "error", "told"),
    [
        ("open", FULL, StorageError),
        ("fsync", FULL, StorageError),
        ("replace", FULL, StorageError),
        ("fsync", KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_a_failed_or_interrupted_write_leaves_the_old_content_and_no_rubbish(
    tmp_path: Path, step: str, error: BaseException, told: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_file(path, b"old")

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(Path if step == "open" else os, step, fail)
    with pytest.raises(told):
        write_file(path, b"new")
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == {"file"}


@fault(
    "storage and input",
    "A writer is killed",
    injection="SIGKILL at random instants while a file is replaced",
    outcome="the old content or the new, never a part",
)
@pytest.mark.slow
def test_a_writer_that_is_killed_leaves_the_old_or_the_new_content(tmp_path: Path) -> None:
    path = tmp_path / "file"
    contents = [bytes([letter]) * 300_000 for letter in b"ab"]
    write_file(path, contents[0])
    program = (
        "import sys, itertools; from pathlib import Path; from parallelbench.results.files import write_file\n"
        "for n in itertools.count():\n"
        "    write_file(Path(sys.argv[1]), b'ab'[n % 2 : n % 2 + 1] * 300_000)\n"
        "    print(n, flush=True)"
    )
    for rounds in range(1, 8):
        with subprocess.Popen([sys.executable, "-c", program, path], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            for _ in range(rounds):
                writer.stdout.readline()
            writer.send_signal(signal.SIGKILL)
        assert path.read_bytes() in contents


def test_a_full_disk_is_a_storage_error_that_names_the_file(small_disk: Path) -> None:
    path = small_disk / "file"
    write_file(path, b"old")
    fill_disk(small_disk)
    with pytest.raises(StorageError, match=r"can't write .*/file: the disk is full"):
        write_file(path, b"new" * 100)
    assert path.read_bytes() == b"old"
    assert names(small_disk) == {"file", "ballast"}


@fault(
    "storage and input",
    "Disk full when an attempt ends",
    injection="a tmpfs of 1 MiB, full to the last byte",
    outcome="the outcome is written all the same, into room reserved at the start",
)
def test_a_reserved_file_can_be_filled_on_a_full_disk(small_disk: Path) -> None:
    path = small_disk / "outcome"
    reserve(path, 4096)
    fill_disk(small_disk)
    fill(path, b'{"outcome": "storage"}')
    assert path.read_bytes().strip() == b'{"outcome": "storage"}'
    fill(path, b"{}")
    assert path.read_bytes().strip() == b"{}", "nothing of a longer content before remains"


def test_what_can_not_be_reserved_is_not_there(small_disk: Path) -> None:
    fill_disk(small_disk, leave_bytes=8192)
    with pytest.raises(StorageError, match="disk is full"):
        reserve(small_disk / "outcome", 100_000)
    assert names(small_disk) == {"ballast"}


def test_more_than_was_reserved_is_our_mistake(tmp_path: Path) -> None:
    reserve(tmp_path / "file", 10)
    with pytest.raises(AssertionError, match="11 bytes don't fit the 10"):
        fill(tmp_path / "file", b"x" * 11)
    assert (tmp_path / "file").read_bytes() == b" " * 10


def test_a_file_in_the_way_of_a_folder_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match="a part of the path is a file: choose another folder with results=DIR"):
        write_file(tmp_path / "file" / "inside", b"")


@pytest.mark.parametrize(
    ("number", "words"), [(13, "no permission"), (30, "read-only"), (122, "quota"), (5, "Input/output error")]
)
def test_other_errors_are_named(tmp_path: Path, number: int, words: str) -> None:
    with pytest.raises(StorageError, match=words), storage_errors(tmp_path):
        raise OSError(number, os.strerror(number))
