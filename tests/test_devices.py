"""What a machine has to train on: GPUs that can't be read, GPUs that others use, load of a shared node."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from launch.attempt.supervisor import too_small
from parallelbench.errors import ConfigError
from parallelbench.world import affinity as affinity_module
from parallelbench.world import machine as machine_module
from parallelbench.world.affinity import pin
from parallelbench.world.machine import Gpu, Machine, cpu_name
from tests.faults import fault
from tests.helpers import configured
from tests.telemetry.playback import environment, library

_LOOK = """
import dataclasses, json
from parallelbench.world.machine import visible_gpus
print(json.dumps([dataclasses.asdict(gpu) for gpu in visible_gpus()], default=sorted))
"""


def gpus_of(tmp_path: Path, profile: str, **variables: str) -> list[Gpu]:
    """What a process sees of these GPUs through NVML."""
    path = tmp_path / "profile.txt"
    path.write_text(profile)
    looked = subprocess.run(
        [sys.executable, "-c", _LOOK], env=environment(path, library()) | variables, capture_output=True, check=True
    )
    return [Gpu(**fields | {"cores": frozenset(fields["cores"])}) for fields in json.loads(looked.stdout)]


def machine(*gpus: Gpu, cores: int = 8, node_cores: int = 8) -> Machine:
    return Machine(cores=tuple(range(cores)), physical_cores=cores, gpus=gpus, node_cores=node_cores)


def caveats(on: Machine, device_type: str, devices: int) -> list[str]:
    return on.caveats(devices=devices, device_type=device_type, cores_per_device=1)


def test_a_lost_gpu_of_another_job_disturbs_nobody(tmp_path: Path) -> None:
    profile = "device GPU-a\nmemory 1\ndevice GPU-b lost\ndevice GPU-c\nmemory 1\n"
    found = gpus_of(tmp_path, profile)
    assert [gpu.uuid for gpu in found] == ["GPU-a", "", "GPU-c"], "each keeps its place: CUDA counts the lost one, too"
    assert [gpu.failure for gpu in found] == [None, "GPU is lost", None]
    assert [gpu.uuid for gpu in gpus_of(tmp_path, profile, CUDA_VISIBLE_DEVICES="0,2")] == ["GPU-a", "GPU-c"]
    assert not machine(*found).require(devices=1, device_type="cuda", cores_per_device=1, oversubscribe=False)


def test_gpus_that_slurm_keeps_from_a_job_are_not_counted(tmp_path: Path) -> None:
    """NVML counts them, CUDA does not, and a confined job's CUDA_VISIBLE_DEVICES begins with 0."""
    profile = "device GPU-a denied\ndevice GPU-b\nmemory 1\ndevice GPU-c denied\ndevice GPU-d\nmemory 1\n"
    for visible in ({}, {"CUDA_VISIBLE_DEVICES": "0,1"}):
        assert [gpu.uuid for gpu in gpus_of(tmp_path, profile, **visible)] == ["GPU-b", "GPU-d"]


@pytest.mark.parametrize(("quota", "most"), [(None, 8), (2.0, 2), (2.5, 2), (0.5, 0), (64.0, 8)])
def test_a_quota_is_held_against_the_cores_of_a_run(quota: float | None, most: int) -> None:
    here = dataclasses.replace(machine(), quota_cores=quota)
    for count, cores in ((1, 1), (2, 1), (1, 2), (3, 1), (8, 1), (2, 4), (9, 1)):
        share = {"devices": count, "device_type": "cpu", "cores_per_device": cores}
        fits = count * cores <= most
        assert here.suffices(**share) == fits, "what is recorded as oversubscribed"
        assert here.require(**share, oversubscribe=True) != fits
        if not fits:
            words = f"8 cores, of which a quota (cgroup) allows {quota:g}" if most < 8 else "8 cores: "
            with pytest.raises(ConfigError, match=re.escape(words)):
                here.require(**share, oversubscribe=False)
    assert here.suffices(devices=0, device_type="cuda", cores_per_device=1), "on GPUs, cores are no devices"


@fault(
    "workers",
    "A container's quota of processor time",
    injection="a cgroup's cpu.max of one core, for two devices of one core each, on a machine with enough cores",
    outcome="the run is refused before it starts, with the quota; with launcher.oversubscribe=true it is recorded",
)
def test_a_run_beyond_the_quota_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_module, "cpu_quota_cores", lambda: 1.0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    run = configured("devices=2", "strategy=ddp", "device=cpu")
    assert "4 cores, of which a quota (cgroup) allows 1: " in (too_small(run, "cpu") or "")
    assert too_small(configured("devices=1", "device=cpu"), "cpu") is None


