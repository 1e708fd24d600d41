"""The models, optimizers and strategies of TensorFlow compute what torch's do, step by step.

One process of TensorFlow does all cases, since importing it takes seconds.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from parallelbench.config.components import Shard
from parallelbench.environments import python_of
from parallelbench.measure.environment_match import SET_BY_LAUNCHER, differences, entries
from parallelbench.results.attempt import Attempt
from parallelbench.training.checks.comparability import as_reference
from parallelbench.training.exchange import Exchange
from parallelbench.training.reference import make
from parallelbench.training.torch_session import build_loader, build_model
from parallelbench.world.world import World
from tests.helpers import configured

pytestmark = [pytest.mark.slow, pytest.mark.tensorflow]

GREY = ("data=synthetic", "data.channels=1", "data.train_samples=96", "data.test_samples=40", "batch_size=32")
COLOUR = ("data=synthetic", "data.channels=3", "data.train_samples=96", "data.test_samples=40", "batch_size=32")
SMALL = (*GREY, "data.image_size=12")
ONE = ("strategy=tf_single", "devices=1")
TWO = ("strategy=tf_mirrored", "devices=2")
CASES: dict[str, tuple[str, ...]] = {
    "logistic_regression": (*ONE, *COLOUR, "data.image_size=6", "model=logistic_regression", "optimizer=sgd"),
    "mlp": (*ONE, *SMALL, "model=mlp", "optimizer=adamw", "optimizer.weight_decay=0.1"),
    "cnn_small": (*ONE, *GREY, "data.image_size=14", "model=cnn_small", "optimizer=adam_keras"),
    "cnn_large": (*ONE, *GREY, "data.image_size=9", "model=cnn_large", "optimizer=adam_keras"),
    "cnn_large_dense": (*ONE, *GREY, "data.image_size=9", "model=cnn_large_dense", "optimizer=adagrad"),
    "cnn": (*ONE, *COLOUR, "data.image_size=12", "model=cnn", "model.widths=[8,16]", "optimizer=sgd"),
    "resnet50": (*ONE, *COLOUR, "data.image_size=8", "model=resnet50", "optimizer=adam"),
    "resnet_tiny": (*ONE, *COLOUR, "data.image_size=8", "model=resnet_tiny", "optimizer=sgd", "data.augment=true"),
    "nesterov": (*ONE, *SMALL, "model=mlp", "optimizer=sgd", "optimizer.nesterov=true", "optimizer.weight_decay=0.01"),
    "no momentum": (*ONE, *SMALL, "model=mlp", "optimizer=sgd", "optimizer.momentum=0.0", "optimizer.lr=0.05"),
    "eager": (*ONE, *SMALL, "model=mlp", "strategy.tf_function=false", "strategy.trace=first_epoch"),
    "xla": (*ONE, *SMALL, "model=cnn_small", "strategy.xla=true"),
    "two devices": (*TWO, *SMALL, "model=cnn_small", "optimizer=adam_keras"),
    "two devices, one sums": (*TWO, *SMALL, "model=mlp", "strategy.all_reduce=reduce_to_one"),
    "two devices, norm": (*TWO, *COLOUR, "data.image_size=8", "model=cnn", "model.widths=[8]", "model.norm=sync"),
}
SERVERS = (
    *("strategy=tf_parameter_server", "strategy.mode=async", "devices=3", *SMALL, "model=mlp", "model.hidden=[8]"),
    *("optimizer=sgd", "optimizer.momentum=0.0", "optimizer.lr=0.05", "precision=fp64"),
)
FP32 = ("cnn_small", "mlp", "cnn", "two devices", "resnet_tiny")


def attempt_of(folder: Path, *overrides: str) -> Attempt:
    run = configured("device=cpu", *overrides, "epochs=1", "measure.parity_steps=3")
    attempt = Attempt(folder / "attempts" / "1")
    attempt.path.mkdir(parents=True)
    attempt.write_config(run)
    make(run, attempt)
    return attempt


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("twins")
    attempts = {name: attempt_of(root / str(number), *case) for number, (name, case) in enumerate(CASES.items())}
    folders = {name: str(attempt.path) for name, attempt in attempts.items()}
    further = [folders.pop(name) for name in FP32]
    served = attempt_of(root / "servers", *SERVERS)
    every = (*folders.values(), str(served.path), "--", *further)
    command = [str(python_of("tensorflow")), "-m", "tests.tensorflow.steps", *every]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    said = json.loads(done.stdout.splitlines()[-1])
    cases = {name: said[str(attempt.path)] | {"attempt": attempt} for name, attempt in attempts.items()}
    cases["servers"] = said[str(served.path)]
    return cases | {name: said[name] for name in ("no gpu", "gpus", "environment", "of driver")}


@pytest.mark.exhaustive
def test_a_rank_says_that_tensorflow_finds_no_gpu(found: dict[str, Any]) -> None:
    assert found["no gpu"].startswith("TensorFlow finds 0 GPUs where the run has 1: run `make venv-tensorflow-gpu`")


def test_a_rank_takes_its_own_gpus_and_tells_their_peaks(found: dict[str, Any]) -> None:
    """By scripted answers: no GPU has run this."""
    on_gpus = found["gpus"]
    grown, forgotten = (["grow", "GPU 2", True], ["grow", "GPU 3", True]), (["forget", "/gpu:0"], ["forget", "/gpu:1"])
    assert on_gpus["calls"] == [["show", ["GPU 2", "GPU 3"], "GPU"], *grown, *forgotten]
    assert on_gpus["gpus"] == [["A100 of GPU 2", "GPU-2"], ["A100 of GPU 3", "GPU-3"]]
    assert on_gpus["uuids"] == "GPU-2,GPU-3", "energy is attributed by these"
    assert on_gpus["threads"] == 3, "as many as the launcher gives torch"
    known = {"peak_allocated_bytes": 300, "peak_allocated_bytes_by_device": "100,200"}
    assert {**known, "peak_reserved_bytes": None, "device_used_bytes": None}.items() <= on_gpus["memory"].items()


@pytest.mark.parametrize("case", CASES)
def test_every_step_equals_torchs_in_fp64(case: str, found: dict[str, Any]) -> None:
    rows = found[case]["parity"]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [row["tolerance"] for row in rows] == pytest.approx([1e-9, 1e-7, 1e-5])
    assert all(row["passed"] for row in rows), rows
    assert max(row["loss_difference"] for row in rows) < 1e-9


@pytest.mark.parametrize("case", FP32)
def test_an_epoch_in_fp32_equals_torchs_within_rounding(case: str, found: dict[str, Any]) -> None:
    """At the run's own batch size: the same samples in the same order, augmented alike."""
    run = as_reference(found[case]["attempt"].config())
    arrays = run.data.load(Path("unused"))
    replica = run.strategy.prepare(build_model(run), run, World())
    losses = [
        replica.step(batch)[0].item() / run.global_batch_size
        for batch in build_loader(arrays, run, World(), Shard()).train(1)
    ]
    assert len(losses) == 3
    assert found[case]["losses"][0] == pytest.approx(losses, rel=2e-4)
    assert found[case]["losses"][1] == found[case]["losses"][0], "images as they lie on a GPU are the same bytes"


