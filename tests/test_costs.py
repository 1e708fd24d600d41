"""What a test takes of the cores is recorded, whichever of its processes took it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests import costs

if TYPE_CHECKING:
    from pathlib import Path

BURN = "import time\nwhile time.process_time() < 0.2: pass"
NESTED = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {BURN!r}])"


@pytest.mark.cases("child")
@pytest.mark.slow
@pytest.mark.parametrize("code", [BURN, NESTED], ids=["child", "grandchild"])
def test_what_ended_and_what_lives_on_is_counted(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(costs.VARIABLE, str(tmp_path / "costs"))
    with costs.recorded("ended"):
        subprocess.run([sys.executable, "-c", code], check=True)
    lasting = f"print(flush=True)\ninput()\n{code}\nprint(flush=True)\ninput()"
    with subprocess.Popen(
        [sys.executable, "-c", lasting], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        with costs.recorded("lives on"):
            print(file=process.stdin, flush=True)
            process.stdout.readline()
        process.communicate("\n")
    lines = {line["test"]: line for line in map(json.loads, (tmp_path / "costs").read_text().splitlines())}
    assert lines["ended"]["cpu_s"] >= 0.18, "the kernel counts in ticks of 0.01 s"
    assert lines["lives on"]["cpu_s"] >= 0.1, "it had used some of its 0.2 s before"


def test_nothing_is_recorded_unless_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(costs.VARIABLE, raising=False)
    with costs.recorded("a test"):
        pass
    assert not list(tmp_path.iterdir())
