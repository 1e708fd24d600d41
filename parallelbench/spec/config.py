"""The schema of one run: typed, range-checked, and the identity that follows from it.

Nothing here imports torch, so that thousands of configurations can be checked on a login node. A *component* is a
configuration node that names its class in `_target_` (a model, a data set, a strategy, an optimizer, a loader); the
class is a frozen struct whose fields are the node's keys. Default values live in `conf/`, types and ranges live here.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import re
from abc import ABCMeta
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta, StructMeta, field

from parallelbench.errors import ConfigError, choices, raised_at
from parallelbench.spec.launchers import Launcher, Site, SuiteLauncher, expanded
from parallelbench.spec.structure import Count, Name, Node, structure

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from parallelbench.data.base import Data
    from parallelbench.loaders.base import Loader
    from parallelbench.models.base import Model
    from parallelbench.optimizers import Optimizer
    from parallelbench.strategies.base import Strategy

SCHEMA_VERSION = 3
"""Version of the configuration and of the result tables; part of every run id."""

COMPONENTS = {
    "model": "parallelbench.models.base.Model",
    "data": "parallelbench.data.base.Data",
    "strategy": "parallelbench.strategies.base.Strategy",
    "optimizer": "parallelbench.optimizers.Optimizer",
    "loader": "parallelbench.loaders.base.Loader",
}
"""The nodes of a run that name a class in `_target_`, and what that class must be a kind of."""
_BASES = COMPONENTS | {"launcher": "parallelbench.spec.launchers.Launcher"}


class _AbstractStruct(StructMeta, ABCMeta):
    """Lets a struct have abstract methods."""


class Component(Node, frozen=True, kw_only=True, metaclass=_AbstractStruct):
    """A configuration node that builds something; `_target_` in the YAML names the subclass."""

    name: Name
    """The name of the YAML file it was chosen by."""


class Measure(Node, frozen=True, kw_only=True):
    """What is measured, and how."""

    parity: bool
    """Compare the strategy with single-device training before the timed part."""
    parity_steps: Annotated[int, Meta(ge=1, le=1000)]
    """Training steps of that comparison."""
    steps_sampled: Annotated[int, Meta(ge=0)]
    """At most this many steps per epoch get a row of their own in `steps.parquet`, evenly spread."""
    steps_per_epoch: Annotated[int, Meta(ge=1)] | None
    """Stop each epoch after so many steps; null: the whole epoch."""
    deterministic: bool
    """Use deterministic algorithms only (`torch.use_deterministic_algorithms`); slower."""
    detect_anomaly: bool
    """Let autograd name the operation that made a NaN; much slower, for debugging."""
    telemetry_hz: Annotated[float, Meta(ge=0, le=100)]
    """Energy, power and load are sampled so many times a second; 0: not at all."""
    attribution_steps: Annotated[int, Meta(ge=0, le=10_000)]
    """After the last epoch, train so many steps more to see what they are spent on (`phases`); 0: don't."""
    trace: bool
    """After the last epoch, write a Chrome trace of a few more steps per rank into the attempt's folder."""


class SweepBlock(Node, frozen=True, kw_only=True):
    """One part of a sweep: the product of `grid` and `zip`, less what `exclude` matches."""

    grid: dict[str, Any] = field(default_factory=dict)
    """Key → list of values (or one value): every combination."""
    zip: dict[str, list[Any]] = field(default_factory=dict)
    """Key → list of values, all of one length: taken side by side."""
    exclude: list[dict[str, Any]] = field(default_factory=list)
    """Combinations to leave out: each entry matches where all its keys have its values."""


class Sweep(Node, frozen=True, kw_only=True):
    """Which runs a sweep consists of."""

    name: Name
    """Name of the sweep's folder below `results`."""
    blocks: Annotated[list[SweepBlock], Meta(min_length=1)]
    """The sweep is the union of its blocks."""
    repeats: Count
    """How often each configuration is measured; repeat r trains with `seed + r`."""
    order: Literal["interleaved", "listed"]
    """interleaved: every repeat runs all configurations in an order of its own. listed: as written."""


class Settings(Node, frozen=True, kw_only=True):
    """The keys of a run that are not components."""

    devices: Count
    """Devices in total, over all nodes."""
    nodes: Count
    """Nodes the devices are spread over, evenly."""
    device: Literal["auto", "cpu", "cuda"]
    """Kind of device; auto: CUDA where there is any, else CPU."""
    cores_per_device: Count
    """On a CPU, a device is this many pinned cores."""
    epochs: Count
    """Passes over the training set."""
    batch_size: Count
    """Global batch under strong scaling, batch per device under weak scaling."""
    scaling: Literal["strong", "weak"]
    """strong: the global batch stays fixed as devices are added. weak: the batch per device does."""
    precision: Literal["fp64", "fp32", "tf32", "bf16", "fp16"]
    """Arithmetic of forward and backward; parameters stay fp32 (fp64 under fp64)."""
    channels_last: bool
    """Store images and convolution weights channels last."""
    compile: bool
    """Compile the model with `torch.compile`."""
    seed: Annotated[int, Meta(ge=0, lt=2**31)]
    """Seed of initialisation, permutation and augmentation."""
    repeat: Annotated[int, Meta(ge=0, lt=100_000)]
    """Which repetition of the same configuration this is; trains with `seed + repeat`."""
    results: Annotated[str, Meta(min_length=1)]
    """Folder that holds the sweeps' folders."""
    measure: Measure
    site: Site


