"""Plain data to frozen structs, strictly; errors name the key, its value and what is valid."""

from __future__ import annotations

import math
import re
import types
import typing
from abc import ABCMeta
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, StructMeta

from parallelbench.errors import ConfigError, choices

Name = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z",
        description="1 to 64 letters, digits, dots, dashes and underscores, a letter or digit first",
    ),
]
"""A name that is safe in a path, a job name and a shell word."""
SlurmName = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.:-]{0,63}\Z",
        description="1 to 64 letters, digits, dots, colons, dashes and underscores, no dot, colon or dash first",
    ),
]
"""A name that Slurm knows, safe as a word of a batch script."""
Count = Annotated[int, Meta(ge=1, le=1_000_000)]
"""A whole number of at least 1."""
Memory = Annotated[float, Meta(gt=0, le=10_000)]
"""An amount of memory in GiB."""
Seconds = Annotated[float, Meta(gt=0)]
"""A duration in seconds, above 0."""


_WITH_DEFAULTS = ("measure", "site")
"""Nodes whose folder of conf/ has a default.yaml."""


class Node(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of the configuration: immutable, every key known."""


class _AbstractStruct(StructMeta, ABCMeta):
    """Lets a struct have abstract methods."""


class Component(Node, frozen=True, kw_only=True, metaclass=_AbstractStruct):
    """A configuration node that builds something; `_target_` in the YAML names the subclass."""

    name: Name
    """The name of the YAML file it was chosen by."""


def structure(value: Any, kind: Any, key: str = "") -> Any:
    """Convert plain data to `kind`, strictly (no "8" for 8); `key` is where it stands in the configuration."""
    text = repr(value)
    if "inf" in text or "nan" in text:  # of thousands of configurations, hardly one has to be looked through
        _refuse_infinite(value, key)
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(str(error), value, kind, key)) from None


def _refuse_infinite(value: Any, key: str) -> None:
    """No setting means anything when infinite, and JSON, which run ids are made from, can't say it."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{key}={value} is not valid: expected a finite number")
    if isinstance(value, (dict, list)):
        for part, item in value.items() if isinstance(value, dict) else enumerate(value):
            _refuse_infinite(item, f"{key}.{part}" if key else str(part))


def _explain(message: str, value: Any, kind: Any, key: str) -> str:
    """Turn msgspec's "Expected `int` >= 1 - at `$.a.b`" into a line that also shows the value and the valid names."""
    problem, _, where = message.partition(" - at `$")
    path = [part for part in re.split(r"[.\[\]`]+", where) if part]
    tags: list[Any] = []
    for part in path:
        tags = _tags(kind, part)
        if isinstance(value, dict):
            value = value.get(part)
        elif isinstance(value, list) and part.isdigit():
            value = value[int(part)]
        kind = _field_type(kind, part)
    full = ".".join([key, *path] if key else path)
    if "unknown field" in problem or "missing required field" in problem:
        field = problem.split("`")[1]
        name = f"{full}.{field}" if full else field
        if "missing" in problem:
            rest = ": add `defaults: [default, _self_]` to your file, for all that it doesn't say"
            return f"{name} is missing{rest if full in _WITH_DEFAULTS else ''}"
        return f"{name} is not a key: {choices(field, getattr(_struct(kind), '__struct_fields__', ()))}"
    if literals := tags or _literals(kind):
        return f"{full}={value} is no choice: {choices(str(value), map(str, literals))}"
    words = _in_words(kind) if "regex" in problem else ""
    problem = f"expected {words}" if words else f"{problem[:1].lower()}{problem[1:]}"
    return f"{full or 'configuration'}={value!r} is not valid: {problem}"


def _in_words(kind: Any) -> str:
    """What a pattern says, for people; empty where nobody wrote it down."""
    arguments = [word for argument in typing.get_args(kind) for word in (argument, *typing.get_args(argument))]
    return next((word.description for word in arguments if isinstance(word, Meta) and word.description), "")


def _field_type(kind: Any, name: str) -> Any:
    """The type of what stands at `name`: a key of a struct or of a map, or an index of a list."""
    struct = _struct(kind)
    if struct is not None:
        return typing.get_type_hints(struct, include_extras=True).get(name)
    for member in _members(kind):
        if typing.get_origin(member) in (list, tuple):
            return typing.get_args(member)[0]
        if typing.get_origin(member) is dict:
            return typing.get_args(member)[1]
    return None


def _struct(kind: Any) -> type[Struct] | None:
    return next((m for m in _members(kind) if isinstance(m, type) and issubclass(m, Struct)), None)


def _members(kind: Any) -> list[Any]:
    """The types that `kind` allows, without their constraints."""
    if typing.get_origin(kind) is Annotated:
        return _members(typing.get_args(kind)[0])
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return [member for option in typing.get_args(kind) for member in _members(option)]
    return [kind]


def _tags(kind: Any, key: str) -> list[Any]:
    """The values of `key` where it tells the members of a union apart."""
    configs = [m.__struct_config__ for m in _members(kind) if isinstance(m, type) and issubclass(m, Struct)]
    return [config.tag for config in configs if config.tag_field == key]


def _literals(kind: Any) -> list[Any]:
    if typing.get_origin(kind) is Literal:
        return list(typing.get_args(kind))
    return [option for member in typing.get_args(kind) for option in _literals(member)]
