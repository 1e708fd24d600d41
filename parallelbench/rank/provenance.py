"""On what an attempt trains, and with which version of the suite; how that differs from the attempts before it."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from parallelbench import cuda
from parallelbench.data.content import content_sha256
from parallelbench.errors import ConfigError
from parallelbench.probes import environment
from parallelbench.spec.identity import canonical_json
from parallelbench.store.environment_match import PLUGIN, differences, entries, is_of_program, must_match
from parallelbench.world.devices import cpu_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from parallelbench.frameworks.contract import RankWorld
    from parallelbench.spec.config import RunConfig
    from parallelbench.spec.dataset import Arrays


def first_facts(attempt: int, *, framework: str = "torch", plugin: str | None = None) -> dict[str, str]:
    """Columns of the `run` table about the environment of a run's first attempt."""
    captured = environment.capture(framework, plugin=plugin)
    return {"environment_json": canonical_json(captured), "attempts_json": _attempts([], attempt, captured)}


def later_facts(
    attempt: int, world: RankWorld, *, before: Mapping[str, Any], framework: str = "torch", plugin: str | None = None
) -> dict[str, str]:
    """The same of an attempt that goes on; `before` are the columns that the attempts before it have recorded."""
    captured = json.loads(canonical_json(environment.capture(framework, plugin=plugin)))
    facts = {"attempts_json": _attempts(json.loads(before.get("attempts_json") or "[]"), attempt, captured)}
    if changed := _elsewhere(before, captured, device_name(world)):
        facts["resumed_elsewhere"] = ", ".join(dict.fromkeys(filter(None, [before.get("resumed_elsewhere"), changed])))
    return facts


def data_facts(run: RunConfig, arrays: Arrays, world: RankWorld, before: Mapping[str, Any] | None) -> dict[str, str]:
    """The column of what the data set holds; `before` are the columns that earlier attempts have recorded, if any.

    A collective. Raises `ConfigError` on every rank where the data set has changed since.
    """
    content, recorded = "", None
    if world.rank == 0:
        content = content_sha256(run.data, run.site.data_folder, arrays)
        recorded = (before or {}).get("data_sha256")  # None also where an older release did not record it
    changed = float(recorded not in (None, content))
    if world.total([changed])[0]:
        found = f": its sha256 was {recorded[:12]}…, now it is {content[:12]}…" if recorded else ", as rank 0 says"
        raise ConfigError(
            f"the data set has changed since this run began{found}; put the old files back, or delete the run's folder "
            "and submit again"
        )
    return {"data_sha256": content} if content and before is None else {}


def _attempts(before: list[dict[str, Any]], attempt: int, captured: Mapping[str, Any]) -> str:
    git = captured.get("git") or {}
    own = {"attempt": attempt, "began_at": time.time(), "host": captured.get("host")}
    own |= {"commit": git.get("commit"), "dirty": git.get("dirty")}
    return canonical_json([*before, own | ({PLUGIN: captured[PLUGIN]} if PLUGIN in captured else {})])


def _elsewhere(before: Mapping[str, Any], captured: Mapping[str, Any], device: str) -> str:
    """How this attempt's environment differs from the first attempt's; empty where it doesn't."""
    first = json.loads(before.get("environment_json") or "{}")
    changed = differences(entries(first), entries(captured), lambda key: must_match(key) or is_of_program(key))
    if device != before.get("device_name"):
        changed = {"device_name": (before.get("device_name"), device)} | changed
    return ", ".join(f"{key}: {then} and {now}" for key, (then, now) in changed.items())


_NAME_BYTES = 128
"""Of a GPU's name, what ranks tell each other."""


def require_one_type(world: RankWorld) -> None:
    """Refuse GPUs of several types under one run; a node sees only its own. A collective."""
    if world.size == 1 or world.device_type != "cuda":
        return
    own = device_name(world).encode()[:_NAME_BYTES]
    letters = [0.0] * (world.size * _NAME_BYTES)
    letters[world.rank * _NAME_BYTES : world.rank * _NAME_BYTES + len(own)] = map(float, own)
    letters = world.total(letters)
    ranks: dict[str, list[str]] = {}
    for rank in range(world.size):
        row = map(int, letters[rank * _NAME_BYTES : (rank + 1) * _NAME_BYTES])
        ranks.setdefault(bytes(filter(None, row)).decode(errors="replace"), []).append(str(rank))
    if len(ranks) > 1:
        found = "; ".join(f"{name} on rank {', '.join(those)}" for name, those in sorted(ranks.items()))
        raise ConfigError(
            f"GPUs of several types would train together, at the slowest one's pace ({found}): choose a type with "
            "site.gpu_type, or nodes of one kind with site.constraint"
        )


def device_name(world: RankWorld) -> str:
    """Name of the rank's GPU or processor."""
    return cuda.device_name(world.devices[0]) if world.device_type == "cuda" and world.devices else cpu_name()
