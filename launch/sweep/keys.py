"""What people write who know Hydra, and keys that are nearly right: each gets the one line that helps."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

from launch.known import known
from parallelbench.errors import ConfigError, choices, most_like

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


FLAGS = ("-m", "--multirun", "-c", "--cfg", "-cd", "--config-dir", "-cp", "--config-path", "-cn", "--config-name")
"""Options of Hydra's."""
INSTEAD = (
    "which composes here, but starts nothing: a list of values is a sweep by itself (devices=1,2), results=DIR chooses "
    "the folder, --conf DIR adds files of your own, and `parallelbench show` prints the configuration"
)

ELSEWHERE = {
    **dict.fromkeys(("learning_rate", "lr_rate"), "optimizer.lr"),
    **dict.fromkeys(("lr_scheduler", "scheduler"), "lr_schedule"),
    **dict.fromkeys(("gpus", "num_gpus", "n_gpus", "num_devices", "world_size"), "devices"),
    **dict.fromkeys(("nnodes", "num_nodes"), "nodes"),
    **dict.fromkeys(("amp", "dtype", "mixed_precision", "torch_dtype"), "precision"),
    **dict.fromkeys(
        (f"{what}_{how}" for what in ("gradient", "activation") for how in ("checkpoint", "checkpointing")),
        "activation_recomputation",
    ),
    **dict.fromkeys(("grad_clip", "gradient_clip", "gradient_clipping", "max_grad_norm", "max_norm"), "clip_norm"),
    **dict.fromkeys(("accumulation_steps", "gradient_accumulation_steps"), "strategy.micro_batches"),
    **dict.fromkeys(("num_workers", "workers"), "loader.workers"),
    **dict.fromkeys(("cuda_graph", "cuda_graphs"), "graph"),
}
"""What other libraries call a key, in any group → the key."""


def refuse_habit(text: str, groups: Mapping[str, tuple[str, ...]]) -> None:
    """Raise `ConfigError` for an override that means something to Hydra, and nothing here."""
    key = text.lstrip("+~").partition("=")[0].partition("@")[0]
    if not key:
        raise ConfigError(f"can't read the override {text!r}: write it as key=value")
    if "=" not in text and not text.startswith("~"):
        raise ConfigError(f"can't read the override {text!r}: {_without_value(text, groups)}")
    dotted = key.replace("/", ".")
    if dotted == "hydra" or dotted.startswith("hydra."):
        raise ConfigError(f"{text} is a setting of Hydra's, {INSTEAD}")
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


def _without_value(word: str, groups: Mapping[str, tuple[str, ...]]) -> str:
    """What a word may be meant for that sets no key: a program, or the choice of a group."""
    if word.endswith((".py", ".sh", ".ipynb")):
        return f"a program of your own is measured by program='python {word}'"
    chosen = [f"{group}={word}" for group, names in groups.items() if word in names]
    return f"did you mean {' or '.join(chosen)}?" if chosen else "write it as key=value"


def unknown_key(key: str, node: Any) -> str:
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
    of = known()["keys"].get(key, {"of": ()})["of"]
    if of and len(parts) == 2:
        group = node.get(parts[0])
        chosen = group.get("name") if isinstance(group, dict) else group
        return (
            f"{key} is not a key of {parts[0]}={chosen}, but of {parts[0]}={','.join(of)}: choose one of them, or, "
            "where several are compared, give it in a block of a sweep file that chooses only them"
        )
    if meant := ELSEWHERE.get(parts[-1]):
        return f"{key} is not a key: did you mean {meant}{_of_other_choices(meant, node)}?"
    below = _below(parts[-1], node, parts[0] if len(parts) == 2 else "") if len(parts) <= 2 else ""
    return f"{key} is not a key: {below or choices(part, valid)}"


def _below(word: str, node: Any, group: str) -> str:
    """The keys that may be meant by the last word of a wrong one; empty where one beside it is as near.

    They are keys of the configuration below its top, and, in the given group or in all, of choices that were not made.
    """
    here, elsewhere = dict[str, list[str]](), dict[str, list[str]]()
    for name, value in node.items():
        if isinstance(value, dict) and group in ("", name):
            for dotted in _leaves(value, f"{name}."):
                here.setdefault(dotted.rpartition(".")[2], []).append(dotted)
    for key, about in known()["keys"].items():
        name, _, option = key.partition(".")
        other = isinstance(node.get(name), dict) and "." not in option and option not in node[name]
        if about["of"] and other and group in ("", name):
            elsewhere.setdefault(option, []).append(f"{key}, a key of {name}={','.join(about['of'])}")
    beside = node.get(group) if group else node
    if not isinstance(beside, dict):
        return ""
    nearest = most_like(word, difflib.get_close_matches(word, {*beside, *here, *elsewhere}, n=5))
    if not nearest or (nearest != [word] and any(name in nearest or name.startswith(word) for name in beside)):
        return ""
    return f"did you mean {' or '.join((elsewhere | here)[nearest[0]])}?"


def _of_other_choices(key: str, node: Mapping[str, Any]) -> str:
    """What to add to a key that a choice of its group has which was not made."""
    group, _, option = key.partition(".")
    of = known()["keys"].get(key, {"of": ()})["of"]
    return f", a key of {group}={','.join(of)}" if of and option not in node[group] else ""


def _leaves(value: Any, above: str) -> Iterator[str]:
    """The dotted keys below a node."""
    for key, item in value.items():
        yield f"{above}{key}"
        if isinstance(item, dict):
            yield from _leaves(item, f"{above}{key}.")
