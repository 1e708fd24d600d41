"""What the layers of a run's model do, counted by torch in a process of its own, and remembered."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from analysis.advisor.fit import of_a_step
from analysis.cache import kept, name_of
from parallelbench.config.build import to_mapping
from parallelbench.config.identity import canonical_json
from parallelbench.errors import ConfigError
from parallelbench.measure.layer_records import LayerCount, ModelMemory

if TYPE_CHECKING:
    from parallelbench.config.run import RunConfig

T = TypeVar("T")


def model_layers(run: RunConfig, *, plugin: str | None = None) -> list[LayerCount]:
    """The layers of a run's model; raises `ConfigError` where torch can't count them.

    The first question about a model takes as long as loading torch; the answer is kept in the user's cache folder.
    """
    return counted_by("parallelbench.measure.count_layers", run, list[LayerCount], plugin=plugin)


def counted_by(program: str, run: RunConfig, kind: type[T], *, plugin: str | None) -> T:
    """What a counting program prints of a run's model, from the cache where it has it; a plugin's is not kept."""
    decode = msgspec.json.Decoder(kind).decode
    if plugin:
        return decode(_counted(program, run, plugin))
    of_layers = {key: value for key, value in of_a_step(run).items() if key not in NEVER_OF_A_LAYER}
    return kept(name_of("layers", of_layers | {"program": program}), lambda: _counted(program, run, None), decode)


NEVER_OF_A_LAYER = (
    *("strategy", "loader", "devices", "nodes", "cores_per_device", "global_batch"),
    *("measure", "nccl", "preprocess", "plugin_sources"),
)
"""What of a step's configuration can't change what one layer does on one device."""


def _counted(program: str, run: RunConfig, plugin: str | None) -> str:
    command = [sys.executable, "-m", program, *([plugin] if plugin else [])]
    made = subprocess.run(
        command,
        input=canonical_json(to_mapping(run)),
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        env=dict(os.environ) | _path_of(plugin),
    )
    if made.returncode:
        reason = made.stderr.strip().splitlines()[-1:] or ["it ended without a word"]
        raise ConfigError(
            f"model={run.model.name} can't be counted, so nothing can be predicted of it: {reason[0]}; "
            f"`parallelbench run model={run.model.name}` shows whether it trains at all"
        )
    return made.stdout


def _path_of(plugin: str | None) -> dict[str, str]:
    """The variable by which a child finds a plugin that this process found by its folder."""
    spec = importlib.util.find_spec(plugin) if plugin else None
    if spec is None or spec.origin is None:
        return {}
    folder = Path(spec.origin).parents[len(spec.name.split(".")) if spec.submodule_search_locations else 0]
    known = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": f"{known}{os.pathsep}{folder}" if known else str(folder)}


def model_memory(run: RunConfig, *, plugin: str | None = None) -> ModelMemory:
    """What the layers of a run's model hold; like `model_layers`."""
    return counted_by("parallelbench.measure.layer_memory", run, ModelMemory, plugin=plugin)
