"""A launcher that the suite does not have takes one file and one YAML: plan, submit, status, cancel and logs go to it.

It is shaped as one for Flux or Kubernetes would be: `submit` leaves a file per job in a queue's folder, and returns; a
daemon, here the test itself, takes jobs from there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from parallelbench import cli
from parallelbench.config.build import component_class
from parallelbench.results.folder import RunFolder, find_runs
from tests.helpers import TINY

CODE = '''
"""Jobs are files in a folder; whoever looks after the queue takes them from there."""

import dataclasses
from typing import Annotated

import msgspec

from launch.attempt.supervisor import carry_out, supervise
from launch.launcher import Launcher, RunStatus, SweepStatus
from launch.launcher import checked
from parallelbench.errors import ConfigError, count_of
from parallelbench.config.sites import LauncherOptions

QUEUE = "queue"


class QueueOptions(LauncherOptions, frozen=True, kw_only=True, tag="queue"):
    """Options of a queue of files."""

    priority: Annotated[int, msgspec.Meta(ge=0, le=9)]
    """Jobs of higher priority go first."""


class OnQueue(Launcher):
    """A queue of files."""

    name, trains_here = "queue", False

    def device_type(self, run):
        return "cpu" if run.device == "auto" else run.device

    def prepare(self, planned):
        if planned.run.nodes > 1:
            raise ConfigError(f"nodes={planned.run.nodes}, but this queue has one: choose nodes=1")
        run = msgspec.structs.replace(planned.run, device=self.device_type(planned.run))
        return checked(dataclasses.replace(planned, run=run))

    def show_plan(self, prepared, states, console):
        console.print(f"{count_of(len(prepared), 'job')} of priority {prepared[0].planned.run.launcher.priority}")
        return True, [state.to_run for state in states]

    def submit(self, prepared, options, console):
        for item in prepared:
            if item.folder.state().to_run:
                item.folder.write_intent(item.planned.run, item.planned.overrides)
                queue = item.folder.path.parent / QUEUE
                queue.mkdir(exist_ok=True)
                (queue / item.folder.path.name).touch()
        console.print(f"{count_of(len(prepared), 'job')} queued")
        return 0

    def submitted(self, sweep):
        return (sweep / QUEUE).is_dir()

    def status(self, sweeps):
        runs = {
            folder: RunStatus(state, "queued", "in the queue of files", job=f"q-{folder.path.name[-8:]}")
            for members in sweeps.values()
            for folder, state in members
            if self._job(folder).exists()
        }
        return SweepStatus(runs, ["the queue answers"])

    def cancel(self, sweeps, console):
        jobs = [job for sweep in sweeps for job in (sweep / QUEUE).iterdir() if job.suffix != ".log"]
        for job in jobs:
            job.unlink()
        console.print(f"{count_of(len(jobs), 'job')} cancelled")

    def logs(self, sweep, run):
        return sorted((sweep / QUEUE).glob(f"{run}.log"))

    def _job(self, folder):
        return folder.path.parent / QUEUE / folder.path.name


def work(folder):
    """The daemon's part: train one run of the queue, in processes that this one supervises."""
    job = OnQueue()._job(folder)
    job.rename(job.with_suffix(".log")).write_text("the daemon has begun\\n")
    run = folder.config("filequeue")
    return carry_out(
        folder,
        run,
        device_type="cpu",
        skip=lambda state, _: "" if state.to_run else state.label,
        train=supervise,
        job="daemon",
    )


