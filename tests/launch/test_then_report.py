"""`submit --then report`: the job that follows, what it executes, and what cancels and replaces it."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import CompletedProcess

import msgspec
import pytest
from rich.console import Console

from launch.launcher import SubmitOptions
from launch.slurm import launcher, record, scheduler
from launch.slurm.errands import queue_report, report_name, report_script
from launch.slurm.launcher import OnSlurm
from launch.slurm.record import Submission
from launch.slurm.sbatch import job_of_runs, shape_of, slurm
from launch.slurm.scheduler import SchedulerError
from launch.sweep import one_run
from launch.verbs import run as run_module
from parallelbench.config.run import RunConfig
from parallelbench.config.sites import Container
from parallelbench.results.folder import RunFolder
from tests.helpers import TINY
from tests.launch.fake_slurm import MISSING, ON_SITE, SINFO, FakeSlurm, of_sbatch, programs, submission


@pytest.fixture
def run(tmp_path: Path) -> RunConfig:
    return one_run([*ON_SITE, f"results={tmp_path}", "site.mail_user=me@example.org", "site.account=lab"]).run


def queued(fake: FakeSlurm, run: RunConfig) -> list[Submission]:
    """An array of two in the queue, and one that is over."""
    jobs = [submission(job="5", tasks=[["a"], ["b"]]), submission(job="6", tasks=[["c"]])]
    for each in jobs:
        record.write(run.sweep_folder, each)
    fake.answers["squeue"] = "".join(f"5|{task}|{7 + task}|PENDING|None|N/A|{jobs[0].name}\n" for task in range(2))
    return jobs


def test_the_report_waits_for_what_is_queued_however_it_ends(
    run: RunConfig, fake: FakeSlurm, told: list[list[str]]
) -> None:
    queued(fake, run)
    assert queue_report(run) == "job 99: writes the report once the others are over, and sends mail to me@example.org"
    (words,) = told
    flags = dict(word.partition("=")[::2] for word in words[1:])
    assert flags["--dependency"] == "afterany:5"
    assert (flags["--mail-user"], flags["--mail-type"]) == ("me@example.org", "END,FAIL")
    assert (flags["--account"], flags["--nodes"], flags["--time"]) == ("lab", "1", "30")
    assert not flags.keys() & {"--gpus-per-node", "--exclusive", "--nodelist"}


def test_the_number_of_the_report_is_read_from_slurms_own_line(
    run: RunConfig, fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    queued(fake, run)
    monkeypatch.setattr(scheduler, "tell", lambda *_, **__: "Checking limits: job 1 of 64\n99;cluster\nThanks\n")
    assert queue_report(run).startswith("job 99: ")


def test_only_what_is_not_for_training_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning long before the end would reach a report of 30 minutes at once, and end it."""
    monkeypatch.setenv("SUBMITIT_PREEMPT_SIGNAL", "USR1")  # which no run expects
    monkeypatch.setattr("submitit.slurm.slurm.SlurmJobEnvironment.USR_SIG", "USR1")
    options = ("exclusive=true", "nodelist=n1", "exclude=n2", "max_time_min=120", "partition=a,b")
    limits = ("launcher.time_limit_min=120", "launcher.signal_delay_s=3600")
    run = one_run([*ON_SITE, f"results={tmp_path}", *limits, *(f"site.{option}" for option in options)]).run
    job = job_of_runs(submission(launcher=slurm(run), site=run.site), shape_of(run, "cpu"), tmp_path / "a/b/c")
    assert {"--signal=B:USR2@3600", "--requeue", "--exclusive"} <= set(of_sbatch(job.script()))
    flags = dict(word.partition("=")[::2] for word in of_sbatch(report_script(run, ["5"])))
    assert not flags.keys() & {"--exclusive", "--nodelist", "--mail-user", "--mail-type", "--signal", "--requeue"}
    assert (flags["--exclude"], flags["--time"], flags["--partition"]) == ("n2", "30", "a,b")
    brief = msgspec.structs.replace(run, site=msgspec.structs.replace(run.site, max_time_min=5))
    assert "--time=5" in of_sbatch(report_script(brief, ["5"]))


