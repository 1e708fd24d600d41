"""What may be written in a paper: a sentence for each compared configuration, and their numbers as a LaTeX table."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import polars as pl

from analysis import text
from analysis.comparison.baseline import in_words
from analysis.comparison.ratio import DECIDING_REPEATS
from analysis.comparison.summary import facts, summary
from analysis.comparison.verdict import EQUAL_WITHIN, SpeedVerdict
from analysis.comparison.work import PROGRAM
from analysis.metrics.columns import summary_columns
from analysis.report.latex import Captioned, Rows, floats
from analysis.report.publication import frameworks
from analysis.report.tables import cells
from analysis.runs.reader import once
from parallelbench.errors import count_of

if TYPE_CHECKING:
    from analysis.runs.reader import Runs


@dataclass(frozen=True)
class Sentence:
    """What a paper may say of one configuration beside its baseline."""

    configuration: str
    group: str
    text: str
    """Empty where the runs support none."""
    reason: str
    """Why there is no sentence; empty where there is one."""


def sentences(runs: Runs) -> list[Sentence]:
    """A sentence for each configuration but the baselines, in the order of `summary`."""
    trained = dict(_trained(runs).group_by("group", "configuration"))
    told = []
    for row in summary(runs).iter_rows(named=True):
        if row["verdict"] == SpeedVerdict.BASELINE:
            continue
        group, configuration = row["group"], row["configuration"]
        reason = _reason(row)
        told.append(
            Sentence(configuration, group, "" if reason else _sentence(row, trained[group, configuration]), reason)
        )
    return told


def _trained(runs: Runs) -> pl.DataFrame:
    """Of the rows of `facts` that are displayed what sentences and captions say."""
    named = ("device_type", "device_name", "cores_per_device", "framework", "environment_json", "data", "model")
    command = pl.col("config_json").str.json_path_match("$.strategy.command").alias("command")
    return facts(runs).filter("displayed").select("group", "configuration", *named, command)


def _where(row: dict[str, Any], rows: pl.DataFrame) -> str:
    """ "2 × NVIDIA A100-SXM4-40GB (torch 2.15.0)", "8 cores of AMD EPYC 7763 (2 nodes, torch 2.15.0)"."""
    kind, name, cores = rows.select("device_type", "device_name", "cores_per_device").row(0)
    devices, nodes = row["devices"], row["nodes"]
    on = f"{devices} × {name}" if kind == "cuda" else f"{count_of(devices * (cores or 1), 'core')} of {name}"
    more = [f"{nodes} nodes"] * (nodes > 1)
    more += [] if row["strategy"] == PROGRAM else frameworks(rows)  # which framework a program has is its own
    return f"{on} ({', '.join(more)})" if more else on


def _sentence(row: dict[str, Any], rows: pl.DataFrame) -> str:
    """Of a row of `summary` with an interval and a verdict, and the rows of `facts` that it rests on."""
    where, run = _where(row, rows), rows.row(0, named=True)
    low, high = row["speed_up_low"], row["speed_up_high"]
    times, baseline = text.estimate(row["speed_up"], low, high), in_words(row["baseline"])
    evidence = f"{text.interval_of_95(low, high)}, {count_of(row['speed_up_pairs'], 'paired repeat')}"
    who, what, did = _subject(row, run), _work(row, run), "ran" if row["strategy"] == PROGRAM else "trained"
    if row["verdict"] == SpeedVerdict.NO_DIFFERENCE:
        among = "" if low <= 1 <= high else "; not enough among so many verdicts"
        return (
            f"On {where}, no difference was shown in how fast {who} and {baseline} {did} {what} "
            f"(ratio {times}, {evidence}{among})."
        )
    if row["verdict"] == SpeedVerdict.EQUAL:
        within = f"to within {100 * EQUAL_WITHIN:.0f} %"
        return f"On {where}, {who} {did} {what} as fast as {baseline} {within} ({times} times, {evidence})."
    return f"On {where}, {who} {did} {what} {times} times as fast as {baseline} ({evidence})."


def _subject(row: dict[str, Any], run: dict[str, Any]) -> str:
    """ "pipeline (schedule gpipe) on 4 devices": a user's own program has the name of its model."""
    strategy, _, options = row["variant"].partition(", ")
    name = _script_of(run) if row["strategy"] == PROGRAM else strategy
    return f"{name}{f' ({options})' if options else ''} on {count_of(row['devices'], 'device')}"


