"""The data parallel strategies end to end: started by the program, checked against one device, published."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

from tests.helpers import TINY

MODEL_BYTES = 4 * (64 + 1) * 10
STEPS = 2


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "gradients", "parameters"), [("ring_ddp", 2 / 2, 0), ("fsdp", 1 / 2, 2 / 2)])
def test_a_run_is_published_with_parity_passed_and_its_traffic(
    strategy: str, gradients: float, parameters: float, tmp_path: Path
) -> None:
    """`gradients` and `parameters`: bytes that a rank sends in a step, in sizes of the model."""
    own = [f"strategy={strategy}", "devices=2", f"results={tmp_path}", "launcher.oversubscribe=true"]
    command = [sys.executable, "-P", "-m", "parallelbench.cli", "run", *TINY, "epochs=1", *own]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = next(tmp_path.glob("*/*/result"))
    run = pl.read_parquet(result / "run.parquet")
    assert run["outcome"].to_list() == ["ok"]
    assert run["parity_passed"].to_list() == [True]
    ranks = pl.read_parquet(result / "ranks.parquet")
    assert ranks["gradient_bytes_sent"].to_list() == [STEPS * gradients * MODEL_BYTES] * 2
    assert ranks["parameter_bytes_sent"].to_list() == [STEPS * parameters * MODEL_BYTES] * 2
