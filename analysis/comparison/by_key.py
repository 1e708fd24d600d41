"""Runs of one folder compared by a key: `compare DIR --by strategy=ddp,fsdp`."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from analysis.comparison.environments import environments_of
from analysis.comparison.exclusions import format_exclusions
from analysis.comparison.groups import labels, works
from analysis.comparison.policy import WAYS, UnlikeWork, command_line
from analysis.comparison.require import require_counted
from analysis.comparison.sides import Side
from analysis.comparison.two_sides import CONFIGURATION, Comparison, compare
from analysis.comparison.work import plain
from parallelbench.config.build import completed
from parallelbench.errors import ConfigError, choices
from parallelbench.measure.environment_match import flatten

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from analysis.reader import Runs


def by(runs: Runs, key: str, one: Any, other: Any, *, across: Sequence[str] = ()) -> Comparison:
    """Compare the runs with `key=other` with those with `key=one`, e.g. `by(runs, "strategy", "ddp", "fsdp")`.

    `key` may be "configuration", whose values are those of the report, e.g. "single × 1" and "ddp × 2": then strategy,
    devices and nodes may differ.
    """
    run_ids = run_ids_by(runs, key)
    one, other = (as_recorded(plain(value), run_ids) for value in (one, other))
    if one == other:
        raise ConfigError(f"--by {key}: both sides are {key}={one}; {choices(one, set(run_ids) - {one})}")
    for value in (one, other):
        if value not in run_ids:
            skipped = _skipped_having(runs, key, value)
            raise ConfigError(
                f"--by {key}: no run in {runs.root} has {key}={value}{skipped}; {choices(value, run_ids)}"
            )
    # Folders that can't be read belong to neither side: they are reported once.
    readable = replace(runs, skipped=())
    command = ("compare", str(runs.root), "--by", f"{key}={one},{other}")
    between = WAYS if key == CONFIGURATION else (key,)
    sides = (readable.only(run_ids[one]), readable.only(run_ids[other]))
    try:
        compared = compare(*sides, across=(*across, *between), command=command)
    except UnlikeWork:
        # More runs with these values, which another sweep measured, may be what the other side belongs to.
        if skipped := _skipped_having(runs, key, one) or _skipped_having(runs, key, other):
            raise ConfigError(f"--by {key}: the runs in {runs.root} can't be compared{skipped}") from None
        raise
    unread = format_exclusions(replace(runs.only([]), skipped=runs.skipped))
    return replace(compared, notes=(*compared.notes, *unread))


def run_ids_by(runs: Runs, key: str) -> dict[str, list[str]]:
    """Value of a key, as people write it → the runs that have it; `ConfigError` where no run has the key."""
    require_counted(runs)
    if key == CONFIGURATION:
        values = dict(labels(runs).select("run_id", "configuration").rows())
    else:
        values = {run_id: _value(runs, run_id, key, config) for run_id, config in _configs(runs, key)}
    run_ids: dict[str, list[str]] = {}
    for run_id, value in values.items():
        run_ids.setdefault(plain(value), []).append(run_id)
    return run_ids


def as_recorded(value: str, known: Iterable[str]) -> str:
    """The one of these values that is equal to what was typed: 1e6 is 1000000.0, True is true; else what was typed."""
    known = list(known)
    return value if value in known else next((each for each in known if _read(each) == _read(value)), value)


def _read(value: str) -> float | str:
    try:
        return float(value)
    except ValueError:
        return value.lower() if value.lower() in ("true", "false", "null") else value


def _skipped_having(runs: Runs, key: str, value: str) -> str:
    """Where a sweep whose measurements were skipped has runs with this value: the folders, and the command."""
    for sweep, there in sorted(runs.sweeps.items()):
        if value in {plain(_value(there, run_id, key, config)) for run_id, config in _configs_of(there)}:
            twins = (each.twin for each in runs.skipped if each.path.parent == sweep and each.twin)
            if read_in := next(twins, None):
                command = command_line(("compare", str(read_in.parent), str(sweep), "--across", key))
                return (
                    f", but runs in {sweep}, which were skipped for those in {read_in.parent}: compare the two "
                    f"folders, `{command}`"
                )
    return ""


def _configs_of(runs: Runs) -> list[tuple[str, str]]:
    return runs.run.select("run_id", "config_json").rows()


def _configs(runs: Runs, key: str) -> list[tuple[str, str]]:
    names = Side(runs, ()).names | {CONFIGURATION}
    if key not in names:
        raise ConfigError(f"--by {key}: no run has this key; {choices(key, names)}")
    return _configs_of(runs)


def _value(runs: Runs, run_id: str, key: str, config_json: str) -> Any:
    values = flatten(completed(json.loads(config_json))) | works(runs)[run_id] | environments_of(runs)[run_id]
    return values.get(f"{key}.name", values.get(key))
