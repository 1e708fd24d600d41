"""From YAML and plain dicts to a run and back: only classes of the suite, and of the user's plugin, are built."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec
import yaml

from parallelbench.config.components import Data, Loader, Loss, LrSchedule, Metric, Model, Optimizer, Strategy
from parallelbench.config.run import RunConfig, Settings, nodes_of
from parallelbench.config.sites import AnyLauncher, LauncherOptions
from parallelbench.config.structure import Component, Name, Node, seconds_in, structure
from parallelbench.errors import ConfigError, Refusals, choices, did_you_mean, one_line, raised_at

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


DEEPEST = 50
"""Levels of nesting; no configuration has ten, and very many would end the process in libyaml."""
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


_BASE_SIXTY = re.compile(r"[-+]?(?:[1-9][0-9_]*(?::[0-5]?[0-9])+|[0-9][0-9_]*(?::[0-5]?[0-9])+\.[0-9_]*)")
"""What YAML 1.1 reads as a number in base sixty: `1:30:00` is 5400."""


def load_yaml(content: bytes) -> Any:
    """What the text says; raises `ValueError` with one line for what is no YAML, or another number than is written."""
    with told_in_words():
        depth = 0
        for event in yaml.parse(content, Loader=_LOADER):
            if isinstance(event, yaml.ScalarEvent) and event.implicit[0] and _BASE_SIXTY.fullmatch(event.value):
                raise yaml.MarkedYAMLError(problem=_not_in_base_ten(event.value), problem_mark=event.start_mark)
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST:
                raise RecursionError
        return yaml.load(content, Loader=_LOADER)


def _not_in_base_ten(value: str) -> str:
    seconds = seconds_in(value)
    time = "" if seconds is None else f"; as a time it is {-(-seconds // 60)} in minutes, {seconds} in seconds"
    return f"{value} is a number in base sixty to YAML: write it in base ten, or in quotes as a text{time}"


@contextmanager
def told_in_words() -> Iterator[None]:
    """Whatever building values from YAML raises becomes a `ValueError` with one line."""
    try:
        yield
    except yaml.YAMLError as error:
        if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
            raise ValueError(one_line(str(error))) from None
        told = ", ".join(filter(None, [error.context, error.problem]))
        raise ValueError(f"line {error.problem_mark.line + 1}: {one_line(told)}") from None
    except RecursionError:
        raise ValueError(f"there are more than {DEEPEST} levels of nesting") from None
    except (AttributeError, KeyError, TypeError, ValueError):  # PyYAML's, of `!!bool x`
        raise ValueError("a value is not what its tag says: leave out what begins with !!") from None


COMPONENTS: dict[str, type[Component]] = {
    "model": Model,
    "data": Data,
    "strategy": Strategy,
    "optimizer": Optimizer,
    "lr_schedule": LrSchedule,
    "loss": Loss,
    "metric": Metric,
    "loader": Loader,
}
"""The nodes of a run that name a class in `_target_`, and what that class must be a kind of."""
LATER_COMPONENTS: dict[str, dict[str, Any]] = {
    "lr_schedule": {"_target_": "parallelbench.optim.schedules.Constant", "name": "constant"},
    "loss": {"_target_": "parallelbench.optim.losses.CrossEntropy", "name": "cross_entropy", "label_smoothing": 0.0},
    "metric": {"_target_": "parallelbench.optim.metrics.NoMetric", "name": "none"},
}
"""Components that came after results existed → what all runs had before: no part of a mapping, so that run ids stay."""
LATER_OPTIONS: dict[str, Any] = {
    "clip_norm": None,
    "compile_scope": "model",
    "activation_recomputation": "none",
    "graph": False,
    "cudnn_benchmark": False,
    "measure.waits": "allowed",
    "nccl.backend": "default",
    "nccl.per_edge": False,
    "nccl.interface": None,
    "strategy.gather": "stored",
    "strategy.vocabulary_parallel": False,
    "strategy.micro_batches": 1,
    "strategy.sequence_parallel": False,
    "strategy.expert_ranks": None,
    "data.files": None,
    "preprocess.engine": "none",
    "preprocess.recipe": None,
    "preprocess.threads": 1,
    "preprocess.executions": 1,
}
"""Options that came after results existed → their defaults: what all runs did before.

