"""The verb `completion`: a shell's script, and what the script asks for at each TAB."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from launch.completion.candidates import candidates
from launch.completion.shell_words import escaped, read_line, written_in_bash

if TYPE_CHECKING:
    from collections.abc import Sequence


def complete(shell: str, words: Sequence[str] | None) -> int:
    """Print the script of a shell, or, with words, what may stand at the cursor, one per line.

    For bash the words are the line up to the cursor, and the characters of COMP_WORDBREAKS; for the others the words
    behind the program's name, the one at the cursor last.
    """
    if words is None:
        print(Path(__file__).with_name("scripts").joinpath(shell).read_text(encoding="utf-8"), end="")
        return 0
    for candidate in _found(shell, [*words, "", ""] if shell == "bash" else [*words] or [""]):
        print(candidate)
    return 0


def _found(shell: str, words: Sequence[str]) -> list[str]:
    if shell == "bash":
        line = read_line(words[0], words[1])
        return [written_in_bash(word, line) for word in candidates(line.words[1:], line.current)] if line.words else []
    found = candidates(words[:-1], words[-1])
    if shell == "zsh" and words[-1].startswith("~"):
        return [escaped(word.rstrip(), at_start=True) + " " * word.endswith(" ") for word in found]
    return found
