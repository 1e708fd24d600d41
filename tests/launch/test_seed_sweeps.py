"""The experiments of the publications that the suite answers: their runs, counted by hand from the texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from polars.testing import assert_frame_equal

from analysis import load
from launch import checks
from launch.slurm.submit import prepare_for_site
from launch.sweep import PlannedRun, expand
from launch.sweep.compose import group_choices
from parallelbench.cli import main
from parallelbench.config.run_rules import check_run
from parallelbench.data.torchvision import MANIFEST
from tests.helpers import plan

pytestmark = pytest.mark.slow

CONFIGURATIONS = {
    # 4 models × 2 data sets × (one GPU, then 2 and 4 by two strategies); times 10, 30, 50 and 100 epochs
    "asu_data_parallel": 4 * 2 * (1 + 2 * 2),
    "asu_data_parallel_faithful": 4 * 2 * (1 + 2 * 2) * 4,
    "asu_data_parallel_small": 4 * 2 * 2,
    # 3 models × 2 data sets × (one GPU; 2 and 4 by layers; 2 and 4 as a pipeline)
    "asu_model_parallel": 3 * 2 * (1 + 2 + 2),
    "asu_model_parallel_faithful": 3 * 2 * 2 * 4,
    "asu_model_parallel_small": 3 * 2 * 2 + 3,
    "tutorial_mlp": 2 * 7,
    "tutorial_mlp_small": 6,
    # two scalings × (one and two GPUs by each framework, then two by layers and by a process each)
    "mnist_two_devices": 2 * (2 * 2 + 2),
    "mnist_two_devices_small": 2 * 2 * 2,
    # 3 sizes of data × 3 models × 3 batches × (one GPU, then 2 and 4 by two strategies; TensorFlow's one, and all 3)
    "uw_frameworks": 3 * 3 * 3 * (1 + 2 * 2 + 1 + 3),
    "uw_frameworks_small": 2 * 3 * (2 + 2 + 1),
    # 2 large models × 5 batches × (one GPU, then 2 and 4 by two strategies)
    "uw_largest_batch": 2 * 5 * (1 + 2 * 2),
    "uw_largest_batch_small": 3 * 2,
    "batch_size_regimes": 10 * 4,
    "batch_size_regimes_small": 8 * 4,
    # one device, 9 strategies on 2 and 4, 4 meshes, Downpour and Sandblaster with their baselines
    "strategy_comparison": 1 + 9 * 2 + 4 + 2 + 3,
    "strategy_comparison_small": 9 + 4 + 3 + 2,
    # one chunk on each device and two, of pipelines; tensor parallelism across two servers and within each
    "megatron": 2 + 2,
    "megatron_small": 2 * 2,
    # a GPT computed again in no, some and all layers, a ResNet in none and all; in the twin on two devices, too
    "recomputation": 3 + 2,
    "recomputation_small": 3 * (1 + 2) + 2,
    # balances × experts × (data parallel, experts shared out); all groups of ranks at one balance
    "moe_balance": 4 * 3 * 2 + 3 * 2,
    "moe_balance_small": 3 * 2 * 2,
}
"""Sweep → its configurations."""


def values(runs: Sequence[PlannedRun], *names: str) -> set[tuple[Any, ...]]:
    """The combinations of these attributes (`data.name`) that occur."""

    def value(planned: PlannedRun, name: str) -> Any:
        found: Any = planned.run
        for part in name.split("."):
            found = getattr(found, part)
        return found

    return {tuple(value(planned, name) for name in names) for planned in runs}


GPUS_ONLY = {"data_parallel"}
"""Strategies that a CPU can't do; their runs are checked as runs on GPUs."""


@pytest.mark.parametrize("name", group_choices()["sweep"])
def test_a_shipped_sweep_has_only_runs_that_can_be_done(name: str) -> None:
    """Those of experiments have their configurations; small twins need two cores and no preparation."""
    runs = plan(name)
    assert len(runs) == CONFIGURATIONS.get(name, len(runs)) > 0
    for planned in runs:
        on_gpus = planned.run.strategy.name in GPUS_ONLY or planned.run.precision == "tf32"
        check_run(planned.run, "cuda" if on_gpus else "cpu")
        if name in CONFIGURATIONS and name.endswith("_small"):
            assert planned.run.devices <= 2 or planned.run.launcher.oversubscribe
            assert planned.run.data.missing_files(Path("/nowhere")) == []


