"""Calibrations: a table becomes the figures that made it, and the verb measures every kind of work."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from analysis.advisor.calibration import figures_of_calibration, read_figures
from analysis.advisor.links import Group, all_reduce_s, gather_s, send_s
from analysis.advisor.machine import machine_of_job, require_site
from analysis.advisor.rows import capacity_bytes
from analysis.advisor.step import links_of
from launch.attempt.processes import calibration_arguments
from launch.launcher import Prepared, launcher_of
from launch.slurm import errands, rendezvous
from launch.sweep import one_run
from parallelbench.cli import main
from parallelbench.config.build import to_mapping
from parallelbench.config.identity import canonical_json
from parallelbench.errors import ConfigError
from parallelbench.results.calibration import BACKWARD, CALIBRATION, read_calibration, write_calibration
from parallelbench.world.world import World
from tests.launch.fake_slurm import of_sbatch

KINDS = (
    *("image_convolution", "convolution", "grouped", "attention"),
    *("elementwise", "gelu", "layer_norm", "batch_norm", "max_pool"),
)
FACTS: dict[str, Any] = {
    "device_name": "made up",
    "device_type": "cpu",
    "devices_per_node": 4,
    "nodes": 2,
    "memory_bytes": 2**30,
    "others_running": 0,
    "environment": {"host": "here"},
}
ALPHA_S = {"link": 2e-5, "network": 5e-5}
BETA = {"link": 1e10, "network": 1e9}


def row(**values: Any) -> dict[str, Any]:
    empty = dict.fromkeys(("precision", "tier", "size_bytes", "flop"))
    return empty | {"ranks": 1, "nodes": 1, "busy": 1} | values


def devices(busy: int) -> list[dict[str, Any]]:
    """Products at 1 or 2 GFLOP/s by size, copies at 4 GB/s read and written; half of it in a busy node."""
    slow = 1.0 if busy == 1 else 2.0
    products = [
        row(operation="matmul", precision="fp32", flop=flop, busy=busy, time_s=slow * flop / rate)
        for flop, rate in ((1e6, 1e9), (1e9, 2e9))
    ]
    copies = [
        row(operation="copy", size_bytes=size, busy=busy, time_s=slow * 2 * size / 4e9) for size in (2**20, 2**26)
    ]
    return [*products, *copies, row(operation="launch", busy=busy, time_s=1e-6)]


def messages(tier: str, ranks: int, nodes: int = 1) -> list[dict[str, Any]]:
    """By hand: a ring of all devices of the nodes; each device of the first node sends to one of the second."""
    here, share = ranks // nodes, (ranks - 1) / ranks
    turns_s = (nodes - 1) * ALPHA_S["network"] + (ranks - nodes) * ALPHA_S["link"]
    at_once = here if nodes > 1 else 1
    times = {
        "all_reduce": lambda size: 2 * (turns_s + share * size / BETA[tier]),
        "all_gather": lambda size: turns_s + share * size / BETA[tier],
        "send": lambda size: ALPHA_S[tier] + at_once * size / BETA[tier],
    }
    return [
        row(operation=name, tier=tier, ranks=ranks, nodes=nodes, size_bytes=size, time_s=time_s(size), busy=here)
        for name, time_s in times.items()
        for size in (1024, 2**20, 2**26)
    ]


def test_figures_are_those_that_made_the_table(tmp_path: Path) -> None:
    shared = {"operation": "shard", "precision": "fp32", "tier": "link", "ranks": 4, "busy": 4}
    shards = [row(**shared, size_bytes=size, time_s=time_s) for size, time_s in ((2**24, 0.1), (1024, 0.01))]
    pools = [row(operation=name, size_bytes=10, busy=4, time_s=5.0) for name in ("max_pool", "max_pool_backward")]
    half = {"precision": "bf16", "busy": 4, "time_s": 1.0}
    attention = [row(operation=name, flop=8e9, size_bytes=64, **half) for name in ("attention", "attention_backward")]
    half_products = row(operation="matmul", flop=1e9, **half | {"time_s": 0.25})
    rows = [*devices(4), *pools, *attention, half_products, *shards]
    rows += [*messages("link", 4), *messages("network", 8, nodes=2)]
    write_calibration(tmp_path / "made.parquet", rows, FACTS)
    figures = read_figures(tmp_path / "made.parquet")
    curve = figures.matmul_flops_per_s["fp32"]
    assert curve.sizes == (1e6, 1e9)
    assert curve.rates == pytest.approx((0.5e9, 1e9)), "what a device of a busy node reaches"
    assert figures.memory_bytes_per_s.value == pytest.approx(2e9)
    assert figures.launch_s.value == 1e-6
    assert figures.network is not None
    for tier in (figures.link, figures.network):
        assert tier.latency_s.value == pytest.approx(ALPHA_S[tier.name])
        assert tier.bytes_per_s.value == pytest.approx(BETA[tier.name])
    assert figures.kernel("max_pool").backward.at(1e6) == pytest.approx(2.0)
    assert figures.kernel("attention", "bf16").forward.at(64.0) == pytest.approx(8e9)
    assert figures.kernel("grouped").forward.origin == "assumed"
    assert figures.sharding is not None
    assert (figures.sharding.sizes_bytes, figures.sharding.times_s) == ((1024, 2**24), (0.01, 0.1))
    assert (figures.sharding.ranks, figures.sharding.origin) == (4, "measured")
    assert {figures.link.latency_s.origin, figures.memory_bytes_per_s.origin, curve.origin} == {"measured"}


def test_messages_take_what_was_measured_of_their_size_and_other_groups_what_follows() -> None:
    """Also where α and β of all operations together say something else, as of gloo's."""
    made = [*messages("link", 4), *messages("network", 8, nodes=2)]
    made = [each | {"time_s": each["time_s"] * (1 + place % 3)} for place, each in enumerate(made)]
    figures = figures_of_calibration([*devices(4), *made], FACTS, source="here")
    run = one_run(["strategy=ddp", "devices=8", "nodes=2", "device=cpu"]).run
    links = links_of(machine_of_job(figures, run), {"link_scale": 1.0})

    def group(size: float) -> Group:
        return Group(size=np.array([size]), within=np.array([min(size, 4.0)]), rings=np.ones(1))

    for each in made:
        size, far = np.array([float(each["size_bytes"])]), float(each["nodes"] - 1)
        said_s = {
            "all_reduce": all_reduce_s(size, group(each["ranks"]), links),
            "all_gather": gather_s(size, group(each["ranks"]), links),
            "send": send_s(size, np.array([far]), links, rings=np.array([1.0 + 3.0 * far])),
        }[each["operation"]]
        assert said_s == pytest.approx(each["time_s"])
    size, plain = np.array([2.0**20]), dataclasses.replace(links, measured={})
    ratios = [all_reduce_s(size, group(2), each) / all_reduce_s(size, group(4), each) for each in (links, plain)]
    assert ratios[0] == pytest.approx(ratios[1])


