"""The verbs' output, and the folders they are given."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from parallelbench.results.folder import require_folder

WIDTH = 160
"""Columns of output that goes to no terminal, which rich would cut to 80."""


def console() -> Console:
    """Standard output."""
    return Console() if sys.stdout.isatty() else Console(width=WIDTH)


def say(text: str) -> None:
    """Print a line as it is."""
    console().print(text, highlight=False, markup=False, soft_wrap=True)


def existing(folder: str) -> Path:
    """The folder that was named; raises `ConfigError` where there is none, or it may not be read."""
    path = Path(folder).expanduser()
    require_folder(path)
    return path
