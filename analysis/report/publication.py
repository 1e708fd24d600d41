"""Tables for a publication: what was run on what, accuracies after so many epochs, and every setting that trains.

The first is as publication 000 begins its experiments (its table 1). Accuracies after 10, 30, 50 and 100 epochs stand
side by side, with what repeats differ by; settings once where all strategies share their values, else by strategy.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import polars as pl

from analysis import text
from analysis.comparison.summary import learned
from analysis.comparison.work import (
    BEFORE,
    IS_ONE_DEVICE,
    component_labels,
    configurations,
    groups_across,
    is_below,
    labels,
    natural,
    plain,
    works,
)
from analysis.report.tables import Table
from analysis.runs.reader import once
from parallelbench.config.build import completed
from parallelbench.measure.environment import links
from parallelbench.measure.environment_match import flatten

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from analysis.runs.reader import Runs


_ENTRIES = {
    "Strategies": "strategy",
    "Models": "model",
    "Epochs": "epochs",
    "Devices": "devices",
    "Data sets": "data",
    "Global batch": "global_batch_size",
    "Precision": "precision",
}
"""Row → the column of the run table."""
_GIB = 2**30


@once
def _of_trained(runs: Runs) -> pl.DataFrame:
    """The run table of the runs that trained, to their end or for an epoch: what was only asked for says nothing."""
    trained = runs.select("epochs", "run_id")["run_id"].cast(pl.String).unique()
    return runs.run.filter((pl.col("state") == "done") | pl.col("run_id").is_in(trained.implode()))


@once
def experiment(runs: Runs) -> list[tuple[str, str]]:
    """What it is, and its distinct values in the order of numbers; nothing of what was not recorded.

    Of the runs that trained. Those that began but did not reach their end are counted beside the others, by what became
    of them.
    """
    trained = _of_trained(runs)
    cuda = [_environment(each).cuda or {} for each in trained["environment_json"].drop_nulls()]
    devices = [device for each in cuda for device in each.get("devices") or ()]
    shown: dict[str, Iterable[Any]] = {
        "Device": trained["device_name"].drop_nulls(),
        "Memory of a GPU": [f"{device['memory_bytes'] / _GIB:.0f} GiB" for device in devices],
        "Links between GPUs": [link for each in cuda for link in links(each.get("topology"))],
        "Nodes": trained["nodes"],
        "Framework": frameworks(trained),
        **{name: trained[column].drop_nulls() for name, column in _ENTRIES.items()},
    }
    counts = [("Repeats", _repeats(runs)), ("Runs", _counted(runs.run))]
    return [*((name, told) for name, values in shown.items() if (told := _listed(values))), *counts]


def _repeats(runs: Runs) -> str:
    """Of each configuration: "3", or "2 to 3" where some have fewer."""
    rows = labels(runs).join(_of_trained(runs).select("run_id", "repeat"), on="run_id")
    of_each = rows.group_by("group", "configuration").agg(pl.col("repeat").n_unique())["repeat"].to_list()
    fewest, most = min(of_each), max(of_each)
    return f"{most}" if fewest == most else f"{fewest} to {most}"


def _counted(rows: pl.DataFrame) -> str:
    """ "160", or "158; not to the end: 1 oom, 1 running"; intents that nobody began are no runs."""
    done = f"{(rows['state'] == 'done').sum():,}"
    others = rows.filter(~pl.col("state").is_in(["done", "missing"])).select(pl.coalesce("outcome", "state"))
    told = ", ".join(f"{count} {label}" for label, count in sorted(Counter(others.to_series()).items()))
    return f"{done}; not to the end: {told}" if told else done


def frameworks(rows: pl.DataFrame) -> list[str]:
    """The frameworks of rows of the run table, each with its version where that was recorded: "torch 2.15.0"."""
    recorded = rows.select("framework", pl.col("environment_json").fill_null("{}")).unique(maintain_order=True).rows()
    versions = ((name, (_environment(each).packages or {}).get(name)) for name, each in recorded)
    return [*dict.fromkeys(f"{name} {version}" if version else name for name, version in versions)]


class _Environment(msgspec.Struct):
    """What is told of it; nearly all runs have a load of their own in theirs."""

    cuda: dict[str, Any] | None = None
    packages: dict[str, Any] | None = None


_environment = msgspec.json.Decoder(_Environment).decode


def _listed(values: Iterable[Any]) -> str:
    distinct = sorted(set(values), key=lambda value: (isinstance(value, str), value))
    return ", ".join(map(str, distinct))


def experiment_table(entries: list[tuple[str, str]]) -> Table:
    """Entry and value."""
    return Table("experiment", pl.DataFrame(entries, schema={"entry": pl.String, "value": pl.String}, orient="row"))


ACCURACY_EPOCHS = (10, 30, 50, 100)
"""Those of publication 000; the last epoch of each run is always among them."""
ENDLESS = ("constant", "linear_warmup", "step")
"""Schedules of the learning rate that are the same however many epochs follow."""
ACCURACIES_CAPTION = (
    "test accuracy in per cent after so many epochs, mean ± standard deviation over the repeats (how many)"
)
_KEYS = ("work", "model", "configuration", "devices", "epochs")
_SIDES = ("test_accuracy", "train_accuracy")


class Reached(NamedTuple):
    """A row: what one configuration of one model reaches."""

    model: str
    configuration: str
    groups: tuple[str, ...]
    """Those of its runs."""
    cells: list[str]
    """By number of epochs; a dash where no run trained so long."""


class Accuracies(NamedTuple):
    """A table: what was trained on the same data, and alike but for model, strategy, devices and epochs."""

    work: str
    epochs: list[int]
    rows: list[Reached]


@once
def accuracies(runs: Runs) -> pl.DataFrame:
    """One row per work, model, configuration and number of epochs, over the runs that trained to their end.

    Columns: work, model, configuration, devices, epochs, repeats, groups (of these runs), and of test_accuracy and
    train_accuracy, shares, mean, sd (standard deviation; null for one repeat), min and max. A repeat counts once: by
    the run of so many epochs, or else by the shortest of the longer ones, if its learning rate does not depend on the
    end.
    """
    of_run = _trained(runs)
    last = of_run.select("work", epoch="epochs").unique()
    usual = pl.DataFrame({"epoch": ACCURACY_EPOCHS}, schema={"epoch": pl.Int32})
    asked = pl.concat([last, last.select("work").unique().join(usual, how="cross")]).unique()
    epochs = runs.select("epochs", "run_id", "epoch", *_SIDES).filter(pl.col("epoch").is_in(asked["epoch"].implode()))
    rows = of_run.join(epochs, on="run_id").join(asked, on=("work", "epoch"), how="semi")
    repeat = ("work", "model", "configuration", "repeat", "epoch")
    rows = rows.sort("epochs", maintain_order=True).unique(repeat, keep="first", maintain_order=True)
    measures = [
        getattr(pl.col(name), how)().alias(f"{name}_{shown}")
        for name in _SIDES
        for how, shown in (("mean", "mean"), ("std", "sd"), ("min", "min"), ("max", "max"))
    ]
    rows = rows.drop("epochs").rename({"epoch": "epochs"})
    own = (pl.col("parameters").min(), pl.col("baseline").any(), pl.len().cast(pl.Int32).alias("repeats"))
    found = rows.group_by(_KEYS).agg(*own, pl.col("group").unique().sort().alias("groups"), *measures)
    order = (natural("work"), "parameters", "model", ~pl.col("baseline"), "devices", natural("configuration"), "epochs")
    return found.sort(*order, maintain_order=True).drop("parameters", "baseline")


def _trained(runs: Runs) -> pl.DataFrame:
    """The runs that trained to their end, with what tells their row and their table."""
    whole, any_length = groups_across(runs, ("model",)), groups_across(runs, ("model", "epochs"))
    endless = {run_id for run_id, work in works(runs).items() if work["lr_schedule.name"] in ENDLESS}
    table = {run_id: any_length[run_id] if run_id in endless else whole[run_id] for run_id in whole}
    models = component_labels(runs, "model")
    return learned(runs).select(
        *("run_id", "group", "configuration", "devices", "repeat", "parameters"),
        pl.col("epochs").cast(pl.Int32),
        baseline=IS_ONE_DEVICE,
        work=pl.col("run_id").replace_strict(table, return_dtype=pl.String),
        model=pl.col("run_id").replace_strict(models, return_dtype=pl.String),
    )


def accuracies_side_by_side(rows: pl.DataFrame) -> list[Accuracies]:
    """The same as tables: a row per model and configuration, a column per number of epochs."""
    works: dict[str, dict[tuple[str, str], list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows.iter_rows(named=True):
        works[row["work"]][row["model"], row["configuration"]].append(row)
    tables = []
    for work, lines in works.items():
        epochs = sorted({row["epochs"] for own in lines.values() for row in own})
        tables.append(Accuracies(work, epochs, [_line(*key, epochs, own) for key, own in lines.items()]))
    return tables


def _line(model: str, configuration: str, epochs: list[int], own: list[dict[str, Any]]) -> Reached:
    cells = {row["epochs"]: _spread(row) for row in own}
    groups = dict.fromkeys(group for row in own for group in row["groups"])
    return Reached(model, configuration, tuple(groups), [cells.get(each, text.MISSING) for each in epochs])


def _spread(row: dict[str, Any]) -> str:
    mean, deviation = row["test_accuracy_mean"], row["test_accuracy_sd"]
    if mean is None:
        return text.MISSING
    spread = "" if deviation is None else f" ± {100 * deviation:.2f}"
    return f"{100 * mean:.2f}{spread} ({row['repeats']})"


def accuracy_table(rows: pl.DataFrame) -> Table:
    """The same, with names of groups as text, each of which has commas at most."""
    return Table("accuracy", rows.with_columns(pl.col("groups").list.join("; ")))


_APART = ("measure.telemetry_hz", "data.name", "model.name", "strategy.name")
"""Keys that train nothing, or stand elsewhere in the table."""
_OF_RUN = ("global_batch_size", "learning_rate", "parameters", "devices", "nodes", "repeat")
"""Columns of the run table: what settings came to, and which repeats there are."""
_ORDER = (
    *("model", "parameters", "data", "preprocess", "loader", "epochs", "batch_size", "global_batch_size", "scaling"),
    *("optimizer", "learning_rate", "precision", "compile", "compile_scope", "channels_last", "seed", "repeat"),
    *("device_type", "device_name", "cores_per_device", "devices", "nodes", "strategy"),
)
"""Roots of settings, as they are told; the others follow."""
MOST_VALUES = 12
"""Values of a setting that a cell names."""
EVERY = "all"
"""In the CSV file, the strategy of a setting that all share."""

Settings = dict[str, set[str]]
"""Dotted key of a setting → its values in the runs of one strategy, each as JSON."""


@dataclass(frozen=True)
class Hyperparameters:
    """What trained one model on one data set."""

    data: str
    model: str
    strategies: tuple[str, ...]
    shared: tuple[tuple[str, str], ...]
    """Each setting whose values all strategies share, and these."""
    differing: tuple[tuple[str, tuple[str, ...]], ...]
    """Each of the others, and its values by strategy; a dash where the strategy has no such setting."""

    @property
    def work(self) -> str:
        """ "digits · cnn"."""
        return " · ".join(filter(None, (self.data, self.model)))


@once
def hyperparameters(runs: Runs) -> list[Hyperparameters]:
    """One table per data set and model, in the order of their names, of the runs that trained."""
    found: dict[tuple[str, str], dict[str, Settings]] = defaultdict(dict)
    names = ("data", "model", "strategy")
    for (data, model, strategy), rows in _of_trained(runs).group_by(names, maintain_order=True):
        found[str(data or ""), str(model)][str(strategy)] = _settings(runs, rows)
    return [_of_work(*work, found[work]) for work in sorted(found)]


def _settings(runs: Runs, rows: pl.DataFrame) -> Settings:
    """What these rows of the run table were trained with."""
    settings: Settings = defaultdict(set)
    for name in _OF_RUN:
        if known := set(map(_json, rows[name].drop_nulls().unique())):
            settings[name] = known
    run_ids = rows["run_id"].to_list()
    parts = {id(works(runs)[run_id]): works(runs)[run_id] for run_id in run_ids}  # of thousands of runs few differ
    for strategy in {configurations(runs)[run_id]["strategy"] for run_id in run_ids}:
        whole = completed({"strategy": msgspec.json.decode(strategy)})
        parts[id(strategy)] = flatten({"strategy": whole["strategy"]})
    for part in parts.values():
        for key, value in part.items():
            if not (key.endswith("_target_") or is_below(key, _APART)):
                settings[key].add(_json(value))
    return settings


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _of_work(data: str, model: str, settings: dict[str, Settings]) -> Hyperparameters:
    strategies = tuple(sorted(settings, key=lambda name: (name != "single", name)))
    told = [settings[name] for name in strategies]
    keys = [
        key
        for key in sorted({key for each in told for key in each}, key=_place)
        # What no run chose is no setting that anybody asks for.
        if key not in BEFORE or any(each.get(key, {_json(BEFORE[key])}) != {_json(BEFORE[key])} for each in told)
    ]
    alike = {key: all(each.get(key) == told[0].get(key) for each in told) for key in keys}
    shared = tuple((_named(key), _shown(key, told[0][key])) for key in keys if alike[key])
    differing = tuple(
        (_named(key), tuple(_shown(key, each.get(key, set())) for each in told)) for key in keys if not alike[key]
    )
    return Hyperparameters(data, model, strategies, shared, differing)


def _place(key: str) -> tuple[int, str, bool, str]:
    """Where a setting stands: by its root, and of a component its name first."""
    root, _, option = key.partition(".")
    return (_ORDER.index(root) if root in _ORDER else len(_ORDER), root, option != "name", option)


def _named(key: str) -> str:
    return "repeats" if key == "repeat" else key


def _shown(key: str, values: set[str]) -> str:
    """ "1, 2, 4", in the order of numbers; repeats that follow each other as "0 to 5"."""
    ordered = sorted((msgspec.json.decode(value) for value in values), key=_sorting)
    if key == "repeat" and len(ordered) > 2 and ordered == [*range(ordered[0], ordered[-1] + 1)]:
        return f"{ordered[0]} to {ordered[-1]}"
    shown = [plain(value) for value in ordered]
    more = [f"… ({len(shown)} values)"] if len(shown) > MOST_VALUES else []
    return ", ".join([*shown[:MOST_VALUES], *more]) or text.MISSING


def _sorting(value: Any) -> tuple[bool, float, list[tuple[float, str]]]:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    words = [(float(part), "") if part.isdigit() else (0.0, part) for part in re.split(r"(\d+)", plain(value))]
    return (not number, float(value) if number else 0.0, [] if number else words)


def hyperparameter_table(tables: Sequence[Hyperparameters]) -> Table:
    """All of them as rows: data, model, setting, strategy (or all) and value."""
    rows = [(each.data, each.model, *row) for each in tables for row in _rows(each)]
    names = ("data", "model", "setting", "strategy", "value")
    return Table("hyperparameters", pl.DataFrame(rows, dict.fromkeys(names, pl.String), orient="row"))


def _rows(each: Hyperparameters) -> Iterator[tuple[str, str, str]]:
    for name, value in each.shared:
        yield name, EVERY, value
    for name, values in each.differing:
        for strategy, value in zip(each.strategies, values, strict=True):
            if value != text.MISSING:
                yield name, strategy, value
