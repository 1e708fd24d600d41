"""Runs that are interrupted: a later attempt goes on, and the result is the same.

Several ranks are started, killed and stopped as users do it. What one rank shows as well is trained in this process,
and stops after exactly as many epochs as it is told to.
"""

from __future__ import annotations

import functools
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from analysis import excluded, load
from analysis.comparison.exclusions import Exclusion
from parallelbench.cli import main
from parallelbench.models.mlp import Mlp
from parallelbench.results.attempt import Attempt
from parallelbench.results.folder import RunFolder
from parallelbench.results.journal import read_tables
from parallelbench.results.tables import TABLES
from parallelbench.training.checkpoint import Policy
from tests.faults import fault
from tests.helpers import TINY
from tests.launch.programs import Program, completed, kill, the_run

pytestmark = pytest.mark.slow

MODEL = ("model=mlp", "model.hidden=[16]", "precision=fp64", "optimizer=adam")
SINGLE = ("run", *TINY, *MODEL, "measure.parity=false", "measure.probe=false", "epochs=60")
HERE = (*SINGLE, "epochs=20", "launcher=inline", "launcher.checkpoint=auto", "measure.telemetry_hz=0")
TWO = ("strategy=ddp", "devices=2", "launcher.oversubscribe=true", "measure.parity_steps=1", "measure.probe=false")
DDP = ("run", *TINY, *MODEL, "epochs=60", *TWO)
ALWAYS = ("launcher.checkpoint=always", "launcher.checkpoint_every_s=0.001")
MLP = Mlp.build
NAME = re.compile(r"attempt-(\d+)-epoch-(\d+)")


def saved_epochs(folder: RunFolder) -> list[int]:
    """Epochs with a whole checkpoint, oldest first."""
    names = [NAME.fullmatch(path.parent.name) for path in folder.path.glob("checkpoints/*/manifest.json")]
    return sorted(int(name[2]) for name in names if name)


def checkpoint(folder: RunFolder, epoch: int) -> Path:
    (path,) = folder.path.glob(f"checkpoints/attempt-*-epoch-{epoch}")
    return path


def rows(folder: RunFolder) -> dict[str, list[dict[str, Any]]]:
    assert folder.published() is not None
    return {table: pq.read_table(folder.result / f"{table}.parquet").to_pylist() for table in TABLES}


def measured(folder: RunFolder) -> list[tuple[float, ...]]:
    """What must not depend on interruptions: the losses and accuracies of every epoch."""
    epochs = sorted(rows(folder)["epochs"], key=lambda row: row["epoch"])
    assert [row["epoch"] for row in epochs] == list(range(1, folder.config().epochs + 1))
    return [
        tuple(row[f"{part}_{what}"] for part in ("train", "test") for what in ("loss", "accuracy")) for row in epochs
    ]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[str, ...]], list[tuple[float, ...]]]:
    """What every epoch of a run gives when nothing happens; each is trained once, when it is first asked for."""

    @functools.cache
    def trained(arguments: tuple[str, ...]) -> list[tuple[float, ...]]:
        results = tmp_path_factory.mktemp("undisturbed") / "results"
        finished(*arguments, "launcher.checkpoint=never", results=results)
        assert rows(the_run(results))["run"][0]["resumed_after"] is None
        return measured(the_run(results))

    return trained


def here(*arguments: str, results: Path) -> int:
    """The exit code of the program, which trains in this process."""
    return main([*arguments, f"results={results}"])


def finished(*arguments: str, results: Path) -> None:
    """Let the run come to its end."""
    if "launcher=inline" in arguments:
        assert here(*arguments, results=results) == 0
    else:
        code, text = completed(*arguments, results=results)
        assert code == 0, text


