"""A step of a job: the command that starts it, and what a node does that can't do its share, without a Slurm."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.attempt.outcome import judge
from launch.attempt.processes import Rendezvous, Training
from launch.slurm import rendezvous, step
from launch.slurm.sbatch import shape_of, step_command
from launch.slurm.step import Allocation, Step
from launch.sweep import one_run
from parallelbench.config.run import RunConfig
from parallelbench.results.attempt import Attempt
from parallelbench.results.exits import read_exits
from parallelbench.results.folder import RunFolder
from tests.helpers import TINY
from tests.launch.fake_slurm import programs

TWO = ("strategy=ddp", "devices=2", "nodes=2", "site.network_interface=lo")


def run_in(tmp_path: Path, *overrides: str) -> RunConfig:
    return one_run([*TINY, "launcher=slurm", "site=local_cluster", f"results={tmp_path}", *overrides]).run


def attempt_of(run: RunConfig) -> Attempt:
    folder = RunFolder.of(run)
    folder.write_intent(run, [])
    attempt = folder.claim(job="x.17.0")
    assert attempt is not None
    attempt.write_config(run)
    attempt.describe(processes=run.devices, device_type="cpu", oversubscribed=False)
    return attempt


def on_node(node: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Be a task of a step on two nodes."""
    meeting = Rendezvous(0, 2, "127.0.0.1", 1, "x.17.0", "secret")
    surroundings = {"SLURM_NODEID": str(node), "SLURM_NTASKS": "2"}
    cores = ",".join(map(str, os.sched_getaffinity(0)))
    surroundings |= {step._SUPERVISOR: str(os.getpid()), step._CORES: cores, **rendezvous.to_environment(meeting)}
    for name, value in surroundings.items():
        monkeypatch.setenv(name, value)


def in_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, srun: str) -> None:
    """Be the batch script of a job, where this is what srun does."""
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    programs(tmp_path / "bin", monkeypatch, srun=srun, scontrol="exit 0")


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """A task's handlers, which stay where it ends."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_each_node_of_a_run_gets_one_task_with_all_of_its_cores(tmp_path: Path) -> None:
    run = run_in(tmp_path, *TWO, "cores_per_device=3")
    words = step_command(shape_of(run, "cpu"), run.site, [], ["module", "argument"])
    assert words[0] == "srun"
    wanted = {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=3", "--kill-on-bad-exit=1"}
    assert wanted <= set(words)
    assert words[-6:] == [sys.executable, "-u", "-m", "parallelbench.entry", "module", "argument"]


def test_a_node_that_can_not_do_its_share_says_why_as_its_first_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = attempt_of(run_in(tmp_path, *TWO, "cores_per_device=100000"))
    on_node(1, monkeypatch)
    assert step.main(["ranks", str(attempt.path.parents[1]), attempt.path.name]) == 1
    outcome, reason = judge(attempt, 2, 137)
    assert outcome == "error"
    assert reason.startswith("rank 1: on node 1: devices=1 with cores_per_device=100000, but this machine has ")


def test_a_node_that_does_not_see_the_attempt_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_node(1, monkeypatch)
    monkeypatch.setattr(step, "SEEN_S", 0.0)
    assert step.main(["ranks", str(tmp_path / "sweep" / "run"), "1"]) == 1
    said = f"parallelbench: node 1: {tmp_path}/sweep/run/attempts/1 was not there within 0 s: do all nodes see that"
    assert capsys.readouterr().out.startswith(said)


def test_a_sigterm_to_the_first_node_reaches_the_supervisor_and_no_others_do() -> None:
    told: list[int] = []
    signal.signal(step.STEP_TERMINATED, lambda number, _: told.append(number))
    for node in (1, 0):
        step._forward_sigterm(node, os.getpid())
        os.kill(os.getpid(), signal.SIGTERM)
        assert told == ([step.STEP_TERMINATED] if node == 0 else [])


def test_a_single_process_that_is_killed_is_known_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """srun gives an exit code of its own, where a shell gives 137."""
    attempt = attempt_of(run_in(tmp_path))
    on_node(0, monkeypatch)
    monkeypatch.setattr(
        step.Here, "start", lambda *_: subprocess.Popen([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
    )
    assert step.main(["ranks", str(attempt.path.parents[1]), attempt.path.name]) == 137
    assert [exits.codes for exits in read_exits(attempt.path, 1)] == [{0: -9}]
    assert judge(attempt, 1, 1) == (
        "killed",
        "the process was killed by SIGKILL, by hand or by the kernel for lack of memory",
    )


def test_the_end_of_a_step_is_that_of_its_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM makes srun end them; one that does not answer is killed."""
    run = run_in(tmp_path)
    attempt = attempt_of(run)
    in_job(tmp_path, monkeypatch, srun=f"trap 'echo ended > {tmp_path}/ended; exit' TERM; sleep 60 & wait")
    training = Training(RunFolder.of(run), run, attempt, "cpu")
    with (tmp_path / "log").open("wb") as log:
        started = Allocation().start(training, log)
        while not (trapped := _catches(started.pid, signal.SIGTERM)):
            assert started.poll() is None
        assert trapped
        started.end()
    assert (tmp_path / "ended").read_text() == "ended\n"
    monkeypatch.setattr(step, "ENDING_S", 0.1)
    deaf = Step(["bash", "-c", "trap '' TERM; while :; do sleep 1; done"], os.environ, None)
    while not _ignores(deaf.pid, signal.SIGTERM):
        assert deaf.poll() is None
    deaf.end()
    assert deaf.returncode == -signal.SIGKILL


