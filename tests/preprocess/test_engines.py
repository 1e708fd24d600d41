"""Every engine prepares what plain Python prepares, row by row; Velox: test_velox.py."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest

from parallelbench.config.task import HASH_FACTOR, HASH_MASK, HASH_TERM
from parallelbench.preprocess import recipes, tables
from parallelbench.preprocess.stage import in_order, tolerance
from tests.preprocess.recipes import RECIPES, by_hand, carried_out, columns, table, task

ENGINES = ("numpy", "torch", "arrow", "polars", "duckdb")
ROWS = 211


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """Engines set the threads of their whole process, which here goes on."""
    arrow = pa.cpu_count()
    yield
    pa.set_cpu_count(arrow)


def needs(engine: str) -> None:
    if importlib.util.find_spec("pyarrow" if engine == "arrow" else engine) is None:
        pytest.skip(f"{engine} is not installed")


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("channels", [1, 3])
def test_the_reference_is_the_recipe_written_out(recipe: str, channels: int) -> None:
    each = task(recipe, channels=channels)
    of = columns(each, rows=ROWS)
    found, expected = recipes.prepare(each, of), by_hand(each, of)
    assert len(expected) > 0
    for name, values in found.items():
        rows = [row[name] for row in expected]
        if name == "deviation":
            assert values == pytest.approx(rows, rel=1e-12)
        else:
            assert np.array_equal(values, np.array(rows, values.dtype)), name
    assert found.keys() == expected[0].keys()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("channels", "batch_rows"), [(1, ROWS), (3, 50)])
def test_an_engine_prepares_what_the_reference_prepares(
    engine: str, recipe: str, channels: int, batch_rows: int
) -> None:
    needs(engine)
    each = task(recipe, channels=channels)
    of = columns(each, rows=ROWS)
    found = carried_out(engine, each, table(of, batch_rows=batch_rows))
    limit = tolerance(recipe, engine)
    assert limit == (1e-12 if recipe == "statistics" else 1e-6 if (engine, recipe) == ("polars", "normalise") else 0)
    expected = recipes.prepare(each, of)
    assert tables.difference(in_order(each, found), in_order(each, expected), tolerance=limit) == ""


@pytest.mark.parametrize("engine", ENGINES)
def test_an_empty_result_is_no_error(engine: str) -> None:
    needs(engine)
    each = task("filter")
    of = columns(each, rows=20)
    of["label"][:] = 4
    found = carried_out(engine, each, table(of, batch_rows=20))
    assert tables.difference(found, recipes.prepare(each, of), tolerance=0.0) == ""
    assert len(found["label"]) == 0


@pytest.mark.parametrize(
    ("name", "change", "difference"),
    [
        ("pixels", lambda values: np.nextafter(values, np.float32(9)), "8 of 8 values of pixels"),
        ("pixels", lambda values: values.astype(np.float64), "pixels is float64, not float32"),
        ("pixels", lambda values: values * np.float32(-1) * 0, "4 of 8 values of pixels"),
        ("label", lambda values: values + 1, "2 of 2 values of label"),
        ("label", lambda values: values[:1], "it has 1 rows, not 2"),
    ],
)
def test_a_difference_is_found_in_the_last_bit(name: str, change: object, difference: str) -> None:
    expected = {"label": np.arange(2), "pixels": np.zeros((2, 4), np.float32)}
    expected["pixels"][1] = [-0.0] * 4 if "4 of" in difference else [1.0] * 4
    if "4 of" in difference:
        expected["pixels"][0] = 0.0
        change = lambda values: np.zeros_like(values)  # noqa: E731
    found = expected | {name: change(expected[name])}  # type: ignore[operator]
    assert tables.difference(found, expected, tolerance=0.0) == difference
    assert tables.difference(expected, expected, tolerance=0.0) == ""


def test_other_columns_are_a_difference() -> None:
    expected = {"label": np.arange(2)}
    assert tables.difference({"group": np.arange(2)}, expected, tolerance=1.0) == "its columns are group, not label"


def test_a_tolerance_is_relative_above_1_and_lets_no_nan_pass() -> None:
    expected = {"mean": np.array([1000.0, 0.001])}
    near, far = {"mean": np.array([1000.0005, 0.001])}, {"mean": np.array([1000.0, 0.002])}
    assert tables.difference(near, expected, tolerance=1e-6) == ""
    assert tables.difference(far, expected, tolerance=1e-6) == "1 of 2 values of mean"
    nan = {"mean": np.array([np.nan, 0.001])}
    assert tables.difference(nan, expected, tolerance=1.0) == "1 of 2 values of mean"


def test_the_hash_fits_64_bits_and_takes_a_tenth() -> None:
    assert (2**32 - 1) * HASH_FACTOR + HASH_TERM < 2**63
    each = task("subset")
    samples = np.arange(100_000)
    kept = recipes.prepare(each, {"sample": samples, "label": samples})["sample"]
    assert len(kept) == pytest.approx(10_000, rel=0.01)
    assert len(set(((samples * HASH_FACTOR + HASH_TERM) & HASH_MASK).tolist())) == len(samples), "a bijection"