def test_messages_of_one_size_that_were_measured_twice_take_their_geometric_mean() -> None:
    """As the smallest of more than 512 ranks are: each rank has a number at least."""
    once = messages("link", 4)
    twice = [*once, *(each | {"time_s": 4 * each["time_s"]} for each in once if each["size_bytes"] == 1024)]
    run, said_s = one_run(["strategy=ddp", "devices=4", "device=cpu"]).run, []
    for made in (once, twice):
        figures = figures_of_calibration([*devices(4), *made], FACTS, source="here")
        links = links_of(machine_of_job(figures, run), {"link_scale": 1.0})
        group = Group(size=np.array([4.0]), within=np.array([4.0]), rings=np.ones(1))
        said_s.append(gather_s(np.array([1024.0]), group, links))
    assert said_s[1] == pytest.approx(2 * said_s[0])


def test_what_a_gpus_host_takes_and_odd_sides_cost_is_what_was_measured() -> None:
    of_host = [row(operation=name, time_s=time_s) for name, time_s in (("train_launch", 3e-5), ("step", 1e-3))]
    odd = row(operation="unaligned", precision="fp32", flop=1e9, time_s=6.0)
    figures = figures_of_calibration([*devices(1), *of_host, odd], FACTS | {"device_type": "cuda"}, source="here")
    of_host_s = (figures.launch_s, figures.train_launch_s, figures.step_s)
    assert [each and each.value for each in of_host_s] == [1e-6, 3e-5, 1e-3]
    usual_s = 1e9 / float(figures.matmul_flops_per_s["fp32"].at(1e9))
    assert figures.unaligned == {"fp32": pytest.approx(6.0 / usual_s)}


def test_links_of_one_device_are_assumed_and_load_is_told() -> None:
    figures = figures_of_calibration(devices(1), FACTS | {"devices_per_node": 1, "others_running": 3}, source="here")
    assert (figures.link.latency_s.origin, figures.network, figures.sharding) == ("assumed", None, None)
    assert [note.partition(" ")[0] for note in figures.notes] == ["one", "3"]


