"""The verbs that look after runs that were started: `status`, `cancel`, `logs` and `forget`."""

from __future__ import annotations

import codecs
import shlex
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Group
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from launch.slurm import launcher as slurm
from launch.states import RunStatus, SweepStatus, glance, states_below
from launch.sweep.expansion import overrides_of, varying
from launch.verbs.console import console, existing, listing, print_status, say
from parallelbench.errors import ConfigError, count_of, duration
from parallelbench.results.attempt import DISTURBED
from parallelbench.results.folder import (
    NO_CONFIGURATION,
    RunFolder,
    is_configuration_of_run,
    no_runs,
    other_folders,
)
from parallelbench.results.journal import read_entries

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from launch.states import Look
    from launch.sweep.compose import Extension
    from parallelbench.results.folder import State


def status(folder: str, extension: Extension, *, watch: bool, every: bool, as_json: bool) -> int:
    """The state of the runs below a folder; `watch`: repeated until all have ended; `every`: a row for each run."""
    if as_json and watch:
        raise ConfigError("--json answers once, and --watch goes on: leave one of them out")
    root = existing(folder)

    def look() -> SweepStatus:
        states = _states(root)
        view = overview(states)
        return replace(view, notes=[*view.notes, *_left_out(root, states)])

    if watch:
        code = watch_states(look, every=every)
        for line in disturbed_below(root, states_below(root), extension.plugin).lines:
            say(line)
        return code
    states = _states(root)
    view, disturbed = overview(states), disturbed_below(root, states, extension.plugin)
    view = replace(view, notes=[*view.notes, *_left_out(root, states), *disturbed.lines], disturbed=disturbed.runs)
    if as_json:
        print_status(view)
    else:
        console().print(rendered(view, every=every), crop=False)
    return 0


MOST_JUDGED = 500
"""Runs whose epochs are looked at: reading the results of each takes 4 ms at first."""


class Disturbed(NamedTuple):
    """Finished runs that others disturbed."""

    lines: Sequence[str] = ()
    """As a report says it."""
    runs: Collection[RunFolder] | None = ()
    """None: they are too many to be judged here."""


def disturbed_below(root: Path, states: Look, plugin: str | None) -> Disturbed:
    """Those below a folder; of very many runs, where to ask."""
    if not any(state.label == "ok" for _, state in states):
        return Disturbed()
    if len(states) > MOST_JUDGED:
        return Disturbed(
            [f"whether others disturbed any of more than {MOST_JUDGED} runs is said by `parallelbench report`"], None
        )
    from analysis import excluded, load  # which loads Polars
    from analysis.comparison.exclusions import disturbed_lines

    sweeps, lines, found = list(dict.fromkeys(folder.path.parent for folder, _ in states)), [], set()
    # Sweep by sweep: of a run that several of them measured, one measurement would be read.
    for each in sweeps if len(sweeps) > 1 else [root]:
        runs = load(each, plugin=plugin)
        rows = runs.run.join(excluded(runs), on="run_id")
        found |= {RunFolder(Path(folder)) for folder in rows.filter(rows["exclusion"] == DISTURBED)["folder"]}
        lines += [f"{each.name}: {line}" if len(sweeps) > 1 else line for line in disturbed_lines(runs)]
    return Disturbed(lines, found)


MOST_LEFT_OUT = 3
"""Folders that a line names."""


def _left_out(root: Path, states: Look) -> list[str]:
    """The folders beside the runs that have no state, with the reason."""
    others = sorted(str(path.relative_to(root)) for path in other_folders(root, [run for run, _ in states]))
    more = f" and {len(others) - MOST_LEFT_OUT} more" if len(others) > MOST_LEFT_OUT else ""
    return [f"left out: {', '.join(others[:MOST_LEFT_OUT])}{more}: {NO_CONFIGURATION}"] if others else []


def _states(root: Path) -> Look:
    states = states_below(root)
    if not states:
        raise ConfigError(no_runs(root))
    return states


