"""Runs of a sweep can be told apart in `plan` and `status`, and what rows have in common is said once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from launch.sweep import expand
from launch.sweep.expansion import varying
from parallelbench import cli
from parallelbench.results.folder import RunFolder
from tests.analysis.factory import failed, published
from tests.helpers import TINY

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("parallelbench.world.machine.visible_gpus", lambda: ())
    monkeypatch.chdir(tmp_path)


def test_what_differs_is_said_and_what_the_name_says_is_not() -> None:
    runs = [
        ["data=digits", 'loader="arrow"', "strategy=ddp", "optimizer.lr=0.1", "site.partition=a", "repeat=0"],
        ["data=digits", 'loader="resident"', "strategy=fsdp", "optimizer.lr=0.1", "site.partition=b", "repeat=1"],
        ["data=digits", "strategy=fsdp", "strategy.wrap=2", "optimizer.lr=0.1", "epochs=3"],
    ]
    assert varying(runs, besides=("epochs",)) == ["loader=arrow", "loader=resident", "strategy.wrap=2"]
    assert varying(runs)[2] == "strategy.wrap=2 epochs=3"
    assert varying(runs[:1]) == [""]


def test_runs_of_a_plan_differ_in_more_than_their_hash(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *TINY, "seed=0,1", "precision=fp32,bf16"]) == 0
    head, *rows, _ = capsys.readouterr().out.splitlines()
    assert "varying" in head
    assert len({row.partition("cpu")[0].split(" ", 2)[2] for row in rows}) == 4
    assert any("seed=1 precision=bf16" in row for row in rows)
    assert cli.main(["plan", *TINY, "sweep.repeats=2"]) == 0
    assert "varying" not in capsys.readouterr().out


def test_status_says_which_learning_rate_went_out_of_memory_and_where(capsys: pytest.CaptureFixture[str]) -> None:
    for sweep in ("one", "two"):
        for planned in expand([*TINY, "optimizer.lr=0.1,0.2", f"sweep.name={sweep}"]):
            RunFolder.of(planned.run).write_intent(planned.run, planned.overrides)
            if "optimizer.lr=0.2" in planned.overrides:
                failed(planned.run, "oom", "out of memory", epochs=0)
            else:
                published(planned.run)
    assert cli.main(["status", "results"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "lr=" in line]
    assert [(row[0].partition("/")[0], row[1], row[3]) for row in rows] == [
        ("one", "optimizer.lr=0.2", "oom"),
        ("two", "optimizer.lr=0.2", "oom"),
        ("one", "optimizer.lr=0.1", "ok"),
        ("two", "optimizer.lr=0.1", "ok"),
    ]
    assert cli.main(["status", "results/one"]) == 0
    assert "one/" not in capsys.readouterr().out, "one sweep needs no saying"


def test_runs_that_will_not_be_timed_are_marked(capsys: pytest.CaptureFixture[str]) -> None:
    many = ["strategy=ddp", "devices=64", "batch_size=64", "data.train_samples=64", "launcher.oversubscribe=true"]
    assert cli.main(["plan", *TINY, *many]) == 0
    text = capsys.readouterr().out
    assert "missing (oversubscribed)" in text
    assert "enter no timing figure" in text
    assert cli.main(["plan", *TINY]) == 0
    assert "oversubscribed" not in capsys.readouterr().out
