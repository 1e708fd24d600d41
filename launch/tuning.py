"""`tune=true`: a short trial on this machine chooses what the overrides leave open, once for each model of a sweep.

All runs of a sweep that train the same model with the same optimizer share a choice, so that they can be compared. It
is kept in `tuned.json` in the sweep's folder: submitting again starts no other runs.
"""

from __future__ import annotations

import hashlib
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

import msgspec

from launch.attempt.processes import before_the_program, environment
from launch.launcher import check_data, launcher_of
from launch.sweep.compose import compose_plain, group_choices, resolve
from launch.sweep.expansion import as_in_file
from parallelbench.config.build import from_mapping, to_mapping
from parallelbench.config.identity import by_first_name, canonical_json, run_id
from parallelbench.config.plugin import plugin_of
from parallelbench.config.run_rules import check_run
from parallelbench.errors import ConfigError, count_of, one_line
from parallelbench.results.files import storage_errors, write_file
from parallelbench.training.tuning import Findings, Patch, TrialRequest, patched
from parallelbench.world.machine import this_machine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from launch.sweep import PlannedRun
    from parallelbench.config.run import RunConfig


FILE = "tuned.json"
OPEN = ("precision", "channels_last", "optimizer.implementation", "loader")
"""Keys that a trial may choose, if no override sets them."""


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """The choice for one work."""

    work: str
    """The trial as a sentence."""
    device_type: str
    findings: Findings
    took_s: float
    machine: str
    chosen_at: float
    """Unix time, s."""

    @property
    def overrides(self) -> list[str]:
        """The choice as overrides."""
        return [f"{key}={_typed(value)}" for key, value in self.findings.chosen.items()]


def _typed(value: Any) -> str:
    if isinstance(value, dict):  # a component
        value = value["name"]
    return str(value).lower() if isinstance(value, bool) else str(value)


Kept = dict[str, Choice]
"""Work → its choice."""


def tuned(
    plan: Sequence[PlannedRun],
    try_out: Callable[[Sequence[PlannedRun]], Choice] | None,
    say: Callable[[str], None],
    *,
    again: bool = False,
) -> list[PlannedRun]:
    """The plan with what was chosen for those that ask for it; without `try_out` only what is kept already.

    `try_out` gets all runs that share a choice. `again`: also what is kept is tried once more. Raises `ConfigError`
    where no settings train on one device here.
    """
    alike: dict[tuple[Path, str], list[PlannedRun]] = {}
    for planned in plan:
        if planned.tune:
            alike.setdefault((planned.run.sweep_folder, work_of(planned)), []).append(planned)
    kept = {folder: read(folder) for folder, _ in alike}
    for (folder, work), members in alike.items():
        if try_out is not None and (again or work not in kept[folder]):
            kept[folder][work] = try_out(members)
            say(summary_line(kept[folder][work]))
            write(folder, kept[folder])
    runs: dict[str, PlannedRun] = {}
    for planned in plan:
        choice = kept[planned.run.sweep_folder].get(work_of(planned)) if planned.tune else None
        run = applied(planned, choice) if choice is not None else planned
        runs.setdefault(run_id(run.run), run)
    return list(runs.values())


def untried(plan: Sequence[PlannedRun]) -> int:
    """How many runs ask for tuned settings that have not been chosen yet."""
    kept = {folder: read(folder) for folder in {planned.run.sweep_folder for planned in plan}}
    return sum(planned.tune and work_of(planned) not in kept[planned.run.sweep_folder] for planned in plan)


def known(plan: Sequence[PlannedRun]) -> list[PlannedRun]:
    """The plan with earlier choices; raises `ConfigError` where there is none, because login nodes don't train."""
    if waiting := untried(plan):
        raise ConfigError(
            f"tune=true with launcher={plan[0].run.launcher.name}: for {count_of(waiting, 'run')} nothing has been "
            "tried on one of the cluster's nodes yet. Run `parallelbench tune` with the same overrides in a job with "
            "one device (srun …), then submit again"
        )
    return tuned(plan, None, lambda _: None)


