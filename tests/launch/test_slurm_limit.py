"""One time limit for every command of Slurm's, seen with programs that hang."""

from __future__ import annotations

import io
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from launch.launcher import SubmitOptions
from launch.slurm import launcher, record, scheduler, submit
from launch.slurm.launcher import OnSlurm
from launch.sweep.compose import Extension
from tests.faults import fault
from tests.helpers import TINY
from tests.launch.fake_slurm import MISSING, ON_SITE, SINFO, prepared


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
    items = prepared(tmp_path / "results", f"seed={seeds}")
    with pytest.raises(scheduler.SchedulerError, match=r"^sbatch gave no answer within 3 s"):
        submit.submit(items, SubmitOptions(), lambda _: None)
    sweep = items[0].planned.run.sweep_folder
    (kept,) = record.submissions(sweep)
    assert (kept.job, len(kept.tasks)) == (None, len(items))
    with record.lock(sweep):
        pass  # nobody holds it any more


def test_of_slurms_several_lines_the_one_that_ended_it_is_told(programs: Path) -> None:
    lines = "sinfo: error: no DNS", "sinfo: error: no server", "sinfo: fatal: no configuration"
    _write(programs / "sinfo", "\n".join(f"echo '{line}' >&2" for line in lines) + "\nexit 1")
    with pytest.raises(scheduler.SchedulerError, match=r"^sinfo: fatal: no configuration \(and 2 lines more\)$"):
        scheduler.tell(["sinfo"])


@pytest.mark.cases("hangs", "busy", "unknown_option")
@fault(
    "submission",
    "sbatch --test-only gives no answer, or none that says anything",
    injection="an sbatch whose test hangs, says that nodes are busy, or does not know the option",
    outcome="a note of `plan` and `doctor`; submit goes on, and sbatch decides; one that did not say is asked once",
)
@pytest.mark.parametrize(
    ("does", "said", "asked"),
    [
        ("exec sleep 600", "did not say whether it takes such jobs: sbatch gave no answer within 3 s", 1),
        ("echo 'sbatch: error: allocation failure: Requested nodes are busy' >&2; exit 1", "busy: jobs wait", 2),
        ("echo \"sbatch: unrecognized option '--test-only'\" >&2; exit 1", "did not say whether it takes such", 1),
        ("echo 'usage: sbatch SCRIPT'; exit 2", "did not say whether it takes such", 1),
        ("echo 'allocation failure: Socket timed out on send/recv operation' >&2; exit 1", "did not say", 1),
        ("echo 'sbatch: fork: Resource temporarily unavailable'; exit 1", "did not say", 1),
    ],
    ids=["hangs", "busy", "unknown_option", "usage", "lost", "fork"],
)
def test_a_test_that_does_not_refuse_is_in_nobodys_way(
    programs: Path, tmp_path: Path, does: str, said: str, asked: int
) -> None:
    _write(programs / "sbatch", f'echo "$1" >> {programs}/asked\n[[ $1 != --test-only ]] || {{ {does}; }}')
    with (programs / "sbatch").open("a") as program:
        program.write("echo Submitted batch job $$\n")
    _write(programs / "sinfo", f"echo '{SINFO.strip()}'")

    def tests() -> int:
        lines = (programs / "asked").read_text().splitlines()
        (programs / "asked").unlink()
        return lines.count("--test-only")

    overrides = [*ON_SITE, f"results={tmp_path / 'results'}"]
    items = prepared(tmp_path / "results", "strategy=ddp", "devices=1,2", "site.memory_gib_per_device=1")
    console = Console(width=1000, file=io.StringIO())
    assert OnSlurm().show_plan(items, [MISSING] * 2, console)[0]
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert (text.count(said), text.count("#SBATCH --job-name"), tests()) == (2, 2, asked)
    assert len(submit.submit(items, SubmitOptions(), lambda _: None)) == 2
    assert tests() == asked
    rows = dict(launcher.site_findings(overrides, Extension()))
    assert [said in row for row in rows.values()] == [True, True]
    assert tests() == asked


@pytest.mark.parametrize(("pipe", "code"), [("| head -1", 0), ("| true", 0)])
def test_a_reader_that_leaves_early_stops_no_submission(pipe: str, code: int, programs: Path, tmp_path: Path) -> None:
    _write(programs / "sbatch", "[[ $1 == --test-only ]] && exit\necho Submitted batch job $$")
    _write(programs / "sinfo", f"echo '{SINFO.strip()}'")
    two = ["strategy=ddp", "devices=1,2", "site.memory_gib_per_device=1", "sweep.repeats=2"]
    command = [
        sys.executable,
        "-m",
        "parallelbench.cli",
        "submit",
        *TINY,
        *ON_SITE,
        f"results={tmp_path}/results",
        *two,
    ]
    line = f"{shlex.join(command)} {pipe}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (code, "")
    kept = record.submissions(tmp_path / "results" / "adhoc")
    assert [each.job is not None for each in kept] == [True] * 4