def _catches(pid: int, number: signal.Signals) -> bool:
    return _has("SigCgt", pid, number)


def _ignores(pid: int, number: signal.Signals) -> bool:
    return _has("SigIgn", pid, number)


def _has(kind: str, pid: int, number: signal.Signals) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    mask = next(int(line.split()[1], 16) for line in lines if line.startswith(kind))
    return bool(mask >> (number - 1) & 1)


def test_the_nodes_of_a_step_are_told_where_to_meet_in_no_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everybody on a node can read those."""
    run = run_in(tmp_path, *TWO)
    attempt = attempt_of(run)
    in_job(tmp_path, monkeypatch, srun=f'echo "$@" > {tmp_path}/words; env > {tmp_path}/variables')
    meeting = rendezvous.choose("x.17.0", nodes=2, interface="lo")
    with (tmp_path / "log").open("wb") as log:
        assert Allocation().start(Training(RunFolder.of(run), run, attempt, "cpu", meeting), log).wait() == 0
    assert meeting.secret not in (tmp_path / "words").read_text()
    assert f"127.0.0.1:{meeting.port} x.17.0 {meeting.secret}" in (tmp_path / "variables").read_text()


def test_a_step_of_which_a_node_has_failed_ends_though_srun_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the task of a node that is lost, which never ends."""
    monkeypatch.setattr(step, "LINGER_S", 0.0)
    monkeypatch.setattr(step, "HEARTBEAT_S", 0.0)
    exits = [tmp_path / "exits-node0.json", tmp_path / "exits-node1.json"]
    waiting = Step(["sleep", "600"], os.environ, None, exits)
    assert waiting.poll() is None
    exits[0].touch()
    while waiting.poll() is None:
        pass
    assert waiting.returncode == -signal.SIGTERM


def test_a_step_is_begun_once_a_controller_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """srun gives up seconds after it finds none, and the run would be over."""
    run = run_in(tmp_path)
    attempt = attempt_of(run)
    in_job(tmp_path, monkeypatch, srun="exit 0")
    away = f"echo >> {tmp_path}/asked; [ $(wc -l < {tmp_path}/asked) -ge 3 ] || "
    away += '{ echo "slurm_load_jobs error: Unable to contact slurm controller (connect failure)" >&2; exit 1; }'
    programs(tmp_path / "bin", monkeypatch, scontrol=away)
    monkeypatch.setattr(step, "_PAUSE_S", 0.0)
    with (tmp_path / "log").open("wb") as log:
        assert Allocation().start(Training(RunFolder.of(run), run, attempt, "cpu"), log).wait() == 0
    assert (tmp_path / "asked").read_text() == "\n" * 3
