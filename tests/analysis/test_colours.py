"""Who looks for a strategy in several figures of a report finds it by its colour."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from analysis import load
from analysis.figures import chart, draw, specification
from analysis.figures.chart import STYLES, legible
from tests.analysis.factory import config, foreign, published, steady

ROOT = Path(__file__).resolve().parents[2]


def test_every_shipped_strategy_has_a_colour_of_its_own() -> None:
    assert STYLES.keys() == {path.stem for path in (ROOT / "conf" / "strategy").glob("*.yaml")}
    assert len({colour for colour, _ in STYLES.values()}) == len(STYLES)


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_words_in_a_strategys_colour_are_legible_on_white() -> None:
    for colour, _ in STYLES.values():
        contrast = 1.05 / (luminance(legible(colour)) + 0.05)
        assert contrast > 4.45, colour  # colours are whole numbers
        assert legible(colour) == colour or contrast < 5, "no darker than needed"


def coloured(node: Any) -> Iterator[tuple[str, str]]:
    """Each name of a variant or a configuration in a chart, and its colour."""
    if isinstance(node, dict):
        colour = node.get("color")
        if isinstance(colour, dict) and colour.get("field") in ("variant", "configuration"):
            yield from zip(colour["scale"]["domain"], colour["scale"]["range"], strict=True)
        node = list(node.values())
    if isinstance(node, list):
        for child in node:
            yield from coloured(child)


@pytest.mark.slow
def test_a_strategy_has_one_colour_within_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one of a plugin, whose figures lack other ones: `mine` has several batches, `another` has one."""
    monkeypatch.setattr(chart, "MOST_CONFIGURATIONS", 99)
    ways: list[dict[str, Any]] = [{}, {"strategy": "ddp", "devices": 2}, {"strategy": "tf_mirrored", "devices": 2}]
    ways += [{"strategy": "ddp", "devices": 2, "nodes": 2}]
    ways += [{"strategy": {"name": "ddp", "bucket_mib": float(size)}, "devices": 2} for size in range(1, 9)]
    for batch in (64, 128):
        for way in ways:
            published(config(tmp_path, batch_size=batch, **way), steady(10.0 / way.get("devices", 1)))
        for name in ("another", "mine") if batch == 64 else ("mine",):
            published(foreign(config(tmp_path, batch_size=batch, devices=2), name), steady(6.0))
    found: dict[str, set[str]] = defaultdict(set)
    figures: dict[str, set[str]] = defaultdict(set)
    for figure in draw(load(tmp_path), ["runtime", "throughput_batch", "epoch_rates", "accuracy"]):
        assert figure.chart is not None, figure.name
        for name, colour in coloured(specification(figure.chart)):
            variant = re.sub(r" × \d+( on \d+ nodes)?", "", name)
            found[variant].add(colour)
            figures[variant].add(figure.name)
    assert len(figures["another"]) < len(figures["mine"]) == 4
    assert {name: len(colours) for name, colours in found.items()} == dict.fromkeys(found, 1)
    assert len(found) == len({colour for colours in found.values() for colour in colours}) > 12
