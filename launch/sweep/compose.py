"""From overrides to plain configurations, by Hydra; its errors become one line that lists the valid names."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra import compose, initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Sweep, ValueType
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException
from yaml import YAMLError

from launch.known import group_choices as group_choices
from launch.sweep.keys import refuse_habit, unknown_key
from parallelbench.config.build import COMPONENTS, load_yaml
from parallelbench.config.sites import merged, shipped
from parallelbench.errors import ConfigError, Refusals, choices, one_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

Plain = dict[str, Any]


_LISTS = (ValueType.SIMPLE_CHOICE_SWEEP, ValueType.CHOICE_SWEEP, ValueType.RANGE_SWEEP)
WRITTEN_AS_LISTS = ("site.partition", "site.nodelist", "site.exclude")
"""Keys whose one value Slurm writes with commas and brackets."""
_LISTED = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]*[,\[][A-Za-z0-9_.:,\[\]-]*")
_MOST_VALUES = 10_000
"""Most values of one key; more are a typing error."""
_SINGLE = (bool, int, float, str, type(None))
EXPERIMENT = "experiment"
"""A group of files that a user's folder may have: each sets keys of the whole configuration."""


@dataclass(frozen=True)
class Extension:
    """What a user adds to the suite: a folder of YAML files laid out like `conf/`, and a package of classes."""

    conf: Path | None = None
    plugin: str | None = None


NOTHING = Extension()


def usable_choices(extension: Extension) -> dict[str, list[str]]:
    """The same without those whose class is of a package that `--plugin` doesn't name: a folder may serve several."""
    conf, packages = extension.conf, ("parallelbench", extension.plugin)
    groups = {group: list(names) for group, names in group_choices(conf).items()}
    for file in conf.glob("*/*.yaml") if conf else ():
        if file.stem not in groups.get(file.parent.name, ()):
            continue  # an editor's own folder
        content = load_yaml(file.read_bytes())
        target = str(content.get("_target_", "parallelbench")) if isinstance(content, dict) else "parallelbench"
        if target.partition(".")[0] not in packages:
            groups[file.parent.name].remove(file.stem)
    return groups


def parse(overrides: Sequence[str], conf: Path | None = None) -> list[Override]:
    """Parse Hydra's override grammar; raises `ConfigError` for bad syntax and for unknown choices of a group."""
    parsed, refused = [], Refusals()
    for text in map(_one_value, overrides):
        with refused:
            refuse_habit(text, group_choices(conf))
            parsed.append(_parsed(text))
            if len(key := parsed[-1].key_or_group) > LONGEST_NAME:
                raise ConfigError(f"{_short(key)} has {len(key):,} characters, so it is not a key: check its quotes")
            _check_choice(parsed[-1], conf)
    refused.raise_any()
    return parsed


LONGEST_NAME = 200
"""Characters of a key or a choice: each may be looked for as a file."""


