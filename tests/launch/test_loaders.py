"""Whole runs with each loader: the same losses, bit for bit, and nothing left behind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

from parallelbench.results.folder import find_runs
from tests.helpers import TINY
from tests.launch.programs import Program

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

WAYS = {"single": 1, "ddp": 2, "pipeline": 2}
OPTIONS = (
    "model=mlp",
    "model.hidden=[16,16]",
    "data.augment=true",
    "data.train_samples=70",
    "batch_size=16",
    "epochs=2",
    "launcher.oversubscribe=true",
    "launcher.pack=true",
    "sweep.order=listed",
)
LOSSES = ("train_loss", "train_accuracy", "test_loss", "test_accuracy", "train_samples", "test_samples")


def table(run: Any, name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(run.result / f"{name}.parquet").to_pylist()
    return rows


@pytest.mark.exhaustive
def test_every_loader_ends_with_the_same_losses(tmp_path: Path) -> None:
    strategies, devices = ",".join(WAYS), ",".join(map(str, WAYS.values()))
    loaders = "loader:[resident,dataloader,tensor_dataset,arrow]"
    blocks = f"sweep.blocks=[{{grid:{{{loaders}}},zip:{{strategy:[{strategies}],devices:[{devices}]}}}}]"
    arguments = ["submit", *TINY, *OPTIONS, blocks, f"site.data_dir={tmp_path / 'data'}"]
    with Program(*arguments, results=tmp_path / "results") as program:
        assert program.end() == 0, program.text
        assert program.survivors() == []
    runs = {(run.config().strategy.name, run.config().loader.name): run for run in find_runs(tmp_path / "results")}
    assert len(runs) == 4 * len(WAYS)
    for (strategy, loader), run in runs.items():
        (row,) = table(run, "run")
        assert (row["loader"], row["parity_passed"]) == (loader, None if strategy == "single" else True)
        learned, expected = (
            [[epoch[name] for name in LOSSES] for epoch in table(one, "epochs")]
            for one in (run, runs[strategy, "resident"])
        )
        assert learned == expected, (strategy, loader)
        assert len({loss for loss, *_ in learned}) == 2
        for rank in table(run, "ranks"):
            used = (rank["loader_cpu_time_s"], rank["loader_memory_bytes"])
            # A pipeline's stages each look at images or at labels, so each has workers.
            assert (None in used) == (loader != "dataloader"), (strategy, loader, used)
    assert len(list((tmp_path / "data" / "arrow").iterdir())) == 1
