"""Run folders: what state they say a run is in, and who may begin an attempt."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest
import yaml

from analysis import load
from parallelbench.config.identity import run_id
from parallelbench.config.sites import LocalLauncher, Site
from parallelbench.errors import ConfigError, StorageError
from parallelbench.results import liveness
from parallelbench.results.attempt import ABSENCE_S, OUTCOMES, PUBLISHED, RETRYABLE, Attempt
from parallelbench.results.folder import RunFolder, State, find_runs
from tests.analysis.factory import Fake, begin, component, config, failed, published
from tests.faults import fault
from tests.helpers import fill_disk

UNIDENTIFYING = {"launcher": LocalLauncher.__struct_fields__, "site": Site.__struct_fields__}
"""What is no part of a run's identity, and its options."""


def write_supervisor(attempt: Attempt, **changes: Any) -> None:
    path = attempt.path / "supervisor.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | changes))


def unlock(attempt: Attempt) -> None:
    """What the kernel does when a supervisor ends."""
    assert attempt.lock is not None
    attempt.lock.release()


def age(attempt: Attempt, seconds: float) -> None:
    old = time.time() - seconds
    os.utime(attempt.heartbeat, (old, old))


# --- states


def test_a_run_is_missing_until_it_is_claimed_and_its_intent_never_changes(tmp_path: Path) -> None:
    run = config(tmp_path)
    folder = RunFolder.of(run)
    assert (folder.state(), folder.state().to_run) == (State("missing"), True)
    assert (folder.attempts(), folder.manifest()) == ([], None)
    folder.write_intent(run, ["epochs=3"])
    folder.write_intent(config(tmp_path, epochs=9), ["second"])
    assert folder.state() == State("missing")
    assert folder.config() == run
    assert (folder.path / "overrides.txt").read_text() == "epochs=3\n"


