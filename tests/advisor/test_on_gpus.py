"""What the advisor's verbs ask of a machine with GPUs."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from launch.launcher import launcher_of
from launch.verbs import advise, calibrate
from parallelbench.measure import calibration
from parallelbench.world import machine
from parallelbench.world.machine import Gpu, Machine
from parallelbench.world.world import World
from tests.helpers import configured
from tests.scripted_cuda import ScriptedCuda

GPUS = tuple(Gpu(name="A100", uuid=f"GPU-{letter}", memory_bytes=2**36) for letter in "ab")
WAYS = ("", calibration.BACKWARD)
HERE = Machine(cores=tuple(range(8)), physical_cores=8, gpus=GPUS, node_cores=8)


def test_all_gpus_of_this_machine_are_calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "this_machine", lambda: HERE)
    run = configured("device=auto")
    assert calibrate._devices(run, launcher_of(run), []) == 2
    on_cores = configured("device=cpu", "cores_per_device=2")
    assert calibrate._devices(on_cores, launcher_of(on_cores), []) == 4


def test_without_a_data_sheet_this_machines_gpus_are_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "this_machine", lambda: HERE)
    figures, notes = advise.figures_of_site(configured("device=auto"))
    assert (figures.device_type, figures.devices_per_node) == ("cuda", 2)
    assert "assumed" in notes[0]


def test_gpus_can_be_asked_about_where_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "this_machine", lambda: replace(HERE, gpus=()))
    figures, notes = advise.figures_of_site(configured("device=cuda"))
    assert (figures.device_type, figures.devices_per_node) == ("cuda", 8)
    assert "no GPU" in notes[-1]


def test_a_gpus_memory_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(total_memory=device * 2**30, multi_processor_count=132),
    )
    world: Any = SimpleNamespace(device_type="cuda", device=3)
    assert calibration._of_device(world, 4) == {"memory_bytes": 3 * 2**30, "multiprocessors": 132}


def test_a_gpu_is_measured_in_each_precision_and_so_is_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU in its place, with a CPU's sizes."""
    ScriptedCuda().install(monkeypatch)
    for sizes in (calibration.SIDES, calibration.COPIED_BYTES, calibration.SEQUENCES, calibration.TOKENS):
        monkeypatch.setitem(sizes, "cuda", sizes["cpu"][:2] if isinstance(sizes["cpu"], tuple) else 64)
    monkeypatch.setitem(calibration.SHAPES, "cuda", (2, 8))
    monkeypatch.setitem(calibration.GIVEN_BYTES, "cuda", (2**20,))
    monkeypatch.setattr(calibration, "UNALIGNED", 15)
    monkeypatch.setattr("parallelbench.measure.machine_probe.PIECE_S", 1e-4)
    rows = list(calibration.device_work(World(device_type="cuda", devices=(torch.device("cpu"),))))
    precisions: dict[str, set[Any]] = {}
    for row in rows:
        assert row["time_s"] >= 0.0
        precisions.setdefault(row["operation"], set()).add(row.get("precision"))
    whole = {"fp32", "tf32", "bf16", "fp16"}
    assert precisions["matmul"] == precisions["unaligned"] == whole
    of_shapes = {kind + way for kind in ("image_convolution", "convolution", "grouped", "attention") for way in WAYS}
    assert {name for name, found in precisions.items() if found == {"fp32", "bf16"}} == of_shapes
    assert {"launch", "train_launch", "step"} < precisions.keys()
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_pass_through_sharded_layers_lasts_until_the_gpu_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    device = ScriptedCuda()
    device.install(monkeypatch)
    monkeypatch.setattr(calibration.time, "perf_counter", lambda: device.now_s)
    monkeypatch.setattr(calibration.dist, "all_reduce", lambda *_, **__: None)

    class Layers(nn.Module):
        def forward(self, _: Any) -> torch.Tensor:
            device.launch(2.0)  # the host goes on at once
            return torch.ones(1, requires_grad=True)

    sample: Any = SimpleNamespace(is_cuda=True, device=torch.device("cpu"))
    group: Any = None
    assert calibration._pass_s(Layers(), sample, group) == 2.0
