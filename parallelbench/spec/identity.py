"""A run's identity: which configurations are the same experiment."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import msgspec

from parallelbench.spec.mapping import to_mapping

if TYPE_CHECKING:
    from parallelbench.spec.config import RunConfig

SCHEMA_VERSION = 3
"""Version of the configuration and of the result tables; part of every run id."""


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces: equal for equal configurations."""
    return msgspec.json.encode(value, order="sorted").decode()


def run_id(run: RunConfig) -> str:
    """sha256 of what defines the experiment: not of paths, launcher, site or sweep."""
    identity = to_mapping(run)
    for key in ("results", "launcher", "site", "sweep_name"):
        del identity[key]
    # Times on shared cores are another experiment: one with cores enough must not pass for done because of it.
    identity["oversubscribe"] = run.launcher.oversubscribe
    if run.launcher.packed:  # likewise
        identity["packed"] = True
    if run.launcher.name == "inline":  # in a process that may have done anything before
        identity["inline"] = True
    identity["schema_version"] = SCHEMA_VERSION
    return hashlib.sha256(canonical_json(identity).encode()).hexdigest()


def slug(run: RunConfig) -> str:
    """A readable folder name, unique by the first 8 digits of the run id."""
    parts = [run.data.name, run.model.name, run.strategy.name, f"x{run.devices}", f"r{run.repeat}"]
    return "-".join([*parts, run_id(run)[:8]])
