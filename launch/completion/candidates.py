"""The words that may stand where the cursor is. A space at a word's end says that it is complete."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from launch.completion.known_words import choices_of, groups, known, own_keys, paths
from launch.verbs.arguments import command_line_parser

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator, Sequence

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
        given = self.given.get("--conf")
        return Path(given).expanduser() if given else None

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
    if placeholder == "OVERRIDE" or placeholder == "KEY=A,B":
        return _overrides(typed, current)
    if placeholder in ("KEY", "KEY,…"):
        return _listed((f"{key.rstrip('=')} " for key in [*groups(typed.own), *known()["keys"]]), current)
    return _listed((f"{word} " for word in known()["words"].get(placeholder, ())), current)


def _overrides(typed: _Typed, current: str) -> Iterable[str]:
    key, equals, value = current.partition("=")
    if not equals:
        return _one_level(_keys(typed, current), current)
    if key in _FOLDER_KEYS or key in _FILE_KEYS:
        return (f"{key}={path}" for path in paths(value, folders_only=key in _FOLDER_KEYS))
    values = choices_of(key, typed.own) if key in groups(typed.own) else known()["keys"].get(key, {}).get("values", ())
    return (f"{key}={word}" for word in _listed((f"{each} " for each in values), value))


def _keys(typed: _Typed, current: str) -> Iterator[str]:
    """The keys of a run, those of a group as its chosen files have them."""
    names = groups(typed.own)
    yield from names
    group = current.partition(".")[0]
    chosen = typed.chosen(group)
    for key, about in known()["keys"].items():
        of_others = key.partition(".")[0] == group and about["of"] and not {*chosen} & {*about["of"]}
        own_file = group in _OF_ONE_CLASS and not {*chosen} <= {*choices_of(group, None)}
        if not (chosen and of_others) or own_file:
            yield key
    if group in names:
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