def _script_of(run: dict[str, Any]) -> str:
    """The file that a program's command names, "train.py"; else the program's own name."""
    name = str(run["model"])
    command = str(run["command"] or "")
    found = re.search(rf"(?<![\w.-]){re.escape(name)}\.\w+(?![\w.-])", command)
    return found.group() if found else name


def _work(row: dict[str, Any], run: dict[str, Any]) -> str:
    """ "an epoch of digits with cnn_small (batch size 64)"."""
    names = (run["data"], run["model"], run["device_name"])
    more = [part for part in row["group"].split(" · ") if part not in names]
    more += ["weak scaling, samples per second"] * (row["scaling"] == "weak")
    what = f"{run['data']} with {run['model']}" if run["data"] else "its steps"
    of = "an epoch of " if run["data"] and row["scaling"] != "weak" else ""
    beyond = f" ({', '.join(more)})" if more else ""
    return f"{of}{what}{beyond}"


def _reason(row: dict[str, Any]) -> str:
    """Why a row of `summary` supports no sentence; empty where it supports one."""
    baseline = in_words(row["baseline"])
    if row["repeats"] == 0 and row["verdict"] is None:
        return f"none of its runs counts: {row['exclusions']}"
    if row["verdict"] is None and row["baseline"] is None:
        return "nothing to compare it with: see the warnings"
    return _REASONS.get(row["verdict"], "").format(baseline=baseline, pairs=row["speed_up_pairs"])


_REASONS = {
    SpeedVerdict.TOO_FEW.value: f"{{pairs}} paired repeats, and a verdict takes {DECIDING_REPEATS}",
    SpeedVerdict.NOT_INTERLEAVED.value: "measured apart from {baseline}, so the ratio has no interval",
    SpeedVerdict.NOT_COMPARABLE.value: "not comparable with {baseline}: see the warnings",
    SpeedVerdict.NO_PAIR.value: "no repeat in which both it and {baseline} have a time after the first epoch",
    SpeedVerdict.NO_STEADY_EPOCH.value: "it, or {baseline}, has no time after the first epoch",
    SpeedVerdict.DISTURBED.value: "other programs disturbed all runs of it or of {baseline}",
}


_COLUMNS = ("configuration", "repeats", "steady_epoch_time_s", "speed_up", "efficiency", "verdict")
_COLUMNS_OF_PROGRAMS = ("configuration", "repeats", "steady_step_time_s", "speed_up", "efficiency", "verdict")


@once
def captioned(runs: Runs) -> Captioned:
    """A table of the configurations of each group, with the numbers of the sentences."""
    trained = {group: rows for (group,), rows in _trained(runs).group_by("group", maintain_order=True)}
    return [
        (_caption(str(group), rows, trained.get(group)), [_tabular(rows)])
        for (group,), rows in summary(runs).group_by("group", maintain_order=True)
    ]


def _tabular(rows: pl.DataFrame) -> Rows:
    known = {column.name: column for column in summary_columns()}
    of_programs = (rows["strategy"] == PROGRAM).all()
    columns = [known[name] for name in (_COLUMNS_OF_PROGRAMS if of_programs else _COLUMNS)]
    body = [[cell.shown for cell in cells(row, columns)] for row in rows.iter_rows(named=True)]
    return Rows(["r" if column.numeric else "l" for column in columns], [column.title for column in columns], body)


def _caption(group: str, rows: pl.DataFrame, trained: pl.DataFrame | None) -> str:
    """`trained`: the displayed runs of the group; None: there is none."""
    of: list[str] = []
    if trained is not None:
        of = [*trained["device_name"].drop_nulls().unique(maintain_order=True), *frameworks(trained)]
    over = text.listed(sorted({in_words(row["baseline"]) for row in rows.iter_rows(named=True)}))
    unlike = not rows.filter(pl.col("speed_up").is_not_null(), pl.col("efficiency").is_null()).is_empty()
    own = ", efficiency of the baseline's own strategy alone" if unlike else ""
    marked = f"; {text.DISTURBED_MARK}: others disturbed these runs" if rows["disturbed"].any() else ""
    on = f" ({', '.join(of)})" if of else ""
    what = f"medians over the runs that count; speed-up over {over}, in brackets its 95 % interval"
    return f"{group}{on}: {what}{own}{marked}"


def latex_table(runs: Runs) -> str:
    """The same as a LaTeX document's part, which needs booktabs."""
    return floats(captioned(runs), name="configurations")
