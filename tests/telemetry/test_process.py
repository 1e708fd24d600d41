"""The sampler's process: its recording, its end, and what a run's tables hold of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import psutil
import pytest

from analysis import load
from parallelbench.config.identity import run_id
from parallelbench.results.folder import RunFolder
from parallelbench.results.journal import Journal, read_entries, read_tables
from parallelbench.results.publish import publish
from parallelbench.results.recording import Recorder
from parallelbench.results.sensor_columns import RECORD, Recordings, add_telemetry, read_telemetry
from parallelbench.telemetry.sampler import END, command_line, sampling
from tests.analysis.factory import Fake, begin, config, write_epochs
from tests.telemetry.playback import environment, library, recorded, rows_of, settings

PROFILE = "device GPU-a\nenergy 1000 1250 1750 2000 2300\ninstant 5000\nutilization 50\nmemory 7\nclock 1\nthrottle 0\n"


@pytest.fixture
def ending() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that don't outlive the test."""
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


def samples_of(recording: Path, device: str | None) -> list[dict[str, Any]]:
    rows = rows_of(Recordings([recording] if recording.exists() else []))
    return [row for row in rows if row["device_uuid"] == device]


def wait_for_rows(recording: Path, process: subprocess.Popen[Any], count: int) -> None:
    """Wait until so many samples are in the recording."""
    while len(samples_of(recording, None)) < count:
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)


def started(tmp_path: Path, **changes: Any) -> tuple[subprocess.Popen[bytes], Path]:
    """A sampler of one GPU that plays the profile."""
    profile, recording = tmp_path / "profile.txt", tmp_path / "telemetry-node0.bin"
    profile.write_text(PROFILE + "temperature 40\n")
    command = command_line(settings(recording=str(recording), hz=50.0, **changes))
    return subprocess.Popen(command, env=environment(profile, library())), recording


@pytest.mark.slow
def test_it_samples_until_it_is_told_to_end(tmp_path: Path, ending: list[subprocess.Popen[bytes]]) -> None:
    spare = [max(os.sched_getaffinity(0))]
    process, recording = started(tmp_path, spare_cores=spare)
    ending.append(process)
    wait_for_rows(recording, process, 5)
    assert psutil.Process(process.pid).cpu_affinity() == spare, "the cores that are spare"
    process.terminate()  # as Slurm does, and its run goes on
    wait_for_rows(recording, process, 5 + len(samples_of(recording, None)))
    before = len(samples_of(recording, None))
    process.send_signal(END)
    assert process.wait(60) == 0
    gpu, host = samples_of(recording, "GPU-a"), samples_of(recording, None)
    assert len(gpu) == len(host) > before, "the last sample is taken when it ends"
    assert [row["energy_j"] for row in gpu[:5]] == [1.0, 1.25, 1.75, 2.0, 2.3]
    assert all(row["time"] > 0 and row["memory_used_bytes"] > 0 for row in host)


def test_a_sampler_that_was_stopped_along_with_its_run_knows_for_how_long(
    tmp_path: Path, ending: list[subprocess.Popen[bytes]]
) -> None:
    """As when a scheduler suspends a job: nobody is left to look on."""
    process, recording = started(tmp_path)
    ending.append(process)
    wait_for_rows(recording, process, 5)
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    stopped_at = time.monotonic()
    while (stopped_s := time.monotonic() - stopped_at) < 1.0:
        time.sleep(0.1)
    process.send_signal(signal.SIGCONT)
    while not (found := [event for event in Recordings([recording]).events() if event["event"] == "suspended"]):
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
    assert max(event["ended_at"] - event["started_at"] for event in found) > stopped_s / 2
    assert {(event["attempt"], event["node"]) for event in found} == {(1, "here")}
    wait_for_rows(recording, process, len(samples_of(recording, None)) + 2)  # it goes on