def test_an_attempt_is_running_from_its_claim_on(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    attempt = folder.claim()
    assert attempt is not None
    assert attempt.info() is None
    assert (folder.state(), folder.state().to_run, attempt.number) == (State("running", None, 1), False, 1)
    unlock(attempt)
    state = folder.state()
    assert (state.state, state.label, state.attempt) == ("failed", "killed", 1), "known at once, without waiting"
    assert state.to_run


@pytest.mark.parametrize("change", [{"pid": 2**22 + 1}, {"pid": -1}, {"pid": 1}, {"host": "another"}, {"machine": "m"}])
def test_a_lock_shows_life_whatever_the_processes_and_machines_are_called(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    folder, attempt = begin(config(tmp_path), Fake())
    write_supervisor(attempt, **change)
    age(attempt, 10 * ABSENCE_S)
    assert folder.state().state == "running"


@fault(
    "lifecycle",
    "A look from another container",
    injection="status from another namespace of process ids on the machine where an attempt runs",
    outcome="the attempt is running: its lock says so, not a process id",
)
@pytest.mark.slow
def test_a_supervisor_is_seen_from_another_container_of_its_machine(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may make a namespace of process ids")
    folder, _ = begin(config(tmp_path), Fake())
    program = (
        "import sys; from pathlib import Path; from parallelbench.results.folder import RunFolder\n"
        "print(RunFolder(Path(sys.argv[1])).state().label)"
    )
    namespace = ["unshare", "--pid", "--fork", "--mount-proc"]
    seen = subprocess.run([*namespace, sys.executable, "-c", program, folder.path], capture_output=True, check=True)
    assert seen.stdout.decode().strip() == "running"


@pytest.mark.slow
def test_a_supervisor_that_nobody_buried_is_gone_too(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    program = (
        "import sys; from pathlib import Path; from parallelbench.results.folder import RunFolder\n"
        "kept = RunFolder(Path(sys.argv[1])).claim(); print(1, flush=True); input()"
    )
    command = [sys.executable, "-c", program, tmp_path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        assert folder.state().state == "running"
        other.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # dead, and a zombie until the end of this block
        assert folder.state().label == "killed"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"host": 3}', b"\xff", None, "another machine", ""])
def test_without_a_readable_supervisor_or_a_lock_that_can_be_seen_the_heartbeat_decides(
    tmp_path: Path, content: bytes | str | None
) -> None:
    """`content`: of the supervisor's file, or the machine that it names; None: there is no file."""
    folder, attempt = begin(config(tmp_path), Fake())
    path = attempt.path / "supervisor.json"
    if isinstance(content, str):
        write_supervisor(attempt, machine=content)
    else:
        path.unlink() if content is None else path.write_bytes(content)
    unlock(attempt)
    assert folder.state().state == "running"
    age(attempt, ABSENCE_S + 1)
    assert folder.state().label == "killed"


def test_a_file_system_without_locks_gives_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(liveness.fcntl, "flock", flock)
    folder, attempt = begin(config(tmp_path), Fake())
    supervisor = attempt.supervisor()
    assert (supervisor is not None and supervisor.machine, folder.state().state) == ("", "running")
    age(attempt, ABSENCE_S + 1)
    assert folder.state().label == "killed"


@fault(
    "lifecycle",
    "Clocks that differ",
    injection="a clock ahead by 90 s or two hours, or behind, on the machine that looks at another one's attempt",
    outcome="the attempt is running: its heartbeat's age is that by the file system's own clock",
)
@pytest.mark.parametrize("ahead_s", [-7200.0, 90.0, 7200.0])
def test_an_observers_clock_does_not_end_an_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    folder, attempt = begin(config(tmp_path), Fake())
    write_supervisor(attempt, machine="another")
    unlock(attempt)
    monkeypatch.setattr(time, "time", lambda now=time.time: now() + ahead_s)
    assert folder.state().state == "running"


def test_clocks_that_cannot_be_compared_are_trusted_to_the_hour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, attempt = begin(config(tmp_path), Fake())
    write_supervisor(attempt, machine="another")
    unlock(attempt)

    opened = os.open

    def only_to_read(path: Path, flags: int, *mode: int) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise PermissionError
        return opened(path, flags, *mode)

    monkeypatch.setattr(liveness.os, "open", only_to_read)  # another user's folder
    age(attempt, liveness.CLOCKS_S)
    assert folder.state().state == "running"
    age(attempt, liveness.CLOCKS_S + ABSENCE_S + 1)
    assert folder.state().label == "killed"


def test_looking_for_life_leaves_nothing_behind(tmp_path: Path) -> None:
    folder, attempt = begin(config(tmp_path), Fake())
    write_supervisor(attempt, machine="another")
    unlock(attempt)
    before, changed = set(os.listdir(attempt.path)), attempt.path.stat().st_mtime_ns
    assert folder.state().state == "running"
    assert attempt.path.stat().st_mtime_ns == changed, "not even in the folder's own time"
    assert set(os.listdir(attempt.path)) == before


@pytest.mark.parametrize("outcome", [name for name in OUTCOMES if name not in PUBLISHED])
def test_an_outcome_beats_a_living_supervisor(tmp_path: Path, outcome: Any) -> None:
    folder = failed(config(tmp_path), outcome, "because", epochs=1)
    state = folder.state()
    assert (state.state, state.label) == ("failed", outcome)
    assert state.outcome is not None
    assert state.outcome.reason == "because"
    assert state.to_run == (outcome in RETRYABLE)


def test_a_manifest_beats_everything(tmp_path: Path) -> None:
    folder = published(config(tmp_path))
    for outcome in ("killed", "error"):
        folder.attempts()[0].finish(outcome, "a word too many")  # type: ignore[arg-type]
        assert folder.state().state == "done"
    (folder.attempts()[0].path / "outcome.json").unlink()
    assert (folder.state().state, folder.state().label) == ("done", "ok")
    assert not folder.state().to_run


def test_a_result_stays_when_a_later_attempt_fails(tmp_path: Path) -> None:
    folder = published(config(tmp_path))
    later = folder.claim()
    assert later is not None
    later.describe(processes=1, device_type="cpu", oversubscribed=False)
    later.finish("killed", "too late")
    assert (folder.state().state, folder.state().attempt) == ("done", 1)


def test_the_last_attempt_counts(tmp_path: Path) -> None:
    folder = failed(config(tmp_path), "error", "first", epochs=0)
    for number in range(2, 12):
        attempt = folder.claim()
        assert attempt is not None
        assert attempt.number == number
        attempt.describe(processes=1, device_type="cpu", oversubscribed=False)
        attempt.finish("killed", f"attempt {number}")
    assert folder.state().attempt == 11, "11 comes after 2"


def test_a_parity_failure_is_done(tmp_path: Path) -> None:
    folder = published(config(tmp_path), Fake(parity_passed=False))
    assert (folder.state().state, folder.state().label) == ("done", "parity_failed")


# --- damage


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "gone":
        path.unlink()
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "short":
        path.write_bytes(content[:-1])
    elif how == "flipped":
        path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    else:
        path.unlink()
        path.mkdir()


@pytest.mark.parametrize(
    ("file", "how"),
    [
        *(("run.parquet", how) for how in ("gone", "empty", "short", "flipped", "a folder")),
        *(("manifest.json", how) for how in ("gone", "short", "a folder")),
        ("steps.parquet", "flipped"),
    ],
)
def test_a_damaged_result_is_none_and_is_tried_again(tmp_path: Path, file: str, how: str) -> None:
    folder = published(config(tmp_path))
    assert folder.published() is not None
    damage(folder.result / file, how)
    assert folder.published() is None
    state = folder.state()
    assert (state.state, state.label) == ("failed", "storage")
    assert state.to_run


@pytest.mark.parametrize(
    "content",
    [
        b"{}",
        b"[]",
        b"null",
        b'{"tables": {}}',
        b'{"tables": {"run": {"bytes": 1}}}',
        b'{"tables": {"../../run": {"bytes": 1}}}',
        b"\xff",
    ],
)
def test_a_manifest_of_somebody_else_or_without_tables_is_none(tmp_path: Path, content: bytes) -> None:
    folder = published(config(tmp_path))
    manifest = json.loads((folder.result / "manifest.json").read_bytes())
    without = json.dumps(manifest | {"tables": {}}).encode()
    for each in (content, without):
        (folder.result / "manifest.json").write_bytes(each)
        assert folder.manifest() is None
        assert folder.state().state == "failed"


@pytest.mark.parametrize(
    "content",
    [b"", b" " * 4096, b'{"outcome": "fine", "reason": "", "finished_at": 0}', b'{"outcome": "ok"', b"\xff\xff"],
)
def test_an_unreadable_outcome_is_none(tmp_path: Path, content: bytes) -> None:
    folder, attempt = begin(config(tmp_path), Fake())
    (attempt.path / "outcome.json").write_bytes(content)
    assert attempt.outcome() is None
    assert folder.state().state == "running"


@pytest.mark.parametrize("name", ["x", "1.tmp", "²", "-1", "1 ", "٣", ".1.abc.tmp", "2" * 200])
def test_foreign_folders_among_the_attempts_are_overlooked(tmp_path: Path, name: str) -> None:
    folder, _ = begin(config(tmp_path), Fake())
    (folder.path / "attempts" / name).mkdir()
    assert [attempt.number for attempt in folder.attempts()] == [1]
    assert folder.state().attempt == 1


def test_a_file_where_an_attempt_should_be_is_no_reason_to_stop(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    (tmp_path / "attempts").mkdir()
    (tmp_path / "attempts" / "1").write_text("")
    assert folder.state().attempt == 1
    attempt = folder.claim()
    assert attempt is not None
    assert attempt.number == 2


@pytest.mark.parametrize(
    "content",
    [b"", b"3", b"- 1", b"a: [", b"\xff\xfe\x00", b"a: !!python/object/apply:os.system [id]", b"x: \x00", b"epochs: 3"],
)
def test_a_foreign_configuration_is_refused_in_words(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.yaml").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        RunFolder(tmp_path).config()
    assert "\n" not in str(caught.value)


def test_a_configuration_with_a_foreign_target_is_refused(tmp_path: Path) -> None:
    run = config(tmp_path)
    folder = RunFolder.of(run)
    folder.write_intent(run, [])
    path = folder.path / "config.yaml"
    path.write_text(path.read_text().replace("parallelbench.models.cnn.CnnSmall", "os.system"))
    with pytest.raises(ConfigError, match="refused"):
        folder.config()


@pytest.mark.parametrize("part", UNIDENTIFYING)
def test_options_that_an_older_release_did_not_have_are_the_shipped_ones(part: str, tmp_path: Path) -> None:
    run = config(tmp_path, site=component("site", "default"), launcher=component("launcher", "local"))
    folder, attempt = begin(run, Fake())
    attempt.write_config(run)
    for path in (folder.path, attempt.path):
        plain = yaml.safe_load((path / "config.yaml").read_text())
        plain[part] = {key: plain[part][key] for key in plain[part] if key not in UNIDENTIFYING[part] or key == "name"}
        (path / "config.yaml").write_text(yaml.safe_dump(plain))
    assert folder.config() == attempt.config() == run
    assert run_id(folder.config()) == run_id(run)
    runs = load(tmp_path)
    assert (runs.skipped, runs.run["state"].to_list()) == ((), ["running"])


def test_long_reasons_and_odd_characters_fit_the_reserved_space(tmp_path: Path) -> None:
    folder, attempt = begin(config(tmp_path), Fake())
    for text in ("x" * 10_000, "\x01" * 10_000, "💥" * 10_000, "a\nb\t c", "\udcff", '"\\' * 5000):
        attempt.finish("error", text)
        state = folder.state()
        assert state.label == "error"
        assert state.outcome is not None
        assert len(state.outcome.reason.splitlines()) <= 1


# --- claiming


def claim_at_once(path: Path, barrier: Barrier, queue: Any) -> None:
    folder = RunFolder(path)
    after = len(folder.attempts())
    barrier.wait()
    queue.put(folder.claim(after=after) is not None)


@pytest.mark.slow
def test_of_many_that_claim_at_once_exactly_one_wins(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    for number in range(1, 9):
        barrier, queue = context.Barrier(4), context.Queue()
        processes = [context.Process(target=claim_at_once, args=(tmp_path, barrier, queue)) for _ in range(4)]
        for process in processes:
            process.start()
        wins = [queue.get(timeout=60) for _ in processes]
        for process in processes:
            process.join()
        assert sum(wins) == 1
        assert {path.name for path in (tmp_path / "attempts").iterdir()} == {str(n) for n in range(1, number + 1)}
        assert all(attempt.supervisor() is not None for attempt in RunFolder(tmp_path).attempts())


def test_an_attempt_that_began_meanwhile_is_not_followed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    seen = folder.attempts()
    assert folder.claim() is not None, "somebody else"
    assert folder.claim(after=len(seen)) is None
    assert len(folder.attempts()) == 1


def test_a_newer_attempt_supersedes_and_a_claim_names_its_job(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    first, second = folder.claim(), folder.claim(job="1234-1")
    assert first is not None
    assert second is not None
    assert (folder.superseded(first), folder.superseded(second)) == (True, False)
    supervisors = [attempt.supervisor() for attempt in (first, second)]
    assert [supervisor.job for supervisor in supervisors if supervisor is not None] == ["", "1234-1"]


def test_claiming_on_a_full_disk_leaves_nothing_behind(small_disk: Path) -> None:
    folder = RunFolder(small_disk / "run")
    (small_disk / "run" / "attempts").mkdir(parents=True)
    fill_disk(small_disk)
    with pytest.raises(StorageError, match="disk is full"):
        folder.claim()
    assert list((small_disk / "run" / "attempts").iterdir()) == []


def test_outcomes_and_last_words_have_room_on_a_full_disk(small_disk: Path) -> None:
    _, attempt = begin(config(small_disk, strategy="ddp", devices=2), Fake())
    fill_disk(small_disk)
    attempt.finish("storage", "x" * 10_000)
    assert [attempt.error_file(rank).stat().st_size for rank in (0, 1)] == [4096, 4096]


# --- stopping


def test_anybody_can_ask_an_attempt_to_stop(tmp_path: Path) -> None:
    _, attempt = begin(config(tmp_path), Fake())
    assert not attempt.stop_requested()
    for _ in range(2):
        attempt.ask_to_stop()
        assert Attempt(attempt.path).stop_requested()
    attempt.withdraw()
    with pytest.raises(StorageError):
        attempt.ask_to_stop()


# --- finding


def test_runs_are_found_from_the_results_the_sweep_and_the_run(tmp_path: Path) -> None:
    first, second = published(config(tmp_path)), published(config(tmp_path, sweep_name="other"))
    (tmp_path / "demo" / "report").mkdir()
    (tmp_path / "notes.txt").write_text("")
    assert [folder.path for folder in find_runs(tmp_path)] == [first.path, second.path]
    assert [folder.path for folder in find_runs(tmp_path / "demo")] == [first.path]
    assert [folder.path for folder in find_runs(first.path)] == [first.path]
    assert find_runs(tmp_path / "nothing") == []


def test_an_attempt_executes_the_configuration_of_its_day(tmp_path: Path) -> None:
    run = config(tmp_path)
    folder, attempt = begin(run, Fake())
    plain = config(tmp_path, site={"data_dir": "/elsewhere"})
    attempt.write_config(plain)
    assert attempt.config() == plain
    assert run_id(attempt.config()) == run_id(folder.config())
    assert folder.config() == run


def test_a_withdrawn_attempt_never_was(tmp_path: Path) -> None:
    folder, attempt = begin(config(tmp_path), Fake())
    attempt.withdraw()
    assert folder.state().state == "missing"
    shutil.rmtree(folder.path)
    attempt.withdraw()


def test_an_intent_that_can_not_be_looked_for_is_a_storage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the version of Python: `Path.exists` of 3.14 takes a stale handle for a file that is missing."""
    run = config(tmp_path)
    folder = RunFolder.of(run)
    folder.write_intent(run, ["batch_size=32"])
    genuine = os.stat

    def stale(path: Any, *rest: Any, **named: Any) -> os.stat_result:
        if str(path).endswith("config.yaml"):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return genuine(path, *rest, **named)

    with monkeypatch.context() as faults:
        faults.setattr(os, "stat", stale)
        with pytest.raises(StorageError, match="Stale file handle"):
            folder.write_intent(run, ["other=1"])
    assert (folder.path / "overrides.txt").read_text() == "batch_size=32\n"
