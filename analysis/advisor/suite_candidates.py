"""The suite's strategies with their options, on every number of devices: which runs can be, and why others can't."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from parallelbench.config.check import check_run
from parallelbench.errors import ConfigError
from parallelbench.strategies.single import Single

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from parallelbench.config.run import RunConfig

SIZES = (2, 4, 8, 16, 32, 64)
"""Sizes of groups that are tried."""


@dataclass(frozen=True)
class SuiteCandidate:
    """One run that could be, or why it can't be."""

    run: RunConfig
    options: tuple[str, ...]
    """Overrides in which it differs from what was asked for, without strategy and devices."""
    why_not: str | None = None


def suite_candidates(
    bases: Sequence[RunConfig], devices: Sequence[int], *, given: frozenset[str], device_type: str, per_node: int
) -> list[SuiteCandidate]:
    """Every strategy of `bases` on every number of devices, with all its options but those that were `given`.

    `per_node`: devices of a node; runs on more get as many nodes as they need.
    """
    found: list[SuiteCandidate] = []
    alone = any(isinstance(base.strategy, Single) for base in bases)
    for base, count in itertools.product(bases, devices):
        if count == 1 and alone and not isinstance(base.strategy, Single):
            continue  # as in sweeps, every strategy is `single` on one device
        nodes = base.nodes if "nodes" in given else -(-count // per_node)
        if count % nodes:
            why = f"devices={count} can't be spread evenly over nodes={nodes}: choose a multiple of {nodes}"
            found.append(SuiteCandidate(base, (f"devices={count}",), why))
            continue
        placed = msgspec.structs.replace(base, devices=count, nodes=nodes, device=device_type)
        found += _of_strategy(placed, given, device_type)
    return found


def _of_strategy(run: RunConfig, given: frozenset[str], device_type: str) -> list[SuiteCandidate]:
    """All options of one strategy on so many devices; where none is possible, the first refusal stands for all."""
    made = [_checked(run, chosen, device_type) for chosen in _options(run, given)]
    possible = [each for each in made if each.why_not is None]
    return possible or made[:1]


def _checked(run: RunConfig, chosen: Mapping[str, Any], device_type: str) -> SuiteCandidate:
    options = tuple(f"strategy.{name}={_text(value)}" for name, value in chosen.items())
    try:
        # Structs are replaced without their checks of types; the values are from the fields' own ranges.
        varied = msgspec.structs.replace(run, strategy=msgspec.structs.replace(run.strategy, **chosen))
        check_run(varied, device_type)
    except ConfigError as error:
        return SuiteCandidate(run, options, str(error))
    usual = tuple(
        text
        for text, (name, value) in zip(options, chosen.items(), strict=True)
        if getattr(run.strategy, name) != value
    )
    return SuiteCandidate(varied, usual)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _options(run: RunConfig, given: frozenset[str]) -> Iterator[dict[str, Any]]:
    """The values of a strategy's options that decide about time and memory; what was asked for stays."""
    fields = run.strategy.__struct_fields__
    axes: dict[str, list[Any]] = {}
    for name, values in _axes(run).items():
        if name in fields and f"strategy.{name}" not in given:
            axes[name] = values
    for combination in itertools.product(*axes.values()):
        chosen = dict(zip(axes, combination, strict=True))
        if "schedule" in chosen and "stages_per_rank" in fields and "strategy.stages_per_rank" not in given:
            chosen["stages_per_rank"] = 2 if chosen["schedule"] == "interleaved_1f1b" else 1
        yield chosen


def _axes(run: RunConfig) -> dict[str, list[Any]]:
    """Option → the values that are tried; the shipped value first."""
    smaller = [size for size in SIZES if size < run.devices]
    up_to = [size for size in SIZES if size <= run.devices]
    # Accumulating gradients only costs time; no formula has it.
    pieces = {"micro_batches": [4, 8, 16, 32]} if run.strategy.has_stages else {}
    return {
        "shard": smaller or [2],
        "stages": up_to or [2],
        "tensor": up_to or [2],
        "servers": [size for size in (1, 2, 4) if size < run.devices] or [1],
        "reshard_after_forward": [True, False],
        "schedule": ["1f1b", "gpipe", "interleaved_1f1b"],
        **pieces,
    }
