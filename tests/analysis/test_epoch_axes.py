"""Figures over epochs: whole epochs on the axis, and the run's loss on the other one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import vl_convert

from analysis import load
from analysis.figures import accuracy, loss
from tests.analysis.factory import Fake, config, published

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("figure", [accuracy.figure, loss.figure])
@pytest.mark.parametrize("epochs", [2, 3])
def test_ticks_are_whole_epochs(figure: Any, epochs: int, tmp_path: Path) -> None:
    published(config(tmp_path, epochs=epochs), Fake())
    drawn = vl_convert.vegalite_to_svg(figure(load(tmp_path)).to_dict())
    found = [text for text in re.findall(r">([^<>]*)</text>", drawn) if re.fullmatch("[1-9]", text)]
    assert sorted(set(found)) == [str(epoch + 1) for epoch in range(epochs)]
    assert all(found.count(text) == found.count("1") for text in found), found