With its default an option is no part of a mapping, so that run ids stay as they were.
"""
MOVED = {
    "parallelbench.data.breast_cancer.BreastCancer": "parallelbench.data.sklearn.BreastCancer",
    "parallelbench.data.byte_text.Text": "parallelbench.data.text.Text",
    "parallelbench.data.cifar.Cifar10": "parallelbench.data.torchvision.Cifar10",
    "parallelbench.data.cifar.Cifar100": "parallelbench.data.torchvision.Cifar100",
    "parallelbench.data.digits.Digits": "parallelbench.data.sklearn.Digits",
    "parallelbench.data.mnist.Mnist": "parallelbench.data.torchvision.Mnist",
    "parallelbench.loaders.arrow.Arrow": "parallelbench.loaders.streamed.Streamed",
    "parallelbench.loaders.tensor_dataset.TensorDataset": "parallelbench.loaders.dataloader.TensorDataset",
    "parallelbench.losses.CrossEntropy": "parallelbench.optim.losses.CrossEntropy",
    "parallelbench.losses.MeanSquaredError": "parallelbench.optim.losses.MeanSquaredError",
    "parallelbench.metrics.CalibrationError": "parallelbench.optim.metrics.CalibrationError",
    "parallelbench.metrics.MacroF1": "parallelbench.optim.metrics.MacroF1",
    "parallelbench.metrics.NoMetric": "parallelbench.optim.metrics.NoMetric",
    "parallelbench.metrics.TopK": "parallelbench.optim.metrics.TopK",
    "parallelbench.models.gpt_moe.GptMoe": "parallelbench.models.moe.GptMoe",
    "parallelbench.models.linear.LogisticRegression": "parallelbench.models.mlp.LogisticRegression",
    "parallelbench.optimizers.Adagrad": "parallelbench.optim.optimizers.Adagrad",
    "parallelbench.optimizers.Adam": "parallelbench.optim.optimizers.Adam",
    "parallelbench.optimizers.AdamW": "parallelbench.optim.optimizers.AdamW",
    "parallelbench.optimizers.Lbfgs": "parallelbench.optim.optimizers.Lbfgs",
    "parallelbench.optimizers.Sgd": "parallelbench.optim.optimizers.Sgd",
    "parallelbench.schedules.Constant": "parallelbench.optim.schedules.Constant",
    "parallelbench.schedules.Cosine": "parallelbench.optim.schedules.Cosine",
    "parallelbench.schedules.LinearWarmup": "parallelbench.optim.schedules.LinearWarmup",
    "parallelbench.schedules.StepDecay": "parallelbench.optim.schedules.StepDecay",
    "parallelbench.strategies.context_parallel.ContextParallel": "parallelbench.strategies.context.ContextParallel",
    "parallelbench.strategies.ddp.Ddp": "parallelbench.strategies.data_parallel.Ddp",
    "parallelbench.strategies.dp_pp.DpPp": "parallelbench.strategies.pipeline.DpPp",
    "parallelbench.strategies.dp_pp_tp.DpPpTp": "parallelbench.strategies.pipeline.DpPpTp",
    "parallelbench.strategies.dp_tp.DpTp": "parallelbench.strategies.tensor.DpTp",
    "parallelbench.strategies.expert_parallel.ExpertParallel": "parallelbench.strategies.expert.ExpertParallel",
    "parallelbench.strategies.fsdp_cp.FsdpCp": "parallelbench.strategies.context.FsdpCp",
    "parallelbench.strategies.hsdp.Hsdp": "parallelbench.strategies.fsdp.Hsdp",
    "parallelbench.strategies.model_parallel.ModelParallel": "parallelbench.strategies.pipeline.ModelParallel",
    "parallelbench.strategies.parameter_server.ParameterServer": "parallelbench.strategies.servers.ParameterServer",
    "parallelbench.strategies.ring_ddp.RingDdp": "parallelbench.strategies.data_parallel.RingDdp",
    "parallelbench.strategies.sandblaster_lbfgs.SandblasterLbfgs": "parallelbench.strategies.lbfgs.SandblasterLbfgs",
    "parallelbench.strategies.tensor_parallel.TensorParallel": "parallelbench.strategies.tensor.TensorParallel",
    "parallelbench.strategies.tf_mirrored.TfMirrored": "parallelbench.frameworks.tensorflow.TfMirrored",
    "parallelbench.strategies.tf_multi_worker.TfMultiWorker": "parallelbench.frameworks.tensorflow.TfMultiWorker",
    "parallelbench.strategies.tf_parameter_server.TfParameterServer": (
        "parallelbench.frameworks.tensorflow.TfParameterServer"
    ),
    "parallelbench.strategies.tf_single.TfSingle": "parallelbench.frameworks.tensorflow.TfSingle",
    "parallelbench.strategies.zero1.Zero1": "parallelbench.strategies.data_parallel.Zero1",
}
"""Classes by the names that results of earlier versions, and all run ids, know them by → their names today."""
OF_PROGRAM = "parallelbench.frameworks.program.Program"
"""What stands for the strategy of a user's own program."""
PLUGIN_SOURCES = "plugin_sources"
"""Key of a component whose class is a plugin's: `RunConfig.plugin_sources`. So a changed strategy is another way to
train, and a changed model is other work."""


