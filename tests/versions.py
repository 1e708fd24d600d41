"""Another version of the program: a copy of its package, with a schema version of its own."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import parallelbench


def other_version(folder: Path, version: int) -> dict[str, str]:
    """Write or change the copy in a folder; returns the environment in which every Python process imports it."""
    copy = folder / "parallelbench"
    shutil.copytree(Path(parallelbench.__path__[0]), copy, dirs_exist_ok=True)
    config = copy / "config.py"
    text, found = re.subn(r"^SCHEMA_VERSION = \d+$", f"SCHEMA_VERSION = {version}", config.read_text(), flags=re.M)
    assert found == 1
    config.write_text(text)
    shutil.rmtree(copy / "__pycache__", ignore_errors=True)  # compiled within the same second, it may pass for current
    return {"PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}
