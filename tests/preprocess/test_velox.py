"""Velox in its own environment; `make venv-velox` makes it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from parallelbench import environments
from parallelbench.errors import ConfigError
from parallelbench.preprocess import stage
from tests.helpers import TINY, configured
from tests.preprocess.recipes import RECIPES

pytestmark = pytest.mark.velox
ROOT = Path(__file__).parents[2]
SHAPE = (*TINY, "epochs=0", "preprocess.engine=velox")


@pytest.fixture(autouse=True, scope="module")
def python() -> Path:
    try:
        return environments.interpreter("velox")
    except ConfigError as error:
        pytest.skip(str(error))


def printed(python: Path, script: str) -> subprocess.CompletedProcess[str]:
    """What a script in Velox's environment ends like."""
    begin = """
import os, sys
import numpy as np, pyarrow as pa
from pyvelox.arrow import to_arrow, to_velox
from pyvelox.plan_builder import PlanBuilder
from pyvelox.runner import LocalRunner
def run(plan, kept):
    runner = LocalRunner(plan.get_plan_node())
    kept.append(runner)
    return [to_arrow(vector) for vector in runner.execute(1)]
def leave(*words):
    print(*words, flush=True)
    os._exit(0)
"""
    return subprocess.run([str(python), "-I", "-c", begin + script], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("recipe", RECIPES)
def test_velox_prepares_what_numpy_prepares_again_and_again(tmp_path: Path, recipe: str) -> None:
    """Of two record batches; the stage raises where a value differs, in the first execution or in the last."""
    options = ("data.image_size=4", "data.train_samples=70000", "preprocess.executions=4")
    run = configured(*SHAPE, *options, f"preprocess.recipe={recipe}")
    found = stage.preprocess(run, run.data.load(tmp_path), tmp_path / "files")
    assert [row["execution"] for row in found.rows] == [1, 2, 3, 4]
    assert all(row["copied_in_bytes"] == 70_000 * 16 for row in found.rows), "the pixels alone are converted"
    assert found.facts["preprocess_version"] == "0.2.0"


def test_three_channels_have_their_own_mean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = configured(*SHAPE, "preprocess.recipe=normalise", "data.channels=3")
    monkeypatch.setattr(type(run.data), "mean", (0.4914, 0.4822, 0.4465))
    monkeypatch.setattr(type(run.data), "std", (0.2470, 0.2435, 0.2616))
    found = stage.preprocess(run, run.data.load(tmp_path), tmp_path / "files")
    assert found.columns["pixels"].shape == (64, 3 * 8 * 8)


def test_arrows_buffers_are_taken_in_without_a_copy(python: Path) -> None:
    """What changes in them afterwards, Velox sees."""
    script = """
values = np.arange(1000)
vector = to_velox(pa.record_batch({"value": pa.array(values)}))
values[0] = 99
(result,) = run(PlanBuilder().values([vector]).project(["value"]), [])
leave(pa.RecordBatch.from_struct_array(result)["value"][0])
"""
    assert printed(python, script).stdout == "99\n"


def test_parquet_can_not_be_read(python: Path, tmp_path: Path) -> None:
    """The reason for Arrow: were it to succeed some day, the claim about loading data would have to be read anew."""
    script = f"""
import pyarrow.parquet as pq
from pyvelox.runner import register_hive
from pyvelox.file import PARQUET
from pyvelox.type import BIGINT, ROW
path = {str(tmp_path / "table.parquet")!r}
pq.write_table(pa.table({{"value": [1, 2]}}), path)
register_hive("hive")
plan = PlanBuilder()
scan = plan.table_scan(ROW(["value"], [BIGINT()]), connector_id="hive", input_files=[PARQUET(path)])
leave(run(scan, []))
"""
    done = printed(python, script)
    assert done.returncode != 0
    assert "not registered for format parquet" in done.stderr


def test_the_environment_is_beside_the_suites_own(python: Path) -> None:
    assert os.access(python, os.X_OK)
    state = dict(environments.engine_states())["preprocess.engine=velox"]
    assert state == f"{python}: pyvelox 0.2.0, pyarrow 19.0.1"
