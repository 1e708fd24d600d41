"""Which runs don't count in comparisons of time and memory, and why; and what a folder must hold to be judged."""

from __future__ import annotations

import shlex
from collections import Counter
from enum import Enum
from typing import TYPE_CHECKING

import polars as pl

from analysis import text
from analysis.comparison.counterparts import NO_COUNTERPART, held_against_one_device, unlike_one_device
from analysis.comparison.issues import unlike_contents
from analysis.comparison.notes import Code, Note, Remedy, Subject, format_differences, write
from analysis.comparison.run import compared_runs
from analysis.comparison.work import labels
from analysis.metrics.disturbance import causes, is_disturbed
from analysis.metrics.epochs import AS_TEXT, miscounted, numbered_epochs
from analysis.metrics.runs import per_run
from analysis.runs.reader import format_skipped, once
from analysis.text import listed
from parallelbench.errors import ConfigError, count_of
from parallelbench.measure.environment_match import differences
from parallelbench.results.attempt import DISTURBED
from parallelbench.results.folder import WHAT_TO_NAME, no_runs

if TYPE_CHECKING:
    from collections.abc import Iterable

    from analysis.comparison.run import ComparedRun
    from analysis.runs.reader import Runs


MOST = 8
"""Lines of each kind that a terminal shows. The report's page shows all."""


class Exclusion(Enum):
    """Why a run doesn't count: its value in tables, its words, and whether what the run learned counts all the same."""

    NOT_STARTED = "not started", "no attempt has begun"
    RUNNING = "running", "it has not ended yet"
    PARITY_FAILED = "parity_failed", "it does not train like one device"
    UNLIKE_ONE_DEVICE = "unlike one device", "its losses are not those of one device with the same seed"
    OOM = "oom", "out of memory"
    NAN = "nan", "a loss was not finite"
    TIMEOUT = "timeout", "it ran out of time"
    KILLED = "killed", "it was killed"
    STORAGE = "storage", "its results could not be written"
    ERROR = "error", "it failed"
    NO_RESULT = "no result", "it was not published"
    OVERSUBSCRIBED = "oversubscribed", "more devices than cores", True
    PACKED = "packed", "an older release forked all its repeats from one process: forget it, and submit again", True
    INLINE = "inline", "it trained in the calling process", True
    RESUMED_ELSEWHERE = "resumed elsewhere", "an attempt ran on another device or in another environment", True
    DETERMINISTIC = "deterministic", "it used deterministic algorithms only", True
    ANOMALY_DETECTION = "anomaly detection", "autograd searched for NaNs", True
    OTHER_DATA = "other data", "its data set holds something else than that of an earlier repeat"
    OTHER_ENVIRONMENT = "other environment", "it ran in another environment than an earlier repeat", True
    DISTURBED = DISTURBED, "others took too much of its cores or GPUs in its steady epochs", True
    MISCOUNTED = "miscounted", "the ranks' samples don't add up to the epoch's"
    DUPLICATE = "duplicate", "another run of the same configuration and repeat counts"

    words: str
    timing_only: bool
    """The times are invalid, but not losses, accuracies and bytes."""

    def __new__(cls, value: str, words: str = "", timing_only: bool = False) -> Exclusion:
        """A member with its words."""
        member = object.__new__(cls)
        member._value_ = value
        member.words, member.timing_only = words, timing_only
        return member


TIMING_ONLY = [exclusion.value for exclusion in Exclusion if exclusion.timing_only]


def describe(exclusion: str, detail: str | None) -> str:
    """ "oom: out of memory on rank 1": the value of an `Exclusion`, and the run's own detail or else the words."""
    return f"{exclusion}: {detail or Exclusion(exclusion).words}"


