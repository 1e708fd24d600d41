"""Which runs did the same work, and which of them count."""

from __future__ import annotations

import functools
import json
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

import msgspec
import polars as pl

from analysis.metrics import miscounted, per_run
from analysis.stats import Ratio, paired_ratio
from parallelbench.errors import ConfigError
from parallelbench.store.surroundings import flatten

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from analysis.reader import Runs

COMPARED = ("strategy", "devices", "nodes", "repeat")
"""What runs of the same work may differ in."""
_CIRCUMSTANCES = (
    "results",
    "launcher",
    "site",
    "sweep_name",
    "device",
    "measure.parity",
    "measure.parity_steps",
    "measure.steps_sampled",
    "measure.attribution_steps",
    "measure.trace",
)
"""Keys that change neither work nor timing; `device` gives way to the device that it turned out to be."""
_APART = frozenset(COMPARED + _CIRCUMSTANCES)
_DEVICE = ("device_type", "device_name")
_NAMES = ("data.name", "model.name")

Work = dict[str, Any]


class UnlikeWork(ConfigError):  # noqa: N818
    """Runs that did different work were to be compared; the message says what differs, and the way around."""


def flatten_config(config_json: str) -> Work:
    """The column `config_json` as dotted key → value."""
    return flatten(json.loads(config_json))


def is_below(key: str, roots: Iterable[str]) -> bool:
    """Whether a dotted key is one of the roots, or below one: strategy.schedule is below strategy."""
    return any(key == root or key.startswith(f"{root}.") for root in roots)


@functools.lru_cache(maxsize=8)
def works(runs: Runs) -> dict[str, Work]:
    """Per run id, everything that defines its work: its flat configuration, less what is being compared.

    Runs of equal work share one object.
    """
    configured: dict[str, str] = {}
    parsed: dict[tuple[tuple[str, bytes], ...], str] = {}
    nodes: dict[str, Work] = {}
    seen: dict[str, Counter[tuple[Any, ...]]] = defaultdict(Counter)
    rows = runs.run.select("run_id", "config_json", *_DEVICE).rows()
    for run_id, config_json, *device in rows:
        parts = msgspec.json.decode(config_json, type=dict[str, msgspec.Raw])
        # Of thousands of runs few do different work: what they have beside what is compared is read once.
        same = tuple((key, bytes(raw)) for key, raw in parts.items() if key not in _APART)
        if same not in parsed:
            node = msgspec.json.decode(config_json)
            _drop(node, COMPARED + _CIRCUMSTANCES)
            work = flatten(node)
            parsed[same] = canonical(work)
            nodes[parsed[same]] = work
        configured[run_id] = parsed[same]
        if None not in device:
            seen[configured[run_id]][tuple(device)] += 1
    found: dict[str, Work] = {}
    whole: dict[tuple[str, tuple[Any, ...]], Work] = {}
    for run_id, _, *device in rows:
        configuration = configured[run_id]
        usual = seen[configuration].most_common(1)
        # A run that died before it said where it ran belongs with the others of its configuration.
        where = usual[0][0] if None in device and usual else tuple(device)
        if (configuration, where) not in whole:
            whole[configuration, where] = nodes[configuration] | dict(zip(_DEVICE, where, strict=True))
        found[run_id] = whole[configuration, where]
    return found


def _drop(node: dict[str, Any], keys: Iterable[str]) -> None:
    """Take these dotted keys, and what is below them, out of a configuration."""
    for key in keys:
        *parents, last = key.split(".")
        inner = node
        for parent in parents:
            inner = inner.get(parent, {})
        inner.pop(last, None)


def canonical(work: Any) -> str:
    """A work as text: equal works have equal texts."""
    return json.dumps(work, sort_keys=True)


def plain(value: Any) -> str:
    """A value as people write it: ddp, true, 0.1, null."""
    return value if isinstance(value, str) else json.dumps(value)


@functools.lru_cache(maxsize=8)
def left_out(runs: Runs) -> pl.DataFrame:
    """`run_id` and `reason` of every run that stays out of comparisons of time and memory."""
    column = pl.col
    gone = pl.format("{}: {}", column("outcome"), column("reason"))
    reason = (
        pl.when(column("state") == "missing").then(pl.lit("not started"))
        .when(column("state") == "running").then(pl.lit("still running"))
        .when(column("outcome") != "ok").then(gone)
        .when(column("state") != "done").then(pl.lit("it has no result"))
        .when(~column("parity_passed")).then(pl.lit("parity failed: it does not train like one device"))
        .when(column("oversubscribed")).then(pl.lit("oversubscribed: more devices than cores"))
        .when(column("packed")).then(pl.lit("packed: started by a warm process"))
        .when(column("launcher") == "inline").then(pl.lit("inline: trained in the calling process, as it was"))
        .when(column("resumed_elsewhere").is_not_null()).then(pl.format("resumed elsewhere: {}", "resumed_elsewhere"))
        .when(column("deterministic")).then(pl.lit("deterministic algorithms only"))
        .when(column("detect_anomaly")).then(pl.lit("autograd searched for NaNs"))
        .when(column("run_id").is_in(list(miscounted(runs))))
        .then(pl.lit("the ranks' samples don't add up to the epoch's"))
    )  # fmt: skip
    found = runs.run.select("run_id", reason.alias("reason")).drop_nulls("reason")
    return pl.concat([found, _again(runs, found)])


