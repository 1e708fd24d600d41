"""Limits of the user are asked before anything fails for lack of them: one line with the value, the need, the fix."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from parallelbench.errors import ConfigError
from parallelbench.world import allowance
from tests.faults import fault
from tests.helpers import TINY

RUN = ("run", *TINY, "strategy=ddp", "devices=2", "launcher.oversubscribe=true")


def answered(*arguments: str, limits: dict[int, int], cwd: Path) -> subprocess.CompletedProcess[str]:
    def limit() -> None:
        for kind, most in limits.items():
            resource.setrlimit(kind, (most, most))

    program = [sys.executable, "-m", "parallelbench.cli", *arguments]
    return subprocess.run(program, cwd=cwd, preexec_fn=limit, capture_output=True, text=True, check=False)


@pytest.mark.exhaustive
@fault(
    "storage and input",
    "Few open files, or little address space",
    injection="ulimit -n 32; ulimit -v of 3 GiB for a run, of 16 GiB for figures",
    outcome="exit 2 and one line with the value, what is needed, and the command; nothing is written",
)
@pytest.mark.parametrize(
    ("arguments", "limits", "said"),
    [
        (RUN, {resource.RLIMIT_NOFILE: 32}, "ulimit -n is 32, but this run needs 72 open files: `ulimit -n 72`"),
        (RUN, {resource.RLIMIT_AS: 3 << 30}, r"ulimit -v is 3145728 KiB, but torch .* 4 GiB .*: `ulimit -v unlimited`"),
    ],
)
def test_what_a_run_lacks_is_said_before_it_starts(
    tmp_path: Path, arguments: tuple[str, ...], limits: dict[int, int], said: str
) -> None:
    done = answered(*arguments, "results=results", limits=limits, cwd=tmp_path)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert re.search(said, done.stderr), done.stderr
    assert list(tmp_path.iterdir()) == []


def limited(monkeypatch: pytest.MonkeyPatch, **limits: int) -> None:
    """Let this process read these limits."""
    kinds = {getattr(resource, f"RLIMIT_{name}"): most for name, most in limits.items()}
    real: Callable[[int], tuple[int, int]] = resource.getrlimit
    monkeypatch.setattr(
        allowance.resource, "getrlimit", lambda kind: (kinds[kind],) * 2 if kind in kinds else real(kind)
    )


def test_figures_are_not_begun_where_v8_could_only_end_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, AS=16 << 30)
    with pytest.raises(ConfigError, match=r"ulimit -v is 16777216 KiB, but figures .* 72 GiB .*`ulimit -v unlimited`"):
        allowance.require_figures()


@fault(
    "storage and input",
    "Few processes and threads",
    injection="ulimit -u of 5, 7 and 16, with POLARS_MAX_THREADS=128",
    outcome="libraries share the threads that are left; where too few are, one line says how many are needed",
)
def test_libraries_share_the_threads_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    monkeypatch.setattr(os, "getuid", lambda: 4711)  # nobody's: none of its processes run
    monkeypatch.setenv("POLARS_MAX_THREADS", "128")
    for name in ("RAYON_NUM_THREADS", "TOKIO_WORKER_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.setenv(name, "64")
    limited(monkeypatch, NPROC=16)
    allowance.limit_pools()
    names = ("POLARS_MAX_THREADS", "RAYON_NUM_THREADS", "TOKIO_WORKER_THREADS", "OPENBLAS_NUM_THREADS")
    assert [os.environ[name] for name in names] == ["3", "3", "3", "1"]
    limited(monkeypatch, NPROC=5)
    with pytest.raises(ConfigError, match=r"ulimit -u is 5, of which 5 are left, but drawing .*: `ulimit -u"):
        allowance.require_figures()
    limited(monkeypatch, NPROC=7)
    with pytest.raises(ConfigError, match=r"ulimit -u is 7, of which 7 are left, but a command needs 8"):
        allowance.limit_pools()


def test_files_are_raised_as_far_as_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(allowance.resource, "getrlimit", lambda _: (32, 4096))
    monkeypatch.setattr(allowance.resource, "setrlimit", lambda _, limits: raised.append(limits))
    allowance._require_files(72)
    assert raised == [(72, 4096)]


@fault(
    "storage and input",
    "A user without a home or a name",
    injection="a user id that has no entry, without HOME",
    outcome="one line with the id and the variable to set",
)
def test_a_user_without_a_home_is_told_how_to_name_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    with pytest.raises(ConfigError, match=r"the user id 4711 has no home .*`export HOME=/some/folder`"):
        allowance.require_home()


@fault(
    "workers",
    "No loopback, or no name for it",
    injection="connections to 127.0.0.1 that fail; /etc/hosts without localhost is asked by nobody",
    outcome="one line before anything starts; ranks of one machine meet at 127.0.0.1",
)
def test_ranks_that_can_not_meet_are_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    allowance.require_loopback()

    def unreachable(*_: object, **__: object) -> None:
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(allowance.socket, "create_connection", unreachable)
    with pytest.raises(
        ConfigError, match=r"127\.0\.0\.1, .* \(Network is unreachable\): bring the loopback .* devices=1"
    ):
        allowance.require_run(processes=2, threads=1, cpu=True, alone=True)
    allowance.require_run(processes=1, threads=1, cpu=True, alone=True)
