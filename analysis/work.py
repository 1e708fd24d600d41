"""Which runs did the same work, and which of them count."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import polars as pl

from analysis.metrics import per_run
from analysis.stats import Ratio, paired_ratio
from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from analysis.load import Runs

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
_DEVICE = ("device_type", "device_name")
_NAMES = ("data.name", "model.name")

Work = dict[str, Any]


class UnlikeWork(ConfigError):  # noqa: N818
    """Runs that did different work were to be compared; the message says what differs, and the way around."""


def flatten(node: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} → {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in node.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def flatten_config(config_json: str) -> Work:
    """The column `config_json` as dotted key → value."""
    return flatten(json.loads(config_json))


def is_below(key: str, roots: Iterable[str]) -> bool:
    """Whether a dotted key is one of the roots, or below one: strategy.schedule is below strategy."""
    return any(key == root or key.startswith(f"{root}.") for root in roots)


@lru_cache(maxsize=8)
def works(runs: Runs) -> dict[str, Work]:
    """Per run id, everything that defines its work: its flat configuration, less what is being compared."""
    configured: dict[str, Work] = {}
    seen: dict[str, Counter[tuple[Any, ...]]] = defaultdict(Counter)
    rows = runs.run.select("run_id", "config_json", *_DEVICE).rows()
    for run_id, config_json, *device in rows:
        flat = flatten_config(config_json)
        configured[run_id] = {k: v for k, v in flat.items() if not is_below(k, COMPARED + _CIRCUMSTANCES)}
        if None not in device:
            seen[canonical(configured[run_id])][tuple(device)] += 1
    found: dict[str, Work] = {}
    for run_id, _, *device in rows:
        usual = seen[canonical(configured[run_id])].most_common(1)
        # A run that died before it said where it ran belongs with the others of its configuration.
        where = usual[0][0] if None in device and usual else device
        found[run_id] = configured[run_id] | dict(zip(_DEVICE, where, strict=True))
    return found


def canonical(work: Work) -> str:
    """A work as text: equal works have equal texts."""
    return json.dumps(work, sort_keys=True)


def plain(value: Any) -> str:
    """A value as people write it: ddp, true, 0.1, null."""
    return value if isinstance(value, str) else json.dumps(value)


@lru_cache(maxsize=8)
def left_out(runs: Runs) -> pl.DataFrame:
    """`run_id` and `reason` of every run that stays out of comparisons of time and memory."""
    column = pl.col
    gone = pl.format("{}: {}", column("outcome"), column("reason"))
    samples = runs.ranks.group_by("run_id", "epoch").agg(column("train_samples").sum().alias("owned"))
    miscounted = samples.join(runs.epochs, on=["run_id", "epoch"]).filter(column("owned") != column("train_samples"))
    reason = (
        pl.when(column("state") == "missing").then(pl.lit("not started"))
        .when(column("state") == "running").then(pl.lit("still running"))
        .when(column("outcome") != "ok").then(gone)
        .when(column("state") != "done").then(pl.lit("it has no result"))
        .when(~column("parity_passed")).then(pl.lit("parity failed: it does not train like one device"))
        .when(column("oversubscribed")).then(pl.lit("oversubscribed: more devices than cores"))
        .when(column("packed")).then(pl.lit("packed: started by a warm process"))
        .when(column("deterministic")).then(pl.lit("deterministic algorithms only"))
        .when(column("detect_anomaly")).then(pl.lit("autograd searched for NaNs"))
        .when(column("run_id").is_in(miscounted["run_id"].to_list()))
        .then(pl.lit("the ranks' samples don't add up to the epoch's"))
    )  # fmt: skip
    found = runs.run.select("run_id", reason.alias("reason")).drop_nulls("reason")
    return pl.concat([found, _again(runs, found)])


def _again(runs: Runs, left: pl.DataFrame) -> pl.DataFrame:
    """Runs that repeat another's repeat, with parity checked in one only, say: pairs are by repeat, so one counts."""
    keys = ["group", "configuration", "repeat"]
    counted = (
        runs.run.select("run_id", "repeat").join(left, on="run_id", how="anti").join(configurations(runs), on="run_id")
    )
    again = counted.sort("run_id").filter(pl.int_range(pl.len()).over(keys) > 0)
    reason = "another run of the same configuration and repeat is counted"
    return again.select("run_id", pl.lit(reason).alias("reason"))


@lru_cache(maxsize=8)
def configurations(runs: Runs) -> pl.DataFrame:
    """`run_id` with `group` (runs of the same work), `variant` (strategy with options) and `configuration`.

    `group` names the data, the model, and what else sets it apart from the other groups; `configuration`
    is the variant with its devices. Runs of one configuration are repeats of each other.
    """
    rows = runs.run.select("run_id", "config_json", "strategy", "devices", "nodes").to_dicts()
    groups = _group_labels(list(works(runs).values()))
    strategies = {row["run_id"]: flatten({"strategy": json.loads(row["config_json"])["strategy"]}) for row in rows}
    variants = _labels(list(strategies.values()), key="strategy.name")
    for row in rows:
        row["group"] = groups[canonical(works(runs)[row["run_id"]])]
        row["variant"] = variants[canonical(strategies[row["run_id"]])]
        nodes = f" on {row['nodes']} nodes" if row["nodes"] > 1 else ""
        row["configuration"] = f"{row['variant']} × {row['devices']}{nodes}"
    columns = ("run_id", "group", "variant", "configuration")
    schema = dict.fromkeys(columns, pl.String)
    return pl.DataFrame([{name: row[name] for name in columns} for row in rows], schema=schema)


def groups_across(runs: Runs, roots: tuple[str, ...]) -> dict[str, str]:
    """Run id → the label of its group, if works that differ in these keys, or below them, alone were one."""
    kept = {
        run_id: {key: value for key, value in work.items() if not is_below(key, roots)}
        for run_id, work in works(runs).items()
    }
    labels = _group_labels(list(kept.values()))
    return {run_id: labels[canonical(work)] for run_id, work in kept.items()}


def _group_labels(found: list[Work]) -> dict[str, str]:
    """Canonical work → "data · model", with the keys that these two names alone don't tell apart. Works that go across
    models have none.
    """
    distinct = {canonical(work): work for work in found}
    labels = {}
    for key, work in distinct.items():
        rest = [
            f"{_short(k)} {plain(work[k])}" for k in sorted(work) if _distinguishes(k, work, list(distinct.values()))
        ]
        names = [work[name] for name in _NAMES if name in work]
        labels[key] = " · ".join([*names, *rest])
    return labels


def _distinguishes(key: str, work: Work, all_works: list[Work]) -> bool:
    """Whether a key tells this work from another, once the names of its data and model are known.

    An option of a component only does among components of the same name: others may not have it.
    """
    component = key.partition(".")[0]
    if key in _NAMES:
        return False
    name = f"{component}.name"
    alike = [other for other in all_works if key == name or other.get(name) == work.get(name)]
    return any(other.get(key) != work[key] for other in alike)


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
    values = per_run(runs).join(runs.run.select("run_id", "repeat"), on="run_id")

    def by_repeat(run_ids: list[str]) -> dict[int, float | None]:
        return dict(values.filter(pl.col("run_id").is_in(run_ids)).select("repeat", metric).rows())

    return paired_ratio(by_repeat(numerator), by_repeat(denominator))
