"""A user's own package: which one a run's classes come from, and which sources it has."""

from __future__ import annotations

import hashlib
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from parallelbench.config.build import COMPONENTS, packages_of
from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

    from parallelbench.config.run import RunConfig


_DIGITS = 16


def plugin_of(run: RunConfig) -> list[str]:
    """The package outside the suite that the run's classes come from, and the folder it is in; empty: none."""
    package = training_plugin(run)
    if package is None:
        return []
    folder = folders(package)[0]
    return [package, str(folder.parent if _is_package(package) else folder)]


def training_plugin(run: RunConfig) -> str | None:
    """The package outside the suite whose classes train; None where there is none."""
    packages = set().union(*(packages_of(getattr(run, key)) for key in COMPONENTS)) - {"parallelbench"}
    if not packages:
        return None
    (package,) = packages
    return package


def folders(package: str) -> list[Path]:
    """Where an imported package's modules are; of a single module, the folder that it is in."""
    module = sys.modules[package]
    if _is_package(package):
        return [Path(path).absolute() for path in module.__path__]
    return [Path(str(module.__file__)).absolute().parent]


def package_path(package: str) -> Path:
    """What `--plugin` may name instead of an imported package: its folder, or the file of a single module."""
    return folders(package)[0] if _is_package(package) else Path(str(sys.modules[package].__file__)).absolute()


def _is_package(package: str) -> bool:
    return hasattr(sys.modules[package], "__path__")


def source_files(package: str) -> Iterator[tuple[str, Path]]:
    """The .py files of an imported package, without hidden ones: sorted path within the package, and path."""
    if not _is_package(package):
        path = Path(str(sys.modules[package].__file__)).absolute()
        yield path.name, path
        return
    for folder in folders(package):
        names = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.py") if path.is_file()}
        yield from sorted(item for item in names.items() if not any(p.startswith(".") for p in item[0].split("/")))


def sources_now(package: str) -> str:
    """`package@digits`: the first digits of the sha256 of all its `source_files`, names and contents, as they are now.

    Raises `ConfigError` where a file can't be read.
    """
    digest = hashlib.sha256()
    for name, path in source_files(package):
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{path} can't be read: {error.strerror}; it is a part of {package}") from None
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return f"{package}@{digest.hexdigest()[:_DIGITS]}"


def imported_sources(package: str) -> str:
    """The same as they were when this process first asked, which is right after the import."""
    return _first_seen(sys.modules[package])


@cache
def _first_seen(module: ModuleType) -> str:
    return sources_now(module.__name__)


def require_sources(run: RunConfig) -> None:
    """Raise `ConfigError` where a plugin's files are others than those that the run was asked for with."""
    package, asked = training_plugin(run), run.plugin_sources
    if package is not None and asked and (found := sources_now(package)) != asked:
        raise ConfigError(
            f"{package} has changed since this run was asked for ({asked} then, {found} now): submit again, which "
            "makes a new run"
        )
