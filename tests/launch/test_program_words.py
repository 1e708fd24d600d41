"""What a command line says of a program reaches the run as it was written."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.sweep import expand
from parallelbench.frameworks.program import Program, numbers


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