@pytest.fixture
def executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[RunConfig], CompletedProcess[str]]:
    """Executes what sbatch is given as the kernel does; Python is a program that prints its umask and arguments."""
    programs(tmp_path / "bin", monkeypatch, program="printf '%s\\n' $(umask) \"$@\"")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "program"))

    def execute(run: RunConfig) -> CompletedProcess[str]:
        job = tmp_path / "slurm_script"
        job.write_text(report_script(run, ["5"]))
        job.chmod(0o755)
        return subprocess.run([str(job)], capture_output=True, text=True, cwd=tmp_path)

    return execute


@pytest.mark.parametrize("folder", ["results", "two words", "it's $(touch x)"])
def test_what_the_job_executes_is_the_report_of_the_sweep(
    folder: str, tmp_path: Path, executed: Callable[[RunConfig], CompletedProcess[str]]
) -> None:
    run = one_run([*ON_SITE, f'results="{tmp_path}/{folder}"']).run
    done = executed(run)
    umask, *arguments = done.stdout.splitlines()
    program = ["-u", "-m", "parallelbench.entry", "parallelbench.cli"]
    assert arguments == [*program, "report", str(run.sweep_folder)], done.stderr
    assert int(umask, 8) == record.readable_by_others(), "as results are, not as what jobs execute"
    assert not (tmp_path / "x").exists()


def test_a_function_that_the_users_shell_exports_sets_the_job_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, executed: Callable[[RunConfig], CompletedProcess[str]]
) -> None:
    """`module` is one on many clusters; a shell that is no bash drops it from the environment."""
    monkeypatch.setenv("BASH_FUNC_module%%", '() { echo "$1 $2"; }')
    done = executed(one_run([*ON_SITE, f"results={tmp_path}", "site.modules=[cuda]"]).run)
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "load cuda"), done.stderr
    assert "report" in done.stdout


def test_the_report_is_written_outside_of_the_sites_container(tmp_path: Path) -> None:
    """As supervisors are: it needs no device, and what its Python is the login node shows."""
    run = one_run([*ON_SITE, f"results={tmp_path}"]).run
    container = Container(runtime="apptainer", image="/images/bench.sif", python="/opt/bin/python")
    site = msgspec.structs.replace(run.site, container=container)
    script = report_script(msgspec.structs.replace(run, site=site), ["5"])
    python = f"exec {sys.executable} -u -m parallelbench.entry parallelbench.cli report {run.sweep_folder}"
    assert script.strip().splitlines()[-1] == python
    assert "srun" not in script


def test_a_later_submit_replaces_the_report_that_waits(run: RunConfig, fake: FakeSlurm, told: list[list[str]]) -> None:
    queued(fake, run)
    fake.answers["squeue"] += f"N/A|N/A|90|PENDING|Dependency|N/A|{report_name(run.sweep_folder)}\n"
    queue_report(run)
    assert [words[0] for words in told] == ["sbatch", "scancel"]
    assert told[1] == ["scancel", "90"]


def test_the_report_is_found_however_the_folder_is_spelled(run: RunConfig, tmp_path: Path) -> None:
    sweep = run.sweep_folder
    sweep.mkdir(parents=True)
    (tmp_path / "link").symlink_to(sweep)
    assert report_name(tmp_path / "link") == report_name(sweep / ".." / sweep.name) == report_name(sweep)


def test_where_nothing_is_queued_there_is_nothing_to_wait_for(
    run: RunConfig, fake: FakeSlurm, told: list[list[str]]
) -> None:
    queued(fake, run)
    fake.answers["squeue"] = ""
    assert queue_report(run) == f"no job is queued; `parallelbench report {run.sweep_folder}` writes the report now"
    assert told == []


