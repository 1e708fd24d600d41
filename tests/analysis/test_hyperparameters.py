"""The table of hyperparameters: every setting that trains, told once where all strategies share it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from analysis import load
from analysis.report.publication import Hyperparameters, hyperparameters
from tests.analysis.factory import component, config, published

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow


def of(results: Path) -> list[Hyperparameters]:
    return hyperparameters(load(results))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two strategies that share all but devices, rate and their own options; three and two repeats."""
    root = tmp_path_factory.mktemp("results")
    for repeat in range(3):
        published(config(root, repeat=repeat))
        for devices in (2, 10, 4)[: 3 if repeat == 0 else 1]:
            adam = component("optimizer", "adam") | {"lr": 0.002}
            published(config(root, strategy="ddp", devices=devices, optimizer=adam, repeat=repeat))
    return root


def test_shared_settings_are_told_once_and_others_by_strategy(results: Path) -> None:
    (settings,) = of(results)
    shared, differing = dict(settings.shared), dict(settings.differing)
    assert (settings.work, settings.strategies) == ("digits · cnn_small", ("single", "ddp"))
    assert shared["epochs"] == "3"
    assert shared["batch_size"] == shared["global_batch_size"] == "128"
    assert (shared["precision"], shared["seed"], shared["repeats"]) == ("fp32", "0", "0 to 2")
    assert (shared["device_name"], shared["parameters"]) == ("Imaginary CPU", "402442")
    assert (shared["data.image_size"], shared["loader.name"]) == ("28", "resident")
    assert differing["optimizer.name"] == ("sgd", "adam")
    assert differing["optimizer.lr"] == differing["learning_rate"] == ("0.1", "0.002")
    assert differing["optimizer.momentum"] == ("0.9", "–")
    assert differing["devices"] == ("1", "2, 4, 10")
    assert differing["strategy.bucket_mib"] == ("–", "25.0")
    assert shared.keys().isdisjoint(differing)
    assert list(shared)[:4] == ["parameters", "data.augment", "data.image_size", "loader.name"]
    assert next(name for name in differing if name.startswith("optimizer")) == "optimizer.name"


def test_what_trains_nothing_is_no_hyperparameter(results: Path) -> None:
    (settings,) = of(results)
    names = {name for name, _ in (*settings.shared, *settings.differing)}
    left = {name.partition(".")[0] for name in names} & {"launcher", "site", "results", "sweep_name", "device"}
    assert not left
    assert not [name for name in names if name.endswith("_target_") or name == "measure.probe"]
    assert {"measure.steps_per_epoch", "measure.deterministic"} <= names


def test_a_setting_that_few_runs_change_has_its_default_in_the_others(tmp_path: Path) -> None:
    published(config(tmp_path, compile=True, compile_scope="step"))
    published(config(tmp_path, strategy="ddp", devices=2))
    fsdp = component("strategy", "fsdp")
    published(config(tmp_path, strategy=fsdp | {"gather": "bf16"}, devices=2))
    published(config(tmp_path, strategy=fsdp, devices=4))
    (settings,) = of(tmp_path)
    assert settings.strategies == ("single", "ddp", "fsdp")
    differing = dict(settings.differing)
    assert differing["compile_scope"] == ("step", "model", "model")
    assert differing["strategy.gather"] == ("–", "–", "bf16, stored")
    assert "data.files" not in dict(settings.shared)


def test_each_model_and_data_set_has_a_table_of_its_own(tmp_path: Path) -> None:
    published(config(tmp_path))
    published(config(tmp_path, model="mlp", epochs=5))
    assert [(each.work, dict(each.shared)["epochs"]) for each in of(tmp_path)] == [
        ("digits · cnn_small", "3"),
        ("digits · mlp", "5"),
    ]
    assert all(not each.differing for each in of(tmp_path))
