"""Made-up sweeps with their answers by hand, which every room is asked (`test_one_verdict.py`).

Most are single × 1 and ddp × 2 on processors, six repeats of four epochs, measured in turn. They are written once, get
an energy as GPUs have, and are altered in memory, as other tests alter them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import polars as pl

from analysis import load
from analysis.figures import specification
from analysis.runs.published import LOADED
from analysis.runs.reader import Runs
from tests.analysis.factory import MIB, Fake, config, published, steady

ONE, TWO = {"strategy": "single", "devices": 1}, {"strategy": "ddp", "devices": 2}
REPEATS, EPOCHS = range(6), 4
SINGLE_S = (10.0, 11.0, 12.0, 13.0, 14.0, 15.0)
"""Of an epoch on one device, but of the first one, which takes 20 s; the machine gets slower, which pairs cancel."""
WOBBLE = (1.0, 1.01, 0.99, 1.02, 0.98, 1.0)
SPEED_UP = 1.6
ENERGY_J, ENERGY_RATIO = 300.0, 1.2
"""Of an epoch on one device, and by how much two need more, however long they take."""
ROUND_S = 1e5
"""From a repeat to the next; ddp × 2 begins half of it later than single × 1, and in odd repeats half of it earlier."""
IN_TWO, STEADY = pl.col("strategy") == "ddp", pl.col("epoch") > 1


def written(root: Path) -> Runs:
    """Publish the runs."""
    for repeat, single_s in enumerate(SINGLE_S):
        for way, time_s, second in (
            (ONE, single_s, repeat % 2),
            (TWO, single_s / SPEED_UP * WOBBLE[repeat], 1 - repeat % 2),
        ):
            fake = steady(time_s, first_s=20.0, started_at=Fake.started_at + ROUND_S * (repeat + second / 2))
            published(config(root, repeat=repeat, epochs=EPOCHS, **way), fake)
    energy_j = ENERGY_J * pl.when(IN_TWO).then(ENERGY_RATIO).otherwise(1.0)
    return altered(load(root), "epochs", gpu_energy_j=energy_j)


def altered(runs: Runs, table: str = "ranks", **columns: pl.Expr) -> Runs:
    """Other columns in a table; expressions may name its run's `strategy` and `repeat`."""
    frame = runs.tables[table]
    if table == "run":
        frame = frame.with_columns(**columns)
    else:
        of_run = runs.run.select("run_id", "strategy", "repeat")
        joined = frame.join(of_run, on="run_id", how="left", maintain_order="left")
        frame = joined.with_columns(**columns).select(frame.columns)
    return replace(runs, tables={name: runs.tables[name] for name in LOADED} | {table: frame})


def rows_of(chart: Any) -> list[dict[str, Any]]:
    """What a chart draws; None: there is no chart."""
    assert chart is not None
    (rows,) = specification(chart)["datasets"].values()
    return list(rows)


def environment(**entries: Any) -> str:
    """The usual environment, with these dotted entries; None: without the entry."""
    whole: dict[str, Any] = json.loads(Fake.environment)
    for key, value in entries.items():
        *parents, last = key.split(".")
        node = whole
        for parent in parents:
            node = node.setdefault(parent, {})
        if value is None:
            node.pop(last, None)
        else:
            node[last] = value
    return json.dumps(whole)


def in_environments(runs: Runs, one: dict[str, Any], other: dict[str, Any]) -> Runs:
    """single × 1 in the one environment, ddp × 2 in the other one."""
    texts = {"single": environment(**one), "ddp": environment(**other)}
    return altered(runs, "run", environment_json=pl.col("strategy").replace_strict(texts))


def cold(runs: Runs) -> Runs:
    """As with `measure.parity=false`: ddp × 2, which is checked otherwise, starts as single × 1 does."""
    never = {"parity_passed": pl.lit(None, pl.Boolean), "startup_parity_s": pl.lit(None, pl.Float64)}
    return altered(runs, "run", startup_s=pl.lit(2.4), **never)


def later(runs: Runs, by_s: float, *, but: int = 0) -> Runs:
    """ddp × 2 began so much later, but in the first repeats."""
    by = pl.when(IN_TWO & (pl.col("repeat") >= but)).then(by_s).otherwise(0.0)
    moved = {name: pl.col(name) + by for name in ("training_started_at", "training_ended_at")}
    return altered(runs, **moved)


def slower(runs: Runs, *factors: float) -> Runs:
    """The later epochs of ddp × 2 take so many times as long in each repeat."""
    each = pl.col("repeat").replace_strict(dict(enumerate(factors)), return_dtype=pl.Float64)
    return altered(runs, epoch_time_s=pl.col("epoch_time_s") * pl.when(IN_TWO & STEADY).then(each).otherwise(1.0))


def disturbed(runs: Runs, *epochs: int, share: float = 0.48) -> Runs:
    """Others took a share of a core of rank 0 of ddp × 2 in these epochs."""
    where = IN_TWO & (pl.col("rank") == 0) & pl.col("epoch").is_in(epochs)
    return altered(runs, others_time_s=pl.when(where).then(share * pl.col("epoch_time_s")).otherwise(0.0))


