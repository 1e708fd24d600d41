"""The first program of a Slurm job, `python -m parallelbench.entry launch.slurm.start FOLDER` on its first node.

It lets submitit load the pickle in a submission's folder, which executes it. Others who may write to a folder above
could have replaced it since the submission, so its owner is checked now.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from launch.slurm import record
from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str]) -> int:
    """Carry out the submission in a folder, if the folder is the user's own; 1 if not."""
    try:
        folder = held(Path(arguments[0]))
    except (OSError, ConfigError) as error:
        print(f"not started: {error}", file=sys.stderr)
        return 1
    from submitit.core.submission import process_job

    process_job(folder)
    return 0


def held(folder: Path) -> Path:
    """A path to the folder that was checked, even if it is replaced later; raises `ConfigError`, `OSError`."""
    record.require_own(folder)  # names the folder in its message
    opened = Path(f"/proc/self/fd/{os.open(folder, os.O_RDONLY | os.O_DIRECTORY)}")
    record.require_own(opened)
    return opened


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
