"""What defines a run's work, as dotted keys and values; runs that did the same, and how they are called."""

from __future__ import annotations

import functools
import json
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

import msgspec
import polars as pl

from analysis.runs.reader import once
from parallelbench.config.build import LATER_COMPONENTS, LATER_OPTIONS, OF_PROGRAM, completed
from parallelbench.config.identity import OF_SWEEP, PLACES
from parallelbench.frameworks import FRAMEWORKS
from parallelbench.frameworks.program import Program
from parallelbench.measure.environment_match import flatten

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from analysis.runs.reader import Runs


Work = dict[str, Any]
"""Dotted key → value: a configuration, or a part of it."""
Differences = dict[str, tuple[Any, Any]]
"""Dotted key → the value of each side."""


def work_differences(one: Work, other: Work) -> Differences:
    """The keys in which two works differ. Of two unlike components only the names are compared."""
    keys = sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key))
    unlike = {key.removesuffix(".name") for key in keys if key.endswith(".name")}
    differing = {key: (one.get(key), other.get(key)) for key in keys if not is_below(key, unlike)}
    return differing | {name: (one.get(f"{name}.name"), other.get(f"{name}.name")) for name in sorted(unlike)}


def without(work: Work, roots: Iterable[str]) -> Work:
    """A work without these keys, and without what is below them."""
    names = frozenset(roots)
    prefixes = tuple(f"{root}." for root in names)
    return {key: value for key, value in work.items() if not (key in names or key.startswith(prefixes))}


def is_below(key: str, roots: Iterable[str]) -> bool:
    """Whether a dotted key is one of the roots, or below one: strategy.schedule is below strategy."""
    return any(key == root or key.startswith(f"{root}.") for root in roots)


def canonical(value: Any) -> str:
    """A value as text: equal values have equal texts."""
    return json.dumps(value, sort_keys=True)


def plain(value: Any) -> str:
    """A value as people write it: ddp, true, 0.1, null."""
    return value if isinstance(value, str) else json.dumps(value)


REFERENCE = "single"
"""The strategy that others are held against on one device: parity, and losses of the training."""
ONE_DEVICE = {name: framework.one_device for name, framework in FRAMEWORKS.items()}
"""Framework → its strategy on one device."""
COMPARED = ("strategy", "devices", "nodes", "repeat")
"""Keys in which runs of the same work may differ."""
WAYS = tuple(key for key in COMPARED if key != "repeat")
"""The same but for the repeat: ways to train."""
WHICH_STRATEGY = ("strategy.name", "strategy._target_")
"""Keys that say which it is; the others below `strategy` are its options."""
CIRCUMSTANCES = (
    *(*PLACES, *OF_SWEEP, "device"),
    "measure.parity",
    "measure.parity_steps",
    "measure.steps_sampled",
    "measure.attribution_steps",
    "measure.trace",
    "measure.probe",
)
"""Keys that change neither work nor times. The columns `DEVICE` say which device `device` came to."""
DEVICE = ("device_type", "device_name")
"""Columns of the run table that belong to a run's work."""
PROBED = {
    "probed_matmul_flop_per_s": ("probed_start_matmul_flop_per_s", "probed_end_matmul_flop_per_s"),
    "probed_memory_bytes_per_s": ("probed_start_memory_bytes_per_s", "probed_end_memory_bytes_per_s"),
}
"""What is probed of a device → the columns of the run table that measured it, at the start and at the end."""


def is_one_device(strategy: str, devices: int) -> bool:
    """Whether it is a framework's own training on one device."""
    return strategy in ONE_DEVICE.values() and devices == 1


