"""Plain data to frozen structs, strictly ("8" is no 8); errors name the key, its value and what is valid.

By msgspec, which loads in 15 ms and takes microseconds for a run: thousands are planned on a login node.
"""

from __future__ import annotations

import math
import re
import types
import typing
from abc import ABCMeta
from functools import reduce
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec
import msgspec.structs
from msgspec import Meta, Struct, StructMeta

from parallelbench.errors import ConfigError, Refusals, choices

if TYPE_CHECKING:
    from collections.abc import Iterator


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

    names_classes: ClassVar[tuple[str, ...]] = ()
    """Options that name a class of the user's package, as `package.module.Class`; null: none is named."""

    name: Name
    """The name of the YAML file it was chosen by."""


def structure(value: Any, kind: Any, key: str = "") -> Any:
    """Convert plain data to `kind`, strictly (no "8" for 8); `key` is where it stands in the configuration.

    Raises `ConfigError` that names each wrong key, its value and what is valid.
    """
    try:
        converted = msgspec.convert(value, kind)
    except msgspec.ValidationError:
        refused = Refusals()
        for problem in _problems(value, kind, key):
            refused.add(problem)
        refused.raise_any()
        raise
    text = repr(value)
    if "inf" in text or "nan" in text:  # cheap: few configurations have to be searched
        _refuse_infinite(value, key)
    return converted


