"""TensorFlow's parameter servers: every push is counted, and who stops answering is named."""

from __future__ import annotations

import math
import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from tests.helpers import TINY, configured
from tests.launch.programs import Program, completed, the_run
from tests.tensorflow.test_contract import rows

pytestmark = [pytest.mark.slow, pytest.mark.tensorflow]

SERVED = ("strategy=tf_parameter_server", "devices=3", "launcher.oversubscribe=true")
EPOCHS, STEPS, WORKERS = 8, 2, 2


@pytest.mark.exhaustive
def test_asynchronous_updates_are_all_counted(tmp_path: Path) -> None:
    """Downpour's Adagrad: each slice makes one update, whoever computed it, and none is lost or made twice."""
    run = ("run", *TINY, "model=mlp", "model.hidden=[16]", "optimizer=adagrad", f"epochs={EPOCHS}")
    code, text = completed(*run, *SERVED, "strategy.mode=async", results=tmp_path)
    assert code == 0, text
    content = rows(the_run(tmp_path))
    pushes = Counter((row["epoch"], row["step"]) for row in content["pushes"])
    assert pushes == {(epoch, step): WORKERS for epoch in range(1, EPOCHS + 1) for step in range(1, STEPS + 1)}
    assert {row["rank"] for row in content["pushes"]} <= {0, 1}, "the last rank is the server"
    # At most all other pushes of the epoch came in between.
    assert all(0 <= row["staleness"] < WORKERS * STEPS for row in content["pushes"])
    by_rank = Counter((row["epoch"], row["rank"]) for row in content["pushes"])
    for row in content["ranks"]:
        assert row["train_samples"] == 16 * by_rank[row["epoch"], row["rank"]]
    assert all(row["train_samples"] == 64 for row in content["epochs"])
    assert content["epochs"][-1]["train_loss"] < content["epochs"][0]["train_loss"]
    (found,) = (row for row in content["run"])
    assert (found["parity_passed"], found["theoretical_state_bytes"]) == (None, None), "not like one device"


@pytest.mark.exhaustive
def test_each_server_sends_the_bytes_of_the_variables_that_it_holds(tmp_path: Path) -> None:
    """Variables are placed in turn: of two servers one has the weights, the other the biases."""
    run = ("run", *TINY, "model=mlp", "model.hidden=[16]", "optimizer=sgd", "epochs=1", "precision=fp32")
    served = ("strategy=tf_parameter_server", "strategy.servers=2", "devices=3", "measure.parity=false")
    code, text = completed(*run, *served, "launcher.oversubscribe=true", results=tmp_path)
    assert code == 0, text
    (inputs,) = (math.prod(configured(*TINY).data.shape),)
    weights, biases, slices = inputs * 16 + 16 * 10, 16 + 10, STEPS * 1
    sent = {row["rank"]: row["parameter_bytes_sent"] for row in rows(the_run(tmp_path))["ranks"]}
    assert sent[0] == 0
    assert {sent[1], sent[2]} == {4 * slices * weights, 4 * slices * biases}


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", ["tf_multi_worker", "tf_parameter_server"])
def test_a_rank_that_stops_answering_is_named(strategy: str, tmp_path: Path) -> None:
    """gRPC itself waits for ever."""
    devices = 3 if strategy == "tf_parameter_server" else 2
    limits = ("launcher.oversubscribe=true", "launcher.collective_timeout_s=60", "measure.parity=false")
    run = ("run", *TINY, f"strategy={strategy}", f"devices={devices}", "epochs=400", *limits)
    with Program(*run, results=tmp_path) as program:
        attempt = program.attempt()
        program.epochs(attempt, at_least=2)
        os.kill(program.pid_of("rank 1", attempt), signal.SIGSTOP)
        assert program.end() == 1, program.text
        assert program.survivors() == []
    outcome = the_run(tmp_path).state().outcome
    assert outcome is not None
    assert outcome.outcome == "timeout"
    assert outcome.reason is not None
    assert outcome.reason.startswith("rank 1 hangs: ")