def cancel(folders: Sequence[str]) -> int:
    """End the jobs of the sweeps below these folders, and of these runs."""
    roots = [existing(folder) for folder in folders]
    runs = [RunFolder(root.absolute()) for root in roots if (root / "config.yaml").exists()]
    sweeps: list[Path] = []
    for root in (each for each in roots if RunFolder(each.absolute()) not in runs):
        below = [root, *sorted(path for path in root.iterdir() if path.is_dir())]
        queued = [path for path in below if slurm.submitted(path)]
        if not queued:
            raise ConfigError(
                f"{root} holds no sweep with queued jobs: name a sweep's folder or one above it, or a run"
            )
        sweeps += queued
    for run in runs:
        if not slurm.submitted(run.path.parent):
            raise ConfigError(f"{run.path} was not queued: what trains here ends with Ctrl-C where it was started")
    if sweeps:
        slurm.cancel_sweeps(list(dict.fromkeys(sweeps)), console())
    if runs:
        slurm.cancel_runs(list(dict.fromkeys(runs)), console())
    return 0


def logs(folder: str, *, follow: bool) -> int:
    """Print the output of a run's latest attempt and of its job; `follow`: and what is added, until the run ends."""
    path = existing(folder).absolute()
    if not (path / "config.yaml").exists():
        raise ConfigError(f"{folder} is no run's folder: `parallelbench status DIR` names those below DIR")
    run = RunFolder(path)

    def files() -> list[Path]:
        attempts = run.attempts()
        return slurm.logs(run) + (sorted(attempts[-1].path.glob("log*.txt")) if attempts else [])

    if follow:
        return follow_output(run, files)
    found = files()
    for file in found:
        print(f"==> {file} <==")
        print(file.read_text(errors="replace"))
    if not found:
        say(f"nothing was printed yet because {slurm.silence(run) or 'the run has not begun'}")
    return 0


def forget(folders: Sequence[str]) -> int:
    """Move runs out of their sweeps, so that submitting measures them anew; prints where they are then."""
    runs = [RunFolder(existing(folder)) for folder in folders]
    require_ended(runs)
    for run in runs:
        print(run.forget())
    return 0


def require_ended(runs: Sequence[RunFolder]) -> None:
    """Raise `ConfigError` where one of these is no run, or a job of its own may still write to it."""
    for run in runs:
        if not (run.path / "config.yaml").exists():
            raise ConfigError(f"{run.path} is no run's folder: `parallelbench status DIR` names those below DIR")
        sweep = run.path.parent
        known = slurm.sweep_status({sweep: [(run, run.state())]}).runs.get(run) if slurm.submitted(sweep) else None
        if known and known.label in ("queued", "running", "unknown"):
            why = f" ({known.reason})" if known.hidden else ""
            ends = f"`parallelbench cancel {shlex.quote(str(sweep))}` ends the sweep's jobs"
            raise ConfigError(f"{run.path} is {known.label}{why}: {ends}{' there' if known.hidden else ''}")


_ORDER = ("unknown", "running", "queued", "missing", "ok")
CALM = ("queued", "missing", "ok")
ALIKE = 20
"""More runs than this in one of these states share a row."""
_STYLES = {"ok": "green", "running": "cyan", "queued": "blue", "unknown": "yellow", "missing": "dim"}


def overview(runs: Look) -> SweepStatus:
    """The runs as their folders describe them, and Slurm where they were submitted to it."""
    statuses = {folder: RunStatus.of_folder(state) for folder, state in runs}
    submitted = {sweep: members for sweep, members in _by_sweep(runs).items() if slurm.submitted(sweep)}
    if not submitted:
        return SweepStatus(statuses)
    of_jobs = slurm.sweep_status(submitted)
    return SweepStatus(statuses | dict(of_jobs.runs), of_jobs.notes)


def _by_sweep(runs: Look) -> dict[Path, list[tuple[RunFolder, State]]]:
    sweeps: dict[Path, list[tuple[RunFolder, State]]] = {}
    for folder, state in runs:
        sweeps.setdefault(folder.path.absolute().parent, []).append((folder, state))
    return sweeps


