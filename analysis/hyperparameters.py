"""Every setting that trains, by kind of work: once where all strategies share its values, else by strategy."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec
import polars as pl

from analysis import latex, text
from analysis.comparison.policy import CIRCUMSTANCES
from analysis.comparison.work import is_below, plain
from parallelbench.config.build import LATER_COMPONENTS, LATER_OPTIONS, completed
from parallelbench.measure.environment_match import flatten

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from analysis.reader import Runs

_APART = (*CIRCUMSTANCES, "measure.telemetry_hz", "repeat", "data.name", "model.name", "strategy.name")
"""Keys that train nothing, or stand elsewhere in the table."""
_OF_RUN = ("global_batch_size", "learning_rate", "device_type", "device_name", "parameters", "repeat")
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
_LATER = frozenset(key.partition(".")[0] for key in LATER_OPTIONS) | LATER_COMPONENTS.keys()

Values = frozenset[str]
"""The values of a setting, each as JSON."""


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
        return f"{self.data} · {self.model}"


class _Settings:
    """The settings of all runs of a strategy within a kind of work."""

    def __init__(self) -> None:
        self.parts: dict[str, set[bytes]] = defaultdict(set)
        """Top-level key → its distinct values, as JSON; empty text where a run has none."""
        self.derived: dict[str, set[Any]] = defaultdict(set)

    def flats(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Each distinct value of a top-level key as dotted keys, with what came later as it was before."""
        for key, raws in self.parts.items():
            for raw in raws:
                whole = completed({key: msgspec.json.decode(raw)} if raw else {})
                yield key, flatten({key: whole.get(key, {})})

    def values(self, later: Iterable[str]) -> dict[str, Values]:
        """Dotted key → values. `later`: keys that came later which some run of this work does not have as before."""
        found: dict[str, set[Any]] = defaultdict(set)
        for root, flat in self.flats():
            for key, value in flat.items():
                if not _came_later(key) or key in later or root in later:
                    found[key].add(msgspec.json.encode(value).decode())
            for key in later:
                if key in LATER_OPTIONS and key not in flat and key.partition(".")[0] == root:
                    found[key].add(msgspec.json.encode(LATER_OPTIONS[key]).decode())
        for key, several in self.derived.items():
            found[key] |= {msgspec.json.encode(value).decode() for value in several if value is not None}
        kept = {key: frozenset(several) for key, several in found.items() if several}
        return {key: several for key, several in kept.items() if not _is_apart(key)}


@lru_cache(maxsize=8)
def hyperparameters(runs: Runs) -> list[Hyperparameters]:
    """One table per data set and model, in the order of their names."""
    works: dict[tuple[str, str], dict[str, _Settings]] = defaultdict(dict)
    names = ("data", "model", "strategy", "config_json", *_OF_RUN)
    for data, model, strategy, config_json, *derived in runs.run.select(names).rows():
        settings = works[data, model].setdefault(strategy, _Settings())
        parts = msgspec.json.decode(config_json, type=dict[str, msgspec.Raw])
        for key in _LATER | parts.keys():
            settings.parts[key].add(bytes(parts[key]) if key in parts else b"")
        for name, value in zip(_OF_RUN, derived, strict=True):
            settings.derived[name].add(value)
    return [_table(*work, works[work]) for work in sorted(works)]


def _table(data: str, model: str, settings: dict[str, _Settings]) -> Hyperparameters:
    strategies = tuple(sorted(settings, key=lambda name: (name != "single", name)))
    later = {name: _later(settings[name]) for name in strategies}
    # An option of a strategy is that strategy's alone; what another component or the run sets, others leave as it was.
    of_all = {key for keys in later.values() for key in keys if not key.startswith("strategy.")}
    columns = [settings[name].values(of_all | later[name]) for name in strategies]
    keys = sorted({key for column in columns for key in column}, key=_place)
    alike = {key: all(column.get(key) == columns[0].get(key) for column in columns) for key in keys}
    shared = tuple((_named(key), _shown(key, columns[0][key])) for key in keys if alike[key])
    differing = tuple(
        (_named(key), tuple(_shown(key, column.get(key, frozenset())) for column in columns))
        for key in keys
        if not alike[key]
    )
    return Hyperparameters(data, model, strategies, shared, differing)


def _later(settings: _Settings) -> set[str]:
    """What came later and is not as before in some run: options, and of components the roots."""
    found = set()
    for root, flat in settings.flats():
        if root in LATER_COMPONENTS and flat != flatten({root: LATER_COMPONENTS[root]}):
            found.add(root)
        found |= {key for key, value in flat.items() if key in LATER_OPTIONS and value != LATER_OPTIONS[key]}
    return found


def _came_later(key: str) -> bool:
    return key in LATER_OPTIONS or key.partition(".")[0] in LATER_COMPONENTS


def _is_apart(key: str) -> bool:
    return key.endswith("_target_") or (is_below(key, _APART) and key not in _OF_RUN)


def _place(key: str) -> tuple[int, str, bool, str]:
    """Where a setting stands: by its root, and of a component its name first."""
    root, _, option = key.partition(".")
    return (_ORDER.index(root) if root in _ORDER else len(_ORDER), root, option != "name", option)


def _named(key: str) -> str:
    return "repeats" if key == "repeat" else key


def _shown(key: str, values: Values) -> str:
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


def table(tables: Iterable[Hyperparameters]) -> pl.DataFrame:
    """All of them as rows: data, model, setting, strategy (or all) and value."""
    rows = [(each.data, each.model, *row) for each in tables for row in _rows(each)]
    names = ("data", "model", "setting", "strategy", "value")
    return pl.DataFrame(rows, schema=dict.fromkeys(names, pl.String), orient="row")


def _rows(each: Hyperparameters) -> Iterator[tuple[str, str, str]]:
    for name, value in each.shared:
        yield name, EVERY, value
    for name, values in each.differing:
        for strategy, value in zip(each.strategies, values, strict=True):
            if value != text.MISSING:
                yield name, strategy, value


def tabulars(tables: Iterable[Hyperparameters]) -> str:
    """All of them in LaTeX: of each one table of what is shared, then the others, by as many strategies as fit."""
    return latex.floats((captioned for each in tables for captioned in _captioned(each)), name="hyperparameters")


def _captioned(each: Hyperparameters) -> Iterator[tuple[str, list[latex.Rows]]]:
    yield f"{each.work}: settings of all", [_rows_of(f"l{latex.broken(0.6)}", ("Setting", "Value"), each.shared)]
    if each.differing:
        yield f"{each.work}: settings by strategy", [*_by_strategy(each)]


def _by_strategy(each: Hyperparameters) -> Iterator[latex.Rows]:
    for start in range(0, len(each.strategies), latex.MOST_COLUMNS):
        some = slice(start, start + latex.MOST_COLUMNS)
        names = each.strategies[some]
        # A setting that none of these strategies has is told beside those that have it.
        body = [(name, *values[some]) for name, values in each.differing if {*values[some]} != {text.MISSING}]
        shape = "l" + latex.broken(0.7 / len(names) - 0.03) * len(names)
        yield _rows_of(shape, ("Setting", *names), body)


def _rows_of(shape: str, head: Sequence[str], body: Iterable[Sequence[str]]) -> latex.Rows:
    first, *others = [[latex.escape(cell) for cell in row] for row in (head, *body)]
    return latex.Rows(shape, first, others)
