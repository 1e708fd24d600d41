"""Finished sweeps as evidence: what counts, what a step took, and which runs are not mixed."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec import structs

from analysis.advisor.calibration import probed_figures
from analysis.advisor.knowledge import read_knowledge
from analysis.advisor.links import Group, Links, all_reduce_s
from analysis.advisor.sweep_evidence import SweepEvidence, read_sweeps
from launch.verbs.advice_errors import TITLES, rows_of_sweeps
from parallelbench.cli import main
from parallelbench.config.plugin import sources_now
from parallelbench.config.run import RunConfig
from parallelbench.errors import ConfigError
from parallelbench.measure.environment_match import ENTRIES_VERSION
from parallelbench.measure.layer_records import LayerCount
from parallelbench.results.calibration import write_calibration
from tests.advisor.machine import layer
from tests.advisor.test_calibration import FACTS, devices, messages
from tests.analysis.factory import Fake, config, published

PROBES = {
    f"probed_{moment}_{what}": value
    for moment in ("start", "end")
    for what, value in (("matmul_flop_per_s", 1e9), ("memory_bytes_per_s", 4e9))
}
LAYERS = {
    "cnn_small": [layer(name, product_flop=1e6, parameters=100_000, tensors=2) for name in ("conv1", "fc1", "fc2")],
    "mlp": [layer(f"fc{i}", product_flop=3e6, parameters=300_000, tensors=2) for i in (1, 2, 3, 4)],
}
SECONDS = {"single": 2.0, "ddp": 1.2, "fsdp": 1.6, "zero1": 1.3}
SLOWER = {"cnn_small": 1.0, "mlp": 4.0}


def never(run: RunConfig) -> list[LayerCount]:
    raise AssertionError(f"{run.model.name} was counted by its own run")


def measured(folder: Path, model: str, strategy: str, **changes: Any) -> None:
    """One run whose epochs take what `SECONDS` says."""
    devices = 1 if strategy == "single" else 2
    run = config(folder, model=model, strategy=strategy, devices=devices, repeat=changes.pop("repeat", 0))
    facts = PROBES | {"layers_json": msgspec.json.encode(LAYERS[model]).decode()} | changes.pop("facts", {})
    time_s = SLOWER[model] * SECONDS[strategy]
    fake = {"epoch_time_s": lambda epoch, rank: time_s, "speeds": facts, "probed": (1e-5, 1e8), **changes}
    published(run, Fake(**fake))


def sweep(folder: Path, **changes: Any) -> Path:
    for model in LAYERS:
        for strategy in SECONDS:
            measured(folder, model, strategy, **changes)
    return folder


def read(*folders: Path) -> SweepEvidence:
    return read_sweeps(folders, never)


@pytest.mark.slow
def test_steps_are_epochs_divided_by_their_steps(tmp_path: Path) -> None:
    evidence = read(sweep(tmp_path))
    found = {(step.run.model.name, step.strategy): step for step in evidence.steps}
    assert len(found) == 8
    for (model, strategy), step in found.items():
        assert step.step_s == pytest.approx(SLOWER[model] * SECONDS[strategy] / step.run.steps_per_epoch)
        assert step.layers == LAYERS[model]
        assert step.energy_j is None
    probed = evidence.probed
    assert (probed.memory_bytes_per_s.value, probed.link.latency_s.value, probed.link.bytes_per_s.value) == (
        4e9,
        1e-5,
        1e8,
    )
    assert probed.matmul_flops_per_s["fp32"].rates == (1e9,)


def probed(**values: Any) -> dict[str, Any]:
    plain = {"device_type": "cuda", "device_name": "a GPU", "devices": 16, "processes": 16, "nodes": 1}
    speeds = {"probed_latency_s": 4e-6, "probed_bandwidth_bytes_per_s": 1e10}
    where = {"config_json": '{"site":{"name":"default"}}', "environment_json": "{}"}
    return plain | where | PROBES | speeds | values


def test_the_probes_of_gpus_say_what_other_precisions_rest_on() -> None:
    figures = probed_figures([probed(), probed(nodes=2)])
    half, single = figures.matmul("fp16"), figures.matmul("fp32")
    assert half is not None
    assert single is not None
    assert (half.origin, single.origin) == ("measured", "assumed")
    assert single.rates[0] == pytest.approx(half.rates[0] / 8)
    assert any("fp16 only" in note for note in figures.notes)


@pytest.mark.parametrize(
    "where",
    [
        {"environment_json": json.dumps({"cuda": {"devices": [{}] * 4, "power_limit_w": "700\n" * 8}})},
        {"config_json": json.dumps({"site": {"name": "mine", "devices_per_node": 8}})},
        {"config_json": json.dumps({"site": {"name": "h100", "hardware": {"devices_per_node": 8}}})},
        {"device_type": "cpu", "environment_json": json.dumps({"logical_cores": 16}), "cores_per_device": 2},
    ],
)
def test_a_node_has_more_devices_than_the_runs_used(where: dict[str, Any]) -> None:
    """Eight on one node would else be predicted as two nodes, over a network that nobody has."""
    figures = probed_figures([probed(devices=2), probed(devices=4, **where)])
    assert (figures.devices_per_node, figures.busy_devices) == (8, 4)


def test_a_probed_latency_between_nodes_is_what_the_formulas_give_back() -> None:
    """The column is T ÷ 2(n−1) of a small all-reduce over all devices; the formula must say T again."""
    for nodes, kind in ((2, "cuda"), (8, "cuda"), (8, "cpu")):
        across = probed(devices=4 * nodes, processes=4 * nodes, nodes=nodes, probed_latency_s=8e-6, device_type=kind)
        figures = probed_figures([probed(devices=4, processes=4, device_type=kind), across])
        assert figures.link.latency_s.value == 4e-6
        assert figures.network is not None
        links = Links(
            link_bytes_per_s=np.array(1e30),
            network_bytes_per_s=np.array(1e30),
            link_latency_s=np.array(figures.link.latency_s.value),
            network_latency_s=np.array(figures.network.latency_s.value),
            trees=kind == "cuda",
        )
        everyone = Group(size=np.array(4.0 * nodes), within=np.array(4.0), rings=np.array(1.0))
        assert all_reduce_s(np.array(1.0), everyone, links) == pytest.approx(8e-6 * 2 * (4 * nodes - 1))


@pytest.mark.exhaustive
def test_runs_that_dont_count_are_left_out(tmp_path: Path) -> None:
    sweep(tmp_path)
    disturbed = {"others_time_s": lambda epoch, rank: 100.0, "repeat": 1}
    measured(tmp_path, "mlp", "ddp", **disturbed)
    measured(tmp_path / "more", "mlp", "ddp", **disturbed)
    assert read(tmp_path).excluded == 1
    with pytest.raises(ConfigError, match="none of 1 runs counts in comparisons"):
        read(tmp_path / "more")


@pytest.mark.cases("change0-packages.torch: 2.15.0 and 2.14.0")
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            {"environment": f'{{"entries_version":{ENTRIES_VERSION},"packages":{{"torch":"2.14.0"}}}}'},
            "packages.torch: 2.15.0 and 2.14.0",
        ),
        ({"device_name": "Another CPU"}, "device_name: Imaginary CPU and Another CPU"),
        ({"facts": {key: 10 * value for key, value in PROBES.items()}}, "speed of a matrix product"),
    ],
)
def test_unlike_machines_are_refused_by_the_rule_of_comparisons(
    tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    one, other = sweep(tmp_path / "one"), sweep(tmp_path / "other", **change)
    read(one)
    with pytest.raises(ConfigError, match="unlike machines") as refused:
        read(one, other)
    assert named in str(refused.value)


def test_a_run_that_lies_below_several_of_the_folders_is_taken_once(tmp_path: Path) -> None:
    for strategy in ("single", "ddp"):
        measured(tmp_path / "sweep", "mlp", strategy)
    for folders in ((tmp_path, tmp_path / "sweep"), (tmp_path / "sweep", tmp_path)):
        assert sorted(step.strategy for step in read(*folders).steps) == ["ddp", "single"]


def test_a_folder_without_runs_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no runs"):
        read(tmp_path)


def test_an_older_result_is_counted_anew(tmp_path: Path) -> None:
    measured(tmp_path, "mlp", "single", facts={"layers_json": None})
    (step,) = read_sweeps([tmp_path], lambda run: LAYERS[run.model.name]).steps
    assert step.layers == LAYERS["mlp"]


@pytest.mark.exhaustive
def test_check_prints_the_errors_of_left_out_strategies_and_models(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = sweep(tmp_path)
    assert main(["advise", "--check", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["split"], found["rows"]) == ("leave_one_strategy_out", 6)
    assert {row["left_out"] for row in found["predictions"]} == {"ddp", "fsdp", "zero1"}
    assert 0 <= found["median_error"] <= found["p90_error"] <= found["max_error"]
    assert set(found["baselines"]) == {"perfect_scaling", "amdahl", "nearest_neighbour"}
    # Half of one device's time against 1.2, 1.6 and 1.3 of 2.
    assert found["baselines"]["perfect_scaling"]["max_error"] == pytest.approx(1 - 1 / 1.6)
    shown = [row[0] for row in rows_of_sweeps(found)]
    assert [row for row in shown if row.startswith("each")] == list(TITLES.values())
    assert {"  strategy fsdp", "  model mlp", "  baseline amdahl"} <= set(shown)


@pytest.mark.exhaustive
def test_a_calibration_of_another_device_is_refused(tmp_path: Path) -> None:
    rows = [*devices(4), *messages("link", 4)]
    write_calibration(tmp_path / "other.parquet", rows, FACTS)
    write_calibration(tmp_path / "same.parquet", rows, FACTS | {"device_name": "Imaginary CPU"})
    folder = sweep(tmp_path / "runs")
    with pytest.raises(ConfigError, match="the calibration is of made up"):
        read_knowledge([folder, tmp_path / "other.parquet"], learn=False)
    known = read_knowledge([folder, tmp_path / "same.parquet"], learn=False)
    assert known.figures is not None
    assert known.figures.memory_bytes_per_s.value == pytest.approx(2e9)
    with pytest.raises(ConfigError, match="two calibrations"):
        read_knowledge([tmp_path / "same.parquet", tmp_path / "other.parquet"])


@pytest.mark.slow
def test_runs_of_a_plugins_model_are_read_where_it_is_named_and_else_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lentmodels.py").write_text(
        "from parallelbench.models.mlp import Mlp\n\n\nclass Small(Mlp, frozen=True, kw_only=True):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    small, folder = importlib.import_module("lentmodels").Small, tmp_path / "runs"
    for model in LAYERS:
        measured(folder, model, "single")
    run = config(folder, model="mlp")
    run = structs.replace(
        run, model=small(**structs.asdict(run.model)), plugin_sources=sources_now("lentmodels"), seed=1
    )
    own = published(run, Fake(speeds=PROBES, probed=(1e-5, 1e8))).path
    counted: list[str | None] = []

    def count(run: RunConfig, *, plugin: str | None = None) -> list[LayerCount]:
        counted.append(plugin)
        return LAYERS["mlp"]

    monkeypatch.setattr("analysis.advisor.model_layers.model_layers", count)
    evidence = read_knowledge([folder], learn=False, plugin="lentmodels").evidence
    assert evidence is not None
    assert ([type(step.run.model) for step in evidence.steps].count(small), evidence.left_out) == (1, [])
    assert counted == ["lentmodels"]
    others = read_knowledge([folder], learn=False).evidence
    assert others is not None
    assert (len(others.steps), len(others.left_out)) == (2, 1)
    assert "1 configuration of lentmodels.Small" in others.left_out[0]
    assert others.left_out[0].endswith("--plugin lentmodels")
    with pytest.raises(ConfigError, match="--plugin lentmodels"):
        read_sweeps([own], never)


def test_what_says_nothing_about_finished_runs_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "--check", str(tmp_path), "model=mlp"]) == 2
    assert "leave it out" in capsys.readouterr().err
