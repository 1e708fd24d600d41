"""A run as comparisons see it: its values, its environment, and the session that it was measured in.

Of environments there is what must match, and what is reported. Runs of a session were measured together, so that what
changes slowly on a machine was the same for all of them.
"""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import polars as pl

from analysis.comparison.work import PROBED, configurations, definitions, is_one_device
from analysis.metrics.disturbance import is_disturbed
from analysis.metrics.epochs import AS_TEXT, numbered
from analysis.metrics.runs import per_run
from analysis.runs.reader import once
from parallelbench.measure import environment_match

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from analysis.comparison.work import Work
    from analysis.runs.reader import Runs


@dataclass(frozen=True, eq=False, slots=True)
class ComparedRun:
    """The data of a run that a comparison needs."""

    runs: Runs
    run_id: str
    repeat: int
    definition: Work
    """Its definition, without its repeat."""
    environment: Work
    """The entries of its environment that must match, or are reported."""
    data_samples: int | None
    """Samples of its training set; None where an old result doesn't say."""
    epoch_samples: int | None
    """Samples that it trains on in an epoch; likewise."""
    data_sha256: str | None
    """What its data set holds; likewise."""
    is_warmed: bool
    """Whether the parity check ran before its training, which warms up devices and libraries. It never runs for
    `single`, whatever `measure.parity` says.
    """

    def value(self, metric: str) -> float | None:
        """A metric of `per_run`, or a number of the run table; None where it was not measured, or in a window that
        others disturbed.
        """
        return _values(self.runs, metric)[self.run_id]

    def words(self, column: str) -> tuple[str, ...]:
        """What a text of `per_run` says, word by word; empty where it is null."""
        return tuple((_texts(self.runs, column)[self.run_id] or "").split())

    def energy_flags(self, metric: str) -> frozenset[str]:
        """Flags of the energies that a metric is made of; empty for metrics of anything else."""
        return _energy_flags(self.runs, metric).get(self.run_id, frozenset()) if is_energy(metric) else frozenset()

    def probes(self, key: str) -> tuple[float, ...]:
        """What was measured of the machine by this name, at the run's start and at its end; without what is unknown."""
        return _probed(self.runs, key)[self.run_id]

    @property
    def span(self) -> Span:
        """Unix times of the start of its first and the end of its last epoch; infinite where unknown."""
        return spans(self.runs).get(self.run_id, UNKNOWN)

    @property
    def session(self) -> Hashable:
        """What it was measured in, together with others."""
        return sessions_of(self.runs)[self.run_id]

    @property
    def is_one_device(self) -> bool:
        """Whether it is its framework's own training on one device."""
        return is_one_device(self.definition["strategy.name"], self.definition["devices"])

    @property
    def sweep_place(self) -> int:
        """Where the file of its sweep names its configuration first."""
        return int(self._of_sweep("sweep_place", 0))

    @property
    def sweep_baseline(self) -> str | None:
        """The configuration that its sweep compares with, where it names one."""
        name: str | None = self._of_sweep("sweep_baseline", None)
        return name

    def _of_sweep(self, key: str, default: Any) -> Any:
        part = configurations(self.runs)[self.run_id].get(key)
        return default if part is None else msgspec.json.decode(part)


@once
def _probed(runs: Runs, key: str) -> dict[str, tuple[float, ...]]:
    rows = runs.run.select("run_id", *PROBED[key]).rows()
    return {run_id: tuple(speed for speed in speeds if speed is not None) for run_id, *speeds in rows}


@once
def compared_runs(runs: Runs) -> dict[str, ComparedRun]:
    """Run id → the data of the run that a comparison needs."""
    environments, defined = circumstances_of(runs), definitions(runs)
    columns = ("run_id", "repeat", "train_samples", "dropped_samples", "data_sha256")
    # The check may run without a verdict; packed runs have a verdict without its time.
    checked = pl.any_horizontal(pl.col("startup_parity_s", "parity_passed").is_not_null())
    return {
        run_id: ComparedRun(
            runs=runs,
            run_id=run_id,
            repeat=repeat,
            definition=defined[run_id],
            environment=environments[run_id],
            data_samples=samples,
            epoch_samples=None if samples is None or dropped is None else samples - dropped,
            data_sha256=content,
            is_warmed=warmed,
        )
        for run_id, repeat, samples, dropped, content, warmed in runs.run.select(*columns, warmed=checked).rows()
    }


@once
def _values(runs: Runs, metric: str) -> dict[str, float | None]:
    known = runs.run if metric in runs.run.columns else per_run(runs)
    values = dict(zip(runs.run["run_id"].to_list(), known[metric].to_list(), strict=True))
    return values | dict.fromkeys(is_disturbed(runs, metric))


@once
def _texts(runs: Runs, column: str) -> dict[str, str | None]:
    return dict(per_run(runs).select("run_id", column).rows())


def is_energy(metric: str) -> bool:
    """Whether a metric is an energy of GPUs."""
    return metric.startswith("gpu_energy_")


