"""Loads results from the folders of several machines.

A folder is of one machine, or of one cluster. Folders that share a host are of one machine, and are read as one: there
a run that lies in two of them is a duplicate. A run that was measured on two machines is a replication, kept by host.
Between machines nothing is paired: the machine is a part of the work that is compared (`analysis.comparison.work`).
"""

from __future__ import annotations

import os
import shlex
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import polars as pl

from analysis import text
from analysis.runs.published import LOADED, Tables
from analysis.runs.reader import Runs, load
from parallelbench.errors import ConfigError
from parallelbench.results.folder import no_runs, require_folder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


_IDENTITY = ("host", "cpu", "logical_cores")
"""Entries of an environment that tell hosts apart: containers of two machines may have one name."""
_MACHINE = "machine"
"""The entry that tells hosts apart which these make alike; results of earlier releases lack it."""
Host = tuple[str, ...]
"""Values of `_IDENTITY`, and last that of `_MACHINE`; empty where none was recorded."""


def load_all(paths: Sequence[Path | str], *, plugin: str | None = None) -> Runs:
    """Read all runs at or below these folders, as `analysis.load` does with each.

    Where they are of several machines, run ids end in `@MACHINE`, and groups are those of one machine. What can't be
    read is in `skipped`. Raises `ConfigError` for a folder that lies in another one, or without runs.
    """
    if len(paths) == 1:
        return load(paths[0], plugin=plugin)
    _require_apart(paths)
    each = [load(path, plugin=plugin) for path in paths]
    for runs in each:
        if runs.run.is_empty() and not any(skipped.is_run for skipped in runs.skipped):
            raise ConfigError(no_runs(runs.root))
    hosts = [_hosts(runs) for runs in each]
    parts = [_of_one_machine([each[place] for place in places], plugin) for places in _sharing(hosts)]
    if len(parts) == 1:
        return parts[0]
    readable = [runs for runs in parts if not runs.run.is_empty()]
    return _merged(parts, dict(zip(_names(readable), readable, strict=True)) if len(readable) > 1 else {})


def _require_apart(paths: Sequence[Path | str]) -> None:
    """Refuse folders that hold the same runs because one is, or lies in, another."""
    roots = [Path(path).expanduser() for path in paths]
    for root in roots:
        require_folder(root)
    for place, root in enumerate(roots):
        for other in (*roots[:place], *roots[place + 1 :]):
            if root.resolve() == other.resolve():
                raise ConfigError(f"{root} and {other} are the same folder: name it once")
            if root.resolve().is_relative_to(other.resolve()):
                raise ConfigError(f"{root} lies in {other}, whose runs include its own: name one of them")


def _hosts(runs: Runs) -> set[Host]:
    """The hosts that a folder's runs were measured on, as far as they recorded any."""
    found: set[Host] = set()
    for content in runs.run["environment_json"].drop_nulls().unique():
        entries = msgspec.json.decode(content)
        if entries.get("host"):
            named = tuple(str(entries.get(key, "")) for key in _IDENTITY)
            found.add((*named, str(entries.get(_MACHINE) or "")))
    known = {host[:-1] for host in found if host[-1]}
    return {host for host in found if host[-1] or host[:-1] not in known}


def _share(one: set[Host], other: set[Host]) -> bool:
    """Whether a host is in both, as far as both recorded which machine it was."""
    return any(
        host[:-1] == another[:-1] and (host[-1] == another[-1] or not (host[-1] and another[-1]))
        for host in one
        for another in other
    )


def _sharing(hosts: Sequence[set[Host]]) -> list[list[int]]:
    """The places of folders that share a host, directly or by way of others, together; in their order."""
    together: list[tuple[list[int], set[Host]]] = []
    for place, own in enumerate(hosts):
        alike = [each for each in together if _share(each[1], own)]
        places = sorted(place for of_one, _ in alike for place in of_one)
        together = [each for each in together if each not in alike]
        together.append(([*places, place], own.union(*(of_one for _, of_one in alike))))
    return sorted(places for places, _ in together)


