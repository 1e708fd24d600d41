"""The schema of one run: typed, range-checked, and the identity that follows from it.

Nothing here imports torch, so that thousands of configurations can be checked on a login node. A *component* is a
configuration node that names its class in `_target_` (a model, a data set, a strategy, an optimizer); the class is a
frozen struct whose fields are the node's keys. Default values live in `conf/`, types and ranges live here.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import math
import os
import re
import types
import typing
from abc import ABCMeta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, StructMeta

from parallelbench.errors import ConfigError, choices

if TYPE_CHECKING:
    from collections.abc import Mapping

    from parallelbench.data.base import Data
    from parallelbench.models.base import Model
    from parallelbench.optimizers import Optimizer
    from parallelbench.strategies.base import Strategy

SCHEMA_VERSION = 1
"""Version of the configuration and of the result tables; part of every run id."""

COMPONENTS = {
    "model": "parallelbench.models.base.Model",
    "data": "parallelbench.data.base.Data",
    "strategy": "parallelbench.strategies.base.Strategy",
    "optimizer": "parallelbench.optimizers.Optimizer",
}
"""The nodes of a run that name a class in `_target_`, and what that class must be a kind of."""

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z")]
"""A name that is safe in a path, a job name and a shell word."""
SlurmName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.:-]{0,63}\Z")]
"""A name that Slurm knows, safe as a word of a batch script."""
Count = Annotated[int, Meta(ge=1, le=1_000_000)]
"""A whole number of at least 1."""
Memory = Annotated[float, Meta(gt=0, le=10_000)]
"""An amount of memory in GiB."""
Seconds = Annotated[float, Meta(gt=0)]
"""A duration in seconds, above 0."""


class Node(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of the configuration: immutable, every key known."""


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


class Launcher(Node, frozen=True, kw_only=True, tag_field="name"):
    """How processes are started; never part of a run's identity. `name` in the YAML chooses the kind."""

    timeout_s: Seconds | None
    """End a run after this many seconds with the outcome `timeout`; null: no limit."""
    collective_timeout_s: Seconds
    """A rank that waits longer than this for the others in one collective ends the run."""
    oversubscribe: bool
    """Allow more devices than this machine has cores for. Such runs are marked and never enter timing figures."""
    checkpoint: Literal["auto", "always", "never"]
    """Save the training state between epochs, and go on from it. auto: where the time limit is shorter than the run
    seems to take, and at a graceful stop; never: neither."""
    checkpoint_every_s: Seconds
    """At least this long between two checkpoints."""

    @property
    def name(self) -> str:
        """The name of the YAML file it was chosen by."""
        return str(type(self).__struct_config__.tag)

    @property
    def limit_s(self) -> float | None:
        """How long one attempt may take, s; None: as long as it likes."""
        return self.timeout_s

    @property
    def packed(self) -> bool:
        """Whether warm processes run one configuration after the other."""
        return False


class LocalLauncher(Launcher, frozen=True, kw_only=True, tag="local"):
    """Processes of their own, on this machine."""

    pack: bool
    """Run all configurations by warm processes; keeps them out of timing figures."""

    @property
    def packed(self) -> bool:
        """What `pack` says."""
        return self.pack


class InlineLauncher(Launcher, frozen=True, kw_only=True, tag="inline"):
    """In the calling process, for debuggers."""


class SlurmLauncher(Launcher, frozen=True, kw_only=True, tag="slurm"):
    """One Slurm job per configuration; those of equal shape make up an array."""

    time_limit_min: Count
    """Time limit of a job, in minutes."""
    cpus_per_gpu: Count
    """Cores asked for with each GPU; on CPUs a device is `cores_per_device` cores."""
    memory_gib_per_device: Memory | None
    """Host memory asked for with each device, GiB; null: the site's usual amount."""
    array_parallelism: Count
    """At most this many jobs of one array run at a time."""
    signal_delay_s: Annotated[int, Meta(ge=1, le=65_535)]
    """Slurm warns a job this long before its time limit; it then stops after the current epoch. Can be a minute off."""
    attempts: Count
    """A submitted run is started at most this often: after a warning, a preemption, or a node's failure."""
    pack: bool
    """Run all configurations of one shape in one job, by warm processes; keeps them out of timing figures."""

    @property
    def limit_s(self) -> float | None:
        """The shorter of the job's limit, less the warning, and `timeout_s`."""
        job_s = max(0.0, 60.0 * self.time_limit_min - self.signal_delay_s)
        return job_s if self.timeout_s is None else min(job_s, self.timeout_s)

    @property
    def packed(self) -> bool:
        """What `pack` says."""
        return self.pack


