"""Small runs to check with, from the suite's own YAML files but without Hydra, which may not be installed here."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from parallelbench.config.build import from_mapping
from parallelbench.config.components import Shard
from parallelbench.training.replica import new_replica
from parallelbench.training.torch_session import build_loader, build_model

if TYPE_CHECKING:
    from parallelbench.config.replica import Replica
    from parallelbench.config.run import RunConfig
    from parallelbench.loaders.batch_loader import BatchLoader
    from parallelbench.world.world import World

STEPS = 10
BATCH_SIZE = 96
"""Every number of devices up to 4, and of micro-batches up to 8, divides it."""
_SMALL = {"train_samples": STEPS * BATCH_SIZE, "test_samples": 74}


def run_of(**changes: Any) -> RunConfig:
    """The default run on synthetic images, with other files (`model="mlp"`) and keys (`precision="bf16"`).

    A pair chooses a file and changes some of its keys: `data=("synthetic", {"channels": 1})`.
    """
    plain = _load("config.yaml")
    groups: dict[str, Any] = {}
    for entry in plain.pop("defaults"):
        groups |= entry if isinstance(entry, dict) else {}
    data = changes.pop("data", ("synthetic", {}))
    chosen = groups | {"data": (data[0], _SMALL | data[1])}
    chosen |= {key: changes.pop(key) for key in set(changes) & set(groups)}
    plain["sweep_name"] = chosen.pop("sweep")
    for group, choice in chosen.items():
        name, options = choice if isinstance(choice, tuple) else (choice, {})
        plain[group] = _load(f"{group}/{name}.yaml") | options
    return from_mapping(plain | {"batch_size": BATCH_SIZE} | changes)


def loader_of(run: RunConfig, world: World, shard: Shard | None = None) -> BatchLoader:
    """The run's batches for one rank."""
    return build_loader(run.data.load(Path("nowhere")), run, world, shard or Shard())


def replica_of(run: RunConfig, world: World) -> Replica:
    """The run's initial model, ready to be trained."""
    return new_replica(build_model(run), run, world)


def names_of(group: str) -> list[str]:
    """The names of a group's YAML files."""
    names = (path.name for path in resources.files("conf").joinpath(group).iterdir())
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


def _load(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(resources.files("conf").joinpath(name).read_text())
    return loaded