def test_a_node_has_the_devices_that_its_environment_shows_and_not_only_those_in_use() -> None:
    rows = [*devices(4), *messages("link", 4)]
    eight = {"environment": {"logical_cores": 64, "cpu_quota_cores": 16.5}, "cores_per_device": 2}
    figures = figures_of_calibration(rows, FACTS | eight, source="here")
    assert (figures.devices_per_node, figures.busy_devices) == (8, 4)
    assert any(note.startswith("4 of a node's 8 devices") for note in figures.notes)
    seen = {"devices": [{}] * 4, "power_limit_w": "\n".join(["700.00"] * 8)}
    gpus = FACTS | {"device_type": "cuda", "environment": {"cuda": seen}}
    assert figures_of_calibration(rows, gpus, source="here").devices_per_node == 8


def test_a_site_may_hand_out_fewer_devices_than_its_nodes_have() -> None:
    """Hyperthreads are counted as cores, too. What was measured must be as many as the site hands out."""
    rows = [*devices(4), *messages("link", 4)]
    environment = {"environment": {"logical_cores": 64}, "cores_per_device": 1}
    figures = figures_of_calibration(rows, FACTS | environment, source="here")
    site = one_run(["site=default"]).run.site
    mine = msgspec.structs.replace(site, name="mine", device="cpu", devices_per_node=4)
    require_site(figures, mine, "cpu", whole_nodes=True)
    for count in (8, 2):
        with pytest.raises(ConfigError, match=f"has {count} devices per node, not 4"):
            require_site(figures, msgspec.structs.replace(mine, devices_per_node=count), "cpu", whole_nodes=True)


def test_processors_share_the_memory_of_their_node() -> None:
    """The table has an equal part for each of the devices that were calibrated: four, and eight are there."""
    rows = [*devices(4), *messages("link", 4)]
    whole = {"environment": {"logical_cores": 8}, "memory_bytes": 2**30}
    figures = figures_of_calibration(rows, FACTS | whole, source="here")
    assert [capacity_bytes(figures, devices) for devices in (1, 2, 8)] == [2**32, 2**31, 2**29]
    gpu = figures_of_calibration(rows, FACTS | {"device_type": "cuda", "memory_bytes": 2**30}, source="here")
    assert [capacity_bytes(gpu, devices) for devices in (1, 8)] == [2**30, 2**30]


def test_a_single_other_process_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a calibration in this process, whose measurements are made up."""
    from parallelbench.measure import calibration as measuring
    from parallelbench.world import settings

    for module, name in ((measuring, "die_with_parent"), (measuring, "pin"), (settings, "configure_torch")):
        monkeypatch.setattr(module, name, lambda *_: None)
    monkeypatch.setattr(measuring, "_device_rows", lambda *_: devices(1))
    monkeypatch.setattr(measuring, "_message_rows", lambda *_: [])
    monkeypatch.setattr(measuring, "others_running", lambda: 1)
    run = one_run(["strategy=single", "device=cpu", f"results={tmp_path}"]).run
    assert measuring.main([str(tmp_path / "here.parquet"), "cpu", canonical_json(to_mapping(run))]) == 0
    assert read_calibration(tmp_path / "here.parquet")[1]["others_running"] == 1


def test_times_that_do_not_grow_are_refused() -> None:
    flat = [each | {"time_s": 1e-3} for each in messages("link", 4)]
    with pytest.raises(ConfigError, match="don't grow with their size"):
        figures_of_calibration([*devices(4), *flat], FACTS, source="here")


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other.parquet").write_bytes(b"no table")
    with pytest.raises(ConfigError, match="is no calibration"):
        read_figures(tmp_path / "other.parquet")


@pytest.mark.parametrize("lacking", ["matmul", "copy", "launch"])
def test_a_table_that_lacks_a_kind_of_rows_is_refused(lacking: str, tmp_path: Path) -> None:
    rows = [each for each in devices(1) if each["operation"] != lacking]
    write_calibration(tmp_path / "made.parquet", rows, FACTS)
    with pytest.raises(ConfigError, match=f"lacks rows of operation={lacking}"):
        read_figures(tmp_path / "made.parquet")


def test_what_changes_no_calibration_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "model=mlp"]) == 2
    assert "model=mlp changes no calibration" in capsys.readouterr().err


@pytest.mark.parametrize("out", ["here", "calibration.pq"])
def test_a_table_has_a_name_that_advise_takes(out: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "here").mkdir()
    assert main(["calibrate", "--out", str(tmp_path / out)]) == 2
    assert "one that ends in .parquet" in capsys.readouterr().err


@pytest.mark.parametrize("nodes", [2, 3])
def test_all_devices_of_so_many_nodes_are_calibrated(
    nodes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where they don't divide the usual batch."""
    words = ["launcher=slurm", "site=vtrain", f"nodes={nodes}", f"results={tmp_path}"]
    asked = []

    def calibrate(self: object, prepared: Prepared, path: Path) -> None:
        asked.append(prepared.planned.run)
        raise ConfigError("this is no cluster")

    monkeypatch.setattr(type(launcher_of(one_run([*words, f"devices={nodes}"]).run)), "calibrate", calibrate)
    assert main(["calibrate", *words]) == 2
    assert [(run.devices, run.nodes) for run in asked] == [(8 * nodes, nodes)]


