"""What every framework's ranks keep: docs/adding-a-framework.md. torch's pass the same test as TensorFlow's."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from parallelbench.results.folder import RunFolder
from parallelbench.results.tables import TABLES
from tests.helpers import TINY
from tests.launch.programs import Program, completed, kill, the_run

pytestmark = pytest.mark.slow

EPOCHS = 40
RUN = ("run", *TINY, "model=mlp", "model.hidden=[16]", "optimizer=adam", f"epochs={EPOCHS}", "device=cpu")
SAVING = ("launcher.checkpoint=always", "launcher.checkpoint_every_s=0.001", "launcher.oversubscribe=true")
TENSORFLOW = pytest.mark.tensorflow
WAYS = [
    pytest.param("torch", ("strategy=ddp", "devices=2"), 1, id="ddp"),
    pytest.param("tensorflow", ("strategy=tf_multi_worker", "devices=2"), 0, id="tf_multi_worker", marks=TENSORFLOW),
    # The last rank is a server.
    pytest.param(
        "tensorflow", ("strategy=tf_parameter_server", "devices=3"), 2, id="tf_parameter_server", marks=TENSORFLOW
    ),
]


def rows(folder: RunFolder) -> dict[str, list[dict[str, Any]]]:
    assert folder.published() is not None
    return {table: pq.read_table(folder.result / f"{table}.parquet").to_pylist() for table in TABLES}


@pytest.mark.exhaustive
@pytest.mark.parametrize(("framework", "way", "victim"), WAYS)
def test_a_killed_rank_costs_no_saved_epoch_and_the_result_is_whole(
    framework: str, way: tuple[str, ...], victim: int, tmp_path: Path
) -> None:
    results = tmp_path / "results"
    with Program(*RUN, *way, *SAVING, results=results) as program:
        attempt = program.attempt()
        program.wait_for(lambda: len([*the_run(results).path.glob("checkpoints/*/manifest.json")]) >= 2)
        kill(program.pid_of(f"rank {victim}", attempt))
        assert program.end() == 1, program.text
        assert program.survivors() == []
    folder = the_run(results)
    assert folder.state().label == "killed"
    code, text = completed(*RUN, *way, *SAVING, results=results)
    assert code == 0, text
    check_rows(rows(folder), framework, ranks=int(way[1][-1]))
    check_journals(folder)


def check_rows(content: dict[str, list[dict[str, Any]]], framework: str, *, ranks: int) -> None:
    """All tables hold what the declarations promise of so many ranks, of which one was killed once."""
    (run,) = content["run"]
    assert (run["framework"], run["outcome"], run["attempt"], run["processes"]) == (framework, "ok", 2, ranks)
    assert int(run["resumed_after"]) >= 1
    assert run["parity_passed"]
    assert [row["step"] for row in content["parity"]] == [1, 2, 3]
    # Rounding of other kernels grows from step to step.
    limits = {"torch": [1e-9, 1e-9, 1e-9], "tensorflow": [1e-9, 1e-7, 1e-5]}
    assert [row["tolerance"] for row in content["parity"]] == pytest.approx(limits[framework], rel=1e-12)
    assert all(row["passed"] is not False for row in content["checks"])
    assert {row["check"] for row in content["checks"]} >= {
        "copies",
        "samples",
        "evaluation loss",
        "gradients",
        "update",
    }
    assert [row["epoch"] for row in content["epochs"]] == list(range(1, EPOCHS + 1))
    assert sorted((row["epoch"], row["rank"]) for row in content["ranks"]) == [
        (epoch, rank) for epoch in range(1, EPOCHS + 1) for rank in range(ranks)
    ]
    assert {row["attempt"] for row in content["epochs"]} == {1, 2}
    for row in content["epochs"]:
        assert (row["train_samples"], row["test_samples"], row["steps"]) == (64, 30, 2)
    for row in content["ranks"]:
        assert row["training_started_at"] <= row["training_ended_at"]
    for key in ("epoch", "rank"):  # in an epoch, one of a coordinator's workers may get all slices
        sent: Counter[int] = Counter()
        for row in content["ranks"]:
            sent[row[key]] += row["gradient_bytes_sent"] + row["parameter_bytes_sent"]
        assert min(sent.values()) > 0, sent
    assert content["epochs"][-1]["train_loss"] < content["epochs"][0]["train_loss"]
    environment = json.loads(run["environment_json"])
    assert (environment["framework"], bool(environment["packages"][framework])) == (framework, True)
    parts = ("launch", "imports", "process_group", "data", "parity", "model", "first_step")
    assert all(run[f"startup_{part}_s"] >= 0 for part in parts)


def check_journals(folder: RunFolder) -> None:
    """A row of `epochs` stands after the same rank's row of `ranks`; the last event before the checks is `finished`."""
    path = folder.attempts()[-1].path / "journal-rank0.jsonl"
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    seen: set[int] = set()
    for entry in entries:
        if entry.get("table") == "ranks":
            seen.add(entry["row"]["epoch"])
        if entry.get("table") == "epochs":
            assert entry["row"]["epoch"] in seen
    assert [entry["event"] for entry in entries if entry.get("event") in ("finished", "stopped")] == ["finished"]


@TENSORFLOW
@pytest.mark.exhaustive
def test_workers_evaluate_by_the_same_running_statistics(tmp_path: Path) -> None:
    """torch evaluates what rank 0 hands over, on one device: the closing check."""
    model = ("model=cnn", "model.widths=[8]", "model.norm=batch", "epochs=1", "launcher.oversubscribe=true")
    code, text = completed("run", *TINY, *model, "strategy=tf_multi_worker", "devices=2", results=tmp_path)
    assert code == 0, text
    found = {row["check"]: row for row in rows(the_run(tmp_path))["checks"]}
    assert found["evaluation loss"]["passed"], found["evaluation loss"]
    assert all(row["passed"] is not False for row in found.values()), found
