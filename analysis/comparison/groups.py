"""Groups of runs that did the same work, and the labels of runs."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

import msgspec
import polars as pl

from analysis.comparison.policy import CIRCUMSTANCES, COMPARED, DEVICE, MACHINE
from analysis.comparison.work import Work, canonical, plain, without
from parallelbench.config.build import LATER_COMPONENTS, LATER_OPTIONS, completed
from parallelbench.measure.environment_match import flatten

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from analysis.reader import Runs

_APART = frozenset(COMPARED + CIRCUMSTANCES)
_NAMES = ("data.name", "model.name")
_BEFORE = LATER_OPTIONS | flatten(LATER_COMPONENTS)
"""What all runs did before there was a choice: a label says only where a run does otherwise."""


@functools.lru_cache(maxsize=8)
def works(runs: Runs) -> dict[str, Work]:
    """Per run id, the definition of its work: its flat configuration without the compared keys.

    Runs of equal work share one object. Of merged folders the machine is a part of the work.
    """
    configured: dict[str, tuple[str, str]] = {}
    parsed: dict[tuple[tuple[str, bytes], ...], str] = {}
    nodes: dict[str, Work] = {}
    seen: dict[tuple[str, str], Counter[tuple[Any, ...]]] = defaultdict(Counter)
    rows = runs.run.select("run_id", "config_json", *DEVICE).rows()
    for run_id, config_json, *device in rows:
        parts = msgspec.json.decode(config_json, type=dict[str, msgspec.Raw])
        # Of thousands of runs few do different work, so each work is read only once.
        same = tuple((key, bytes(raw)) for key, raw in parts.items() if key not in _APART)
        if same not in parsed:
            node = completed(msgspec.json.decode(config_json))
            _drop(node, COMPARED + CIRCUMSTANCES)
            work = flatten(node)
            parsed[same] = canonical(work)
            nodes[parsed[same]] = work
        configured[run_id] = parsed[same], runs.machines.get(run_id, "")
        if None not in device:
            seen[configured[run_id]][tuple(device)] += 1
    of_runs: dict[str, Work] = {}
    whole: dict[tuple[tuple[str, str], tuple[Any, ...]], Work] = {}
    for run_id, _, *device in rows:
        configuration = configured[run_id]
        usual = seen[configuration].most_common(1)
        # A run that died before it recorded its device belongs with the others of its configuration.
        where = usual[0][0] if None in device and usual else tuple(device)
        if (configuration, where) not in whole:
            of_machine = {MACHINE: configuration[1]} if configuration[1] else {}
            there = dict(zip(DEVICE, where, strict=True)) | of_machine
            whole[configuration, where] = nodes[configuration[0]] | there
        of_runs[run_id] = whole[configuration, where]
    return of_runs


def _drop(node: dict[str, Any], keys: Iterable[str]) -> None:
    """Take these dotted keys, and what is below them, out of a configuration."""
    for key in keys:
        *parents, last = key.split(".")
        inner = node
        for parent in parents:
            inner = inner.get(parent, {})
        inner.pop(last, None)


@functools.lru_cache(maxsize=8)
def labels(runs: Runs) -> pl.DataFrame:
    """`run_id` with `group` (runs of the same work), `variant` (strategy with options) and `configuration`.

    `group` names the data, the model, and what else sets it apart from the other groups; `configuration`
    is the variant with its devices. Runs of one configuration are repeats of each other.
    """
    groups = _labelled(works(runs), _group_labels)
    variants = component_labels(runs, "strategy")
    rows = [
        (run_id, groups[run_id], variants[run_id], _configuration(variants[run_id], devices, nodes))
        for run_id, devices, nodes in runs.run.select("run_id", "devices", "nodes").rows()
    ]
    names = ("run_id", "group", "variant", "configuration")
    return pl.DataFrame(rows, schema=dict.fromkeys(names, pl.String), orient="row")


def _configuration(variant: str, devices: int, nodes: int) -> str:
    return f"{variant} × {devices}" + (f" on {nodes} nodes" if nodes > 1 else "")


@functools.lru_cache(maxsize=8)
def components(runs: Runs, name: str) -> dict[str, Work]:
    """Per run id this component (strategy, model) with all its options, flat; equal ones share one object."""
    known: dict[bytes, Work] = {}
    of_runs = {}
    for run_id, config_json in runs.run.select("run_id", "config_json").rows():
        same = bytes(msgspec.json.decode(config_json, type=dict[str, msgspec.Raw])[name])
        if same not in known:
            known[same] = flatten({name: msgspec.json.decode(same)})
        of_runs[run_id] = known[same]
    return of_runs


@functools.lru_cache(maxsize=8)
def definitions(runs: Runs) -> dict[str, Work]:
    """Per run id all that defines the run, but for its repeat: its work, strategy, devices and nodes.

    Runs of equal definitions share one object.
    """
    shared: dict[tuple[int, int, int, int], Work] = {}
    defined = {}
    strategies, of_runs = components(runs, "strategy"), works(runs)
    for run_id, devices, nodes in runs.run.select("run_id", "devices", "nodes").rows():
        work, strategy = of_runs[run_id], strategies[run_id]
        key = (id(work), id(strategy), devices, nodes)
        if key not in shared:
            shared[key] = work | strategy | {"devices": devices, "nodes": nodes}
        defined[run_id] = shared[key]
    return defined


@functools.lru_cache(maxsize=8)
def highest_repeats(runs: Runs) -> dict[str, int]:
    """Run id → the highest repeat of its configuration, also of runs that don't count: further repeats come after."""
    highest = pl.col("repeat").max().over("group", "configuration")
    rows = labels(runs).join(runs.run.select("run_id", "repeat"), on="run_id").select("run_id", highest)
    return dict(rows.rows())