def test_what_it_took_until_it_was_killed_counts(tmp_path: Path, ending: list[subprocess.Popen[bytes]]) -> None:
    process, recording = started(tmp_path)
    ending.append(process)
    wait_for_rows(recording, process, 5)
    process.kill()
    process.wait(60)
    assert [row["energy_j"] for row in samples_of(recording, "GPU-a")[:5]] == [1.0, 1.25, 1.75, 2.0, 2.3]


def test_a_recording_cut_off_at_any_byte_keeps_exactly_the_samples_before(tmp_path: Path) -> None:
    path, keys = tmp_path / "telemetry-node0.bin", {"run_id": "r", "attempt": 1, "node": "n", "device_uuid": "GPU-a"}
    rows = rows_of(recorded(path, [keys | {"time": float(t), "energy_j": 0.1 * t, "processes": 0} for t in range(4)]))
    content, size = path.read_bytes(), RECORD.itemsize
    assert [row["time"] for row in rows] == [0.0, 1.0, 2.0, 3.0]
    assert len(content) == 4 * size
    for cut in range(2 * size, 4 * size):
        path.write_bytes(content[:cut])
        assert rows_of(Recordings([path])) == rows[: cut // size]
        assert not list(Recordings([path]).events()), "a torn record is no damage"


def test_without_spare_cores_it_has_the_lowest_priority(tmp_path: Path, ending: list[subprocess.Popen[bytes]]) -> None:
    process, _ = started(tmp_path, spare_cores=[])
    ending.append(process)
    while psutil.Process(process.pid).nice() < 19:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)


