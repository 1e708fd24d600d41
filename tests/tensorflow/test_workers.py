"""TensorFlow's workers evaluate one model, whatever running statistics each of them has."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import TINY
from tests.launch.programs import completed, the_run
from tests.tensorflow.test_contract import rows

pytestmark = [pytest.mark.slow, pytest.mark.tensorflow]


@pytest.mark.exhaustive
def test_workers_evaluate_by_the_same_running_statistics(tmp_path: Path) -> None:
    """torch evaluates what rank 0 hands over, on one device: the closing check."""
    model = ("model=cnn", "model.widths=[8]", "model.norm=batch", "epochs=1", "launcher.oversubscribe=true")
    code, text = completed("run", *TINY, *model, "strategy=tf_multi_worker", "devices=2", results=tmp_path)
    assert code == 0, text
    found = {row["check"]: row for row in rows(the_run(tmp_path))["checks"]}
    assert found["evaluation loss"]["passed"], found["evaluation loss"]
    assert all(row["passed"] is not False for row in found.values()), found
