"""Rewording exclusions, blockers and caveats changes no number (of columns, see test_new_column)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from analysis import by, load, summary
from analysis.claims import judge
from analysis.comparison import issues
from analysis.comparison.exclusions import Exclusion
from tests.analysis.factory import Fake, config, failed, published
from tests.analysis.test_claims import claim
from tests.analysis.test_compare import steady

if TYPE_CHECKING:
    from pathlib import Path

    import polars as pl

pytestmark = pytest.mark.slow


def answers(root: Path) -> tuple[pl.DataFrame, pl.DataFrame, list[Any]]:
    """The numbers of all rooms, from tables that are read anew."""
    runs = load(root)
    loss = claim(metric="train_loss", expect={"between": [0.9, 1.1]})
    cases = [case for each in (claim(), loss) for case in judge(runs, each, seed="0").cases]
    numbers = [(case.effects, case.low, case.high, case.verdict, case.runs) for case in cases]
    return summary(runs), by(runs, "strategy", "single", "ddp", across=["devices"]).frame, numbers


@pytest.mark.exhaustive
def test_reworded_reasons_change_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for repeat in range(8):
        fake = steady(10.0 + repeat, oversubscribed=repeat == 6, parity_passed=repeat != 7)
        published(config(tmp_path, repeat=repeat), fake)
        fake = steady(6.0 + repeat / 2, oversubscribed=repeat == 6)
        published(config(tmp_path, repeat=repeat, strategy="ddp", devices=2), fake)
    failed(config(tmp_path, strategy="fsdp", devices=2), "oom", "out of memory", epochs=1, fake=Fake())
    table, frame, numbers = answers(tmp_path)
    assert len(numbers) == 2
    for exclusion in Exclusion:
        monkeypatch.setattr(exclusion, "words", "reworded")
    monkeypatch.setattr(issues, "_words", lambda issue: "reworded")
    again, frame_again, numbers_again = answers(tmp_path)
    assert again.equals(table)
    assert frame_again.equals(frame)
    assert numbers_again == numbers
