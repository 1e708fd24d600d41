"""What users ask for and leave lying about, on a real cluster: nothing is executed that they did not write."""

from __future__ import annotations

import os
import pickle
import pickletools
from pathlib import Path
from typing import Any

import msgspec
import pytest

from launch.slurm import record
from parallelbench.config.identity import CONFIGURATION_VERSION, run_id
from parallelbench.results.folder import RunFolder, find_runs
from tests.faults import fault
from tests.slurm.daemons import until
from tests.slurm.runs import WITHOUT_TORCH
from tests.slurm.sweeps import Sweeps, closed
from tests.versions import other_version

HOSTILE = 'it\'s "$(touch pwned)" `touch pwned`; ü #x & \\* | <y>'


def status(sweeps: Sweeps, folder: Path | None = None) -> str:
    code, text = sweeps.run("status", str(folder or sweeps.results))
    assert code == 0, text
    return text


@fault(
    "storage and input",
    "odd paths",
    injection="a results folder with spaces, quotes, umlauts, and what a shell would execute",
    outcome="the run is done in this folder, and nothing was executed",
)
def test_an_odd_path(sweeps: Sweeps, tmp_path: Path) -> None:
    sweeps.results = tmp_path / HOSTILE.replace("\\", "")
    code, text = sweeps.submit(*WITHOUT_TORCH)
    assert code == 0, text
    sweeps.until_done()
    assert {path.name for path in tmp_path.iterdir()} == {sweeps.results.name}
    assert not list(sweeps.results.rglob("pwned"))


@fault(
    "storage and input",
    "umask 002",
    injection="files are writable for the group by default",
    outcome="what jobs execute is writable for nobody but the user, and jobs accept it",
)
def test_a_generous_umask(sweeps: Sweeps) -> None:
    before = os.umask(0o002)
    try:
        with closed(sweeps.cluster):
            assert sweeps.submit()[0] == 0
    finally:
        os.umask(before)
    (mine,) = sweeps.submissions()
    assert record.read(record.folder_of(sweeps.adhoc, mine.token) / "submission.json") == mine
    executed = [path for path in (sweeps.adhoc / record.FOLDER).rglob("*") if not path.is_symlink()]
    assert len(executed) >= 4
    assert [path for path in executed if path.stat().st_mode & 0o022] == []


@fault(
    "storage and input",
    "YAML edited while queued",
    injection="a user's model file is changed between submit and the start of the job",
    outcome="the run is what was submitted, by its run id; submitting again adds the new run beside it",
)
def test_yaml_is_edited_while_queued(sweeps: Sweeps, tmp_path: Path) -> None:
    file = tmp_path / "conf" / "model" / "mine.yaml"
    file.parent.mkdir(parents=True)
    text = "_target_: parallelbench.models.mlp.Mlp\nname: mine\nhidden: [8]\n"
    file.write_text(text)
    own = ("model=mine", "--conf", str(tmp_path / "conf"))
    with closed(sweeps.cluster):
        code, said = sweeps.submit(*own)
        assert code == 0, said
        (before,) = find_runs(sweeps.results)
        submitted = run_id(before.config())
        file.write_text(text.replace("[8]", "[16]"))
    (run,) = sweeps.until_done()
    manifest = run.published()
    assert manifest is not None
    assert manifest["run_id"] == submitted == run_id(run.config())
    with closed(sweeps.cluster):
        assert sweeps.submit(*own)[0] == 0
        assert len(find_runs(sweeps.results)) == 2


@fault(
    "storage and input",
    "the program is upgraded while a run is queued",
    injection="between submit and the start of the job, the program gets the next version of configurations",
    outcome="the job refuses, since a result of two versions is none, and says so; submitting again adds the new run",
)
def test_the_program_is_upgraded_while_a_run_is_queued(sweeps: Sweeps, tmp_path: Path) -> None:
    program = tmp_path / "program"
    for name, value in other_version(program, CONFIGURATION_VERSION=CONFIGURATION_VERSION).items():
        sweeps.monkeypatch.setenv(name, value)
    with closed(sweeps.cluster):
        assert sweeps.start(*WITHOUT_TORCH).wait(timeout=60) == 0
        (old,) = find_runs(sweeps.results)
        other_version(program, CONFIGURATION_VERSION=CONFIGURATION_VERSION + 1)
    sweeps.until_queue_is_empty()
    assert f"{old.path.name}: was submitted by another version of parallelbench" in sweeps.logs()
    assert sweeps.start(*WITHOUT_TORCH).wait(timeout=60) == 0
    new = next(run for run in find_runs(sweeps.results) if run != old)
    until(lambda: new.state().state == "done", what="the new version's run", timeout_s=240)
    assert (old.state().state, old.attempts()) == ("missing", [])