def stopped(*arguments: str, results: Path, after: int, number: int = 1) -> Attempt:
    """The attempt that was asked to stop once so many epochs were done, after its end."""
    if "launcher=inline" not in arguments:
        with Program(*arguments, results=results) as program:
            return stop_after(program, after, number)
    decide = Policy.after

    def asked(policy: Policy, epoch: int, took_s: float) -> tuple[bool, bool]:
        if epoch >= after:
            policy._attempt.ask_to_stop()
        return decide(policy, epoch, took_s)

    with mock.patch.object(Policy, "after", asked):
        assert here(*arguments, results=results) == 1
    attempt = the_run(results).attempts()[-1]
    assert attempt.number == number
    return attempt


def stop_after(program: Program, epochs: int, number: int = 1) -> Attempt:
    """Ask the attempt to stop once so many epochs are done, and wait for its end."""
    attempt = program.attempt(number)
    program.epochs(attempt, at_least=epochs)
    attempt.ask_to_stop()
    assert program.end() == 1, program.text
    assert program.survivors() == []
    return attempt


@fault(
    "workers",
    "A rank is killed in the middle of a run",
    injection="SIGKILL to rank 0 once three checkpoints are written",
    outcome="submitting again goes on after the last checkpoint; losses are bitwise those of an undisturbed run",
)
def test_a_killed_run_goes_on_after_its_last_checkpoint(
    tmp_path: Path, undisturbed: Callable[[tuple[str, ...]], list[tuple[float, ...]]]
) -> None:
    results = tmp_path / "results"
    with Program(*DDP, *ALWAYS, results=results) as program:
        attempt = program.attempt()
        program.wait_for(lambda: max(saved_epochs(the_run(results)), default=0) >= 3)
        kill(program.pid_of("rank 0", attempt))
        assert program.end() == 1, program.text
        assert program.survivors() == []
    folder = the_run(results)
    assert folder.state().label == "killed"
    kept = saved_epochs(folder)
    assert len(kept) in (2, 3), "one may have been about to be forgotten"
    # Every epoch's state is as large, but for digits of its numbers.
    size_bytes = sum(path.stat().st_size for path in checkpoint(folder, kept[-1]).glob("rank*.pt"))
    code, text = completed(*DDP, *ALWAYS, results=results)
    assert code == 0, text
    assert measured(folder) == undisturbed(DDP)
    content = rows(folder)
    (run,) = content["run"]
    assert (run["outcome"], run["attempt"], run["resumed_after"]) == ("ok", 2, str(kept[-1]))
    assert run["parity_passed"], "the verdict of the first attempt stays"
    assert [row["attempt"] for row in content["parity"]] == [1]
    assert run["startup_first_step_s"] is not None
    for table in ("epochs", "ranks", "steps"):
        assert {(row["epoch"] > kept[-1], row["attempt"]) for row in content[table]} == {(False, 1), (True, 2)}
    assert not (folder.path / "checkpoints").exists(), "a result needs none"
    assert (run["checkpoint_bytes"], run["checkpoint_save_s"] > 0) == (size_bytes, True)


@pytest.mark.exhaustive
@fault(
    "lifecycle",
    "An attempt is asked to stop",
    injection="the file `stop` in the attempt's folder",
    outcome="all ranks save after the same epoch and end; the outcome is timeout; submitting again goes on from there",
)
@fault(
    "storage and input",
    "Bit-flipped checkpoint",
    injection="one bit of one rank's file in the newest checkpoint",
    outcome="all ranks go on from the checkpoint before; the run says so in its warnings",
)
def test_a_run_that_is_asked_to_stop_goes_on_later(
    tmp_path: Path, undisturbed: Callable[[tuple[str, ...]], list[tuple[float, ...]]]
) -> None:
    results, epoch = tmp_path / "results", 0
    for number, saving in enumerate(((), ALWAYS), start=1):
        attempt = stopped(*DDP, *saving, results=results, after=epoch + 3, number=number)
        folder = the_run(results)
        outcome = folder.state().outcome
        first, (*before, epoch) = epoch, saved_epochs(folder)
        assert bool(before) == bool(saving), "nothing else is saved where there is no time limit"
        assert outcome is not None
        assert (outcome.outcome, outcome.reason) == (
            "timeout",
            f"stopped after epoch {epoch} of {folder.config().epochs}, as requested; "
            "submitting again goes on from there",
        )
        assert attempt.number == number
        assert folder.state().to_run
    flip(checkpoint(folder, epoch) / "rank1.pt")
    finished(*DDP, results=results)
    assert measured(folder) == undisturbed(DDP)
    (run,) = rows(folder)["run"]
    assert run["resumed_after"] == f"{first}, {before[-1]}"
    assert run["resumed_elsewhere"] is None
    assert f"the checkpoint after epoch {epoch} of attempt 2 was not used: it is damaged" in run["warnings"]


