"""What `advise` is asked: the overrides as one run per strategy, numbers of devices, or a transformer's options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from launch.sweep import expand
from launch.sweep.compose import group_choices, keeps_to_its_node, parse, values_of
from parallelbench.config.build import build
from parallelbench.config.sites import shipped
from parallelbench.errors import ConfigError, choices

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hydra.core.override_parser.types import Override

    from launch.sweep.compose import Extension
    from parallelbench.config.run import RunConfig

GPT = "gpt"
"""The model that is predicted by formula."""
TOKENS = "data.tokens"
"""Its data set's size, which no data set of the suite has."""
GPT_KEYS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("batch_size", "site", "results"), ()),
    "scaling": ("strong",),
    "precision": ("bf16", "fp16"),
    "optimizer": ("adam", "adamw"),
}
"""What one may set for it besides, and to which values; (): to any."""
GPT_STRATEGIES: Mapping[str, str] = {
    **{name: name for name in ("single", "ddp", "zero1", "fsdp", "hsdp")},
    "tensor_parallel": "tp",
    "pipeline": "pp",
    "dp_tp": "ddp×tp",
    "dp_pp": "ddp×pp",
    "dp_pp_tp": "ddp×tp×pp",
}
"""The suite's strategies that it has a formula for, and what its layouts call them."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked, from overrides and options."""

    bases: list[RunConfig]
    """One run per strategy, on one device."""
    devices: list[int] | None
    """None: 1, 2, 4, … up to a node."""
    given: frozenset[str]
    """Keys that the command line sets."""
    overrides: list[str]
    """Those without strategy and devices."""
    gpt: dict[str, Any] | None
    """Options of a transformer that is predicted by formula; None: the model's layers are counted."""
    gpt_tokens: float | None = None
    """Tokens of its data set; None: not known, and so is the time of an epoch."""
    gpt_strategies: frozenset[str] | None = None
    """Which of its strategies are asked for, as its layouts name them; None: all."""
    extension: Extension


def asked(overrides: Sequence[str], extension: Extension) -> Question:
    """Read the overrides; raises `ConfigError` for lists of anything but strategy and devices."""
    rest, gpt = _without_gpt(overrides, extension)
    tokens = None if gpt is None else gpt.pop(TOKENS, None)
    parsed = parse(rest, extension.conf)
    axes = {each.key_or_group: values_of(each) for each in parsed if each.key_or_group in ("devices", "strategy")}
    others = [each for each in parsed if each.key_or_group not in axes]
    for each in others:
        if each.is_sweep_override() or each.key_or_group == "sweep":
            raise ConfigError(
                f"{each.input_line} asks for several runs: advise takes lists of devices and strategy only; choose one"
            )
    if gpt is not None:
        _require_formula(others)
    named = axes.get("strategy") or list(group_choices(extension.conf)["strategy"])
    kept = [str(each.input_line) for each in others]
    return Question(
        bases=_bases(kept, ["single"] if gpt is not None else [str(name) for name in named], extension),
        devices=_counts(axes["devices"]) if "devices" in axes else None,
        given=frozenset(each.key_or_group for each in parsed),
        overrides=kept,
        gpt=gpt,
        gpt_tokens=None if tokens is None else _tokens(tokens),
        gpt_strategies=_gpt_strategies(axes["strategy"]) if gpt is not None and "strategy" in axes else None,
        extension=extension,
    )


def _bases(overrides: Sequence[str], strategies: Sequence[str], extension: Extension) -> list[RunConfig]:
    """A run of each strategy. Hydra composes one; the others differ in a file that sets its own node only."""
    names = group_choices(extension.conf)["strategy"]
    unknown = [name for name in strategies if name not in names]
    if unknown:
        raise ConfigError(f"strategy={unknown[0]} is no choice: {choices(unknown[0], names)}")
    plain = extension.conf is None and all(keeps_to_its_node("strategy", name) for name in strategies)
    if not plain or any(text.lstrip("+~").startswith("strategy.") for text in overrides):
        runs = [planned.run for planned in expand([*overrides, f"strategy={','.join(strategies)}"], extension)]
        return sorted(runs, key=lambda run: strategies.index(run.strategy.name))
    (first,) = expand([*overrides, f"strategy={strategies[0]}"], extension)
    built = [build(shipped("strategy", name), "strategy") for name in strategies]
    return [msgspec.structs.replace(first.run, strategy=strategy) for strategy in built]


def _require_formula(overrides: Sequence[Override]) -> None:
    """Refuse for a transformer what its formula would not follow."""
    for each in overrides:
        key = each.key_or_group
        valid = GPT_KEYS.get(key.partition(".")[0]) if key.startswith("site.") else GPT_KEYS.get(key)
        if valid is None:
            raise ConfigError(
                f"{each.input_line} does not change what is predicted of model={GPT}: leave it out; it takes "
                f"{', '.join(['model.…', TOKENS, 'strategy', 'devices', *GPT_KEYS])}"
            )
        if valid and str(each.value()) not in valid:
            raise ConfigError(f"{each.input_line}: model={GPT} is predicted for {key}={' or '.join(valid)} only")


def _gpt_strategies(values: Sequence[Any]) -> frozenset[str]:
    for value in values:
        if value not in GPT_STRATEGIES:
            raise ConfigError(f"strategy={value} is none of model={GPT}: choose {', '.join(GPT_STRATEGIES)}")
    return frozenset(GPT_STRATEGIES[value] for value in values)


def _tokens(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value < float("inf"):
        raise ConfigError(f"{TOKENS}={value} is no number of tokens: give one from 1 on, e.g. {TOKENS}=300e9")
    return float(value)


def _counts(values: Sequence[Any]) -> list[int]:
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"devices={value} is no number of devices: choose whole numbers from 1 on")
    return sorted(set(values))


def _without_gpt(overrides: Sequence[str], extension: Extension) -> tuple[list[str], dict[str, Any] | None]:
    """The overrides without those of a transformer, and its options with `TOKENS`; None: another model, or one's own
    of that name.
    """
    own = extension.conf is not None and (extension.conf / "model" / f"{GPT}.yaml").is_file()
    if f"model={GPT}" not in overrides or own:
        return list(overrides), None
    options: dict[str, Any] = {}
    rest = []
    for override in parse([text for text in overrides if text != f"model={GPT}"], extension.conf):
        group, _, key = override.key_or_group.partition(".")
        if (group == "model" and key) or override.key_or_group == TOKENS:
            if override.is_sweep_override():
                raise ConfigError(f"{override.input_line} asks for several values: choose one")
            options[TOKENS if group == "data" else key] = override.value()
        else:
            rest.append(str(override.input_line))
    return rest, options
