"""What claims cost grows with the runs and no faster: counted in calls, as no clock is reliable."""

from __future__ import annotations

import cProfile
import pstats
from dataclasses import replace
from itertools import pairwise

import msgspec
import polars as pl
import pytest

from analysis import load
from analysis.claims import judge_all
from analysis.runs.reader import Runs
from tests.analysis.factory import Fake, config, published

pytestmark = pytest.mark.slow

WAYS = (("single", 1), ("ddp", 2), ("ddp", 4))
EPOCHS = 3
NEARLY = 1.25
"""Times linear: sorting takes n·log n."""
MOST_CALLS = 3_500
"""Of all 95 claims, for each further run. Where each claim walked all runs by itself it was 4,500 and more."""
MOST_CALLS_OF_FEW = 500_000
"""Of all 95 claims on a run of each way: mostly polars building its queries. Where each was joined it was 700,000."""


@pytest.fixture(scope="module")
def patterns(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """A run of each way to train."""
    root = tmp_path_factory.mktemp("patterns")
    for strategy, devices in WAYS:
        fake = Fake(epoch_time_s=lambda epoch, rank, devices=devices: 4.0 / devices**0.9)  # type: ignore[misc]
        published(config(root, strategy=strategy, devices=devices, epochs=EPOCHS), fake)
    return load(root)


def many(patterns: Runs, *, works: int, repeats: int) -> Runs:
    """As many kinds of work, which differ in the batch size, each measured in every way and so often."""
    tables = {
        name: pl.concat(
            [_copy(rows, name, work, repeat) for work in range(works) for repeat in range(repeats)], how="vertical"
        )
        for name, rows in patterns.tables.items()
    }
    return replace(patterns, tables=tables)


def _copy(rows: pl.DataFrame, table: str, work: int, repeat: int) -> pl.DataFrame:
    rows = rows.with_columns(pl.col("run_id") + f"-{work:03}-{repeat:03}")
    if table == "ranks":  # no two repeats are alike
        rows = rows.with_columns(pl.col("epoch_time_s") * (1 + ((7 * repeat + work) % 11) / 500))
    if table != "run":
        return rows
    batch = 32 + 8 * work
    texts = [
        msgspec.json.encode(msgspec.json.decode(text) | {"batch_size": batch, "repeat": repeat}, order="sorted")
        for text in rows["config_json"]
    ]
    return rows.with_columns(
        config_json=pl.Series([text.decode() for text in texts]),
        batch_size=pl.lit(batch, rows.schema["batch_size"]),
        global_batch_size=pl.lit(batch, rows.schema["global_batch_size"]),
        repeat=pl.lit(repeat, rows.schema["repeat"]),
        slug=pl.col("slug") + f"-{work:03}-{repeat:03}",
    )


def calls(runs: Runs) -> int:
    """Calls of all functions, of the suite and of libraries, that judging all claims takes."""
    profile = cProfile.Profile()
    profile.runcall(judge_all, runs)
    total: int = pstats.Stats(profile).total_calls  # type: ignore[attr-defined]
    return total


@pytest.mark.cases("repeats")
@pytest.mark.parametrize("grown", ["works", "repeats"])
def test_claims_cost_the_same_for_each_further_run(patterns: Runs, grown: str) -> None:
    """Of 12, 24 and 48 times the runs: what the second doubling adds per run, and what the first one does."""
    small, middle, large = (many(patterns, **({"works": 4, "repeats": 6} | {grown: 6 * 2**step})) for step in range(3))
    judge_all(many(patterns, works=1, repeats=3))  # reads the claims, imports what is imported late
    counts = {runs.run.height: calls(runs) for runs in (small, middle, large)}
    sizes = list(counts)
    first, second = ((counts[more] - counts[few]) / (more - few) for few, more in pairwise(sizes))
    assert second <= NEARLY * first
    assert second <= MOST_CALLS


def test_claims_cost_little_in_a_small_folder(patterns: Runs) -> None:
    """Most claims find no runs there, which is known before anything is joined."""
    judge_all(many(patterns, works=1, repeats=3))  # reads the claims, imports what is imported late
    assert calls(many(patterns, works=1, repeats=1)) <= MOST_CALLS_OF_FEW
