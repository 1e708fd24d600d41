"""What git says of a folder."""

from __future__ import annotations

import os
import re
import subprocess
from typing import TYPE_CHECKING

from parallelbench.redaction import redacted

if TYPE_CHECKING:
    from pathlib import Path

_ANSWERS_S = 20
"""How long git may take to answer."""


class GitError(Exception):
    """Why git does not say what it was asked."""


def said(folder: Path, *asked: str) -> str:
    """What git says of the repository that a folder is in, whichever one the user's shell points git at."""
    # A container's user is often not the owner of the checkout, whose code this process runs all the same.
    # The user's own git may hold the index at this moment, and must not find it locked by this.
    command = ["git", "--no-optional-locks", "-C", str(folder), "-c", f"safe.directory={folder}", *asked]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    variables |= {name: value for name, value in os.environ.items() if name.startswith(_NO_CHOICE)} | {"LC_ALL": "C"}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",  # names of files are bytes
            timeout=_ANSWERS_S,
            env=variables,
            check=False,
        )
    except FileNotFoundError:
        raise GitError("git is not installed") from None
    except (OSError, subprocess.SubprocessError) as error:
        raise GitError(f"git {asked[0]}: {type(error).__name__}") from None
    if done.returncode:
        said = [*done.stderr.strip().splitlines(), f"git {asked[0]}: code {done.returncode}"][0]
        raise GitError(redacted(_PLACE.sub("…/", said)))
    return done.stdout.rstrip("\n")  # a line of `status` may begin with a space


_NO_CHOICE = ("GIT_CONFIG", "GIT_EXEC_PATH")
"""The only variables of git's that choose no repository, nor a part of one, as those do that hooks and prompts set."""
_PLACE = re.compile(r"/[^\s']*/")
