"""The sampler's process: its journal, its end, and what a run's tables hold of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import psutil
import pytest

from analysis import load
from parallelbench.config.identity import run_id
from parallelbench.results.folder import RunFolder
from parallelbench.results.journal import Journal, read_entries, read_tables, read_telemetry
from parallelbench.results.publish import publish
from parallelbench.telemetry.sampler import command_line, sampling
from tests.analysis.factory import Fake, begin, config, write_epochs
from tests.telemetry.playback import environment, library, settings

PROFILE = "device GPU-a\nenergy 1000 1250 1750 2000 2300\ninstant 5000\nutilization 50\nmemory 7\nclock 1\nthrottle 0\n"


@pytest.fixture
def ending() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that don't outlive the test."""
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


def rows_of(journal: Path, device: str | None) -> list[dict[str, Any]]:
    rows = [entry["row"] for entry in read_entries(journal) if entry.get("table") == "telemetry"]
    return [row for row in rows if row["device_uuid"] == device]


def wait_for_rows(journal: Path, process: subprocess.Popen[Any], count: int) -> None:
    """Wait until so many samples are in the journal."""
    while len(rows_of(journal, None)) < count:
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)


def started(tmp_path: Path, **changes: Any) -> tuple[subprocess.Popen[bytes], Path]:
    """A sampler of one GPU that plays the profile."""
    profile, journal = tmp_path / "profile.txt", tmp_path / "journal-telemetry-node0.jsonl"
    profile.write_text(PROFILE + "temperature 40\n")
    command = command_line(settings(journal=str(journal), hz=50.0, **changes))
    return subprocess.Popen(command, env=environment(profile, library())), journal


def test_it_samples_until_it_is_told_to_end(tmp_path: Path, ending: list[subprocess.Popen[bytes]]) -> None:
    process, journal = started(tmp_path)
    ending.append(process)
    wait_for_rows(journal, process, 5)
    before = len(rows_of(journal, None))
    process.terminate()
    assert process.wait(60) == 0
    gpu, host = rows_of(journal, "GPU-a"), rows_of(journal, None)
    assert len(gpu) == len(host) > before, "the last sample is taken when it ends"
    assert [row["energy_j"] for row in gpu[:5]] == [1.0, 1.25, 1.75, 2.0, 2.3]
    assert all(row["time"] > 0 and row["memory_used_bytes"] > 0 for row in host)


def test_it_keeps_to_the_cores_that_are_spare(tmp_path: Path, ending: list[subprocess.Popen[bytes]]) -> None:
    spare = [max(os.sched_getaffinity(0))]
    process, journal = started(tmp_path, spare_cores=spare)
    ending.append(process)
    wait_for_rows(journal, process, 1)
    assert psutil.Process(process.pid).cpu_affinity() == spare


def test_without_spare_cores_it_has_the_lowest_priority(tmp_path: Path, ending: list[subprocess.Popen[bytes]]) -> None:
    process, _ = started(tmp_path, spare_cores=[])
    ending.append(process)
    while psutil.Process(process.pid).nice() < 19:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)


