"""The publications' claims on planted runs: each asks what its words say, and of no other work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from analysis import load
from analysis.claims import Judgement, judge, publications
from tests.analysis.factory import MIB, Fake, config, published, steady
from tests.analysis.test_claims import REPEATS, WOBBLE

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

LARGE: dict[str, Any] = {"model": "cnn_large", "data": "mnist", "optimizer": "adam_keras", "epochs": 2}
VIT: dict[str, Any] = {"model": "vit", "data": "cifar10", "optimizer": "adam"}
CNN: dict[str, Any] = {"model": "cnn", "data": "cifar10", "optimizer": "adam"}
MNIST: dict[str, Any] = {"model": "cnn_small", "data": "mnist", "optimizer": "adam_keras", "scaling": "weak"}
MNIST |= {"epochs": 30, "batch_size": 1024}
TENSORFLOW = json.dumps(json.loads(Fake.environment) | {"framework": "tensorflow"})
MLP: dict[str, Any] = {"model": "mlp", "data": {"name": "digits", "image_size": 32}}


def shipped(root: Path, name: str, **changes: Any) -> Judgement:
    """What the runs below a folder say of a claim, or of it with other keys."""
    (found,) = [each for text in publications() for each in text.claims if each.name == name]
    return judge(load(root), structs.replace(found, **changes), seed="0")


def plant(root: Path, ways: dict[tuple[str, int], float], work: dict[str, Any], **fake: Any) -> None:
    """Six repeats on each of these (strategy, devices) on GPUs, with their time per epoch."""
    for repeat in REPEATS:
        for (strategy, devices), time_s in ways.items():
            run = config(root, repeat=repeat, strategy=strategy, devices=devices, **({"device": "cuda"} | work))
            published(run, steady(time_s * WOBBLE[(repeat + devices) % 6], **({"device_type": "cuda"} | fake)))


def test_two_gpus_that_train_on_fewer_samples_are_not_faster(tmp_path: Path) -> None:
    """As the small twin has it: 1,408 and 1,280 samples, of which each takes as long."""
    work = MNIST | {"data": "digits", "batch_size": 128}
    plant(tmp_path, {("single", 1): 1408.0, ("ddp", 2): 1280.0}, work)
    finding = shipped(tmp_path, "two_gpus_train_faster", scope={})
    assert finding.cases
    assert finding.verdict != "reproduced"


@pytest.mark.parametrize(
    ("times", "verdict", "why"),
    [
        ({1: 10.0, 2: 8.0, 4: 9.0}, "reproduced", ""),
        ({1: 10.0, 2: 8.0, 4: 7.0}, "refuted", ""),
        (
            {1: 10.0, 2: 8.0},
            "inconclusive",
            "it needs devices=1, and with devices=2; and devices=4, and with devices=2",
        ),
    ],
)
def test_two_gpus_are_best_beside_one_and_four(tmp_path: Path, times: dict[int, float], verdict: str, why: str) -> None:
    plant(tmp_path, {("ddp" if devices > 1 else "single", devices): time for devices, time in times.items()}, LARGE)
    finding = shipped(tmp_path, "two_gpus_are_best")
    assert (finding.verdict, finding.why) == (verdict, why)


def test_epochs_are_those_that_were_measured(tmp_path: Path) -> None:
    """What falls from the first epoch to the last may rise over all epochs that the study looked at."""
    accuracies = {1: 0.1, 10: 0.8, 30: 0.7, 50: 0.6, 100: 0.5}
    for repeat in REPEATS:
        fake = Fake(test_accuracy=lambda epoch: accuracies.get(epoch, 0.5))
        published(config(tmp_path, repeat=repeat, epochs=100, **CNN), fake)
    finding = shipped(tmp_path, "test_accuracy_rises_with_epochs")
    assert finding.verdict == "refuted"
    assert [case.step for case in finding.cases] == [
        "epoch 10 → epoch 30",
        "epoch 30 → epoch 50",
        "epoch 50 → epoch 100",
    ]


def test_runs_of_other_lengths_are_compared_at_their_ends(tmp_path: Path) -> None:
    """As a faithful sweep has them: 10 and 30 epochs, here of data that have no epochs of their own."""
    for epochs in (2, 10, 30):
        plant(tmp_path, {("single", 1): 1.0}, CNN | {"epochs": epochs})
    finding = shipped(tmp_path, "training_loss_falls_with_epochs")
    assert finding.verdict == "reproduced"
    assert sorted(case.step for case in finding.cases) == ["epoch 10 → epoch 30", "epochs 10 → 30"]


def test_accuracy_is_that_of_the_logs_on_the_training_set(tmp_path: Path) -> None:
    for strategy, devices, accuracy in (("single", 1, 0.99), ("ddp", 2, 0.999)):
        alike, trained = (lambda epoch: 0.9), (lambda epoch, accuracy=accuracy: accuracy)
        plant(tmp_path, {(strategy, devices): 1.0}, MNIST, test_accuracy=alike, train_accuracy=trained)
    assert shipped(tmp_path, "two_gpus_more_accurate").verdict == "reproduced"
    assert shipped(tmp_path, "two_gpus_more_accurate_on_test_set").verdict != "reproduced"


@pytest.mark.parametrize(("ratio", "verdict"), [(0.9, "reproduced"), (0.5, "refuted")])
def test_marginally_faster_is_not_twice_as_fast(tmp_path: Path, ratio: float, verdict: str) -> None:
    plant(tmp_path, {("single", 1): 10.0, ("ddp", 2): 10.0 * ratio}, VIT)
    assert shipped(tmp_path, "vit_faster_data_parallel").verdict == verdict


def test_model_parallel_on_one_gpu_is_not_what_they_trained(tmp_path: Path) -> None:
    plant(tmp_path, {("single", 1): 10.0, ("model_parallel", 2): 12.0}, CNN)
    assert shipped(tmp_path, "time_rises_with_gpus_model_parallel").cases == ()
    assert shipped(tmp_path, "time_rises_when_layers_are_spread").verdict == "reproduced"
    plant(tmp_path, {("model_parallel", 4): 14.0}, CNN)
    assert shipped(tmp_path, "time_rises_with_gpus_model_parallel").verdict == "reproduced"


@pytest.mark.parametrize(("work", "verdict"), [(MLP, "inconclusive"), (LARGE, "reproduced")])
def test_the_first_epoch_is_that_of_the_large_model(tmp_path: Path, work: dict[str, Any], verdict: str) -> None:
    plant(tmp_path, {("ddp", 2): 1.0}, work)
    assert shipped(tmp_path, "first_epoch_slower").verdict == verdict


def test_an_epoch_that_warms_up_anew_is_no_second_epoch(tmp_path: Path) -> None:
    """A resumed attempt began with it: it takes as long as the first, which refutes nothing."""
    plant(tmp_path, {("ddp", 2): 1.0}, LARGE, first_s=1.0, resumed_after=1)
    finding = shipped(tmp_path, "first_epoch_slower")
    assert (finding.verdict, finding.cases) == ("inconclusive", ())


def test_no_further_gain_is_asked_of_equal_images(tmp_path: Path) -> None:
    """Batches of 512 small images and of 1,024 large ones are of other work."""
    for batch, size in ((512, 8), (1024, 28)):
        work = {"model": "mlp", "batch_size": batch, "data": {"name": "digits", "image_size": size}}
        plant(tmp_path, {("single", 1): 1.0}, work, test_accuracy=lambda epoch: 0.96)
    finding = shipped(tmp_path, "large_batches_gain_nothing")
    assert finding.cases == ()


def test_nearly_twice_as_fast_is_no_proof_of_twice(tmp_path: Path) -> None:
    plant(tmp_path, {("single", 1): 10.0, ("ddp", 2): 5 / 0.99}, MNIST | {"scaling": "strong"})
    finding = shipped(tmp_path, "speed_up_not_linear")
    assert (finding.verdict, finding.why) == ("inconclusive", "the effect is within the margin (0.02)")


def test_scale_up_is_the_gain_of_further_gpus(tmp_path: Path) -> None:
    ways = {("single", 1): 10.0, ("data_parallel", 2): 9.0, ("ddp", 2): 6.0}
    plant(tmp_path, ways, LARGE)
    finding = shipped(tmp_path, "several_processes_scale_better")
    assert (finding.verdict, finding.cases[0].step) == ("reproduced", "devices 1 → 2, by data_parallel → ddp")
    assert shipped(tmp_path, "several_processes_faster_than_one").verdict == "reproduced"


def test_mirrored_scales_from_its_own_run_on_one_gpu(tmp_path: Path) -> None:
    """Another way of TensorFlow to train on one GPU is beside it, four times as slow."""
    plant(tmp_path, {("single", 1): 10.0, ("data_parallel", 2): 9.0}, LARGE)
    ways = {("tf_single", 1): 40.0, ("tf_mirrored", 1): 10.0, ("tf_mirrored", 2): 6.0}
    plant(tmp_path, ways, LARGE, environment=TENSORFLOW)
    names = "mirrored_scales_better", "mirrored_faster_than_data_parallel", "mirrored_large_model_gains_with_gpus"
    for name in names:
        finding = shipped(tmp_path, name)
        assert (finding.verdict, len(finding.cases)) == ("reproduced", 1), name
    assert finding.cases[0].median == pytest.approx(10 / 6, rel=0.05)


@pytest.mark.parametrize(("large", "verdict"), [(9.0, "reproduced"), (14.0, "refuted")])
def test_model_parallelism_gains_as_models_grow(tmp_path: Path, large: float, verdict: str) -> None:
    for work, time_s, parameters in ((CNN, 12.0, 10**5), (VIT, large, 10**7)):
        plant(tmp_path, {("ddp", 2): 10.0, ("model_parallel", 2): time_s}, work, parameters=parameters)
    assert shipped(tmp_path, "model_parallel_gains_as_models_grow").verdict == verdict


OF_BOTH_FRAMEWORKS = (
    "gpus_help_large_models_more",
    "two_gpus_are_best",
    "epoch_shorter_with_gpus",
    "epoch_shorter_with_gpus_on_more_data",
    "rate_indifferent_to_data",
    "rate_rises_with_batch",
    "rate_rises_with_batch_more_with_gpus",
)


@pytest.mark.parametrize(("tensorflow", "verdict"), [(6.0, "reproduced"), (14.0, "inconclusive")])
def test_what_is_said_of_both_frameworks_is_asked_of_each(tmp_path: Path, tensorflow: float, verdict: str) -> None:
    """Each on two GPUs against its own run on one."""
    plant(tmp_path, {("single", 1): 10.0, ("ddp", 2): 6.0}, LARGE)
    plant(tmp_path, {("tf_single", 1): 10.0, ("tf_mirrored", 2): tensorflow}, LARGE, environment=TENSORFLOW)
    finding = shipped(tmp_path, "epoch_shorter_with_gpus")
    assert (finding.verdict, len(finding.cases)) == (verdict, 2)
    assert sorted(case.median for case in finding.cases) == pytest.approx([0.6, tensorflow / 10], rel=0.05)


def test_tensorflows_runs_alone_answer_what_is_said_of_both(tmp_path: Path) -> None:
    works = [
        LARGE | {"model": model, "batch_size": batch, "data": {"name": "mnist", "copies": copies}}
        for model in ("cnn_small", "cnn_large")
        for batch in (128, 256)
        for copies in (1, 8)
    ]
    for work in works:
        for strategy, devices in (("tf_single", 1), ("tf_mirrored", 2), ("tf_mirrored", 4)):
            run = config(tmp_path, strategy=strategy, devices=devices, device="cuda", **work)
            published(run, steady(10.0 / devices, device_type="cuda", environment=TENSORFLOW))
    for name in OF_BOTH_FRAMEWORKS:
        assert shipped(tmp_path, name).cases, name


@pytest.mark.parametrize(("ring_s", "verdict"), [(8.0, "reproduced"), (12.0, "refuted")])
def test_a_ring_is_held_against_parameter_servers(tmp_path: Path, ring_s: float, verdict: str) -> None:
    plant(tmp_path, {("parameter_server", 2): 10.0, ("ring_ddp", 2): ring_s}, VIT | {"batch_size": 384})
    assert shipped(tmp_path, "ring_faster_than_parameter_server").verdict == verdict


@pytest.mark.parametrize(
    ("name", "scaling"),
    [
        ("mirrored_loss_lower_in_the_end", "weak"),
        ("mirrored_two_gpus_more_accurate_on_test_set", "weak"),
        ("mirrored_two_gpus_more_accurate_at_equal_batch", "strong"),
        ("mirrored_two_gpus_train_faster_at_equal_batch", "strong"),
        ("mirrored_two_gpus_reach_accuracy_sooner", "weak"),
    ],
)
def test_mirrored_twins_follow_tensorflows_runs(tmp_path: Path, name: str, scaling: str) -> None:
    """Where two devices are better under TensorFlow and worse under torch than one device of either."""
    one = (10.0, 0.2, 0.985)
    ways = {
        ("single", 1): one,
        ("ddp", 2): (20.0, 0.3, 0.98),
        ("tf_single", 1): one,
        ("tf_mirrored", 2): (5.0, 0.1, 0.99),
    }
    for way, (time_s, loss, accuracy) in ways.items():
        planted: dict[str, Any] = {
            "test_accuracy": lambda epoch, accuracy=accuracy: min(accuracy, 0.2 * epoch),
            "train_loss": lambda epoch, loss=loss: loss if "loss" in name else 0.2,
            "environment": TENSORFLOW if way[0].startswith("tf_") else Fake.environment,
        }
        plant(tmp_path, {way: time_s}, MNIST | {"scaling": scaling}, **planted)
    assert shipped(tmp_path, name).verdict == "reproduced"
    assert shipped(tmp_path, name.removeprefix("mirrored_")).verdict == "refuted"


@pytest.mark.parametrize(("two_s", "verdict"), [(5.0, "reproduced"), (8.2, "inconclusive"), (20.0, "refuted")])
def test_convergence_is_timed_to_an_accuracy(tmp_path: Path, two_s: float, verdict: str) -> None:
    """Shorter epochs are no shorter way, where two devices take more of them: 10 where one takes 8."""
    for strategy, devices, time_s, epochs in (("single", 1, 10.0, 8), ("ddp", 2, two_s, 10)):
        plant(
            tmp_path, {(strategy, devices): time_s}, MNIST, test_accuracy=lambda epoch, last=epochs: 0.98 * epoch / last
        )
    assert shipped(tmp_path, "two_gpus_reach_accuracy_sooner").verdict == verdict


@pytest.mark.parametrize(("spread_s", "verdict"), [(8.0, "reproduced"), (12.0, "refuted")])
def test_scaling_of_the_vit_is_also_asked_of_model_parallelism(tmp_path: Path, spread_s: float, verdict: str) -> None:
    plant(tmp_path, {("single", 1): 10.0, ("model_parallel", 2): spread_s}, VIT)
    assert shipped(tmp_path, "vit_scales_model_parallel").verdict == verdict
    assert shipped(tmp_path, "vit_scales").cases == ()


def test_memory_of_the_vit_is_the_sum_in_data_parallel_and_the_fullest_gpu_in_model_parallel(tmp_path: Path) -> None:
    for ways, held in ({("single", 1): 1.0}, 100 * MIB), ({("ddp", 2): 1.0, ("model_parallel", 2): 1.0}, 60 * MIB):
        plant(tmp_path, ways, VIT, peak_allocated_bytes=lambda epoch, rank, held=held: held)
    rises, falls = (
        shipped(tmp_path, name) for name in ("vit_memory_rises_data_parallel", "vit_memory_falls_model_parallel")
    )
    assert (rises.verdict, rises.cases[0].median) == ("reproduced", pytest.approx(1.2))
    assert (falls.verdict, falls.cases[0].median) == ("reproduced", pytest.approx(0.6))


@pytest.mark.parametrize("strategy", ["ddp", "data_parallel"])
def test_the_tutorials_data_parallelism_is_either_class(tmp_path: Path, strategy: str) -> None:
    plant(tmp_path, {("model_parallel", 2): 10.0, (strategy, 2): 6.0}, MLP)
    assert shipped(tmp_path, "data_parallel_gpus_run_in_parallel").verdict == "reproduced"
