"""Results of several versions of the program in one folder: each reads all, and none is lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from parallelbench.config.identity import CONFIGURATION_VERSION
from parallelbench.results.folder import RunFolder, file_sha256, find_runs
from parallelbench.results.tables import TABLES_VERSION
from tests.faults import fault
from tests.helpers import TINY
from tests.launch.programs import completed
from tests.versions import other_version

ARGUMENTS = ("submit", *TINY, "epochs=1", "measure.parity=false", "measure.telemetry_hz=0", "launcher.checkpoint=never")


@pytest.fixture
def ours(tmp_path: Path) -> RunFolder:
    """A run of this program."""
    code, text = completed(*ARGUMENTS, results=tmp_path / "results")
    assert code == 0, text
    (folder,) = find_runs(tmp_path / "results")
    return folder


@pytest.mark.slow
@fault(
    "storage and input",
    "Runs of another version of configurations",
    injection="a copy of the program, for which configurations mean something else, works in the same results folder",
    outcome="each runs its own run and leaves the other's alone to the byte; status knows both; each reads its own only, "
    "and says why",
)
@pytest.mark.exhaustive
def test_runs_of_two_versions_lie_side_by_side(
    ours: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results, before = tmp_path / "results", _content(ours.path)
    versions = {"CONFIGURATION_VERSION": CONFIGURATION_VERSION + 1, "TABLES_VERSION": TABLES_VERSION + 1}
    note = "its result is of version {} of the tables, and this program reads version {}"
    with monkeypatch.context() as other:
        for name, value in other_version(tmp_path / "other", **versions).items():
            other.setenv(name, value)
        code, text = completed(*ARGUMENTS, results=results)
        assert code == 0, text
        assert _read(results, note.format(TABLES_VERSION, TABLES_VERSION + 1)) == (True, 1)
    theirs = next(run for run in find_runs(results) if run != ours)
    assert _content(ours.path) == before
    assert _read(results, note.format(TABLES_VERSION + 1, TABLES_VERSION)) == (True, 1)
    assert "1 run is done" in completed(*ARGUMENTS, results=results)[1]
    assert [run.state().label for run in (ours, theirs)] == ["ok", "ok"]
    assert [len(run.attempts()) for run in (ours, theirs)] == [1, 1]


def _content(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): file_sha256(path) for path in folder.rglob("*") if path.is_file()}


def _read(results: Path, note: str) -> tuple[bool, int]:
    """Whether that is said of the other version's run, and how many were read."""
    program = "import sys; from analysis import load; r = load(sys.argv[1]); print(*r.skipped, r.run.height, sep='|')"
    done = subprocess.run([sys.executable, "-c", program, str(results)], capture_output=True, text=True, check=True)
    skipped, _, read = done.stdout.strip().rpartition("|")
    return note in skipped, int(read)
