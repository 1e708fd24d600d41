"""The verb `completion`: what a shell offers at TAB. Loads neither Hydra nor the components: a TAB must not wait."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from launch.known import group_choices, known
from launch.verbs.arguments import command_line_parser

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator, Mapping, Sequence


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


_FOLDERS = ("DIR", "RUN", "FOLDER")
_FILES = ("FILE", "YAML", "CSV", "PATH", "PACKAGE")
"""Placeholders of arguments that are paths."""
_FOLDER_KEYS = ("results", "site.data_dir")
_FILE_KEYS = ("data.files",)
_OF_ONE_CLASS = ("site", "measure", "launcher", "sweep")
"""Groups whose files, also a user's, have the same keys."""


def candidates(words: Sequence[str], current: str) -> list[str]:
    """What may take the place of `current` after these words, which follow the program's name."""
    parser, verbs = command_line_parser()
    if not words:
        found: Iterable[str] = _options_of(parser) if current.startswith("-") else (f"{name} " for name in verbs)
    elif words[0] not in verbs:
        found = ()
    else:
        found = _of_verb(_Typed(verbs[words[0]], words[0], words[1:]), current)
    return [word for word in dict.fromkeys(found) if word.startswith(current)]


@dataclass
class _Typed:
    """A verb, and what has been typed behind it."""

    verb: argparse.ArgumentParser
    name: str
    words: Sequence[str]
    positional: list[str] = field(default_factory=list)
    given: dict[str, str] = field(default_factory=dict)
    """Option → its value."""
    awaits: argparse.Action | None = None
    """The option whose value comes next."""

    def __post_init__(self) -> None:
        for word in self.words:
            name, equals, value = word.partition("=")
            option = self.verb._option_string_actions.get(name)
            if self.awaits is not None:
                self.given[self.awaits.option_strings[-1]] = word
                self.awaits = None
            elif option is not None:
                self.given[option.option_strings[-1]] = value
                self.awaits = option if takes_value(option) and not equals else None
            else:
                self.positional.append(word)

    @property
    def own(self) -> Path | None:
        """The user's own folder of YAML files."""
        folder = Path(self.given.get("--conf", "")).expanduser()
        return folder if self.given.get("--conf") and folder.is_dir() else None

    @property
    def choices(self) -> Mapping[str, Sequence[str]]:
        """Groups, and what one can choose in each."""
        return group_choices(self.own)

    def chosen(self, group: str) -> list[str]:
        """The choices of a group on this line, or else the default; none where any may be meant."""
        for word in self.positional:
            key, _, value = word.partition("=")
            if key == group and value:
                return value.split(",")
        if self.name == "advise" or any(word.startswith(("sweep=", "experiment=")) for word in self.positional):
            return []
        return [known()["chosen"][group]] if group in known()["chosen"] else []


def takes_value(option: argparse.Action) -> bool:
    """Whether a word must follow the option."""
    return option.nargs != 0


def _options_of(verb: argparse.ArgumentParser) -> Iterator[str]:
    return (f"{name} " for name in verb._option_string_actions if name.startswith("--"))


def _of_verb(typed: _Typed, current: str) -> Iterable[str]:
    if typed.awaits is not None:
        return _for_placeholder(typed.awaits, typed, current)
    if current.startswith("--") and "=" in current:
        name, _, value = current.partition("=")
        option = typed.verb._option_string_actions.get(name)
        values = _for_placeholder(option, typed, value) if option is not None and takes_value(option) else ()
        return (f"{name}={word}" for word in values)
    if current.startswith("-"):
        return (option for option in _options_of(typed.verb) if option.rstrip() not in typed.given)
    arguments = [action for action in typed.verb._actions if not action.option_strings]
    place = len(typed.positional)
    if place >= len(arguments):  # the last one may take several words
        arguments = [action for action in arguments[-1:] if action.nargs in ("*", "+")]
    return _for_placeholder(arguments[min(place, len(arguments) - 1)], typed, current) if arguments else ()


def _for_placeholder(action: argparse.Action, typed: _Typed, current: str) -> Iterable[str]:
    """The words for an argument, by what stands for it in the usage."""
    placeholder = str(action.metavar)
    if action.choices is not None:
        return (f"{choice} " for choice in action.choices)
    if placeholder in _FOLDERS or placeholder in _FILES:
        return paths(current, folders_only=placeholder in _FOLDERS)
    if placeholder in ("OVERRIDE", "KEY=A,B", "KEY=VALUE"):
        return _overrides(typed, current)
    if placeholder in ("KEY", "KEY,…"):
        return _listed((f"{key.rstrip('=')} " for key in [*typed.choices, *known()["keys"]]), current)
    return _listed((f"{word} " for word in known()["words"].get(placeholder, ())), current)


def _overrides(typed: _Typed, current: str) -> Iterable[str]:
    key, equals, value = current.partition("=")
    if not equals:
        return _one_level(_keys(typed, current), current)
    if key in _FOLDER_KEYS or key in _FILE_KEYS:
        return (f"{key}={path}" for path in paths(value, folders_only=key in _FOLDER_KEYS))
    values = typed.choices.get(key) or known()["keys"].get(key, {}).get("values", ())
    return (f"{key}={word}" for word in _listed((f"{each} " for each in values), value))


def _keys(typed: _Typed, current: str) -> Iterator[str]:
    """The keys of a run, those of a group as its chosen files have them."""
    yield from typed.choices
    group = current.partition(".")[0]
    chosen = typed.chosen(group)
    for key, about in known()["keys"].items():
        of_others = key.partition(".")[0] == group and about["of"] and not {*chosen} & {*about["of"]}
        own_file = group in _OF_ONE_CLASS and not {*chosen} <= {*group_choices()[group]}
        if not (chosen and of_others) or own_file:
            yield key
    if group in typed.choices:
        for name in chosen:
            yield from own_keys(group, name, typed.own)


def _one_level(keys: Iterable[str], current: str) -> Iterator[str]:
    """Keys up to their next dot, so that one group's keys do not fill the screen."""
    for key in keys:
        if key.startswith(current):
            level, dot, _ = key[len(current) :].partition(".")
            yield f"{current}{level}{dot or '='}"


def _listed(words: Iterable[str], current: str) -> Iterator[str]:
    """Words of a list whose earlier values are typed already: `ddp,fs` gives `ddp,fsdp`."""
    before, comma, _ = current.rpartition(",")
    typed = before.split(",")
    return (f"{before}{comma}{word}" for word in words if word.rstrip() not in typed)


def own_keys(group: str, name: str, own: Path | None) -> list[str]:
    """The keys that a user's file of a choice sets; none where it can't be read."""
    file = own / group / f"{name}.yaml" if own else None
    if file is None or not file.is_file():
        return []
    from parallelbench.config.build import load_yaml  # takes longer than all the rest

    try:
        content = load_yaml(file.read_bytes())
    except (OSError, ValueError):
        return []
    return [f"{group}.{key}" for key in content if key not in ("_target_", "defaults", "name")]


def paths(current: str, *, folders_only: bool) -> Iterator[str]:
    """Files and folders that begin like this; folders end with a slash, files with a space."""
    above, slash, beginning = current.rpartition("/")
    try:
        entries = sorted(os.scandir(os.path.expanduser(above + slash) or "."), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        hidden = entry.name.startswith(".") and not beginning.startswith(".")
        if entry.name.startswith(beginning) and not hidden and entry.name.isprintable():
            if entry.is_dir():
                yield f"{above}{slash}{entry.name}/"
            elif not folders_only:
                yield f"{above}{slash}{entry.name} "


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
