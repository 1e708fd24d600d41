"""What is asked of claims with a target only costs the others nothing: of 10,000 runs it took a quarter of a report."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

from analysis import load
from analysis.claims import effects
from tests.analysis.factory import Fake, config, published
from tests.analysis.test_claims import claim

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_only_a_target_can_be_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published(config(tmp_path), Fake())
    runs, looked_at = load(tmp_path), []
    levels = SimpleNamespace(of=lambda claim: looked_at.append(claim.name) or [])
    monkeypatch.setattr(effects, "levels_of", lambda runs: levels)
    assert not effects.is_unreached(runs, claim(name="without"))
    assert not effects.is_unreached(runs, claim(name="to_half", metric="steps_to_accuracy", target=0.5))
    assert looked_at == ["to_half"]
