"""The tables of a publication: accuracy by number of epochs, hyperparameters, and what was run on what."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from analysis import load
from analysis.report.publication import (
    Hyperparameters,
    accuracies,
    accuracies_side_by_side,
    experiment,
    hyperparameters,
)
from parallelbench.results.folder import RunFolder
from tests.analysis.factory import Fake, component, config, failed, published

pytestmark = pytest.mark.slow


GAINS = (0.0, 0.01, 0.03)


def reaching(gain: float) -> Fake:
    """Test accuracy of a hundredth per epoch, and as much more."""
    return Fake(test_accuracy=lambda epoch: epoch / 100 + gain, train_accuracy=lambda epoch: epoch / 200)


def test_one_run_answers_for_all_lengths_up_to_its_own(tmp_path: Path) -> None:
    """Three repeats of 31 epochs on one device and two, and one that ended early."""
    for repeat, gain in enumerate(GAINS):
        for strategy, devices in (("single", 1), ("ddp", 2)):
            published(config(tmp_path, strategy=strategy, devices=devices, repeat=repeat, epochs=31), reaching(gain))
    failed(config(tmp_path, repeat=3, epochs=31), "oom", "out of memory", epochs=30)
    found = accuracies(load(tmp_path))
    assert found.select("model", "configuration", "epochs", "repeats").rows() == [
        ("cnn_small", configuration, epochs, 3)
        for configuration in ("single × 1", "ddp × 2")
        for epochs in (10, 30, 31)
    ]
    row = found.row(1, named=True)
    after_30 = [0.3 + gain for gain in GAINS]
    assert row["test_accuracy_mean"] == pytest.approx(statistics.mean(after_30))
    assert row["test_accuracy_sd"] == pytest.approx(statistics.stdev(after_30))
    assert (row["test_accuracy_min"], row["test_accuracy_max"]) == (pytest.approx(0.3), pytest.approx(0.33))
    assert (row["train_accuracy_mean"], row["train_accuracy_sd"]) == (pytest.approx(0.15), pytest.approx(0.0))


@pytest.mark.exhaustive
def test_runs_of_several_lengths_are_one_row_and_a_repeat_counts_once(tmp_path: Path) -> None:
    """As publication 000 ran it: a run for each length. The one of so many epochs says what they reach."""
    for repeat in range(2):
        for epochs in (100, 10, 30):
            for model in ("cnn_large", "cnn_small"):
                parameters = 10**6 if model == "cnn_large" else 10**5
                fake = Fake(test_accuracy=lambda epoch, of=epochs: epoch / 1000 + of / 1000, parameters=parameters)  # type: ignore[misc]
                published(config(tmp_path, data="mnist", model=model, epochs=epochs, repeat=repeat), fake)
    (table,) = accuracies_side_by_side(accuracies(load(tmp_path)))
    assert table.epochs == [10, 30, 50, 100]
    assert [row.model for row in table.rows] == ["cnn_small", "cnn_large"], "the smallest first"
    for row in table.rows:
        assert row.cells == ["2.00 ± 0.00 (2)", "6.00 ± 0.00 (2)", "15.00 ± 0.00 (2)", "20.00 ± 0.00 (2)"]
        assert row.groups == tuple(f"mnist · {row.model} · epochs {epochs}" for epochs in (10, 30, 100))


def test_a_rate_that_falls_to_the_end_makes_each_length_a_training_of_its_own(tmp_path: Path) -> None:
    cosine = component("lr_schedule", "cosine")
    for epochs in (10, 30):
        published(config(tmp_path, epochs=epochs, lr_schedule=cosine), reaching(epochs / 100))
    tables = accuracies_side_by_side(accuracies(load(tmp_path)))
    assert [(table.work, table.epochs, table.rows[0].cells) for table in tables] == [
        ("digits · epochs 10", [10], ["20.00 (1)"]),
        ("digits · epochs 30", [10, 30], ["40.00 (1)", "60.00 (1)"]),
    ]


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


TOPOLOGY = """\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV12\tSYS\t0-23\t0\t\tN/A
GPU1\tNV12\t X \tPHB\t24-47\t1\t\tN/A
NIC0\tSYS\tPHB\t X

Legend:

  X    = Self
  PIX  = Connection traversing at most a single PCIe bridge
  NV#  = Connection traversing a bonded set of # NVLinks
"""


@pytest.mark.exhaustive
def test_it_names_hardware_framework_and_all_that_was_trained(tmp_path: Path) -> None:
    gpus = [{"name": "Imaginary GPU", "memory_bytes": 80 * 2**30}] * 2
    environment = json.dumps({"packages": {"torch": "2.15.0"}, "cuda": {"devices": gpus, "topology": TOPOLOGY}})
    for strategy, devices in (("single", 1), ("ddp", 2), ("ddp", 10)):
        for epochs in (100, 9):
            run = config(tmp_path, strategy=strategy, devices=devices, epochs=epochs, device="cuda")
            published(run, Fake(device_type="cuda", device_name="Imaginary GPU", environment=environment))
    assert dict(experiment(load(tmp_path))) == {
        "Device": "Imaginary GPU",
        "Memory of a GPU": "80 GiB",
        "Links between GPUs": "NV12",
        "Nodes": "1",
        "Framework": "torch 2.15.0",
        "Strategies": "ddp, single",
        "Models": "cnn_small",
        "Epochs": "9, 100",
        "Devices": "1, 2, 10",
        "Data sets": "digits",
        "Global batch": "128",
        "Precision": "fp32",
        "Repeats": "1",
        "Runs": "6",
    }


def test_what_never_trained_is_in_no_table(tmp_path: Path) -> None:
    """Of fsdp, two devices and eight were asked for, and never begun; four devices ran out of memory at once."""
    for repeat in range(3):
        published(config(tmp_path, repeat=repeat))
    failed(config(tmp_path, strategy="ddp", devices=2, batch_size=64), "killed", "killed", epochs=1)
    failed(config(tmp_path, strategy="hsdp", devices=4, precision="bf16"), "oom", "out of memory", epochs=0)
    for devices in (2, 8):
        run = config(tmp_path, strategy="fsdp", devices=devices, epochs=9, repeat=7)
        RunFolder.of(run).write_intent(run, [])
    runs = load(tmp_path)
    told = dict(experiment(runs))
    assert (told["Strategies"], told["Devices"], told["Epochs"], told["Precision"]) == (
        "ddp, single",
        "1, 2",
        "3",
        "fp32",
    )
    assert (told["Repeats"], told["Runs"]) == ("1 to 3", "3; not to the end: 1 killed, 1 oom")
    (settings,) = hyperparameters(runs)
    assert settings.strategies == ("single", "ddp")
    assert dict(settings.differing)["repeats"] == ("0 to 2", "0")
    assert dict(settings.shared)["epochs"] == "3"