def probed(runs: Runs, slow: pl.Expr) -> Runs:
    """Probes of 2 Gflop/s, before and after each run; of slow ones of half as many."""
    speed = pl.when(slow).then(1e9).otherwise(2e9)
    return altered(runs, "run", **{f"probed_{moment}_matmul_flop_per_s": speed for moment in ("start", "end")})


def flagged(runs: Runs, flag: str) -> Runs:
    """The energies of ddp × 2 are flagged."""
    return altered(runs, "epochs", telemetry_flags=pl.when(IN_TWO).then(pl.lit(flag)))


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What is wrong, and what must be said of ddp × 2 beside single × 1."""

    alter: Callable[[Runs], Runs]
    verdict: str
    speed_up: float | None = None
    interval: tuple[float, float] | None = None
    """Of the speed-up: exp(m ± t·s/√6), m and s of the six logarithms, t = 4.331853 of five degrees of freedom, which
    errs 3.2 · 0.05^1.125 · 6^-1.5 = 0.748625 %: computed apart from the suite.
    """
    counted: int = len(REPEATS)
    """Runs of ddp × 2."""
    shorter: str = "inconclusive"
    """What becomes of the claim that two devices take less time."""
    why: str = ""
    """Words of every room; without any, nothing is held against the runs."""
    time_s: float = (12 * 0.99 + 13 * 1.02) / SPEED_UP / 2
    """Median over the repeats of ddp × 2 of the median over its later epochs."""
    time_ratio: float = 1 / SPEED_UP
    """Median over the repeats of the time of ddp × 2 ÷ that of single × 1, whatever speaks against it."""


NOISE = (1.3, 0.75, 1.1, 0.9, 1.2, 0.8)
SWEEPS = {
    "nothing is wrong": Sweep(
        alter=lambda runs: runs,
        verdict="faster",
        speed_up=SPEED_UP,
        interval=(1.5606051, 1.6406628),
        shorter="reproduced",
    ),
    "unlike": Sweep(
        alter=lambda runs: in_environments(runs, {}, {"packages.torch": "2.11.0"}),
        verdict="not comparable",
        why="the sides differ in packages.torch: 2.15.0 and 2.11.0",
    ),
    "apart": Sweep(
        alter=lambda runs: later(runs, 1e7),
        verdict="not interleaved",
        speed_up=SPEED_UP,
        why="sides were measured apart",
    ),
    "too fast": Sweep(
        alter=lambda runs: slower(runs, *[1 / 3] * 6),
        verdict="not comparable",
        why="2 devices seem 4.68 times as fast as 1 device, and more than 2.1 times is not believed",
        time_s=(12 * 0.99 + 13 * 1.02) / SPEED_UP / 6,
        time_ratio=1 / SPEED_UP / 3,
    ),
    "one slow probe": Sweep(
        alter=lambda runs: probed(runs, ~IN_TWO & (pl.col("repeat") == 0)),
        verdict="faster",
        speed_up=SPEED_UP,
        interval=(1.5606051, 1.6406628),
        shorter="reproduced",
    ),
    "slow probes": Sweep(
        alter=lambda runs: probed(runs, IN_TWO),
        verdict="not comparable",
        why="sides' machines were not equally fast",
    ),
    "disturbed": Sweep(alter=lambda runs: disturbed(runs, 3, 4), verdict="disturbed", counted=0, why="disturbed"),
    "noise": Sweep(
        alter=lambda runs: slower(runs, *(SPEED_UP / w * n for w, n in zip(WOBBLE, NOISE, strict=True))),
        verdict="no difference shown",
        speed_up=(1.1 * 0.9) ** -0.5,
        interval=(0.6799233, 1.5085848),
        time_s=(12.0 + 13.0) / 2,
        time_ratio=(1.1 * 0.9) ** 0.5,
    ),
}
"""Times of noise, by hand: 13, 8.25, 13.2, 11.7, 16.8 and 12 s."""


VARIANTS = (
    ({"strategy": {"name": "ddp", "bucket_mib": 1}, "devices": 2}, 8.0, 300.0),
    ({"strategy": {"name": "ddp", "bucket_mib": 25}, "devices": 2}, 6.0, 450.0),
    ({"strategy": "fsdp", "devices": 2}, 9.0, 200.0),
    ({"strategy": "fsdp", "devices": 4}, 5.0, 150.0),
    ({"strategy": "fsdp", "devices": 2, "nodes": 2}, 9.5, 210.0),
    ({"strategy": "fsdp", "devices": 4, "nodes": 2}, 5.5, 160.0),
)
"""Ways to train besides one device, which takes 10 s and 250 MiB: two variants of one strategy, and one on one node and
on two. Of each the time of an epoch in s, and the peak of each process in MiB.
"""


def of_variants(root: Path) -> Runs:
    """Publish them, in turn."""
    ways = (({"strategy": "single", "devices": 1}, 10.0, 250.0), *VARIANTS)
    for repeat, wobble in enumerate(WOBBLE):
        for place, (way, time_s, peak_mib) in enumerate(ways):
            began = Fake.started_at + ROUND_S * (repeat + place / 10)
            peak_bytes = int(peak_mib * MIB)
            fake = steady(time_s * wobble, started_at=began, host_peak_rss_bytes=lambda *_, b=peak_bytes: b)
            published(config(root, repeat=repeat, **way), fake)
    return load(root)
