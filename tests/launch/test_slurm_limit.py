"""One time limit for every command of Slurm's, seen with programs that hang."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launch.launcher import SubmitOptions
from launch.slurm import record, scheduler, submit
from launch.sweep import expand
from tests.launch.fake_slurm import ON_SITE


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Programs named like Slurm's that answer nothing; each start of one leaves a line in `starts`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sbatch", "srun", "squeue", "sacct", "scontrol", "sinfo"):
        _write(folder / name, "true")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(scheduler, "TIMEOUT_S", 3.0)
    return folder


def _write(program: Path, does: str) -> None:
    program.write_text(f"#!/bin/bash\necho {program.name} >> {program.parent}/starts\n{does}\n")
    program.chmod(0o755)


def test_a_query_that_hangs_is_asked_once(programs: Path) -> None:
    _write(programs / "squeue", "exec sleep 600")
    with pytest.raises(scheduler.SchedulerError, match=r"^squeue gave no answer within 3 s"):
        scheduler.queue(patient=True)
    assert (programs / "starts").read_text().split() == ["squeue"]


@pytest.mark.parametrize("seeds", ["0", "0,1"])
def test_an_sbatch_that_hangs_is_ended_and_its_record_kept(programs: Path, tmp_path: Path, seeds: str) -> None:
    """Its job may exist: the next submit looks for it by its name. As one job, and as an array."""
    _write(programs / "sbatch", "[[ $1 == --test-only ]] && exit\nsleep 600\necho Submitted batch job 7")
    plan = expand([*ON_SITE, f"seed={seeds}", f"results={tmp_path / 'results'}"])
    prepared = [submit.prepare_for_site(planned) for planned in plan]
    with pytest.raises(scheduler.SchedulerError, match=r"^sbatch gave no answer within 3 s"):
        submit.submit(prepared, SubmitOptions(), lambda _: None)
    sweep = prepared[0].planned.run.sweep_folder
    (kept,) = record.submissions(sweep)
    assert (kept.job, len(kept.tasks)) == (None, len(prepared))
    with record.lock(sweep):
        pass  # nobody holds it any more


def test_of_slurms_several_lines_the_one_that_ended_it_is_told(programs: Path) -> None:
    lines = "sinfo: error: no DNS", "sinfo: error: no server", "sinfo: fatal: no configuration"
    _write(programs / "sinfo", "\n".join(f"echo '{line}' >&2" for line in lines) + "\nexit 1")
    with pytest.raises(scheduler.SchedulerError, match=r"^sinfo: fatal: no configuration \(and 2 lines more\)$"):
        scheduler.tell(["sinfo"])
