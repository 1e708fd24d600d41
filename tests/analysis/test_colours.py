"""Who looks for a strategy in several figures of a report finds it by its colour."""

from __future__ import annotations

import re
from collections import defaultdict
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from analysis import load
from analysis.figures import draw, specification
from analysis.figures.chart import STYLES
from tests.analysis.factory import config, foreign, published, steady

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
VISIONS = {
    "all cones": np.eye(3),
    "no long cones": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "no medium cones": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "no short cones": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
"""What becomes of linear red, green and blue: Machado, Oliveira and Fernandes, 2009."""
TO_CONES = [
    [0.4122214708, 0.5363325363, 0.0514459929],
    [0.2119034982, 0.6806995451, 0.1073969566],
    [0.0883024619, 0.2817188376, 0.6299787005],
]
TO_LIGHTNESS_AND_HUE = [
    [0.2104542553, 0.7936177850, -0.0040720468],
    [1.9779984951, -2.4285922050, 0.4505937099],
    [0.0259040371, 0.7827717662, -0.8086757660],
]
"""Oklab: Ottosson, 2020. Equal distances look alike; from black to white it is 1."""
DISTINCT, EASILY_DISTINCT = 0.03, 0.075


def seen(colour: str, vision: Any) -> Any:
    """Where the colour lies in Oklab, for who sees so."""
    encoded = np.array(list(bytes.fromhex(colour[1:]))) / 255
    linear = np.where(encoded <= 0.04045, encoded / 12.92, ((encoded + 0.055) / 1.055) ** 2.4)
    return np.array(TO_LIGHTNESS_AND_HUE) @ np.cbrt(np.array(TO_CONES) @ np.clip(np.array(vision) @ linear, 0, 1))


def test_every_shipped_strategy_has_a_colour_of_its_own() -> None:
    assert STYLES.keys() == {path.stem for path in (ROOT / "conf" / "strategy").glob("*.yaml")}
    assert len({colour for colour, _ in STYLES.values()}) == len(STYLES)


@pytest.mark.parametrize("vision", VISIONS)
def test_colours_that_look_alike_to_some_have_other_dashes(vision: str) -> None:
    for (one, (colour, dash)), (other, (other_colour, other_dash)) in combinations(STYLES.items(), 2):
        apart = np.linalg.norm(seen(colour, VISIONS[vision]) - seen(other_colour, VISIONS[vision]))
        assert apart > (EASILY_DISTINCT if dash == other_dash else DISTINCT), (one, other)


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
def test_a_strategy_has_one_colour_within_a_report(tmp_path: Path) -> None:
    """Also one of a plugin, whose figures lack other ones: `mine` has several batches, `another` has one."""
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
