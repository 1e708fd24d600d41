"""The candidates that a shell offers at TAB: argcomplete reads the line and quotes, this module knows the words.

Loads neither Hydra nor the components: a TAB must not wait.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from argcomplete.completers import BaseCompleter
from argcomplete.finders import ExclusiveCompletionFinder
from argcomplete.lexers import split_line

from launch.known import group_choices, known
from launch.verbs.arguments import command_line_parser

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator, Sequence


def answer() -> None:
    """Write the candidates for the line in `COMP_LINE` to the shell that asks, and end this process."""
    _Finder()(command_line_parser()[0], always_complete_options=False, default_completer=_Words())


class _Finder(ExclusiveCompletionFinder):
    """Offers overrides after an option, too: `argparse` takes positional arguments once, before it."""

    def collect_completions(
        self, active_parsers: list[argparse.ArgumentParser], parsed_args: argparse.Namespace, cword_prefix: str
    ) -> list[str]:
        verb: Any = active_parsers[-1]  # to which argcomplete has added what may come next
        if not verb.active_actions:
            verb.active_actions = [action for action in verb._actions if action.dest == "overrides"]
        return super().collect_completions(active_parsers, parsed_args, cword_prefix)


_FOLDERS = ("DIR", "RUN")
_FILES = ("FILE", "YAML", "PATH", "PACKAGE", "BUNDLE")
_OVERRIDES = ("OVERRIDE", "KEY=A,B", "KEY=VALUE")
_KEYS = ("KEY", "KEY,…")
"""Placeholders of the arguments in the usage."""
_FOLDER_KEYS = ("results", "site.data_dir")
_FILE_KEYS = ("data.files",)
_OF_ONE_CLASS = ("site", "measure", "launcher", "sweep")
"""Groups whose files, also a user's, have the same keys."""


class _Words(BaseCompleter):
    """The words for an argument, by its placeholder."""

    def __call__(
        self, *, prefix: str, action: argparse.Action, parser: argparse.ArgumentParser, parsed_args: argparse.Namespace
    ) -> Iterable[str]:
        placeholder = str(action.metavar)
        if placeholder in _FOLDERS or placeholder in _FILES:
            return _paths(prefix, folders_only=placeholder in _FOLDERS)
        conf = Path(getattr(parsed_args, "conf", None) or os.devnull).expanduser()
        own = conf if conf.is_dir() else None
        if placeholder in _OVERRIDES:
            return _overrides(prefix, own, any_choice=parsed_args.verb == "advise")
        if placeholder in _KEYS:
            return _listed([*group_choices(own), *known()["keys"]], prefix)
        return _listed(known()["words"].get(placeholder, ()), prefix)


def _overrides(prefix: str, own: Path | None, *, any_choice: bool) -> Iterable[str]:
    """Overrides that begin like this; `own` is the user's folder of YAML files; `any_choice`: there is no default."""
    key, equals, value = prefix.partition("=")
    choices = group_choices(own)
    if not equals:
        group = key.partition(".")[0]
        chosen = _chosen(group, any_choice=any_choice) if group in choices else []
        return _one_level([f"{each}=" for each in (*choices, *keys(group, chosen, own))], prefix)
    if key in _FOLDER_KEYS or key in _FILE_KEYS:
        return (f"{key}={path}" for path in _paths(value, folders_only=key in _FOLDER_KEYS))
    values = choices.get(key) or known()["keys"].get(key, {}).get("values", ())
    return (f"{key}={each}" for each in _listed(values, value))


def _chosen(group: str, *, any_choice: bool) -> list[str]:
    """The choices of a group on this line, or else the default; none where any may be meant."""
    words = split_line(os.environ["COMP_LINE"], int(os.environ["COMP_POINT"]))[3]
    for word in words:
        key, _, value = word.partition("=")
        if key == group and value:
            return value.split(",")
    if any_choice or any(word.startswith(("sweep=", "experiment=")) for word in words):
        return []
    return [known()["chosen"][group]] if group in known()["chosen"] else []


def keys(group: str, chosen: Sequence[str], own: Path | None) -> Iterator[str]:
    """The keys of a run; of `group` those that these files of it have, or, without any, those of all its files."""
    own_file = group in _OF_ONE_CLASS and not {*chosen} <= {*group_choices()[group]}
    for key, about in known()["keys"].items():
        of_others = key.startswith(f"{group}.") and about["of"] and not {*chosen} & {*about["of"]}
        if not chosen or not of_others or own_file:
            yield key
    for name in chosen:
        yield from _own_keys(group, name, own)


def _own_keys(group: str, name: str, own: Path | None) -> list[str]:
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


def _one_level(keys: Sequence[str], prefix: str) -> list[str]:
    """Keys up to their next dot, so that a group's keys do not fill the screen; on from it where there is one only."""
    below = [key for key in keys if key.startswith(prefix)]
    levels = {prefix + "".join(key[len(prefix) :].partition(".")[:2]) for key in below}
    if len(levels) == 1 and (level := next(iter(levels))).endswith("."):  # which shells would put a space after
        return _one_level(below, level)
    return sorted(levels)


def _listed(words: Iterable[str], prefix: str) -> Iterator[str]:
    """Words of a list whose earlier values are typed already: `ddp,fs` gives `ddp,fsdp`."""
    before, comma, _ = prefix.rpartition(",")
    typed = before.split(",")
    return (f"{before}{comma}{word}" for word in words if word not in typed)


def _paths(prefix: str, *, folders_only: bool) -> Iterator[str]:
    """Files and folders that begin like this; folders end with a slash."""
    above, slash, beginning = prefix.rpartition("/")
    try:
        entries = sorted(os.scandir(os.path.expanduser(above + slash) or "."), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        hidden = entry.name.startswith(".") and not beginning.startswith(".")
        offered = entry.name.startswith(beginning) and not hidden and entry.name.isprintable()
        if offered and (entry.is_dir() or not folders_only):
            yield f"{above}{slash}{entry.name}{'/' * entry.is_dir()}"
