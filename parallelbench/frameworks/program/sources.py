"""What identifies the sources of a user's program: its commit with what is uncommitted, or the files themselves."""

from __future__ import annotations

import hashlib
import itertools
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from parallelbench.errors import ConfigError
from parallelbench.measure.git import GitError, said
from parallelbench.results.folder import is_configuration_of_run

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_DIGITS = 16
_SUFFIXES = (".py", ".pyx", ".sh", ".cu", ".cuh", ".cpp", ".cc", ".c", ".h")
"""Of code. Other files that Git doesn't know are data, or what the program writes."""
_MOST_FILES, _MOST_BYTES = 20_000, 4 << 20
"""Most files of a folder, and the largest one, that are read."""


def sources_of(folder: Path) -> str:
    """`commit@digits`: of the working tree, the commit and all that differs from it; `files@digits` outside of Git.

    Outside of Git these are all files of code below the folder, without hidden ones, environments and results. Raises
    `ConfigError` where there are too many.
    """
    try:
        top = Path(said(folder, "rev-parse", "--show-toplevel"))
        commit = said(top, "rev-parse", "HEAD")
        changed = said(top, "status", "--porcelain", "-z", "--no-renames", "--untracked-files=all").split("\0")
        if not said(folder, "ls-files", "--", "."):
            raise GitError("the repository around it knows none of its files")
    except GitError:
        return f"files@{_digest(folder, _below(folder))}"
    mine = sorted(top / line[3:] for line in changed if len(line) > 3 and _is_own(line[:2], Path(line[3:]), top))
    return f"{commit[:12]}@{_digest(top, mine)}" if mine else commit[:_DIGITS]


def written_since(folder: Path, moment: float) -> list[str]:
    """Files below a folder, without hidden ones, environments and results, that have changed since a Unix time, s.

    Of very many files only the first are looked at.
    """
    found = []
    for path in itertools.islice(_files(folder), _MOST_FILES):
        with suppress(OSError):
            if path.stat().st_mtime >= moment:
                found.append(str(path.relative_to(folder)))
    return found


def _below(folder: Path) -> Iterator[Path]:
    """The files of code."""
    for seen, path in enumerate(each for each in _files(folder) if each.suffix in _SUFFIXES):
        if seen == _MOST_FILES:
            raise ConfigError(
                f"program.folder={folder} holds more than {_MOST_FILES:,} files of code: name the program's own "
                "folder, or put it under Git"
            )
        yield path


def _files(folder: Path) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(
            each
            for each in folders
            if not each.startswith((".", "__pycache__"))
            and not _is_venv(root, each)
            and not _holds_runs(os.path.join(root, each))
        )
        yield from (Path(root, name) for name in sorted(names) if not name.startswith("."))


def _is_venv(root: str, folder: str) -> bool:
    return os.path.exists(os.path.join(root, folder, "pyvenv.cfg")) or folder == "site-packages"


def _holds_runs(folder: str) -> bool:
    """Whether it is a sweep's: its scripts of jobs, and what programs write there, come and go."""
    with suppress(OSError), os.scandir(folder) as children:
        return any(is_configuration_of_run(child.path) for child in children)
    return False


def _is_own(status: str, path: Path, top: Path) -> bool:
    """Whether a change is one of the program: of any file that Git knows, or of new code outside of results."""
    if status != "??":
        return True
    is_code = path.suffix in _SUFFIXES and not any(part.startswith(".") for part in path.parts)
    return is_code and not any(_holds_runs(str(top / parent)) for parent in path.parents)


def _digest(folder: Path, files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        try:
            if path.is_dir():  # a submodule, or a repository within this one
                content = sources_of(path).encode()
            else:
                content = path.read_bytes() if path.stat().st_size <= _MOST_BYTES else b"large"
        except FileNotFoundError:  # deleted, which is a change, too
            content = b"none"
        except OSError as error:
            raise ConfigError(f"{path} can't be read: {error.strerror}; it is a part of the program") from None
        digest.update(os.fsencode(f"{path.relative_to(folder)}\0{len(content)}\0"))
        digest.update(content)
    return digest.hexdigest()[:_DIGITS]
