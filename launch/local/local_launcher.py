"""Run a sweep here, one run after the other."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from launch.attempt.command import plugin_of
from launch.attempt.outcome import judge, publish_if_finished
from launch.attempt.supervise import Interrupted, stoppable, supervise
from launch.attempt.warm_workers import WarmWorkers
from parallelbench.errors import ConfigError, StorageError
from parallelbench.rank.devices import this_machine
from parallelbench.spec.check import check_run
from parallelbench.spec.launchers import expanded, prepare_line
from parallelbench.store.folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from launch.local.progress import Display, RunWatcher
    from launch.sweep import PlannedRun
    from parallelbench.rank.devices import Machine
    from parallelbench.spec.config import RunConfig
    from parallelbench.store.attempt import Attempt, Outcome
    from parallelbench.store.folder import State


@dataclass(frozen=True)
class Prepared:
    """A run that may start on this machine."""

    planned: PlannedRun
    folder: RunFolder
    device_type: str
    oversubscribed: bool


def prepare(plan: Sequence[PlannedRun], prepare_one: Callable[[PlannedRun], Prepared]) -> list[Prepared]:
    """Check every run before any starts; raises `ConfigError` that names all that can't be done. Writes nothing."""
    prepared: list[Prepared] = []
    refused: list[str] = []
    for planned in plan:
        try:
            prepared.append(prepare_one(planned))
        except ConfigError as error:
            run = planned.run
            name = f"{run.data.name}, {run.model.name}, {run.strategy.name} × {run.devices}"
            refused.append(str(error) if len(plan) == 1 else f"{name}: {error}")
    if refused:
        advice = "; the other runs could start without it" if prepared else ""
        raise ConfigError("\n".join(f"{line}{advice}" for line in dict.fromkeys(refused)))
    return prepared


def prepare_here(planned: PlannedRun, machine: Machine) -> Prepared:
    """Check one run for this machine; its device type is from here on the one that it will have."""
    device_type = machine.device_type(planned.run.device)
    run = msgspec.structs.replace(planned.run, device=device_type)
    if run.nodes > 1:
        raise ConfigError(f"nodes={run.nodes}, but launcher={run.launcher.name} has this one machine: choose nodes=1")
    oversubscribed = machine.require(
        devices=run.devices,
        device_type=device_type,
        cores_per_device=run.cores_per_device,
        oversubscribe=run.launcher.oversubscribe,
    )
    check_run(run, device_type)
    check_data(run)
    check_writable(expanded(run.results))
    return Prepared(replace(planned, run=run), RunFolder.of(run), device_type, oversubscribed)


def check_data(run: RunConfig) -> None:
    """Refuse a run whose data set is not prepared."""
    folder = run.site.data_folder
    missing = run.data.missing_files(folder)
    if missing:
        names = ", ".join(path.name for path in missing)
        raise ConfigError(
            f"data={run.data.name} is not prepared: {names} missing in {missing[0].parent}; "
            f"run `{prepare_line(run.data.name, folder)}`"
        )


def check_writable(path: Path) -> None:
    """Refuse a results folder that can't be written, without writing."""
    # os.path.exists is also right about folders that can't be looked into and names that are too long.
    existing = next(parent for parent in (path.absolute(), *path.absolute().parents) if os.path.exists(parent))
    if too_long := [part for part in path.parts if len(os.fsencode(part)) > os.pathconf(existing, "PC_NAME_MAX")]:
        raise ConfigError(f"results={path} can't be written: {too_long[0][:20]}… is too long a name")
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK) or _read_only(existing):
        raise ConfigError(f"results={path} can't be written ({existing}): choose another folder with results=DIR")


def _read_only(path: Path) -> bool:
    return bool(os.statvfs(path).f_flag & os.ST_RDONLY)


def submit(prepared: Sequence[Prepared], display: Display, *, retry: frozenset[str] = frozenset()) -> list[State]:
    """Run what is missing or worth another try, and outcomes in `retry`; returns all states, in the plan's order."""
    states = [item.folder.state() for item in prepared]
    todo = [item for item, state in zip(prepared, states, strict=True) if _wanted(state, retry)]
    failed = sum(state.state == "failed" and not _wanted(state, retry) for state in states)
    for item in todo:
        item.folder.write_intent(item.planned.run, item.planned.overrides)
    with (
        WarmWorkers() as workers,
        stoppable(),
        display.sweep(total=len(todo), done=len(prepared) - len(todo) - failed, failed=failed),
    ):
        for item in todo:
            start(item, display, workers, retry=retry)
    return [item.folder.state() for item in prepared]


def _wanted(state: State, retry: frozenset[str]) -> bool:
    return state.to_run or (state.state == "failed" and state.label in retry)


def start(
    item: Prepared, display: Display, workers: WarmWorkers, *, retry: frozenset[str] = frozenset()
) -> Outcome | None:
    """Run one attempt, unless somebody else does or the last one only lacks its publication."""
    run, folder = item.planned.run, item.folder
    # Read before the state: should another process begin an attempt after this line, the claim below fails.
    previous = folder.attempts()
    if not _wanted(folder.state(), retry):
        return None
    if previous and (outcome := publish_if_finished(folder, run, previous[-1])):
        return outcome
    attempt = folder.claim(after=previous[-1].number if previous else 0)
    if attempt is None:
        return None
    _describe(item, attempt)
    with display.run(folder.path.name, epochs=run.epochs) as watcher:
        outcome = _execute(item, attempt, watcher, workers)
        watcher.finished(outcome)
    return outcome


def _describe(item: Prepared, attempt: Attempt) -> None:
    run = item.planned.run
    try:
        attempt.write_config(run)
        attempt.describe(
            processes=run.strategy.processes(run, item.device_type),
            device_type=item.device_type,
            oversubscribed=item.oversubscribed,
            warnings=this_machine().caveats(
                devices=run.devices, device_type=item.device_type, cores_per_device=run.cores_per_device
            ),
        )
    except StorageError:
        attempt.withdraw()
        raise


def _execute(item: Prepared, attempt: Attempt, watcher: RunWatcher, workers: WarmWorkers) -> Outcome:
    run = item.planned.run
    if run.launcher.name == "inline":
        return run_inline(item, attempt)
    return supervise(item.folder, run, attempt, device_type=item.device_type, watcher=watcher, begin=workers.start)


def run_inline(item: Prepared, attempt: Attempt) -> Outcome:
    """Train in this process: `breakpoint()` and debuggers work. Affects the process (threads, cores, seeds)."""
    from parallelbench.rank.worker import work

    try:
        code = work(attempt, time.time(), *plugin_of(item.planned.run)[:1])
    except Interrupted as interruption:
        attempt.finish("killed", f"interrupted by {interruption}")
        raise
    published = publish_if_finished(item.folder, item.planned.run, attempt)
    return published or attempt.finish(*judge(attempt, 1, code))
