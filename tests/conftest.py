"""Fixtures of several test files."""

from __future__ import annotations

import atexit
import ctypes
import fnmatch
import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.surroundings import hide_the_machine, machine_path, program

hide_the_machine()  # before a library reads the environment

from parallelbench.environments import why_not  # noqa: E402
from tests.warm import cold, warm  # noqa: E402

hypothesis.settings.register_profile("no clock", deadline=None)  # the machine may be busy
hypothesis.settings.load_profile("no clock")

# Every process that a test starts would compile the suite's sources anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


PASSED_TO, PASSED_BEFORE = "PYTEST_PASSED_TO", "PYTEST_PASSED_BEFORE"
"""Variables that name a file: of tests that passed, and of those that need not run again here."""


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep the names of tests that passed, where that is asked for."""
    if (file := os.environ.get(PASSED_TO)) and report.when == "call" and report.passed and not _is_worker():
        with open(file, "a", encoding="utf-8") as passed:
            passed.write(f"{report.nodeid}\n")


def _is_worker() -> bool:
    return "PYTEST_XDIST_WORKER" in os.environ


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests by their cases; leave out what passed elsewhere."""
    _mark_by_cases(items)
    skip_without(items, "tensorflow")
    if file := os.environ.get(PASSED_BEFORE):
        passed = set(Path(file).read_text("utf-8").splitlines())
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
        items[:] = [item for item in items if item.nodeid not in passed]


def pytest_collection_finish() -> None:
    """What was collected stays to the end: collections of garbage need not look at it, and no fork copies it."""
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # at its end, Python frees all
    _one_thread()


def _one_thread() -> None:
    """Torch's threads of two workers would wait for each other on two cores, which takes several times as long."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


def _mark_by_cases(items: list[pytest.Item]) -> None:
    """Of a test that is marked with `cases`, only those are run by `make test`; what is exhaustive is slow, too."""
    told: dict[str, list[bool]] = {}
    for item in items:
        for mark in item.iter_markers("cases"):
            test, _, name = item.nodeid.rstrip("]").partition("[")
            tells = any(fnmatch.fnmatchcase(name, pattern) for pattern in mark.args)
            told.setdefault(test, []).append(tells)
            if not tells:
                item.add_marker("exhaustive")
        if item.get_closest_marker("exhaustive"):
            item.add_marker("slow")
    for test, cases in told.items():
        if len(cases) > 1 and not any(cases):
            raise pytest.UsageError(f"{test}: no case is one of those that its mark names")


def skip_without(items: list[pytest.Item], framework: str) -> None:
    """Skip the tests of a framework where its environment can't be used."""
    marked = [item for item in items if item.get_closest_marker(framework)]
    if marked and (problem := why_not(framework, "cpu")):
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=problem))


@pytest.fixture(scope="session", autouse=True)
def forks() -> Iterator[None]:
    """Start the suite's programs with the libraries loaded already."""
    with warm():
        yield


@pytest.fixture(scope="session", autouse=True)
def quick_disks() -> Iterator[None]:
    """Don't wait for the disk: only a machine that loses its power could tell."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(os, "fsync", os.fstat)
        yield


@pytest.fixture
def by_exec() -> Iterator[None]:
    """Start this test's programs as users do: nothing is loaded before."""
    with cold():
        yield


@pytest.fixture(autouse=True)
def keep_cores() -> Iterator[None]:
    """Give the tests' own process its cores and its thread back after a test that set them, as an inline run does."""
    cores = os.sched_getaffinity(0)
    _one_thread()
    yield
    os.sched_setaffinity(0, cores)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch.compile find the machine's C++ compiler, and what that calls; skips where there is none."""
    program("c++")
    monkeypatch.setenv("PATH", machine_path())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk of its own, of 1 MiB."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"can't mount a small disk here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture
def lock() -> Iterator[Callable[[Path], None]]:
    """Takes all permissions from a file or folder until the end of the test, also for root."""
    modes: dict[Path, int] = {}

    def take(path: Path) -> None:
        modes[path] = path.stat().st_mode
        path.chmod(0)

    _heed_permissions(True)
    yield take
    _heed_permissions(False)
    for path, mode in reversed(modes.items()):
        path.chmod(mode)


def _heed_permissions(heed: bool) -> None:
    """Root overrides permissions by two capabilities (capabilities(7)), which this thread puts down or takes up."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, data) == 0
    overriding, permitted = 1 << 1 | 1 << 2, data[1]  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    data[0] = data[0] & ~overriding if heed else data[0] | (permitted & overriding)
    assert libc.capset(header, data) == 0
