"""What a submission does where sbatch gives no job; sbatch is a function of the test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from launch.launcher import SubmitOptions
from launch.slurm import record, scheduler, submit
from launch.slurm.record import Submission
from launch.slurm.scheduler import NoJob, SchedulerError, SubmissionError
from launch.sweep import expand
from tests.launch.fake_slurm import ON_SITE, FakeSlurm

TEXTS = {
    NoJob.REFUSED: [
        "Batch job submission failed: Invalid account or account/partition combination specified",
        "Batch job submission failed: Requested node configuration is not available",
    ],
    NoJob.LIMIT: [
        "QOSMaxSubmitJobPerUserLimit\nBatch job submission failed: Job violates accounting/QOS policy (job submit "
        "limit, user's size and/or time limits)",
        "AssocMaxSubmitJobLimit\nBatch job submission failed",
    ],
    NoJob.NOT_REACHED: ["Batch job submission failed: Unable to contact slurm controller (connect failure)"],
    NoJob.LOST: [
        "Batch job submission failed: Socket timed out on send/recv operation",
        "Batch job submission failed: Zero Bytes were transmitted or received",
        "Batch job submission failed: Unexpected message received",
        'Could not make sense of sbatch output ""',
        "QOSMaxSubmitJobPerUserLimit\nSocket timed out on send/recv operation",
    ],
}
Sbatch = Callable[[Path, Submission, object], str]


@pytest.mark.parametrize(("why", "text"), [(why, text) for why, texts in TEXTS.items() for text in texts])
def test_an_error_of_sbatch_has_one_meaning(why: NoJob, text: str) -> None:
    error = scheduler.refusal(RuntimeError(f"sbatch: error: {text}"))
    assert error.why is why
    assert " ".join(text.split()) in str(error)


def submitted(results: Path, monkeypatch: pytest.MonkeyPatch, sbatch: Sbatch, seeds: str = "0") -> list[Submission]:
    """Submits one run for each seed."""
    plan = expand([*ON_SITE, f"seed={seeds}", f"results={results}"])
    monkeypatch.setattr(submit, "sbatch", sbatch)
    return submit.submit([submit.prepare_for_site(planned) for planned in plan], SubmitOptions(), lambda _: None)


def test_under_a_limit_an_array_is_halved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake: FakeSlurm) -> None:
    sizes = []

    def sbatch(_: Path, submission: Submission, __: object) -> str:
        sizes.append(len(submission.tasks))
        if sizes[-1] > 2:
            raise SubmissionError("too many", NoJob.LIMIT)
        return str(len(sizes))

    assert len(submitted(tmp_path, monkeypatch, sbatch, "0,1,2,3,4")) == 3
    assert sizes == [5, 3, 2, 2, 1]


@pytest.mark.parametrize(
    ("why", "kept", "asked"),
    [
        (NoJob.REFUSED, False, ["squeue", "sacct"]),
        (NoJob.LIMIT, False, ["squeue", "sacct"]),
        (NoJob.NOT_REACHED, False, []),
        (NoJob.LOST, True, ["squeue", "sacct"]),
    ],
)
def test_a_record_is_withdrawn_unless_the_answer_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake: FakeSlurm, why: NoJob, kept: bool, asked: list[str]
) -> None:
    def sbatch(*_: object) -> str:
        fake.asked.clear()
        raise SubmissionError("sbatch: no", why)

    with pytest.raises(SchedulerError, match=r"^sbatch: no \(0 of 1 task\(s\) of this shape are submitted\)$"):
        submitted(tmp_path, monkeypatch, sbatch)
    assert fake.asked == asked
    (sweep,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert bool(record.submissions(sweep)) == kept


def test_a_job_whose_answer_was_lost_is_found_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake: FakeSlurm
) -> None:
    def sbatch(_: Path, submission: Submission, __: object) -> str:
        fake.answers["squeue"] = f"17|N/A|17|PENDING|None|N/A|{submission.name}\n"
        raise SubmissionError("sbatch: Socket timed out", NoJob.LOST)

    monkeypatch.setattr(submit.job, "leave_calls", lambda *_: None)
    (submission,) = submitted(tmp_path, monkeypatch, sbatch)
    assert submission.job == "17"