@once
def excluded(runs: Runs) -> pl.DataFrame:
    """`run_id`, `exclusion` (a value of `Exclusion`) and `exclusion_detail` (may be null) of runs that don't count."""
    column, disturbed, unlike = pl.col, _disturbed(runs), unlike_one_device(runs)
    outcomes = {member.value: member.value for member in Exclusion}
    failed = column("outcome").replace_strict(outcomes, default=Exclusion.ERROR.value, return_dtype=pl.String)
    rules: list[tuple[pl.Expr, Exclusion]] = [
        (column("state") != "done", Exclusion.NO_RESULT),
        (~column("parity_passed"), Exclusion.PARITY_FAILED),
        (column("run_id").is_in(list(unlike)), Exclusion.UNLIKE_ONE_DEVICE),
        (column("oversubscribed"), Exclusion.OVERSUBSCRIBED),
        (column("packed") & column("startup_s").is_not_null(), Exclusion.PACKED),  # today's have no start of their own
        (column("launcher") == "inline", Exclusion.INLINE),
        (column("resumed_elsewhere").is_not_null(), Exclusion.RESUMED_ELSEWHERE),
        (column("deterministic"), Exclusion.DETERMINISTIC),
        (column("detect_anomaly"), Exclusion.ANOMALY_DETECTION),
        (column("run_id").is_in(list(miscounted(runs))), Exclusion.MISCOUNTED),
        (column("run_id").is_in(list(disturbed)), Exclusion.DISTURBED),
    ]
    exclusion = (
        pl.when(column("state") == "missing").then(pl.lit(Exclusion.NOT_STARTED.value))
        .when(column("state") == "running").then(pl.lit(Exclusion.RUNNING.value))
        .when(column("outcome") != "ok").then(failed)
    )  # fmt: skip
    # Of several reasons the gravest counts: what is timing-only would let a wrong run's losses and bytes count.
    for condition, member in sorted(rules, key=lambda rule: rule[1].timing_only):
        exclusion = exclusion.when(condition).then(pl.lit(member.value))
    words = column("run_id").replace_strict(unlike, default=None, return_dtype=pl.String)
    elsewhere = column("exclusion") == Exclusion.RESUMED_ELSEWHERE.value
    taken = column("run_id").replace_strict(disturbed, default=None, return_dtype=pl.String)
    detail = (
        pl.when(elsewhere).then("resumed_elsewhere")
        .when(column("exclusion") == Exclusion.UNLIKE_ONE_DEVICE.value).then(words)
        .when(column("outcome") != "ok").then("reason")
        .when(column("exclusion") == Exclusion.DISTURBED.value).then(taken)
    )  # fmt: skip
    rows = runs.run.with_columns(exclusion=exclusion).drop_nulls("exclusion")
    table = rows.select("run_id", "exclusion", exclusion_detail=detail)
    for find in (_unlike_repeats, _duplicates):
        found = find(runs, table)  # a graver reason takes the place of one that is about times alone
        table = pl.concat([table.join(found, on="run_id", how="anti", maintain_order="left"), found])
    return table


_MEASURE_AGAIN = f"submit the sweep again with `--retry {Exclusion.DISTURBED.value}`"


def _disturbed(runs: Runs) -> dict[str, str]:
    """Run id → what disturbed it, and the remedy, of runs whose steady epochs others disturbed."""
    rows = per_run(runs).filter("steady_disturbed").join(causes(runs), on="run_id")
    return {
        run_id: f"in its steady epochs {_disturbances('others', *found)}: when the machine is free, {_MEASURE_AGAIN}"
        for run_id, *found in rows.select("run_id", *_FOUND).rows()
    }


_FOUND = (
    pl.when("taken").then("steady_lost_share").alias("share"),
    pl.when("stopped").then("longest_suspension_s").alias("suspended_s"),
    pl.col("shared"),
)
"""Of runs with their `causes`, what exceeded a limit: the arguments of `_disturbances`."""


def _disturbances(others: str, share: float | None, suspended_s: float | None, shared: bool) -> str:
    """What they did: "others took up to 48 % of a core", or computed on a GPU, or that ranks stood still, or several.

    Null is what exceeded no limit.
    """
    found = []
    if suspended_s is not None:
        found.append(f"ranks stood still for up to {suspended_s:.3g} s (SIGSTOP, a suspended job, a frozen machine)")
    did = [f"took up to {text.percent(share)} of a core"] if share is not None else []
    did += ["computed on its GPU"] if shared else []
    if did:
        found.append(f"{others} {' and '.join(did)}")
    return ", and ".join(found)


def _unlike_repeats(runs: Runs, gone: pl.DataFrame) -> pl.DataFrame:
    """Repeats of a configuration that are unlike the one that finished first, as two sides must not be: no median is
    made of both. Code of plugins makes configurations of its own. Of runs whose times are invalid the data alone count.
    """
    known, found, untimed = compared_runs(runs), [], set(gone["run_id"])
    firsts: dict[tuple[str, str], tuple[ComparedRun, str]] = {}
    columns = ("run_id", "slug", "group", "configuration")
    for run_id, slug, *configuration in _in_order(runs, gone).select(columns).rows():
        run = known[run_id]
        first, name = firsts.setdefault((configuration[0], configuration[1]), (run, slug))
        member, unlike = Exclusion.OTHER_DATA, unlike_contents([(first, run)])
        if not unlike and first.environment is not run.environment and run_id not in untimed:
            member, unlike = Exclusion.OTHER_ENVIRONMENT, differences(first.environment, run.environment)
        if unlike:
            remedy = "forget the runs that were measured by mistake, and submit again"
            found.append((run_id, member.value, f"{format_differences(unlike)}, in {name} and here: {remedy}"))
    return pl.DataFrame(found, schema=dict.fromkeys(gone.columns, pl.String), orient="row")