def test_gpus_that_others_compute_on_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_module, "others_running", lambda: 0)
    found = gpus_of(tmp_path, "device GPU-a\nprocesses 0\ndevice GPU-b\nprocesses 3\n")
    assert [gpu.other_processes for gpu in found] == [0, 3]
    assert caveats(machine(*found), "cuda", 1) == []
    assert caveats(machine(*found), "cuda", 2) == [
        "3 other processes used GPU 1 (Imaginary GPU) when this run started and may have slowed it down; "
        "hide it with CUDA_VISIBLE_DEVICES, or ask for a node of your own"
    ]


def test_on_a_shared_node_load_is_held_against_all_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_module, "others_running", lambda: 20)
    assert caveats(machine(cores=4, node_cores=64), "cpu", 4) == [], "others may run on the 60 cores that are not ours"
    (caveat,) = caveats(machine(cores=4, node_cores=22), "cpu", 4)
    assert caveat.startswith("20 other processes kept the machine's 22 cores busy")
    assert caveats(machine(cores=4, node_cores=0), "cpu", 4), "where nobody knows of more cores, these are all"


def refusal(*found: Gpu, count: int | None = None) -> str:
    """Why a run on these GPUs is refused; it must be one line."""
    with pytest.raises(ConfigError) as caught:
        machine(*found).require(
            devices=count or len(found), device_type="cuda", cores_per_device=1, oversubscribe=False
        )
    assert "\n" not in str(caught.value)
    return str(caught.value)


BAD = {
    "lost": (
        "device GPU-a\ndevice GPU-b lost\n",
        2,
        "GPU 1 can't be used (GPU is lost): hide it with CUDA_VISIBLE_DEVICES, or ask for another node",
    ),
    "sliced": ("device GPU-a mig\ndevice GPU-b\n", 2, "devices=2, but MIG slices GPU 0: NCCL connects no slices"),
    "several types": (
        "device GPU-a\ndevice GPU-b\nname Slower-GPU\n",
        2,
        "GPUs of several types (Imaginary GPU, Slower-GPU) would train together",
    ),
    "fewer than the site says": ("device GPU-a\n", 4, "devices=4, but this machine has 1 CUDA device: choose"),
}
"""What a GPU node may be like, for how many devices → what the user is told."""


@pytest.mark.parametrize("case", BAD)
def test_a_node_that_can_not_do_a_run_is_named_with_the_remedy(case: str, tmp_path: Path) -> None:
    profile, count, words = BAD[case]
    assert words in refusal(*gpus_of(tmp_path, profile), count=count)


def test_slices_of_a_gpu_are_one_device(tmp_path: Path) -> None:
    """CUDA shows a process the first slice only, whatever the sizes of the others."""
    found = gpus_of(tmp_path, "device GPU-a mig\n", CUDA_VISIBLE_DEVICES="MIG-a,MIG-b")
    assert [(gpu.uuid, gpu.is_sliced) for gpu in found] == [("MIG-a", True)]
    assert not machine(*found).require(devices=1, device_type="cuda", cores_per_device=1, oversubscribe=False)
    assert "devices=2, but this machine has 1 CUDA device" in refusal(*found, count=2)


@pytest.mark.parametrize("profile", ["processes 2", "processes 0"])
def test_what_only_slows_a_run_down_or_is_not_known_refuses_none(profile: str, tmp_path: Path) -> None:
    found = gpus_of(tmp_path, f"device GPU-a\n{profile}\ndevice GPU-b\n")
    assert not machine(*found).require(devices=2, device_type="cuda", cores_per_device=1, oversubscribe=False)


