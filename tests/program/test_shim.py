"""The shim itself, in this process: a scripted GPU, a full disk, its own faults, cores; the reader of its journals."""

from __future__ import annotations

import ast
import json
import os
import sys
from collections.abc import Iterator
from email.parser import HeaderParser
from importlib.metadata import EntryPoint, PathDistribution
from pathlib import Path
from typing import Any

import pytest
import torch

from parallelbench.frameworks.program.journals import Journal, Journals, Step
from parallelbench.frameworks.program.shim import parallelbench_shim as shim
from tests.helpers import fill_disk
from tests.program.shimmed import SHIM
from tests.scripted_cuda import ScriptedCuda

SOURCE = (SHIM / "parallelbench_shim.py").read_text("utf-8")


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> shim.Recorder:
    made = shim.Recorder(torch, str(tmp_path))
    monkeypatch.setattr(shim, "recorder", made)
    return made


@pytest.fixture
def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)])


backward = shim.around_backward(lambda **_: None)


def step(optimizer: torch.optim.Optimizer) -> None:
    """What the hooks see of one."""
    backward(accumulate_grad=True)
    shim.before_step(optimizer, (), {})
    shim.after_step(optimizer, (), {})


def read(folder: Path) -> Journal:
    (journal,) = Journals(folder).poll()
    return journal


def test_it_needs_nothing_but_an_old_python() -> None:
    tree = ast.parse(SOURCE, feature_version=(3, 8))
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names | {"torch"}
    at_once = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert "torch" not in ast.unparse(at_once)


def test_torch_finds_its_entry_point() -> None:
    (folder,) = SHIM.glob("*.dist-info")
    (entry,) = PathDistribution(folder).entry_points
    assert entry == EntryPoint("parallelbench_shim", f"parallelbench_shim:{shim.start.__name__}", "torch.backends")
    assert HeaderParser().parsestr((folder / "METADATA").read_text())["Name"] == "parallelbench-shim"


class Gpus(ScriptedCuda):
    """One that is in use, and one that is not."""

    capturing = False

    def is_initialized(self) -> bool:
        return True

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def device_count(self) -> int:
        return 2


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    scripted = Gpus()
    scripted.install(monkeypatch)
    for name in ("is_initialized", "is_current_stream_capturing", "device_count"):
        monkeypatch.setattr(torch.cuda, name, getattr(scripted, name))
    return scripted


def test_device_times_are_read_when_they_are_there_and_nobody_waits(
    gpus: Gpus, recorder: shim.Recorder, optimizer: torch.optim.Optimizer, tmp_path: Path
) -> None:
    for took_s in (1.0, 2.0, 3.0):
        gpus.launch(took_s)
        step(optimizer)
    gpus.now_s = 4.0  # the first two are done at 3 s, the third at 6 s
    recorder.due_ns = 0
    step(optimizer)
    assert read(tmp_path).device_ns == {2: 2_000_000_000}
    gpus.now_s = 7.0
    shim.finish()
    journal = read(tmp_path)
    assert journal.device_ns == {2: 2_000_000_000, 3: 3_000_000_000, 4: 0}
    assert not [call for call in gpus.calls if "synchronize" in call]


def test_calls_that_are_captured_are_no_steps(
    gpus: Gpus, recorder: shim.Recorder, optimizer: torch.optim.Optimizer, tmp_path: Path
) -> None:
    step(optimizer)
    gpus.capturing = True
    step(optimizer)
    gpus.capturing = False
    shim.finish()
    journal = read(tmp_path)
    assert journal.state is not None
    assert (len(journal.steps), journal.state.captured) == (1, 1)


def test_peaks_of_memory_are_of_gpus_in_use(
    gpus: Gpus, recorder: shim.Recorder, optimizer: torch.optim.Optimizer, tmp_path: Path
) -> None:
    device: Any = 1
    gpus.allocate(100, device)
    step(optimizer)
    state = read(tmp_path).state
    assert state is not None
    (memory,) = state.memory
    assert (memory.index, memory.uuid) == (1, "scripted")
    assert (memory.peak_allocated_bytes, memory.peak_reserved_bytes) == (100, 200)