def to_mapping(run: RunConfig) -> dict[str, Any]:
    """The configuration as plain dicts, with the `_target_` of every component.

    Without `LATER_OPTIONS` and `LATER_COMPONENTS` at their defaults.
    """
    plain = whole_mapping(run)
    for key, default in LATER_OPTIONS.items():
        parent, _, name = key.rpartition(".")
        node = plain.get(parent, {}) if parent else plain
        if name in node and node[name] == default and not _always_had(run, parent, name):
            del node[name]
    for key in ("nccl", "preprocess"):
        if not plain.get(key, True):
            del plain[key]
    for key, default in LATER_COMPONENTS.items():
        if plain.get(key) == default:
            del plain[key]
    return plain


def whole_mapping(run: RunConfig) -> dict[str, Any]:
    """The same with every option."""
    plain: dict[str, Any] = msgspec.to_builtins(run)
    sources = plain.pop(PLUGIN_SOURCES)
    brought = run.strategy.brings(run.model.name)
    for key in ("sweep_place", "sweep_baseline"):
        if not plain[key]:
            del plain[key]
    for key in COMPONENTS:
        cls = type(getattr(run, key))
        plain[key] = {"_target_": f"{cls.__module__}.{cls.__qualname__}", **plain[key]}
        if sources and packages_of(getattr(run, key)) != {"parallelbench"}:
            plain[key][PLUGIN_SOURCES] = sources
    for option in brought.get("measure", ()):
        del plain["measure"][option]
    return {key: value for key, value in plain.items() if key in ("model", "measure") or key not in brought}


def completed(plain: Mapping[str, Any]) -> dict[str, Any]:
    """A run's mapping, as `to_mapping` makes it or an older release did, with all that came later as it was then.

    A missing component comes whole, so no option of one is among those of another. Options of a component that is no
    longer known, or a plugin's, stay as they are.
    """
    whole: dict[str, Any] = dict(plain)
    for key, default in LATER_COMPONENTS.items():
        whole.setdefault(key, dict(default))
    for key, default in LATER_OPTIONS.items():
        parent, _, name = key.rpartition(".")
        if not parent:
            whole.setdefault(key, default)
        elif parent not in COMPONENTS or (parent in whole and _has_option(whole[parent].get("_target_", ""), key)):
            whole[parent] = {name: default} | whole.get(parent, {})
    return whole


def _always_had(run: RunConfig, parent: str, option: str) -> bool:
    """Whether a component's option has no default, as one that was there from the start: pipelines' `micro_batches`."""
    kind: Any = type(getattr(run, parent)) if parent in COMPONENTS else None
    return kind is not None and option in _required(kind)