def rendered(view: SweepStatus, *, every: bool = False) -> Group:
    """Counts and notes, then the runs, those that failed first: a terminal cuts off the end.

    More than `ALIKE` runs that are done, wait or have not begun share a row; `every`: each run has a row of its own.
    """
    counts = Counter(status.label for status in view.runs.values())
    disturbed = view.disturbed or ()
    of_ok = f" ({len(disturbed)} disturbed)" if disturbed else ""
    told = [f"{count} {label}{of_ok if label == 'ok' else ''}" for label, count in sorted(counts.items())]
    lines = [", ".join(told), *view.notes]
    many = {label for label in CALM if counts[label] > ALIKE and not every}
    shown = {folder: status for folder, status in view.runs.items() if status.label not in many or folder in disturbed}
    with_jobs = any(status.job for status in view.runs.values())
    apart = _apart(list(view.runs)) if shown else {}
    columns = ("run", *(("varying",) if apart else ()), *(("job",) if with_jobs else ()), "attempt", "state", "reason")
    several = len({folder.path.parent for folder in view.runs}) > 1
    rows = [
        (
            _name(folder, several=several),
            *((escape(apart[folder]),) if apart else ()),
            *((status.job or "–",) if with_jobs else ()),
            str(status.state.attempt or "–"),
            f"{styled(status.label)}{', disturbed' if folder in disturbed else ''}",
            escape(status.reason or progress(folder, status) or _foreign(folder, status)),
        )
        for folder, status in sorted(shown.items(), key=lambda item: _rank(item[1].label))
    ]
    for label in sorted(many, key=_rank):
        rest = [status for folder, status in view.runs.items() if status.label == label and folder not in shown]
        reason = _most_common_reason(rest)
        blank = ("–",) * (1 + bool(apart) + with_jobs)
        rows.append((count_of(len(rest), "run"), *blank, styled(label), escape(reason)))
    if many:
        lines.append("--all lists every run")
    return Group(*(Text(line) for line in lines), listing(columns, rows))


def _rank(label: str) -> int:
    """The place of a state in the table: states that need attention come first."""
    return _ORDER.index(label) if label in _ORDER else -1


def _apart(folders: Sequence[RunFolder]) -> dict[RunFolder, str]:
    """Run → the overrides in which it differs from the others, as far as its name doesn't show them; empty: none."""
    overrides = varying([overrides_of(folder) for folder in folders])
    return dict(zip(folders, overrides, strict=True)) if any(overrides) else {}


def _name(folder: RunFolder, *, several: bool) -> str:
    """The run's folder, as `logs` takes it: below its sweep's folder where there are several sweeps."""
    path = folder.path
    return escape(f"{path.parent.name}/{path.name}" if several else path.name)


def _foreign(folder: RunFolder, status: RunStatus) -> str:
    """Why a folder that has not begun never will: its configuration is not that of a run."""
    foreign = (folder.path / "config.yaml").exists() and not is_configuration_of_run(folder.path)
    return "its config.yaml is no run's" if status.label == "missing" and foreign else ""


def _most_common_reason(statuses: Iterable[RunStatus]) -> str:
    """Most common reason; runs that are done have none."""
    reasons = Counter(status.reason for status in statuses if status.state.state != "done" and status.reason)
    ((reason, count),) = reasons.most_common(1) or [("", 0)]
    return f"{reason} ({count} of them)" if len(reasons) > 1 else reason


def progress(folder: RunFolder, status: RunStatus) -> str:
    """The epoch of a running run, and about how long it will take."""
    if status.label != "running" or not (attempts := folder.attempts()):
        return ""
    total, began, rows = 0, 0.0, []
    for line in read_entries(attempts[-1].path / "journal-rank0.jsonl"):
        if line.get("event") == "phase" and "epochs" in line:
            total, began = line["epochs"], began or line["time"]
        elif line.get("table") == "epochs":
            rows.append((line["row"]["epoch"], line["row"]["finished_at"]))
    if not total:
        return "starting"
    # A resumed attempt's journal begins with the epochs of earlier ones, which say nothing of the time since it began.
    own = [(epoch, finished_at) for epoch, finished_at in rows if finished_at > began]
    if not own:
        return f"epoch {rows[-1][0] + 1 if rows else 1}/{total}"
    epoch, last = own[-1]
    left_s = (last - began) / len(own) * (total - epoch) - (time.time() - last)
    return f"epoch {epoch}/{total}, about {duration(max(0.0, left_s))} left"


