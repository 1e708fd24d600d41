"""Another version of the program: a copy of its package, with versions of its own."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import parallelbench

FILES = {"CONFIGURATION_VERSION": "config/identity.py", "TABLES_VERSION": "results/tables.py"}


def other_version(folder: Path, **versions: int) -> dict[str, str]:
    """Write or change the copy in a folder; returns the environment in which every Python process imports it.

    `versions` are those of `FILES`, by name.
    """
    copy = folder / "parallelbench"
    shutil.copytree(Path(parallelbench.__path__[0]), copy, dirs_exist_ok=True)
    for name, version in versions.items():
        file = copy / FILES[name]
        text, found = re.subn(rf"^{name} = \d+$", f"{name} = {version}", file.read_text(), flags=re.M)
        assert found == 1
        file.write_text(text)
        # Compiled within the same second, it may pass for current.
        shutil.rmtree(file.parent / "__pycache__", ignore_errors=True)
    others = Path(parallelbench.__path__[0]).parent  # launch and analysis
    return {"PYTHONPATH": f"{folder}{os.pathsep}{others}", "PYTHONSAFEPATH": "1"}
