"""Processes that the shim is in: ranks write journals, all others write nothing, and none is harmed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from parallelbench.frameworks.program.journals import Journal, Journals
from tests.program import shimmed

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
TRAIN = """
import torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
print("trained")
"""


def test_workers_write_nothing_and_waits_lie_within_those_of_a_stopwatch(tmp_path: Path) -> None:
    done = shimmed.run(HERE / "workers.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    journals = {journal.pid: journal for journal in Journals(tmp_path).poll()}
    assert len(journals) == 2, "of the process and of the rank that it forked"
    rank = journals.pop(seen["rank"])
    assert (len(rank.steps), rank.ended) == (2, True)
    (journal,) = journals.values()
    assert journal.state is not None
    assert [loader.workers for loader in journal.state.loaders] == [0, 1]
    assert [(loader.batches, loader.largest_batch) for loader in journal.state.loaders] == [(12, 2), (24, 2)]
    begin = 0
    for way in ("none", "fork", "spawn"):
        waits, ends = seen[way]
        steps = journal.steps[begin : begin + len(ends)]
        begin += len(ends)
        assert [step.backwards for step in steps] == [1] * len(ends)
        # The program looks at the clock around what the shim looks at.
        for step, before, after in zip(steps[1:], ends, ends[1:], strict=False):
            assert before < step.ended_ns <= after, way
        # The fetch that ends a loader is a wait of the next one's first step.
        least_ns = 20_000_000 if way == "none" else 0  # two samples of 10 ms
        for step, wait_ns in zip(steps[1:], waits[1:-1], strict=True):
            assert least_ns < step.wait_ns <= wait_ns, way
    assert begin == len(journal.steps)


def test_ranks_of_torchrun_say_who_they_are_and_have_their_cores(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    done = subprocess.run(
        [*command, HERE / "ranks.py"],
        env=shimmed.environment(tmp_path, PARALLELBENCH_ENOUGH="5", PARALLELBENCH_CORES="0;1"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    journals = Journals(tmp_path).poll()
    assert len(journals) == 2
    by_rank: dict[int | None, Journal] = {}
    for journal in journals:
        process = journal.process
        assert process is not None
        assert (process.world_size, process.rank_from, process.backend) == (2, "distributed", "gloo")
        assert process.local_rank == process.rank
        assert process.device_types == ["cpu"]
        by_rank[process.rank] = journal
        assert process.cores == [process.rank]
        assert journal.first_state is not None
        assert journal.state is not None
        assert (journal.first_state.collectives or 0) < (journal.state.collectives or 0)
    assert by_rank.keys() == {0, 1}
    first, crashed = by_rank[0], by_rank[1]
    assert (len(first.steps), first.enough, first.ended) == (6, True, True)
    assert (crashed.enough, crashed.ended) == (True, False)
    assert len(crashed.steps) >= 5


@pytest.mark.cases("isolated")
@pytest.mark.parametrize(
    ("options", "variables"),
    [
        pytest.param(("-I",), {}, id="isolated"),
        pytest.param((), {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, id="no backends"),
        pytest.param((), {"PYTHONPATH": ""}, id="no path"),
        pytest.param((), {"PARALLELBENCH_STEPS": ""}, id="not asked for"),
        pytest.param((), {"PARALLELBENCH_STEPS": "/dev/null/none"}, id="no folder"),
        pytest.param((), {"PARALLELBENCH_CORES": "0,x"}, id="no cores"),
    ],
)
def test_a_program_that_the_shim_cannot_enter_is_as_it_was(
    tmp_path: Path, options: tuple[str, ...], variables: dict[str, str]
) -> None:
    done = shimmed.run(TRAIN, folder=tmp_path, options=options, **variables)
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    steps = [len(journal.steps) for journal in Journals(tmp_path).poll()]
    assert steps == ([3] if "PARALLELBENCH_CORES" in variables else [])
