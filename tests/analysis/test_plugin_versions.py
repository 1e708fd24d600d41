"""Runs of unlike sources of a plugin are unlike: other variants of a strategy, other work of a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from analysis import UnlikeWork, by, compare, load
from analysis.comparison.baseline import limits
from analysis.comparison.notes import Code
from analysis.comparison.work import labels
from parallelbench.models.cnn import CnnSmall
from tests.analysis.factory import Fake, config, foreign, published, steady
from tests.analysis.test_two_sides import BETWEEN, begins

ONE, TWO = "mystrategies@1111222233334444", "mystrategies@5555666677778888"
IN_TURN = 1.7e9


def environment(sources: str) -> str:
    return json.dumps(json.loads(Fake.environment) | {"plugin": {"sources": sources, "git": None}})


def strategy_of(root: Path, sources: str, times: list[float], *, at: float = IN_TURN) -> None:
    """Repeats of a plugin's strategy."""
    for repeat, time_s in enumerate(times):
        run = foreign(config(root, devices=2, repeat=repeat), "mine")
        run = structs.replace(run, plugin_sources=sources)
        fake = steady(time_s, started_at=begins(at, repeat), environment=environment(sources))
        published(run, fake)


@pytest.mark.slow
def test_two_versions_of_a_strategy_are_two_variants_beside_one_baseline(tmp_path: Path) -> None:
    for repeat in range(3):
        published(config(tmp_path, repeat=repeat), steady(10.0 + repeat, started_at=IN_TURN + 1e5 * repeat))
    strategy_of(tmp_path, ONE, [6.0, 6.6, 7.2])
    strategy_of(tmp_path, TWO, [5.0, 5.5, 6.0])
    runs = load(tmp_path)
    named = labels(runs)
    assert named["group"].n_unique() == 1
    assert sorted(named["configuration"].unique()) == [
        f"mine × 2, plugin sources {ONE}", f"mine × 2, plugin sources {TWO}", "single × 1",
    ]  # fmt: skip
    assert not limits(runs, (Code.ENTRIES,)), "that single has no plugin is no difference"


@pytest.mark.slow
def test_two_folders_of_two_versions_are_compared_only_where_that_is_named(tmp_path: Path) -> None:
    strategy_of(tmp_path / "a", ONE, [6.0, 6.6, 7.2, 7.8])
    strategy_of(tmp_path / "b", TWO, [3.0, 3.3, 3.7, 3.9], at=BETWEEN)
    sides = load(tmp_path / "a"), load(tmp_path / "b")
    with pytest.raises(UnlikeWork, match=rf"strategy\.plugin_sources: {ONE} and {TWO}") as refusal:
        compare(*sides)
    assert refusal.value.across == ("strategy.plugin_sources",)
    found = compare(*sides, across=refusal.value.across)
    assert [row.verdict for row in found.rows] == ["faster"]
    assert found.notes[0] == f"The compared runs differ in plugin.sources: {ONE} and {TWO}."


@pytest.mark.slow
def test_two_versions_of_a_model_are_two_works(tmp_path: Path) -> None:
    for sources, strategy, devices in ((ONE, "single", 1), (TWO, "ddp", 2)):
        run = config(tmp_path, strategy=strategy, devices=devices)
        mine: Any = type(CnnSmall)("MyCnn", (CnnSmall,), {"__module__": "mystrategies"}, frozen=True, kw_only=True)
        options = {name: getattr(run.model, name) for name in run.model.__struct_fields__}
        published(structs.replace(run, model=mine(**options), plugin_sources=sources))
    assert labels(load(tmp_path))["group"].n_unique() == 2
    with pytest.raises(UnlikeWork, match=r"model\.plugin_sources"):
        by(load(tmp_path), "strategy", "single", "ddp", across=["devices"])