def _of_one_machine(several: Sequence[Runs], plugin: str | None) -> Runs:
    return several[0] if len(several) == 1 else load(*(runs.root for runs in several), plugin=plugin)


def _names(parts: Sequence[Runs]) -> list[str]:
    """The machines' names: their hosts', or where none is recorded or two are alike, with the folder."""
    names = []
    for runs in parts:
        hosts = sorted({host for host, *_ in _hosts(runs)})
        more = f" and {len(hosts) - 1} more" if len(hosts) > 1 else ""
        names.append(f"{hosts[0]}{more}" if hosts else "")
    counts = Counter(names)
    folders = [" and ".join(map(str, runs.folders or (runs.root,))) for runs in parts]
    return [
        name if name and counts[name] == 1 else f"{name} ({folder})" if name else folder
        for name, folder in zip(names, folders, strict=True)
    ]


def _merged(parts: Sequence[Runs], machines: Mapping[str, Runs]) -> Runs:
    """One set of tables. `parts`: also folders of which no run can be read."""
    marked = [_marked(runs, machine) for machine, runs in machines.items()]
    folders = tuple(folder for runs in parts for folder in runs.folders or (runs.root,))
    return Runs(
        root=Path(os.path.commonpath([folder.absolute() for folder in folders])),
        tables=Tables({table: pl.concat(runs.scan(table) for runs in marked or parts) for table in LOADED}),
        skipped=tuple(skipped for runs in parts for skipped in runs.skipped),
        notes=tuple(dict.fromkeys(note for runs in parts for note in runs.notes)),
        folders=folders,
        machines={run_id: machine for runs in marked for run_id, machine in runs.machines.items()},
        of_machines=machines,
        plugin=parts[0].plugin,
    )


def _marked(runs: Runs, machine: str) -> Runs:
    """The same runs, whose ids end in their machine."""
    return replace(
        runs,
        tables=Tables({table: runs.scan(table).with_columns(pl.col("run_id") + f"@{machine}") for table in LOADED}),
        machines={f"{run_id}@{machine}": machine for run_id in runs.run["run_id"]},
        of_machines={machine: runs},
    )


def _taken_for_one(runs: Runs) -> list[str]:
    held = [Path(folder).absolute() for folder in runs.run["folder"].drop_nulls().unique()]
    roots = [root for root in runs.folders if any(each.is_relative_to(root.absolute()) for each in held)]
    if len(roots) < 2:
        return []
    hosts = text.listed(sorted({host for host, *_ in _hosts(runs)}), most=3)
    return [f"taken for one machine: {' and '.join(map(str, roots))} (host {hosts or 'not recorded'})"]


def replications(runs: Runs) -> list[str]:
    """Which folders were taken for one machine, of which machines the runs are, and how many are of several.

    Empty where one folder was read.
    """
    one = [line for there in runs.of_machines.values() or (runs,) for line in _taken_for_one(there)]
    if len(runs.of_machines) < 2:
        return one
    own = {machine: set(there.run["run_id"]) for machine, there in runs.of_machines.items()}
    shown = [f"{machine} ({text.number_of_runs(len(ids))})" for machine, ids in own.items()]
    counts = Counter(run_id for ids in own.values() for run_id in ids)
    several = sum(count > 1 for count in counts.values())
    first = [str((there.folders or (there.root,))[0]) for there in runs.of_machines.values()][:2]
    lines = [
        f"Runs of {len(own)} machines: {text.listed(shown, most=8)}. Within this report each is compared with runs of "
        f"its own machine only; `{shlex.join(('parallelbench', 'compare', *first))}` compares machines."
    ]
    replicated = "were measured on more than one of them: replications, of which each machine's counts by itself."
    lines = [*one, *lines]
    return [*lines, f"{text.number_of_runs(several)} {replicated}"] if several else lines