def _in_order(runs: Runs, gone: pl.DataFrame) -> pl.DataFrame:
    """The runs that count, with group and configuration, the one that finished first before all others; then those of
    which losses and accuracies count all the same.
    """
    finished = numbered_epochs(runs).group_by("run_id").agg(pl.col("finished_at").max()).with_columns(AS_TEXT)
    rows = runs.run.select("run_id", "slug", "repeat").join(gone, on="run_id", how="left")
    rows = rows.filter(pl.col("exclusion").is_null() | pl.col("exclusion").is_in(TIMING_ONLY))
    rows = rows.join(labels(runs), on="run_id").join(finished, on="run_id", how="left")
    return rows.sort(pl.col("exclusion").is_not_null(), "finished_at", "slug", nulls_last=True)


def _duplicates(runs: Runs, gone: pl.DataFrame) -> pl.DataFrame:
    """Runs with another run's repeat, e.g. if only one checked parity. Pairs are by repeat, so only one run counts.

    It is the one that finished first: no later measurement can change which one counts.
    """
    key = ("group", "configuration", "repeat")
    rows = _in_order(runs, gone).with_columns(first=pl.col("slug").first().over(key))
    detail = pl.format("{} of the same configuration and repeat counts, which finished first", "first")
    again = rows.filter(pl.int_range(pl.len()).over(key) > 0)
    return again.select("run_id", exclusion=pl.lit(Exclusion.DUPLICATE.value), exclusion_detail=detail)


def format_exclusions(runs: Runs) -> list[str]:
    """Per configuration how many of its runs don't count and why, then the folders that were not read."""
    skipped = format_skipped(runs.skipped)
    more = [f"Skipped: {len(skipped) - MOST} more."] if len(skipped) > MOST else []
    notes = [*disturbed_runs(runs), *disturbed_times(runs), *_not_counted(runs), *unchecked(runs)]
    return [*write(notes), *skipped[:MOST], *more]


def disturbed_lines(runs: Runs, *, advise: bool = True) -> list[str]:
    """The configurations whose runs others disturbed, what of them is withheld and what is shown, with the remedy
    unless the caller has one for all.
    """
    return write(disturbed_runs(runs), brief=not advise)


def disturbed_runs(runs: Runs) -> list[Note]:
    """The configurations whose runs others disturbed: those of which no run counts, and those of which others do."""
    known = labels(runs).join(excluded(runs), on="run_id", how="left").join(per_run(runs), on="run_id")
    known = known.join(causes(runs), on="run_id", how="left", maintain_order="left").with_columns(_FOUND)
    disturbed = pl.col("exclusion") == Exclusion.DISTURBED.value
    rows = known.group_by("configuration", "group", maintain_order=True).agg(
        pl.col("share", "suspended_s", "shared").filter(disturbed).max(),
        disturbed=disturbed.sum(), none=pl.col("exclusion").is_not_null().all(),
    ).filter(pl.col("disturbed") > 0)  # fmt: skip
    notes = []
    for (none,), members in rows.group_by("none", maintain_order=True):
        did = _disturbances("they", *members.select(pl.col("share", "suspended_s", "shared").max()).row(0))
        values = {"runs": count_of(int(members["disturbed"].sum()), "run"), "what": did}
        code = Code.ALL_DISTURBED if none else Code.DISTURBED
        notes.append(Note(code, values, _subjects(runs, members), Remedy(retry=frozenset({Exclusion.DISTURBED.value}))))
    return notes


def folders_of(runs: Runs, run_ids: Iterable[str]) -> str:
    """ "demo/a, demo/b, demo/c and 4 more": the folders of these runs, below the one that was named."""
    folders = runs.run.filter(pl.col("run_id").is_in(list(run_ids)))["folder"]
    return listed([folder.removeprefix(f"{runs.root}/") for folder in folders])


