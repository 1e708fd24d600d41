"""Pipelines: every schedule trains like one device, sends what the formulas say and idles as long as they say."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist

from parallelbench.config.run import RunConfig
from parallelbench.errors import ConfigError
from parallelbench.results.folder import find_runs
from parallelbench.strategies.pipeline import PipelineParallel
from parallelbench.strategies.pipeline.schedules import Pipeline
from parallelbench.training.checks.comparability import as_reference
from parallelbench.training.torch_session import build_model
from parallelbench.world.world import World
from tests.ranks import run_ranks
from tests.strategies.test_parity import assert_equal
from tests.strategies.training import configure, drive, loader_of, one_device, prepared, summed

DATA = ["data=synthetic", "data.channels=1", "data.train_samples=96", "data.test_samples=37", "data.image_size=8"]
DEEP = [*DATA, "model=mlp", "model.hidden=[24,20,16,12,20,24,16]", "strategy=pipeline"]
SMALL = [*DATA, "model=mlp", "model.hidden=[24,20,16]", "strategy=pipeline", "devices=2", "strategy.micro_batches=4"]
CASES = {
    "gpipe": ("gpipe", 1, 8),
    "gpipe-1": ("gpipe", 1, 1),
    "1f1b": ("1f1b", 1, 8),
    "looped_bfs": ("looped_bfs", 2, 4),
    "interleaved_1f1b-1": ("interleaved_1f1b", 1, 4),
    "interleaved_1f1b-2": ("interleaved_1f1b", 2, 8),
    "interleaved_zero_bubble-1": ("interleaved_zero_bubble", 1, 8),
    "interleaved_zero_bubble-2": ("interleaved_zero_bubble", 2, 4),
    "zbv": ("zbv", 2, 8),
    "dualpipev": ("dualpipev", 2, 8),
}


def pipelined(case: str, devices: int, *overrides: str) -> RunConfig:
    schedule, stages, micro_batches = CASES[case]
    options = [f"schedule={schedule}", f"stages_per_rank={stages}", f"micro_batches={micro_batches}"]
    return configure(*DEEP, f"devices={devices}", *(f"strategy.{option}" for option in options), *overrides)


def train_all(rank: int, size: int, runs: list[RunConfig]) -> list[dict[str, Any]]:
    """What each run does in turn, the bytes that each step and each evaluation sends, and torch's order of the work."""
    results = []
    for run in runs:
        replica: Any = prepared(run, rank, size)
        result = drive(replica, run)
        replica.traffic.take()
        loader = loader_of(replica, run)
        replica.step(next(loader.train(epoch=2)))
        result["step_bytes"] = replica.traffic.take()
        replica.evaluate(loader.test())
        result["evaluation_bytes"] = replica.traffic.take()
        result["order"] = plain_order(replica._schedule.pipeline_order)
        results.append(result)
    return results


def plain_order(order: dict[int, list[Any]]) -> dict[int, list[tuple[int, str, int]]]:
    """Rank → its work in order: stage, kind, micro-batch.

    Kinds: F, I, W, or B for I and W together; with a + where the result leaves with that of the work after it.
    """

    def parts(action: Any) -> list[tuple[int, str, int]]:
        pair = action.sub_actions or (action,)
        kinds = [part.computation_type.value + "+" * (part is not pair[-1]) for part in pair]
        return [(part.stage_index, kind, part.microbatch_index) for part, kind in zip(pair, kinds, strict=True)]

    return {rank: [part for a in actions if a for part in parts(a)] for rank, actions in order.items()}


