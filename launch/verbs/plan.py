"""The verbs `show` and `plan`, which start nothing and write nothing; how long what is still to start will take."""

from __future__ import annotations

import io
import sys
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console
from rich.markup import escape

from launch.checks import check_results, prepare_each
from launch.known_times import Known
from launch.launcher import launcher_of
from launch.states import states_of
from launch.sweep import expand, one_run
from launch.sweep.compose import group_choices
from launch.sweep.expansion import varying
from launch.verbs.console import WIDTH, console, listing, plan_row, print_json, say
from launch.verbs.run import notes_on_sources
from parallelbench.config.build import whole_mapping
from parallelbench.config.identity import run_id, slug
from parallelbench.errors import ConfigError, count_of, duration
from parallelbench.results.folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from rich.console import RenderableType

    from launch.launcher import Prepared
    from launch.sweep import PlannedRun
    from launch.sweep.compose import Extension
    from parallelbench.config.run import RunConfig
    from parallelbench.results.folder import State


def show(overrides: Sequence[str], extension: Extension) -> int:
    """The resolved configuration of one run, its id, the choices of each group, and what `run` would refuse."""
    import yaml

    planned = one_run(overrides, extension, instead="use `parallelbench plan`")
    run = _on_its_device(planned)
    print(yaml.safe_dump(whole_mapping(run), sort_keys=False), end="")
    print(f"\nrun id      {run_id(run)}")
    print(f"run folder  {RunFolder.of(run).path}\n")
    print("choices:")
    for group, names in group_choices(extension.conf).items():
        print(f"  {group:11} {' '.join(names)}")
    (checked,) = prepare_each([planned], launcher_of(planned.run).prepare)
    problem = checked if isinstance(checked, ConfigError) else _unwritable([checked])
    if problem is not None:  # shown all the same, so that the user sees what to change
        print(f"parallelbench: this run would be refused: {problem}", file=sys.stderr)
    return 0


def plan(overrides: Sequence[str], extension: Extension, *, as_json: bool) -> int:
    """Every run of a sweep, its resources, and its state, and what the launcher adds to that. Writes nothing.

    `as_json`: one object in place of the table, with what else would be printed as its notes.
    """
    told = io.StringIO()
    shown = Console(file=told, width=WIDTH) if as_json else console()
    tell = partial(shown.print, highlight=False, markup=False, soft_wrap=True)
    runs = expand(overrides, extension, tell=tell)
    for line in notes_on_sources(runs):
        tell(line)
    launcher = launcher_of(runs[0].run)
    checked = prepare_each(runs, launcher.prepare)
    prepared, refused = [item for item in checked if not isinstance(item, ConfigError)], _told(checked)
    states = states_of(item.folder for item in prepared)
    if not as_json:
        shown.print(_table(runs, checked, states, list(refused)), crop=False)
    for number, (count, text) in enumerate(refused.values(), start=1):
        line = f"({number}) [red]refused[/], {count_of(count, 'run')}: {escape(text)}"
        shown.print(line, highlight=False, soft_wrap=True)
    if any(item.oversubscribed for item in prepared):
        tell("oversubscribed: more devices than cores; such runs are marked and enter no timing figure")
    accepted, starts = launcher.show_plan(prepared, states, shown) if prepared else (True, [])
    unwritable = _unwritable(item for item, state in zip(prepared, states, strict=True) if state.to_run)
    if unwritable is not None:  # what is there can be looked at all the same
        shown.print(f"[red]refused[/]: {escape(str(unwritable))}", highlight=False, soft_wrap=True)
    to_start, seconds, measured = sum(starts), None if any(starts) else 0.0, 0
    if to_start:  # the times of thousands of runs are not read for nothing
        known = Known.of(prepared, states)
        expected, measured = known.together(compress(prepared, starts)), known.count
        seconds = expected.middle if expected else None
    accepted = accepted and unwritable is None and len(prepared) == len(runs)
    if as_json:
        notes = told.getvalue().splitlines()
        rows, time_s = list(_rows(runs, checked, states, refused)), seconds if prepared else None
        print_json("plan", accepted=accepted, runs=rows, to_start=to_start, estimated_time_s=time_s, notes=notes)
    elif prepared:
        say(_summed_up(len(prepared), to_start, seconds, measured))
    return 0 if accepted else 2