IS_ONE_DEVICE = pl.col("strategy").is_in(list(ONE_DEVICE.values())) & (pl.col("devices") == 1)
"""The same of each row."""
PROGRAM = FRAMEWORKS["program"].one_device
"""The strategy of all users' programs."""
_UNTOLD = [name for name, each in FRAMEWORKS.items() if not each.tells_training]
IS_PROGRAM = pl.col("framework").is_in(_UNTOLD).fill_null(False)
"""Whether a user's own program was measured, of which nothing but its steps is known."""
IS_REFERENCE = (pl.col("strategy") == REFERENCE) & (pl.col("devices") == 1)
"""Whether others' losses are held against this row's."""


_APART = frozenset(COMPARED + CIRCUMSTANCES)
_NAMES = ("data.name", "model.name")
BEFORE = LATER_OPTIONS | flatten(LATER_COMPONENTS)
"""What all runs did before there was a choice: a label says only where a run does otherwise."""


@once
def configurations(runs: Runs) -> dict[str, dict[str, bytes]]:
    """Per run id its configuration: each key and its value as JSON; equal ones share one object."""
    decode, shared = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode, dict[bytes, bytes]()
    rows = runs.run.select("run_id", "config_json").rows()
    return {
        run_id: {key: shared.setdefault(part := bytes(raw), part) for key, raw in decode(text).items()}
        for run_id, text in rows
    }


@once
def works(runs: Runs) -> dict[str, Work]:
    """Per run id, the definition of its work: its flat configuration without the compared keys.

    Runs of equal work share one object.
    """
    configured: dict[str, str] = {}
    parsed: dict[tuple[tuple[str, bytes], ...], str] = {}
    nodes: dict[str, Work] = {}
    seen: dict[str, Counter[tuple[Any, ...]]] = defaultdict(Counter)
    rows = runs.run.select("run_id", *DEVICE).rows()
    for run_id, *device in rows:
        parts = configurations(runs)[run_id]
        # Of thousands of runs few do different work, so each work is read only once.
        same = tuple((key, raw) for key, raw in parts.items() if key not in _APART)
        if same not in parsed:
            node = completed({key: msgspec.json.decode(raw) for key, raw in parts.items()})
            _drop(node, COMPARED + CIRCUMSTANCES)
            work = flatten(node)
            parsed[same] = canonical(work)
            nodes[parsed[same]] = work
        configured[run_id] = parsed[same]
        if None not in device:
            seen[configured[run_id]][tuple(device)] += 1
    of_runs: dict[str, Work] = {}
    whole: dict[tuple[str, tuple[Any, ...]], Work] = {}
    for run_id, *device in rows:
        configuration = configured[run_id]
        usual = seen[configuration].most_common(1)
        # A run that died before it recorded its device belongs with the others of its configuration.
        where = usual[0][0] if None in device and usual else tuple(device)
        if (configuration, where) not in whole:
            whole[configuration, where] = nodes[configuration] | dict(zip(DEVICE, where, strict=True))
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


@once
def labels(runs: Runs) -> pl.DataFrame:
    """`run_id` with `group` (runs of the same work), `variant` (strategy with options) and `configuration`.

    `group` names the data, the model, and what else sets it apart from the other groups; `configuration`
    is the variant with its devices. Runs of one configuration are repeats of each other.
    """
    groups = _labelled(works(runs), _group_labels)
    variants = component_labels(runs, "strategy")
    rows = [
        (run_id, groups[run_id], variants[run_id], configuration_label(variants[run_id], devices, nodes))
        for run_id, devices, nodes in runs.run.select("run_id", "devices", "nodes").rows()
    ]
    names = ("run_id", "group", "variant", "configuration")
    return pl.DataFrame(rows, schema=dict.fromkeys(names, pl.String), orient="row")


def configuration_label(variant: str, devices: int, nodes: int) -> str:
    """ "pipeline × 4 on 2 nodes, schedule gpipe": options come last, where they read as no factor of the devices."""
    strategy, comma, options = variant.partition(", ")
    return f"{strategy} × {devices}" + (f" on {nodes} nodes" if nodes > 1 else "") + comma + options