@fault(
    "storage and input",
    "what jobs execute may be written by others",
    injection="the folder of the sweep or of all submissions is group-writable; that of one belongs to another user",
    outcome="submit, status and cancel refuse it in one line",
)
@pytest.mark.parametrize("other", ["group", "group of the sweep", "owner"])
def test_foreign_submissions(sweeps: Sweeps, other: str) -> None:
    with closed(sweeps.cluster):
        assert sweeps.submit()[0] == 0
        (mine,) = sweeps.submissions()
        if other == "group":
            (sweeps.adhoc / record.FOLDER).chmod(0o770)
            word = "may be written by others"
        elif other == "group of the sweep":
            sweeps.adhoc.chmod(0o770)
            word = "may be written by others"
        else:
            os.chown(record.folder_of(sweeps.adhoc, mine.token), 12345, 12345)
            word = "belongs to another user"
        for code, text in (sweeps.submit("sweep.repeats=2"), sweeps.run("cancel", str(sweeps.adhoc))):
            assert (code, text.count("\n")) == (2, 1)
            assert word in text
        assert len(sweeps.queue()) == 1
        text = status(sweeps)
        assert word in text
        assert "1 unknown" in text, "it may be queued, which only who submitted it can tell"


@fault(
    "storage and input",
    "what a job executes is exchanged while it waits",
    injection="another user of the group puts a folder with a pickle of theirs in the place of the submission's",
    outcome="the job ends at once and says whose folder it is; nothing in it is executed",
)
def test_a_pickle_of_somebody_elses(sweeps: Sweeps, tmp_path: Path) -> None:
    witness = tmp_path / "executed"
    with closed(sweeps.cluster):
        assert sweeps.submit()[0] == 0
        (mine,) = sweeps.pickles()
        names = mine.parent.relative_to(sweeps.adhoc)
        (sweeps.adhoc / record.FOLDER).rename(sweeps.adhoc / "aside")
        foreign = sweeps.adhoc / names
        foreign.mkdir(parents=True)
        (foreign / mine.name).write_bytes(pickle.dumps(_Touches(witness)))
        for path in (foreign.parent, foreign, foreign / mine.name):
            path.chmod(0o777)
            os.chown(path, 12345, 12345)
    sweeps.until_queue_is_empty()
    assert "belongs to another user" in sweeps.logs()
    assert not witness.exists()
    pickle.loads((foreign / mine.name).read_bytes())
    assert witness.exists()  # it would have been


