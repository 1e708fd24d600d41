"""Velox in its own environment; `make venv-velox` makes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallelbench import environments
from parallelbench.errors import ConfigError
from parallelbench.preprocess import stage
from tests.helpers import TINY, configured
from tests.preprocess.recipes import RECIPES

pytestmark = pytest.mark.velox
SHAPE = (*TINY, "epochs=0", "preprocess.engine=velox")


@pytest.fixture(autouse=True, scope="module")
def python() -> Path:
    try:
        return environments.interpreter("velox")
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("recipe", RECIPES)
def test_velox_prepares_what_numpy_prepares_again_and_again(tmp_path: Path, recipe: str) -> None:
    """Of two record batches; the stage raises where a value differs, in the first execution or in the last."""
    options = ("data.image_size=4", "data.train_samples=70000", "preprocess.executions=4")
    run = configured(*SHAPE, *options, f"preprocess.recipe={recipe}")
    rows, facts = stage.preprocess(run, run.data.load(tmp_path), tmp_path / "files")
    assert [row["execution"] for row in rows] == [1, 2, 3, 4]
    assert all(row["copied_in_bytes"] == 70_000 * 16 for row in rows), "the pixels alone are converted"
    assert facts["preprocess_version"] == "0.2.0"


def test_three_channels_have_their_own_mean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = configured(*SHAPE, "preprocess.recipe=normalise", "data.channels=3")
    monkeypatch.setattr(type(run.data), "mean", (0.4914, 0.4822, 0.4465))
    monkeypatch.setattr(type(run.data), "std", (0.2470, 0.2435, 0.2616))
    ((row,), _) = stage.preprocess(run, run.data.load(tmp_path), tmp_path / "files")
    assert row["output_rows"] == 64
    assert row["output_bytes"] >= 64 * (8 + 8 + 4 * 3 * 8 * 8)