@pytest.mark.parametrize("others", [0, 1, 3])
def test_a_push_is_as_stale_as_others_made_it(others: int, found: dict[str, Any]) -> None:
    """Its gradients are of the parameters before so many updates by others, and are applied after them."""
    case = found["servers"][str(others)]
    assert (case["recorded"], case["update"]) == ([others], others + 1)
    assert case["others"] == [[0, update] for update in range(1, others + 1)]
    assert case["difference"] < 1e-15
    assert (case["moved"] > 1e-6) == (others > 0)


@pytest.mark.exhaustive
def test_both_frameworks_environments_match(found: dict[str, Any]) -> None:
    """But for what the launcher sets, and what the load of the moment is: else no claim could compare them."""
    program = "import json; from parallelbench.measure.environment import capture; print(json.dumps(capture()))"
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True)
    both = [entries(environment) for environment in (json.loads(done.stdout), found["environment"])]
    assert differences(*both).keys() <= SET_BY_LAUNCHER.keys()


def test_the_driver_is_recorded_as_torch_records_it(found: dict[str, Any]) -> None:
    """Both must match, or the two are never compared on GPUs."""
    asked = {"driver": "--query-gpu=driver_version", "power_limit_w": "--query-gpu=power.limit", "topology": "topo"}
    assert found["of driver"] == {**asked, "version": "12.5", "cudnn": "9"}
    assert found["environment"]["cuda"] is None, "of a build for processors nobody asks the driver"


def test_the_initial_state_survives_both_layouts(found: dict[str, Any]) -> None:
    """What is exported is the model that torch trains: the same bits."""
    attempt = found["cnn_large"]["attempt"]
    exported, built = Exchange.of(attempt).read("initial"), build_model(attempt.config()).state_dict()
    assert exported.keys() == built.keys()
    assert all(np.array_equal(exported[name], built[name].numpy()) for name in built)
    assert all(torch.from_numpy(value).dtype == built[name].dtype for name, value in exported.items())