@once
def components(runs: Runs, name: str) -> dict[str, Work]:
    """Per run id this component (strategy, model) with all its options, flat; equal ones share one object."""
    known: dict[bytes, Work] = {}
    of_runs = {}
    for run_id, parts in configurations(runs).items():
        same = parts[name]
        if same not in known:
            node = msgspec.json.decode(same)
            if node.get("_target_") == OF_PROGRAM:
                _drop(node, Program.places)
            known[same] = flatten({name: node})
        of_runs[run_id] = known[same]
    return of_runs


@once
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


@once
def highest_repeats(runs: Runs) -> dict[str, int]:
    """Run id → the highest repeat of its configuration, also of runs that don't count: further repeats come after."""
    highest = pl.col("repeat").max().over("group", "configuration")
    rows = labels(runs).join(runs.run.select("run_id", "repeat"), on="run_id").select("run_id", highest)
    return dict(rows.rows())


def natural(name: str) -> pl.Expr:
    """What a column of labels is sorted by, so that "epochs 30" comes before "epochs 100"; decimals sort as text."""
    padded = pl.col(name).str.replace_all(r"(^|[^\d.])(\d+)", "${1}000000000000${2}")
    return padded.str.replace_all(r"\d*?(\d{12})(\D|$)", "${1}${2}")


@once
def component_labels(runs: Runs, name: str) -> dict[str, str]:
    """Run id → the component's name, followed by the options in which others of that name differ."""
    return _labelled(components(runs, name), functools.partial(_labels, key=f"{name}.name"))


def _labelled(by_run: dict[str, Work], label: Callable[[list[Work]], dict[str, str]]) -> dict[str, str]:
    """Run id → the label of its work, made once for each object."""
    distinct = {id(work): work for work in by_run.values()}
    labels = label(list(distinct.values()))
    shown = {key: labels[canonical(work)] for key, work in distinct.items()}
    return {run_id: shown[id(work)] for run_id, work in by_run.items()}


@once
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
    """ "data · model · batch size 64": the names of data and model, the strategy and the device where they are named,
    and these keys.
    """
    names = [*(work[name] for name in _NAMES if name in work), *([way] if way else [])]
    kept = list(keys)
    if set(DEVICE) <= set(kept) and work["device_name"]:  # whose name tells its type
        names.append(work["device_name"])
        kept = [key for key in kept if key not in DEVICE]
    # Once where two keys say the same, as data.sequence and model.sequence do.
    return " · ".join([*names, *dict.fromkeys(f"{_short(key)} {plain(work[key])}" for key in kept)])


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
        if work.keys() != first.keys():
            differing |= first.keys() ^ work.keys()
        differing.update(k for k, v in work.items() if v != first.get(k) or isinstance(v, (list, dict)))
    return differing


def _is_said(key: str, work: Work) -> bool:
    return key not in BEFORE or work[key] != BEFORE[key]


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


_ROW = ("strategy.name", "devices", "nodes", "data.name", "model.name")
"""What identifies a row of a comparison. Where these differ, the other side has nothing to compare with."""


def unlike_works(one: Iterable[Work], other: Sequence[Work]) -> Differences:
    """The differences between works without a partner on the other side, where two belong to one row."""
    unlike: Differences = {}
    for work in one:
        if others := [each for each in other if _row(each) == _row(work)]:
            unlike = nearest(work, others) | unlike
    return unlike


def nearest(work: Work, others: Iterable[Work]) -> Differences:
    """How a work differs from the one that is most like it."""
    return min((work_differences(work, other) for other in others), key=len)


def _row(work: Work) -> str:
    return canonical({key: value for key, value in work.items() if key in _ROW})


def differences_within(definitions: Sequence[Work]) -> Differences:
    """How the first definition that is unlike the first of all differs from it; empty where all are equal."""
    first, *others = definitions
    return next(filter(None, (work_differences(first, other) for other in others)), {})
