"""What a submission does where sbatch gives no job; sbatch is a function of the test."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from submitit.core.utils import FailedSubmissionError

from launch.launcher import SubmitOptions
from launch.slurm import order, record, scheduler, submit
from launch.slurm.order import Turn
from launch.slurm.record import Submission
from launch.slurm.sbatch import JobGroup
from launch.slurm.scheduler import NoJob, SchedulerError, SubmissionError
from launch.slurm.submit import Intents, remove_intent
from parallelbench import cli
from parallelbench.config.run import RunConfig
from parallelbench.errors import ConfigError, StorageError
from parallelbench.results.folder import RunFolder, find_runs
from tests.analysis.factory import published
from tests.faults import fault
from tests.launch.fake_slurm import DONE, MISSING, SINFO, FakeSlurm, prepared, programs

TEXTS = {
    NoJob.REFUSED: ["Batch job submission failed: Invalid account or account/partition combination specified"],
    NoJob.NO_NODES: ["Batch job submission failed: Requested node configuration is not available"],
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
    error = scheduler.refusal(f"sbatch: error: {text}")
    assert error.why is why
    assert " ".join(text.split()) in str(error)


def submitted(
    results: Path, monkeypatch: pytest.MonkeyPatch, sbatch: Sbatch, seeds: str = "0", options: Sequence[str] = ()
) -> list[Submission]:
    """Submits one run for each seed."""
    monkeypatch.setattr(submit, "sbatch", sbatch)
    return submit.submit(prepared(results, f"seed={seeds}", *options), SubmitOptions(), lambda _: None)


def test_under_a_limit_an_array_is_halved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake: FakeSlurm) -> None:
    sizes = []

    def sbatch(_: Path, submission: Submission, __: object) -> str:
        sizes.append(len(submission.tasks))
        if sizes[-1] > 2:
            raise SubmissionError("too many", NoJob.LIMIT)
        return str(len(sizes))

    assert len(submitted(tmp_path, monkeypatch, sbatch, "0,1,2,3,4")) == 3
    assert sizes == [5, 3, 2, 2, 1]


def test_a_submission_prints_the_notes_of_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake: FakeSlurm
) -> None:
    fake.answers["sinfo"] = SINFO.replace("|up|", "|down|")
    said: list[str] = []
    monkeypatch.setattr(submit, "sbatch", lambda *_: "17")
    submit.submit(prepared(tmp_path), SubmitOptions(), said.append)
    assert said[0] == "note: the partition normal is down: jobs wait until it is up"


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

    with pytest.raises(SchedulerError, match=r"^sbatch: no \(0 of 1 task of this shape submitted\)$"):
        submitted(tmp_path, monkeypatch, sbatch)
    assert fake.asked == asked
    (sweep,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert bool(record.submissions(sweep)) == kept
    assert bool(find_runs(sweep)) == kept, "a run without a job is not left behind as missing"


def test_a_job_whose_answer_was_lost_is_found_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake: FakeSlurm
) -> None:
    def sbatch(_: Path, submission: Submission, __: object) -> str:
        fake.answers["squeue"] = f"17|N/A|17|PENDING|None|N/A|{submission.name}\n"
        raise SubmissionError("sbatch: Socket timed out", NoJob.LOST)

    monkeypatch.setattr(submit.job, "leave_calls", lambda *_: None)
    (submission,) = submitted(tmp_path, monkeypatch, sbatch)
    assert submission.job == "17"


def never(*_: object) -> str:
    raise AssertionError("sbatch was called")


@fault(
    "submission",
    "Slurm refuses a job, or would take it and never start it",
    injection="sbatch --test-only refuses; a partition of 30 minutes, which Slurm takes an hour's job for",
    outcome="Slurm's own words, or the limit, before anything is written",
)
@pytest.mark.parametrize(
    ("said", "options", "text"),
    [
        ("", ["launcher.time_limit_min=60"], "launcher.time_limit_min=60, but normal allows 30"),
        ("Invalid account or account/partition", ["launcher.time_limit_min=5"], "sbatch: .*Invalid account.*site.acc"),
        ("Invalid partition name specified", ["site.partition=gone"], "sbatch: .*Invalid partition name specified"),
    ],
)
def test_what_never_runs_is_not_submitted_and_leaves_no_folder(
    said: str, options: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake: FakeSlurm
) -> None:
    asked: list[str] = []

    def ask(command: list[str], *, script: str = "", **_: object) -> str:
        asked.append(script)
        if said and command == ["sbatch", "--test-only"]:
            raise scheduler.refusal(f"allocation failure: {said}")
        return fake.ask(command)

    fake.answers["sinfo"] = SINFO.replace("infinite", "30:00")
    monkeypatch.setattr(scheduler, "ask", ask)
    with pytest.raises(ConfigError, match=rf"^refused by the cluster, nothing was submitted: {text}"):
        submitted(tmp_path, monkeypatch, never, seeds="0,1,2", options=options)
    assert not list(tmp_path.iterdir())
    assert len(list(filter(None, asked))) == 1, "one question for each shape"


def test_without_an_answer_nothing_is_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake: FakeSlurm
) -> None:
    def deaf(command: list[str], **_: object) -> str:
        raise SchedulerError(f"{command[0]} gave no answer within 30 s: run the same command later")

    monkeypatch.setattr(scheduler, "ask", deaf)
    with pytest.raises(SchedulerError, match="gave no answer within 30 s"):
        submitted(tmp_path, monkeypatch, never)
    assert not list(tmp_path.iterdir())


def test_an_account_that_can_not_be_looked_up_is_left_to_sbatch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake: FakeSlurm
) -> None:
    def without_database(command: list[str], **options: object) -> str:
        if command[0] == "sacctmgr":
            raise SchedulerError("sacctmgr: Unable to contact slurmdbd")
        return fake.ask(command, **options)

    fake.answers |= {
        "sinfo": SINFO.replace("infinite", "30:00"),
        "scontrol": "AccountingStorageEnforce = limits\nMaxArraySize = 9\n",
    }
    monkeypatch.setattr(scheduler, "ask", without_database)
    options = ["launcher.time_limit_min=5"]
    assert len(submitted(tmp_path, monkeypatch, lambda *_: "17", options=options)) == 1


def test_a_result_that_was_to_be_measured_anew_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake: FakeSlurm
) -> None:
    """Its folder moves to .forgotten before sbatch is asked; where that refuses, it is there again."""
    (item,) = prepared(tmp_path)
    item.write_intent()
    (item.folder.path / "result").mkdir()
    monkeypatch.setattr(RunFolder, "_state", lambda self: DONE if self.result.exists() else MISSING)
    intents = Intents()
    intents.write([replace(item, found=DONE)])
    assert not item.folder.result.exists()
    intents.take_back()
    assert item.folder.result.exists()
    assert not list((tmp_path / "adhoc" / ".forgotten").iterdir())


@fault(
    "submission",
    "A run's result comes in while a submission prepares its job",
    injection="the result is published between the choice of the runs and their array",
    outcome="it stays where it is, and is not measured again",
)
@pytest.mark.parametrize("in_time", [1, 2])
def test_a_result_that_comes_in_meanwhile_stays(
    in_time: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake: FakeSlurm
) -> None:
    items = prepared(tmp_path, "seed=0,1")
    said: list[str] = []

    def in_turns(groups: Sequence[JobGroup]) -> list[Turn]:
        for item in items[:in_time]:
            published(item.planned.run)
        return order.in_turns(groups)

    monkeypatch.setattr(submit, "in_turns", in_turns)
    monkeypatch.setattr(submit, "sbatch", lambda *_: "17")
    done = submit.submit(items, SubmitOptions(retry=frozenset({"parity_failed"})), said.append)
    assert [item.folder.state().label for item in items] == ["ok"] * in_time + ["missing"] * (2 - in_time)
    assert not (tmp_path / "adhoc" / ".forgotten").exists()
    assert [each.tasks for each in done] == [[[item.folder.path.name]] for item in items[in_time:]]
    assert any("whose result has come in meanwhile" in line for line in said)


def test_only_what_a_submission_made_is_taken_back(tmp_path: Path) -> None:
    first, second = prepared(tmp_path, "seed=0,1")
    first.write_intent()
    intents = Intents()
    intents.write([first, second])
    (second.folder.path / "attempts" / "1").mkdir(parents=True)  # somebody else has begun it meanwhile
    intents.take_back()
    assert (first.folder.path / "config.yaml").exists()
    assert (second.folder.path / "config.yaml").exists()


def full(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The disk is full when this run's intent is written."""
    write = RunFolder.write_intent

    def write_intent(self: RunFolder, run: RunConfig, overrides: list[str]) -> None:
        if self.path.name == name:
            self.path.mkdir(parents=True)
            raise StorageError("can't write: the disk is full")
        write(self, run, overrides)

    monkeypatch.setattr(RunFolder, "write_intent", write_intent)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_run_that_is_begun_while_its_intent_is_removed_stays_whole(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its folder gets another name, or after that: then its configuration comes to where it began."""
    (item,) = prepared(tmp_path)
    run = item.folder
    run.write_intent(item.planned.run, item.planned.recorded)
    rename, renamed = os.rename, []

    def begun(source: Path, target: Path) -> None:
        first = not renamed and source == run.path
        if first and when == "before":
            (run.path / "attempts" / "1").mkdir(parents=True)
        rename(source, target)
        renamed.append(source)
        if first and when == "after":
            (run.path / "attempts" / "1").mkdir(parents=True)

    monkeypatch.setattr(submit.os, "rename", begun)
    remove_intent(run)
    monkeypatch.undo()
    assert sorted(os.listdir(run.path)) == ["attempts", "config.yaml", "overrides.txt"]
    assert os.listdir(run.path / "attempts") == ["1"]
    assert os.listdir(tmp_path / "adhoc") == [run.path.name]


def test_the_intent_behind_a_link_is_left_alone(tmp_path: Path) -> None:
    (item,) = prepared(tmp_path / "archive")
    item.folder.write_intent(item.planned.run, item.planned.recorded)
    link = RunFolder(tmp_path / "link")
    link.path.symlink_to(item.folder.path)
    remove_intent(link)
    assert (link.path / "config.yaml").exists()


def test_a_disk_that_fills_up_while_runs_are_written_leaves_none_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake: FakeSlurm
) -> None:
    last = prepared(tmp_path, "seed=2")[0].folder.path
    full(monkeypatch, last.name)
    with pytest.raises(StorageError, match="disk is full"):
        submitted(tmp_path, monkeypatch, never, "0,1,2")
    assert [path.name for path in last.parent.iterdir()] == [record.FOLDER]
    assert not record.submissions(last.parent)


def test_a_result_comes_back_where_its_new_intent_can_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (item,) = prepared(tmp_path)
    item.write_intent()
    (item.folder.path / "result").mkdir()
    monkeypatch.setattr(RunFolder, "_state", lambda self: DONE if self.result.exists() else MISSING)
    full(monkeypatch, item.folder.path.name)
    with pytest.raises(StorageError):
        Intents().write([replace(item, found=DONE)])
    assert item.folder.result.exists()


def test_without_srun_nothing_is_submitted_and_no_run_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake: FakeSlurm
) -> None:
    """Nor would submitit submit, which raises an error of its own."""
    assert shutil.which("srun") is None
    with pytest.raises(SchedulerError, match=r"^there is no srun here: run this on the cluster's login node"):
        submitted(tmp_path, monkeypatch, submit.sbatch)
    assert not list((tmp_path / "adhoc" / record.FOLDER).glob("*/*"))


@pytest.mark.parametrize("fails", ["record", "calls"])
def test_what_can_not_be_written_for_sbatch_leaves_no_run(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake: FakeSlurm
) -> None:
    """Neither the record of the submission, nor what submitit writes before it calls sbatch."""
    programs(tmp_path / "bin", monkeypatch, srun="")  # submitit looks for it
    sbatch: Sbatch = submit.sbatch if fails == "calls" else never

    def no_space(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if fails == "calls":
        monkeypatch.setattr("submitit.core.utils.DelayedSubmission.dump", no_space)
    else:
        monkeypatch.setattr(record.os, "fsync", no_space)
        monkeypatch.setattr(RunFolder, "write_intent", lambda self, *_: self.path.mkdir(parents=True))
    with pytest.raises(SchedulerError, match=r"the disk is full.*\(0 of 1 task"):
        submitted(tmp_path, monkeypatch, sbatch)
    sweep = tmp_path / "adhoc"
    assert not list((sweep / record.FOLDER).glob("*/*"))
    assert not [path for path in sweep.iterdir() if path.name != record.FOLDER]


@fault(
    "submission",
    "A site's script in the place of sbatch prints lines of its own",
    injection="an sbatch that says 'Checking limits: job 1 of 64' before Slurm's answer, and thanks after it",
    outcome="the record and the calls of the jobs have the number that Slurm gave",
)
@pytest.mark.parametrize(("seeds", "calls"), [("0", ["4711"]), ("0,1", ["4711_0", "4711_1"])])
def test_the_number_of_a_job_is_read_from_slurms_own_line(
    seeds: str, calls: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake: FakeSlurm
) -> None:
    said = "Checking limits: job 1 of 64", "Submitted batch job 4711", "Thanks for job 2"
    programs(tmp_path, monkeypatch, sbatch="\n".join(f"echo {line}" for line in said), srun="")
    (done,) = submitted(tmp_path, monkeypatch, submit.sbatch, seeds)
    assert done.job == "4711"
    pickles = record.folder_of(tmp_path / "adhoc", done.token).glob("*_submitted.pkl")
    assert sorted(path.name for path in pickles) == [f"{call}_submitted.pkl" for call in calls]


def test_an_answer_without_slurms_line_is_a_lost_one() -> None:
    with pytest.raises(FailedSubmissionError) as error:
        submit.job_in("job 1 of 64")
    assert scheduler.refusal(str(error.value)).why is NoJob.LOST, "so that the job is looked for by its name"


@fault(
    "submission",
    "A sweep's folder is renamed while its jobs wait",
    injection="the folder has another name when the run's logs are asked for",
    outcome="logs names the folder that the job looks for, and what to do",
)
def test_a_queued_job_whose_sweep_was_renamed_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    programs(tmp_path, monkeypatch, **dict.fromkeys(("sbatch", "srun"), "echo Submitted batch job 17"))
    results = tmp_path / "some results"
    submit.submit(prepared(Path(f"'{results}'"), "sweep.name=before"), SubmitOptions(), lambda _: None)
    for name, said in (
        ("before", "the run has not begun"),
        ("after", f"looks for {results / 'before'}; rename it back"),
    ):
        (results / "before").rename(results / name)
        (run,) = find_runs(results)
        assert cli.main(["logs", str(run.path)]) == 0
        assert said in capsys.readouterr().out
