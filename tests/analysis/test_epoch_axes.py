"""Figures over epochs: whole epochs on the axis, and the run's loss on the other one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import vl_convert

from analysis import load
from analysis.figures.curves import accuracy, loss, loss_label
from parallelbench.config.identity import canonical_json
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


@pytest.mark.parametrize(
    ("losses", "label"),
    [
        (["cross_entropy"], "Cross entropy (nats)"),
        ([{"name": "cross_entropy", "label_smoothing": 0.1}], "Loss (cross_entropy, label_smoothing=0.1)"),
        (["mse"], "Loss (mse)"),
        (["cross_entropy", "mse"], "Loss"),
    ],
)
def test_the_axis_names_the_loss(losses: list[Any], label: str, tmp_path: Path) -> None:
    for chosen in losses:
        published(config(tmp_path, loss=chosen), Fake())
    figure = loss.figure(load(tmp_path))
    assert figure is not None
    layers = figure.to_dict()["spec"]["layer"]
    assert {layer["encoding"]["y"]["title"] for layer in layers} == {label}


def test_losses_of_ones_own_are_named_and_runs_from_before_losses_could_be_chosen_had_nats() -> None:
    focal = [canonical_json({"loss": {"_target_": "mine.Focal", "name": "focal", "gamma": g}}) for g in (1, 2)]
    assert loss_label(focal[:1] * 2) == "Loss (focal)"
    assert loss_label(focal) == "Loss", "of two gammas they are two losses"
    before, today = "{}", canonical_json({"loss": {"_target_": "parallelbench.optim.losses.CrossEntropy", **PLAIN}})
    assert loss_label([before]) == loss_label([before, today]) == "Cross entropy (nats)"
    own = canonical_json({"loss": {"_target_": "mine.CrossEntropy", "name": "cross_entropy"}})
    assert loss_label([own]) == "Loss (cross_entropy)", "somebody's own may be anything"


PLAIN = {"name": "cross_entropy", "label_smoothing": 0.0}
