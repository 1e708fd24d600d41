"""Is B faster than A? The same configurations before and after a change, on two machines, or with two strategies.

A ratio is B ÷ A of one repeat; the verdict is about time. Runs are paired where all that defines them is equal, but for
what is named.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import polars as pl

from analysis.metrics import per_epoch, per_run
from analysis.sides import Differences, Matched, Row, Side, match, said
from analysis.stats import Ratio, paired_ratio, ratio_of_pairs
from analysis.uncounted import uncounted
from analysis.work import UnlikeWork, flatten_config, left_out, plain, works
from parallelbench.errors import ConfigError, choices

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from analysis.reader import Runs

TIME = "steady_epoch_time_s"
MEASURED = (TIME, "throughput_samples_per_s", "gpu_energy_per_sample_j", "peak_memory_sum_bytes")
"""The metrics of `per_run` that are compared."""
OVERALL = "all configurations"
_WORDS = {"above 1": "slower", "below 1": "faster"}


@dataclass(frozen=True)
class Compared:
    """One configuration on both sides."""

    group: str
    configuration: str
    a: Mapping[str, float | None]
    b: Mapping[str, float | None]
    """Metric → median over the paired repeats."""
    ratios: Mapping[str, Ratio | None]
    """Metric → B ÷ A; None where not both sides have measured it in one repeat."""
    untimed: str = ""
    """Why no pair of repeats has a time, although there are pairs; empty: one has."""

    @property
    def time(self) -> Ratio | None:
        """B ÷ A of the time per epoch."""
        return self.ratios[TIME]

    @property
    def verdict(self) -> str:
        """What the time says of B."""
        return self.untimed or verdict(self.time)


@dataclass(frozen=True)
class Comparison:
    """What `compare` found."""

    rows: tuple[Compared, ...]
    overall: Ratio | None
    """B ÷ A of the time, in each repeat the geometric mean over all configurations; None where no repeat has all."""
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    """Configurations that one side lacks, or has no counted run of."""
    lost: tuple[str, ...]
    """Of configurations of both sides: how many repeats that A counts B lacks, or has no counted run of."""
    notes: tuple[str, ...]
    """What to know of the ratios, and what was found but does not count."""

    @property
    def verdict(self) -> str:
        """What the times of all configurations together say of B."""
        return verdict(self.overall) if all(row.time for row in self.rows) else "not all have a time"

    @property
    def frame(self) -> pl.DataFrame:
        """One row per configuration and metric, and one for all: `a` and `b` are medians, `ratio` is B ÷ A."""
        rows = [_row_of_frame(row, name) for row in self.rows for name in MEASURED]
        rows.append([None, OVERALL, TIME, None, None, *_figures(self.overall), self.verdict])
        names, numbers = ("group", "configuration", "metric"), ("a", "b", "ratio", "low", "high")
        schema = dict.fromkeys(names, pl.String) | dict.fromkeys(numbers, pl.Float64)
        return pl.DataFrame(rows, schema=schema | {"pairs": pl.Int32, "verdict": pl.String}, orient="row")


def _row_of_frame(row: Compared, name: str) -> list[Any]:
    figures = _figures(row.ratios[name])
    return [
        row.group,
        row.configuration,
        name,
        row.a[name],
        row.b[name],
        *figures,
        row.verdict if name == TIME else None,
    ]


def _figures(ratio: Ratio | None) -> list[Any]:
    return [ratio.median, ratio.low, ratio.high, ratio.n] if ratio else [None, None, None, 0]


def verdict(time: Ratio | None) -> str:
    """faster, slower, indistinguishable, or too few repeats to say."""
    if time is None:
        return "too few repeats: n=0"
    if time.low is None:
        return f"{time.verdict}: n={time.n}"
    return _WORDS.get(time.verdict, time.verdict)


def compare(a: Runs, b: Runs, *, across: Sequence[str] = ()) -> Comparison:
    """Compare the runs of `b` with those of `a`, configuration by configuration, repeat by repeat.

    Only runs count that the report counts. Raises `UnlikeWork` where the sides differ in more than commit and host, in
    work or surroundings, unless `across` names the keys (a component such as "strategy" with all its options);
    `ConfigError` where there is nothing to compare.
    """
    across = tuple(across)
    for runs in (a, b):
        _require_counted(runs)
    _require_known(across, a, b)
    one, other = Side(a, across), Side(b, across)
    found = match(one, other)
    if not isinstance(found, Matched):
        raise _refusal(a, b, across, found)
    _require_two_measurements(a, b, found.rows)
    rows = tuple(_compared(a, b, row) for row in found.rows)
    notes = [*_notes(a, b, found), *(f"A: {line}" for line in uncounted(a)), *(f"B: {line}" for line in uncounted(b))]
    return Comparison(rows, _overall(rows), found.only_a, found.only_b, tuple(_lost(one, other)), tuple(notes))


def _lost(a: Side, b: Side) -> Iterator[str]:
    several = len({group for group, _ in a.labels.values()}) > 1
    for key in (key for key in a.members if key in b.members):
        repeats = {a.repeats[run_id] for run_id in a.members[key]}
        gone = repeats - {b.repeats[run_id] for run_id in b.members[key]}
        if gone:
            group, name = a.labels[a.members[key][0]]
            whose = f"{name} ({group})" if several else name
            yield f"{whose}: {len(gone)} of {len(repeats)} repeats that A counts"


def by(runs: Runs, key: str, one: Any, other: Any, *, across: Sequence[str] = ()) -> Comparison:
    """Compare the runs whose `key` is `other` with those whose is `one`, e.g. `by(runs, "strategy", "ddp", "fsdp")`."""
    one, other = plain(one), plain(other)
    found: dict[str, list[str]] = {}
    _require_counted(runs)
    side = Side(runs, ())
    if key not in side.names:
        raise ConfigError(f"--by {key}: no run has this key; {choices(key, side.names)}")
    for run_id, config_json in runs.run.select("run_id", "config_json").rows():
        values = flatten_config(config_json) | works(runs)[run_id] | side.environments[run_id]
        found.setdefault(plain(values.get(f"{key}.name", values.get(key))), []).append(run_id)
    for value in (one, other):
        if value not in found:
            raise ConfigError(f"--by {key}: no run in {runs.root} has {key}={value}; {choices(value, found)}")
    # What can't be read is on neither side, or on either: it is told once.
    readable = replace(runs, skipped=())
    compared = compare(readable.only(found[one]), readable.only(found[other]), across=(*across, key))
    return replace(compared, notes=(*compared.notes, *uncounted(replace(runs.only([]), skipped=runs.skipped))))


def _require_counted(runs: Runs) -> None:
    if runs.run.height > left_out(runs).height:
        return
    reasons = [*left_out(runs)["reason"], *(skipped.reason for skipped in runs.skipped)]
    why = f" ({max(set(reasons), key=reasons.count)})" if reasons else ""
    raise ConfigError(f"{runs.root} holds no run that counts{why}: there is nothing to compare")


def _require_known(across: Sequence[str], a: Runs, b: Runs) -> None:
    known = Side(a, ()).names | Side(b, ()).names
    for name in across:
        if name not in known:
            raise ConfigError(f"--across {name} is no key of these runs; {choices(name, known)}")


def _refusal(a: Runs, b: Runs, across: tuple[str, ...], unlike: Differences) -> UnlikeWork:
    """Everything that differs at once: what is named then is all that has to be named."""
    found: Differences | Matched = unlike
    while not isinstance(found, Matched):
        unlike = unlike | found
        try:
            found = match(Side(a, (*across, *unlike)), Side(b, (*across, *unlike)))
        except ConfigError:
            break
    names = ",".join([*across, *unlike])
    return UnlikeWork(
        f"the two sides differ in more than what is compared: {said(unlike)}. To compare across exactly that: "
        f"--across {names}"
    )


def _require_two_measurements(a: Runs, b: Runs, rows: Sequence[Row]) -> None:
    """A folder that was copied holds the same measurements, and would always be as fast."""
    ends = [dict(runs.epochs.group_by("run_id").agg(pl.col("finished_at").sum()).rows()) for runs in (a, b)]
    for row in rows:
        for pair in row.pairs:
            if pair.a == pair.b and ends[0].get(pair.a, 0) == ends[1].get(pair.b):
                raise ConfigError(
                    f"{row.configuration}, repeat {pair.repeat}: both sides hold the very same run (equal times of "
                    "day): compare folders that were measured apart"
                )


def _compared(a: Runs, b: Runs, row: Row) -> Compared:
    ids = ([pair.a for pair in row.pairs], [pair.b for pair in row.pairs])
    repeats = [pair.repeat for pair in row.pairs]
    values: tuple[dict[str, dict[int, float | None]], ...] = ({}, {})
    for runs, run_ids, side in zip((a, b), ids, values, strict=True):
        table = {found["run_id"]: found for found in per_run(runs).iter_rows(named=True)}
        for name in MEASURED:
            side[name] = {repeat: table[run][name] for repeat, run in zip(repeats, run_ids, strict=True)}
    one, other = values
    ratios = {name: paired_ratio(other[name], one[name]) for name in MEASURED}
    # Where epochs hold equally many samples, as those of the same work do, this is the ratio of their times.
    ratios[TIME] = paired_ratio(one["throughput_samples_per_s"], other["throughput_samples_per_s"])
    below, above = ({name: _median(side[name].values()) for name in MEASURED} for side in values)
    without = {
        side: runs.only(run_ids)
        for side, runs, run_ids, found in zip("AB", (a, b), ids, values, strict=True)
        if run_ids and not any(found[TIME].values())
    }
    return Compared(row.group, row.configuration, below, above, ratios, _untimed(without) if without else "")


def _untimed(without: Mapping[str, Runs]) -> str:
    """What is to be said of the sides whose runs have nothing but warm-ups."""
    short = all(set(runs.run["epochs"]) == {1} for runs in without.values())
    why = "epochs=1, at least 2 are needed" if short else "all are the first of their attempt"
    return f"no steady epoch on side {' and '.join(without)}: {why}"


def _median(values: Any) -> float | None:
    known = pl.Series([value for value in values if value is not None], dtype=pl.Float64)
    median = known.median()
    return None if median is None else float(median)  # type: ignore[arg-type]


def _overall(rows: Sequence[Compared]) -> Ratio | None:
    times = [dict(row.time.pairs) for row in rows if row.time]
    if len(times) < len(rows) or not times:
        return None
    repeats = sorted(set.intersection(*(set(found) for found in times)))
    means = [(r, math.exp(sum(math.log(found[r]) for found in times) / len(times))) for r in repeats]
    return ratio_of_pairs(means)


def _notes(a: Runs, b: Runs, found: Matched) -> list[str]:
    told = [f"The sides differ in {said(found.told)}."] if found.told else []
    pairs = [pair for row in found.rows for pair in row.pairs]
    one, other = (
        per_epoch(runs).filter(pl.col("run_id").is_in(run_ids)).sort("finished_at")
        for runs, run_ids in ((a, [pair.a for pair in pairs]), (b, [pair.b for pair in pairs]))
    )
    if _before(one, other) or _before(other, one):
        told.append(
            "The sides were measured one after the other: what else changed on the machine in between is in the "
            "ratios. What one sweep holds is interleaved, and free of that."
        )
    if set(one["train_samples"]) != set(other["train_samples"]):
        told.append(
            "Epochs don't hold equally many samples on both sides: ratios of times and energies are per sample."
        )
    return told


def _before(one: pl.DataFrame, other: pl.DataFrame) -> bool:
    """Whether all epochs of the one ended before any of the other did."""
    return bool(one.height and other.height and one["finished_at"][-1] < other["finished_at"][0])
