"""`init`: the folder that it writes is planned, trained, judged by its own tests and read by its notebook."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import analysis
from parallelbench import cli
from tests.test_cli import here, listing, refused

__all__ = ["here"]
OWN = ["--conf", "conf", "--plugin", "stripes", "launcher.oversubscribe=true"]


def test_the_folder_is_whole_and_its_name_is_the_packages(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["init", "stripes"]) == 0
    assert "cd stripes && parallelbench submit --conf conf --plugin stripes sweep=stripes" in capsys.readouterr().out
    root = here / "stripes"
    assert not [path for path in root.rglob("*") if "NAME" in path.name]
    assert not [path for path in root.rglob("*.*") if path.suffix != ".npz" and "NAME" in path.read_text()]
    for path in root.rglob("*.py"):
        compile(path.read_text(), path, "exec")
    cells = json.loads((root / "notebook.ipynb").read_text())["cells"]
    assert any('load("results/stripes")' in "".join(cell["source"]) for cell in cells)
    arrays = np.load(root / "data" / "stripes.npz")
    assert {name: (array.dtype.kind, len(array)) for name, array in arrays.items()} == {
        "train_images": ("u", 512),
        "train_labels": ("i", 512),
        "test_images": ("u", 128),
        "test_labels": ("i", 128),
    }


@pytest.mark.parametrize("name", ["1st", "analysis", "json", "class", "demo", "x" * 40])
def test_names_that_are_taken_or_none_are_refused(here: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert "init " in refused(capsys, "init", name)
    assert listing(here) == {}


def test_nothing_is_written_over(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "thesis").mkdir()
    (here / "thesis" / "thesis.tex").write_text("years")
    assert "not empty" in refused(capsys, "init", "thesis")
    (here / "file").write_text("")
    assert "not empty" in refused(capsys, "init", "file")
    assert len(listing(here)) == 3


def test_a_programs_folder_has_any_name_and_plans_what_its_readme_says(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["init", "--program", "My Thesis"]) == 0
    root = here / "My Thesis"
    said = capsys.readouterr().out.splitlines()[-1].partition(" && parallelbench ")[2]
    assert said in (root / "README.md").read_text()
    assert {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()} == {
        *("README.md", ".gitignore", "train.py", "conf/program/mine.yaml")
    }
    compile((root / "train.py").read_text(), "train.py", "exec")
    monkeypatch.chdir(root)
    capsys.readouterr()
    assert cli.main(["plan", *said.split()[1:], "device=cpu", "launcher.oversubscribe=true", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["to_start"] == 12
    monkeypatch.chdir(here)
    assert "not empty" in refused(capsys, "init", "--program", "My Thesis")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_programs_folder_runs_as_it_stands(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On one device and on two, either of its flags: all have steps, samples per step as said, and losses."""
    assert cli.main(["init", "--program", "mine"]) == 0
    monkeypatch.chdir(here / "mine")
    few = ["program.warmup_steps=10", "program.steps=20", "program.windows=2", "sweep.name=mine"]
    asked = ["flags=--ddp,--fsdp", "devices=1,2", "batch_size=256", "device=cpu", "launcher.oversubscribe=true"]
    assert cli.main(["submit", "--conf", "conf", "program=mine", *asked, *few]) == 0
    runs = analysis.load("results/mine")
    windows = runs.epochs.sort("epoch").group_by("run_id").agg("steps", "train_samples").drop("run_id")
    assert windows.rows() == [([9, 10, 10], [9 * 256, 2560, 2560])] * 4
    assert runs.losses["run_id"].n_unique() == 4


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_folder_runs_as_it_stands(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def printed(*words: str) -> str:
        capsys.readouterr()
        assert cli.main(words) == 0
        return capsys.readouterr().out

    assert cli.main(["init", "stripes"]) == 0
    root = here / "stripes"
    monkeypatch.chdir(root)
    monkeypatch.syspath_prepend(root)
    monkeypatch.delitem(sys.modules, "stripes", raising=False)
    assert json.loads(printed("plan", *OWN, "sweep=stripes", "--json"))["to_start"] == 9
    done = printed("submit", *OWN, "sweep=stripes", "sweep.repeats=1", "device=cpu")
    assert "next: parallelbench report " in done.splitlines()[-1]
    told = json.loads(printed("status", "results", "--json"))
    assert [run["state"] for run in told["runs"]] == ["ok"] * 3
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    tested = subprocess.run(command, cwd=root, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path})
    assert tested.returncode == 0, tested.stdout
    assert "1 passed" in tested.stdout
