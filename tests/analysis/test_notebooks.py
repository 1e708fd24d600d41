"""The notebooks run from top to bottom on runs of the sweeps that they are about."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path
from typing import Any

import nbformat
import pytest
from msgspec import structs
from nbclient import NotebookClient

from analysis import notebook, per_epoch
from analysis.figures import svg
from analysis.notebook import latest, named, overview
from analysis.runs.reader import Runs
from parallelbench.cli import main
from parallelbench.config.run import RunConfig
from parallelbench.errors import ConfigError
from tests import plain_pytorch
from tests.analysis.factory import Fake, config, published
from tests.helpers import plan
from tests.plain_pytorch import largest_difference

FOLDER = Path(__file__).resolve().parents[2] / "analysis" / "notebooks"
SWEEPS = {
    "quick_look": ["mnist_two_devices_small"],
    "strategy_comparison": ["strategy_comparison_small"],
    "own_analysis": ["mnist_two_devices_small"],
}
"""Notebook → the sweeps that it looks at."""


def fake(run: RunConfig) -> Fake:
    """Twice as fast on two devices; every repeat a little different."""
    time_s = 4 / run.devices * (1 + 0.01 * run.repeat)
    return Fake(epoch_time_s=lambda epoch, rank: time_s + (epoch == 1), sent=lambda epoch, rank: (10**6, 0, 0))


def fill(results: Path, sweep: str, *, repeats: int = 2) -> None:
    """Short runs of every configuration of a sweep."""
    for planned, repeat in itertools.product(plan(sweep), range(repeats)):
        run = structs.replace(planned.run, results=str(results), repeat=repeat, epochs=3)
        published(run, fake(run))


def cells(name: str) -> Any:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("name", SWEEPS)
@pytest.mark.cases("quick_look")
def test_a_notebook_runs_from_top_to_bottom(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for sweep in SWEEPS[name]:
        fill(tmp_path / "results", sweep)
    monkeypatch.setenv(notebook.RESULTS, str(tmp_path / "results"))
    page = cells(name)
    NotebookClient(page, timeout=120, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    outputs = [output for cell in page.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in outputs if output.get("name") == "stderr"]
    kinds = {kind for output in outputs for kind in output.get("data", {})}
    assert {"image/svg+xml", "text/markdown", "text/html"} <= kinds
    texts = [output.get("data", {}).get("text/plain", "") for output in outputs]
    frames = [text for text in texts if "shape: (" in text]
    of_two_sides = [text for text in frames if "ratio" in text or "metric" in text]
    assert all("strategy" in text and "devices" in text for text in frames if text not in of_two_sides)
    assert "speed_up" in frames[0], "the summary comes first"
    assert sum("image/svg+xml" in output.get("data", {}) for output in outputs) >= 2
    if name == "quick_look":
        tables = [output["data"]["text/plain"] for output in outputs if "text/plain" in output.get("data", {})]
        assert any("claims:" in table for table in tables)


@pytest.mark.slow
def test_an_own_figure_has_a_line_for_each_run_of_each_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for batch, repeat in itertools.product((64, 128), range(2)):
        published(config(tmp_path, batch_size=batch, repeat=repeat))
    monkeypatch.setenv(notebook.RESULTS, str(tmp_path))
    known: dict[str, Any] = {}
    for cell in cells("own_analysis").cells:
        if cell.cell_type == "code":
            exec(cell.source, known)
    assert svg(known["lines"].to_dict()).count('aria-roledescription="line mark"') == 4


@pytest.mark.exhaustive
@pytest.mark.slow
def test_losses_come_out_again_in_plain_pytorch(tmp_path: Path) -> None:
    """From the documentation alone: nothing is taken of the suite but the run's configuration."""
    run = ("run", "data=digits", "model=cnn_small", "epochs=2", "seed=3", "measure.telemetry_hz=0", "launcher=inline")
    assert main([*run, f"results={tmp_path / 'results'}"]) == 0
    assert largest_difference(tmp_path / "results") < 1e-4
    assert "parallelbench." not in Path(plain_pytorch.__file__).read_text()


def test_frames_begin_with_strategy_and_devices(usual: Runs) -> None:
    first = overview(usual)
    assert first.select("strategy", "devices", "verdict").rows() == [("single", 1, "baseline"), ("ddp", 2, "faster")]
    assert first["speed_up"].to_list() == [1.0, pytest.approx(1.6)]
    epochs = named(usual, per_epoch(usual).select("run_id", "epoch"))
    assert epochs.columns == ["strategy", "devices", "configuration", "repeat", "epoch", "run_id"]
    assert epochs["run_id"].to_list() == per_epoch(usual)["run_id"].to_list()
    assert set(epochs.select("strategy", "devices").rows()) == {("single", 1), ("ddp", 2)}


def test_the_latest_sweep_is_the_one_that_was_written_to_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(notebook.RESULTS, str(tmp_path))
    for age_s, sweep in enumerate(("new", "old_small", "older")):
        run = published(structs.replace(config(tmp_path), sweep_name=sweep))
        os.utime(run.path, (time.time() - 100 * age_s,) * 2)
    assert latest() == tmp_path / "new"
    assert latest("old", "older") == tmp_path / "old_small"
    with pytest.raises(ConfigError, match="no runs of tutorial_mlp: parallelbench submit sweep=tutorial_mlp_small"):
        latest("tutorial_mlp")
