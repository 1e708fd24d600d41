"""Small runs to check with, and by which a strategy is checked: its plain one, then other optimizers and options.

From the suite's own YAML files but without Hydra, which may not be installed here.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import msgspec

from parallelbench.config.build import from_mapping
from parallelbench.config.components import Shard
from parallelbench.config.run_rules import check_run
from parallelbench.config.sites import shipped
from parallelbench.errors import ConfigError
from parallelbench.gpu_check.results import SkippedError
from parallelbench.optim.optimizers import Lbfgs
from parallelbench.strategies.pipeline.schedules import Schedule
from parallelbench.training.replica import new_replica
from parallelbench.training.torch_session import build_loader, build_model

if TYPE_CHECKING:
    from parallelbench.config.replica import Replica
    from parallelbench.config.run import RunConfig
    from parallelbench.loaders.order import BatchLoader
    from parallelbench.world.world import World


STEPS = 10
EPOCHS = 2
"""Of a run that is carried out; the first warms up."""
BATCH_SIZE = 96
"""Every number of devices up to 4, and of micro-batches up to 8, divides it."""
_SMALL = {"train_samples": STEPS * BATCH_SIZE, "test_samples": 74}


def run_of(**changes: Any) -> RunConfig:
    """The default run on synthetic images, with other files (`model="mlp"`) and keys (`precision="bf16"`).

    A pair chooses a file and changes some of its keys: `data=("synthetic", {"channels": 1})`.
    """
    plain = dict(shipped("", "config") or {})
    groups: dict[str, Any] = {}
    for entry in plain.pop("defaults"):
        groups |= entry if isinstance(entry, dict) else {}
    data = changes.pop("data", ("synthetic", {}))
    chosen = groups | {"data": (data[0], _SMALL | data[1])}
    chosen |= {key: changes.pop(key) for key in set(changes) & set(groups)}
    plain["sweep_name"] = chosen.pop("sweep")
    del plain["sweep"]  # what a sweep's file leaves out
    for group, choice in chosen.items():
        if choice is None:  # no program of a user's
            continue
        name, options = choice if isinstance(choice, tuple) else (choice, {})
        plain[group] = (shipped(group, name) or {}) | options
    return from_mapping(plain | {"batch_size": BATCH_SIZE} | changes)


def loader_of(run: RunConfig, world: World, shard: Shard | None = None) -> BatchLoader:
    """The run's batches for one rank."""
    return build_loader(run.data.load(Path("nowhere")), run, world, shard or Shard())


def replica_of(run: RunConfig, world: World) -> Replica:
    """The run's initial model, ready to be trained."""
    return new_replica(build_model(run), run, world)


