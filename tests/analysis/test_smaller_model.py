"""A run whose parity was checked on a smaller model, and whose whole model was never compared, is listed as such."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from analysis import load, per_run, summary
from analysis.report import warnings
from parallelbench.results.tables import TABLES_VERSION
from tests.analysis.factory import Fake, config, published
from tests.analysis.test_compact import rewrite

SMALL = Fake(parity_model="2 of 12 blocks")
"""Its closing check has compared no step: the factory's says why not."""


def compared(tables: dict[str, pl.DataFrame]) -> dict[str, pl.DataFrame]:
    """One device had the memory for a step of the whole model."""
    step = pl.lit("gradients").alias("check"), pl.lit(value=True).alias("passed")
    return tables | {"checks": tables["checks"].with_columns(*step)}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_only_runs_whose_whole_model_was_never_compared_are_listed(strategy: str, tmp_path: Path) -> None:
    other = "fsdp" if strategy == "ddp" else "ddp"
    published(config(tmp_path, strategy=strategy, devices=2), SMALL)
    held = published(config(tmp_path, strategy=other, devices=2), SMALL)
    rewrite(held, TABLES_VERSION, compared)
    published(config(tmp_path, strategy="tensor_parallel", devices=2))
    runs = load(tmp_path)
    assert [
        name
        for line in map(str, warnings._parity_off(runs))
        for name in ("ddp", "fsdp", "tensor_parallel")
        if name in line
    ] == [strategy]
    made = set(per_run(runs)["checks_made"].to_list())
    assert made == {"not compared: steps (made up)", "passed: gradients"}
    words = dict(summary(runs).select("strategy", "parity").rows())
    assert words == {strategy: "1 of 1, 1 on a smaller model only", other: "1 of 1", "tensor_parallel": "1 of 1"}
