"""`cancel` of whole sweeps and of single runs, also on a full disk; scancel is a list of the test's."""

from __future__ import annotations

import io
import time
from pathlib import Path

import pytest
from rich.console import Console

from launch.slurm import launcher, record
from launch.slurm.record import Submission
from parallelbench import cli
from parallelbench.errors import StorageError
from parallelbench.results.folder import RunFolder
from tests.launch.fake_slurm import FakeSlurm, submission


@pytest.fixture
def sweep(tmp_path: Path, fake: FakeSlurm) -> Path:
    """An array of the runs a, b and c, of which a and b are in the queue, and the job of a packed pair d and e."""
    folder = tmp_path / "sweep"
    array, packed = submission(job="5", tasks=[["a"], ["b"], ["c"]]), submission(job="6", tasks=[["d", "e"]])
    for each in (array, packed):
        record.write(folder, each)
    for name in "abcde":
        (folder / name).mkdir()
        (folder / name / "config.yaml").touch()
    fake.answers["squeue"] = queue(array, packed)
    return folder


def queue(array: Submission, packed: Submission) -> str:
    return (
        f"5|0|7|RUNNING|n1|N/A|{array.name}\n5|1|8|PENDING|None|N/A|{array.name}\n"
        f"N/A|N/A|6|PENDING|None|N/A|{packed.name}\n"
    )


def test_runs_of_a_sweep_are_cancelled_by_one_command(
    sweep: Path, told: list[list[str]], fake: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    RunFolder(sweep / "b").claim()
    assert cli.main(["cancel", str(sweep / "b")]) == 0
    text = capsys.readouterr().out
    assert "1 job cancelled; submitting again starts the missing runs: 1 run starts over" in text
    fake.asked.clear()
    assert cli.main(["cancel", *(str(sweep / name) for name in "abc")]) == 0
    assert told == [["scancel", "5_1"], ["scancel", "5_0", "5_1"]], "not the other tasks of its array"
    assert fake.asked == ["squeue"]
    assert "c has no job in the queue\n2 jobs cancelled" in capsys.readouterr().out


def test_sweeps_and_runs_are_named_together(sweep: Path, told: list[list[str]], tmp_path: Path) -> None:
    other = tmp_path / "other"
    record.write(other, submission(job="9", tasks=[["x"]]))
    assert cli.main(["cancel", str(other), str(sweep / "a")]) == 0
    assert told == [["scancel", "5_0"]], "nothing of the other sweep is in the queue"


def test_a_run_whose_job_is_not_known_yet_is_to_be_cancelled_again(
    sweep: Path, told: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    record.write(sweep, submission(tasks=[["c"]], created_at=time.time()))
    assert cli.main(["cancel", str(sweep / "c")]) == 0
    assert told == []
    assert "not known yet whether Slurm has a job of c: cancel again in a minute" in capsys.readouterr().out


def test_a_job_that_works_on_other_runs_is_not_ended_for_one(
    sweep: Path, told: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """The command that is printed instead can be copied."""
    spaced = sweep.rename(sweep.with_name("two words"))
    assert cli.main(["cancel", str(spaced / "d")]) == 2
    assert told == []
    text = capsys.readouterr().err
    assert text.startswith("parallelbench: the job 6 of d works on 1 other run as well (launcher.pack=true): ")
    assert f"`parallelbench cancel '{spaced}'` ends it" in text
    spaced.chmod(0o777)
    assert cli.main(["cancel", str(spaced)]) == 2
    assert f"chmod go-w '{spaced}'" in capsys.readouterr().err


def test_a_run_that_was_never_queued_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "sweep" / "a"
    run.mkdir(parents=True)
    (run / "config.yaml").touch()
    assert cli.main(["cancel", str(run)]) == 2
    assert "was not queued: what trains here ends with Ctrl-C" in capsys.readouterr().err


@pytest.mark.parametrize("fails", ["lock", "record"])
def test_jobs_end_on_a_full_disk(
    sweep: Path, told: list[list[str]], fails: str, monkeypatch: pytest.MonkeyPatch, fake: FakeSlurm
) -> None:
    """Neither the lock can be written, nor the id of a job whose answer was lost."""
    lost = submission(tasks=[["f"]])
    record.write(sweep, lost)
    fake.answers["squeue"] += f"N/A|N/A|11|PENDING|None|N/A|{lost.name}\n"

    def full(*_: object) -> None:
        raise StorageError("can't write: no space is left")

    monkeypatch.setattr(record, *(("_take", full) if fails == "lock" else ("write", full)))
    text = io.StringIO()
    launcher.cancel_sweeps([sweep], Console(file=text, width=200))
    assert told == [["scancel", "5", "6", "11"]]
    assert "4 jobs cancelled" in text.getvalue()
    launcher.cancel_runs([RunFolder(sweep / "a")], Console(file=text, width=200))
    assert told[1:] == [["scancel", "5_0"]]