class _Touches:
    """Makes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._path,)


@fault(
    "storage and input",
    "code in pickles",
    injection="what submit leaves for the jobs is taken apart",
    outcome="it holds a function's name and a path, nothing else",
)
def test_pickles_hold_a_name_and_a_path(sweeps: Sweeps) -> None:
    with closed(sweeps.cluster):
        assert sweeps.submit("sweep.repeats=2")[0] == 0
        (mine,) = sweeps.submissions()
        path = record.folder_of(sweeps.adhoc, mine.token) / "submission.json"
        pickles = sweeps.pickles()
        assert len(pickles) == 2
        for pickle in pickles:
            words = {value for _, value, _ in pickletools.genops(pickle.read_bytes()) if isinstance(value, str)}
            names = {"submitit.core.utils", "DelayedSubmission", "launch.slurm.job", "run_task"}
            fields = {"function", "args", "kwargs", "_result", "_done", "_timeout_min", "_timeout_countdown"}
            assert words == names | fields | {str(path)}


def fail(folder: RunFolder, outcome: str) -> None:
    """An attempt that ends like this."""
    attempt = folder.claim()
    assert attempt is not None
    attempt.describe(processes=1, device_type="cpu", oversubscribed=False)
    attempt.finish(outcome, "as the test wants it")  # type: ignore[arg-type]


@fault(
    "storage and input",
    "runs that have failed",
    injection="of three runs, one ended with oom, one with error, one with timeout",
    outcome="submit starts the one with timeout only; --retry oom,error the other two",
)
def test_retry(sweeps: Sweeps) -> None:
    with closed(sweeps.cluster):
        assert sweeps.submit("sweep.repeats=3")[0] == 0
        sweeps.cluster.run("scancel", str(sweeps.submissions()[0].job))
        until(lambda: not sweeps.queue(), what="the end of the jobs", timeout_s=60)
        for run, outcome in zip(find_runs(sweeps.results), ("oom", "error", "timeout"), strict=True):
            fail(run, outcome)
        assert sweeps.submit("sweep.repeats=3")[0] == 0
        assert len(sweeps.queue()) == 1
        assert sweeps.submit("sweep.repeats=3", "--retry", "oom,error")[0] == 0
        assert len(sweeps.queue()) == 3
        assert "3 queued" in status(sweeps)


@fault(
    "storage and input",
    "more device-hours than wanted",
    injection="--max-gpu-hours=5.9, and two jobs of an hour that may start three times each",
    outcome="exit 2 and one line; no job, no record",
)
def test_too_many_device_hours(sweeps: Sweeps) -> None:
    options = ("sweep.repeats=2", "launcher.attempts=3", "--max-gpu-hours")
    code, text = sweeps.submit(*options, "5.9")
    assert (code, text.count("\n")) == (2, 1)
    assert "6.0 GPU-hours" in text
    assert "over --max-gpu-hours=5.9" in text
    assert sweeps.queue() == []
    assert not find_runs(sweeps.results)
    with closed(sweeps.cluster):
        assert sweeps.submit(*options, "6")[0] == 0


@fault(
    "storage and input",
    "cancel in the middle of a sweep",
    injection="cancel, while one run trains and another one waits",
    outcome="both jobs end, the first run is killed, the other missing; logs shows why; submitting again starts both",
)
def test_cancel(sweeps: Sweeps) -> None:
    endless = (*WITHOUT_TORCH, "epochs=1000000", "strategy.step_s=0.02")
    options = (*endless, "sweep.repeats=2", "sweep.order=listed", "launcher.array_parallelism=1")
    assert sweeps.submit(*options)[0] == 0
    first, second = find_runs(sweeps.results)
    until(lambda: bool(list(first.path.glob("attempts/1/journal-rank0.jsonl"))), what="training", timeout_s=240)
    assert "1 queued, 1 running" in status(sweeps)
    code, text = sweeps.run("cancel", str(sweeps.results))
    assert code == 0
    assert "2 jobs cancelled" in text
    sweeps.until_queue_is_empty()
    assert (first.state().label, second.state().label) == ("killed", "missing")
    code, text = sweeps.run("logs", str(first.path))
    assert code == 0
    assert "interrupted by" in text
    with closed(sweeps.cluster):
        assert sweeps.submit(*options)[0] == 0
        assert len(sweeps.queue()) == 2


def test_status_and_cancel_of_everything(sweeps: Sweeps, tmp_path: Path) -> None:
    with closed(sweeps.cluster):
        assert sweeps.submit()[0] == 0
        assert sweeps.submit("sweep.name=other", "sweep.repeats=5")[0] == 0
        (mine,), (other,) = sweeps.submissions(), record.submissions(sweeps.results / "other")
        asked = sweeps.questions("squeue", "sacct", "scancel")
        assert "6 queued" in status(sweeps)
        assert [line.partition(" ")[0] for line in asked()] == ["squeue"], "one question about all sweeps"
        sweeps.cluster.run("scancel", f"{other.job}_1")
        record.write(sweeps.adhoc, msgspec.structs.replace(mine, job=None))
        until(lambda: len(sweeps.queue()) == 5, what="the end of one job", timeout_s=60)
        asked()  # the test's own
        assert "1 missing, 5 queued" in status(sweeps)
        assert [line.partition(" ")[0] for line in asked()] == ["squeue", "sacct"], "one job left no record"
        assert sweeps.submissions() == [mine], "adopted by its name, for which the same question will do"
        assert "1 queued" in status(sweeps, sweeps.adhoc)
        (run,) = find_runs(sweeps.adhoc)
        assert "1 queued" in status(sweeps, run.path)
        asked()
        assert "nothing was printed yet" in sweeps.run("logs", str(run.path))[1]
        assert asked() == []
        assert "5 jobs cancelled" in sweeps.run("cancel", str(sweeps.results))[1]
        squeue, scancel = asked()
        assert squeue.startswith("squeue ")
        assert scancel == f"scancel {mine.job} {other.job}", "an array by its id, not task by task"
        until(lambda: not sweeps.queue(), what="the end of the jobs", timeout_s=60)
    (tmp_path / "empty").mkdir()
    code, text = sweeps.run("status", str(tmp_path / "empty"))
    assert (code, text.count("\n")) == (2, 1)
    assert "holds no runs: name a results folder, a sweep's folder, or a run's" in text


def test_the_plan_is_what_is_submitted(sweeps: Sweeps) -> None:
    options = ("sweep.repeats=2", "site.modules=[a/1]", "site.constraint=null")
    code, text = sweeps.submit(*options, verb="plan")
    assert code == 0
    assert not sweeps.results.exists()
    with closed(sweeps.cluster):
        assert sweeps.submit(*options)[0] == 0
        (mine,) = sweeps.submissions()
        (script,) = sweeps.adhoc.glob("submissions/*/*_submission.sh")
        assert script.read_text().replace(mine.token, "TOKEN").strip() in text


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("site.partition=nowhere",), "sbatch: invalid partition specified: nowhere"),
        (
            ("devices=8", "strategy=ddp", "site.devices_per_node=8", "site.memory_gib_per_device=1"),
            "sbatch: allocation failure: Requested node configuration is not available: lower devices",
        ),
        (("launcher.time_limit_min=61",), "launcher.time_limit_min=61, but normal allows 60"),
    ],
)
def test_the_plan_says_what_the_cluster_refuses(sweeps: Sweeps, options: tuple[str, ...], word: str) -> None:
    sweeps.cluster.run("scontrol", "update", "PartitionName=normal", "MaxTime=60")
    try:
        code, text = sweeps.submit(*options, verb="plan")
    finally:
        sweeps.cluster.run("scontrol", "update", "PartitionName=normal", "MaxTime=UNLIMITED")
    assert code == 2
    assert f"refused by the cluster: {word}" in text
