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

EPOCHS, STEPS, WORKERS = 8, 2, 2


@pytest.mark.exhaustive
def test_asynchronous_updates_and_the_bytes_that_servers_send_are_all_counted(tmp_path: Path) -> None:
    """Downpour's Adagrad: each slice makes one update, whoever computed it, and none is lost or made twice.

    Variables are placed in turn: of two servers one has the weights, the other the biases.
    """
    run = ("run", *TINY, "model=mlp", "model.hidden=[16]", "optimizer=adagrad", f"epochs={EPOCHS}", "precision=fp32")
    served = ("strategy=tf_parameter_server", "strategy.mode=async", "strategy.servers=2", "devices=4")
    code, text = completed(*run, *served, "launcher.oversubscribe=true", results=tmp_path)
    assert code == 0, text
    content = rows(the_run(tmp_path))
    pushes = Counter((row["epoch"], row["step"]) for row in content["pushes"])
    assert pushes == {(epoch, step): WORKERS for epoch in range(1, EPOCHS + 1) for step in range(1, STEPS + 1)}
    assert {row["rank"] for row in content["pushes"]} <= {0, 1}, "the last ranks are the servers"
    # At most all other pushes of the epoch came in between.
    assert all(0 <= row["staleness"] < WORKERS * STEPS for row in content["pushes"])
    by_rank = Counter((row["epoch"], row["rank"]) for row in content["pushes"])
    for row in content["ranks"]:
        assert row["train_samples"] == 16 * by_rank[row["epoch"], row["rank"]]
    assert all(row["train_samples"] == 64 for row in content["epochs"])
    assert content["epochs"][-1]["train_loss"] < content["epochs"][0]["train_loss"]
    (found,) = (row for row in content["run"])
    assert (found["parity_passed"], found["theoretical_state_bytes"]) == (None, None), "not like one device"
    weights, biases, slices = math.prod(configured(*TINY).data.shape) * 16 + 16 * 10, 16 + 10, STEPS * WORKERS
    for epoch in range(1, EPOCHS + 1):
        sent = {row["rank"]: row["parameter_bytes_sent"] for row in content["ranks"] if row["epoch"] == epoch}
        assert sent[0] == sent[1] == 0
        assert {sent[2], sent[3]} == {4 * slices * weights, 4 * slices * biases}


@pytest.mark.exhaustive
def test_a_worker_that_stops_answering_is_named(tmp_path: Path) -> None:
    """gRPC itself waits for ever. Of parameter servers, `test_deaths` stops a worker and a server."""
    limits = ("launcher.oversubscribe=true", "launcher.collective_timeout_s=60", "measure.parity=false")
    run = ("run", *TINY, "strategy=tf_multi_worker", "devices=2", "epochs=400", *limits)
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
