"""NVML: whether it means the same GPUs as CUDA, whether its readings make sense, and whether its energy is right."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from parallelbench.gpu_check.results import FailedError, SkippedError, between
from parallelbench.results.journal import Journal
from parallelbench.results.sensor_columns import Recordings, Samples, columns
from parallelbench.telemetry.nvml import WAYS, opened
from parallelbench.telemetry.sampler import SamplerSettings, sampling
from parallelbench.world.machine import visible_gpus

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from parallelbench.world.machine import Gpu
    from parallelbench.world.world import World

Row = dict[str, Any]

HZ = 10.0
LOAD_S = 6.0
"""Long against the counter's 0.1 s, and against the 2 s under which energies are flagged."""
STARTS_S = 30.0
"""The sampler's first sample is waited for so long."""
_PLAUSIBLE = {
    "energy_j": (0.0, float("inf")),
    "power_w": (1.0, 3000.0),
    "utilization": (0.0, 1.0),
    "memory_used_bytes": (1.0, 2.0**42),
    "clock_hz": (1e7, 1e10),
    "temperature_c": (0.0, 120.0),
    "throttle_reasons": (0.0, 2.0**63),
    "processes": (0.0, 10_000.0),
}
assert _PLAUSIBLE.keys() == WAYS.keys()


def same_gpus() -> str:
    """CUDA and NVML list the same devices in the same order, by which energy is attributed."""
    count = torch.cuda.device_count()
    return compare_gpus([uuid_of(index) for index in range(count)], visible_gpus())


def uuid_of(index: int) -> str:
    """The UUID of one of CUDA's devices, as NVML writes it."""
    return f"GPU-{torch.cuda.get_device_properties(index).uuid}"


def compare_gpus(cuda: Sequence[str], nvml: Sequence[Gpu]) -> str:
    """By UUID."""
    if any(gpu.uuid.startswith("MIG-") for gpu in nvml):
        raise SkippedError("MIG slices: NVML measures whole GPUs, so energy and load of a slice are null")
    if list(cuda) != [gpu.uuid for gpu in nvml]:
        raise FailedError(f"CUDA shows {' '.join(cuda)}, NVML {' '.join(gpu.uuid for gpu in nvml) or 'none'}")
    return f"{len(cuda)} × {', '.join(sorted({gpu.name for gpu in nvml}))}, by UUID and in order"


def readings() -> str:
    """All columns of one sample of each GPU."""
    warnings: list[str] = []
    count = torch.cuda.device_count()
    gpus = opened(count, warn=lambda reason, device: warnings.append(f"{reason} ({device})"))
    rows = [gpu.read() for gpu in gpus]
    return judge_readings(rows, warnings, count)


def judge_readings(rows: Sequence[Row], warnings: Sequence[str], count: int) -> str:
    """Values must be physically possible; columns that are null are named."""
    if not rows:
        raise SkippedError("; ".join(warnings) or "no GPU could be read")
    if len(rows) != count:
        raise FailedError(f"{len(rows)} of {count} GPUs could be read: {'; '.join(warnings)}")
    for row in rows:
        for column, (least, most) in _PLAUSIBLE.items():
            if row[column] is not None and not least <= row[column] <= most:
                raise FailedError(f"{row['device_uuid']}: {column} is {row[column]}, not from {least:g} to {most:g}")
    shown = ", ".join(f"{column} {value:g}" for column in WAYS if (value := rows[0][column]) is not None)
    return "; ".join([shown, *warnings])


def energy(world: World, uuid: str, busy: Callable[[], object], load_s: float = LOAD_S) -> str:
    """Joules by the counter against joules by integrated power, from the sampler's own process, as of an epoch.

    `uuid` is that of the first visible GPU, which `busy` keeps busy.
    """
    with tempfile.TemporaryDirectory() as folder:
        log, recording = Journal(Path(folder) / "rank.jsonl"), Path(folder) / "telemetry.bin"
        settings = SamplerSettings(
            recording=str(recording),
            run_id="gpu-check",
            attempt=1,
            node="here",
            hz=HZ,
            gpus=1,
            spare_cores=[],
            parent=os.getpid(),
        )
        with sampling(settings, log):
            # The GPU warms up while the sampler starts; before it ends, it takes one more sample.
            _keep_busy(world, busy, until=lambda: bool(samples(recording)), at_most_s=STARTS_S)
            started_at = time.time()
            _keep_busy(world, busy, until=lambda: False, at_most_s=load_s)
            ended_at = time.time()
        log.close()
        window = {"training_started_at": started_at, "training_ended_at": ended_at}
        return judge_energy(Recordings([recording]), {"attempt": 1, "node": "here", "device_uuid": uuid} | window)


def judge_energy(recordings: Recordings, rank: Row) -> str:
    """Compare the window's energy by counter and by power, and check the sampling interval."""
    own = [row["time"] for row in _rows(recordings) if row["device_uuid"] == rank["device_uuid"]]
    if len(own) < 3:
        raise FailedError(f"the sampler's process took {len(own)} samples of {rank['device_uuid']}")
    interval = between(
        "interval between samples, s,", statistics.median(b - a for a, b in pairwise(own)), 0.8 / HZ, 2 / HZ
    )
    epoch = columns([rank], Samples(recordings))
    counted_j, power_w = epoch["gpu_energy_j"], epoch["gpu_power_mean_w"]
    if counted_j is None or power_w is None or epoch["telemetry_flags"]:
        flags = epoch["telemetry_flags"]
        raise SkippedError(f"energy {counted_j} J, power {power_w} W, flags {flags}: nothing to compare; {interval}")
    length_s = rank["training_ended_at"] - rank["training_started_at"]
    ratio = between("counter ÷ integrated power", counted_j / (power_w * length_s), 0.9, 1.1)
    busy = epoch["gpu_utilization_mean"]
    if busy is not None and busy < 0.5:
        raise FailedError(f"the GPU was kept busy, but its utilisation is {busy:.2f}")
    return f"{ratio}; {counted_j:.0f} J in {length_s:.1f} s; {interval}"


def samples(recording: Path) -> list[Row]:
    """The rows of `telemetry` that a sampler has written so far."""
    return _rows(Recordings([recording] if recording.exists() else []))


def _rows(recordings: Recordings) -> list[Row]:
    return [row for batch in recordings.batches() for row in batch.to_pylist()]


def _keep_busy(world: World, busy: Callable[[], object], *, until: Callable[[], bool], at_most_s: float) -> None:
    deadline = time.perf_counter() + at_most_s
    while time.perf_counter() < deadline and not until():
        for _ in range(10):
            busy()
        world.synchronize()