def _refuse_infinite(value: Any, key: str) -> None:
    """Refuse infinity and NaN: no setting has such a value, and the JSON that run ids are made from can't hold it."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{key}={value} is not valid: expected a finite number")
    if isinstance(value, (dict, list)):
        for part, item in value.items() if isinstance(value, dict) else enumerate(value):
            _refuse_infinite(item, _below(key, part))


_TIME = re.compile(r"[0-9]{1,9}(?::[0-5]?[0-9]){1,2}")


def seconds_in(text: str) -> int | None:
    """The seconds of a time as Slurm reads it, `hours:minutes:seconds` or `minutes:seconds`; None where it is none."""
    return reduce(lambda sum_s, part: 60 * sum_s + int(part), text.split(":"), 0) if _TIME.fullmatch(text) else None


def _as_number(key: str, value: Any) -> str:
    """The number that a key wants in place of a time; empty where it wants none."""
    units = {"min": 60, "s": 1}
    seconds, unit = seconds_in(str(value)), units.get(key.rpartition("_")[2])
    return "" if seconds is None or unit is None else f"; as a time of Slurm's it is {key}={-(-seconds // unit)}"


def _below(key: str, part: Any) -> str:
    return f"{key}.{part}" if key else str(part)


def fits(value: Any, kind: Any) -> bool:
    """Whether a value is one of a type."""
    # Each option by itself: msgspec 0.22 crashes where something is often converted to `Name | list[Name]`.
    if _is_union(kind) and not structs_in(kind):
        return any(fits(value, option) for option in typing.get_args(kind))
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    return True


def _is_union(kind: Any) -> bool:
    return typing.get_origin(kind) in (typing.Union, types.UnionType)


def _problems(value: Any, kind: Any, key: str) -> Iterator[str]:
    """What keeps `value` from being a `kind`, and what is valid there."""
    members = _members(kind)
    if isinstance(value, dict) and (structs := structs_in(kind)):
        yield from _problems_of_struct(value, structs, key)
        return
    wrong = [(part, item, item_kind) for part, item, item_kind in _items(value, members) if not fits(item, item_kind)]
    for part, item, item_kind in wrong:
        yield from _problems(item, item_kind, _below(key, part))
    if wrong:
        return
    options = [option for m in members if typing.get_origin(m) is Literal for option in typing.get_args(m)]
    if options and not {int, float, str} & {*members}:
        yield f"{key}={value} is no choice: {choices(str(value), map(str, options))}"
    else:
        # A number, or true: Hydra and YAML read it so, where a text was meant.
        unquoted = isinstance(value, (int, float)) and fits(str(value), kind)
        advice = f"; quotes make it a text: '{key}=\"…\"'" if unquoted else _as_number(key, value)
        yield f"{key or 'configuration'}={value!r} is not valid: expected {in_words(kind)}{advice}"


def _problems_of_struct(value: dict[Any, Any], structs: list[type[Struct]], key: str) -> Iterator[str]:
    """What keeps `value` from being one of these structs; the tag, if they have one, says which."""
    tags = {str(struct.__struct_config__.tag): struct for struct in structs}
    tag_field = structs[0].__struct_config__.tag_field
    struct = structs[0]
    if tag_field is not None:
        if tag_field not in value:
            yield _missing(tag_field, key)
            return
        if (tag := str(value[tag_field])) not in tags:
            yield f"{_below(key, tag_field)}={tag} is no choice: {choices(tag, tags)}"
            return
        struct = tags[tag]
    fields = {field.encode_name: field for field in msgspec.structs.fields(struct)}
    unknown = value.keys() - {*fields, tag_field}
    for name in sorted(unknown, key=str):
        yield f"{_below(key, name)} is not a key: {choices(str(name), fields)}"
    missing = [name for name, field in fields.items() if field.required and name not in value]
    if missing and not unknown:  # else an unknown key may be a missing one, wrongly written
        yield _missing(missing[0], key)
    for name, field in fields.items():
        if name in value and not fits(value[name], field.type):
            yield from _problems(value[name], field.type, _below(key, name))


def _missing(name: str, key: str) -> str:
    rest = ": add `defaults: [default, _self_]` to your file, for the keys that it leaves out"
    return f"{_below(key, name)} is missing{rest if key in _WITH_DEFAULTS else ''}"


def _items(value: Any, members: list[Any]) -> Iterator[tuple[Any, Any, Any]]:
    """Place, value and type of each element of a list, or of each value of a map."""
    for member in members:
        if isinstance(value, list) and typing.get_origin(member) in (list, tuple):
            yield from ((index, item, typing.get_args(member)[0]) for index, item in enumerate(value))
        if isinstance(value, dict) and typing.get_origin(member) is dict:
            yield from ((name, item, typing.get_args(member)[1]) for name, item in value.items())


def _members(kind: Any) -> list[Any]:
    """The types that `kind` allows, without their constraints."""
    if typing.get_origin(kind) is Annotated:
        return _members(typing.get_args(kind)[0])
    if _is_union(kind):
        return [member for option in typing.get_args(kind) for member in _members(option)]
    return [kind]


def structs_in(kind: Any) -> list[type[Struct]]:
    """The structs that a type allows."""
    return [member for member in _members(kind) if isinstance(member, type) and issubclass(member, Struct)]


def listed(kind: Any) -> list[Any]:
    """The values that a type allows, where these are few; none for numbers and texts."""
    found: list[Any] = []
    for member in _members(kind):
        if typing.get_origin(member) is Literal:
            found += typing.get_args(member)
        elif member is bool:
            found += [True, False]
        elif member is type(None):
            found.append(None)
    return found


_WORDS = {type(None): "`null`", list: "a list", tuple: "a list", dict: "keys with values"}


def in_words(kind: Any) -> str:
    """What is valid: "`int` >= 1 and < 8", the choices, or what its pattern's description says."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if _is_union(kind):
        return " or ".join(dict.fromkeys(in_words(option) for option in arguments))
    if origin is Annotated:
        limits = [limit for meta in arguments[1:] for limit in _limits(meta)]
        return next((meta.description for meta in arguments[1:] if meta.description), None) or " ".join(
            [in_words(arguments[0]), " and ".join(limits)]
        )
    plain = origin or kind
    return _WORDS.get(plain) or ("keys with values" if issubclass(plain, Struct) else f"`{plain.__name__}`")


def _limits(meta: Meta) -> list[str]:
    bounds = {">=": meta.ge, ">": meta.gt, "<=": meta.le, "<": meta.lt}
    bounds |= {"of length >=": meta.min_length, "of length <=": meta.max_length}
    return [f"{sign} {bound}" for sign, bound in bounds.items() if bound is not None]