@once
def _energy_flags(runs: Runs, metric: str) -> dict[str, frozenset[str]]:
    """Of the runs that measured it. A metric of an epoch may be asked of any epoch, so the flags of all count."""
    if metric in runs.epochs.columns:
        rows = numbered(runs, "epochs", metric, "telemetry_flags").with_columns(AS_TEXT, flags="telemetry_flags")
    else:
        rows = per_run(runs).select("run_id", metric, flags="energy_flags")
    flags: dict[str, frozenset[str]] = defaultdict(frozenset)
    for run_id, text in rows.drop_nulls([metric, "flags"]).select("run_id", "flags").unique().rows():
        flags[run_id] |= frozenset(text.split())
    return dict(flags)


@once
def environments_of(runs: Runs) -> dict[str, Work]:
    """Run id → the entries of its environment that must match or are reported. Equal ones share one object."""
    read: dict[Any, Work] = {}
    of_runs = {}
    for run_id, text in runs.run.select("run_id", "environment_json").rows():
        if text not in read:
            parts = msgspec.json.decode(text or "{}", type=dict[str, msgspec.Raw])
            # Nearly all runs have a load average of their own. What else they have in common is read once.
            same = tuple((key, bytes(raw)) for key, raw in parts.items() if key not in environment_match.VOLATILE)
            if same not in read:
                read[same] = _relevant(msgspec.json.decode(text or "{}"))
            read[text] = read[same]
        of_runs[run_id] = read[text]
    return of_runs


def circumstances_of(runs: Runs) -> dict[str, Work]:
    """Run id → its environment, and whether a warm process was forked. Equal ones share one object."""
    shared: dict[tuple[int, bool], Work] = {}
    of_runs = {}
    for run_id, packed in runs.run.select("run_id", pl.col("packed").fill_null(False)).rows():
        environment = environments_of(runs)[run_id]
        own = {environment_match.PACKED: packed}
        of_runs[run_id] = shared.setdefault((id(environment), packed), environment | own)
    return of_runs


def _relevant(environment: Mapping[str, Any]) -> Work:
    entries = environment_match.entries(environment)
    kept = (
        environment_match.must_match,
        environment_match.is_reported,
        (environment_match.VERSION, environment_match.FRAMEWORK).__contains__,
    )
    return {key: value for key, value in entries.items() if any(keeps(key) for keeps in kept)}


GAP_S = 600.0
"""Pause after which the next run belongs to another session."""

Span = tuple[float, float]
"""Unix times; infinite where unknown."""
UNKNOWN: Span = (float("-inf"), float("inf"))


@once
def spans(runs: Runs) -> dict[str, Span]:
    """Run id → Unix times of the start of its first epoch and of the end of its last one.

    Of a run that asked for no epoch: of its start, twice.
    """
    began = numbered(runs, "ranks", "training_started_at").group_by("run_id").agg(
        first=pl.col("training_started_at").min()
    )  # fmt: skip
    ended = numbered(runs, "epochs", "finished_at").group_by("run_id").agg(last=pl.col("finished_at").max())
    rows = began.join(ended, on="run_id", how="full", coalesce=True).with_columns(AS_TEXT)
    untrained = runs.run.filter(pl.col("epochs") == 0).select("run_id", first="launched_at", last="launched_at")
    rows = pl.concat([rows, untrained])
    first, last = pl.col("first").fill_null(UNKNOWN[0]), pl.col("last").fill_null(UNKNOWN[1])
    return {run_id: (begin, end) for run_id, begin, end in rows.select("run_id", first, last).iter_rows()}


@once
def sessions_of(runs: Runs) -> dict[str, Hashable]:
    """Run id → its session: the `submit` in which it was measured. Where none was recorded: the sweep's folder, and a
    stretch of time without a pause of `GAP_S`.

    All runs that were loaded together are looked at, also where `runs` are some of them.
    """
    whole = runs.whole
    submits = _submits(whole)
    of_folder: dict[str, list[tuple[Span, str]]] = defaultdict(list)
    for run_id, folder in whole.run.select("run_id", "folder").rows():
        of_folder[os.path.dirname(folder)].append((spans(whole).get(run_id, UNKNOWN), run_id))
    sessions: dict[str, Hashable] = {}
    for sweep, members in of_folder.items():
        number, until = 0, UNKNOWN[0]
        for (first, last), run_id in sorted(members):
            known = (first, last) != UNKNOWN
            if known:
                number += first > until + GAP_S
                until = max(last, until)
            sessions[run_id] = submits.get(run_id) or (sweep, number if known else None)
    return sessions


def _submits(runs: Runs) -> dict[str, str | None]:
    """Run id → the `submit` that asked for it; of a resumed run, for the attempt that measured most of its epochs."""
    submits = dict(runs.run.select("run_id", "submit").rows())
    resumed = runs.run.drop_nulls("resumed_after").select("run_id", "attempts_json").rows()
    if not resumed:
        return submits
    # Each attempt's first epoch is no steady one, so that the most epochs are the most steady ones, too.
    counts = numbered(runs, "epochs", "attempt").group_by("run_id", "attempt").len().sort("len", "attempt")
    longest = dict(counts.select(AS_TEXT, "attempt").rows())
    for run_id, text in resumed:
        of_attempts = {each["attempt"]: each.get("submit") for each in msgspec.json.decode(text or "[]")}
        submits[run_id] = of_attempts.get(longest.get(run_id)) or submits[run_id]
    return submits
