"""Commands of programs that can't be started, told before anything starts, as far as that is known here."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from itertools import pairwise
from typing import TYPE_CHECKING

from parallelbench.config.sites import LocalLauncher
from parallelbench.errors import ConfigError
from parallelbench.frameworks.program import PLACES, filled, numbers
from parallelbench.frameworks.program.child import path_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from parallelbench.config.run import RunConfig
    from parallelbench.frameworks.program import Program

_OF_SHELL = {
    *("alias", "bg", "bind", "break", "builtin", "caller", "cd", "command", "continue", "coproc", "declare", "dirs"),
    *("disown", "echo", "enable", "eval", "exec", "exit", "export", "false", "fc", "fg", "getopts", "hash", "help"),
    *("history", "jobs", "kill", "let", "local", "logout", "mapfile", "popd", "printf", "pushd", "pwd", "read"),
    *("readarray", "readonly", "return", "set", "shift", "shopt", "source", "suspend", "test", "time", "times", "trap"),
    *("true", "type", "typeset", "ulimit", "umask", "unalias", "unset", "wait", "case", "for", "function", "if"),
    *("select", "until", "while", ".", ":", "[", "[[", "!", "{"),
}
"""Words that bash knows itself."""
_HARMLESS = ("source", ".", "module", "ml", "export", "unset", "ulimit", "umask", "conda", "mamba", "micromamba", "set")
"""First words of set-up lines that change the environment, and neither the folder nor its files."""
_STARTS_SCRIPTS = re.compile(r"python\d*(\.\d+)?|torchrun|deepspeed|accelerate|bash|sh")
_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
"""Those that start a script."""


def require_command(run: RunConfig, variables: Mapping[str, str]) -> None:
    """Raise `ConfigError` where the command's first word, or the script that it names, is not there.

    `variables`: of the shell that asks. What the shell would still expand, and what set-up lines or containers bring,
    is not looked at.
    """
    program: Program = run.strategy  # type: ignore[assignment]
    text = filled(program.command, numbers(run) | dict.fromkeys(set(PLACES) - numbers(run).keys(), "0"), key="command")
    words = _words(text)
    if not words or words[0] in _OF_SHELL:
        return
    first, folder = words[0], program.working_folder
    kept = all(line.split()[:1] and line.split()[0] in _HARMLESS and ";" not in line for line in program.setup)
    if "/" in first:
        if (kept or os.path.isabs(first)) and not os.access(folder / first, os.X_OK):
            raise ConfigError(f"program.command begins with {first}, which is no program{_within(first, folder)}")
    elif (
        not program.setup
        and isinstance(run.launcher, LocalLauncher)
        and not shutil.which(first, path=path_of(variables))
    ):
        raise ConfigError(
            f"program.command begins with {first}, which is not on PATH: name it by its path, or let program.setup "
            "bring it (source venv/bin/activate)"
        )
    script = _script(words)
    if script is not None and (kept or os.path.isabs(script)) and not (folder / script).exists():
        raise ConfigError(
            f"program.command starts {script}, which is no file{_within(script, folder)}: program.folder says where "
            "the command runs"
        )


def _within(name: str, folder: Path) -> str:
    return "" if os.path.isabs(name) else f" in {folder}"


def _words(text: str) -> list[str]:
    """A simple command's words without the variables before them; none of what only a shell can tell."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        words = list(lexer)
    except ValueError:  # a quote that is not closed, as in a here-document
        return []
    if "\n" in text.strip() or any(set(word) & set("$`*?~") or set(word) <= set("();<>|&") for word in words):
        return []
    while words and re.match(r"[A-Za-z_]\w*=", words[0]):
        del words[0]
    return words


def _script(words: Sequence[str]) -> str | None:
    """The file that an interpreter or launcher is to start, where it is plainly one."""
    if not _STARTS_SCRIPTS.fullmatch(os.path.basename(words[0])):
        return None
    for before, word in pairwise(words):
        if word in ("-c", "--no-python", "--no_python") or (before == "-m" and word not in _MODULES):
            return None
        if before != "-m" and not word.startswith("-") and word.endswith((".py", ".sh")) and not re.search(r"\s", word):
            return word
    return None
