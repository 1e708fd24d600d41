"""Windows, load and losses of a program's steps; and what its processes say, held against what was asked for."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from launch.sweep.expansion import expand
from parallelbench.errors import ConfigError
from parallelbench.frameworks.program.child import Load, Spent
from parallelbench.frameworks.program.steps import Marks, Output, RankSteps, Window, between, curve, durations, windows
from parallelbench.frameworks.program.told import Told

if TYPE_CHECKING:
    from pathlib import Path
    from types import SimpleNamespace

    from parallelbench.config.run import RunConfig


def test_windows_lie_between_ends_of_steps() -> None:
    """Step 1 has no start; the warm-up ends with step 3; two windows of two steps; the eighth is left out."""
    assert windows(8, warmup=3, parts=2) == [Window(1, 3), Window(3, 5), Window(5, 7)]
    rank = RankSteps(ends_at=[10.0, 11.0, 12.0, 14.0, 17.0, 21.0, 26.0, 99.0])
    assert durations(rank, Window(3, 5)) == [2.0, 3.0]
    assert sum(durations(rank, Window(5, 7))) == 26.0 - 17.0
    assert Window(5, 7).steps == 2


def test_on_a_gpu_steps_take_what_the_gpu_says() -> None:
    """The host launches all at once; where one of a window is unknown, its own times count."""
    rank = RankSteps(ends_at=[0.0, 0.1, 0.2, 0.3, 9.0], device_s={2: 1.0, 3: 2.0, 4: 3.0})
    assert durations(rank, Window(1, 4)) == [1.0, 2.0, 3.0]
    assert durations(rank, Window(3, 5)) == [pytest.approx(0.1), pytest.approx(8.7)]


def test_processor_time_of_a_window_lies_on_the_line_between_looks() -> None:
    def look(at: float, busy: float, own: float, rank: float) -> Load:
        return Load(at, busy, own, {7: Spent(rank, None)})

    loads = [look(0, 0, 0, 0), look(10, 10, 4, 2), look(20, 30, 14, 12)]
    busy, own, of_each = between(loads, 5.0, 15.0)
    assert (busy, own, of_each) == (pytest.approx(20 - 5), pytest.approx(9 - 2), {7: pytest.approx(7 - 1)})
    assert between(loads, 5.0, 25.0) == (None, None, {}), "nobody looked after its end"
    assert between(loads[:1], 0.0, 0.0) == (None, None, {})
    unknown = [each._replace(busy_s=None) for each in loads]
    assert between(unknown, 5.0, 15.0)[0] is None


def test_processes_below_a_rank_are_its_own() -> None:
    spent = {pid: Spent(0.0, None, parent) for pid, parent in ((1, 0), (2, 1), (3, 2), (4, 1), (5, 3), (9, 8))}
    look = Load(0.0, None, 0.0, spent)
    assert [sorted(look.below(pid)) for pid in (1, 2, 5)] == [[2, 3, 4, 5], [3, 5], []]


def test_printed_losses_belong_to_the_step_that_ended_last() -> None:
    output = Output(step=r"^it", loss=r"loss ([\d.,]+)", rate=r"([\d,]+) tokens/s")
    lines = [(1.5, "it 1 loss 3.0"), (2.5, "it 2 loss 2.5, 1,200 tokens/s"), (3.5, "it 3"), (9.9, "loss nothing")]
    for at, line in lines:
        output.line(at, line)
    assert output.steps_at == [1.5, 2.5, 3.5]
    assert output.losses == [(1.5, 3.0), (2.5, 2.5)]
    assert output.rates == [(2.5, 1200.0)]
    rank = RankSteps(ends_at=[1.0, 2.0, 3.0])
    assert curve([(1.5, 9.0), (2.5, 8.0), (2.7, 7.0)], rank, Window(1, 3)) == [
        {"step": 1, "steps": 1, "train_loss": 7.0}
    ]


def test_last_words_are_the_last_exception() -> None:
    output = Output(step=None, loss=None, rate=None)
    launcher = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:"
    for line in ("[rank1]: ValueError: wrong shape", "", "torchrun: failed", launcher, "  root cause above"):
        output.line(0.0, line)
    assert output.last_words == "[rank1]: ValueError: wrong shape"
    output.line(0.0, "train.py: error: unrecognized arguments: --lr 0.1")
    output.line(0.0, launcher)
    assert output.last_words == "train.py: error: unrecognized arguments: --lr 0.1"


def test_marks_name_their_rank_or_none(tmp_path: Path) -> None:
    marks = Marks(tmp_path / "marks")
    assert marks.take() == []
    for text in ("\n", "1\nx 3\n", "2"):
        (tmp_path / "marks").open("a").write(text)
    assert marks.take() == [0, 1, 0]
    (tmp_path / "marks").open("a").write(" end\n")
    assert marks.take() == [2], "a line that came in two parts"
    marks.close()


# --- what processes say


def process(**facts: Any) -> dict[str, Any]:
    usual = {
        "rank": None,
        "world_size": None,
        "rank_from": "none",
        "local_rank": None,
        "backend": None,
        "device_types": ["cpu"],
        "steps_before": None,
        "threads": 1,
        "interop_threads": 1,
        "cores": [0],
        "executable": "python",
        "python": "3.11.2",
        "torch": "2.15.0",
        "cuda": None,
        "cudnn": None,
        "nccl": None,
        "packages": {},
        "omp_num_threads": "1",
        "cuda_visible_devices": "",
        "deterministic": False,
        "cudnn_deterministic": False,
        "cudnn_benchmark": False,
        "matmul_precision": "highest",
    }
    return usual | facts


def state(**sums: Any) -> dict[str, Any]:
    usual = {
        "monotonic_ns": 0,
        "unix_ns": 0,
        "steps": 4,
        "backwards": 4,
        "grads": 0,
        "own_ns": 0,
        "captured": 0,
        "whole_graph": False,
        "optimizers": [[0, "SGD", 4, 4, 4, 4]],
        "other_optimizers": 0,
        "loaders": [],
        "memory": [],
        "faults": 0,
        "fault": None,
    }
    return usual | sums


def loader(batch: int, batches: int, backwards: int) -> dict[str, Any]:
    return {
        "dataset": "D",
        "length": 100,
        "sampler": "BatchSampler",
        "batch_size": batch,
        "workers": 0,
        "batches": batches,
        "batches_without_grad": 0,
        "largest_batch": batch,
        "backwards": backwards,
    }


ON_ONE = {"index": 0, "uuid": "1f0c-11", "name": "A", "peak_allocated_bytes": 1, "peak_reserved_bytes": 1}


def told(folder: Path, *processes: tuple[dict[str, Any], dict[str, Any]]) -> Told:
    found = Told(folder / "steps")
    for pid, (facts, sums) in enumerate(processes, start=100):
        begin = {"version": 1, "node": "n", "pid": pid, "monotonic_ns": 0, "unix_ns": 10**18}
        lines: list[dict[str, Any]] = [{"begin": begin}, {"process": facts}]
        lines += [{"step": [number, number * 10**9, 0, 1, 0, 0, 0]} for number in range(1, 5)]
        lines.append({"state": sums})
        path = folder / "steps" / f"n-{pid}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found.poll()
    return found


def run(*overrides: str) -> RunConfig:
    (planned,) = expand(["program=python train.py", *overrides])
    return planned.run


def ranks(count: int, **more: Any) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    met = {"world_size": count, "rank_from": "distributed"}
    return [(process(rank=rank, local_rank=rank, **met), state(**more)) for rank in range(count)]


def on(device_type: str) -> SimpleNamespace:
    from types import SimpleNamespace

    return SimpleNamespace(device_type=device_type, gather=lambda value: [value])


def test_steps_that_changed_no_parameter_are_refused_and_those_of_one_rank_are_said(tmp_path: Path) -> None:
    def say(pid: int, changed: int) -> None:
        with (tmp_path / "steps" / f"n-{pid}.jsonl").open("a") as journal:
            journal.write(f'{{"changed":[1,4,{changed},6]}}\n')
        found.poll()

    found, two = told(tmp_path, *ranks(2)), run("devices=2")
    say(100, 0)
    found.require(two, on("cpu"), ranks_here=2)  # type: ignore[arg-type]  # the other one's could not be looked at
    say(101, 0)
    with pytest.raises(ConfigError, match="steps 2 to 4 changed no parameter"):
        found.require(two, on("cpu"), ranks_here=2)  # type: ignore[arg-type]
    say(101, 5)
    found.require(two, on("cpu"), ranks_here=2)  # type: ignore[arg-type]
    assert [line for line in found.warnings(two, found.ranks()) if "no parameter of 1 rank changed (rank 0)" in line]


def test_enough_steps_are_those_that_the_gpu_has_taken(tmp_path: Path) -> None:
    found = told(tmp_path, (process(device_types=["cuda"]), state()))
    with (tmp_path / "steps" / "n-100.jsonl").open("a") as journal:
        journal.write('{"device":[2,5000000]}\n{"device":[3,6000000]}\n')
    found.poll()
    assert (found.lags(3), found.lags(4)) == (False, True)
    assert found.ranks()[0].device_s == {2: 0.005, 3: 0.006}
    (line,) = (line for line in found.warnings(run("program.warmup_steps=2"), found.ranks()) if "GPUs" in line)
    assert "did not tell when they took each step" in line


def test_ranks_are_what_torch_distributed_says(tmp_path: Path) -> None:
    found = told(tmp_path, *reversed(ranks(2)))
    assert [rank.rank for rank in found.ranks()] == [0, 1]
    assert found.ranks()[0].ends_at == [10**9 + second for second in (1, 2, 3, 4)]
    found.require(run("devices=2"), on("cpu"), ranks_here=2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("processes", "asked", "device_type", "said"),
    [
        (ranks(1), 2, "cpu", "1 process trained, but devices=2"),
        (ranks(2), 1, "cpu", "2 processes trained, but devices=1"),
        ([(process(), state())] * 2, 2, "cpu", "each for itself: 2 ranks never called torch.distributed"),
        ([(process(rank=0, world_size=2, rank_from="environment"), state())] * 2, 2, "cpu", "each for itself"),
        ([(process(rank=0, world_size=1, rank_from="distributed"), state())] * 2, 2, "cpu", "in a group of 1 ranks"),
        ([ranks(2)[0]] * 2, 2, "cpu", "several are the same one"),
        ([(process(steps_before=1200), state())], 1, "cpu", "had taken 1,200 steps before"),
        (ranks(2), 2, "cuda", "0 GPUs held tensors of the program, but devices=2"),
        (
            ranks(2, memory=[ON_ONE]),
            2,
            "cuda",
            "1 GPU held tensors of the program, but devices=2",
        ),
    ],
)  # fmt: skip
def test_a_program_that_trained_otherwise_than_asked_is_refused(
    processes: Any, asked: int, device_type: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        told(tmp_path, *processes).require(run(f"devices={asked}"), on(device_type), ranks_here=asked)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sums", "samples"),
    [
        ({"loaders": [loader(64, 4, 4)]}, 128),
        ({"loaders": [loader(16, 16, 16)], "backwards": 16}, 128),  # four batches are accumulated in each step
        ({"loaders": [loader(64, 4, 4), loader(7, 90, 1)]}, 128),  # one is only evaluated
        ({}, None),
    ],
)
def test_samples_per_step_are_what_the_loaders_gave(sums: Any, samples: int | None, tmp_path: Path) -> None:
    found = told(tmp_path, *ranks(2, **sums))
    assert found.loader_samples(nodes=1) == samples
    assert found.loader_samples(nodes=2) == (samples and 2 * samples)


@pytest.mark.parametrize(
    ("sums", "said"),
    [
        ({}, []),
        ({"backwards": 0}, ["no backward pass was seen"]),
        ({"optimizers": [[0, "Adam", 4, 4, 4, 4], [1, "SGD", 4, 4, 4, 4]]}, ["several optimizers update"]),
        ({"captured": 3}, ["some updates are in a CUDA graph"]),
        ({"faults": 1, "fault": "KeyError: 1"}, ["KeyError: 1"]),
    ],
)
def test_what_a_reader_must_know_of_its_steps_is_said(sums: Any, said: list[str], tmp_path: Path) -> None:
    found = told(tmp_path, *ranks(2, **sums))
    lines = list(found.warnings(run("devices=2"), found.ranks()))
    assert len(lines) == len(said), lines
    assert all(part in line for part, line in zip(said, lines, strict=True))
