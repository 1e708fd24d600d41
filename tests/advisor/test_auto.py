"""strategy=auto: the advisor's choice becomes the run, and its reason stands in the intent."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.sweep import expand, one_run
from launch.sweep.compose import NOTHING
from launch.verbs import advise
from launch.verbs.run import asked_of, planned_run, planned_runs
from parallelbench.config.identity import run_id
from parallelbench.config.run import RunConfig
from parallelbench.errors import ConfigError
from parallelbench.measure.layer_records import LayerCount
from parallelbench.results.folder import RunFolder
from tests.advisor.machine import layers

MLP = ["model=mlp", "data=synthetic", "optimizer=sgd", "device=cpu"]

NOWHERE = ["model=logistic_regression", "data=synthetic", "device=cpu", "batch_size=1", "precision=fp16"]
"""One sample for two devices, one layer, and gradients that no process can scale alone."""


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that nothing has to count."""

    def count(run: RunConfig, *, plugin: str | None = None) -> list[LayerCount]:
        return layers(run.model.layer_names, product_flop=1e9, parameters=1000, tensors=2)

    monkeypatch.setattr("analysis.advisor.model_layers.model_layers", count)
    monkeypatch.setattr("analysis.advisor.model_layers.model_memory", lambda run, plugin=None: None)


def test_the_choice_is_the_run_that_one_would_have_named() -> None:
    planned = planned_run([*MLP, "strategy=auto", "devices=2"], NOTHING)
    asked = advise.answered(asked_of([*MLP, "strategy=auto", "devices=2"], NOTHING))
    best = min((row for row in asked.rows if row.trains_alike), key=lambda row: row.step_s)
    named = one_run([*MLP, f"strategy={best.strategy}", *best.options, "devices=2"])
    assert run_id(planned.run) == run_id(named.run)
    assert planned.overrides[-1].startswith(f"# strategy=auto: Train with {best.strategy}")


def test_a_sweep_over_devices_gets_a_choice_for_each(tmp_path: Path) -> None:
    results = f"results={tmp_path}"
    plan = planned_runs([*MLP, results, "strategy=auto", "devices=1,2"], NOTHING)
    assert [planned.run.devices for planned in plan] == [1, 2]
    assert plan[0].run.strategy.name == "single"
    folder = RunFolder.of(plan[1].run)
    folder.write_intent(plan[1].run, plan[1].overrides)
    assert "# strategy=auto: Train with" in (folder.path / "overrides.txt").read_text()


def test_without_auto_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launch.verbs.advise.answered", None)
    overrides = [*MLP, "strategy=ddp", "devices=1,2"]
    assert planned_runs(overrides, NOTHING) == expand(overrides, NOTHING)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([*NOWHERE, "strategy=auto", "devices=2"], "strategy=auto finds no strategy on devices=2"),
        (["model=gpt", "strategy=auto"], "strategy=auto can't choose for model=gpt"),
        (["sweep=demo", "strategy=auto"], "sweep=demo asks for several runs"),
        ([*MLP, "strategy=auto", "batch_size=8,16"], "batch_size=8,16 asks for several runs"),
    ],
)
def test_what_auto_cant_choose_is_refused(overrides: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        planned_runs(overrides, NOTHING)


def test_run_takes_one() -> None:
    with pytest.raises(ConfigError, match="ask for 2 runs"):
        planned_run([*MLP, "strategy=auto", "devices=1,2"], NOTHING)