@pytest.fixture(scope="module", params=[2, 4])
def trained(request: pytest.FixtureRequest) -> tuple[int, dict[str, list[dict[str, Any]]]]:
    size = request.param
    runs = [pipelined(case, size) for case in CASES]
    ranks = run_ranks(train_all, size, Path(tempfile.mkdtemp()), runs)
    return size, {case: [rank[index] for rank in ranks] for index, case in enumerate(CASES)}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_schedule_trains_like_one_device(case: str, trained: Any) -> None:
    size, results = trained
    assert_equal(results[case], one_device(pipelined(case, size)), tolerance=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_bytes_are_those_of_the_values_between_stages(case: str, trained: Any) -> None:
    size, results = trained
    place = pipeline_of(pipelined(case, size)).stage_devices()
    cuts = widths_between(pipelined(case, size))
    forward, backward = [0] * size, [0] * size
    for stage, width in enumerate(cuts):
        if place[stage] != place[stage + 1]:
            forward[place[stage]] += width * 8
            backward[place[stage + 1]] += width * 8
    for rank in range(size):
        sent = results[case][rank]
        assert sent["step_bytes"]["activation_bytes_sent"] == 24 * (forward[rank] + backward[rank])
        assert sent["evaluation_bytes"]["activation_bytes_sent"] == 37 * forward[rank]
        assert sent["step_bytes"]["gradient_bytes_sent"] == sent["step_bytes"]["parameter_bytes_sent"] == 0


class Done:
    """The work of a send that has ended."""

    def wait(self) -> None:
        pass


def evaluate_in_step(rank: int, size: int, runs: list[RunConfig]) -> list[list[float] | None]:
    """What each run evaluates where a send lasts until it is received, as NCCL's may, and nothing overtakes it."""

    def send(value: torch.Tensor, to: int) -> Done:
        dist.send(value, to)  # gloo's ends when the receiver has asked for it
        return Done()

    results = []
    for run in runs:
        replica = prepared(run, rank, size)
        with patch.object(dist, "isend", send):
            evaluated = replica.evaluate(loader_of(replica, run).test())
        results.append(None if evaluated is None else evaluated.tolist())
    return results


@pytest.mark.cases("2")
@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_never_wait_for_each_other_in_evaluation(size: int, tmp_path: Path) -> None:
    runs = [pipelined(case, size) for case in ("gpipe", "looped_bfs", "interleaved_1f1b-2", "zbv")]
    ranks = run_ranks(evaluate_in_step, size, tmp_path, runs)
    replica = (alone := as_reference(runs[0])).strategy.prepare(build_model(alone), alone, World())
    expected = replica.evaluate(loader_of(replica, alone).test())
    assert expected is not None
    for results in zip(*ranks, strict=True):
        assert summed(list(results)) == pytest.approx(expected.tolist(), rel=1e-9)


def pipeline_of(run: RunConfig) -> Pipeline:
    assert isinstance(run.strategy, PipelineParallel)
    return run.strategy.pipeline(run)


def widths_between(run: RunConfig) -> list[int]:
    """Width of the values that leave each stage but the last."""
    from parallelbench.strategies.pipeline.partition import assign

    model = build_model(run)
    stages = list(assign(model, run, None, pipeline_of(run).stages).values())
    widths = [layer.linear.out_features for layer in model]  # type: ignore[union-attr]
    return [int(widths[i]) for i in range(len(widths) - 1) if stages[i] != stages[i + 1]]  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case != "gpipe-1"])
def test_torchs_schedules_idle_as_the_formulas_say(case: str, trained: Any) -> None:
    size, results = trained
    run = pipelined(case, size)
    order = results[case][0]["order"]
    if case == "1f1b":  # torch counts the last stage's forwards from 1 in this table, which only draws it
        order = {rank: _renumbered(actions) for rank, actions in order.items()}
    assert play(order, stages=pipeline_of(run).stages) == pytest.approx(run.strategy.bubble(run))


def _renumbered(actions: list[tuple[int, str, int]]) -> list[tuple[int, str, int]]:
    first = next(micro_batch for _, kind, micro_batch in actions if kind == "F")
    return [(stage, kind, micro - first if kind == "F" else micro) for stage, kind, micro in actions]