def summary_line(choice: Choice) -> str:
    """A choice in one line."""
    trials = choice.findings.trials
    best = next(trial for trial in trials if trial.patch == choice.findings.chosen)
    base = trials[0]
    settings = " ".join(choice.overrides) or "the settings as they are"
    gain = ""
    if best is not base and best.step_time_s and base.step_time_s:
        gain = f", {base.step_time_s / best.step_time_s:.2f} times as fast as without"
    left = (
        f", {choice.findings.left} more not tried: they would take over 5 % of the training"
        if choice.findings.left
        else ""
    )
    tried = f"{count_of(len(trials), 'trial')} in {choice.took_s:.0f} s{left}"
    return f"tuned for {choice.work} on {choice.device_type}: {settings}{gain} ({tried})"


def applied(planned: PlannedRun, choice: Choice) -> PlannedRun:
    """The run with the choice; raises `ConfigError` where the run can't use it."""
    chosen = choice.findings.chosen
    if (refusal := refusal_of(planned.run, chosen, choice.device_type)) is not None:
        raise ConfigError(
            f"tune=true: {' '.join(choice.overrides)} was chosen without this run, which can't use it ({refusal}). "
            f"Call `parallelbench tune` again with all runs that share {planned.run.sweep_folder / FILE}; tuned runs "
            "then start from the beginning"
        )
    overrides = [text for text in planned.overrides if not text.startswith("tune=")]
    return replace(planned, run=_patched(planned.run, chosen), overrides=[*overrides, *choice.overrides])


def _patched(run: RunConfig, patch: Patch) -> RunConfig:
    plugin = plugin_of(run)
    return from_mapping(patched(to_mapping(run), patch), plugin[0] if plugin else None)


def refusal_of(run: RunConfig, patch: Patch, device_type: str) -> str | None:
    """Why a run can't use other settings; None where it can."""
    try:
        check_run(_patched(run, patch), device_type)
    except ConfigError as error:
        return error.reason
    return None


def work_of(planned: PlannedRun) -> str:
    """Identifies runs that share a choice: the model, the optimizer, the device, and the open keys."""
    run, keys = planned.run, open_keys(planned)
    plain = to_mapping(run)
    for key in ("model", "loader"):
        plain[key] = by_first_name(plain[key])
    settings = {
        key: plain[key] for key in ("model", "precision", "channels_last", "compile", "cores_per_device", "loader")
    }
    if run.compile_scope != "model":
        settings["compile_scope"] = run.compile_scope
    same = [launcher_of(run).device_type(run), settings, run.optimizer.name, keys]
    return hashlib.sha256(canonical_json(same).encode()).hexdigest()[:16]


def open_keys(planned: PlannedRun) -> list[str]:
    """The keys that no override sets."""
    given = {text.lstrip("+~").partition("=")[0] for text in planned.overrides}
    return [key for key in OPEN if not any(name == key or name.startswith(f"{key}.") for name in given)]


def read(folder: Path) -> Kept:
    """Earlier choices for a sweep; raises `ConfigError` for a damaged file."""
    path = folder / FILE
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=Kept)
    except FileNotFoundError:
        return {}
    except (msgspec.DecodeError, OSError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} can't be read ({one_line(str(error))}): delete it to choose anew") from None
    loaders = [choice.findings.chosen.get("loader", {"name": ""}) for choice in kept.values()]
    if not all(isinstance(node, dict) and isinstance(node.get("name"), str) for node in loaders):
        raise ConfigError(f"{path} names no loader where it sets one: delete it to choose anew")
    # Write access to a results folder must not decide what jobs execute.
    if odd := {key for choice in kept.values() for key in choice.findings.chosen} - set(OPEN):
        raise ConfigError(f"{path} sets {', '.join(sorted(odd))}, which no trial chooses: delete it to choose anew")
    return kept


def write(folder: Path, kept: Kept) -> None:
    """Store the choices."""
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / FILE, msgspec.json.format(msgspec.json.encode(kept), indent=2))


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
    alone = msgspec.structs.replace(run, strategy=as_in_file("single"), devices=1, nodes=1, device=device_type)
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
        env=environment(alone, request.device_type, os.environ),
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
    """The suite's loaders."""
    return [resolve(compose_plain([f"loader={name}"]))["loader"] for name in group_choices(None)["loader"]]