@pytest.mark.slow
def test_it_dies_with_the_rank(tmp_path: Path) -> None:
    recording = tmp_path / "telemetry.bin"
    rank = (
        "import os, subprocess, sys\n"
        "from parallelbench.telemetry.sampler import END, command_line\n"
        "from tests.telemetry.playback import settings\n"
        "p = subprocess.Popen(command_line(settings(recording=sys.argv[1], gpus=0, parent=os.getpid())))\n"
        "print(p.pid, flush=True)\n"
        "p.wait()\n"
    )
    with subprocess.Popen([sys.executable, "-c", rank, str(recording)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        sampler = psutil.Process(int(process.stdout.readline()))
        wait_for_rows(recording, process, 1)
        process.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs([sampler], timeout=60)
    assert not alive


def test_one_that_came_too_late_ends_at_once(tmp_path: Path) -> None:
    command = command_line(settings(recording=str(tmp_path / "telemetry.bin"), gpus=0, parent=1 << 22))
    assert subprocess.run(command).returncode == 1
    assert not list(tmp_path.iterdir())


def samplers() -> list[psutil.Process]:
    """Samplers that this process started: it has other children too, such as multiprocessing's tracker."""
    return [child for child in psutil.Process().children() if "parallelbench.telemetry" in child.cmdline()]


def test_a_run_goes_on_without_its_sampler_and_says_so(tmp_path: Path) -> None:
    log = Journal(tmp_path / "journal-rank0.jsonl")
    mine = settings(recording=str(tmp_path / "no" / "folder" / "telemetry.bin"), gpus=0)
    with sampling(mine, log):
        (sampler,) = samplers()
        psutil.wait_procs([sampler], timeout=60)
    (event,) = read_entries(tmp_path / "journal-rank0.jsonl")
    assert event["reason"] == "the sampler ended early (exit code 0)"


def test_an_error_of_the_run_does_not_wait_for_the_sampler(tmp_path: Path) -> None:
    log = Journal(tmp_path / "journal-rank0.jsonl")
    with pytest.raises(ZeroDivisionError), sampling(settings(recording=str(tmp_path / "telemetry.bin"), gpus=0), log):
        raise ZeroDivisionError
    assert not read_entries(tmp_path / "journal-rank0.jsonl")
    _, alive = psutil.wait_procs(samplers(), timeout=60)
    assert not alive


def sampled(
    attempt: Any,
    *,
    of: str,
    node: str = "here",
    uuid: str = "GPU-a",
    power_w: float,
    suspended: Sequence[tuple[float, float]] = (),
) -> None:
    """Ten samples in nine seconds, in the attempt's recording."""
    recorder = Recorder(attempt.path / f"telemetry-node{node}.bin")
    keys = {"run_id": of, "attempt": attempt.number, "node": node}
    for second in range(10):
        gpu = {"device_uuid": uuid, "energy_j": second * power_w, "power_w": power_w}
        host = {
            "device_uuid": None,
            "energy_j": second * 7.0,
            "clock_hz": 1e9 + second * 1e8,
            "memory_used_bytes": second,
        }
        host |= {"network_sent_bytes": second * 1000, "network_received_bytes": second * 10}
        recorder.record([keys | {"time": 100.0 + second} | row for row in (gpu, host)])
    recorder.event("telemetry_warning", reason="no clock_hz (Not Supported)", device=uuid)
    recorder.event("suspended", **keys, started_at=100.5, ended_at=101.25)
    for start, end in suspended:
        recorder.event("suspended", **keys, started_at=start, ended_at=end)
    recorder.close()


@pytest.fixture
def two_nodes(tmp_path: Path) -> tuple[RunFolder, Any, Any]:
    """A run of two ranks on two nodes, whose journals hold an epoch from 101 s to 104.5 s and 105 s."""
    run = config(tmp_path, strategy="ddp", devices=2, epochs=1)
    folder, attempt = begin(run, Fake())
    write_epochs(run, attempt, Fake(), epochs=1)
    for rank, (node, uuid, power_w, end) in enumerate([("n0", "GPU-a", 100.0, 105.0), ("n1", "GPU-b", 300.0, 104.5)]):
        path = attempt.path / f"journal-rank{rank}.jsonl"
        entries = read_entries(path)
        for entry in entries:
            if entry.get("table") == "ranks":
                entry["row"] |= {"training_started_at": 101.0, "training_ended_at": end}
                entry["row"] |= {"node": node, "device_uuid": uuid}
        path.unlink()
        Journal(path).take_over(entries)
        stopped = [(103.0, 104.0), (102.0, 103.5)] if rank == 1 else []
        sampled(attempt, of=run_id(run), node=node, uuid=uuid, power_w=power_w, suspended=stopped)
    return folder, run, attempt


def test_known_energies_come_through_to_the_tables_and_frames(two_nodes: tuple[RunFolder, Any, Any]) -> None:
    folder, run, attempt = two_nodes
    (before,) = load(folder.path).epochs.to_dicts()
    publish(folder, run, attempt, attempt.finish("ok", "trained"), read_tables(attempt.path))
    runs = load(folder.path)
    assert not runs.skipped
    (epoch,) = runs.epochs.to_dicts()
    assert epoch["gpu_energy_j"] == pytest.approx(4 * (100 + 300))
    assert epoch["gpu_power_mean_w"] == pytest.approx(400)
    assert epoch["gpu_power_max_w"] == 300
    assert epoch["cpu_energy_j"] == pytest.approx(4 * 7 * 2)
    assert epoch["cpu_clock_mean_hz"] == pytest.approx(1.3e9)
    assert epoch["host_memory_used_max_bytes"] == 5
    assert (epoch["network_sent_bytes"], epoch["network_received_bytes"]) == (2 * 4 * 1000, 2 * 4 * 10)
    assert epoch["suspended_s"] == pytest.approx(2.25), "of one node, what overlaps once, and only in the window"
    assert epoch["gpu_utilization_mean"] is None
    assert epoch["telemetry_flags"] is None
    assert before == epoch, "what is read of the journals is what is published"
    assert runs.telemetry.height == 2 * 2 * 10
    assert runs.telemetry["time"].to_list()[:2] == [100.0, 100.0]
    (warnings,) = runs.run["warnings"]
    assert warnings == "telemetry is incomplete: no clock_hz (Not Supported) (GPU-a, GPU-b)"


def with_telemetry(attempt: Any) -> tuple[dict[str, list[dict[str, Any]]], list[dict[str, Any]]]:
    tables, events = read_tables(attempt.path)
    add_telemetry(tables, events, read_telemetry(attempt.path, tables["ranks"]))
    return tables, events


def test_epochs_of_an_earlier_attempt_keep_their_energy(two_nodes: tuple[RunFolder, Any, Any]) -> None:
    folder, _, attempt = two_nodes
    attempt.finish("killed", "by a test")
    later = folder.claim(after=1)
    assert later is not None
    later.describe(processes=2, device_type="cuda", oversubscribed=False)
    for rank in range(2):
        Journal(later.path / f"journal-rank{rank}.jsonl").take_over(
            read_entries(attempt.path / f"journal-rank{rank}.jsonl")
        )
    tables, _ = with_telemetry(later)
    assert [row["gpu_energy_j"] for row in tables["epochs"]] == [pytest.approx(1600)]


def test_a_lost_node_makes_its_epochs_energy_null(two_nodes: tuple[RunFolder, Any, Any]) -> None:
    _, _, attempt = two_nodes
    (attempt.path / "telemetry-noden1.bin").unlink()
    tables, _ = with_telemetry(attempt)
    (epoch,) = tables["epochs"]
    assert (epoch["gpu_energy_j"], epoch["cpu_energy_j"], epoch["gpu_power_max_w"]) == (None, None, None)
    assert epoch["suspended_s"] is None, "nobody watched it"


def test_whatever_a_damaged_recording_holds_is_left_out(two_nodes: tuple[RunFolder, Any, Any]) -> None:
    _, _, attempt = two_nodes
    paths = [attempt.path / f"telemetry-node{node}.bin" for node in ("n0", "n1")]
    size = RECORD.itemsize
    record = paths[0].read_bytes()[:size]
    half_empty = record[: size // 2] + bytes(size)
    for path, foreign in zip(paths, (b'{"table":"telemetry"}' * 40, half_empty), strict=True):
        path.write_bytes(path.read_bytes() + foreign[:size] + record)
    tables, events = with_telemetry(attempt)
    assert [row["gpu_energy_j"] for row in tables["epochs"]] == [pytest.approx(1600)]
    assert len(rows_of(read_telemetry(attempt.path, tables["ranks"]))) == 40
    damaged = [event for event in events if "damaged" in event.get("reason", "")]
    assert [(event["device"], event["reason"]) for event in damaged] == [
        ("telemetry-noden0.bin", "its recording is damaged from record 21 on"),
        ("telemetry-noden1.bin", "its recording is damaged from record 21 on"),
    ]


@pytest.mark.exhaustive
def test_a_real_run_without_a_gpu(tmp_path: Path) -> None:
    """Null where there is nothing to measure, and no warning: a machine without a GPU lacks nothing."""
    from tests.helpers import TINY

    program = [sys.executable, "-m", "parallelbench.cli", "run", *TINY, f"results={tmp_path}"]
    options = ["strategy=ddp", "devices=2", "launcher.oversubscribe=true", "epochs=2"]
    assert subprocess.run([*program, *options], stdout=subprocess.DEVNULL).returncode == 0
    runs = load(tmp_path)
    assert (runs.ranks["cpu_time_s"] > 0).all()
    assert (runs.ranks["training_ended_at"] > runs.ranks["training_started_at"]).all()
    assert set(runs.epochs.select(pl.col("^gpu_.*$")).unpivot()["value"]) == {None}
    assert runs.telemetry.height > 0
    assert runs.telemetry["device_uuid"].is_null().all()
    assert (runs.telemetry["memory_used_bytes"] > 0).all()
    assert "telemetry" not in (runs.run["warnings"][0] or "")