def _again(runs: Runs, left: pl.DataFrame) -> pl.DataFrame:
    """Runs that repeat another's repeat, with parity checked in one only, say: pairs are by repeat, so one counts."""
    keys = ["group", "configuration", "repeat"]
    counted = runs.run.select("run_id", "repeat").join(left, on="run_id", how="anti").join(labels(runs), on="run_id")
    again = counted.sort("run_id").filter(pl.int_range(pl.len()).over(keys) > 0)
    reason = "another run of the same configuration and repeat is counted"
    return again.select("run_id", pl.lit(reason).alias("reason"))


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
    found = {}
    for run_id, config_json in runs.run.select("run_id", "config_json").rows():
        same = bytes(msgspec.json.decode(config_json, type=dict[str, msgspec.Raw])[name])
        if same not in known:
            known[same] = flatten({name: msgspec.json.decode(same)})
        found[run_id] = known[same]
    return found


def component_labels(runs: Runs, name: str) -> dict[str, str]:
    """Run id → the component's name, followed by the options in which others of that name differ."""
    return _labelled(components(runs, name), functools.partial(_labels, key=f"{name}.name"))


def _labelled(found: dict[str, Work], label: Callable[[list[Work]], dict[str, str]]) -> dict[str, str]:
    """Run id → the label of its work, made once for each object."""
    distinct = {id(work): work for work in found.values()}
    labels = label(list(distinct.values()))
    shown = {key: labels[canonical(work)] for key, work in distinct.items()}
    return {run_id: shown[id(work)] for run_id, work in found.items()}


def groups_across(runs: Runs, roots: tuple[str, ...]) -> dict[str, str]:
    """Run id → the label of its group, if works that differ in these keys, or below them, alone were one."""
    kept = {
        id(work): {key: value for key, value in work.items() if not is_below(key, roots)}
        for work in {id(work): work for work in works(runs).values()}.values()
    }
    return _labelled({run_id: kept[id(work)] for run_id, work in works(runs).items()}, _group_labels)


def _group_labels(found: list[Work]) -> dict[str, str]:
    """Canonical work → "data · model", with the keys that these two names alone don't tell apart. Works that go across
    models have none.
    """
    distinct = {canonical(work): work for work in found}
    varying = _varying(list(distinct.values()))
    labels = {}
    for text, work in distinct.items():
        rest = [f"{_short(key)} {plain(work[key])}" for key in sorted(work) if (key, _alike(key, work)) in varying]
        names = [work[name] for name in _NAMES if name in work]
        labels[text] = " · ".join([*names, *rest])
    return labels


def _varying(found: list[Work]) -> set[tuple[str, str | None]]:
    """The keys that tell works apart, once the names of their data and models are known, and among which.

    An option of a component only does among components of the same name: others may not have it.
    """
    values: dict[tuple[str, str | None], set[Any]] = defaultdict(set)
    for key in {key for work in found for key in work} - set(_NAMES):
        for work in found:
            value = work.get(key)
            values[key, _alike(key, work)].add(canonical(value) if isinstance(value, (list, dict)) else value)
    return {key for key, different in values.items() if len(different) > 1}


def _alike(key: str, work: Work) -> str | None:
    """What another work's component must be called for its key to be compared; None: any."""
    name = f"{key.partition('.')[0]}.name"
    return None if key == name else work.get(name)


def _labels(found: list[Work], *, key: str) -> dict[str, str]:
    """Canonical node → its name, followed by the options in which nodes of the same name differ."""
    distinct = {canonical(node): node for node in found}
    labels = {}
    for key_of, node in distinct.items():
        same = [other for other in distinct.values() if other[key] == node[key]]
        varying = [k for k in sorted(node) if any(node.get(k) != other.get(k) for other in same)]
        labels[key_of] = ", ".join([node[key], *(f"{_short(k)} {plain(node[k])}" for k in varying)])
    return labels


def _short(key: str) -> str:
    parent, _, last = key.rpartition(".")
    return (parent if last == "name" else last).replace("_", " ")


def ratio_of(runs: Runs, metric: str, *, numerator: list[str], denominator: list[str]) -> Ratio | None:
    """The paired ratio of a metric of `per_run` between two lists of run ids."""
    values = _values(runs, metric)
    return paired_ratio(*(dict(values[run_id] for run_id in side) for side in (numerator, denominator)))


@functools.lru_cache(maxsize=8)
def _values(runs: Runs, metric: str) -> dict[str, tuple[int, float | None]]:
    """Run id → its repeat, and the metric."""
    rows = zip(runs.run["run_id"], runs.run["repeat"], per_run(runs)[metric], strict=True)
    return {run_id: (repeat, value) for run_id, repeat, value in rows}
