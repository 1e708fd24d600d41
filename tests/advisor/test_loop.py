"""`advise --loop`: it proposes, measures and fits anew, shows the error of what it said, and ends when it should."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from analysis.advisor.advice import Row
from launch.sweep import expand
from launch.sweep.compose import Extension
from launch.verbs import advise
from launch.verbs import run as run_module
from parallelbench.cli import main
from parallelbench.results.folder import RunFolder
from tests.advisor.machine import layer
from tests.advisor.test_advise import row
from tests.advisor.test_sweep_evidence import PROBES
from tests.analysis.factory import Fake, published

SECONDS = {"single": 1.0, "ddp": 0.6, "fsdp": 0.9}
LAYERS = [layer(name, product_flop=1e6, parameters=100_000, tensors=2) for name in ("conv1", "fc1", "fc2")]


class Measuring:
    """Takes the place of training: every proposed run takes what `SECONDS` says per epoch."""

    def __init__(self) -> None:
        self.rounds: list[list[str]] = []

    def __call__(self, overrides: Sequence[str], extension: Extension, **_: object) -> int:
        plan = expand(overrides, extension)
        self.rounds.append([f"{each.run.strategy.name} × {each.run.devices}" for each in plan])
        for each in plan:
            assert not RunFolder.of(each.run).attempts(), "nothing is measured twice"
            time_s = SECONDS[each.run.strategy.name]
            facts: dict[str, Any] = PROBES | {"layers_json": msgspec.json.encode(LAYERS).decode()}
            published(each.run, Fake(epoch_time_s=lambda epoch, rank, s=time_s: s, speeds=facts, probed=(1e-5, 1e8)))
        return 0


def looped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, list[list[str]]]:
    measuring = Measuring()
    monkeypatch.setattr(run_module, "submit", measuring)
    asked = ["model=cnn_small", "strategy=single,ddp,fsdp", "devices=1,2", f"results={tmp_path}", "device=cpu"]
    return main(["advise", *asked, *words]), measuring.rounds


@pytest.mark.exhaustive
def test_a_round_measures_what_is_open_and_shows_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("launch.verbs.advise._most_devices", lambda run: 2)
    code, rounds = looped(tmp_path, monkeypatch, "--loop", "2", "--budget", "10h")
    shown = capsys.readouterr().out
    assert code == 0
    assert "single × 1" in rounds[0], "one device is the baseline of every comparison"
    assert 1 <= len(rounds) <= 2
    assert "round 1:" in shown
    assert re.search(r"single × 1 +[\d.]+ s +[\d.]+ s +[+-]\d", shown), "what was said, what it took, the error"


def test_a_queueing_launcher_and_memory_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--objective", "memory"], ["launcher=slurm"]):
        assert main(["advise", "model=mlp", f"results={tmp_path}", "--loop", "1", *words]) == 2
        assert "--loop" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_best_is_known_once_no_interval_reaches_it() -> None:
    best = row("ddp", 2, measured=True)
    slower, open_row = (row("fsdp", 2, compute_s=each) for each in (1.1, 1.015))
    assert advise.is_known([best, slower], "time")
    assert not advise.is_known([best, open_row], "time")
    assert not advise.is_known([row("ddp", 2), slower], "time"), "the best was not measured"


def test_errors_are_those_of_what_was_predicted_before() -> None:
    before = [row("ddp", 2, compute_s=1.2), row("fsdp", 2, measured=True)]
    after: list[Row] = [row("ddp", 2, measured=True), row("fsdp", 2, measured=True), row("zero1", 2)]
    assert list(advise.errors(before, after)) == [("ddp × 2", "1.2 s", "1 s", "+20.0 %")]