class RunConfig(Settings, frozen=True, kw_only=True):
    """One run, completely: what `config.yaml` of a run folder says."""

    model: Model
    data: Data
    strategy: Strategy
    optimizer: Optimizer
    loader: Loader
    launcher: Launcher
    sweep_name: Name = "adhoc"
    """The sweep it belongs to: the name of the folder above the run folder."""

    def __post_init__(self) -> None:
        """Check what single fields can't say."""
        if self.devices % self.nodes:
            raise ConfigError(
                f"devices={self.devices} can't be spread evenly over nodes={self.nodes}: "
                f"choose a multiple of {self.nodes}"
            )

    @property
    def effective_seed(self) -> int:
        """Seed of this repetition: all strategies of one repeat share it."""
        return self.seed + self.repeat

    @property
    def global_batch_size(self) -> int:
        """Samples per optimizer step, over all devices."""
        return self.batch_size * (self.devices if self.scaling == "weak" else 1)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps per epoch; the tail that fills no global batch is dropped."""
        full = self.data.train_samples // self.global_batch_size
        return min(full, self.measure.steps_per_epoch or full)

    @property
    def sweep_folder(self) -> Path:
        """The folder of the sweep: the parent of the run's own."""
        return expanded(self.results) / self.sweep_name


def to_mapping(run: RunConfig) -> dict[str, Any]:
    """Return the configuration as plain dicts, with the `_target_` of every component."""
    plain: dict[str, Any] = msgspec.to_builtins(run)
    for key in COMPONENTS:
        cls = type(getattr(run, key))
        plain[key] = {"_target_": f"{cls.__module__}.{cls.__qualname__}", **plain[key]}
    if not isinstance(run.launcher, SuiteLauncher):
        cls = type(run.launcher)
        plain["launcher"] = {"_target_": f"{cls.__module__}.{cls.__qualname__}", **plain["launcher"]}
    return plain


def from_mapping(plain: Mapping[str, Any], plugin: str | None = None) -> RunConfig:
    """Build a run from plain dicts; raises `ConfigError` that names the key, its value and what is valid.

    `plugin` is a package, besides the suite's own, whose classes may be named. It is never taken from `plain`: whoever
    reads somebody else's run folder executes nobody else's code.
    """
    rest = dict(plain)
    sweep_name = rest.pop("sweep_name", "adhoc")
    rest.pop("tune", None)  # of whoever plans runs
    components = {key: build(rest.pop(key, None), key, plugin) for key in COMPONENTS}
    launcher = _launcher(rest.pop("launcher", None), plugin)
    for key in rest.keys() - set(Settings.__struct_fields__):
        raise ConfigError(f"{key} is not a key: {choices(str(key), (*_BASES, *Settings.__struct_fields__))}")
    settings: Settings = structure(rest, Settings)
    fields = {field: getattr(settings, field) for field in settings.__struct_fields__}
    return RunConfig(**fields, **components, launcher=launcher, sweep_name=structure(sweep_name, Name, "sweep_name"))


def _launcher(node: Any, plugin: str | None) -> Launcher:
    """A launcher's options: the suite's by their `name`, those of a plugin by their `_target_`."""
    if node is None:
        raise ConfigError("launcher is missing")
    if isinstance(node, dict) and "_target_" in node:
        options: Launcher = build(node, "launcher", plugin)
        return options
    found: Launcher = structure(node, SuiteLauncher, "launcher")
    return found


def build(node: Any, key: str, plugin: str | None = None) -> Any:
    """Build the component that a node's `_target_` names; only classes of the suite and of `plugin` may be named."""
    if not isinstance(node, dict) or "_target_" not in node:
        raise ConfigError(f"{key}={node!r} is not a component: choose a file of conf/{key}/, e.g. {key}=NAME")
    target = node["_target_"]
    cls = _component_class(target if isinstance(target, str) else repr(target), key, plugin)
    return structure({k: v for k, v in node.items() if k != "_target_"}, cls, key)


@cache
def _component_class(target: str, key: str, plugin: str | None) -> type[Component]:
    packages = ["parallelbench", *([plugin] if plugin else [])]
    if not (re.fullmatch(r"\w+(\.\w+)+", target) and target.split(".")[0] in packages):
        raise ConfigError(
            f"{key}._target_={target!r} is refused: only component classes of {' and '.join(packages)} may be named"
            + ("" if plugin else " (--plugin PACKAGE adds a package)")
        )
    cls = _imported(target)
    if cls is None:
        raise ConfigError(f"{key}._target_={target} does not exist: choose a file of conf/{key}/")
    if not (isinstance(cls, type) and issubclass(cls, _imported(_BASES[key]))):
        raise ConfigError(f"{key}._target_={target} is refused: it is no {key}")
    if inspect.isabstract(cls):
        lacking = ", ".join(sorted(getattr(cls, "__abstractmethods__", ())))
        raise ConfigError(f"{key}._target_={target} is refused: it lacks {lacking}, which every {key} has")
    return cls


def _imported(name: str) -> Any:
    """What a dotted name stands for, None where there is no such thing; `ConfigError` for a module that is broken."""
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute, None)
    except Exception as error:  # of a user's own code, anything
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            return None
        raise ConfigError(f"{module} can't be imported: {raised_at(error)}") from None


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
    if run.launcher.in_this_process:  # which may have done anything before
        identity["inline"] = True
    identity["schema_version"] = SCHEMA_VERSION
    return hashlib.sha256(canonical_json(identity).encode()).hexdigest()


def slug(run: RunConfig) -> str:
    """A readable folder name, unique by the first 8 digits of the run id."""
    parts = [run.data.name, run.model.name, run.strategy.name, f"x{run.devices}", f"r{run.repeat}"]
    return "-".join([*parts, run_id(run)[:8]])
