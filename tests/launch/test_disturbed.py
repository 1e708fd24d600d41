"""A run whose core another program kept busy: its epochs are marked, and no comparison rests on them."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from subprocess import PIPE
from typing import TYPE_CHECKING

import pytest

from analysis import excluded, load
from analysis.metrics import per_epoch
from parallelbench.world.machine import this_machine
from tests.launch.programs import completed

if TYPE_CHECKING:
    from pathlib import Path

BUSY = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])}); print(flush=True)\nwhile True: pass"


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_run_beside_a_busy_program_does_not_count(tmp_path: Path) -> None:
    core = this_machine().cores[0]  # the first rank's
    with ExitStack() as stack:
        for _ in range(2):
            program = stack.enter_context(subprocess.Popen([sys.executable, "-c", BUSY, str(core)], stdout=PIPE))
            stack.callback(program.kill)  # before it is waited for
            assert program.stdout is not None
            program.stdout.readline()
        code, text = completed("run", "data=digits", "model=cnn_small", "epochs=3", results=tmp_path)
    assert code == 0, text
    assert "disturbed by other programs" in text
    runs = load(tmp_path)
    epochs = per_epoch(runs)
    if epochs["lost_share"].null_count():
        pytest.skip("the kernel here does not account for cores")
    # Of three programs that want one core, each gets a third of it; a rank that also waits for the disk loses less.
    assert epochs["lost_share"].min() > 0.2
    assert epochs["disturbed"].to_list() == [True] * 3
    assert excluded(runs)["exclusion"].to_list() == ["disturbed"]
    assert "2 of 2 steady epochs" in excluded(runs)["exclusion_detail"].item()
