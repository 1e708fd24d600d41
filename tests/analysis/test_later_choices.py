"""Runs of before there were schedules, losses and other options count as what they were, wherever they are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from analysis import facts, load
from analysis.comparison.sides import run_ids_by
from analysis.comparison.work import labels, works
from analysis.export import exported_runs
from analysis.report.publication import hyperparameters
from parallelbench import cli
from parallelbench.config.build import LATER_COMPONENTS, LATER_OPTIONS, completed, to_mapping, whole_mapping
from parallelbench.measure.environment_match import flatten
from tests.analysis.factory import config, foreign, published

SMOOTH = {"name": "cross_entropy", "label_smoothing": 0.1}
CHOICES: list[tuple[dict[str, Any], str, str]] = [
    ({"lr_schedule": "cosine"}, "lr_schedule=constant,cosine", "lr schedule cosine"),
    ({"loss": "mse"}, "loss=cross_entropy,mse", "loss mse"),
    ({"loss": SMOOTH}, "loss.label_smoothing=0.0,0.1", "label smoothing 0.1"),
    ({"metric": "macro_f1"}, "metric=none,macro_f1", "metric macro_f1"),
    ({"clip_norm": 0.5}, "clip_norm=null,0.5", "clip norm 0.5"),
]


def both(tmp_path: Path, changes: dict[str, Any], *, repeats: int = 3) -> Path:
    for repeat in range(repeats):
        published(config(tmp_path, repeat=repeat))
        published(config(tmp_path, repeat=repeat, **changes))
    return tmp_path


@pytest.mark.parametrize("changes", [{}, *({key: value} for each, _, _ in CHOICES for key, value in each.items())])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "pipeline"])
def test_a_mapping_is_completed_to_what_the_run_is(changes: dict[str, Any], strategy: str, tmp_path: Path) -> None:
    run = config(tmp_path, strategy=strategy, devices=2, **changes)
    assert completed(to_mapping(run)) == whole_mapping(run)
    assert completed(whole_mapping(run)) == whole_mapping(run)


def test_what_is_not_of_the_suite_is_left_as_it_is(tmp_path: Path) -> None:
    run = to_mapping(foreign(config(tmp_path), "mine"))
    assert completed(run)["strategy"] == run["strategy"]
    gone = {"_target_": "parallelbench.strategies.gone.Gone", "name": "gone"}
    assert completed(run | {"strategy": gone})["strategy"] == gone


@pytest.mark.cases("loss mse")
@pytest.mark.parametrize(("changes", "by", "said"), CHOICES, ids=[said for *_, said in CHOICES])
def test_both_kinds_are_told_apart_compared_and_named(
    changes: dict[str, Any], by: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = load(both(tmp_path, changes))
    assert set(labels(runs)["group"]) == {"digits · cnn_small", f"digits · cnn_small · {said}"}
    assert cli.main(["compare", str(tmp_path), "--by", by]) == 0, capsys.readouterr().err
    key, _, values = by.partition("=")
    assert {value: len(ids) for value, ids in run_ids_by(runs, key).items()} == dict.fromkeys(values.split(","), 3)
    (table,) = hyperparameters(runs)
    shown = dict(table.shared)
    assert set(shown.get(f"{key}.name", shown.get(key, "")).split(", ")) == set(values.split(","))


def test_a_component_has_no_options_of_another(tmp_path: Path) -> None:
    runs = load(both(tmp_path, {"loss": "mse"}, repeats=1))
    (squares,) = [work for work in works(runs).values() if work["loss.name"] == "mse"]
    assert "loss.label_smoothing" not in squares
    assert {value: len(ids) for value, ids in run_ids_by(runs, "loss.label_smoothing").items()} == {"0.0": 1, "null": 1}


@pytest.mark.slow
def test_what_no_run_chose_is_no_hyperparameter_but_exported(tmp_path: Path) -> None:
    published(config(tmp_path))
    (table,) = hyperparameters(load(tmp_path))
    before = LATER_OPTIONS | flatten(LATER_COMPONENTS)
    assert not before.keys() & dict(table.shared).keys()
    (run,) = exported_runs(load(tmp_path))
    of_run = {
        key: value
        for key, value in before.items()
        if not key.startswith("strategy.") and key != "data.files"  # neither `single` nor digits have these
    }
    assert {key: run.parameters[key] for key in of_run} == of_run
    assert facts(load(tmp_path))["group"].to_list() == ["digits · cnn_small"]