'''
YAML = """_target_: filequeue.QueueOptions
name: queue
timeout_s: null
collective_timeout_s: 300.0
oversubscribe: false
checkpoint: auto
checkpoint_every_s: 300.0
priority: 3
"""


PLUGIN = ("--plugin", "filequeue.py")
RUNS = (*PLUGIN, "--conf", "conf", *TINY, "launcher=queue", "results=results", "epochs=1,2", "measure.parity=false")


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's folder with the two files, and nothing else."""
    (tmp_path / "conf" / "launcher").mkdir(parents=True)
    (tmp_path / "conf" / "launcher" / "queue.yaml").write_text(YAML)
    (tmp_path / "filequeue.py").write_text(CODE)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for module in [name for name in sys.modules if name.partition(".")[0] in ("filequeue", "lab")]:
        del sys.modules[module]
    component_class.cache_clear()


def printed(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert cli.main(arguments) == code
    return " ".join(capsys.readouterr().out.split())


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(arguments) == 2
    return capsys.readouterr().err


def test_its_runs_are_planned_queued_listed_and_cancelled(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "2 jobs of priority 3" in printed(capsys, "plan", *RUNS)
    assert find_runs(own / "results") == [], "plan writes nothing"
    assert "2 jobs queued" in printed(capsys, "submit", *RUNS)
    status = printed(capsys, "status", *PLUGIN, "results")
    assert status.startswith("2 queued the queue answers")
    assert "in the queue of files" in status
    assert printed(capsys, "status", "results").startswith("2 missing"), "nobody else's code is run without --plugin"
    run = str(find_runs(own / "results")[0].path)
    assert "launcher=queue cancels whole sweeps only: name " in refused(capsys, "cancel", *PLUGIN, run)
    assert "2 jobs cancelled" in printed(capsys, "cancel", *PLUGIN, "results")
    assert printed(capsys, "status", *PLUGIN, "results").startswith("2 missing")


@pytest.fixture
def package(own: Path) -> Path:
    """The same launcher in a package, whose modules its `__init__.py` does not import; its options stand elsewhere."""
    folder = own / "lab" / "queues"
    folder.mkdir(parents=True)
    options, _, rest = CODE.partition("class OnQueue")
    (folder / "options.py").write_text(options)
    (folder / "files.py").write_text(f"from lab.queues.options import *\n\n\nclass OnQueue{rest}")
    for path in (own / "lab", folder):
        (path / "__init__.py").touch()
    (own / "lab" / "__main__.py").write_text("raise SystemExit('nobody has asked for this program')")
    (own / "conf" / "launcher" / "queue.yaml").write_text(YAML.replace("filequeue", "lab.queues.options"))
    (own / "filequeue.py").unlink()
    return own / "lab"


def test_it_may_be_anywhere_in_a_package(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plugin = ("--plugin", "lab")
    assert "2 jobs queued" in printed(capsys, "submit", *plugin, *RUNS[len(PLUGIN) :])
    assert printed(capsys, "status", *plugin, "results").startswith("2 queued the queue answers")
    run = find_runs(package.parent / "results")[0].path
    (run.parent / "queue" / f"{run.name}.log").write_text("the daemon has begun\n")
    assert "the daemon has begun" in printed(capsys, "logs", *plugin, str(run))
    assert "2 jobs cancelled" in printed(capsys, "cancel", *plugin, "results")
    assert printed(capsys, "status", *plugin, "results").startswith("2 missing")


def test_a_broken_module_of_its_package_is_named(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (package / "broken.py").write_text("import nothing_of_this_name\n")
    printed(capsys, "plan", "--plugin", "lab", *[word for word in RUNS[len(PLUGIN) :] if "launcher" not in word])
    (package.parent / "results").mkdir()
    assert "lab.broken can't be imported: " in refused(capsys, "cancel", "--plugin", "lab", "results")


@pytest.mark.slow
def test_its_options_are_checked_and_identify_no_run(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "launcher.priority=10 is not valid" in refused(capsys, "plan", *RUNS, "launcher.priority=10")
    assert "this queue has one: choose nodes=1" in printed(
        capsys, "plan", *RUNS, "strategy=ddp", "devices=2", "nodes=2", code=2
    )
    assert "launcher=queue queues jobs, but `run` trains here" in refused(
        capsys, "run", *[word for word in RUNS if not word.startswith("epochs")]
    )
    without = [word for word in RUNS if word not in PLUGIN]
    assert "--plugin PACKAGE adds a package" in refused(capsys, "plan", *without)
    printed(capsys, "submit", *RUNS)
    names = {run.path.name for run in find_runs(own / "results")}
    local = [word for word in without if not word.startswith("launcher=")]
    assert names <= set(printed(capsys, "plan", *local).split()), "the same runs by another launcher"


@pytest.mark.exhaustive
@pytest.mark.slow
def test_its_daemon_trains_a_run_by_the_shared_life_cycle(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed(capsys, "submit", *RUNS)
    first, _ = find_runs(own / "results")
    folder = RunFolder(first.path.absolute())
    outcome = sys.modules["filequeue"].work(folder)
    assert outcome.outcome == "ok", outcome
    assert folder.state().label == "ok"
    assert printed(capsys, "status", *PLUGIN, "results").startswith("1 ok, 1 queued")
    assert "the daemon has begun" in printed(capsys, "logs", *PLUGIN, str(first.path))