def test_gpus_without_peer_access_are_named(tmp_path: Path) -> None:
    path = tmp_path / "profile.txt"
    path.write_text("device GPU-a\npeers 0\ndevice GPU-b\npeers 5\ndevice GPU-c\npeers 0\n")
    look = "from parallelbench.world.machine import *; print(*gpu_caveats(visible_gpus()))"
    found = {
        visible: subprocess.run(
            [sys.executable, "-c", look],
            env=environment(path, library()) | {"CUDA_VISIBLE_DEVICES": visible},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for visible in ("0,1,2", "0,1", "1")
    }
    told = "no peer access between the GPUs {}: messages between them go through the host"
    assert found == {"0,1,2": told.format("1 and 2"), "0,1": "", "1": ""}


def test_ranks_of_gpus_stay_on_their_numa_node(tmp_path: Path) -> None:
    found = gpus_of(tmp_path, "device GPU-a\ncores 15\ndevice GPU-b\ncores 240\ndevice GPU-c\n")
    assert [sorted(gpu.cores) for gpu in found] == [[0, 1, 2, 3], [4, 5, 6, 7], []]
    here = machine(*found, cores=6)
    assert here.near([0]) == {0, 1, 2, 3}
    assert here.near([1]) == {4, 5}, "as far as this process may use them"
    assert here.near([0, 1]) == {0, 1, 2, 3, 4, 5}
    assert here.near([2]) == here.near([1, 2]) == set(), "not known"


def test_a_rank_whose_numa_node_has_too_few_of_the_jobs_cores_stays_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm gave a job eight cores for its GPU, one of them near it; on whole nodes one GPU has a share of them."""
    pinned: list[set[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: pinned.append(set(cores)))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("LOCAL_RANK", "0")
    for near, gpus in (({0}, 1), (set(range(8)), 1), ({0, 1, 2, 3}, 2)):
        gpu = Gpu(name="A100", uuid="GPU-0", memory_bytes=1, cores=frozenset(near))
        here = Machine(tuple(range(8)), 8, (gpu,) * gpus)
        monkeypatch.setattr(affinity_module, "this_machine", lambda here=here: here)
        assert pin(configured("strategy=single"), "cuda") == []
    assert pinned == [set(range(8)), set(range(8)), {0, 1, 2, 3}]


LAYOUTS = ["single", "ddp × 2", "ddp × 4", "model_parallel × 2", "model_parallel × 4"]


@pytest.mark.parametrize(
    ("near", "quota", "threads"),
    [
        ([range(8), range(8), range(8, 16), range(8, 16)], None, [8, 4, 4, 8, 16]),
        ([range(8), range(8), range(8, 16), range(8, 16)], 6.0, [6, 3, 1, 6, 6]),
        ([range(8), range(8, 16), range(8), range(8, 16)], None, [8, 8, 4, 16, 16]),
        ([()] * 4, None, [16, 8, 4, 16, 16]),  # the driver names no cores
    ],
)
def test_a_process_has_as_many_host_threads_as_its_gpus_have_cores(
    near: list[Iterable[int]], quota: float | None, threads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted once it is pinned beside them, and no thread has to share a core with another, for any layout."""
    gpus = tuple(Gpu(name="A100", uuid=f"GPU-{n}", memory_bytes=1, cores=frozenset(c)) for n, c in enumerate(near))
    here = Machine(tuple(range(16)), 16, gpus, quota_cores=quota)
    monkeypatch.setattr(affinity_module, "this_machine", lambda: here)
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found = []
    for layout in LAYOUTS:
        strategy, _, devices = layout.partition(" × ")
        monkeypatch.setenv("LOCAL_RANK", str(int(devices or 1) - 1) if strategy == "ddp" else "0")
        pin(configured(f"strategy={strategy}", f"devices={devices or 1}", "model=vit", "data=synthetic"), "cuda")
        found.append(int(os.environ["OMP_NUM_THREADS"]))
    assert found == threads


@pytest.mark.parametrize(("local_rank", "cores"), [("0", {0}), ("1", {1})])
def test_a_rank_is_pinned_beside_its_gpu(local_rank: str, cores: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        pytest.skip("needs two cores")
    near = [Gpu(name="A100", uuid=f"GPU-{core}", memory_bytes=1, cores=frozenset({core})) for core in allowed[:2]]
    monkeypatch.setattr(affinity_module, "this_machine", lambda: Machine(tuple(allowed), len(allowed), tuple(near)))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert pin(configured("strategy=ddp", "devices=2"), "cuda") == []
    assert os.sched_getaffinity(0) == {allowed[core] for core in cores}
    os.sched_setaffinity(0, allowed)
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert pin(configured("strategy=model_parallel", "devices=2", "model=mlp"), "cuda") == []
    assert os.sched_getaffinity(0) == set(allowed[:2]), "one process drives both"


ARM = "processor\t: {0}\nBogoMIPS\t: 2000.00\nCPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: {1}\n"
ARM += "CPU part\t: {2}\nCPU revision\t: 1\n\n"


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("processor\t: 0\ncpu family\t: 25\nmodel name\t: AMD EPYC 9654\nprocessor\t: 1\n", "AMD EPYC 9654"),
        (ARM.format(0, "0x3", "0xd0c") + ARM.format(1, "0x3", "0xd0c"), "Neoverse-N1 r3p1"),  # Graviton 2
        (ARM.format(0, "0x1", "0xd40"), "Neoverse-V1 r1p1"),  # Graviton 3
        (ARM.format(0, "0x0", "0xd4f"), "Neoverse-V2 r0p1"),  # Grace
        (ARM.format(0, "0x2", "0xfff"), "ARM 0x41:0xfff r2p1"),
        ("model name\t: ARMv8 Processor rev 1 (v8l)\n" + ARM.format(0, "0x1", "0xd40"), "Neoverse-V1 r1p1"),
        (ARM.format(0, "0x1", "0xd40") + ARM.format(1, "0x0", "0xd4f"), "Neoverse-V1 r1p1, Neoverse-V2 r0p1"),
        ("processor\t: 0\ncpu\t\t: POWER9, altivec supported\n", "POWER9, altivec supported"),
        ("", "unknown CPU"),
    ],
)
def test_processors_of_one_kind_have_one_name(said: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(said)
    assert cpu_name(tmp_path / "cpuinfo") == name
