"""What the advisor must not claim: memory that nobody knows, machines that are others, runs that are unlike."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from analysis.advisor.fit import Learnt, published_fit
from analysis.advisor.layouts import gpt_layouts
from analysis.advisor.transformer import gpt_shape
from launch.sweep import one_run
from parallelbench.cli import main
from parallelbench.results.calibration import write_calibration
from tests.advisor.test_advise import answer, row

GPT = ["model=gpt", "model.layers=24", "model.width=2048", "model.heads=16", "batch_size=256"]


def test_a_model_of_terabytes_is_not_advised_on_one_device_of_sol(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["model=gpt", "model.layers=96", "model.width=12288", "model.heads=96", "batch_size=64"]
    found = answer(capsys, *shape, "site=asu_sol", "devices=1")
    assert {each["fits"] for each in found["rows"]} == {"does not fit"}
    assert found["advice"].startswith("Nothing fits")


FACTS: dict[str, Any] = {
    "device_name": "NVIDIA H100 80GB HBM3",
    "device_type": "cuda",
    "devices_per_node": 8,
    "nodes": 1,
    "memory_bytes": int(79.1 * 2**30),
    "others_running": 0,
    "environment": {"host": "here"},
}


def calibration(folder: Path, **facts: Any) -> str:
    """A table of devices that reach 100 TFLOP/s, 2 TB/s, and 200 GB/s of links, which shard for nothing."""
    empty = dict.fromkeys(("precision", "tier", "size_bytes", "flop")) | {"ranks": 1, "nodes": 1, "busy": 8}
    rows = [
        empty | {"operation": "matmul", "precision": "bf16", "flop": 1e12, "time_s": 1e-2},
        empty | {"operation": "copy", "size_bytes": 2**30, "time_s": 2 * 2**30 / 2e12},
        empty | {"operation": "launch", "time_s": 1e-6},
    ]
    for size in (2**10, 2**30):
        turn_s, sent = 6e-5, 2 * 7 / 8 * size / 2e11
        message = {"operation": "all_reduce", "tier": "link", "size_bytes": size, "ranks": 8}
        rows.append(empty | message | {"time_s": turn_s + sent})
        rows.append(empty | message | {"operation": "shard", "time_s": 1e-9})
    path = folder / "calibration.parquet"
    write_calibration(path, rows, FACTS | facts)
    return str(path)


@pytest.mark.parametrize(
    ("site", "facts", "why"),
    [
        ("h100_80gb", {"device_name": "a processor", "device_type": "cpu", "devices_per_node": 2}, "has cuda devices"),
        ("h100_80gb", {"device_name": "NVIDIA A100-SXM4-80GB"}, "has h100_80gb"),
        ("a100_80gb", {"device_name": "NVIDIA A100-SXM4-40GB", "memory_bytes": 40 * 2**30}, "has 79.15 GiB"),
        ("h100_80gb", {"devices_per_node": 4}, "has 8 devices per node, not 4"),
        ("local_cluster", {"devices_per_node": 4}, "has cpu devices"),
    ],
)
def test_a_calibration_of_another_machine_is_refused(
    site: str, facts: dict[str, Any], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = calibration(tmp_path, **facts)
    assert main(["advise", *GPT, f"site={site}", "devices=8", "--from", table]) == 2
    assert f"but site={site} {why}" in capsys.readouterr().err


def test_a_calibration_of_the_site_goes_before_its_data_sheet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [*GPT, "site=h100_80gb", "devices=8"]
    by_sheet, measured = answer(capsys, *asked), answer(capsys, *asked, "--from", calibration(tmp_path))
    assert measured["notes"] == ["speeds were measured on NVIDIA H100 80GB HBM3, 8 devices per node"]
    best = {name: min(each["step_s"] for each in found["rows"]) for name, found in (("s", by_sheet), ("m", measured))}
    assert best["m"] > 3 * best["s"]
    # MFU is by the data sheet's peak: devices that reach 100 TFLOP/s stay below 100 of 989.
    assert 0 < max(each["mfu"] for each in measured["rows"]) < 100 / 989


def test_a_site_of_ones_own_folder_is_known_to_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "own.yaml").write_text("defaults:\n  - h100_80gb\n  - _self_\nname: own\n")
    assert answer(capsys, *GPT, "site=own", "devices=8", "--conf", str(tmp_path))["rows"]


def test_interleaved_stages_have_equally_many_layers() -> None:
    layouts, _ = gpt_layouts(gpt_shape({"layers": 12}), [4], batch_size=64, per_node=8)
    assert layouts is not None
    interleaved = layouts.chunks > 1
    assert set(layouts.pipeline[interleaved]) == {2.0}
    assert set(layouts.pipeline) == {1.0, 2.0, 4.0}


@pytest.mark.parametrize(
    ("overrides", "respect"),
    [
        (["batch_size=256"], "batch"),
        (["batch_size=16"], "batch"),
        (["precision=bf16"], "precision"),
        (["optimizer=adam"], "optimizer"),
        (["model.hidden=[7]"], "model"),
        (["devices=4"], "devices"),
        (["devices=4", "nodes=2"], "nodes"),
        (["strategy=zero1"], "strategy"),
        (["activation_recomputation=full"], "settings"),
        (["clip_norm=1.0"], "settings"),
    ],
)
def test_a_run_that_nothing_measured_is_like_says_in_what(overrides: list[str], respect: str) -> None:
    like = ["model=mlp", "data=synthetic", "optimizer=sgd", "device=cpu", "strategy=ddp", "devices=2", "batch_size=64"]
    learnt = Learnt(runs=[one_run(like).run, one_run([*like, "batch_size=128"]).run])
    assert learnt.outside(one_run([*like, "batch_size=100", "repeat=3"]).run) == ()
    assert respect in learnt.outside(one_run([*like, *overrides]).run)


def test_transformers_say_which_layouts_no_published_step_has(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, *GPT, "site=a100_80gb", "devices=256,512")
    figures = found["figures"]
    assert (figures["memory_bytes"]["origin"], figures["link"]["latency_s"]["origin"]) == ("site", "assumed")
    words = {(each["strategy"], each["devices"], each["options"][-1]): each["extrapolates"] for each in found["rows"]}
    assert words["fsdp", 256, "recompute=none"] == ["model"]
    for name in ("zero1", "hsdp"):
        assert words[name, 256, "recompute=none"] == ["model", "strategy"]
    assert words["fsdp", 256, "recompute=selective"] == ["model", "strategy"]
    assert "devices" not in words["ddp×tp", 256, "recompute=none"]
    assert {each["devices"] for each in found["rows"] if "devices" in each["extrapolates"]} == {512}
    other = answer(capsys, *GPT, "site=h100_80gb", "devices=8")
    assert all({"model", "machine"} <= set(each["extrapolates"]) for each in other["rows"])


def test_a_transformer_follows_what_is_asked_or_refuses_it(capsys: pytest.CaptureFixture[str]) -> None:
    asked = [*GPT, "site=a100_80gb", "devices=16"]
    found = answer(capsys, *asked, "strategy=ddp,dp_tp", "precision=bf16", "optimizer=adamw", "scaling=strong")
    assert {each["strategy"] for each in found["rows"]} == {"ddp", "ddp×tp"}
    for word, why in {
        "precision=fp32": "predicted for precision=bf16 or fp16 only",
        "optimizer=sgd": "predicted for optimizer=adam or adamw only",
        "scaling=weak": "predicted for scaling=strong only",
        "data=cifar10": "does not change what is predicted",
        "epochs=3": "does not change what is predicted",
        "strategy.tensor=2": "does not change what is predicted",
        "strategy=downpour": "strategy=downpour is none of model=gpt: choose single, ddp",
    }.items():
        assert main(["advise", *asked, word]) == 2
        assert why in capsys.readouterr().err


@pytest.mark.slow
def test_intervals_are_wider_where_less_was_tried(capsys: pytest.CaptureFixture[str]) -> None:
    def half(strategy: str, devices: int, site: str, kept: str = "none") -> float:
        shape = [*GPT[:-1], "batch_size=1024", f"site={site}", "model.kv_heads=8"]  # kernels that no published step has
        found = answer(capsys, *shape, f"devices={devices}", f"strategy={strategy}")
        rows = [each for each in found["rows"] if each["options"][-1] == f"recompute={kept}"]
        rows = [each for each in rows if "gathered=once" not in each["options"]]
        return math.log(rows[0]["step_high_s"] / rows[0]["step_s"])

    fit = published_fit()
    inside, across = fit.half_widths[4], fit.half_widths[6]  # of fused attention and unmeasured kernels
    assert half("fsdp", 8, "a100_80gb") == pytest.approx(inside)
    assert half("fsdp", 16, "a100_80gb") == pytest.approx(across)
    assert half("hsdp", 16, "a100_80gb") == pytest.approx(1.5 * across)
    assert half("fsdp", 8, "a100_80gb", "selective") == pytest.approx(1.5 * inside)
    assert half("fsdp", 512, "a100_80gb") == pytest.approx(1.5 * across)
    assert half("fsdp", 8, "h100_80gb") == pytest.approx(1.5 * inside)


@pytest.mark.slow
def test_guessed_speeds_have_intervals_of_guesses(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, *GPT, "site=a100_80gb", "site.hardware=null", "devices=4")
    for each in found["rows"]:
        assert each["step_high_s"] / each["step_s"] >= 2.0**1.5 - 1e-9


def test_a_network_that_nobody_measured_is_said_to_be_a_guess(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = answer(capsys, *GPT, "devices=8,16", "--from", calibration(tmp_path))
    widths = {
        devices: {each["step_high_s"] / each["step_s"] for each in found["rows"] if each["devices"] == devices}
        for devices in (8, 16)
    }
    assert max(widths[8]) < 2.0 < 2.0**1.5 - 1e-9 <= min(widths[16])
    assert "the network between nodes is assumed" in found["notes"]
    assert answer(capsys, *GPT, "devices=8", "--from", calibration(tmp_path))["notes"] == found["notes"][:-1]


def test_memory_that_libraries_fill_holds_nothing() -> None:
    assert [row(capacity_bytes=each).fit for each in (0.0, -1e9)] == ["does not fit"] * 2


def test_memory_is_too_close_to_call_within_the_errors_that_are_published() -> None:
    """The farthest of torchtitan's figures is 13 % off."""
    assert [row(memory_bytes=share * 4e9).fit for share in (0.84, 0.88, 1.13, 1.16)] == [
        *("fits", "too close to call", "too close to call", "does not fit")
    ]
