"""A user's own configuration files and classes, as the command line names them."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

from launch.sweep.compose import Extension, group_choices
from parallelbench.errors import ConfigError


def extension(conf: str | None, plugin: str | None) -> Extension:
    """Check what `--conf` and `--plugin` name; a package that is named by its path becomes importable."""
    folder = Path(conf).expanduser().absolute() if conf else None
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"--conf {conf} is no folder: name one that holds strategy/mine.yaml, say")
    if folder is not None and not set(group_choices(folder)) <= set(group_choices()):
        foreign = sorted(set(group_choices(folder)) - set(group_choices()))
        raise ConfigError(
            f"--conf {conf} holds {', '.join(foreign)}, which are no groups: {', '.join(group_choices())}"
        )
    return Extension(folder, _package(plugin) if plugin else None)


def _package(plugin: str) -> str:
    path = Path(plugin).expanduser().absolute()
    name = path.stem if path.exists() else plugin
    if not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise ConfigError(f"--plugin {plugin} is neither a package's name nor its path")
    if path.exists():
        sys.path.append(str(path.parent))  # last, so that nothing there shadows anything
    found = importlib.util.find_spec(name)
    if found is None or (path.exists() and not _is_at(found.origin, path)):
        raise ConfigError(f"--plugin {plugin}: no package {name} can be imported from there; give it a name of its own")
    return name


def _is_at(origin: str | None, path: Path) -> bool:
    return origin is not None and Path(origin).resolve() in (path.resolve(), (path / "__init__.py").resolve())