@pytest.mark.parametrize(
    ("sinfo", "site", "minutes"),
    [
        ("normal|normal*|up|infinite|2|8|11000|(null)|(null)|0/2/0/2|idle\n", (), "30"),
        ("normal|normal*|up|3:00|2|8|11000|(null)|(null)|0/2/0/2|idle\n", (), "3"),
        ("normal|normal*|up|3:00|2|8|11000|(null)|(null)|0/2/0/2|idle\n", ("site.max_time_min=2",), "2"),
        (
            "normal|normal*|up|3:00|2|8|11000|(null)|(null)|0/2/0/2|idle\n"
            "long|long|up|5:00|2|8|11000|(null)|(null)|0/2/0/2|idle\n",
            ("site.partition=normal,long",),
            "5",
        ),
    ],
)
def test_the_report_asks_for_what_its_partition_allows(
    sinfo: str, site: Sequence[str], minutes: str, fake: FakeSlurm, told: list[list[str]], tmp_path: Path
) -> None:
    own = one_run([*ON_SITE, f"results={tmp_path}", *site]).run
    queued(fake, own)
    fake.answers["sinfo"] = sinfo
    queue_report(own)
    assert f"--time={minutes}" in told[0]


def test_a_report_that_would_never_start_is_not_queued(run: RunConfig, fake: FakeSlurm, told: list[list[str]]) -> None:
    queued(fake, run)
    fake.answers["sinfo"] = SINFO
    fake.answers["scontrol"] = "PartitionName=normal MinNodes=2\n"
    with pytest.raises(
        SchedulerError, match=r"it would never start: nodes=1, but normal demands MinNodes=2; once they"
    ):
        queue_report(run)
    assert told == []


def test_a_refusal_says_that_the_jobs_are_there(
    run: RunConfig, fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    queued(fake, run)

    def refuse(_: list[str], *, script: str) -> str:
        raise SchedulerError("sbatch: no")

    monkeypatch.setattr(scheduler, "tell", refuse)
    with pytest.raises(
        SchedulerError, match=r"^the jobs are submitted, but not the one that writes their report: sbatch"
    ):
        queue_report(run)


def test_status_tells_of_the_report_and_cancel_ends_it(run: RunConfig, fake: FakeSlurm, told: list[list[str]]) -> None:
    queued(fake, run)
    fake.answers["squeue"] += f"N/A|N/A|90|PENDING|Dependency|N/A|{report_name(run.sweep_folder)}\n"
    sweep = run.sweep_folder
    found = launcher.sweep_status({sweep: [(RunFolder(sweep / "a"), MISSING)]})
    assert "writing reports once the others are over: 90" in found.notes
    stuck = {"squeue": fake.answers["squeue"].replace("|Dependency|", "|PartitionTimeLimit|")}
    fake.answers |= stuck
    notes = launcher.sweep_status({sweep: [(RunFolder(sweep / "a"), MISSING)]}).notes
    assert "the job 90, which writes the report, waits: PartitionTimeLimit" in notes
    text = io.StringIO()
    launcher.cancel_sweeps([sweep], Console(file=text, width=200))
    assert told == [["scancel", "5", "90"]]
    assert "2 jobs and the job that writes the report cancelled" in text.getvalue()


def test_the_verb_queues_the_report_after_the_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from parallelbench import cli

    order: list[str] = []

    def submit(self: OnSlurm, prepared: object, options: SubmitOptions, console: Console) -> int:
        order.append("submit")
        return 0

    def report(run: RunConfig) -> str:
        order.append("report")
        return "job 99: writes the report"

    monkeypatch.setattr(OnSlurm, "submit", submit)
    monkeypatch.setattr(run_module, "queue_report", report)
    arguments = ["submit", *TINY, *ON_SITE, f"results={tmp_path}"]
    assert cli.main([*arguments, "--then", "report"]) == 0
    assert order == ["submit", "report"]
    assert "job 99: writes the report" in capsys.readouterr().out
    assert cli.main(arguments) == 0
    assert order[2:] == ["submit"]


@pytest.mark.parametrize(("code", "written"), [(0, True), (1, True), (130, False)])
def test_here_the_report_follows_at_once(
    code: int, written: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from launch.local import OnThisMachine
    from parallelbench import cli

    reported: list[str] = []
    monkeypatch.setattr(OnThisMachine, "submit", lambda *_: code)
    monkeypatch.setattr(run_module, "report", lambda folder, *_, **__: reported.append(folder))
    assert cli.main(["submit", *TINY, "device=cpu", f"results={tmp_path}", "--then", "report"]) == code
    assert bool(reported) == written