DROPS = '''
"""A model that drops half of what it sees, and notes which half."""
import os

from parallelbench.config.components import Model


class Drops(Model, frozen=True, kw_only=True):
    notes: str

    layer_names = property(lambda self: ("drop", "out"))

    def build(self, *, in_channels, image_size, num_classes):
        import torch
        from torch import nn

        from parallelbench.models.modules import Dense, sequence

        class Drop(nn.Module):
            notes = self.notes

            def forward(self, x):
                y = nn.functional.dropout(torch.ones_like(x[0]), 0.5, self.training)
                if self.training:
                    with open(f"{self.notes}/rank{os.environ.get('RANK')}.txt", "a") as file:
                        print((y > 0).int().flatten().tolist(), file=file)
                return x * y

        return sequence(self.layer_names, [Drop(), Dense(in_channels * image_size**2, num_classes, relu=False)])
'''


@pytest.mark.exhaustive
@fault(
    "lifecycle",
    "A run whose model draws random numbers is stopped",
    injection="a model of one's own with dropout under ddp is asked to stop, and submitted again",
    outcome="each rank goes on with its own random numbers, and no two ranks drop alike; losses are bitwise those of "
    "an undisturbed run",
)
def test_ranks_drop_values_of_their_own_and_go_on_with_the_numbers_that_were_saved(tmp_path: Path) -> None:
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "drops.yaml").write_text("_target_: dropping.Drops\nname: drops\nnotes: unset\n")
    (tmp_path / "dropping").mkdir()
    (tmp_path / "dropping" / "__init__.py").write_text(DROPS)
    own = ("run", "--conf", str(tmp_path / "conf"), "--plugin", str(tmp_path / "dropping"), *DDP[1:], "model=drops")
    own = tuple(word for word in own if not word.startswith("model.hidden") and word != "model=mlp")

    def noted(name: str) -> tuple[str, ...]:
        (tmp_path / name).mkdir(exist_ok=True)
        return (*own, f"model.notes={tmp_path / name}")

    whole, parts = noted("whole"), noted("parts")
    finished(*whole, results=tmp_path / "undisturbed")
    stopped(*parts, results=tmp_path / "results", after=3)
    finished(*parts, results=tmp_path / "results")
    both = [rows(the_run(tmp_path / name)) for name in ("undisturbed", "results")]
    losses = [[(row["train_loss"], row["test_loss"]) for row in content["epochs"]] for content in both]
    assert losses[0] == losses[1]
    (run,) = both[1]["run"]
    assert run["resumed_after"] is not None
    assert (run["outcome"], run["parity_passed"], run["rounding"]) == ("ok", True, None)
    assert run["warnings"].count("draws random numbers in training; parity compared it in evaluation mode") == 1
    masks = [(tmp_path / "whole" / f"rank{rank}.txt").read_text().splitlines() for rank in range(2)]
    steps = 2 * len(losses[0])
    # What plain code draws again in the closing check comes last, on rank 0 alone.
    trained = [each[: min(map(len, masks))][-steps:] for each in masks]
    assert len(set(trained[0]) | set(trained[1])) == 2 * steps, "each rank and step has a mask of its own"