@cache
def _required(cls: type[Component]) -> frozenset[str]:
    return frozenset(field.name for field in msgspec.structs.fields(cls) if field.required)


@cache
def _has_option(target: str, key: str) -> bool:
    """Whether a class of the suite has the option of this dotted key."""
    parent, _, name = key.rpartition(".")
    try:
        return name in component_class(target, parent, None).__struct_fields__
    except ConfigError:
        return False


def package_of(cls: type) -> str:
    """The package that a class comes from: the suite, or a user's."""
    return cls.__module__.partition(".")[0]


def packages_of(component: Node) -> set[str]:
    """The packages that a component comes from: that of its class, and those of classes that its options name."""
    named = [getattr(component, option) for option in getattr(component, "names_classes", ())]
    return {package_of(type(component)), *(str(name).partition(".")[0] for name in named if name)}


def from_mapping(plain: Mapping[str, Any], plugin: str | None = None) -> RunConfig:
    """Build a run from plain dicts; raises `ConfigError` that names each wrong key, its value and what is valid.

    `plugin` is a package, besides the suite's own, whose classes may be named. It is never taken from `plain`:
    reading a run folder never executes code from elsewhere.
    """
    rest = dict(plain)
    sweep_name = rest.pop("sweep_name", "adhoc")
    place, baseline = rest.pop("sweep_place", 0), rest.pop("sweep_baseline", None)
    refused, of_strategy, parts = Refusals(), Refusals(), dict[str, Any]()
    program = rest.pop("program", None)
    with of_strategy:  # first, since it may bring others
        if program is not None:
            parts["strategy"], rest["model"] = of_program(program)
        else:
            parts["strategy"] = build(rest.get("strategy"), "strategy", plugin)
        model = rest.get("model")
        brought = parts["strategy"].brings(str(model.get("name")) if isinstance(model, dict) else "")
        rest |= brought | ({"measure": rest.get("measure", {}) | brought["measure"]} if "measure" in brought else {})
    nodes = {key: rest.pop(key, LATER_COMPONENTS.get(key)) for key in COMPONENTS}
    for key, node in nodes.items():
        with refused:
            if key == "strategy":
                of_strategy.raise_any()
            elif program is None or "strategy" in parts:
                parts[key] = build(node, key, plugin)
    with refused:
        parts["launcher"] = build_launcher(rest.pop("launcher", None))
    with refused:
        parts |= _settings(rest)
    with refused:
        parts["sweep_name"] = structure(sweep_name, Name, "sweep_name")
        parts["sweep_place"] = structure(place, int, "sweep_place")
        parts["sweep_baseline"] = structure(baseline, str | None, "sweep_baseline")
    refused.raise_any()
    if parts["nodes"] is None:
        parts["nodes"] = nodes_of(parts["devices"], parts["launcher"], parts["site"])
    sources = next((node[PLUGIN_SOURCES] for node in nodes.values() if PLUGIN_SOURCES in node), "")
    return RunConfig(**parts, plugin_sources=structure(sources, str, PLUGIN_SOURCES))


def of_program(node: Any) -> tuple[Strategy, dict[str, Any]]:
    """The strategy of the program that a node describes, and what names its model."""
    if not isinstance(node, dict):
        raise ConfigError(f"program={node!r} is no program: give its command, or choose a file of conf/program/")
    kind = component_class(OF_PROGRAM, "strategy", None)
    strategy: Strategy = structure(node | {"name": "program"}, kind, "program")
    return strategy, {"name": structure(node.get("name"), Name, "program.name")}


