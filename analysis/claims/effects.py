"""The effects of a claim: what was measured of configurations that differ in the compared keys only, joined by repeat.

`Measured` has a row per configuration and epoch with every key, and a row per repeat of it. A contrast joins the former
with each other on the keys that it doesn't compare, and the latter on the repeat. What it finds has the same form, and
a claim's second contrast joins that once more.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import polars as pl

from analysis.claims.claim import (
    EPOCH_COLUMNS,
    FAILURES,
    LAST,
    LEARNING,
    OF_ENGINES,
    OF_PHASES,
    PER_EPOCH,
    Claim,
    Contrast,
    Level,
)
from analysis.comparison.campaign import campaign
from analysis.comparison.configurations import attempted, counted, facts, learned, prepared
from analysis.comparison.work import definitions, is_below, varying_keys, work_label
from analysis.metrics.disturbance import is_disturbed, undisturbed_epochs
from analysis.metrics.epochs import AS_TEXT, gathered, numbered
from analysis.metrics.runs import (
    computation_per_communication,
    phase_times,
    step_to_accuracy,
    steps_to_accuracy,
    time_to_accuracy,
)
from analysis.runs.reader import once
from parallelbench.config.build import COMPONENTS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from analysis.comparison.work import Work
    from analysis.runs.reader import Runs


@once
def usable(runs: Runs, metric: str) -> pl.DataFrame:
    """The runs that a claim about this metric may use, in the order of their ids: some columns of `facts`.

    Metrics of learning also use runs whose times alone are invalid.
    """
    chosen: Callable[[Runs], pl.DataFrame] = learned if metric in LEARNING else counted
    if metric in OF_ENGINES or metric in FAILURES:
        chosen = prepared if metric in OF_ENGINES else attempted
    columns = ("run_id", "repeat", "train_samples", "parameters", "framework", "best_test_accuracy")
    return chosen(runs).select(columns).sort("run_id")


@once
def unusable(runs: Runs, metric: str) -> tuple[int, list[str]]:
    """How many runs it may not use, and why, each reason once."""
    gone = facts(runs).select("run_id", "exclusion").join(usable(runs, metric), on="run_id", how="anti")
    return gone.height, gone["exclusion"].drop_nulls().unique(maintain_order=True).to_list()


@once
def readings(runs: Runs, metric: str, target: float | None, epoch: int | str) -> pl.DataFrame:
    """`run_id`, the metric's `value`, and its bounds `least` and `most`. Runs without it are missing, and so are those
    whose value was measured in a disturbed window.
    """
    quiet = ~pl.col("run_id").is_in(list(is_disturbed(runs, metric)))
    if target is not None:
        return _to_target(runs, metric, target).filter(quiet)
    if metric in OF_PHASES:
        rows = phase_times(runs) if metric == "bubble_s" else computation_per_communication(runs)
    elif metric in EPOCH_COLUMNS:
        epochs = _epochs(runs, metric)
        rows = epochs.filter(pl.col("epoch") == (pl.col("last") if epoch == LAST else epoch)).with_columns(AS_TEXT)
    else:
        rows = facts(runs).select("run_id", metric).filter(quiet)
    value = pl.col(metric).cast(pl.Float64)
    return rows.select("run_id", value=value, least=value, most=value).drop_nulls()


@once
def _epochs(runs: Runs, metric: str) -> pl.DataFrame:
    """All epochs whose metric counts, of numbered runs, with the number of their run's `last`.

    A resumed run warms up anew in an epoch that is a warm one in other runs: what this took says nothing about it.
    """
    rows = undisturbed_epochs(runs, metric)
    if metric in PER_EPOCH and metric != "training_time_s":  # which resumed runs don't have
        rows = rows.filter(~pl.col("warm_up") | (pl.col("epoch") == 1))
    rows = rows.select("run_id", "epoch", metric)
    return rows.with_columns(last=gathered(runs, "epochs", rows))


def _to_target(runs: Runs, metric: str, target: float) -> pl.DataFrame:
    """Steps or time to an accuracy. It was reached at some step of the epoch at whose end it was first seen."""
    reached = steps_to_accuracy if metric == "steps_to_accuracy" else time_to_accuracy
    rows = reached(runs, target).join(step_to_accuracy(runs, target), on="run_id").drop_nulls()
    since = pl.lit(1.0) if metric == "steps_to_accuracy" else pl.col("step_time_s")
    value = pl.col(metric).cast(pl.Float64)
    return rows.select("run_id", value=value, least=value - (pl.col("steps") - 1) * since, most=value)


class Measured(NamedTuple):
    """Values by repeat: of configurations at an epoch, or of the effect between two."""

    levels: pl.DataFrame
    """A row for each `level`, its number. Besides it the facts of `_FACTS` and every key of the configuration, all as
    JSON, empty where there is none; and `step`, what was compared, in words: null before anything was.
    """
    values: pl.DataFrame
    """A row for each `level` and `repeat` with its `value`, `least` and `most`, null where a run never reached the
    claim's target; `also`, the claim's other metric of the same runs, null where it was not measured; `runs`, the ids
    of the runs behind it, those of one side before those of the other; and `candidates`, those that the smallest value
    was chosen from, empty without a choice.
    """


_FACTS = ("train_samples", "parameters", "framework", "epoch", "steps")
_OWN = ("level", "step", *_FACTS)
_NONE = pl.lit([], pl.List(pl.String))


def _json(value: object) -> str:
    return msgspec.json.encode(value, order="sorted").decode()


@cache
def _read(text: str) -> Any:
    """What a text of a level says: few differ, and each is asked for by many claims."""
    return msgspec.json.decode(text) if text else None


def _keys(levels: pl.DataFrame) -> list[str]:
    """The keys of configurations."""
    return [name for name in levels.columns if name not in _OWN]


@once
def _configurations(runs: Runs) -> tuple[pl.DataFrame, pl.DataFrame]:
    """`run_id` and `of`, the number of its configuration; and the keys of each number as JSON."""
    defined = definitions(runs)
    texts = {key: _json(each) for key, each in {id(each): each for each in defined.values()}.items()}
    numbers = {text: number for number, text in enumerate(dict.fromkeys(texts.values()))}
    of_runs = [(run_id, numbers[texts[id(each)]]) for run_id, each in defined.items()]
    keys = [
        {"of": number} | {key: _json(value) for key, value in _read(text).items()} for text, number in numbers.items()
    ]
    schema = {"run_id": pl.String, "of": pl.Int64}
    return pl.DataFrame(of_runs, schema, orient="row"), pl.DataFrame(keys, infer_schema_length=None).fill_null("")


@once
def _steps(runs: Runs) -> pl.DataFrame:
    """`run_id`, and the optimizer `steps` of a run of all its epochs; epochs of one run have equally many."""
    rows = numbered(runs, "epochs", "steps").unique("run_id", keep="first", maintain_order=True)
    return rows.select(AS_TEXT, steps=gathered(runs, "epochs", rows).cast(pl.Int64) * pl.col("steps"))


@once
def _measured(
    runs: Runs,
    metric: str,
    target: float | None,
    epochs: frozenset[int | str],
    *,
    also: str | None,
    devices: bool,
    best_of: str | None,
) -> Measured:
    """What was measured at these epochs. `devices`: claims compare numbers of devices, but not strategies."""
    of_runs, keys = _configurations(runs)
    rows = usable(runs, metric).with_columns(pl.col("framework").fill_null("torch")).with_row_index("place")
    rows = rows.join(of_runs, on="run_id", maintain_order="left")
    rows = rows.join(_steps(runs), on="run_id", how="left", maintain_order="left")
    missed = pl.lit(value=False) if target is None else pl.col("best_test_accuracy") < target
    rows = pl.concat(
        rows.join(readings(runs, metric, target, epoch), on="run_id", how="left", maintain_order="left")
        .filter(pl.col("value").is_not_null() | missed)
        .join(_besides(runs, also, epoch), on="run_id", how="left", maintain_order="left")
        .with_columns(epoch=pl.lit(_json(epoch)))
        for epoch in sorted(epochs, key=str)
    )
    same = ("of", "train_samples", "parameters", "framework", "epoch")
    # In the order of their first runs.
    rows = rows.with_columns(place=pl.col("place").min().over(same)).sort("place", maintain_order=True)
    rows = rows.with_columns(level=pl.struct(same).rle_id())
    steps = pl.col("steps")
    levels = (
        rows.group_by("level", maintain_order=True)
        .agg(pl.col(same).first(), steps=pl.coalesce(steps.filter(steps > 0).first(), steps.last()))
        .with_columns(pl.col("train_samples", "parameters", "steps").cast(pl.String).fill_null(""))
        .with_columns(framework=pl.format('"{}"', "framework"), step=pl.lit(None, pl.String))
        .join(keys, on="of", maintain_order="left")
    )
    # A second run of a repeat doesn't count.
    values = rows.unique(("level", "repeat"), keep="first", maintain_order=True)
    own = ("level", "repeat", "value", "least", "most", "also")
    values = values.select(*own, runs=pl.concat_list("run_id"), candidates=_NONE)
    if devices:
        levels, values = _as_every_strategy(runs, levels, values)
    measured = Measured(levels.drop("of"), values)
    return _best(measured, best_of) if best_of else measured


@once
def _besides(runs: Runs, also: str | None, epoch: int | str) -> pl.DataFrame:
    """`run_id` and `also`, a claim's other metric of the runs that may be used for it; empty where it has none."""
    if also is None:
        return pl.DataFrame(schema={"run_id": pl.String, "also": pl.Float64})
    rows = readings(runs, also, None, epoch).join(usable(runs, also), on="run_id", how="semi")
    return rows.select("run_id", also="value")


