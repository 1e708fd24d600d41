"""`program='torchrun … train.py {flags}'` and `flags=--ddp,--fsdp` as overrides of files and keys."""

from __future__ import annotations

import re
import shlex
from itertools import pairwise
from pathlib import PurePath
from typing import TYPE_CHECKING

from launch.known import group_choices, known
from parallelbench.config.sites import shipped
from parallelbench.errors import ConfigError, Refusals
from parallelbench.frameworks.program import NOT_KEYS, NOT_MEASURED, named

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


GROUP, FREE = "program", "command"
"""The group of files, and the one whose command the command line gives."""
_AMOUNTS = tuple(f"{GROUP}.{each}" for each in ("samples_per_step", "tokens_per_step"))
_PATTERNS = tuple(f"{GROUP}.{each}_pattern" for each in ("step", "loss", "rate"))
"""Keys of text that means something to Hydra, and is one value."""
_SPLIT = re.compile(r"([+~]*)([^=]*)=(.*)", re.DOTALL)
_NOT_KEYS = (*NOT_KEYS, "model", "strategy", *(f"measure.{option}" for option in NOT_MEASURED))


def translated(overrides: Sequence[str], conf: Path | None = None) -> list[str]:
    """The overrides as files and keys; without a program, as they are.

    Raises `ConfigError` for keys that mean nothing to a program.
    """
    # Hydra adds with a plus what is there already.
    overrides = [text.lstrip("+") if text.lstrip("+").startswith(f"{GROUP}=") else text for text in overrides]
    chosen = [text.partition("=")[2] for text in overrides if text.startswith(f"{GROUP}=")]
    if not chosen:
        return list(overrides)
    if len(chosen) > 1:
        raise ConfigError(f"program= is given {len(chosen)} times: give it once; {{names}} in it are axes of your own")
    choices = group_choices(conf)[GROUP]
    is_file = all(name in choices for name in chosen[0].split(","))
    own = _axes_of(chosen[0], conf) if is_file else named(chosen[0])
    given: list[str] = []
    refused = Refusals()
    for text in overrides:
        with refused:
            given += _one(text, own, is_file=is_file)
    refused.raise_any()
    return given


def _axes_of(name: str, conf: Path | None) -> set[str]:
    """The names of the user's own in a file's command, and those that it gives itself."""
    from parallelbench.config.build import load_yaml

    node = shipped(GROUP, name) if conf is None or not (path := conf / GROUP / f"{name}.yaml").is_file() else None
    if node is None:
        content = load_yaml(path.read_bytes())
        node = content if isinstance(content, dict) else {}
    return named(str(node.get("command", ""))) | {*(node.get("axes") or {})}


def _one(text: str, own: set[str], *, is_file: bool) -> list[str]:
    parts = _SPLIT.fullmatch(text)
    if parts is None:
        return [text]
    _, key, value = parts.groups()
    if key == GROUP:
        return [text] if is_file else _of_command(value)
    if key not in own and any(key == each or key.startswith(f"{each}.") for each in _NOT_KEYS):
        raise ConfigError(
            f"{key}={value} means nothing to a program, which has a model, data and options of its own: write it into "
            f"the command, or as {{{key.rpartition('.')[2]}}} there to give it here"
        )
    name = key.removeprefix(f"{GROUP}.axes.")
    if name in own and (name != key or name in _NOT_KEYS or name not in known()["keys"]):
        if "=" in value and not set(value) & set("\"'[](){}"):  # Hydra reads no bare `--dropout=0.1,--dropout=0.2`
            value = ",".join(map(_quoted, value.split(",")))
        # Added where it is new: a list of values then sets a key that is there.
        return [f"++{GROUP}.axes.{name}=null", f"{GROUP}.axes.{name}={value}"]
    # A file need not have all keys.
    given = [f"++{key}=null"] if is_file and key.startswith(f"{GROUP}.") and key in known()["keys"] else []
    is_text = key in _PATTERNS or (key in _AMOUNTS and "{" in value)
    if is_text and value != "null" and not value.startswith(("'", '"')):
        text = f"{key}={_quoted(value)}"
    return [*given, text]


def _of_command(command: str) -> list[str]:
    if not command.strip():
        raise ConfigError("program= is empty: give a command, e.g. program='python train.py'")
    if "${" in command:
        raise ConfigError("program: ${NAME} is refused, since names in braces are the suite's: write $NAME")
    return [f"{GROUP}={FREE}", f"{GROUP}.name={_quoted(_name(command))}", f"{GROUP}.command={_quoted(command)}"]


def _quoted(text: str) -> str:
    """Text as Hydra reads it, where a backslash escapes only quotes, and backslashes before them."""
    return '"' + re.sub(r'(\\*)("|\Z)', lambda found: 2 * found[1] + ('\\"' if found[2] else ""), text) + '"'


def _name(command: str) -> str:
    """What a command is called: its script, its module, or else its first word."""
    try:
        parts = shlex.split(command)
    except ValueError:
        raise ConfigError(f"program={command}: a quote is not closed") from None
    scripts = [part for part in parts if part.endswith((".py", ".sh"))]
    modules = [after for part, after in pairwise(parts) if part == "-m" and "{" not in after]
    name = PurePath([*scripts, *modules[-1:], *parts][0]).stem
    return re.sub(r"[^A-Za-z0-9_.-]", "-", name).strip("-._")[:64] or GROUP