def test_it_dies_with_the_rank(tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    rank = (
        "import os, subprocess, sys\n"
        "from parallelbench.telemetry.sampler import command_line\n"
        "from tests.telemetry.playback import settings\n"
        "p = subprocess.Popen(command_line(settings(journal=sys.argv[1], gpus=0, parent=os.getpid())))\n"
        "print(p.pid, flush=True)\n"
        "p.wait()\n"
    )
    with subprocess.Popen([sys.executable, "-c", rank, str(journal)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        sampler = psutil.Process(int(process.stdout.readline()))
        wait_for_rows(journal, process, 1)
        process.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs([sampler], timeout=60)
    assert not alive


def test_one_that_came_too_late_ends_at_once(tmp_path: Path) -> None:
    command = command_line(settings(journal=str(tmp_path / "journal"), gpus=0, parent=1 << 22))
    assert subprocess.run(command).returncode == 1
    assert not (tmp_path / "journal").exists()


class Events:
    """Keeps events."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def write(self, table: str, rows: Any) -> None:
        raise AssertionError

    def event(self, name: str, **details: Any) -> None:
        self.events.append({"event": name, **details})


def samplers() -> list[psutil.Process]:
    """Samplers that this process started: it has other children too, such as multiprocessing's tracker."""
    return [child for child in psutil.Process().children() if "parallelbench.telemetry" in child.cmdline()]


def test_a_run_goes_on_without_its_sampler_and_says_so(tmp_path: Path) -> None:
    log = Events()
    mine = settings(journal=str(tmp_path / "no" / "folder" / "journal"), gpus=0)
    with sampling(mine, log):
        (sampler,) = samplers()
        psutil.wait_procs([sampler], timeout=60)
    assert [event["reason"] for event in log.events] == ["the sampler ended early (exit code 0)"]


def test_an_error_of_the_run_does_not_wait_for_the_sampler(tmp_path: Path) -> None:
    log = Events()
    with pytest.raises(ZeroDivisionError), sampling(settings(journal=str(tmp_path / "journal"), gpus=0), log):
        raise ZeroDivisionError
    assert not log.events
    _, alive = psutil.wait_procs(samplers(), timeout=60)
    assert not alive


def sampled(attempt: Any, *, of: str, node: str = "here", uuid: str = "GPU-a", power_w: float) -> None:
    """Ten samples in nine seconds, in the attempt's journal."""
    journal = Journal(attempt.path / f"journal-telemetry-node{node}.jsonl")
    names = {"energy_j", "power_w", "utilization", "memory_used_bytes", "clock_hz", "temperature_c"}
    blank = dict.fromkeys(names | {"throttle_reasons", "processes", "network_sent_bytes", "network_received_bytes"})
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
        journal.write("telemetry", [keys | blank | {"time": 100.0 + second} | row for row in (gpu, host)])
    journal.event("telemetry_warning", reason="no clock_hz (Not Supported)", device=uuid)
    journal.close()


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
        sampled(attempt, of=run_id(run), node=node, uuid=uuid, power_w=power_w)
    return folder, run, attempt


def test_known_energies_come_through_to_the_tables_and_frames(two_nodes: tuple[RunFolder, Any, Any]) -> None:
    folder, run, attempt = two_nodes
    (before,) = load(folder.path).epochs.to_dicts()
    publish(folder, run, attempt, attempt.finish("ok", "trained"))
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
    assert epoch["gpu_utilization_mean"] is None
    assert epoch["telemetry_flags"] is None
    assert before == epoch, "what is read of the journals is what is published"
    assert runs.telemetry.height == 2 * 2 * 10
    assert runs.telemetry["time"].to_list()[:2] == [100.0, 100.0]
    (warnings,) = runs.run["warnings"]
    assert warnings == "telemetry is incomplete: no clock_hz (Not Supported) (GPU-a, GPU-b)"


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
    tables, _ = read_tables(later.path)
    assert [row["gpu_energy_j"] for row in tables["epochs"]] == [pytest.approx(1600)]


def test_a_lost_node_makes_its_epochs_energy_null(two_nodes: tuple[RunFolder, Any, Any]) -> None:
    _, _, attempt = two_nodes
    (attempt.path / "journal-telemetry-noden1.jsonl").unlink()
    tables, _ = read_tables(attempt.path)
    (epoch,) = tables["epochs"]
    assert (epoch["gpu_energy_j"], epoch["cpu_energy_j"], epoch["gpu_power_max_w"]) == (None, None, None)


def test_whatever_a_damaged_journal_holds_is_left_out(two_nodes: tuple[RunFolder, Any, Any]) -> None:
    _, _, attempt = two_nodes
    with (attempt.path / "journal-telemetry-noden0.jsonl").open("ab") as file:
        file.write(b'{"table":"telemetry","row":{"attempt":1,"node":"n0","time":"noon"}}\n{"event":"x"}\n')
    with (attempt.path / "journal-telemetry-noden1.jsonl").open("ab") as file:
        file.write(b'{"table":"epochs","row":{"epoch":2,"attempt":1}}\n{"table":"telemetry","ro')
    tables, events = read_tables(attempt.path)
    assert [row["gpu_energy_j"] for row in tables["epochs"]] == [pytest.approx(1600)]
    assert len(list(read_telemetry(attempt.path).rows())) == 40
    damaged = [event for event in events if "damaged" in event.get("reason", "")]
    assert [(event["device"], event["reason"]) for event in damaged] == [
        ("journal-telemetry-noden0.jsonl", "its journal is damaged from line 22 on"),
        ("journal-telemetry-noden1.jsonl", "its journal is damaged from line 22 on"),
    ]


@pytest.mark.always
@pytest.mark.slow
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
