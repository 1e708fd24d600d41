"""What identifies the sources of a user's program: its commit with what is uncommitted, or the files themselves."""

from __future__ import annotations

import hashlib
import itertools
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from parallelbench.errors import ConfigError
from parallelbench.measure.git import GitError, said
from parallelbench.results.folder import is_configuration_of_run

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_DIGITS = 16
_MOST_NAMED = 500
"""Most files that are remembered by name."""
_SUFFIXES = (".py", ".pyx", ".sh", ".cu", ".cuh", ".cpp", ".cc", ".c", ".h")
"""Of code. Other files that Git doesn't know are data, or what the program writes."""
_MOST_FILES, _MOST_BYTES = 20_000, 4 << 20
"""Most files of a folder, and the largest one, that are read."""


class Sources(NamedTuple):
    """What a program's files hold."""

    identity: str
    """`commit@digits`: of the working tree, the commit and all that differs from it; `files@digits` outside of Git."""
    files: Mapping[str, str]
    """Path → the first digits of what each of those files holds, that differ from the commit, or outside of Git of all;
    none where they are too many to be remembered."""


def sources_of(folder: Path) -> Sources:
    """Of the repository that the folder is in, or, outside of Git, of all files of code below the folder, without
    hidden ones, environments and results. Raises `ConfigError` where there are too many.
    """
    try:
        top = Path(said(folder, "rev-parse", "--show-toplevel"))
        commit = said(top, "rev-parse", "HEAD")
        changed = said(top, "status", "--porcelain", "-z", "--no-renames", "--untracked-files=all").split("\0")
        if not said(folder, "ls-files", "--", "."):
            raise GitError("the repository around it knows none of its files")
    except GitError:
        files = _digests(folder, _below(folder))
        return Sources(f"files@{_digest(files)}", _remembered(files))
    mine = sorted(top / line[3:] for line in changed if len(line) > 3 and _is_own(line[:2], Path(line[3:]), top))
    files = _digests(top, mine)
    return Sources(f"{commit[:12]}@{_digest(files)}" if files else commit[:_DIGITS], _remembered(files))


def changed_files(folder: Path, before: Sources, now: Sources) -> list[str]:
    """Names of files that two states of the sources differ in, in order; none where nobody remembers."""
    names = {name for name in before.files.keys() | now.files.keys() if before.files.get(name) != now.files.get(name)}
    commits = [each.identity.partition("@")[0] for each in (before, now)]
    if commits[0] != commits[1] and "files" not in commits:
        with suppress(GitError):  # the older commit may be gone
            top = Path(said(folder, "rev-parse", "--show-toplevel"))
            names |= {*said(top, "diff", "--name-only", "-z", *(each[:12] for each in commits)).split("\0")} - {""}
    unknown = {each.identity for each in (before, now) if "@" in each.identity and not each.files}
    return [] if unknown else sorted(names)


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


def _digests(folder: Path, files: Iterable[Path]) -> dict[str, str]:
    """Path within the folder → digits of what the file holds."""
    found = {}
    for path in files:
        try:
            if path.is_dir():  # a submodule, or a repository within this one
                content = sources_of(path).identity.encode()
            else:
                content = path.read_bytes() if path.stat().st_size <= _MOST_BYTES else b"large"
        except FileNotFoundError:  # deleted, which is a change, too
            content = b"none"
        except OSError as error:
            raise ConfigError(f"{path} can't be read: {error.strerror}; it is a part of the program") from None
        found[str(path.relative_to(folder))] = hashlib.sha256(content).hexdigest()[:_DIGITS]
    return found


def _digest(files: Mapping[str, str]) -> str:
    digest = hashlib.sha256()
    for name, digits in files.items():
        digest.update(os.fsencode(f"{name}\0{digits}\0"))
    return digest.hexdigest()[:_DIGITS]


def _remembered(files: Mapping[str, str]) -> Mapping[str, str]:
    """As a configuration can hold them: names of files may be bytes that are no text."""
    shown = {os.fsencode(name).decode(errors="replace"): digits[:8] for name, digits in files.items()}
    return shown if len(shown) <= _MOST_NAMED else {}
