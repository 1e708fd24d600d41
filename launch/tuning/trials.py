"""The trials behind `tune=true`: which settings are tried, and trying them on one device of this machine."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from itertools import product
from typing import TYPE_CHECKING, Any

import msgspec

from launch.attempt.command import environment
from launch.attempt.processes import before_the_program
from launch.launcher import launcher_of
from launch.preparation import check_data
from launch.sweep.compose import compose_plain, group_choices, resolve
from launch.sweep.expansion import single
from launch.tuning.choices import Choice, open_keys, refusal_of
from parallelbench.config.build import build, to_mapping
from parallelbench.config.identity import canonical_json
from parallelbench.config.plugin import plugin_of
from parallelbench.errors import ConfigError, one_line
from parallelbench.training.tuning import Findings, Patch, TrialRequest
from parallelbench.world.machine import this_machine, threads_here

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from launch.sweep import PlannedRun
    from parallelbench.config.run import RunConfig

PRECISIONS = {"cpu": ("fp32", "bf16"), "cuda": ("fp32", "tf32", "bf16", "fp16")}
IMPLEMENTATIONS = ("for_loop", "foreach", "fused")
STEPS = 5
"""Timed in each trial."""
SHARE, EPOCHS = 0.05, 10
"""All trials of a choice may take 5 % of ten epochs, or of what all runs that share it train, where that is more."""
_WAYS = ("strategy", "devices", "nodes", "data", "batch_size", "scaling")
"""Keys in which runs that share a choice may differ, and that decide which settings are possible."""


def try_out_here(members: Sequence[PlannedRun]) -> Choice:
    """Try settings of runs that share a choice, on one device of this machine, in a process of its own."""
    start, runs = time.time(), [planned.run for planned in members]
    run = largest(runs)
    device_type = launcher_of(run).device_type(run)
    if this_machine().device_type("auto" if device_type == "cuda" else "cpu") != device_type:
        raise ConfigError(
            f"tune=true: these runs train on {device_type}, which this machine does not have: call `parallelbench "
            "tune` on one that has, e.g. in a job with a GPU (srun --gpus=1 …)"
        )
    check_data(run)
    alone = msgspec.structs.replace(run, strategy=single(), devices=1, nodes=1, device=device_type)
    work = f"{run.model.name} (tried with {run.data.name}, batch {alone.global_batch_size})"
    request = TrialRequest(
        run=to_mapping(alone),
        stages=stages(runs, device_type, open_keys(members[0])),
        device_type=device_type,
        steps=min(STEPS, alone.steps_per_epoch),
        steps_worth=SHARE * worth(runs, alone),
        plugin=plugin_of(alone),
    )
    findings = _carried_out(request, alone, work)
    if all(trial.refused for trial in findings.trials):
        raise ConfigError(
            f"tune=true: {work} can't be tried on one device here ({findings.trials[0].refused}): leave out tune=true, "
            "and choose precision, channels_last and optimizer.implementation yourself"
        )
    return Choice(
        work=work,
        device_type=device_type,
        findings=findings,
        took_s=time.time() - start,
        machine=os.uname().nodename,
        chosen_at=start,
    )


def _carried_out(request: TrialRequest, alone: RunConfig, work: str) -> Findings:
    done = subprocess.run(
        [sys.executable, "-m", "parallelbench.training.tuning"],
        input=msgspec.json.encode(request),
        capture_output=True,
        env=environment(alone, request.device_type, os.environ, cores=threads_here()),
        preexec_fn=before_the_program,
        check=False,
    )
    if done.returncode:
        reason = one_line(done.stderr.decode(errors="replace")[-300:]) or f"exit code {done.returncode}"
        killed = ", by hand or by the kernel for lack of memory" if done.returncode == -signal.SIGKILL else ""
        raise ConfigError(f"tune=true: the trial of {work} failed: {reason}{killed}")
    return msgspec.json.decode(done.stdout, type=Findings)


def worth(runs: Sequence[RunConfig], alone: RunConfig) -> float:
    """Budget in steps of `alone`: those of all these runs, or of ten epochs of the shortest run, whichever is more.

    Counted in samples, since steps of smaller batches are shorter; several devices at best share them equally.
    """
    samples = sum(run.epochs * run.steps_per_epoch * run.global_batch_size / run.devices for run in runs)
    ten_epochs = EPOCHS * alone.steps_per_epoch / max(run.devices for run in runs)
    return max(ten_epochs, samples / alone.global_batch_size)


def largest(runs: Sequence[RunConfig]) -> RunConfig:
    """The run with the largest batches on one device: the choice must fit into memory for it, too."""
    return max(runs, key=lambda run: run.batch_size * math.prod(run.data.shape))


def stages(runs: Sequence[RunConfig], device_type: str, keys: Iterable[str]) -> list[list[Patch]]:
    """What is tried: precisions and layouts together, as one may need the other, then implementations, then loaders.

    Settings that any of the runs can't use are omitted.
    """
    different = list({canonical_json([to_mapping(run)[key] for key in _WAYS]): run for run in runs}.values())
    possible = [
        [patch for patch in stage if all(refusal_of(run, patch, device_type) is None for run in different)]
        for stage in _stages(runs[0], device_type, set(keys))
    ]
    return [stage for stage in possible if stage]


def _stages(run: RunConfig, device_type: str, keys: set[str]) -> list[list[Patch]]:
    precisions = PRECISIONS[device_type] if "precision" in keys else (run.precision,)
    layouts = (False, True) if "channels_last" in keys else (run.channels_last,)
    names = {"precision", "channels_last"} & keys
    together: list[Patch] = [
        {key: value for key, value in {"precision": precision, "channels_last": layout}.items() if key in names}
        for precision, layout in product(precisions, layouts)
        if (precision, layout) != (run.precision, run.channels_last)
    ]
    stages: list[list[Patch]] = [together] if names else []
    if "optimizer.implementation" in keys and hasattr(run.optimizer, "implementation"):
        present = run.optimizer.implementation
        stages.append([{"optimizer.implementation": name} for name in IMPLEMENTATIONS if name != present])
    if "loader" in keys:
        stages.append([{"loader": node} for node in _loaders() if node["name"] != run.loader.name])
    return stages


def _loaders() -> list[dict[str, Any]]:
    """The suite's loaders that need no files of their own."""
    nodes = [resolve(compose_plain([f"loader={name}"]))["loader"] for name in group_choices(None)["loader"]]
    return [node for node in nodes if not build(node, "loader").writes_files]