_TIMES = {
    "first_epoch_time_s": ("the first epoch", "its time is"),
    "second_epoch_time_s": ("the second epoch", "its time is"),
    "total_training_time_s": ("the training as a whole", "total times, hours and the way to the target accuracy are"),
}


def disturbed_times(runs: Runs) -> list[Note]:
    """Of runs that count, the times that were measured in disturbed windows all the same."""
    rows = labels(runs).join(excluded(runs), on="run_id", how="anti", maintain_order="left")
    notes = []
    for metric, (what, numbers) in _TIMES.items():
        found = rows.filter(pl.col("run_id").is_in(list(is_disturbed(runs, metric))))
        if found.height:
            values = {"what": what, "runs": count_of(found.height, "run"), "numbers": numbers}
            notes.append(Note(Code.DISTURBED_TIME, values, _subjects(runs, found)))
    return notes


def _subjects(runs: Runs, rows: pl.DataFrame) -> tuple[Subject, ...]:
    """The configurations of these rows, each once."""
    several = labels(runs)["group"].n_unique() > 1
    keys = rows.select("configuration", "group").unique(maintain_order=True).rows()
    return tuple(Subject(name, group if several else "") for name, group in keys)


def unchecked(runs: Runs) -> list[Note]:
    """The configurations whose losses were not held against one device's, by reason."""
    gone = excluded(runs).select("run_id")
    rows = held_against_one_device(runs).drop_nulls("unchecked").join(gone, on="run_id", how="anti")
    rows = rows.join(labels(runs), on="run_id", maintain_order="left")
    rows = rows.join(runs.run.select("run_id", "scaling"), on="run_id", maintain_order="left")
    weak = (pl.col("scaling") == "weak") & (pl.col("unchecked") == NO_COUNTERPART)  # a larger global batch by design
    expected = pl.when(weak).then(pl.lit(" (expected with scaling=weak)")).otherwise(pl.lit(""))
    return [
        Note(Code.LOSSES, {"why": why, "expected": words}, _subjects(runs, members.sort("configuration")))
        for (why, words), members in rows.group_by("unchecked", expected.alias("expected"), maintain_order=True)
    ]


def _not_counted(runs: Runs) -> list[Note]:
    rows = labels(runs).join(excluded(runs), on="run_id", how="left", maintain_order="left")
    notes = []
    for _, members in rows.group_by("group", "configuration", maintain_order=True):
        if counts := Counter(members["exclusion"].drop_nulls()):
            why = ", ".join(f"{count} {exclusion}" for exclusion, count in sorted(counts.items()))
            values = {"gone": counts.total(), "runs": count_of(members.height, "run"), "why": why}
            values["do"] = "does" if counts.total() == 1 else "do"
            notes.append(Note(Code.NOT_COUNTED, values, _subjects(runs, members)))
    more = len(notes) - MOST
    return [*notes[:MOST], Note(Code.NOT_COUNTED_MORE, {"more": more})] if more > 0 else notes


def require_finished(runs: Runs) -> None:
    """Raise `ConfigError`, with the remedy, where no run of the folder trained to its end."""
    root = runs.root
    if "done" in runs.run["state"]:
        return
    if not runs.run.is_empty():
        labels = Counter(runs.run.select(pl.coalesce("outcome", "state")).to_series())
        counts = text.listed([f"{count} {label}" for label, count in sorted(labels.items())], most=len(labels))
        raise ConfigError(
            f"{root} holds no finished run ({counts}): `parallelbench status {shlex.quote(str(root))}` says why, and "
            "what to do"
        )
    unreadable = [skipped for skipped in runs.skipped if skipped.is_run]
    if not unreadable:
        raise ConfigError(no_runs(root))
    first, *others = unreadable
    more = f", and {len(others)} more" if others else ""
    raise ConfigError(f"{root} holds no readable run ({first.path}: {first.reason}{more}): {WHAT_TO_NAME}")


def require_counted(runs: Runs) -> None:
    """Raise `ConfigError` where no run counts; the message has the most common reason."""
    require_finished(runs.whole)
    gone = excluded(runs)
    if runs.run.height > gone.height:
        return
    known, why = gone.select("exclusion", "exclusion_detail").rows(), ""
    if known:
        ((most, _),) = Counter(exclusion for exclusion, _ in known).most_common(1)
        why = f" ({describe(most, next(detail for exclusion, detail in known if exclusion == most))})"
    where = f"one side of {runs.root}" if runs.taken_from else runs.root
    raise ConfigError(f"{where} holds no run that counts{why}: there is nothing to compare")