@once
def _of_one_device(runs: Runs) -> pl.DataFrame:
    """`of`, the number of each configuration, and `one`, that of the one device that the report compares it with: also
    where no run of that counts.
    """
    of_runs, _ = _configurations(runs)
    named = facts(runs).select("run_id", "group", "configuration").join(of_runs, on="run_id")
    numbers = {(group, name): of for group, name, of in named.select("group", "configuration", "of").rows()}
    found = campaign(runs)
    pairs = ((each, found.one_device_of(each)) for each in found.configurations)
    ones = [
        (numbers[each.group, each.name], numbers[one.group, one.name])
        for each, one in pairs
        if one is not None and (each.group, each.name) in numbers and (one.group, one.name) in numbers
    ]
    return pl.DataFrame(ones, {"of": pl.Int64, "one": pl.Int64}, orient="row")


def _as_every_strategy(runs: Runs, levels: pl.DataFrame, values: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """One device stands for every strategy of its framework at `devices=1`, as in sweeps over devices, unless the
    strategy was run on one device itself.
    """
    levels = levels.join(_of_one_device(runs), on="of", how="left", maintain_order="left")
    strategy = [key for key in levels.columns if is_below(key, ("strategy",))]
    ones, several = levels.filter(pl.col("of") == pl.col("one")), levels.filter(pl.col("of").ne_missing(pl.col("one")))
    which = ["one", *strategy]
    others = several.select(which).unique(maintain_order=True)
    own = several.filter(pl.col("devices") == _json(1))
    others = others.join(own, on=which, how="anti", maintain_order="left")
    stand_ins = ones.drop(strategy).join(others, on="one", maintain_order="left_right")
    levels = pl.concat([several, stand_ins.select(levels.columns)]).rename({"level": "was"}).with_row_index("level")
    values = levels.select("level", "was").join(values, left_on="was", right_on="level", maintain_order="left")
    return levels.drop("was", "one"), values.drop("was")


def _best(measured: Measured, key: str) -> Measured:
    """Of levels that differ in `key` only, the smallest value of each repeat."""
    levels = measured.levels.with_columns(
        pl.lit("").alias(name) for name in _keys(measured.levels) if is_below(name, (key,))
    )
    levels = levels.with_columns(one=pl.col("level").min().over(*_FACTS, *_keys(levels)))
    values = measured.values.join(levels.select("level", "one"), on="level", maintain_order="left")
    smallest = pl.col("value").arg_min().fill_null(0)
    values = values.group_by("one", "repeat", maintain_order=True).agg(
        pl.col("value", "least", "most", "also", "runs").get(smallest),
        candidates=pl.col("runs").filter(pl.col("value").is_not_null()).explode(),
    )
    levels = levels.filter(pl.col("level") == pl.col("one")).drop("one")
    return Measured(levels, values.rename({"one": "level"}))


@dataclass(frozen=True)
class Effect:
    """A value per repeat: the effect between two levels."""

    keys: Work
    """The flat configuration of both sides, without the compared keys."""
    step: str
    """The levels that were compared, in words."""
    values: dict[int, tuple[float, float, float]]
    """Repeat → value, and the least and the most that it may be: accuracy is known at the end of each epoch, and may
    have been reached during it.
    """
    runs: dict[int, tuple[str, ...]]
    """Repeat → ids of the runs behind it, those of one side before those of the other."""
    candidates: dict[int, tuple[str, ...]]
    """Repeat → ids of all runs that the smallest value was chosen from; empty without a choice."""
    missed: frozenset[int]
    """Repeats that were run, but never reached the claim's target."""
    also: dict[int, float]
    """Repeat → the effect on the claim's other metric, in the same runs, where they measured it."""


def effects(runs: Runs, claim: Claim) -> list[Effect]:
    """Every effect of the claim. The sides differ in the compared keys only, and have a repeat in common."""
    return [effect for effect in _compared(runs, claim) if effect.values]


def is_unreached(runs: Runs, claim: Claim) -> bool:
    """Whether both sides were run, but no repeat of both reaches the claim's target."""
    return claim.target is not None and any(not effect.values for effect in _compared(runs, claim))


def _effects(measured: Measured) -> list[Effect]:
    columns = ("level", "repeat", "value", "least", "most", "also", "runs", "candidates")
    rows: dict[int, list[tuple[Any, ...]]] = {}
    for level, *row in measured.values.select(columns).rows():
        rows.setdefault(level, []).append(tuple(row))
    keys = _keys(measured.levels)
    found = []
    for each in measured.levels.iter_rows(named=True):
        of_level = rows[each["level"]]
        known = [row for row in of_level if row[1] is not None]
        found.append(
            Effect(
                keys={key: _read(each[key]) for key in keys if each[key]},
                step=each["step"],
                values={repeat: (value, least, most) for repeat, value, least, most, *_ in known},
                also={repeat: also for repeat, _, _, _, also, *_ in known if also is not None},
                runs={repeat: tuple(runs) for repeat, *_, runs, _ in known},
                candidates={repeat: tuple(chosen_from) for repeat, *_, chosen_from in known if chosen_from},
                missed=frozenset(repeat for repeat, value, *_ in of_level if value is None),
            )
        )
    return found


def _compared(runs: Runs, claim: Claim) -> list[Effect]:
    """The effects of all contrasts, with those that have no value, as a run never reached the target."""
    contrasts = (*claim.contrasts, *([claim.more] if claim.more else []))
    devices = any("devices" in each.roots and "strategy" not in each.roots for each in contrasts)
    epochs = frozenset[int | str]().union(*(claim.epochs(each) for each in claim.contrasts))
    levels, values = _measured(
        runs, claim.metric, claim.target, epochs, also=claim.also, devices=devices, best_of=claim.best_of
    )
    levels = _with(_with(levels, claim.where), claim.scope)
    looked_at = [_with(levels, {"epoch": [*claim.epochs(each)]}) for each in claim.contrasts]
    found = [
        _pairs(Measured(some, values), each)
        for some, each in zip(looked_at, claim.contrasts, strict=True)
        if some.height > 1  # a contrast takes two
    ]
    if not any(each.height for each in found):
        return []
    pairs = pl.concat(found).with_row_index("level")
    measured = _effect(pairs, _by_repeat(pairs, values), claim.compare)
    if claim.more is not None:
        pairs = _pairs(measured, claim.more).with_row_index("level")
        how = "difference" if claim.compare == "difference" else "ratio"
        measured = _effect(pairs, _by_repeat(pairs, measured.values), how)
    return _effects(measured)


def _pairs(measured: Measured, contrast: Contrast) -> pl.DataFrame:
    """A row for each two levels that differ in the contrast only: `below` and `above`, with what both have in common as
    in `Measured.levels`, and with the epochs and the devices of both.
    """
    roots, levels = contrast.roots, measured.levels
    compared = {key for key in _keys(levels) if is_below(key, roots)}
    same = [key for key in _keys(levels) if key not in compared]
    at = pl.when(pl.col("epoch") == _json(LAST)).then("epochs").otherwise("epoch")
    behind = measured.values.group_by("level", maintain_order=True).agg(
        pl.col("runs").list.join(" ").str.join(" ").alias("behind")
    )
    levels = levels.join(behind, on="level", maintain_order="left").with_columns(
        group=pl.col("level").min().over("step", *same, *(() if "epoch" in roots else ("epoch",))),
        # The last epoch of a run of one epoch is its first.
        measurement=pl.concat_str(at, "behind", separator=" "),
    )
    pairs = _sides(levels, contrast).filter(pl.col("measurement") != pl.col("measurement_below"))
    step = pl.format(f"{contrast.rising.replace('_', ' ')} {{}} → {{}}" if contrast.rising else "{} → {}", *_WORDS)
    return pairs.sort("group", maintain_order=True).select(
        *("train_samples", "parameters", "framework", "steps", "epoch"),
        *(pl.lit("").alias(key) if key in compared else key for key in _keys(measured.levels)),
        step=pl.concat_str("step", step, separator=", by ", ignore_nulls=True),
        below="level_below",
        above="level",
        epoch_below="epoch_below",
        devices_below="devices_below",
        devices_above="devices",
    )


_WORDS = ("words_below", "words")


def _sides(levels: pl.DataFrame, contrast: Contrast) -> pl.DataFrame:
    """Both levels of each pair, with their `words`."""
    if contrast.rising is None:
        sides = [
            _with(levels, side).with_columns(words=_words(levels, contrast.roots, side))
            for side in (contrast.from_ or {}, contrast.to or {})
        ]
        return _crossed(*sides, on=("group",))
    levels = levels.with_columns(words=_each(levels, contrast.rising, _shown, pl.String))
    # Each level and the next higher one.
    level = _each(levels, contrast.rising, lambda value: value, pl.Float64)
    levels = levels.with_columns(rank=level.rank("dense").over("group").cast(pl.Int64))
    pairs = _crossed(levels, levels.with_columns(pl.col("rank") - 1), on=("group", "rank"))
    return pairs.sort("group", "rank", maintain_order=True)


def _crossed(below: pl.DataFrame, above: pl.DataFrame, *, on: tuple[str, ...]) -> pl.DataFrame:
    own = ("level", "epoch", "devices", "measurement", "words")
    return below.select(*on, pl.col(own).name.suffix("_below")).join(above, on=on, maintain_order="left_right")


def _by_repeat(pairs: pl.DataFrame, values: pl.DataFrame) -> pl.DataFrame:
    """The values of both levels of each pair in every repeat that both have."""
    of_pairs = ("level", "below", "above", "epoch", "epoch_below", "devices_above", "devices_below")
    rows = pairs.select(of_pairs).join(values, left_on="below", right_on="level")
    rows = rows.join(values, left_on=("above", "repeat"), right_on=("level", "repeat"), suffix="_above")
    return rows.with_columns(missed=pl.col("value").is_null() | pl.col("value_above").is_null())


def _effect(pairs: pl.DataFrame, rows: pl.DataFrame, how: str) -> Measured:
    """What both sides' values come to; the least is that of the most below and the least above."""
    ends = {"value": "value", "least": "most", "most": "least"}
    combine = _COMBINE[how]
    rows = rows.with_columns(
        *(combine(pl.col(end), pl.col(f"{name}_above")).alias(name) for name, end in ends.items()),
        combine(pl.col("also"), pl.col("also_above")).alias("also"),
        *(pl.concat_list(name, f"{name}_above").alias(name) for name in ("runs", "candidates")),
    )
    rows = rows.filter("missed" | pl.all_horizontal(pl.col(*ends).is_not_null())).sort("level", "repeat")
    pairs = pairs.join(rows, on="level", how="semi", maintain_order="left")
    levels = pairs.drop("below", "above", "epoch_below", "devices_above", "devices_below")
    return Measured(levels, rows.select("level", "repeat", *ends, "also", "runs", "candidates"))


def _ratio(below: pl.Expr, above: pl.Expr) -> pl.Expr:
    return pl.when(below != 0).then(above / below)


def _efficiency(below: pl.Expr, above: pl.Expr) -> pl.Expr:
    few, many = (pl.col(name).cast(pl.Float64) for name in ("devices_below", "devices_above"))
    return _ratio(below, above) * few / many


_COMBINE: dict[str, Callable[[pl.Expr, pl.Expr], pl.Expr]] = {
    "ratio": _ratio,
    "difference": lambda below, above: above - below,
    "efficiency": _efficiency,
}


def _name(key: str) -> str:
    """Strategy, model and data have their names."""
    return f"{key}.name" if key in COMPONENTS else key


def _each(levels: pl.DataFrame, key: str, of: Callable[[Any], Any], kind: type[pl.DataType]) -> pl.Expr:
    """Something of the value of a key, asked once for each of its texts; a key that no configuration has is null."""
    name = _name(key)
    if name not in levels.columns:
        return pl.lit(of(None), kind)
    values = {text: of(_read(text)) for text in ("", *levels[name].unique())}  # polars ignores the type of none
    return pl.col(name).replace_strict(values, return_dtype=kind)


def _with(levels: pl.DataFrame, wanted: Level) -> pl.DataFrame:
    """The levels that have one of the values of each key."""
    for key, some in wanted.items():
        if levels.height:  # most claims find none
            levels = levels.filter(_each(levels, key, partial(_is_among, allowed=some), pl.Boolean))
    return levels


def _is_among(value: Any, allowed: Any) -> bool:
    return value in allowed if isinstance(allowed, list) else value == allowed


def _words(levels: pl.DataFrame, roots: Sequence[str], side: Level) -> pl.Expr:
    """A side in words: "ddp × 2", "batch size 64"."""
    words = []
    if "strategy" in roots:
        times = pl.when(pl.col("devices") != "").then(pl.format(" × {}", "devices")).otherwise(pl.lit(""))
        words.append(_each(levels, "strategy", str, pl.String) + times)
    for key in side:
        if key in roots and key != "strategy" and (key != "devices" or "strategy" not in roots):
            words.append(_each(levels, key, partial(_said, key=key), pl.String))
    return pl.concat_str(words or [pl.lit("")], separator=" ")


def _said(value: Any, key: str) -> str:
    return "last epoch" if value == LAST else f"{key.rpartition('.')[2].replace('_', ' ')} {_shown(value)}"


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def labels(compared: Sequence[Effect]) -> list[str]:
    """Data and model of each effect, and the keys in which it differs from others of the same; weak scaling always."""
    works = [effect.keys for effect in compared]
    weak = [["scaling"] if work.get("scaling") == "weak" else [] for work in works]
    told = zip(works, varying_keys(works), weak, strict=True)
    return [_label(work, list(dict.fromkeys([*varying, *more]))) for work, varying, more in told]


def _label(work: Work, varying: list[str]) -> str:
    ways = {"strategy.name", "devices"}
    if not (ways <= work.keys() and ways & set(varying)):
        return work_label(work, varying)
    rest = [key for key in varying if key not in ways]
    return work_label(work, rest, way=f"{work['strategy.name']} × {work['devices']}")
