"""The table of what was run on what."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from analysis import load
from analysis.report.publication import experiment
from tests.analysis.factory import Fake, config, published

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

TOPOLOGY = """\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV12\tSYS\t0-23\t0\t\tN/A
GPU1\tNV12\t X \tPHB\t24-47\t1\t\tN/A
NIC0\tSYS\tPHB\t X

Legend:

  X    = Self
  PIX  = Connection traversing at most a single PCIe bridge
  NV#  = Connection traversing a bonded set of # NVLinks
"""


def environment(topology: str | None = TOPOLOGY) -> str:
    gpus = [{"name": "Imaginary GPU", "memory_bytes": 80 * 2**30}] * 2
    return json.dumps({"packages": {"torch": "2.15.0"}, "cuda": {"devices": gpus, "topology": topology}})


@pytest.mark.exhaustive
def test_it_names_hardware_framework_and_all_that_was_trained(tmp_path: Path) -> None:
    for strategy, devices in (("single", 1), ("ddp", 2), ("ddp", 10)):
        for epochs in (100, 9):
            run = config(tmp_path, strategy=strategy, devices=devices, epochs=epochs, device="cuda")
            published(run, Fake(device_type="cuda", device_name="Imaginary GPU", environment=environment()))
    assert dict(experiment(load(tmp_path))) == {
        "Device": "Imaginary GPU",
        "Memory of a GPU": "80 GiB",
        "Links between GPUs": "NV12",
        "Nodes": "1",
        "Framework": "torch 2.15.0",
        "Strategies": "ddp, single",
        "Models": "cnn_small",
        "Epochs": "9, 100",
        "Devices": "1, 2, 10",
        "Data sets": "digits",
        "Global batch": "128",
        "Precision": "fp32",
        "Repeats": "1",
        "Runs": "6",
    }


def test_what_was_not_recorded_is_not_there(tmp_path: Path) -> None:
    published(config(tmp_path))
    assert not {"Memory of a GPU", "Links between GPUs"} & dict(experiment(load(tmp_path))).keys()
    published(config(tmp_path, repeat=1), Fake(environment=environment(None)))
    published(config(tmp_path, repeat=2), Fake(environment=environment("GPU0\tCPU Affinity\nGPU0\t X \t0-15\n")))
    told = dict(experiment(load(tmp_path)))
    assert told["Memory of a GPU"] == "80 GiB"
    assert "Links between GPUs" not in told
