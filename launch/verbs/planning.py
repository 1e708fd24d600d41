"""The verbs that show runs without starting them: `show` and `plan`. They write nothing."""

from __future__ import annotations

import sys
from collections import Counter
from typing import TYPE_CHECKING

import msgspec
from rich.markup import escape

from launch.launcher import launcher_of
from launch.states import states_of
from launch.sweep import expand, one_run
from launch.sweep.compose import group_choices
from launch.sweep.varying import varying
from launch.verbs.console import console, say
from launch.verbs.listing import listing
from parallelbench.errors import ConfigError
from parallelbench.spec.identity import run_id
from parallelbench.spec.mapping import whole_mapping
from parallelbench.store.folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType

    from launch.preparation import Prepared
    from launch.sweep import PlannedRun
    from launch.sweep.compose import Extension
    from parallelbench.spec.config import RunConfig
    from parallelbench.store.folder import State


def show(overrides: Sequence[str], extension: Extension) -> int:
    """The resolved configuration of one run, its id, the choices of each group, and what `run` would refuse."""
    import yaml

    (planned,) = _as_tuned([one_run(overrides, extension, instead="use `parallelbench plan`")])
    run = _on_its_device(planned)
    print(yaml.safe_dump(whole_mapping(run), sort_keys=False), end="")
    print(f"\nrun id      {run_id(run)}")
    print(f"run folder  {RunFolder.of(run).path}\n")
    print("choices:")
    for group, names in group_choices(extension.conf).items():
        print(f"  {group:10} {' '.join(names)}")
    (checked,) = _checked([planned])
    if isinstance(checked, ConfigError):  # shown all the same, so that the user sees what to change
        print(f"parallelbench: this run would be refused: {checked}", file=sys.stderr)
    return 0


def plan(overrides: Sequence[str], extension: Extension) -> int:
    """Every run of a sweep, its resources, and its state, and what the launcher adds to that. Writes nothing."""
    runs = _as_tuned(expand(overrides, extension))
    checked = _checked(runs)
    prepared = [item for item in checked if not isinstance(item, ConfigError)]
    states = states_of(item.folder for item in prepared)
    console().print(_table(runs, checked, states), crop=False)
    for line in _remarks(checked):
        console().print(line, highlight=False, soft_wrap=True)
    accepted = not prepared or launcher_of(runs[0].run).show_plan(prepared, states, console())
    return 0 if accepted and len(prepared) == len(runs) else 2


def _table(
    runs: Sequence[PlannedRun], checked: Sequence[Prepared | ConfigError], known: Sequence[State]
) -> RenderableType:
    apart = varying([planned.overrides for planned in runs], besides=("nodes", "epochs"))
    states, numbers = iter(known), {reason: number for number, reason in enumerate(_reasons(checked), start=1)}
    rows = []
    for planned, item, differs in zip(runs, checked, apart, strict=True):
        if isinstance(item, ConfigError):
            run, processes = _on_its_device(planned), "–"
            state = f"[red]refused[/] ({numbers[str(item)]})"
        else:
            run = item.planned.run
            processes, state = str(run.strategy.processes(run, item.device_type)), _describe(next(states))
            state += " (oversubscribed)" if item.oversubscribed else ""
        cells = (f"{run.devices} {run.device}", processes, str(run.nodes), str(run.epochs), state)
        rows.append((RunFolder.of(run).path.name, *((escape(differs),) if any(apart) else ()), *cells))
    columns = ("devices", "processes", "nodes", "epochs", "state")
    return listing(("run", *(("varying",) if any(apart) else ()), *columns), rows)


def _reasons(checked: Sequence[Prepared | ConfigError]) -> Counter[str]:
    """Why runs are refused, and how many for each reason."""
    return Counter(str(item) for item in checked if isinstance(item, ConfigError))


def _remarks(checked: Sequence[Prepared | ConfigError]) -> Iterator[str]:
    """Notes about several rows of the table."""
    for number, (reason, count) in enumerate(_reasons(checked).items(), start=1):
        yield f"({number}) [red]refused[/], {count} run{'' if count == 1 else 's'}: {escape(reason)}"
    if any(not isinstance(item, ConfigError) and item.oversubscribed for item in checked):
        yield "oversubscribed: more devices than cores; such runs are marked and enter no timing figure"


def _on_its_device(planned: PlannedRun) -> RunConfig:
    """The run with the device that it will have, also where it is refused."""
    return msgspec.structs.replace(planned.run, device=launcher_of(planned.run).device_type(planned.run))


def _as_tuned(plan: list[PlannedRun]) -> list[PlannedRun]:
    """The plan with the settings that are chosen already; prints for how many runs none are."""
    if not any(planned.tune for planned in plan):
        return plan
    from launch.tuning.choices import tuned, untried

    if waiting := untried(plan):
        here = launcher_of(plan[0].run).trains_here
        who = "a trial at submission" if here else "`parallelbench tune` on the cluster"
        say(f"tune=true: {who} must choose settings for {waiting} of these runs, which are shown without them")
    return tuned(plan, None, say)


def _checked(runs: Sequence[PlannedRun]) -> list[Prepared | ConfigError]:
    """Each run, checked for where it will train, or why it is refused."""
    launcher = launcher_of(runs[0].run)
    checked: list[Prepared | ConfigError] = []
    for planned in runs:
        try:
            checked.append(launcher.prepare(planned))
        except ConfigError as error:
            checked.append(error)
    return checked


def _describe(state: State) -> str:
    from launch.verbs.overview import styled

    reason = f": {escape(state.outcome.reason)}" if state.outcome and state.outcome.outcome != "ok" else ""
    again = ", will run again" if state.state == "failed" and state.to_run else ""
    return f"{styled(state.label)}{reason}{again}"
