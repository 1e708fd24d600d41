"""Results with fewer columns than today's: all answers still come, and none is made of what is missing."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from analysis import load, per_run, summary
from analysis.claims import judge_all
from analysis.figures import draw
from analysis.report import answers
from analysis.report.page import render
from analysis.runs.published import INDISPENSABLE, LOADED
from parallelbench.results.folder import RunFolder
from parallelbench.results.tables import TABLES_VERSION
from tests.analysis.factory import Fake, config, published
from tests.analysis.test_compact import rewrite

BUSY = {"data_wait": 1.0, "forward": 4.0, "backward": 8.0, "optimizer": 2.0, "other": 1.0}
KINDS = {
    "single": Fake(phases=lambda rank, step: BUSY),
    "ddp": Fake(
        phases=lambda rank, step: BUSY | {"communication": 1.0},
        probed=(0.25, 100.0),
        sent=lambda epoch, rank: (1000, 0, 0),
        gpu_power_w=lambda epoch, rank: 100.0,
    ),
    "pipeline": Fake(phases=lambda rank, step: BUSY | {"bubble": 3.0}, theoretical_bubble=0.125),
    "downpour": Fake(staleness=lambda epoch, rank: [0, 1], parity_passed=None),
}


def sweep(root: Path) -> list[RunFolder]:
    """Two repeats of what has phases, rings, energies, bubbles and pushes."""
    return [
        published(config(root, repeat=repeat, strategy=name, devices=1 if name == "single" else 2), fake)
        for repeat in range(2)
        for name, fake in KINDS.items()
    ]


@pytest.mark.slow
@pytest.mark.parametrize("tables", [("epochs",), LOADED], ids=["epochs", "every table"])
def test_all_answers_come_without_later_columns(tables: tuple[str, ...], tmp_path: Path) -> None:
    def older(whole: dict[str, pl.DataFrame]) -> dict[str, pl.DataFrame]:
        kept = {table: ["run_id", *INDISPENSABLE.get(table, ())] for table in tables}
        later = {table: [name for name in whole[table].columns if name not in kept[table]] for table in tables}
        return whole | {table: whole[table].drop(later[table]) for table in tables}

    folders = sweep(tmp_path)
    for folder in folders:
        rewrite(folder, TABLES_VERSION - 1, older)
    runs = load(tmp_path)
    assert runs.run.height == len(folders)
    assert "<html" in render(runs, draw(runs), {})
    assert answers.headline(runs)
    assert summary(runs).height
    assert judge_all(runs)


@pytest.mark.exhaustive
def test_bytes_that_were_not_counted_are_null(tmp_path: Path) -> None:
    for folder in sweep(tmp_path):
        rewrite(folder, TABLES_VERSION - 1, lambda t: t | {"ranks": t["ranks"].drop("activation_bytes_sent")})
    found = per_run(load(tmp_path)).select("^.*bytes_sent.*$")
    assert found.width == 8
    assert set(found.unpivot()["value"]) == {None}