def test_enough_is_said_at_once(
    optimizer: torch.optim.Optimizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(shim.ENOUGH, "3")
    monkeypatch.setattr(shim, "recorder", shim.Recorder(torch, str(tmp_path)))
    for number in range(1, 4):
        step(optimizer)
        assert read(tmp_path).enough == (number == 3)
    assert [step.number for step in read(tmp_path).steps] == [1, 2, 3]


def test_a_fault_of_its_own_never_reaches_the_program(
    recorder: shim.Recorder, optimizer: torch.optim.Optimizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step(optimizer)

    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("planted")

    with monkeypatch.context() as patched:
        for name in ("leave", "begin_backward", "end_backward", "fetch", "write"):
            patched.setattr(shim.Recorder, name, fail)
        step(optimizer)
        assert shim.around_next(next)(iter([5])) == 5
    shim.finish()
    state = read(tmp_path).state
    assert state is not None
    assert (state.faults, state.fault) == (4, "ZeroDivisionError: planted")


def test_after_many_faults_it_stops(
    recorder: shim.Recorder, optimizer: torch.optim.Optimizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(shim.Recorder, "leave")
    for _ in range(shim.MOST_FAULTS):
        step(optimizer)
    assert recorder.off


def test_without_its_folder_it_does_nothing(
    optimizer: torch.optim.Optimizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shim, "recorder", made := shim.Recorder(torch, str(tmp_path / "none")))
    step(optimizer)
    shim.finish()
    assert made.off
    assert not list(tmp_path.iterdir())


def test_a_full_disk_delays_the_journal_only(
    optimizer: torch.optim.Optimizer, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shim, "recorder", made := shim.Recorder(torch, str(small_disk)))
    step(optimizer)
    ballast = fill_disk(small_disk)
    for _ in range(100):
        made.due_ns = 0
        step(optimizer)
    journal = read(small_disk)
    assert len(journal.steps) < 101
    ballast.unlink()
    shim.finish()
    journal.read()
    assert [step.number for step in journal.steps] == list(range(1, 102))
    assert not journal.unreadable


def test_a_descriptor_that_the_program_took_is_not_written_to(
    recorder: shim.Recorder, optimizer: torch.optim.Optimizer, tmp_path: Path
) -> None:
    step(optimizer)
    assert recorder.file is not None
    os.close(recorder.file)
    with (tmp_path / "theirs").open("w") as theirs:
        assert theirs.fileno() == recorder.file
        step(optimizer)
        shim.finish()
        assert not (tmp_path / "theirs").stat().st_size
    assert len(read(tmp_path).steps) == 1


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, set[int]]]]:
    calls: list[tuple[int, set[int]]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, cores: calls.append((thread, cores)))
    monkeypatch.setattr(os, "listdir", lambda _: ["7"])
    for name in (shim.PINNED, "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    yield calls
    os.environ.pop(shim.PINNED, None)


@pytest.mark.parametrize(
    ("variables", "cores"),
    [
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, {2, 3}),
        ({}, None),  # torchrun itself
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, None),  # more ranks than were asked for
        ({shim.CORES: "4,5"}, {4, 5}),
        ({shim.CORES: "4,5", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, {4, 5}),
        ({shim.CORES: ""}, None),
        ({shim.PINNED: "2,3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, None),  # a child of a rank
    ],
)
def test_a_rank_takes_its_cores(
    pinned: list[tuple[int, set[int]]],
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    cores: set[int] | None,
) -> None:
    for name, value in {shim.CORES: "0,1;2,3", **variables}.items():
        monkeypatch.setenv(name, value)
    shim.pin()
    assert pinned == ([(7, cores)] if cores else [])


def test_a_journal_is_read_while_it_is_written(tmp_path: Path) -> None:
    journals = Journals(tmp_path)
    assert journals.poll() == []
    begin = {"version": 1, "node": "n", "pid": 3, "monotonic_ns": 10, "unix_ns": 2_000_000_010}
    with (tmp_path / "n-3.jsonl").open("w", buffering=1) as file:
        file.write(json.dumps({"begin": begin}) + '\n{"step":[1,20,0,1,0,5,0]}\n{"step":[2,3')
        file.flush()
        (journal,) = journals.poll()
        assert (journal.node, journal.pid, journal.ended) == ("n", 3, False)
        assert journal.steps == [Step(1, 20, 0, 1, 0, 5, 0)]
        assert journal.unix_s(20) == pytest.approx(2.00000002)
        file.write('0,1,1,0,5,0]}\nno JSON\n{"device":[2,9]}\n{"newer":1}\n')
        journals.poll()
        assert [step.ended_ns for step in journal.steps] == [20, 30]
        assert (journal.device_ns, journal.unreadable) == ({2: 9}, 1)
        file.write('{"void":2}\n{"step":[1,40,0,1,0,5,0]}\n{"enough":1}\n{"end":50}\n')
        journals.poll()
        assert [step.ended_ns for step in journal.steps] == [40]
        assert (journal.voided, journal.enough, journal.ended) == (2, True, True)
