"""What stands on a shell's line before the cursor, and how a word is written there."""

from __future__ import annotations

from dataclasses import dataclass, field

_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_@%+=:,./-")
"""Characters that no shell gives a meaning to, wherever they stand."""


@dataclass
class ShellLine:
    """A line of bash, read up to the cursor."""

    words: list[str] = field(default_factory=list)
    """The words before the one at the cursor, without their quotes."""
    current: str = ""
    """What there is of the word at the cursor."""
    kept: int = 0
    """How many characters of `current` bash leaves as they are: up to a word break, such as =, or an opening quote."""
    quote: str = ""
    """The quote that is open at the cursor."""


def read_line(line: str, breaks: str) -> ShellLine:
    """Read a line of bash; `breaks` are the characters of COMP_WORDBREAKS."""
    read, started, before_quote = ShellLine(), False, 0
    letters = iter(line)
    for letter in letters:
        if read.quote:
            if letter == read.quote:
                read.quote, read.kept = "", before_quote
            elif letter == "\\" and read.quote == '"':
                following = next(letters, "")
                read.current += following if following in '$`"\\' else f"\\{following}"
            else:
                read.current += letter
        elif letter in "'\"":
            read.quote, before_quote, read.kept = letter, read.kept, len(read.current)
            started = True
        elif letter.isspace():
            if started:
                read.words.append(read.current)
            read.current, read.kept, started = "", 0, False
        else:
            read.current += next(letters, "") if letter == "\\" else letter
            read.kept = len(read.current) if letter in breaks and letter != "\\" else read.kept
            started = True
    return read


def written_in_bash(word: str, line: ShellLine) -> str:
    """What takes the place of the part of the current word that bash replaces."""
    text, space = (word[:-1], " ") if word.endswith(" ") else (word, "")
    text = text[line.kept :]
    if line.quote:
        return text if line.quote == "'" else "".join(f"\\{c}" if c in '$`"\\' else c for c in text)
    return escaped(text, at_start=line.kept == 0) + space


def escaped(text: str, *, at_start: bool) -> str:
    """The text with a backslash before what a shell would read otherwise; a first ~/ stays a home."""
    home = "~" if at_start and text.startswith("~/") else ""
    return home + "".join(c if c in _PLAIN or not c.isascii() else f"\\{c}" for c in text[len(home) :])
