"""Users' own programs in jobs: on two nodes, and where preemption takes the node away."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import polars as pl
import pytest

from tests.slurm.runs import Sweep
from tests.slurm.test_lifecycle import give_back, on, preempt

if TYPE_CHECKING:
    from pathlib import Path

    from tests.slurm.cluster import Cluster

TRAIN = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    optimizer.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
"""
ON_SLURM = ("measure.probe=false", "measure.telemetry_hz=0", "launcher.oversubscribe=true")
RENDEZVOUS = "--nnodes={nodes} --node-rank={node_rank} --master-addr={head} --master-port={port}"


def test_ranks_on_two_nodes_meet_and_are_counted_together(ours: Cluster, tmp_path: Path) -> None:
    (tmp_path / "program").mkdir()
    (tmp_path / "program" / "train.py").write_text(TRAIN)
    command = f"program=torchrun {RENDEZVOUS} --nproc-per-node={{devices_per_node}} train.py"
    small = ("program.warmup_steps=4", "program.steps=20", f"program.folder={tmp_path / 'program'}")
    sweep = Sweep(ours, tmp_path / "results", (command, *ON_SLURM, *small, "devices=4", "nodes=2"))
    sweep.submit()
    run = sweep.done()
    ranks = pl.read_parquet(run.result / "ranks.parquet").filter(pl.col("epoch") == 2).sort("rank")
    assert ranks["rank"].to_list() == [0, 1, 2, 3]
    assert ranks["node"].to_list() == ["n1", "n1", "n2", "n2"]
    (facts,) = pl.read_parquet(run.result / "run.parquet").to_dicts()
    assert (facts["processes"], facts["reason"]) == (4, "timed 20 steps")
    assert json.loads(facts["environment_json"])["packages"]["torch"]


MARKING = "for i in $(seq 1 24); do echo {node_rank} > $PARALLELBENCH_MARK; sleep 0.05; done"


@pytest.mark.parametrize(
    ("command", "options", "steps"),
    [("sleep 0.2", ["program.steps_by=command"], [0, 1]), (MARKING, ["program.steps_by=mark"], [3, 20])],
    ids=["command", "mark"],
)
def test_nodes_without_torch_count_each_for_itself(
    command: str, options: list[str], steps: list[int], ours: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "program").mkdir()
    small = (
        "program.warmup_steps=4",
        "program.steps=20",
        "program.windows=1",
        f"program.folder={tmp_path / 'program'}",
    )
    words = (f"program={command}", *ON_SLURM, *small, *options, "devices=2", "nodes=2")
    sweep = Sweep(ours, tmp_path / "results", words)
    sweep.submit()
    run = sweep.done()
    ranks = pl.read_parquet(run.result / "ranks.parquet").sort("epoch", "rank")
    assert ranks["rank"].to_list() == [0, 1, 0, 1]
    assert ranks["node"].to_list() == ["n1", "n2", "n1", "n2"]
    assert pl.read_parquet(run.result / "epochs.parquet").sort("epoch")["steps"].to_list() == steps


@on(variant="cgroup", grace_time_s=60)
def test_a_preempted_program_starts_over_when_its_job_does(special: Cluster, tmp_path: Path) -> None:
    """Each attempt starts afresh: nothing is measured over an interruption."""
    counting = "i=0; while true; do i=$((i+1)); echo it $i; sleep 0.1; done"
    steps = ("program.steps_by=pattern", "program.step_pattern=^it", "program.warmup_steps=4", "program.steps=200")
    sweep = Sweep(special, tmp_path, (f"program={counting}", *ON_SLURM, *steps, "site.partition=preemptible"))
    sweep.submit()
    first = sweep.attempt()
    sweep.wait(lambda: "it 5" in first.log.read_text(), "some steps")
    urgent = preempt(sweep)
    assert sweep.outcome(first)[0] == "timeout"
    give_back(sweep, urgent)
    row = sweep.row()
    assert (row["attempt"], row["resumed_after"], row["reason"]) == (2, None, "timed 200 steps")
