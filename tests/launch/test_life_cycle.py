"""When the next attempt of a run may begin, and how long an attempt shows that it is alive."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest

from launch import local
from launch.attempt.processes import Training
from launch.attempt.supervisor import NotBegun, carry_out
from launch.local import OnThisMachine
from launch.sweep import expand
from parallelbench.config.identity import run_id
from parallelbench.results import attempt as attempt_module
from parallelbench.results import liveness
from parallelbench.results.attempt import ABSENCE_S, Attempt, Outcome
from parallelbench.results.folder import RunFolder
from parallelbench.results.journal import Journal
from tests.analysis.factory import Fake, begin, write_epochs
from tests.faults import fault
from tests.helpers import TINY, configured


def carried_out(folder: RunFolder, train: Callable[[Training], Outcome], *, job: str = "") -> Outcome | NotBegun:
    run = configured(f"results={folder.path.parent}", "launcher=inline")
    return carry_out(folder, run, device_type="cpu", skip=lambda *_: "", train=train, job=job)


def failing(training: Training) -> Outcome:
    return training.attempt.finish("error", "made up")


def seemingly_dead(folder: RunFolder, job: str = "") -> Attempt:
    """The attempt of a supervisor on another machine, whose lock can't be seen from here."""
    attempt = folder.claim(job=job)
    assert attempt is not None
    assert attempt.lock is not None
    attempt.lock.release()
    supervisor = attempt.supervisor()
    assert supervisor is not None
    elsewhere = msgspec.structs.replace(supervisor, machine="another")
    (attempt.path / "supervisor.json").write_bytes(msgspec.json.encode(elsewhere))
    old = time.time() - ABSENCE_S - 1
    os.utime(attempt.heartbeat, (old, old))
    assert folder.state().label == "killed"
    return attempt


@fault(
    "lifecycle",
    "A file server stands still for minutes",
    injection="an attempt of another machine whose heartbeat is too old, and goes on when somebody looks",
    outcome="it is watched before the next attempt begins, seen to live, and let live",
)
def test_an_attempt_whose_heartbeat_goes_on_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path)
    first = seemingly_dead(folder)
    monkeypatch.setattr(liveness.time, "sleep", lambda _: first.heartbeat.touch())
    outcome = carried_out(folder, failing)
    assert isinstance(outcome, NotBegun)
    assert "heartbeat goes on" in outcome.reason
    assert [each.number for each in folder.attempts()] == [1]


def test_the_next_attempt_follows_one_that_is_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path)
    seemingly_dead(folder)
    monkeypatch.setattr(attempt_module, "WATCH_S", 0.0)
    assert isinstance(carried_out(folder, failing), Outcome)
    assert [each.number for each in folder.attempts()] == [1, 2]


def test_nobody_waits_for_what_the_cluster_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stirs(_: Attempt) -> bool:
        raise AssertionError("watched")

    folder = RunFolder(tmp_path)
    seemingly_dead(folder, job="token.17.0")
    monkeypatch.setattr(Attempt, "stirs", stirs)
    assert isinstance(carried_out(folder, failing, job="token.17.1"), Outcome)


@fault(
    "lifecycle",
    "A supervisor that is busy",
    injection="one that trains in its own process, or publishes, and does nothing else for long",
    outcome="its heartbeat goes on, so no other host takes it for dead",
)
def test_a_heartbeat_goes_on_whatever_its_supervisor_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beaten, beat = threading.Event(), os.utime

    def utime(path: Any, *times: Any) -> None:
        beat(path, *times)
        beaten.set()

    def busy(training: Training) -> Outcome:
        assert beaten.wait(timeout=60)
        assert folder.state().state == "running"
        return training.attempt.finish("error", "made up")

    folder = RunFolder(tmp_path)
    monkeypatch.setattr(attempt_module, "HEARTBEAT_S", 0.001)
    monkeypatch.setattr(liveness.os, "utime", utime)
    assert isinstance(carried_out(folder, busy), Outcome)


def test_an_attempt_without_a_record_is_over_when_it_is_left(tmp_path: Path) -> None:
    def interrupted(_: Training) -> Outcome:
        raise KeyboardInterrupt

    folder = RunFolder(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        carried_out(folder, interrupted)
    assert folder.state().label == "killed", "although the process that claimed it lives"


def test_a_result_that_is_published_later_says_where_it_was_measured(tmp_path: Path) -> None:
    """The quota was full; the next submission has another launcher, which trains nothing."""
    words = ("data=digits", "model=cnn_small", f"results={tmp_path}")
    run, today = configured(*words, "launcher=slurm", "site=vtrain"), configured(*words, "launcher=local")
    assert run_id(today) == run_id(run)
    folder, attempt = begin(run, Fake())
    attempt.write_config(run)
    write_epochs(run, attempt, Fake(), epochs=run.epochs)
    Journal(attempt.path / "journal-rank0.jsonl").event("finished", outcome="ok")
    attempt.finish("storage", "the quota is full")
    found = carry_out(folder, today, device_type="cpu", skip=lambda *_: "", train=failing)
    assert isinstance(found, NotBegun)
    assert found.published is not None
    (row,) = pq.read_table(folder.result / "run.parquet").to_pylist()
    configured_then = json.loads(row["config_json"])
    assert (row["launcher"], configured_then["site"]["name"]) == ("slurm", "vtrain")


def test_a_run_that_was_forgotten_while_it_waited_is_trained_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    item = OnThisMachine().prepare(expand([*TINY, "device=cpu", f"results={tmp_path}"])[0])
    seen: list[bool] = []
    monkeypatch.setattr(
        local, "carry_out", lambda folder, *_, **__: seen.append((folder.path / "config.yaml").exists())
    )
    OnThisMachine()._start(item, frozenset(), lambda _: None, submit="x")  # type: ignore[arg-type, return-value]
    assert seen == [True]
