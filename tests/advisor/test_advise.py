"""The verb `advise`: rows, reasons, the sentence, the next runs, and what it says to bad input."""

from __future__ import annotations

import json
import math
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from analysis import cache
from analysis.advisor import model_layers
from analysis.advisor.advice import Row, efficiency, proposed, ranked, sentence
from analysis.advisor.fit import Learnt, SuiteFit
from analysis.advisor.machine import RateCurve, figures_of
from analysis.advisor.model_layers import counted_by
from analysis.advisor.rows import configuration_id, suite_candidates, suite_rows
from analysis.advisor.step import Phases
from analysis.advisor.sweep_evidence import MeasuredStep
from launch.sweep import expand, one_run
from launch.sweep.compose import Extension
from launch.verbs import advise
from launch.verbs.advise import asked
from parallelbench.cli import main
from parallelbench.config.run import RunConfig
from parallelbench.errors import ConfigError
from tests.advisor.machine import PLAIN, hardware_of, layers, machine
from tests.faults import fault

GPT = ["model=gpt", "model.layers=24", "model.width=2048", "model.heads=16", "site=a100_80gb", "batch_size=256"]
MLP = ["model=mlp", "data=synthetic", "optimizer=sgd"]


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["advise", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["advise", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def row(strategy: str = "ddp", devices: int = 2, **changes: Any) -> Row:
    parts = {each.name: changes.pop(each.name, float(each.name == "compute_s")) for each in fields(Phases)}
    phases = Phases(**parts)
    values: dict[str, Any] = {
        "strategy": strategy,
        "options": (),
        "devices": devices,
        "nodes": 1,
        "phases": phases,
        "low_s": 0.99 * phases.step_s,
        "high_s": 1.01 * phases.step_s,
        "samples_per_step": 100,
        "steps_per_epoch": 10,
        "memory_bytes": 1e9,
        "capacity_bytes": 4e9,
        "mfu": None,
        "power_w": None,
        "measured": False,
        "extrapolates": (),
    }
    return Row(**values | changes)


def known_step(run: RunConfig, step_s: float, energy_j: float | None) -> dict[str, MeasuredStep]:
    step = MeasuredStep(run=run, layers=[], work="", model="", step_s=step_s, phases={}, energy_j=energy_j)
    return {configuration_id(run): step}


def rows_of(*overrides: str, devices: list[int], **question: Any) -> tuple[list[Row], dict[tuple[str, int], str]]:
    bases = asked([*MLP, *overrides], Extension()).bases
    found, impossible = suite_candidates(bases, devices, given=frozenset(), device_type="cpu", per_node=4)
    known = layers(bases[0].model.layer_names, product_flop=1e6, parameters=1000, tensors=2)
    usual: dict[str, Any] = {"layers": known, "memory": None, "figures": machine(), "measured": {}}
    rows, unknown = suite_rows(found, **usual | {"learnt": Learnt(fit=SuiteFit(PLAIN))} | question)
    return rows, {(each.strategy, each.devices): each.why for each in impossible + unknown}


def test_every_strategy_has_a_row_or_a_reason_on_every_number_of_devices() -> None:
    rows, impossible = rows_of(devices=[1, 4, 8])
    names = {base.strategy.name for base in asked(MLP, Extension()).bases}
    for devices in (4, 8):
        assert {each.strategy for each in rows if each.devices == devices} | {
            strategy for strategy, count in impossible if count == devices
        } == names
    assert [each.strategy for each in rows if each.devices == 1] == ["single"]
    assert "two CUDA devices" in impossible["data_parallel", 4]
    assert {each.nodes for each in rows if each.devices == 8} == {2}


def test_devices_are_spread_over_as_many_nodes_as_are_asked_for_or_needed() -> None:
    question = asked([*MLP, "strategy=ddp", "devices=2,4", "nodes=2"], Extension())
    assert (question.devices, question.nodes) == ([2, 4], 2)
    found, _ = suite_candidates(
        question.bases, [2, 3], given=question.given, device_type="cpu", per_node=4, nodes=question.nodes
    )
    assert [(each.run.devices, each.run.nodes) for each in found] == [(2, 2)]
    rows, impossible = rows_of("strategy=ddp", devices=[4, 7])
    assert [each.devices for each in rows] == [4]
    even = "choose devices=6 or devices=8, or nodes=1"
    assert impossible == {("ddp", 7): f"devices=7 can't be spread evenly over nodes=2: {even}"}
    _, (full,) = suite_candidates(question.bases, [8], given=question.given, device_type="cpu", per_node=4, nodes=1)
    assert full.why == "devices=8 need more than nodes=1 of 4 devices: choose nodes=2 or more"


def test_so_many_nodes_have_one_two_and_so_on_devices_each(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """None of them is proposed: this machine is one node."""
    monkeypatch.setattr(model_layers, "model_layers", lambda run, **_: layers(run.model.layer_names, product_flop=1e9))
    monkeypatch.setattr(model_layers, "model_memory", lambda *_, **__: None)
    words = [*MLP, "strategy=ddp", "device=cpu", "batch_size=24", "nodes=3"]
    found = answer(capsys, *words, "--budget", "100h")
    node = found["figures"]["devices_per_node"]
    counts = [3 * each for each in (1, 2, 4, 8) if each <= node]
    assert sorted((each["devices"], each["nodes"]) for each in found["rows"]) == [(count, 3) for count in counts]
    assert found["next_runs"]["runs"] == []


def test_options_are_tried_and_those_that_were_asked_for_stay() -> None:
    rows, _ = rows_of("strategy=fsdp", devices=[4])
    assert [each.options for each in rows] == [(), ("strategy.reshard_after_forward=false",)]
    question = asked([*MLP, "strategy=fsdp", "strategy.reshard_after_forward=false"], Extension())
    assert "strategy.reshard_after_forward" in question.given
    (only,), _ = suite_candidates(question.bases, [4], given=question.given, device_type="cpu", per_node=4)
    assert only.run.strategy.reshard_after_forward is False  # type: ignore[attr-defined]


def test_a_measured_run_replaces_its_prediction_whatever_its_seed_and_length() -> None:
    run = one_run([*MLP, "strategy=ddp", "devices=2", "repeat=3", "epochs=9", "device=cpu"]).run
    rows, _ = rows_of("strategy=ddp", devices=[2, 4], measured=known_step(run, 0.5, 30.0))
    measured, predicted = rows
    assert (measured.measured, predicted.measured) == (True, False)
    assert measured.step_s == pytest.approx(0.5)
    assert measured.power_w == pytest.approx(30.0 / 0.5 / 2)
    assert predicted.power_w is None
    assert measured.as_dict()["energy_per_epoch_j"] == pytest.approx(30.0 * run.steps_per_epoch)


@pytest.mark.parametrize("option", ["activation_recomputation=full", "compile_scope=step", "batch_size=64"])
def test_a_run_with_another_option_of_a_step_is_no_measurement_of_it(option: str) -> None:
    run = one_run([*MLP, "strategy=ddp", "devices=2", "device=cpu", option]).run
    (row,) = rows_of("strategy=ddp", devices=[2], measured=known_step(run, 9.99, None))[0]
    assert not row.measured


def test_rows_say_how_far_they_extrapolate_and_get_wider_intervals() -> None:
    assert {each.extrapolates for each in rows_of(devices=[2])[0]} == {("everything",)}
    runs = [one_run([*MLP, "strategy=ddp", "devices=2", f"batch_size={size}"]).run for size in (32, 999)]
    learnt = Learnt(fit=SuiteFit(PLAIN, {"ddp": 0.2}), runs=runs, half_width=0.1, far_half_widths={"devices": 0.5})
    rows = {(each.strategy, each.devices): each for each in rows_of(devices=[2, 4], learnt=learnt)[0]}
    near, far = rows["ddp", 2], rows["ddp", 4]
    assert (near.extrapolates, far.extrapolates) == ((), ("devices",))
    other = rows["zero1", 2]
    assert other.extrapolates == ("strategy",)
    assert other.high_s / other.low_s == pytest.approx(4.0), "no strategy could be left out, so nobody knows"
    assert math.log(near.high_s / near.low_s) == pytest.approx(0.2)
    assert math.log(far.high_s / far.low_s) == pytest.approx(1.0)
    plain = {each.strategy: each for each in rows_of(devices=[2])[0]}
    assert near.step_s == pytest.approx(plain["ddp"].step_s * math.exp(0.2))


def test_energy_counts_power_while_computing_and_while_waiting() -> None:
    learnt = Learnt(fit=SuiteFit(PLAIN), powers_w=(100.0, 20.0))
    figures = machine(matmul_flops_per_s={"fp32": RateCurve((1.0,), (1e9,), "assumed", "a test")})
    found = next(e for e in rows_of("strategy=ddp", devices=[4], learnt=learnt, figures=figures)[0])
    waiting = found.phases.communication_s / found.step_s
    assert found.power_w == pytest.approx(100.0 * (1 - waiting) + 20.0 * waiting)


def test_what_does_not_fit_or_trains_otherwise_is_never_advised() -> None:
    rows = [
        row("fast", compute_s=0.1, memory_bytes=5e9),
        row("loose", compute_s=0.2, trains_alike=False),
        row("near", compute_s=0.3, memory_bytes=3.9e9),
        row("slow", compute_s=1.0),
        row("unknown", compute_s=0.05, capacity_bytes=None),
    ]
    assert [each.fit for each in rows] == ["does not fit", "fits", "too close to call", "fits", "not known"]
    assert [each.strategy for each in ranked(rows, "time")] == ["slow", "near", "unknown", "fast", "loose"]
    text = sentence(rows, "time")
    assert text.startswith("Train with slow on 2 devices: 1 s per step")
    assert "fast needs 4.66 GiB of 3.73" in text
    assert not any(sentence([each], "time").startswith("Train with") for each in rows[:2])


@pytest.mark.slow
def test_a_queue_may_make_fewer_devices_faster(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """One device would start at once, two tomorrow."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    queue = SimpleNamespace(
        trains_here=False, prepare=lambda planned: planned.run, wait_s=lambda run: 86_400.0 * (run.devices - 1)
    )
    monkeypatch.setattr(advise, "launcher_of", lambda run: queue)
    counted = layers(["fc1", "fc2"], product_flop=1e6, parameters=1000, tensors=2)
    monkeypatch.setattr(model_layers, "model_layers", lambda run, plugin: counted)
    monkeypatch.setattr(model_layers, "model_memory", lambda run, plugin: None)
    asked = [*MLP, "device=cpu", "devices=1,2", "strategy=single,ddp", "epochs=2"]
    found = answer(capsys, *asked)
    alone, both = found["starts"]
    assert ((alone["devices"], alone["wait_s"]), (both["devices"], both["wait_s"])) == ((1, 0.0), (2, 86_400.0))
    (epoch_s,) = (row["epoch_s"] for row in found["rows"] if row["strategy"] == "single")
    assert alone["run_s"] == pytest.approx(60.0 + 2 * epoch_s)
    assert main(["advise", *asked, "--all"]) == 0
    out = capsys.readouterr().out
    assert "when  first done on 1 device: 1 would start at once" in out
    assert "nothing was measured here" in out


def test_memory_that_is_surely_more_is_not_proposed_however_wide_the_times_interval() -> None:
    wide: dict[str, Any] = {"low_s": 0.1, "high_s": 10.0, "capacity_bytes": 4e10}
    rows = [row("slim", memory_bytes=2.6e9, **wide), row("near", memory_bytes=3.4e9, **wide)]
    rows.append(row("hopeless", memory_bytes=1e10, **wide))
    found = proposed(rows, "memory", budget_s=1e9, most_devices=None)
    assert [each.strategy for each in found.rows] == ["slim", "near"]


def test_objectives_weigh_time_devices_and_memory() -> None:
    rows = [row("wide", 8, compute_s=0.5, memory_bytes=2e9), row("narrow", 2, compute_s=1.0, memory_bytes=3e9)]
    best = {objective: ranked(rows, objective)[0].strategy for objective in ("time", "gpu_hours", "memory")}  # type: ignore[arg-type]
    assert best == {"time": "wide", "gpu_hours": "narrow", "memory": "wide"}


def test_what_is_advised_is_not_beyond_where_devices_pay() -> None:
    rows = [row(devices=1), row(devices=2, compute_s=0.5, communication_s=0.35)]
    assert efficiency(rows)[2] == pytest.approx(1 / 2 / 0.85)
    text = sentence(rows, "time")
    assert "the efficiency of 2 devices is 59 %, because of exposed communication" in text
    assert "beyond" not in text


def test_experts_are_laid_over_replicas_and_impossible_ones_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    mixture = [*GPT, "model.experts=8", "model.top_k=2"]
    rows = answer(capsys, *mixture, "devices=8")["rows"]
    assert {"ddp×ep", "zero1×ep", "fsdp×ep", "fsdp"} <= {each["strategy"] for each in rows}
    assert not {each["strategy"] for each in rows} & {"hsdp", "hsdp×ep"}
    cut = [
        next(text for text in each["options"] if text.startswith("expert="))
        for each in rows
        if "ep" in each["strategy"]
    ]
    assert set(cut) == {"expert=2", "expert=4", "expert=8"}
    assert all("strategy" in each["extrapolates"] for each in rows)
    assert "more than model.experts=8" in refusal(capsys, *mixture[:-1], "model.top_k=9", "devices=8")
    assert "choose from 1 to 4" in refusal(capsys, *mixture, "model.capacity=0.5", "devices=8")


def test_figures_that_follow_from_the_step_have_its_interval() -> None:
    """A step between a half and twice as long: half as many samples per second, twice the hours at the worst."""
    found = row(low_s=0.5, high_s=2.0, mfu=0.4, power_w=100.0).as_dict()
    for name, value, low, high in (
        ("samples_per_s", 100.0, 50.0, 200.0),
        ("mfu", 0.4, 0.2, 0.8),
        ("device_hours_per_epoch", 20 / 3600, 10 / 3600, 40 / 3600),
        ("energy_per_epoch_j", 2000.0, 1000.0, 4000.0),
    ):
        assert [found[name + end] for end in ("", "_low", "_high")] == pytest.approx([value, low, high])
    unknown = row().as_dict()
    assert unknown["mfu_low"] is unknown["mfu_high"] is unknown["energy_per_epoch_j_low"] is None


def test_a_data_sets_tokens_are_an_epochs_steps(capsys: pytest.CaptureFixture[str]) -> None:
    without = answer(capsys, *GPT, "devices=8", "strategy=ddp")["rows"][0]
    assert without["epoch_s"] is None
    tokens = 10 * 256 * 1024 + 1
    rows = answer(capsys, *GPT, "devices=8", "strategy=ddp", f"data.tokens={tokens}")["rows"]
    assert [each["epoch_s"] / each["step_s"] for each in rows] == pytest.approx([10.0] * len(rows))
    assert "less than one step" in refusal(capsys, *GPT, "devices=8", "data.tokens=5")
    assert "e.g. data.tokens=300e9" in refusal(capsys, *GPT, "devices=8", "data.tokens=many")


def test_a_transformer_is_ranked_by_formula(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, *GPT, "devices=8,64")
    rows = found["rows"]
    assert {each["devices"] for each in rows} == {8, 64}
    assert {"ddp", "zero1", "fsdp", "hsdp", "fsdp×tp", "ddp×tp×pp"} <= {each["strategy"] for each in rows}
    for each in rows:
        assert each["step_low_s"] < each["step_s"] < each["step_high_s"]
        assert sum(each["phases"].values()) == pytest.approx(each["step_s"])
        assert 0 < each["mfu"] < 0.75
        assert each["extrapolates"]
    assert found["advice"].startswith("Train with ")
    reasons = {(each["strategy"], each["devices"]): each["why"] for each in found["impossible"]}
    assert reasons["tp", 64] == "tensor=64 does not divide model.heads=16"
    assert reasons["pp", 64] == "pipeline=64 does not divide model.layers=24"


def test_a_kept_file_of_another_kind_counts_for_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    decode = msgspec.json.Decoder(list[int]).decode
    for damaged in ("", "[1", '{"a": 1}'):
        name = cache.name_of("some", damaged)
        assert cache.kept(name, lambda: "[1]", decode) == [1]
        (tmp_path / "parallelbench" / name).write_text(damaged)
        assert cache.kept(name, lambda: "[2]", decode) == [2]
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("os.getuid", lambda: 2**31 - 5)  # an account that is in no list has no folder either
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    assert cache.kept("some", lambda: "[3]", decode) == [3]
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.exhaustive
def test_ten_thousand_layouts_are_ranked_without_torch() -> None:
    """Counted in the program itself."""
    shape = ["model=gpt", "model.layers=96", "model.width=12288", "model.heads=96", "model.sequence=16384"]
    arguments = ["advise", *shape, "site=h100_80gb", "batch_size=1024", "devices=1024", "--json"]
    code = f"""
import contextlib, io, json, sys
from parallelbench.cli import main
from parallelbench.errors import ConfigError
with contextlib.redirect_stdout(io.StringIO()) as out:
    assert main({arguments!r}) == 0
assert not {{"torch", "polars", "scipy"}} & set(sys.modules)
print(len(json.loads(out.getvalue())["rows"]))
"""
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr[-2000:]
    assert int(made.stdout) >= 10_000


def test_what_was_asked_for_in_vain_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", *MLP, "site=asu_sol", "devices=1,8", "strategy=single,ddp", "batch_size=100"]) == 0
    reason = " ".join(capsys.readouterr().out.partition("impossible: ddp × 8: ")[2].split())
    assert "batch_size=100" in reason
    assert "devices=8" in reason


def test_devices_beyond_a_sites_nodes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, *GPT, "devices=8,64", "site.max_nodes=2")
    assert {each["devices"] for each in found["rows"]} == {8}
    (beyond,) = (each for each in found["impossible"] if each["strategy"] == "all")
    assert "has 2 nodes of 8 devices: choose 16 or fewer" in beyond["why"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["model=mlp", "devices=0"], "devices=0 is not valid: expected `int` >= 1"),
        (["model=mlp", "devices=two"], "devices='two' is not valid: expected `int` >= 1"),
        (["model=mlp", f"devices={10**30}"], "is not valid: expected `int` >= 1 and <= 1000000"),
        (["model=mlp", "nodes=0"], "nodes=0 is not valid: expected `int` >= 1"),
        (["model=mlp", "nodes=3", "site.max_nodes=2"], "nodes=3, but site=default allows a job site.max_nodes=2"),
        (["model=mlp,cnn", "devices=2"], "advise takes lists of devices and strategy only"),
        (["sweep=demo"], "advise takes lists of devices and strategy only"),
        (["model=mlp", "strategy=fsdpp"], "strategy=fsdpp is no choice: did you mean fsdp?"),
        (["model=vit", "data=synthetic", "data.image_size=30"], "image_size=30"),
        ([*GPT, "--objective", "energy"], "--objective energy needs a measured power"),
        ([*GPT, "model.heads=15"], "choose a multiple of 15, e.g. model.width=2055"),
        ([*GPT, "model.kv_heads=3"], "model.kv_heads=3 does not divide model.heads=16: choose 1, 2, 4, 8, 16"),
        ([*GPT, "model.depth=3"], "model.depth"),
        ([*GPT, "model.layers=two"], "model.layers"),
        ([*GPT, "--budget", "5h"], "so no runs can be proposed"),
        ([*GPT, "--from", "nowhere"], "nowhere is neither a calibration"),
        (["--check", "steps.csv", "--budget", "5h"], "--budget proposes runs, and --check judges predictions"),
    ],
)
def test_bad_input_gets_one_line(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert expected in refusal(capsys, *arguments)


def test_what_no_formula_has_is_refused_before_anything_is_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(model_layers, "model_layers", lambda *_, **__: pytest.fail("counted"))
    for words, why in {
        ("model=mlp", "optimizer=lbfgs"): "optimizer=lbfgs with strategy=ddp is refused",
        ("model=gpt_tiny",): "model=gpt_tiny takes tokens, but data=digits holds images",
    }.items():
        found = answer(capsys, *words, "device=cpu", "devices=1,2")
        assert found["rows"] == []
        assert any(why in each["why"] for each in found["impossible"])


def test_what_can_be_trained_and_has_no_formula_is_not_called_impossible(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model=gpt_tiny", "data=text", "strategy=context_parallel", "device=cpu", "devices=2"]
    found = answer(capsys, *words)
    assert (found["rows"], [each["trains"] for each in found["impossible"]]) == ([], [True])
    assert "possible" not in found["advice"]
    assert "context_parallel" in found["advice"]
    assert main(["advise", *words]) == 0
    text = capsys.readouterr().out
    assert "not predicted: context_parallel × 2" in text
    assert "possible" not in text
    odd = answer(capsys, *words, "data.sequence=66", "model.sequence=66")
    assert [each["trains"] for each in odd["impossible"]] == [False]
    assert "No layout is possible" in odd["advice"]


@pytest.mark.parametrize("budget", ["0h", "many", "3d", "nan"])
def test_a_budget_is_a_number_of_hours(budget: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["advise", "model=mlp", "--budget", budget])
    assert "expected device-hours above 0" in capsys.readouterr().err


def test_a_model_that_cant_be_counted_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    run = one_run([*MLP, "device=cpu"]).run
    with pytest.raises(ConfigError, match="model=mlp can't be counted, so nothing can be predicted of it: RuntimeErr"):
        counted_by("tests.advisor.uncountable", run, str, plugin=None)
    assert not list(tmp_path.iterdir())


def test_counts_are_kept_for_what_made_them_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upgrade of torch, another file of the suite, another option: counted again. The same on more devices: not."""
    counted: list[str] = []
    made = SimpleNamespace(returncode=0, stdout="[]", stderr="")
    monkeypatch.setattr(model_layers.subprocess, "run", lambda command, **_: counted.append(command[-1]) or made)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def times(*overrides: str) -> int:
        cache._sources.cache_clear()
        counted_by("a program", one_run([*MLP, "device=cpu", *overrides]).run, list[str], plugin=None)
        return len(counted)

    own = tmp_path / "suite" / "optim" / "optimizers.py"
    own.parent.mkdir(parents=True)
    own.write_text("first")
    monkeypatch.setattr(cache, "resources", SimpleNamespace(files=lambda _: tmp_path / "suite"))
    assert times() == times() == times("strategy=ddp", "devices=2", "seed=3") == 1
    assert times("channels_last=true") == 2
    own.write_text("second")
    assert times() == 3
    monkeypatch.setattr(cache, "version", lambda package: "99")
    assert times() == 4
    cache._sources.cache_clear()


@pytest.mark.exhaustive
def test_the_proposed_runs_are_a_sweep_that_submit_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """End to end with a model of the suite: counted by torch in a child process, ranked, and a sweep written."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    results = f"results={tmp_path / 'results'}"
    found = answer(capsys, *MLP, results, "++batch_size=64", "optimizer.lr=3e-3", "devices=1,2", "--budget", "20h")
    assert {each["extrapolates"][0] for each in found["rows"]} == {"everything"}
    assert all(each["memory_bytes"] > 0 for each in found["rows"])
    assert "nothing was measured on site=default" in found["notes"][0]
    proposal = found["next_runs"]
    assert proposal["device_hours"] <= 20
    assert proposal["runs"][0] == {"strategy": "single", "options": [], "devices": 1}
    plan = expand(["sweep=next_runs"], Extension(conf=tmp_path / "results" / "advice"))
    assert len(plan) == 3 * len(proposal["runs"])
    assert {planned.run.model.name for planned in plan} == {"mlp"}
    assert {(planned.run.batch_size, planned.run.optimizer.lr) for planned in plan} == {(64, 0.003)}
    assert {(p.run.strategy.name, p.run.devices) for p in plan} == {
        (each["strategy"], each["devices"]) for each in proposal["runs"]
    }
    text = refusal(capsys, *MLP, results, "devices=1,2", "--budget", "0.001h")
    assert "--budget 0.001h is under the cheapest run that would tell something" in text
    # The counts are kept: the second question starts no process.
    monkeypatch.setattr(sys, "executable", "/nowhere")
    assert answer(capsys, *MLP, "devices=2")["rows"]


@pytest.mark.exhaustive
@fault(
    "submission",
    "A proposal for what is one's own",
    injection="advise --budget with --conf and --plugin, in folders with spaces; the printed submit is run elsewhere",
    outcome="the command names both, quoted, and finds the user's model",
)
def test_the_printed_submit_finds_what_is_ones_own_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    mine, elsewhere = tmp_path / "mine here", tmp_path / "elsewhere"
    (mine / "conf" / "model").mkdir(parents=True)
    (mine / "conf" / "model" / "own_mlp.yaml").write_text("_target_: ownmodels.Own\nname: own_mlp\nhidden: [8]\n")
    (mine / "ownmodels").mkdir()
    (mine / "ownmodels" / "__init__.py").write_text(
        "from parallelbench.models.mlp import Mlp\n\n\nclass Own(Mlp, frozen=True, kw_only=True):\n    pass\n"
    )
    elsewhere.mkdir()
    monkeypatch.chdir(mine)
    own = ["model=own_mlp", *MLP[1:], "--conf", "conf", "--plugin", "ownmodels"]
    found = answer(capsys, *own, f"results='{tmp_path}/my results'", "devices=1,2", "--budget", "20h")
    program, verb, *words = shlex.split(found["next_runs"]["command"])
    assert (program, verb) == ("parallelbench", "submit")
    monkeypatch.chdir(elsewhere)
    command = [sys.executable, "-m", "parallelbench.cli", "plan", *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "own_mlp" in done.stdout


def test_a_site_files_figures_are_shares_of_its_data_sheet() -> None:
    figures = figures_of(hardware_of("a100_80gb"))
    curve = figures.matmul("bf16")
    assert curve is not None
    assert curve.origin == figures.link.latency_s.origin == "assumed"
    assert curve.at(1e12) == pytest.approx(0.7 * 271.2e12)
    assert figures.peak_flops_per_s["bf16"].value == 312e12
    tf32 = figures.matmul("tf32")
    assert tf32 is not None
    assert tf32.at(1.0) == pytest.approx(0.7 * 156e12)
    assert figures.matmul("fp64") is None
