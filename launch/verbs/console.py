"""The verbs' output, and the folders they are given."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from parallelbench.store.folder import require_folder


def console() -> Console:
    """Standard output."""
    # Piped output is not cut to the 80 columns that rich assumes without a terminal.
    return Console() if sys.stdout.isatty() else Console(width=160)


def say(text: str) -> None:
    """Print a line as it is."""
    console().print(text, highlight=False, markup=False, soft_wrap=True)


def existing(folder: str) -> Path:
    """The folder that was named; raises `ConfigError` where there is none, or it may not be read."""
    path = Path(folder).expanduser()
    require_folder(path)
    return path
