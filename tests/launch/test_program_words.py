"""What a command line says of a program reaches the run as it was written; its sources are its own files."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from launch.sweep import expand
from launch.sweep.compose import Extension
from parallelbench.errors import ConfigError
from parallelbench.frameworks.program import Program, numbers
from parallelbench.frameworks.program.journals import Journal, Optimizer, State, Step
from parallelbench.frameworks.program.sources import sources_of
from parallelbench.frameworks.program.told import Told


def planned(*words: str) -> list[Program]:
    """The programs of the runs that are asked for."""
    found = [each.run.strategy for each in expand([*words, "device=cpu"])]
    assert all(isinstance(each, Program) for each in found)
    return found  # type: ignore[return-value]


@pytest.mark.parametrize(
    "command",
    [
        'bash -c "RANK=\\$SLURM_PROCID exec python train.py"',
        "python train.py --pattern 'a\\.b' --path C:\\\\data\\\\",
        'python train.py --json \'{{"lr": "\\"0.1\\""}}\' é',
        "source env.sh\npython train.py # two lines, a = b, [c]",
    ],
)
def test_a_command_is_the_same_line_of_shell(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (program,) = planned(f"program={command}")
    assert program.command == command


def test_values_of_own_names_are_no_word_one_or_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked = ["program=python train.py {flags}", "flags=[],--ddp,[--fsdp,--bf16]", "devices=1"]
    runs = [each.run for each in expand([*asked, "device=cpu"])]
    assert {numbers(run)["flags"] for run in runs} == {"", "--ddp", "--fsdp --bf16"}


def test_a_key_that_means_nothing_to_a_program_may_be_a_name_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = ["program=python train.py --dtype {precision} --opt {optimizer}", "precision=bf16,fp8", "optimizer=lion"]
    programs = planned(*asked, "devices=1")
    assert sorted(str(each.axes["precision"]) for each in programs) == ["bf16", "fp8"]
    assert {each.axes["optimizer"] for each in programs} == {"lion"}
    with pytest.raises(ConfigError, match=r"precision=bf16 means nothing.*\{precision\}"):
        planned("program=python train.py", "precision=bf16", "devices=1")


@pytest.mark.parametrize("quote", ["", '"', "'"])
def test_amounts_and_patterns_are_quoted_for_the_shell_alone(
    quote: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pattern, amount = r"loss[:=]\s*([0-9.]{1,9})", "{batch_size} * 4"
    given = [f"program.loss_pattern={quote}{pattern}{quote}", f"program.samples_per_step={quote}{amount}{quote}"]
    (program,) = planned("program=python train.py", "devices=1", *given)
    assert (program.loss_pattern, program.samples_per_step) == (pattern, amount)


def commit(folder: Path) -> None:
    """Make it a repository that has all its files."""
    who = ["-c", "user.name=me", "-c", "user.email=me@localhost", "-c", "commit.gpgsign=false"]
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "mine"]):
        subprocess.run(["git", *words], cwd=folder, check=True)


def test_each_edit_of_a_committed_file_is_another_program(tmp_path: Path) -> None:
    """Also of the first file that git names, of one that was moved, and of a repository within this one."""
    for name in ("train.py", "zoo/model.py", "lib/inner.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("import torch\n")
    commit(tmp_path / "lib")
    commit(tmp_path)
    seen = [sources_of(tmp_path).identity]
    for name in ("train.py", "zoo/model.py", "lib/inner.py"):
        for edit in ("a = 1\n", "a = 2\n"):
            (tmp_path / name).write_text(edit)
            seen.append(sources_of(tmp_path).identity)
    subprocess.run(["git", "mv", "zoo/model.py", "zoo/moved.py"], cwd=tmp_path, check=True)
    for edit in ("a = 3\n", "a = 4\n"):
        (tmp_path / "zoo" / "moved.py").write_text(edit)
        seen.append(sources_of(tmp_path).identity)
    assert len(set(seen)) == len(seen)


@pytest.mark.parametrize("in_git", [False, True])
def test_what_a_sweep_leaves_in_the_folder_is_no_source(tmp_path: Path, in_git: bool) -> None:
    """Scripts of jobs, and copies of code that a program writes to its attempt's folder."""
    (tmp_path / "train.py").write_text("import torch\n")
    if in_git:
        commit(tmp_path)
    before = sources_of(tmp_path)
    sweep = tmp_path / "results" / "mine"
    for name in ("submissions/1/1_submission.sh", "run/attempts/1/own/train.py"):
        (sweep / name).parent.mkdir(parents=True)
        (sweep / name).write_text("true\n")
    (sweep / "run" / "config.yaml").write_text("sweep_name: mine\n")
    assert sources_of(tmp_path) == before
    (tmp_path / "model.py").write_text("import torch\n")
    assert sources_of(tmp_path) != before


STEPS = [Step(number, number, 0, 1, 0, 0, number % 2) for number in range(24)]


def state(steps: int, collectives: int | None, *, optimizers: Sequence[Optimizer] = ()) -> State:
    """What a process says after so many steps."""
    none = ("monotonic_ns", "unix_ns", "grads", "own_ns", "captured", "other_optimizers", "faults")
    said: dict[str, Any] = dict.fromkeys(none, 0) | {"steps": steps, "backwards": steps, "collectives": collectives}
    said |= {"optimizers": list(optimizers), "loaders": [], "memory": [], "whole_graph": False, "fault": None}
    return State(**said)


def test_two_optimizers_of_one_class_with_a_backward_each_are_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    both = [Optimizer(number, "Adam", raw=12, outermost=12, marks=12, counted=12) for number in (0, 1)]
    both_step = state(24, None, optimizers=both)
    for words, is_told in (["program=python gan.py"], True), (["program=python gan.py", "program.optimizer=0"], False):
        (planned_run,) = expand([*words, "device=cpu", "devices=1"])
        told = Told(tmp_path / "steps")
        told._training = [Journal(tmp_path / "1.jsonl", steps=STEPS, state=both_step)]
        found = [line for line in told.warnings(planned_run.run, []) if "Adam 12, Adam 12" in line]
        assert bool(found) == is_told


def test_ranks_with_a_group_that_exchange_nothing_are_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (two,) = expand(["program=python train.py", "device=cpu", "devices=2"])
    for collectives, is_told in ((3, True), (12, False)):
        told = Told(tmp_path / "steps")
        told._training = [
            Journal(tmp_path / "1.jsonl", steps=STEPS, state=state(10, collectives), first_state=state(1, 3))
        ]
        found = [line for line in told.warnings(two.run, []) if "no collective" in line]
        assert bool(found) == is_told


def test_a_file_gives_the_keys_that_differ_and_the_command_line_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf" / "program").mkdir(parents=True)
    (tmp_path / "conf" / "program" / "few.yaml").write_text("name: few\ncommand: python train.py\nsteps: 20\n")
    asked = ["program=few", "program.steps=40", "program.windows=2,4", "program.loss_pattern=loss (.+)", "device=cpu"]
    found = [each.run.strategy for each in expand([*asked, "devices=1"], Extension(conf=tmp_path / "conf"))]
    assert sorted((each.steps, each.windows, each.loss_pattern) for each in found if isinstance(each, Program)) == [
        (40, windows, "loss (.+)") for windows in (2, 4)
    ]