@pytest.mark.parametrize("name", ["asu_data_parallel", "asu_model_parallel"])
def test_asu_trains_a_hundred_epochs_instead_of_a_hundred_and_ninety(name: str) -> None:
    assert values(plan(name), "epochs") == {(100,)}
    assert values(plan(f"{name}_faithful"), "epochs") == {(10,), (30,), (50,), (100,)}
    assert {run[:-1] for run in values(plan(f"{name}_faithful"), "model.name", "data.name", "devices", "epochs")} <= (
        values(plan(name), "model.name", "data.name", "devices")
    )


def test_two_devices_double_the_batch_as_published_and_keep_it_in_the_twin() -> None:
    names = ("scaling", "devices", "global_batch_size", "steps_per_epoch", "epochs")
    assert values(plan("mnist_two_devices"), *names) == {
        ("weak", 1, 1024, 58, 30),  # published as 59 and 30, the last of them not full
        ("weak", 2, 2048, 29, 30),
        ("strong", 1, 1024, 58, 30),
        ("strong", 2, 1024, 58, 30),
    }


def test_uw_has_the_published_sizes_and_optimizer() -> None:
    runs = plan("uw_frameworks")
    assert values(runs, "data.train_samples") == {(60_000,), (240_000,), (480_000,)}
    assert values(runs, "batch_size") == {(128,), (256,), (512,)}
    assert values(runs, "optimizer.lr", "optimizer.beta1", "optimizer.beta2", "optimizer.eps") == {
        (0.001, 0.9, 0.999, 1e-7)
    }
    assert values(runs, "optimizer.weight_decay", "epochs", "scaling") == {(0.0, 2, "strong")}


@pytest.mark.parametrize(
    "name", [name for name in CONFIGURATIONS if not name.endswith("_small") and name != "moe_balance"]
)
@pytest.mark.cases("tutorial_mlp", "mnist_two_devices", "uw_frameworks")
def test_a_cluster_with_four_gpus_takes_the_whole_sweep(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All on GPUs, TensorFlow's beside torch's."""
    monkeypatch.setattr(checks, "require", lambda framework, device_type: None)
    for data in ("mnist", "cifar10", "cifar100"):
        (tmp_path / data).mkdir()
        for file in ("train_images.npy", "train_labels.npy", "test_images.npy", "test_labels.npy", MANIFEST):
            (tmp_path / data / file).touch()  # nothing is read
    site = ["launcher=slurm", "site=asu_sol", f"site.data_dir={tmp_path}"]
    kinds: dict[str, set[str]] = {}
    for planned in expand([f"sweep={name}", "sweep.repeats=1", *site]):
        kinds.setdefault(prepare_for_site(planned).planned.run.device, set()).add(planned.run.strategy.name)
    assert kinds.keys() == {"cuda"}
    if name == "uw_frameworks":
        assert kinds["cuda"] == {"single", "data_parallel", "ddp", "tf_single", "tf_mirrored"}


@pytest.mark.exhaustive
def test_a_long_run_passes_through_the_states_of_a_short_one(tmp_path: Path) -> None:
    """What lets a run of 100 epochs answer for 10, 30 and 50."""
    run = ["run", "data=digits", "data.image_size=8", "model=mlp", "optimizer=adam", f"results={tmp_path}"]
    for epochs in (2, 4):
        assert main([*run, f"epochs={epochs}", "launcher=inline"]) == 0
    runs = load(tmp_path)
    losses = ["epoch", "train_loss", "train_accuracy", "test_loss", "test_accuracy"]
    short, long = (
        runs.epochs.join(runs.run.filter(epochs=n).select("run_id"), on="run_id").sort("epoch").select(losses)
        for n in (2, 4)
    )
    assert long.height == 4
    assert_frame_equal(long.head(2), short, check_exact=True)