def natural(name: str) -> pl.Expr:
    """What a column of labels is sorted by, so that "epochs 30" comes before "epochs 100"; decimals sort as text."""
    padded = pl.col(name).str.replace_all(r"(^|[^\d.])(\d+)", "${1}000000000000${2}")
    return padded.str.replace_all(r"\d*?(\d{12})(\D|$)", "${1}${2}")


def component_labels(runs: Runs, name: str) -> dict[str, str]:
    """Run id → the component's name, followed by the options in which others of that name differ."""
    return _labelled(components(runs, name), functools.partial(_labels, key=f"{name}.name"))


def _labelled(by_run: dict[str, Work], label: Callable[[list[Work]], dict[str, str]]) -> dict[str, str]:
    """Run id → the label of its work, made once for each object."""
    distinct = {id(work): work for work in by_run.values()}
    labels = label(list(distinct.values()))
    shown = {key: labels[canonical(work)] for key, work in distinct.items()}
    return {run_id: shown[id(work)] for run_id, work in by_run.items()}


def groups_across(runs: Runs, roots: tuple[str, ...]) -> dict[str, str]:
    """Run id → the label of its group, if works that differ in these keys, or below them, alone were one."""
    kept = {id(work): without(work, roots) for work in {id(work): work for work in works(runs).values()}.values()}
    return _labelled({run_id: kept[id(work)] for run_id, work in works(runs).items()}, _group_labels)


def _group_labels(several: list[Work]) -> dict[str, str]:
    """Canonical work → "data · model", with the keys that these two names alone don't tell apart. Works that go across
    models have none.
    """
    distinct = {canonical(work): work for work in several}
    keys = varying_keys(list(distinct.values()))
    return {text: work_label(work, varying) for (text, work), varying in zip(distinct.items(), keys, strict=True)}


def work_label(work: Work, keys: Iterable[str], *, way: str = "") -> str:
    """ "data · model · batch size 64": the names of data and model, the strategy where it is named, and these keys."""
    names = [*(work[name] for name in _NAMES if name in work), *([way] if way else [])]
    # Once where two keys say the same, as data.sequence and model.sequence do.
    return " · ".join([*names, *dict.fromkeys(f"{_short(key)} {plain(work[key])}" for key in keys)])


def varying_keys(several: list[Work]) -> list[list[str]]:
    """Per work the keys that tell it apart from the others, once the names of their data and models are known.

    A component's option distinguishes only works with components of the same name: others may not have it. What came
    after results existed tells apart only the works that don't have it as it was before.
    """
    distinct = {id(work): work for work in several}
    differing = _differing(list(distinct.values())) - set(_NAMES)
    values: dict[tuple[str, str | None], set[Any]] = defaultdict(set)
    for key in differing:
        for work in distinct.values():
            value = work.get(key)
            values[key, _alike(key, work)].add(canonical(value) if isinstance(value, (list, dict)) else value)
    varying = {key for key, different in values.items() if len(different) > 1}
    said = {
        number: [
            key
            for key in sorted(differing & work.keys())
            if (key, _alike(key, work)) in varying and _is_said(key, work)
        ]
        for number, work in distinct.items()
    }
    return [said[id(work)] for work in several]


def _differing(several: list[Work]) -> set[str]:
    """The keys that not all works have with one value; those of lists and mappings in any case.

    Of a hundred keys few differ, and only these are looked at more closely.
    """
    first = several[0] if several else {}
    differing: set[str] = set()
    for work in several:
        differing |= first.keys() ^ work.keys()
        differing.update(k for k, v in work.items() if v != first.get(k) or isinstance(v, (list, dict)))
    return differing


def _is_said(key: str, work: Work) -> bool:
    return key not in _BEFORE or work[key] != _BEFORE[key]


def _alike(key: str, work: Work) -> str | None:
    """Component name for which a key is comparable between works; None: any."""
    name = f"{key.partition('.')[0]}.name"
    return None if key == name else work.get(name)


def _labels(nodes: list[Work], *, key: str) -> dict[str, str]:
    """Canonical node → its name, followed by the options in which nodes of the same name differ."""
    distinct = {canonical(node): node for node in nodes}
    labels = {}
    for key_of, node in distinct.items():
        same = [other for other in distinct.values() if other[key] == node[key]]
        varying = [k for k in sorted(node) if any(node.get(k) != other.get(k) for other in same)]
        labels[key_of] = ", ".join([node[key], *(f"{_short(k)} {plain(node[k])}" for k in varying)])
    return labels


def _short(key: str) -> str:
    parent, _, last = key.rpartition(".")
    return (parent if last == "name" else last).replace("_", " ")