def styled(label: str) -> str:
    """A state, coloured."""
    return f"[{_STYLES.get(label, 'red')}]{label}[/]"


PAUSE_S, MOST_PAUSE_S = 5.0, 60.0
"""Between two updates of states, at first and at most: each one queries the scheduler."""
POLL_S = 0.5
"""Between two looks at the files that runs and jobs print to."""
_CHUNK = 1 << 16
_NOT_FAILED = {*CALM, "running"}


def pauses() -> Iterator[float]:
    """Growing pauses, s."""
    pause_s = PAUSE_S
    while True:
        yield pause_s
        pause_s = min(1.5 * pause_s, MOST_PAUSE_S)


def watch_states(look: Callable[[], SweepStatus], *, every: bool) -> int:
    """Show states until all runs have ended: on a terminal a table that changes, in a pipe the first and the last one.

    The last one stays also where Ctrl-C ends the watch. Returns 1 if runs have failed, or can't be known from here:
    those are not waited for.
    """
    view, shown = look(), console()
    if view.live and not shown.is_terminal:
        shown.print(rendered(view, every=every), crop=False)
    try:
        with Live(console=shown, auto_refresh=False, transient=True) as live:
            for pause_s in pauses():
                live.update(rendered(view, every=every), refresh=True)
                if not view.live:
                    break
                time.sleep(pause_s)
                view = look()
    finally:
        shown.print(rendered(view, every=every), crop=False)
    return _ended(view)


def _ended(view: SweepStatus) -> int:
    """Say what was not waited for; returns the exit code."""
    if hidden := sum(status.hidden for status in view.runs.values()):
        say(f"not waited for: {count_of(hidden, 'run')} that can't be known from here")
    return int(any(map(_failed, view.runs.values())))


def _failed(status: RunStatus) -> bool:
    """Also where its job ended before the run began."""
    return status.label not in _NOT_FAILED or (status.label == "missing" and bool(status.job))


@dataclass
class _Printed:
    """Files that grow, and how much of each was printed.

    They are opened anew for each look: NFS shows only then what another node has written.
    """

    offsets: dict[Path, int] = field(default_factory=dict)
    decoders: dict[Path, codecs.IncrementalDecoder] = field(default_factory=dict)
    last: Path | None = None

    def print_new(self, files: Sequence[Path]) -> None:
        """Print what was added; a line names the file wherever it is another one than before."""
        for file in files:
            for text in self._added(file):
                if file != self.last:
                    print(f"==> {file} <==")
                    self.last = file
                print(text, end="", flush=True)

    def _added(self, file: Path) -> Iterator[str]:
        decoder = self.decoders.setdefault(file, codecs.getincrementaldecoder("utf-8")("replace"))
        try:
            with file.open("rb") as opened:
                opened.seek(self.offsets.get(file, 0))
                while chunk := opened.read(_CHUNK):
                    self.offsets[file] = opened.tell()
                    yield decoder.decode(chunk)
        except FileNotFoundError:
            return


def follow_output(run: RunFolder, files: Callable[[], Sequence[Path]]) -> int:
    """Print a run's output as it comes, until the run has ended; returns 1 if it has failed.

    The files are looked at twice a second, the scheduler after growing pauses, and only while no attempt is going on.
    """
    printed, asking, ask_at, said = _Printed(), pauses(), 0.0, ""
    while True:
        files_before, state = files(), glance(run)
        status = RunStatus.of_folder(state)
        if state.state not in ("running", "done") and time.monotonic() >= ask_at:
            status = overview([(run, state)]).runs[run]
            ask_at = time.monotonic() + next(asking)
            if status.label in ("queued", "unknown") and status.reason != said:
                said = status.reason
                say(f"{status.label}: {status.reason}")
            live = status.live
        else:
            live = state.state != "done"
        # What was printed before its end was seen is in these files.
        printed.print_new(list(dict.fromkeys([*files_before, *files()])))
        if not live:
            break
        time.sleep(POLL_S)
    say(f"{run.path.name}: {status.label}{f': {status.reason}' if status.reason else ''}")
    return int(_failed(status))