def _rows(
    runs: Sequence[PlannedRun],
    checked: Sequence[Prepared | ConfigError],
    known: Sequence[State],
    refused: Mapping[str, tuple[int, str]],
) -> Iterator[dict[str, Any]]:
    """The plan's runs as `--json` prints them."""
    states = iter(known)
    for planned, item in zip(runs, checked, strict=True):
        if isinstance(item, ConfigError):
            run = _on_its_device(planned)
            yield plan_row(run, slug(run), state="refused", reason=refused[item.reason][1], processes=None)
        else:
            run, state = item.planned.run, next(states)
            reason = state.outcome.reason if state.outcome else ""
            processes = run.strategy.processes(run, run.device)
            yield plan_row(run, slug(run), state=state.label, reason=reason, processes=processes)


def _unwritable(to_start: Iterable[Prepared]) -> ConfigError | None:
    """Why the runs to start could not be written; None where they can."""
    try:
        check_results(to_start)
    except ConfigError as error:
        return error
    return None


def _table(
    runs: Sequence[PlannedRun],
    checked: Sequence[Prepared | ConfigError],
    known: Sequence[State],
    reasons: Sequence[str],
) -> RenderableType:
    apart = varying([planned.overrides for planned in runs], besides=("nodes", "epochs"))
    states = iter(known)
    rows = []
    for planned, item, differs in zip(runs, checked, apart, strict=True):
        if isinstance(item, ConfigError):
            run, processes = _on_its_device(planned), "–"
            state = f"[red]refused[/] ({reasons.index(item.reason) + 1})"
        else:
            run = item.planned.run
            processes, state = str(run.strategy.processes(run, run.device)), _describe(next(states))
            state += " (oversubscribed)" if item.oversubscribed else ""
        cells = (f"{run.devices} {run.device}", processes, str(run.nodes), str(run.epochs), state)
        rows.append((RunFolder.of(run).path.name, *((escape(differs),) if any(apart) else ()), *cells))
    columns = ("devices", "processes", "nodes", "epochs", "state")
    return listing(("run", *(("varying",) if any(apart) else ()), *columns), rows)


def _told(checked: Sequence[Prepared | ConfigError]) -> dict[str, tuple[int, str]]:
    """Reason → how many runs are refused for it, and what is told of them: what to choose is searched for only once."""
    found: dict[str, list[ConfigError]] = {}
    for item in checked:
        if isinstance(item, ConfigError):
            found.setdefault(item.reason, []).append(item)
    texts = {reason: first.told_with(others) for reason, (first, *others) in found.items()}
    return {reason: (len(found[reason]), "; ".join(text.splitlines())) for reason, text in texts.items()}


def _on_its_device(planned: PlannedRun) -> RunConfig:
    """The run with the device that it will have, also where it is refused."""
    return msgspec.structs.replace(planned.run, device=launcher_of(planned.run).device_type(planned.run))


def _describe(state: State) -> str:
    from launch.verbs.status import styled

    reason = f": {escape(state.outcome.reason)}" if state.outcome and state.outcome.outcome != "ok" else ""
    again = ", will run again" if state.state == "failed" and state.to_run else ""
    return f"{styled(state.label)}{reason}{again}"


def _summed_up(runs: int, to_start: int, seconds: float | None, measured: int) -> str:
    """The line that ends a plan."""
    what = f"{count_of(runs, 'run')}, {to_start} to start"
    if not to_start:
        return what
    if seconds is None:
        return f"{what}; none is done, so their time is not known yet: plan again after the first"
    return f"{what}: about {duration(seconds)} one after another, as long as the {measured} done took"
