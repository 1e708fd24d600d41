"""The archive of a bundle: written with the sha256 of every file, and unpacked only where all of them hold."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import shutil
import tarfile
import uuid
import zlib
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from parallelbench.errors import ConfigError, no_permission, one_line
from parallelbench.results.files import storage_errors
from parallelbench.results.folder import file_sha256

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

SUMS = "SHA256SUMS"
"""The file with the others' sha256, as `sha256sum -c` reads it."""
SUFFIX = ".tar.gz"
_PLAIN = (tarfile.REGTYPE, tarfile.AREGTYPE)
_UNREADABLE = (tarfile.TarError, EOFError, OSError, zlib.error)


def write(path: Path, files: Mapping[str, Path | bytes]) -> str:
    """Write an archive of these files, in a folder of its own name; returns its sha256.

    The same files make the same bytes, whenever and by whomever they are packed. It appears whole, or not at all.
    """
    sums = "".join(f"{_sha256(files[name])}  {name}\n" for name in sorted(files))
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    with storage_errors(path, option="--out FILE"):
        try:
            with (
                temporary.open("xb") as file,
                gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as packed,
                tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
            ):
                for name in (SUMS, *sorted(files)):
                    content = sums.encode() if name == SUMS else files[name]
                    _add(archive, f"{path.name.removesuffix(SUFFIX)}/{name}", content)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    return file_sha256(path)


def _sha256(content: Path | bytes) -> str:
    return hashlib.sha256(content).hexdigest() if isinstance(content, bytes) else file_sha256(content)


def _add(archive: tarfile.TarFile, name: str, content: Path | bytes) -> None:
    member = tarfile.TarInfo(name)
    member.mode = 0o644
    with io.BytesIO(content) if isinstance(content, bytes) else content.open("rb") as file:
        member.size = file.seek(0, os.SEEK_END)
        file.seek(0)
        archive.addfile(member, file)


def unpack(path: Path, into: Path) -> Path:
    """Unpack a bundle into an empty folder; returns the folder of its files.

    Raises `ConfigError` that names the file where the archive is damaged, holds what would lie outside of that folder,
    or holds other files than its sums, or files with other contents.
    """
    with _opened(path) as archive:
        members = archive.getmembers()
        top = _require_harmless(path, members, free=shutil.disk_usage(into).free)
        with storage_errors(into, option="TMPDIR=DIR"):
            for member in members:
                target = into / member.name
                target.parent.mkdir(parents=True, exist_ok=True)
                with archive.extractfile(member) as content, target.open("wb") as file:  # type: ignore[union-attr]
                    shutil.copyfileobj(content, file)
    _require_sums(path, into / top, {member.name.removeprefix(f"{top}/") for member in members} - {SUMS})
    return into / top


@contextmanager
def _opened(path: Path) -> Iterator[tarfile.TarFile]:
    if not path.is_file():
        raise ConfigError(f"{path} is no file: name a bundle, as `parallelbench bundle DIR` writes it")
    try:
        with tarfile.open(path, "r:gz") as archive:
            yield archive
    except PermissionError as error:
        raise ConfigError(no_permission(error)) from None
    except _UNREADABLE as error:
        what = one_line(str(error)) or type(error).__name__
        raise ConfigError(f"{path} is no bundle, or damaged ({what}): get it again") from None


def _require_harmless(path: Path, members: Sequence[tarfile.TarInfo], *, free: int) -> str:
    """Refuse what no bundle holds: links, devices, names that lead elsewhere or occur twice; returns the top folder."""
    seen: set[str] = set()
    for member in members:
        parts = PurePosixPath(member.name).parts
        if member.type not in _PLAIN:
            raise _refused(path, member.name, "is no plain file")
        if ".." in parts or len(parts) < 2 or member.name != "/".join(parts) or "\\" in member.name:
            raise _refused(path, member.name, "would be unpacked elsewhere")
        if member.name in seen:
            raise _refused(path, member.name, "is there twice")
        seen.add(member.name)
    for name in sorted(seen):
        if any(str(folder) in seen for folder in PurePosixPath(name).parents):
            raise _refused(path, name, "lies in what is a file there")
    tops = {name.partition("/")[0] for name in seen}
    if len(tops) != 1:
        raise ConfigError(f"{path} is no bundle: it holds {len(tops)} folders, and a bundle holds one")
    if (size := sum(member.size for member in members)) > free:
        raise ConfigError(f"{path} takes {size:,} bytes unpacked, and {free:,} are free: set TMPDIR to a larger disk")
    return tops.pop()


def _require_sums(path: Path, root: Path, names: set[str]) -> None:
    listed = _sums(path, root)
    for name in sorted(names | listed.keys()):
        if name not in listed:
            raise _refused(path, name, f"is not in {SUMS}")
        if name not in names:
            raise _refused(path, name, f"is missing, and in {SUMS}")
        if file_sha256(root / name) != listed[name]:
            raise _refused(path, name, f"has another sha256 than {SUMS} says")


def _sums(path: Path, root: Path) -> dict[str, str]:
    try:
        lines = (root / SUMS).read_text(encoding="utf-8").splitlines()
        return {name: checksum for checksum, name in (line.split("  ", 1) for line in lines)}
    except (OSError, ValueError):
        raise ConfigError(f"{path} is no bundle: {SUMS} is missing or unreadable") from None


def _refused(path: Path, name: str, why: str) -> ConfigError:
    return ConfigError(f"{path} was tampered with, or damaged: {name} {why}; get it again from where it was published")
