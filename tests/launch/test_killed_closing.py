"""A rank that is really killed while it checks what was trained: the result says that nothing was checked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from analysis import load, summary
from analysis.report.notes import warnings
from parallelbench.results.publish import NO_CLOSING
from parallelbench.results.tables import CLOSING
from tests.launch.programs import completed, own_strategy

if TYPE_CHECKING:
    from pathlib import Path

CODE = '''
"""One device, whose process the kernel ends as soon as somebody asks for its state a second time: after training."""
import os, signal
from parallelbench.strategies.single import Single


class Mine(Single, frozen=True, kw_only=True):
    def prepare(self, model, run, world):
        replica = super().prepare(model, run, world)
        first = replica.full_state_dict

        def before_training():
            replica.full_state_dict = lambda: os.kill(os.getpid(), signal.SIGKILL)
            return first()

        replica.full_state_dict = before_training
        return replica
'''


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_run_killed_in_its_closing_check_says_that_it_was_not_checked(tmp_path: Path) -> None:
    small = ["model=logistic_regression", "data=digits", "epochs=2", "measure.telemetry_hz=0", "measure.probe=false"]
    _, text = completed("run", *own_strategy(tmp_path, CODE, like="single"), *small, results=tmp_path / "results")
    runs = load(tmp_path / "results")
    assert runs.run["state"].item() == "done", text
    assert runs.run["reason"].item() == "trained 2 epochs; not checked: the closing check did not end"
    assert NO_CLOSING in runs.run["warnings"].item()
    (row,) = runs.checks.filter(check=CLOSING).rows(named=True)
    assert (row["epoch"], row["passed"], row["detail"]) == (2, None, "it did not end")
    assert "1 not checked after training" in summary(runs)["parity"].item()
    assert any(NO_CLOSING in line for line in warnings(runs))