def noisy(self: Mlp, **arguments: Any) -> torch.nn.Sequential:
    """A multilayer perceptron that draws its first weights from NumPy, and noise from NumPy and Python as it trains."""
    model = MLP(self, **arguments)

    def disturbed(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        noise = torch.from_numpy(np.random.standard_normal(inputs[0].shape) * random.random()).to(inputs[0].dtype)
        return inputs[0] + 0.1 * noise

    first = next(model.parameters())
    first.data.copy_(torch.from_numpy(0.1 * np.random.standard_normal(first.shape)))
    model[0].register_forward_pre_hook(disturbed)
    return model


@pytest.mark.exhaustive
@fault(
    "workers",
    "A model of one's own draws weights and noise from NumPy and Python's `random`, and its run is interrupted",
    injection="both generators stand elsewhere when an attempt starts; a stop after three epochs",
    outcome="all generators begin from the run's seed and are in checkpoints: losses are bitwise the same",
)
def test_what_a_model_draws_from_any_generator_goes_on_bitwise(tmp_path: Path) -> None:
    with mock.patch.object(Mlp, "build", noisy):
        for name in ("straight", "stopped"):
            random.seed(name)
            np.random.seed(len(name))
            if name == "stopped":
                stopped(*HERE, results=tmp_path / name, after=3)
            finished(*HERE, results=tmp_path / name)
    straight, went_on = (measured(the_run(tmp_path / name)) for name in ("straight", "stopped"))
    assert rows(the_run(tmp_path / "stopped"))["run"][0]["resumed_after"] == "3"
    assert went_on == straight


@pytest.mark.exhaustive
@fault(
    "lifecycle",
    "Checkpoints lack the optimizer's state",
    injection="a replica saves nothing of SGD's momentum, and so loads all that was saved; a stop after two epochs",
    outcome="error with what is lacking, before the next epoch; the same run of an honest replica goes on",
)
def test_a_checkpoint_without_the_optimizers_state_is_no_checkpoint(tmp_path: Path) -> None:
    run = (*HERE, "optimizer=sgd", "optimizer.momentum=0.9", "epochs=4")

    def saves_no_state(optimizer: Any) -> dict[str, Any]:
        return {"plain": {}, "sharded": {}, "groups": optimizer.state_dict()["param_groups"]}

    with mock.patch("parallelbench.strategies.replica.optimizer_state", saves_no_state):
        stopped(*run, results=tmp_path / "lossy", after=2)
        assert here(*run, results=tmp_path / "lossy") == 1
    outcome = the_run(tmp_path / "lossy").state().outcome
    assert outcome is not None
    assert (outcome.outcome, "has no momentum_buffer of optimizer=sgd" in outcome.reason) == ("error", True)
    stopped(*run, results=tmp_path / "honest", after=2)
    finished(*run, results=tmp_path / "honest")
    finished(*run, results=tmp_path / "straight")
    assert measured(the_run(tmp_path / "honest")) == measured(the_run(tmp_path / "straight"))


@pytest.mark.exhaustive
def test_a_run_that_resumes_in_another_environment_is_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / "results"
    stopped(*SINGLE, results=results, after=1)
    monkeypatch.setenv("GLOO_TUNED_TO", "the moon")
    finished(*SINGLE, results=results)
    (run,) = rows(the_run(results))["run"]
    assert run["resumed_elsewhere"] == "variables.GLOO_TUNED_TO: None and the moon"
    first, second = json.loads(run["attempts_json"])
    assert (first["attempt"], second["attempt"], second["submit"]) == (1, 2, run["submit"])
    (row,) = excluded(load(results)).select("exclusion", "exclusion_detail").rows()
    assert row == (Exclusion.RESUMED_ELSEWHERE.value, run["resumed_elsewhere"])


@pytest.mark.exhaustive
def test_a_run_does_not_go_on_with_other_data(tmp_path: Path) -> None:
    """It would have trained on two data sets, and recorded the first."""
    results = tmp_path / "results"
    attempt = stopped(*HERE, results=results, after=1)
    journal = attempt.path / "journal-rank0.jsonl"
    (content,) = re.findall(r'"data_sha256":"(\w+)"', journal.read_text())
    journal.write_text(journal.read_text().replace(content, "0" * 64))
    assert here(*HERE, results=results) == 1
    outcome = the_run(results).state().outcome
    assert outcome is not None
    assert outcome.outcome == "error"
    assert "the data set has changed since this run began: its sha256 was 000000000000" in outcome.reason


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.exhaustive
@fault(
    "storage and input",
    "Truncated checkpoint",
    injection="the last byte of the newest checkpoint's file, or of its manifest, is gone",
    outcome="the run goes on from the checkpoint before, and says so in its warnings",
)
@pytest.mark.parametrize("file", ["rank0.pt", "manifest.json"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    file: str, tmp_path: Path, undisturbed: Callable[[tuple[str, ...]], list[tuple[float, ...]]]
) -> None:
    results = tmp_path / "results"
    stopped(*HERE, *ALWAYS, results=results, after=3)
    folder = the_run(results)
    before, newest = saved_epochs(folder)
    truncate(checkpoint(folder, newest) / file)
    finished(*HERE, *ALWAYS, results=results)
    assert measured(folder) == undisturbed(HERE)
    (run,) = rows(folder)["run"]
    assert run["resumed_after"] == str(before)
    assert f"the checkpoint after epoch {newest} of attempt 1 was not used: it is damaged" in run["warnings"]


@fault(
    "lifecycle",
    "A supervisor that was taken for dead comes back",
    injection="the next attempt is claimed while the ranks of the first one train",
    outcome="the first one ends its ranks as killed, publishes nothing, and the next one goes on from its checkpoint",
)
@pytest.mark.exhaustive
def test_an_attempt_ends_when_a_newer_one_takes_over(tmp_path: Path) -> None:
    results = tmp_path / "results"
    endless = (*SINGLE, "epochs=1000000", *ALWAYS)
    with Program(*endless, results=results) as program:
        attempt = program.attempt()
        program.wait_for(lambda: saved_epochs(the_run(results)))
        newer = the_run(results).claim()
        assert newer is not None
        program.end()
        assert program.survivors() == []
    folder, outcome = the_run(results), attempt.outcome()
    assert outcome is not None
    assert (outcome.outcome, outcome.reason) == ("killed", "a newer attempt took over")
    assert not folder.result.exists()
    newer.withdraw()
    last = saved_epochs(folder)[-1]
    with Program(*endless, results=results) as program:
        stop_after(program, last + 1, number=2)
    measured_by = {row["epoch"]: row["attempt"] for row in read_tables(newer.path)[0]["epochs"]}
    assert [measured_by[epoch] for epoch in (1, last, last + 1)] == [1, 1, 2]


@pytest.mark.exhaustive
@fault(
    "storage and input",
    "No room for a checkpoint",
    injection="a disk that holds the journals, but not the model",
    outcome="training goes on; the run ends ok, with a warning, and leaves no part of a checkpoint",
)
def test_a_checkpoint_that_does_not_fit_the_disk_is_done_without(small_disk: Path) -> None:
    results = small_disk / "results"
    big = ("model=mlp", "model.hidden=[2048]", "epochs=3", "optimizer=adam")
    more = ("launcher=inline", "measure.parity=false", "measure.telemetry_hz=0")
    finished("run", *TINY, *big, *more, *ALWAYS, results=results)
    folder = the_run(results)
    (run,) = rows(folder)["run"]
    assert re.search("no checkpoint after epoch 1: can't write .*rank0.pt: the disk is full", run["warnings"])
    assert not list(folder.path.glob("checkpoints/*"))
