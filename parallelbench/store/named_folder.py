"""Folders that a user named: refused where they are none, a part of a run, or without runs. Never imports torch."""

from __future__ import annotations

import os
from collections import deque
from contextlib import suppress
from pathlib import Path

from parallelbench.errors import ConfigError, no_permission
from parallelbench.store.folder import subfolders
from parallelbench.store.reading import read_record

_LOOKED_THROUGH = 1000
"""Folders that are searched for a better message."""
_FOLDERS = "name a results folder, a sweep's folder, or a run's"
_DEPTH_IN_RUN = 2
"""A run's folder holds attempts/<n>, and nothing deeper that is a folder of its own."""


_OF_THE_KERNEL = (Path("/proc"), Path("/sys"))
"""Folders whose files are made up as they are read: what looks like a folder without permission there is none."""


def require_folder(path: Path) -> None:
    """Raise `ConfigError` where there is no such folder, no permission to read it, or it is a part of a run's."""
    if any(path.absolute().is_relative_to(folder) for folder in _OF_THE_KERNEL):
        raise ConfigError(f"{path} is the kernel's and holds no runs: {_FOLDERS}")
    try:
        os.scandir(path).close()
        os.stat(f"{path}/.")  # to list a folder is one permission, to enter it is another
    except PermissionError as error:
        raise ConfigError(no_permission(error)) from None
    except OSError:
        raise ConfigError(f"{path} is no folder: {_FOLDERS}") from None
    for parent in path.absolute().parents[:_DEPTH_IN_RUN]:
        if (parent / "attempts").is_dir() and is_configuration_of_run(parent):
            raise ConfigError(f"{path} is a part of a run's folder: name {parent}")


def is_configuration_of_run(folder: Path | str) -> bool:
    """Whether the `config.yaml` of a folder is that of a run, as far as a glance tells."""
    try:
        return b"sweep_name:" in read_record(f"{folder}/config.yaml")
    except OSError:
        return False


def no_runs(root: Path) -> str:
    """That a folder holds no runs, and the remedy: the sweep's folder that lies deeper, if there is one."""
    return f"{root} holds no runs: {instead_of(root)}"


def instead_of(root: Path) -> str:
    """What to name, or to run, instead of a folder without runs."""
    waiting = deque([str(root)])
    for _ in range(_LOOKED_THROUGH):
        if not waiting:
            break
        folder = waiting.popleft()
        with suppress(PermissionError):
            for below in subfolders(folder):
                if not is_configuration_of_run(below):
                    waiting.append(below)
                elif folder != str(root):
                    return f"runs lie deeper: name {folder}"
    return f"{_FOLDERS}, or start runs first, e.g. parallelbench submit sweep=demo"
