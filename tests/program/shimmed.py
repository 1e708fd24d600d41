"""Starts programs as the suite starts those of users: with the shim on PYTHONPATH."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from parallelbench.frameworks import program

SHIM = Path(program.__file__).parent / "shim"


def environment(folder: Path, **variables: str) -> dict[str, str]:
    """The test's own, and what the shim needs to keep its journals in a folder."""
    return {
        **os.environ,
        "PYTHONPATH": str(SHIM),
        "PARALLELBENCH_STEPS": str(folder),
        "OMP_NUM_THREADS": "1",
        **variables,
    }


def run(
    script: Path | str, *arguments: str, folder: Path, options: tuple[str, ...] = (), **variables: str
) -> subprocess.CompletedProcess[str]:
    """A program's output and exit code; `script` is a file, or its text."""
    command = [str(script)] if isinstance(script, Path) else ["-c", script]
    return subprocess.run(
        [sys.executable, *options, *command, *arguments],
        env=environment(folder, **variables),
        capture_output=True,
        text=True,
        check=False,
    )