MODELS: tuple[dict[str, Any], ...] = (
    {"model": "vit_tiny"},
    {"model": "mlp", "data": ("synthetic", {"channels": 1})},
    {"model": "cnn_small"},
    # For what takes the training set as one batch.
    {"model": "mlp", "data": ("synthetic", {"channels": 1, "train_samples": BATCH_SIZE}), "optimizer": "lbfgs"},
    {"model": "mlp", "data": ("synthetic", {"channels": 1}), "optimizer": "adagrad"},
    {"model": "gpt_tiny", "data": ("tokens", {})},
    {"model": "gpt_moe_tiny", "data": ("tokens", {})},
)
"""Tried in this order; a strategy takes the first that its check allows."""
ALIKE: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": "sgd"},
    "adamw": {"optimizer": "adamw"},
    "adagrad": {"optimizer": "adagrad"},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "compile": {"compile": True},
    "compile_scope=step": {"compile": True, "compile_scope": "step"},
    "activation_recomputation=full": {"activation_recomputation": "full"},
    "norm=sync": {"model": ("resnet_tiny", {"norm": "sync"}), "data": ("synthetic", {})},
}
"""What every strategy is tried with, as far as its check allows."""
_ADDING_UP: dict[str, dict[str, Any]] = {"micro_batches=2": {"strategy": {"micro_batches": 2}}}
_EXCHANGES: dict[str, dict[str, Any]] = {
    f"exchange={exchange}": {"strategy": {"exchange": exchange}} for exchange in ("all_gather", "all_to_all")
}
_DIVIDING: dict[str, dict[str, Any]] = {
    f"{option}_parallel": {"model": "gpt_tiny", "data": ("tokens", {}), "strategy": {f"{option}_parallel": True}}
    for option in ("vocabulary", "sequence")
}
_DEEP = {"model": ("vit_tiny", {"depth": 16}), "data": ("synthetic", {})}
"""Has layers for two stages on each of 8 devices."""
OWN: dict[str, dict[str, dict[str, Any]]] = {
    "ddp": {
        "graph": {"graph": True},
        "compression=fp16": {"strategy": {"compression": "fp16"}},
        "compression=bf16": {"strategy": {"compression": "bf16"}},
        **_ADDING_UP,
    },
    "context_parallel": _EXCHANGES,
    "expert_parallel": {"expert_ranks=2": {"strategy": {"expert_ranks": 2}}},
    "fsdp_cp": {"gather=bf16": {"precision": "bf16", "strategy": {"gather": "bf16"}}, **_ADDING_UP, **_EXCHANGES},
    "fsdp": {
        "graph": {"graph": True},
        "gather=bf16": {"precision": "bf16", "strategy": {"gather": "bf16"}},
        **_ADDING_UP,
    },
    "hsdp": {
        "graph": {"graph": True},
        "gather=bf16": {"precision": "bf16", "strategy": {"gather": "bf16"}},
        **_ADDING_UP,
    },
    "ring_ddp": _ADDING_UP,
    "zero1": _ADDING_UP,
    "tensor_parallel": _DIVIDING,
    "dp_tp": _DIVIDING,
    "parameter_server": {"mode=async": {"optimizer": "adagrad", "strategy": {"mode": "async"}}},
    "pipeline": {
        schedule: _DEEP
        | {
            "strategy": {
                "schedule": schedule,
                "stages_per_rank": 1 if schedule in ("gpipe", "1f1b") else 2,
                "micro_batches": 16,
            }
        }
        for schedule in get_args(Schedule)
    },
}
"""Options of single strategies."""
PLAIN = "plain"
_DEVICES_ON_A_NODE = (8, 4, 3, 2, 1)
COLLECTIVE_TIMEOUT_S = 240.0
"""While a rank compiles its part, others wait for what it will send: that took more than 60 s on a busy machine."""


def runs(name: str, device_type: str, devices: int, nodes: int = 1) -> dict[str, RunConfig]:
    """Label → run: the plain one first, then all others that the strategy's check allows.

    `devices`: of each node. Raises `SkippedError` where they are too few.
    """
    options = _plain(name, device_type, devices, nodes)
    tried = {PLAIN: _run(options, device_type)}
    for label, changes in (ALIKE | OWN.get(name, {})).items():
        changed = options | changes
        if "strategy" in changes:
            changed["strategy"] = (name, changes["strategy"])
        try:
            run = _run(changed, device_type)
        except ConfigError:
            continue
        if run not in tried.values():
            tried[label] = run
    return tried


def _plain(name: str, device_type: str, devices: int, nodes: int) -> dict[str, Any]:
    """What `run_of` makes the plain run from."""
    if nodes * devices < 2:
        raise SkippedError(f"needs two devices or more; here: {nodes * devices}")
    reason = ""
    counts = [nodes * each for each in _DEVICES_ON_A_NODE if each <= devices and nodes * each > 1]
    for count in counts if device_type == "cuda" else reversed(counts):  # a rehearsal takes as few as will do
        for model in MODELS:
            options = {"strategy": name, "devices": count, "nodes": nodes, **model}
            try:
                _run(options, device_type)
            except ConfigError as error:
                reason = reason or error.reason
                continue
            return options
    raise SkippedError(f"no run of it fits {nodes * devices} devices: {reason}")


def _run(options: dict[str, Any], device_type: str) -> RunConfig:
    return as_attempt(run_of(**options), device_type)


def as_attempt(run: RunConfig, device_type: str) -> RunConfig:
    """The run as it is carried out: short, without what measures the machine, and never waiting for a device.

    Raises `ConfigError` where it can't be.
    """
    waits = "error" if device_type == "cuda" and not waits_by_design(run) else "allowed"
    measure = msgspec.structs.replace(run.measure, telemetry_hz=0.0, probe=False, waits=waits)
    launcher = msgspec.structs.replace(run.launcher, collective_timeout_s=COLLECTIVE_TIMEOUT_S, pack=True)
    run = msgspec.structs.replace(run, epochs=EPOCHS, measure=measure, launcher=launcher)
    check_run(run, device_type)
    return run


def waits_by_design(run: RunConfig) -> str:
    """Why the host waits for the device in every step of this run; empty: it must not."""
    return "L-BFGS reads each loss" if isinstance(run.optimizer, Lbfgs) else run.strategy.waits_in_steps
