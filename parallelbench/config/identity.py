"""A run's identity: which configurations are the same experiment."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import msgspec

from parallelbench.config.build import COMPONENTS, MOVED, to_mapping

if TYPE_CHECKING:
    from parallelbench.config.run import RunConfig


CONFIGURATION_VERSION = 3
"""Version of what a configuration means; part of every run id. Results have their own, `TABLES_VERSION`."""

PLACES = ("results", "launcher", "site", "sweep_name")
"""Keys that say where a run takes place, and where its result is kept: what is measured is the same everywhere."""
OF_SWEEP = ("sweep_place", "sweep_baseline")
"""Keys that say what reports make of a run."""


_FIRST_NAMES = {today: first for first, today in MOVED.items()}


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces: equal for equal configurations."""
    return msgspec.json.encode(value, order="sorted").decode()


def run_id(run: RunConfig) -> str:
    """sha256 of what defines the experiment, without paths, launcher, site and sweep."""
    identity = to_mapping(run)
    for key in PLACES:
        del identity[key]
    for key in OF_SWEEP:
        identity.pop(key, None)
    for key in COMPONENTS:
        if key in identity:
            identity[key] = by_first_name(identity[key])
    for option in run.strategy.places:
        identity["strategy"].pop(option)
    del identity["measure"]["probe"]  # it measures the machine, before and after the training
    # Times on shared cores are another experiment: their result must not count as done for a run with enough cores.
    identity["oversubscribe"] = run.launcher.oversubscribe
    if run.launcher.packed:  # likewise
        identity["packed"] = True
    if run.launcher.in_this_process:  # in a process with a past of its own
        identity["inline"] = True
    identity["schema_version"] = CONFIGURATION_VERSION  # the key stays, or all run ids would change
    return hashlib.sha256(canonical_json(identity).encode()).hexdigest()


def by_first_name(component: dict[str, Any]) -> dict[str, Any]:
    """A component's mapping that stays the same wherever its class stands: that is no part of what it does."""
    return component | {"_target_": _FIRST_NAMES.get(component["_target_"], component["_target_"])}


def slug(run: RunConfig) -> str:
    """A readable folder name, unique by the first 8 digits of the run id."""
    parts = [run.data.name, run.model.name, run.strategy.name, f"x{run.devices}", f"r{run.repeat}"]
    return "-".join([*parts, run_id(run)[:8]])