class Site(Node, frozen=True, kw_only=True):
    """The place where runs happen; never part of a run's identity."""

    name: Name
    """The name of the YAML file it was chosen by."""
    data_dir: str
    """Folder of the prepared data sets; `~` is expanded where it is used."""
    device: Literal["cpu", "cuda"]
    """What `device=auto` means in a Slurm job: the login node can't see the GPUs of the others."""
    devices_per_node: Count
    """Most devices of one node that a job may have."""
    gpus_per_node: Annotated[int, Meta(ge=0, le=1000)]
    """GPUs of a node; 0: jobs ask for none."""
    memory_gib_per_device: Memory
    """Host memory that a job usually asks for with each device, GiB."""
    gpu_type: SlurmName | None
    """Type of the GPUs as Slurm names it (`sinfo -o %G`); null: any."""
    partition: SlurmName | None
    """null: the cluster's default, as for the three below."""
    qos: SlurmName | None
    """Quality of service."""
    account: SlurmName | None
    """What the jobs are charged to."""
    constraint: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.&|*()\[\]-]{1,128}\Z")] | None
    """Node features, e.g. a100_80."""
    max_time_min: Count | None
    """Longest job the partition allows, in minutes; null: not known here, Slurm decides."""
    max_nodes: Count | None
    """Most nodes of one job."""
    network_interface: SlurmName | None
    """Interface over which nodes talk to each other, e.g. ib0; null: the one that the host's name resolves to."""
    modules: list[Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_./+-]{0,127}\Z")]]
    """Modules to load first in a job, e.g. cuda/12.4."""
    setup: list[str]
    """Shell lines to run before the job's program; only from the site's file, never from the command line."""

    @property
    def data_folder(self) -> Path:
        """`data_dir`, with `~` and `$NAME` in their places."""
        return expanded(self.data_dir)


class SweepBlock(Node, frozen=True, kw_only=True):
    """One part of a sweep: the product of `grid` and `zip`, less what `exclude` matches."""

    grid: dict[str, Any] = {}
    """Key → list of values (or one value): every combination."""
    zip: dict[str, list[Any]] = {}
    """Key → list of values, all of one length: taken side by side."""
    exclude: list[dict[str, Any]] = []
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
    launcher: LocalLauncher | InlineLauncher | SlurmLauncher
    site: Site


class RunConfig(Settings, frozen=True, kw_only=True):
    """One run, completely: what `config.yaml` of a run folder says."""

    model: Model
    data: Data
    strategy: Strategy
    optimizer: Optimizer
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


def expanded(path: str) -> Path:
    """A path with `~` and `$NAME` in their places; configurations keep it as it was written."""
    return Path(os.path.expandvars(path)).expanduser()


def to_mapping(run: RunConfig) -> dict[str, Any]:
    """Return the configuration as plain dicts, with the `_target_` of every component."""
    plain: dict[str, Any] = msgspec.to_builtins(run)
    for key in COMPONENTS:
        cls = type(getattr(run, key))
        plain[key] = {"_target_": f"{cls.__module__}.{cls.__qualname__}", **plain[key]}
    return plain


def from_mapping(plain: Mapping[str, Any], plugin: str | None = None) -> RunConfig:
    """Build a run from plain dicts; raises `ConfigError` that names the key, its value and what is valid.

    `plugin` is a package, besides the suite's own, whose classes may be named. It is never taken from `plain`: whoever
    reads somebody else's run folder executes nobody else's code.
    """
    rest = dict(plain)
    sweep_name = rest.pop("sweep_name", "adhoc")
    components = {key: build(rest.pop(key, None), key, plugin) for key in COMPONENTS}
    settings: Settings = structure(rest, Settings)
    fields = {field: getattr(settings, field) for field in settings.__struct_fields__}
    return RunConfig(**fields, **components, sweep_name=structure(sweep_name, Name, "sweep_name"))


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
    try:
        cls = _imported(target)
    except (ImportError, AttributeError):
        raise ConfigError(f"{key}._target_={target} does not exist: choose a file of conf/{key}/") from None
    kind = _imported(COMPONENTS[key])
    if not (isinstance(cls, type) and issubclass(cls, kind)) or inspect.isabstract(cls):
        raise ConfigError(f"{key}._target_={target} is refused: it is no {key}")
    return cls