def test_a_job_asks_for_all_devices_of_its_nodes(tmp_path: Path) -> None:
    words = ["launcher=slurm", "site=vtrain", "nodes=2", "devices=16", "strategy=ddp", f"results={tmp_path}"]
    planned = one_run(words)
    prepared = launcher_of(planned.run).prepare(planned)
    script = errands.calibration_job(prepared, tmp_path, tmp_path / "table.parquet").script()
    assert {"--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=a100:8", "--time=15"} <= set(of_sbatch(script))
    assert "launch.slurm.errands calibration-on-node" in script.strip().splitlines()[-1]


@pytest.mark.exhaustive
def test_this_machine_is_calibrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "here.parquet"
    assert main(["calibrate", "devices=2", "device=cpu", f"results={tmp_path}", "--out", str(path)]) == 0
    rows, facts = read_calibration(path)
    assert facts["environment"]["packages"]["torch"]
    assert all(set(each) == {column.name for column in CALIBRATION} and each["time_s"] > 0 for each in rows)
    assert {each["busy"] for each in rows} == {2}
    ways = {each + way for each in KINDS for way in ("", BACKWARD)}
    assert {each["operation"] for each in rows} == ways | {
        *("matmul", "copy", "launch", "all_reduce", "all_gather", "all_to_all", "send", "shard")
    }
    figures = read_figures(path)
    assert (figures.devices_per_node, figures.device_type, figures.network) == (2, "cpu", None)


class Operands(TorchDispatchMode):
    """Notes operations of whose values that are numbers all are one and the same."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.constant = set[str](), set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if name in ("mm", "convolution", "convolution_backward") or name.startswith("_scaled_dot_product"):
            self.seen.add(name)
            given = [each for each in args if isinstance(each, torch.Tensor) and each.numel() > 1]
            self.constant |= {name for each in given if each.is_floating_point() and each.std() == 0}
        return func(*args, **(kwargs or {}))


def test_products_are_of_numbers_that_differ_as_a_trainings_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU computes those of ones faster, since it takes less power."""
    from parallelbench.measure import calibration as measuring

    monkeypatch.setattr(measuring, "fastest_s", lambda pieces, world: float(pieces[0]() is None))
    monkeypatch.setattr(measuring, "SHAPES", {"cpu": (2, 6)})
    monkeypatch.setattr(measuring, "TOKENS", {"cpu": 1})
    world = World()
    with Operands() as operands:
        measuring._product(16, world, precision="fp32", dtype=torch.float32)
        measuring._convolution("convolution", 3, 4, 1, world, precision="fp32")
        measuring._attention(8, world, precision="fp32")
    assert {"mm", "convolution", "convolution_backward"} < operands.seen
    assert len(operands.seen) == 5, "attention forward and backward, too"
    assert not operands.constant


@pytest.mark.exhaustive
def test_two_nodes_meet_and_measure_the_network(tmp_path: Path) -> None:
    """What srun starts on each of two nodes, here side by side."""
    words = ["launcher=slurm", "site=local_cluster", "nodes=2", "devices=2", "device=cpu", "strategy=ddp"]
    planned = one_run([*words, f"results={tmp_path}"])
    prepared, table = launcher_of(planned.run).prepare(planned), tmp_path / "table.parquet"
    own = ["calibration-on-node", str(tmp_path), "lo", *calibration_arguments(prepared, table)]
    program = ["-m", "launch.slurm.errands", *own]
    meeting = rendezvous.to_environment(rendezvous.choose("7.0", nodes=2, interface="lo"))
    nodes = [
        subprocess.Popen(
            [sys.executable, *program],
            env=os.environ | meeting | {"SLURM_NODEID": str(node), "SLURM_NTASKS": "2", "SLURM_JOB_ID": "7.0"},
        )
        for node in (0, 1)
    ]
    assert [each.wait() for each in nodes] == [0, 0]
    figures = read_figures(table)
    assert (figures.busy_devices, figures.link.latency_s.origin) == (1, "assumed")
    assert figures.network is not None
    assert figures.network.bytes_per_s.origin == "measured"