def _settings(rest: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that belong to no component."""
    known = Settings.__struct_fields__
    refused = Refusals()
    for key in sorted(rest.keys() - set(known), key=str):
        refused.add(f"{key} is not a key: {choices(str(key), (*COMPONENTS, 'launcher', *known))}")
    refused.raise_any()  # before keys are missed that were wrongly written
    settings: Settings = structure(rest, Settings)
    return {field: getattr(settings, field) for field in known}


def build_launcher(node: Any) -> LauncherOptions:
    """A launcher's options, whose kind their `name` says."""
    if node is None:
        raise ConfigError("launcher is missing")
    options: LauncherOptions = structure(node, AnyLauncher, "launcher")
    return options


def build(node: Any, key: str, plugin: str | None = None) -> Any:
    """Build the component that a node's `_target_` names; only classes of the suite and of `plugin` may be named."""
    if not isinstance(node, dict) or "_target_" not in node:
        raise ConfigError(f"{key}={node!r} is not a component: choose a file of conf/{key}/, e.g. {key}=NAME")
    target = node["_target_"]
    cls = component_class(target if isinstance(target, str) else repr(target), key, plugin)
    named = {option: node.get(option) for option in getattr(cls, "names_classes", ())}
    for option, name in named.items():
        _check_named(f"{key}.{option}", name, plugin)
    foreign = package_of(cls) != "parallelbench" or any(named.values())
    own = ("_target_", *([PLUGIN_SOURCES] if foreign else []))
    return structure({k: v for k, v in node.items() if k not in own}, cls, key)


def _check_named(key: str, name: Any, plugin: str | None) -> None:
    """Refuse what is no class, and classes of other packages than the user's, before anything of them is imported."""
    if name is None:
        return
    if not (isinstance(name, str) and re.fullmatch(r"\w+(\.\w+)+", name) and name.split(".")[0] == plugin):
        raise ConfigError(
            f"{key}={name!r} is refused: it must be package.module.Class of "
            + (f"the package {plugin}" if plugin else "your own package: name it with --plugin PACKAGE")
        )
    if not isinstance(_imported(name), type):
        raise ConfigError(f"{key}={name} does not exist, or is no class: correct the name")


@cache
def component_class(target: str, key: str, plugin: str | None) -> type[Node]:
    """The class that a node's `_target_` names; raises `ConfigError` where it is refused."""
    packages = ["parallelbench", *([plugin] if plugin else [])]
    if not (re.fullmatch(r"\w+(\.\w+)+", target) and target.split(".")[0] in packages):
        raise ConfigError(
            f"{key}._target_={target!r} is refused: only component classes of {' and '.join(packages)} may be named"
            + ("" if plugin else " (--plugin PACKAGE adds a package)")
        )
    cls = _imported(MOVED.get(target, target))
    if cls is None:
        raise ConfigError(f"{key}._target_={target} does not exist: {_instead(target, key)}")
    if not (isinstance(cls, type) and issubclass(cls, COMPONENTS[key])):
        raise ConfigError(f"{key}._target_={target} is refused: it is no {key}")
    if PLUGIN_SOURCES in cls.__struct_fields__:
        raise ConfigError(f"{key}._target_={target} is refused: the suite needs the name {PLUGIN_SOURCES} itself")
    if inspect.isabstract(cls):
        lacking = ", ".join(sorted(getattr(cls, "__abstractmethods__", ())))
        raise ConfigError(f"{key}._target_={target} is refused: it lacks {lacking}, which every {key} has")
    return cls


def _instead(target: str, key: str) -> str:
    """What to choose in place of a class that is not there: of a user's module, one of its own classes."""
    module, _, name = target.rpartition(".")
    package = module.partition(".")[0]
    if package == "parallelbench":
        return f"choose a file of conf/{key}/"
    if module not in sys.modules:
        return f"there is no module {module}"
    own = [
        each for each in vars(sys.modules[module]).values() if isinstance(each, type) and package_of(each) == package
    ]
    hint = did_you_mean(name, (each.__name__ for each in own if issubclass(each, COMPONENTS[key])))
    return f"{module} has no class {name}{f': {hint}' if hint else ''}"


def _imported(name: str) -> Any:
    """The object with this dotted name; None where there is none. Raises `ConfigError` for a broken module."""
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute, None)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            return None
        raise ConfigError(f"{module} can't be imported: {raised_at(error)}") from None