def _short(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else f"{name[:40]}…"


def _parsed(text: str) -> Override:
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException as error:
        key, _, value = text.partition("=")
        if value.isprintable() and value and value[0] not in "[{'\"" and '"' not in value:
            quoted = shlex.quote(f'{key}="{value}"')
            raise ConfigError(f"can't read the override {text!r}: quote it: {quoted}") from None
        raise ConfigError(f"can't read the override {text!r}: {one_line(str(error))}; write it as key=value") from None
    except RecursionError:
        raise ConfigError(f"can't read the override {text!r}: its value is nested too deeply") from None


def _one_value(text: str) -> str:
    """`site.partition=gpu,low` names two partitions of one job; without quotes it would be a sweep over two sites."""
    key, _, value = text.partition("=")
    listed = key in WRITTEN_AS_LISTS and _LISTED.fullmatch(value)
    return f"{key}='{value}'" if listed else text


def values_of(override: Override) -> list[Any]:
    """The values an override stands for: one, or those of a choice list (`a,b`) or range."""
    if not override.is_sweep_override():
        return [override.value()]
    if override.value_type not in _LISTS:
        raise ConfigError(f"{override.input_line} names no values one by one: write {override.key_or_group}=A,B,C")
    values = list(itertools.islice(override.sweep_iterator(), _MOST_VALUES + 1))
    if len(values) > _MOST_VALUES:
        raise ConfigError(f"{override.input_line} has more than {_MOST_VALUES} values: choose fewer")
    if any(isinstance(value, Sweep) for value in values):
        raise ConfigError(f"{override.input_line} has a list within a list: write {override.key_or_group}=A,B,C")
    return [_unquoted(override, value) for value in values]


def _unquoted(override: Override, value: Any) -> Any:
    """One value of a choice list as Hydra reads it where it stands alone."""
    return Override(override.type, override.key_or_group, ValueType.ELEMENT, value).value()


def _check_choice(override: Override, conf: Path | None) -> None:
    valid = group_choices(conf).get(override.key_or_group)
    if valid is None or override.is_delete():
        return
    for value in values_of(override):
        if value not in valid:
            value = _short(str(value))
            here = Path("conf", override.key_or_group, f"{value}.yaml")
            advice = f"; {here} is read with --conf conf" if conf is None and here.is_file() else ""
            raise ConfigError(f"{override.key_or_group}={value} is no choice: {choices(value, valid)}{advice}")


def compose_plain(overrides: Iterable[str], conf: Path | None = None, *, later: Sequence[str] = ()) -> Plain:
    """Compose one configuration, references (`${…}`) as they are written.

    Raises `ConfigError` for unknown keys, with those that are valid in their place; it then tells also of those among
    the keys that are set `later`.
    """
    overrides = list(overrides)
    try:
        return _composed(overrides, conf)
    except RecursionError:
        raise ConfigError(
            f"{conf}: its files include each other, or refer to each other, without end: look at their "
            "lists `defaults` and at ${…}"
        ) from None
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        _raise_unknown(overrides, conf, later)
        raise ConfigError(one_line(str(error))) from None


def resolve(plain: Plain) -> Plain:
    """Replace references by their values; raises `ConfigError` for one that leads nowhere.

    References to the environment are refused: what they resolve to, a secret perhaps, would be stored with the run.
    """
    text = str(plain)
    if "${hydra:" in text:
        raise ConfigError("${hydra:…} has no value here: Hydra composes, but starts nothing; write the value")
    if "oc.env" in text:
        raise ConfigError("${oc.env:…} is refused: write the value; `~` and $NAME work in results and site.data_dir")
    # OmegaConf takes milliseconds, since it builds a tree: too long for thousands of runs without references.
    return resolved_by_omegaconf(plain) if "${" in text or "???" in text else plain


def resolved_by_omegaconf(plain: Plain) -> Plain:
    """The same for any configuration."""
    OmegaConf.clear_resolver("oc.env")  # references can build its name, so a search for the name would miss it
    try:
        return OmegaConf.to_container(OmegaConf.create(plain), resolve=True, throw_on_missing=True)  # type: ignore[return-value]
    except InterpolationKeyError as error:
        value: Any = plain
        for part in str(error.full_key).split("."):
            value = value.get(part, "${…}") if isinstance(value, dict) else "${…}"
        given = one_line(f"{error.full_key}={value}")
        raise ConfigError(
            f"{given}: ${{…}} names another key, and there is none of this name; an environment variable is $NAME, "
            "without braces, in results and site.data_dir"
        ) from None
    except (OmegaConfBaseException, ValueError) as error:
        raise ConfigError(one_line(str(error))) from None


def _require_names(plain: Plain, chosen: Mapping[str, str]) -> None:
    """Raise `ConfigError` where a file gives its node another name than its own: that is what runs are told apart by.

    `chosen`: group → file. A launcher's and a sweep's names mean something else.
    """
    for group, file in chosen.items():
        node = plain.get(group)
        found = node.get("name", file) if isinstance(node, dict) else file
        if group in _NAMED and found not in (file, own := file.rpartition("/")[2]):
            raise ConfigError(f"{group}={file} has `name: {found}`: it is its file's, so write `name: {own}`")


_NAMED = (*COMPONENTS, "site")


def _composed(overrides: Sequence[str], conf: Path | None) -> Plain:
    """What Hydra composes of these overrides.

    That takes it a fifth of a second, so it composes the suite's defaults, once. Files that set their own node only,
    and single values that are there already, are set here. Whatever does more, or is wrong, is left to Hydra.
    """
    plain = _set_by_hand(overrides, conf)
    return by_hydra(overrides, conf) if plain is None else plain


def _name_sweep(plain: Plain, file: str) -> None:
    """Give a sweep whose file says no name the file's."""
    sweep = plain.get("sweep")
    if isinstance(sweep, dict) and "name" in sweep and sweep["name"] is None:
        sweep["name"] = file


def _set_by_hand(overrides: Sequence[str], conf: Path | None) -> Plain | None:
    """The defaults with chosen files, then values, in their places; None where one of them is more than that."""
    plain = deepcopy(_defaults())
    groups, chosen, values = group_choices(conf), dict[str, str](), []
    for text in overrides:
        try:
            override = _parsed(text)
        except ConfigError:
            return None
        key = override.key_or_group
        if not text.startswith(f"{key}=") or override.is_sweep_override():
            return None
        if key not in groups:
            values.append((key, override.value()))
            continue
        node = _node(key, str(override.value()), conf)
        if node is None or key not in plain or key in chosen:
            return None
        plain[key] = {**(shipped("", "config") or {})["sweep"], **node} if key == "sweep" else node
        chosen[key] = str(override.value())
    _require_names(plain, chosen)
    if not all(_replaced(plain, key.split("."), value) for key, value in values):
        return None
    _name_sweep(plain, chosen.get("sweep", ""))
    return plain


@cache
def _defaults() -> Plain:
    return by_hydra((), None)


def _node(group: str, name: str, conf: Path | None) -> Plain | None:
    """The node that this file sets, over those that it inherits from; None where it may do more, or can't be read."""
    if name in group_choices().get(group, ()):
        return deepcopy(shipped(group, name))
    if "/" in name:  # Hydra gives it a node of its own
        return None
    try:
        text = (conf / group / f"{name}.yaml").read_text("utf-8") if conf else ""
        content: Any = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except (OSError, ValueError, YAMLError, OmegaConfBaseException):
        return None
    if "@package" in text or not isinstance(content, dict) or not content:
        return None
    order = content.pop("defaults", ["_self_"])
    if not isinstance(order, list) or order[-1:] != ["_self_"]:
        return None
    nodes = [_node(group, str(each), conf) for each in order[:-1]]
    return None if None in nodes else reduce(merged, [*filter(None, nodes), content])


def _replaced(node: Any, path: Sequence[str], value: Any) -> bool:
    """Replace a value that is there already; returns whether that was possible."""
    *parents, last = path
    for name in parents:
        node = node.get(name) if isinstance(node, dict) else None
    single = all(isinstance(each, _SINGLE) for each in (value if isinstance(value, list) else [value]))
    if not single or not isinstance(node, dict) or last not in node or isinstance(node[last], dict):
        return False
    node[last] = value
    return True


def by_hydra(overrides: Sequence[str], conf: Path | None) -> Plain:
    """The same by Hydra alone."""
    overrides = list(overrides)
    if conf is not None:
        overrides.append(f"hydra.searchpath=[{json.dumps(f'file://{conf}')}]")
    # The suite's defaults list names no experiment, so Hydra wants it added.
    overrides = [f"+{text}" if text.startswith(f"{EXPERIMENT}=") else text for text in overrides]
    with initialize_config_module("conf", version_base="1.3"):
        composed = compose("config", overrides=overrides, return_hydra_config=True)
    plain: Plain = OmegaConf.to_container(composed, resolve=False)  # type: ignore[assignment]
    chosen = plain.pop("hydra")["runtime"]["choices"]
    renamed = {text.lstrip("+").partition(".name=")[0] for text in overrides}
    _require_names(plain, {group: name for group, name in chosen.items() if group not in renamed})
    if EXPERIMENT in plain:
        raise ConfigError(
            f"a file of {EXPERIMENT}/ sets keys below `{EXPERIMENT}` only: let its first line be `# @package _global_`"
        )
    _name_sweep(plain, chosen.get("sweep", ""))
    return plain


def _raise_unknown(overrides: Sequence[str], conf: Path | None, later: Sequence[str]) -> None:
    """Raise `ConfigError` with all keys that do not exist where these files are chosen."""
    groups = group_choices(conf)
    bare = [text for text in overrides if text.partition("=")[0] in groups]
    try:
        node = _composed(bare, conf)
    except (HydraException, OmegaConfBaseException, ValueError):
        return
    given = [override.key_or_group for override in parse(overrides, conf) if not override.is_add()]
    refused = Refusals()
    for key in (*given, *later):
        if not _exists(key, node):
            refused.add(unknown_key(key, node))
    refused.raise_any()


def _exists(key: str, node: Any) -> bool:
    """Whether a configuration has this key, as far as it can be said: what lies below a value is judged with it."""
    for part in key.split("."):
        if not isinstance(node, dict):
            break
        if part not in node:
            return False
        node = node[part]
    return True
