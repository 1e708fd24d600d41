"""What people write who know Hydra, and keys that are nearly right: each gets the one line that helps."""

from __future__ import annotations

from importlib import resources
from typing import TYPE_CHECKING, Any

from parallelbench.errors import ConfigError, choices
from parallelbench.spec.plain_yaml import load_yaml

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
    valid = [str(name) for name in here] if isinstance(here, dict) else []
    of = sorted(name for name, keys in _files(parts[0], conf) if len(parts) == 2 and parts[1] in keys)
    if of:
        group = node.get(parts[0])
        chosen = group.get("name") if isinstance(group, dict) else group
        return (
            f"{key} is not a key of {parts[0]}={chosen}, but of {parts[0]}={','.join(of)}: choose one of them, or, "
            "where several are compared, give it in a block of a sweep file that chooses only them"
        )
    if longer := [] if len(parts) > 1 else sorted(_ending_in(node, key)):
        return f"{key} is not a key: did you mean {' or '.join(longer)}?"
    return f"{key} is not a key: {choices(part, valid)}"


def _files(group: str, conf: Path | None) -> Iterator[tuple[str, set[str]]]:
    """The files of a group, and the keys that stand in each."""
    for root in (resources.files("conf"), *([conf] if conf else [])):
        folder = root / group
        if group and folder.is_dir():
            for file in folder.iterdir():
                if file.name.endswith(".yaml"):
                    content = load_yaml(file.read_bytes())
                    yield file.name.removesuffix(".yaml"), set(content) if isinstance(content, dict) else set()


def _ending_in(node: Any, name: str, above: str = "") -> Iterator[str]:
    """The dotted keys whose last part is `name`."""
    for key, value in node.items() if isinstance(node, dict) else ():
        if key == name and above:
            yield f"{above}{key}"
        yield from _ending_in(value, name, f"{above}{key}.")
