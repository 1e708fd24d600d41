"""`submit --retry disturbed`: runs that others disturbed are measured anew, by every launcher, and nothing is lost."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from launch import local
from launch.launcher import Prepared, SubmitOptions
from launch.local import OnThisMachine
from launch.slurm import submit
from launch.slurm.scheduler import NoJob, SubmissionError
from launch.sweep import expand
from parallelbench import cli
from parallelbench.results.folder import RunFolder
from tests.analysis.factory import Fake, published
from tests.analysis.test_machine import lost
from tests.helpers import TINY
from tests.launch.fake_slurm import ON_SITE, FakeSlurm


def listing(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def sweep(results: Path, launcher: Sequence[str]) -> tuple[list[str], list[RunFolder]]:
    """The overrides of two finished runs, the first of them disturbed, and their folders."""
    overrides = [*TINY, *launcher, "epochs=3", "seed=0,1", f"results={results}"]
    fakes = Fake(others_time_s=lost(0.48, {2, 3})), Fake()
    runs = [planned.run for planned in expand(overrides)]
    return overrides, [published(run, fake) for run, fake in zip(runs, fakes, strict=True)]


def start_nothing(_: OnThisMachine, prepared: Sequence[Prepared], retry: frozenset[str], __: object) -> None:
    for item in prepared:
        if item.folder.state().starts(retry):
            item.write_intent()


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [["launcher=local"], ON_SITE], ids=["local", "slurm"])
def test_disturbed_runs_are_forgotten_and_asked_for_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fake: FakeSlurm,
    capsys: pytest.CaptureFixture[str],
    launcher: list[str],
) -> None:
    monkeypatch.setattr(OnThisMachine, "_run_all", start_nothing)
    monkeypatch.setattr(submit, "sbatch", lambda *_: "17")
    overrides, (disturbed, calm) = sweep(tmp_path, launcher)
    before, others = listing(disturbed.path), listing(calm.path)
    assert cli.main(["submit", *overrides, "--retry", "oom"]) == 0
    assert listing(disturbed.path) == before, "only by its name"
    said = capsys.readouterr().out.count("Others disturbed 1 run of")
    assert said == (launcher == ["launcher=local"]), "where all is over when submit returns"
    assert cli.main(["status", str(tmp_path)]) == 0
    assert "Others disturbed 1 run of" in (told := capsys.readouterr().out)
    assert told.startswith("2 ok (1 disturbed)\n")
    assert [disturbed.path.name in line for line in told.splitlines() if "ok, disturbed" in line] == [True]
    assert cli.main(["status", str(tmp_path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["runs"]
    assert {Path(row["folder"]): (row["state"], row["disturbed"]) for row in rows} == {
        disturbed.path: ("ok", True),
        calm.path: ("ok", False),
    }
    cli.main(["submit", *overrides, "--retry", "oom,disturbed"])
    forgotten = tmp_path / "adhoc" / ".forgotten"
    assert f"1 earlier result moved to {forgotten}" in " ".join(capsys.readouterr().out.split())
    assert listing(forgotten / f"{disturbed.path.name}-1") == before
    assert (disturbed.state().state, disturbed.manifest()) == ("missing", None)
    assert (disturbed.path / "config.yaml").exists()
    assert listing(calm.path) == others


@pytest.mark.parametrize("disturbed", ["one", "other"])
def test_each_sweeps_measurement_of_a_run_is_judged(
    disturbed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A report of both reads one of the two."""
    for name in ("one", "other"):
        (planned,) = expand([*TINY, "epochs=3", f"sweep.name={name}", f"results={tmp_path}"])
        published(planned.run, Fake(others_time_s=lost(0.48, {2, 3})) if name == disturbed else Fake())
    assert cli.main(["status", str(tmp_path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["runs"]
    assert {Path(row["folder"]).parent.name: row["disturbed"] for row in rows} == {
        "one": disturbed == "one",
        "other": disturbed == "other",
    }
    assert cli.main(["status", str(tmp_path)]) == 0
    assert f"{disturbed}: Others disturbed 1 run of" in capsys.readouterr().out


@pytest.mark.slow
def test_who_is_disturbed_again_learns_what_else_computes_and_what_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def disturb(_: OnThisMachine, prepared: Sequence[Prepared], retry: frozenset[str], __: object) -> None:
        for item in prepared:
            if item.folder.state().starts(retry):
                published(item.planned.run, Fake(others_time_s=lost(0.48, {2, 3})))

    monkeypatch.setattr(OnThisMachine, "_run_all", disturb)
    overrides, _ = sweep(tmp_path, ["launcher=local"])
    with subprocess.Popen([shutil.which("sh") or "sh", "-c", "while :; do :; done"]) as busy:
        try:
            assert cli.main(["submit", *overrides, "--retry", "disturbed"]) == 0
        finally:
            busy.kill()
    told = capsys.readouterr().out
    assert re.search(r"busy on this machine at this moment: .*sh \(process \d+, \d+ % of a core\)", told)
    assert "they were disturbed again: end what else runs here" in told


def refuse(*_: object) -> str:
    raise SubmissionError("sbatch: no", NoJob.REFUSED)


@pytest.mark.cases("slurm")
@pytest.mark.parametrize(
    "launcher", [["launcher=local", "--max-gpu-hours", "1"], ON_SITE], ids=["refused at once", "slurm"]
)
def test_what_a_launcher_refuses_keeps_its_results(
    tmp_path: Path, fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch, launcher: list[str]
) -> None:
    monkeypatch.setattr(submit, "sbatch", refuse)
    overrides, folders = sweep(tmp_path, [word for word in launcher if "=" in word])
    before = [listing(folder.path) for folder in folders]
    options = [word for word in launcher if "=" not in word]
    assert cli.main(["submit", *overrides, *options, "--retry", "disturbed"]) == 2
    assert [listing(folder.path) for folder in folders] == before
    assert [folder.state().label for folder in folders] == ["ok", "ok"]


def test_a_result_that_another_process_publishes_meanwhile_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before what is to be trained is written, and before the run's turn comes."""
    launcher = OnThisMachine()
    items = [launcher.prepare(planned) for planned in expand([*TINY, "seed=0,1", f"results={tmp_path}"])]
    published(items[0].planned.run)
    assert items[0].write_intent() is None
    waiting, text = items[1:], Console(file=io.StringIO(), width=200)
    monkeypatch.setattr(local, "heed", lambda: published(waiting[0].planned.run))
    assert launcher.submit(waiting, SubmitOptions(retry=frozenset({"parity_failed"})), text) == 0
    assert f"not started: {waiting[0].folder.path.name} is ok" in text.file.getvalue()  # type: ignore[attr-defined]
    assert [item.folder.state().label for item in items] == ["ok", "ok"]
    assert not (tmp_path / "adhoc" / ".forgotten").exists()
