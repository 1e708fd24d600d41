"""Plays a recorded profile to a sampler in a process of its own, through NVML's own interface."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from parallelbench.results.recording import Recorder, journal_of
from parallelbench.results.sensor_columns import Recordings
from parallelbench.telemetry.sampler import SamplerSettings
from tests.surroundings import machine_path, program

SOURCE = Path(__file__).with_name("fake_nvml.c")

_PLAY = """
import json, sys
from pathlib import Path

from parallelbench.results.recording import Recorder
from parallelbench.telemetry.sampler import Sampler, SamplerSettings

now = 0.0
settings = SamplerSettings(**json.loads(sys.argv[1]))
sampler = Sampler(settings, Recorder(Path(settings.recording)), clock=lambda: now)
for index in range(int(sys.argv[2])):
    now = index / settings.hz
    sampler.sample()
json.dump([name for name in ("torch", "numpy", "pyarrow") if name in sys.modules], sys.stdout)
"""
"""The sample with index i is taken at the moment i / hz, whatever the time really is."""


@dataclass(frozen=True)
class Played:
    """What a sampler has written."""

    recordings: Recordings
    rows: list[dict[str, Any]]
    warnings: list[tuple[str, str]]
    """Reason and device."""

    def of(self, device: str | None) -> list[dict[str, Any]]:
        """The rows of a GPU, or of the host (None)."""
        return [row for row in self.rows if row["device_uuid"] == device]

    def column(self, device: str | None, name: str) -> list[Any]:
        """One column of them."""
        return [row[name] for row in self.of(device)]


@functools.cache
def library(*, old_driver: bool = False) -> Path:
    """The folder of a freshly built libnvidia-ml.so.1."""
    compiler = program("cc")  # builds NVML's stand-in
    folder = Path(tempfile.mkdtemp(prefix="fake-nvml-"))
    options = ["-DOLD_DRIVER"] if old_driver else []
    command = [compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-O1", *options]
    subprocess.run(
        [*command, "-o", str(folder / "libnvidia-ml.so.1"), str(SOURCE)], check=True, env={"PATH": machine_path()}
    )
    return folder


def environment(profile: Path | None, folder: Path | None) -> dict[str, str]:
    """Of a process that finds the library, and the profile; None: no library but the machine's."""
    kept = {name: value for name, value in os.environ.items() if name not in ("CUDA_VISIBLE_DEVICES", "FAKE_NVML")}
    if profile is not None:
        kept["FAKE_NVML"] = str(profile)
    return kept if folder is None else kept | {"LD_LIBRARY_PATH": str(folder)}


def settings(**changes: Any) -> SamplerSettings:
    """Of a sampler of one GPU at 10 Hz."""
    plain: dict[str, Any] = {"recording": "", "run_id": "run", "attempt": 1, "node": "here", "hz": 10.0, "gpus": 1}
    everywhere = sorted(os.sched_getaffinity(0))  # as if all cores were spare: tests should not wait for idle ones
    return SamplerSettings(**(plain | {"spare_cores": everywhere, "parent": os.getpid()} | changes))


def play(
    tmp_path: Path, profile: str | None, *, samples: int, gpus: int = 1, old_driver: bool = False, **variables: str
) -> Played:
    """What so many samples of the profile are; None: a library without a driver."""
    path = None
    if profile is not None:
        path = tmp_path / "profile.txt"
        path.write_text(profile)
    recording = tmp_path / "telemetry-node0.bin"
    for left in (recording, journal_of(recording)):
        left.unlink(missing_ok=True)
    plain = msgspec.to_builtins(settings(gpus=gpus, recording=str(recording)))
    done = subprocess.run(
        [sys.executable, "-c", _PLAY, json.dumps(plain), str(samples)],
        env=environment(path, library(old_driver=old_driver)) | variables,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == [], "it runs beside the ranks"
    recordings = Recordings([recording])
    events = list(recordings.events())
    assert all(event["event"] == "telemetry_warning" for event in events)
    return Played(recordings, rows_of(recordings), [(event["reason"], event["device"]) for event in events])


def recorded(path: Path, rows: Iterable[dict[str, Any]]) -> Recordings:
    """These rows of `telemetry` as a sampler would record them."""
    recorder = Recorder(path)
    recorder.record(rows)
    recorder.close()
    return Recordings([path])


def rows_of(recordings: Recordings) -> list[dict[str, Any]]:
    """The rows of `telemetry`, as they are published."""
    return [row for batch in recordings.batches() for row in batch.to_pylist()]
