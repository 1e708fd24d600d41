"""Which shipped models, data sets and strategies take what others refuse: what messages propose by name."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

import msgspec

from parallelbench.config.build import build, load_yaml
from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from parallelbench.config.components import Data, Model
    from parallelbench.config.run import RunConfig
    from parallelbench.config.structure import Component


MOST = 3
"""Names that are proposed where many would do."""


def why_apart(model: Model, data: Data) -> str:
    """Why a model can't train on a data set, whatever its sizes; empty: it can."""
    if data.kind not in model.takes:
        return f"model={model.name} takes {' and '.join(model.takes)}, but data={data.name} holds {data.kind}"
    if model.predicts_positions != bool(data.label_shape):
        one, other = ("at each position", "for each sample")[:: 1 if model.predicts_positions else -1]
        return f"model={model.name} predicts a label {one}, but data={data.name} has one {other}"
    return ""


def that_go_together(run: RunConfig) -> str:
    """The models for a run's data, and the data sets for its model: "model=cnn, mlp or vit, or data=tokens".

    Empty where there is none, as for data of somebody's own that no shipped model takes.
    """
    models = [each.name for each in _shipped("model") if _fit(each, run.data)]
    sets = [each.name for each in _shipped("data") if _fit(run.model, each)]
    return ", or ".join(f"{key}={any_of(names)}" for key, names in (("model", models), ("data", sets)) if names)


def deeper_models(run: RunConfig, *, layers: int) -> str:
    """Models that the run's data and strategy take and that have so many layers, the least deep first; may be empty."""
    deep = [each for each in _shipped("model") if len(each.layer_names) >= layers and _fit(each, run.data)]
    deep.sort(key=lambda each: (len(each.layer_names), each.name))
    return any_of([each.name for each in deep if _takes(run, model=each)][:MOST])


def models_that(suit: Callable[[Model], bool], run: RunConfig) -> str:
    """Models for the run's data that suit; may be empty."""
    return any_of([each.name for each in _shipped("model") if _fit(each, run.data) and suit(each)][:MOST])


def strategies_that_update_as_asked(run: RunConfig) -> str:
    """Strategies that take the run, and follow its learning rate's schedule and clipping; may be empty."""
    others = [each for each in _shipped("strategy") if each.updates_as_asked and _takes(run, strategy=each)]
    return any_of([each.name for each in others][:MOST])


def other_optimizers(run: RunConfig) -> str:
    """Optimizers that take the run; may be empty."""
    others = (each for each in _shipped("optimizer") if each.name != run.optimizer.name)
    return any_of([each.name for each in others if _takes(run, optimizer=each)][:MOST])


def any_of(names: Sequence[str]) -> str:
    """ "a, b or c"."""
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _fit(model: Model, data: Data) -> bool:
    """Whether a model can train on a data set."""
    try:
        if why_apart(model, data):
            return False
        model.check(**data.model_input)
    except ConfigError:  # of data=torch_dataset also that it names no class
        return False
    return True


def _takes(run: RunConfig, **instead: Component) -> bool:
    """Whether strategy and optimizer take the run with another component in its place."""
    other = msgspec.structs.replace(run, **instead)
    try:
        other.strategy.check(other, "cpu")
        other.optimizer.check(other, "cpu")
    except ConfigError:
        return False
    return True


@cache
def _shipped(group: str) -> tuple[Any, ...]:
    """The components of a folder of conf/ as their files have them, without those that need options of one's own."""
    found, folder = [], resources.files("conf") / group
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        if file.name.endswith(".yaml"):
            with suppress(ConfigError):
                found.append(build(load_yaml(file.read_bytes()), group))
    return tuple(found)
