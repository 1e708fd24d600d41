"""The verbs that start work: `run`, `submit`, `tune` and `prepare`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from launch.launcher import SubmitOptions, launcher_of
from launch.preparation import prepare_all
from launch.sweep import expand, one_run
from launch.verbs.console import console, say
from parallelbench.errors import ConfigError, choices
from parallelbench.store.attempt import OUTCOMES, PUBLISHED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from launch.preparation import Prepared
    from launch.sweep import PlannedRun
    from launch.sweep.compose import Extension


def run(overrides: Sequence[str], extension: Extension) -> int:
    """Do one run here and now, also where it failed before. The last line printed is the run folder."""
    planned = one_run(overrides, extension)
    launcher = launcher_of(planned.run)
    if not launcher.trains_here:
        raise ConfigError(f"launcher={launcher.name} queues jobs, and `run` runs here, now: use `parallelbench submit`")
    prepared = _prepared(_tuned([planned]))
    folder = prepared[0].folder
    if (state := folder.state()).state == "done":
        console().print(f"this run is done already ({state.label}); repeat=1 measures it once more")
    code = launcher.submit(prepared, SubmitOptions(retry=frozenset(OUTCOMES)), console())
    print(folder.path)
    return code


def submit(overrides: Sequence[str], extension: Extension, *, retry: str | None, max_gpu_hours: float | None) -> int:
    """Run what is missing of a sweep, by the launcher that it names."""
    options = SubmitOptions(_outcomes(retry), max_gpu_hours)
    prepared = _prepared(_tuned(expand(overrides, extension)))
    return launcher_of(prepared[0].planned.run).submit(prepared, options, console())


def tune(overrides: Sequence[str], extension: Extension) -> int:
    """Try settings here, and keep the fastest for `submit … tune=true` of the same sweep; does no runs."""
    from launch.tuning.choices import tuned
    from launch.tuning.trials import try_out_here

    plan = [replace(planned, tune=True) for planned in expand(overrides, extension)]
    _prepared(plan)
    tuned(plan, try_out_here, say, again=True)
    say(f"`parallelbench submit` with the same overrides and tune=true uses this for {len(plan)} run(s)")
    return 0


def prepare_data(overrides: Sequence[str], extension: Extension) -> int:
    """Download and convert a data set once."""
    from parallelbench.data.prepare import prepare

    planned = one_run(overrides, extension, instead="prepare one data set at a time").run
    folder = planned.site.data_folder
    for part in (partial(prepare, planned.data), partial(planned.loader.prepare, planned.data)):
        part(folder, progress=lambda text: console().print(text, highlight=False))
    return 0


def _tuned(plan: list[PlannedRun]) -> list[PlannedRun]:
    """The plan with the settings that a trial chooses, where the plan asks for one."""
    if not any(planned.tune for planned in plan):
        return plan
    from launch.tuning.choices import known, tuned
    from launch.tuning.trials import try_out_here

    if not launcher_of(plan[0].run).trains_here:
        return known(plan)
    _prepared(plan)  # nothing is tried for runs that are refused
    return tuned(plan, try_out_here, say)


def _prepared(plan: Sequence[PlannedRun]) -> list[Prepared]:
    return prepare_all(plan, launcher_of(plan[0].run).prepare)


def _outcomes(text: str | None) -> frozenset[str]:
    """The outcomes that `--retry` names."""
    names = text.split(",") if text else []
    valid = [name for name in OUTCOMES if name not in PUBLISHED]
    for name in names:
        if name not in valid:
            raise ConfigError(f"--retry {text}: {name} is no outcome to try again; {choices(name, valid)}")
    return frozenset(names)
