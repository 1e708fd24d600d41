"""The verb `help`: what a key of the configuration means, which values it takes, and what it is by default."""

from __future__ import annotations

import ast
import inspect
import sys
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from launch.sweep.compose import group_choices, usable_choices
from launch.sweep.keys import unknown_key
from parallelbench.config.build import component_class, load_yaml
from parallelbench.config.run import Measure, Settings, Sweep
from parallelbench.config.sites import AnyLauncher, Site, shipped
from parallelbench.config.structure import in_words, listed, structs_in
from parallelbench.errors import ConfigError, choices
from parallelbench.frameworks.program import Program

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from launch.sweep.compose import Extension


_NODES: Mapping[str, type[Struct]] = {"site": Site, "measure": Measure, "sweep": Sweep, "program": Program}
"""Groups whose nodes have one class."""


@dataclass
class KeyHelp:
    """A key, as every class that has it describes it."""

    meanings: dict[str, list[str]] = field(default_factory=dict)
    """Documentation → the choices whose classes say so; no choices where the key belongs to no group."""
    values: str = ""
    options: tuple[str, ...] = ()
    """The values, where they can be listed."""
    defaults: dict[str, list[str]] = field(default_factory=dict)
    """Default → the choices that have it."""


def explain(names: Sequence[str], extension: Extension) -> int:
    """Print all about the keys that are named, or a line about each key where none is.

    Choices among the names (`strategy=ddp`) narrow the keys of their groups to what these choices have. Of another
    override the key is explained.
    """
    groups = group_choices(extension.conf)
    only = _choices_in(names, groups)
    known, names = keys(extension, only), [key for key in (name.partition("=")[0] for name in names) if key not in only]
    chosen = chosen_by_default()
    for name in names:
        if name in groups:
            _print_group(name, groups[name], known, chosen.get(name))
        elif name in known:
            _print_key(name, known[name], chosen.get(name.partition(".")[0]))
        else:
            tree: dict[str, Any] = {}
            for key in known:
                node = tree
                for part in key.split("."):
                    node = node.setdefault(part, {})
            raise ConfigError(unknown_key(name, tree))
    if not names:
        shown = {name: each for name, each in known.items() if not only or name.partition(".")[0] in only}
        width = max(map(len, shown), default=0)
        for name, each in shown.items():
            print(f"{name:{width}}  {next(iter(each.meanings)).partition('. ')[0]} [{each.values}]")
    return 0


def _choices_in(names: Sequence[str], groups: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Group → choice, of the names that are choices; raises `ConfigError` where there is none such."""
    parts = [name.partition("=") for name in names]
    given = {group: choice for group, equals, choice in parts if equals and group in groups}
    for group, choice in given.items():
        if choice not in groups[group]:
            raise ConfigError(f"{group}={choice}: no such file; {choices(choice, groups[group])}")
    return given


def keys(extension: Extension, only: Mapping[str, str] | None = None) -> dict[str, KeyHelp]:
    """All keys of a run and of its sweep, those of groups by what each choice's class has; `only`: of one choice."""
    found: dict[str, KeyHelp] = {}
    _add(found, "", Settings, shipped("", "config") or {}, choice="")
    for group, names in usable_choices(extension).items():
        for name in [(only or {})[group]] if group in (only or {}) else names:
            content: Any = shipped(group, name)
            if content is None and extension.conf is not None:
                content = load_yaml((extension.conf / group / f"{name}.yaml").read_bytes())
            cls = _class_of(group, content, extension.plugin) if isinstance(content, dict) else None
            if cls is not None:
                _add(found, f"{group}.", cls, content, choice=name)
    return found


def _class_of(group: str, content: Mapping[str, Any], plugin: str | None) -> type[Struct] | None:
    if "_target_" in content:
        return component_class(str(content["_target_"]), group, plugin)
    if group == "launcher":
        return next((cls for cls in structs_in(AnyLauncher) if cls.__struct_config__.tag == content.get("name")), None)
    return _NODES.get(group)


def _add(found: dict[str, KeyHelp], above: str, cls: type[Struct], content: Mapping[str, Any], *, choice: str) -> None:
    """Add the keys of a class, and of the structs within it."""
    docs = field_docs(cls)
    for each in msgspec.structs.fields(cls):
        inner = structs_in(each.type)
        if inner and not above and each.name in _NODES:
            continue  # a group of its own
        key = found.setdefault(f"{above}{each.name}", KeyHelp())
        key.values = in_words(each.type)
        key.options = tuple(map(_as_yaml, listed(each.type)))
        key.meanings.setdefault(docs.get(each.name, "not documented"), []).append(choice)
        given = content.get(each.name, each.default)
        if given is not msgspec.NODEFAULT and not inner:
            key.defaults.setdefault(_as_yaml(given), []).append(choice)
        if len(inner) == 1 and each.name != "blocks":
            below = content.get(each.name)
            _add(found, f"{above}{each.name}.", inner[0], below if isinstance(below, dict) else {}, choice=choice)


@cache
def field_docs(cls: type[Struct]) -> dict[str, str]:
    """Field → the text beneath it, also of the classes it inherits from, on one line."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if issubclass(base, Struct) and base is not Struct:
            docs |= dict(_documented(base.__name__, inspect.getsource(sys.modules[base.__module__])))
    return docs


def _documented(name: str, source: str) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and node.name == name:
            for line, below in zip(node.body, node.body[1:], strict=False):
                text = below.value if isinstance(below, ast.Expr) else None
                if (
                    isinstance(line, ast.AnnAssign)
                    and isinstance(line.target, ast.Name)
                    and isinstance(text, ast.Constant)
                ):
                    yield line.target.id, " ".join(str(text.value).split())


def chosen_by_default() -> dict[str, str]:
    """Group → the choice that conf/config.yaml makes."""
    entries = (shipped("", "config") or {})["defaults"]
    return {key: value for entry in entries if entry != "_self_" for key, value in entry.items()}


MOST_DEFAULTS = 12
"""Of a key that has more, only the one that is chosen by default is printed."""


def _as_yaml(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def _print_group(group: str, names: Sequence[str], known: Mapping[str, KeyHelp], chosen: str | None) -> None:
    print(f"{group}: a file of conf/{group}/")
    print(f"  choices  {', '.join(names)}")
    print(f"  default  {chosen or 'none'}")
    print(f"  keys     {', '.join(key for key in known if key.startswith(f'{group}.'))}")


def _print_key(name: str, key: KeyHelp, chosen: str | None) -> None:
    print(name)
    group = name.partition(".")[0]
    for text, of in key.meanings.items():
        where = f" ({group}={','.join(of)})" if len(key.meanings) > 1 and all(of) else ""
        print(f"  meaning  {text}{where}")
    print(f"  values   {key.values}")
    for text, of in key.defaults.items():
        usual = chosen in of
        if len(key.defaults) > MOST_DEFAULTS and not usual:
            continue
        where = f" with {group}={','.join(of)}" if all(of) else ""
        print(f"  default  {text}{where}{f'; {group}={chosen} is the default' if where and usual else ''}")
    if len(key.defaults) > MOST_DEFAULTS:
        print(f"  default  of another {group}: `parallelbench help {name} {group}=NAME`")