def _imported(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def structure(value: Any, kind: Any, key: str = "") -> Any:
    """Convert plain data to `kind`, strictly (no "8" for 8); `key` is where it stands in the configuration."""
    text = repr(value)
    if "inf" in text or "nan" in text:  # of thousands of configurations, hardly one has to be looked through
        _refuse_infinite(value, key)
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(str(error), value, kind, key)) from None


def _refuse_infinite(value: Any, key: str) -> None:
    """No setting means anything when infinite, and JSON, which run ids are made from, can't say it."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{key}={value} is not valid: expected a finite number")
    if isinstance(value, (dict, list)):
        for part, item in value.items() if isinstance(value, dict) else enumerate(value):
            _refuse_infinite(item, f"{key}.{part}" if key else str(part))


def _explain(message: str, value: Any, kind: Any, key: str) -> str:
    """Turn msgspec's "Expected `int` >= 1 - at `$.a.b`" into a line that also shows the value and the valid names."""
    problem, _, where = message.partition(" - at `$")
    path = [part for part in re.split(r"[.\[\]`]+", where) if part]
    tags: list[Any] = []
    for part in path:
        tags = _tags(kind, part)
        if isinstance(value, dict):
            value = value.get(part)
        elif isinstance(value, list) and part.isdigit():
            value = value[int(part)]
        kind = _field_type(kind, part)
    full = ".".join([key, *path] if key else path)
    if "unknown field" in problem or "missing required field" in problem:
        field = problem.split("`")[1]
        name = f"{full}.{field}" if full else field
        if "missing" in problem:
            return f"{name} is missing"
        return f"{name} is not a key: {choices(field, getattr(_struct(kind), '__struct_fields__', ()))}"
    if literals := tags or _literals(kind):
        return f"{full}={value} is no choice: {choices(str(value), map(str, literals))}"
    return f"{full or 'configuration'}={value!r} is not valid: {problem[:1].lower()}{problem[1:]}"


def _field_type(kind: Any, name: str) -> Any:
    """The type of what stands at `name`: a key of a struct or of a map, or an index of a list."""
    struct = _struct(kind)
    if struct is not None:
        return typing.get_type_hints(struct, localns=_names(), include_extras=True).get(name)
    for member in _members(kind):
        if typing.get_origin(member) in (list, tuple):
            return typing.get_args(member)[0]
        if typing.get_origin(member) is dict:
            return typing.get_args(member)[1]
    return None


def _names() -> dict[str, Any]:
    """The component types, which are imported here for type checkers only."""
    return dict.fromkeys(("Model", "Data", "Strategy", "Optimizer"), Component)


def _struct(kind: Any) -> type[Struct] | None:
    return next((m for m in _members(kind) if isinstance(m, type) and issubclass(m, Struct)), None)


def _members(kind: Any) -> list[Any]:
    """The types that `kind` allows, without their constraints."""
    if typing.get_origin(kind) is Annotated:
        return _members(typing.get_args(kind)[0])
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return [member for option in typing.get_args(kind) for member in _members(option)]
    return [kind]


def _tags(kind: Any, key: str) -> list[Any]:
    """The values of `key` where it tells the members of a union apart."""
    configs = [m.__struct_config__ for m in _members(kind) if isinstance(m, type) and issubclass(m, Struct)]
    return [config.tag for config in configs if config.tag_field == key]


def _literals(kind: Any) -> list[Any]:
    if typing.get_origin(kind) is Literal:
        return list(typing.get_args(kind))
    return [option for member in typing.get_args(kind) for option in _literals(member)]


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
    identity["schema_version"] = SCHEMA_VERSION
    return hashlib.sha256(canonical_json(identity).encode()).hexdigest()


def slug(run: RunConfig) -> str:
    """A readable folder name, unique by the first 8 digits of the run id."""
    parts = [run.data.name, run.model.name, run.strategy.name, f"x{run.devices}", f"r{run.repeat}"]
    return "-".join([*parts, run_id(run)[:8]])
