"""What people write who know Hydra, and keys that are nearly right: each gets the one line that helps."""

from __future__ import annotations

import difflib
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from parallelbench.config.build import load_yaml
from parallelbench.config.sites import shipped
from parallelbench.errors import ConfigError, choices

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path


_LISTS = "lists need no option: `parallelbench submit devices=1,2` trains every combination"
_FOLDERS = "your own files come with --conf DIR, a folder laid out like conf/"
FLAGS: Mapping[str, str] = {
    **dict.fromkeys(("-m", "--multirun"), _LISTS),
    **dict.fromkeys(("-c", "--cfg", "--resolve", "-p", "--package"), "`parallelbench show` prints the configuration"),
    **dict.fromkeys(("-cd", "--config-dir", "-cp", "--config-path"), _FOLDERS),
    **dict.fromkeys(("-cn", "--config-name"), "`sweep=NAME` and `experiment=NAME` choose a file of many settings"),
    **dict.fromkeys(("-i", "--info", "--hydra-help"), "`parallelbench show` prints what was composed, and all choices"),
    **dict.fromkeys(("-sc", "--shell-completion"), "`parallelbench help` lists all keys; no shell completes them yet"),
    "--experimental-rerun": "`parallelbench submit` with the same overrides trains what is missing",
}
"""Hydra's options, and what the suite has instead."""
_NODES: Mapping[str, str] = {
    "hydra.run": "results=DIR chooses the folder, in which each run has its own",
    "hydra.sweep": "results=DIR chooses the folder, in which each sweep has its own",
    "hydra.searchpath": _FOLDERS,
    "hydra.launcher": "launcher=local or launcher=slurm says where runs are trained, and launcher.… how",
    "hydra.sweeper": "a list is a grid (devices=1,2), and a file of conf/sweep/ says the rest",
    "hydra.job_logging": "each attempt's output is in its log.txt: `parallelbench logs RUN`",
    "hydra.verbose": "each attempt's output is in its log.txt: `parallelbench logs RUN`",
}


def refuse_habit(text: str, groups: Mapping[str, tuple[str, ...]]) -> None:
    """Raise `ConfigError` for an override that means something to Hydra, and nothing here."""
    key = text.lstrip("+~").partition("=")[0].partition("@")[0]
    if not key:
        raise ConfigError(f"can't read the override {text!r}: write it as key=value")
    dotted = key.replace("/", ".")
    if dotted == "hydra" or dotted.startswith("hydra."):
        instead = next((line for start, line in _NODES.items() if f"{dotted}.".startswith(f"{start}.")), None)
        raise ConfigError(
            f"{text} is a setting of Hydra's, which composes here, but starts nothing: "
            f"{instead or '`parallelbench show` lists the keys'}"
        )
    if text.startswith("~"):
        raise ConfigError(
            f"{text} would delete a key, but a run needs every key: set {key}=VALUE; `parallelbench help {key}` says "
            "which values it takes"
        )
    if "${hydra:" in text:
        raise ConfigError(f"{text} has no value here: Hydra composes, but starts nothing; write the value itself")
    if key == "experiment" and key not in groups:
        raise ConfigError(
            f"{text} needs a folder experiment/ of your own: name the folder that it lies in with --conf DIR. The "
            f"suite's own experiments are sweeps, e.g. sweep=demo"
        )


def unknown_key(key: str, node: Any, conf: Path | None) -> str:
    """That a key is none of the configuration `node`, and what is valid in its place.

    It may be an option of another choice of its group, or lack the name of its node.
    """
    here: Any = node
    parts = key.split(".")
    for part in parts:
        if not isinstance(here, dict) or part not in here:
            break
        here = here[part]
    valid = [str(name) for name in here if name != "_target_"] if isinstance(here, dict) else []
    of = _having(parts[0], parts[1], conf) if len(parts) == 2 else []
    if of:
        group = node.get(parts[0])
        chosen = group.get("name") if isinstance(group, dict) else group
        return (
            f"{key} is not a key of {parts[0]}={chosen}, but of {parts[0]}={','.join(of)}: choose one of them, or, "
            "where several are compared, give it in a block of a sweep file that chooses only them"
        )
    below = _below(parts[-1], node, parts[0] if len(parts) == 2 else "", conf) if len(parts) <= 2 else ""
    return f"{key} is not a key: {below or choices(part, valid)}"


def _below(word: str, node: Any, group: str, conf: Path | None) -> str:
    """The keys that may be meant by the last word of a wrong one; empty where one beside it is as near.

    They are keys of the configuration below its top, and, in the given group or in all, of choices that were not made.
    """
    here, elsewhere = dict[str, list[str]](), dict[str, list[str]]()
    for name, value in node.items():
        if isinstance(value, dict) and group in ("", name):
            for dotted in _leaves(value, f"{name}."):
                here.setdefault(dotted.rpartition(".")[2], []).append(dotted)
            for option in sorted({key for keys in _options(name, conf).values() for key in keys} - value.keys()):
                owners = ",".join(_having(name, option, conf))
                elsewhere.setdefault(option, []).append(f"{name}.{option}, a key of {name}={owners}")
    beside = node.get(group) if group else node
    nearest = difflib.get_close_matches(word, [*beside, *here, *elsewhere] if isinstance(beside, dict) else [], n=1)
    meant = "" if not nearest or nearest[0] in beside else " or ".join((elsewhere | here)[nearest[0]])
    return f"did you mean {meant}?" if meant else ""


def _having(group: str, option: str, conf: Path | None) -> list[str]:
    """The files of a group in which this option stands."""
    return sorted(name for name, options in _options(group, conf).items() if option in options)


@cache
def _options(group: str, conf: Path | None) -> dict[str, frozenset[str]]:
    """The files of a group, and the options that stand in each. Those of sweeps are read nowhere else."""
    found = dict[str, frozenset[str]]()
    for root in (resources.files("conf"), *([conf] if conf else [])):
        folder = root / group
        if group not in ("", "sweep") and folder.is_dir():
            for file in folder.iterdir():
                if file.name.endswith(".yaml"):
                    name = file.name.removesuffix(".yaml")
                    content = shipped(group, name) or load_yaml(file.read_bytes())
                    options = content if isinstance(content, dict) else ()
                    found[name] = frozenset(map(str, options)) - {"defaults", "_target_"}
    return found


def _leaves(value: Any, above: str) -> Iterator[str]:
    """The dotted keys below a node."""
    for key, item in value.items():
        yield f"{above}{key}"
        if isinstance(item, dict):
            yield from _leaves(item, f"{above}{key}.")