def play(order: dict[int, list[tuple[int, str, int]]], *, stages: int) -> float:
    """Largest idle share of a rank, where F, I and W last 1 each and messages take no time."""
    done: dict[tuple[int, str, int], int] = {}
    clock, begun, work = (dict.fromkeys(order, value) for value in (0, None, 0))
    waiting = {
        rank: [action for action in actions if action[1].rstrip("+") in "FIWB"] for rank, actions in order.items()
    }
    held: dict[int, set[tuple[int, str, int]]] = {rank: set() for rank in order}
    """Results that have not left their rank yet."""
    while any(waiting.values()):
        left = sum(map(len, waiting.values()))
        for rank, actions in waiting.items():
            while actions and (needs := _needs(actions[0], stages) - held[rank]) <= done.keys():
                stage, kind, micro_batch = actions.pop(0)
                start = max([clock[rank], *(done[need] for need in needs)])
                lasts = 2 if kind[0] == "B" else 1
                begun[rank] = start if begun[rank] is None else begun[rank]
                clock[rank], work[rank] = start + lasts, work[rank] + lasts
                held[rank].add((stage, "I" if kind[0] == "B" else kind[0], micro_batch))
                if not kind.endswith("+"):
                    done |= dict.fromkeys(held[rank], clock[rank])
                    held[rank].clear()
        assert sum(map(len, waiting.values())) < left, f"all wait: {waiting}"
    return max(1 - work[rank] / (clock[rank] - begun[rank]) for rank in order)


def _needs(action: tuple[int, str, int], stages: int) -> set[tuple[int, str, int]]:
    stage, kind, micro_batch = action
    if kind[0] == "F":
        return {(stage - 1, "F", micro_batch)} if stage else set()
    if kind[0] == "W":
        return {(stage, "I", micro_batch)}
    after = {(stage + 1, "I", micro_batch)} if stage < stages - 1 else set()
    return {(stage, "F", micro_batch), *after}


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "looped_bfs", "interleaved_1f1b", "zbv", "dualpipev"])
@pytest.mark.parametrize(("devices", "batch_size", "m"), [(2, 24, 7), (2, 25, 1), (3, 128, 2), (4, 18, 9), (4, 7, 3)])
def test_the_advised_number_of_micro_batches_is_accepted(schedule: str, devices: int, batch_size: int, m: int) -> None:
    stages = 2 if schedule in ("zbv", "dualpipev", "interleaved_1f1b", "looped_bfs") else 1
    options = [f"devices={devices}", f"batch_size={batch_size}", f"strategy.schedule={schedule}"]
    options += ["data.train_samples=256", "model.hidden=[8,8,8,8,8,8,8,8]", f"strategy.stages_per_rank={stages}"]
    message = ""
    try:
        configure(*DEEP, *options, f"strategy.micro_batches={m}")
    except ConfigError as error:
        message = str(error)
    advised = re.findall(r"choose strategy.micro_batches=(\d+)(?: or (\d+))?", message)
    assert advised or "choose strategy.micro_batches" not in message, message
    for number in filter(None, advised[0] if advised else ()):
        configure(*DEEP, *options, f"strategy.micro_batches={number}")


@pytest.mark.exhaustive
def test_a_whole_run_ends_well(tmp_path: Path) -> None:
    """As a user starts it, with the parity check before training and the bubble in the tables."""
    arguments = [*SMALL, "epochs=2", "batch_size=24", "device=cpu", "launcher.oversubscribe=true"]
    command = [sys.executable, "-m", "parallelbench.cli", "run", *arguments, f"results={tmp_path}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (folder,) = find_runs(tmp_path)
    (row,) = pq.read_table(folder.result / "run.parquet").to_pylist()
    assert (row["outcome"], row["parity_passed"]) == ("ok", True)
    assert row["theoretical_bubble"] == pytest.approx(1 / 5)
    ranks = pq.read_table(folder.result / "ranks.parquet").to_pylist()
    # Four steps of 24 samples in fp32, whatever the width of the one cut.
    sent = {row["activation_bytes_sent"] for row in ranks}
    assert len(sent) == 1, "as much forward from one rank as back from the other"
    size_bytes = sent.pop()
    assert size_bytes > 0
    assert size_bytes % (4 * 24 * 4) == 0
