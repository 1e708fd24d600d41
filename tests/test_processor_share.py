"""What others take of a rank's cores: by a kernel's made-up accounts, and by a program that really keeps one busy."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from parallelbench.measure import processor
from parallelbench.measure.processor import ProcessorShare
from parallelbench.world.machine import cpu_quota_cores, memory_limit_bytes
from tests.helpers import Clock

TICK = os.sysconf("SC_CLK_TCK")
NAMES = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")


class Machine:
    """A /proc of cores 2 and 3, and a clock."""

    def __init__(self, proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.proc, self.clock = proc, Clock()
        self.ticks = {core: dict.fromkeys(NAMES, 10_000) for core in (2, 3)}
        self.delay_ns = 7
        (proc / "thread-self").mkdir()
        monkeypatch.setattr(processor, "time", self.clock)
        self.passes(0.0, 0.0)

    def passes(self, seconds: float, own_s: float, **spent_s: float) -> None:
        """Time passes; `spent_s`: what both cores did in it."""
        self.clock.now_s += seconds
        self.clock.cpu_s += own_s
        for counts in self.ticks.values():
            for name, value in spent_s.items():
                counts[name] += round(value * TICK)
        lines = [f"cpu{core} {' '.join(map(str, counts.values()))} 0 0" for core, counts in self.ticks.items()]
        (self.proc / "stat").write_text("cpu 1 2 3\n" + "\n".join(lines) + "\nintr 9\n")
        (self.proc / "thread-self/schedstat").write_text(f"5 {self.delay_ns} 3\n")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


@pytest.mark.parametrize(("apart", "others_s"), [(False, 2.0), (True, 1.5)])
def test_what_the_kernel_counts_is_others_less_the_ranks_own(machine: Machine, *, apart: bool, others_s: float) -> None:
    share = ProcessorShare({2, 3}, proc=machine.proc, interrupts_apart=apart)
    share.start()
    machine.delay_ns += 250_000_000
    machine.passes(10.0, 12.0, user=6.0, system=0.5, idle=2.0, iowait=0.5, softirq=0.25, steal=0.75)
    taken = share.stop(children_s=1.0)
    # Of 20 s on two cores, 5 s were idle, the rank used 12 s and its loader's workers 1 s: 2 s are others', less the
    # interrupts where no process's time has them.
    assert taken["others_time_s"] == pytest.approx(others_s)
    assert taken["stolen_time_s"] == pytest.approx(1.5)
    assert taken["run_delay_s"] == pytest.approx(0.25)


def test_the_kernels_configuration_says_whose_interrupts_are(tmp_path: Path) -> None:
    folders = (str(tmp_path), str(tmp_path))
    asked = processor.interrupts_are_apart.__wrapped__
    assert asked(folders), "nothing known: nobody is accused"
    (tmp_path / f"config-{os.uname().release}").write_text("# CONFIG_IRQ_TIME_ACCOUNTING is not set\n")
    assert not asked(folders)
    with gzip.open(tmp_path / "config.gz", "wt") as file:
        file.write("CONFIG_HZ=250\nCONFIG_IRQ_TIME_ACCOUNTING=y\n")
    assert asked(folders)


def test_waiting_by_design_is_not_taken_by_others(machine: Machine) -> None:
    share = ProcessorShare({2}, proc=machine.proc)
    share.start()
    machine.passes(10.0, 1.0, user=1.0, idle=9.0)
    assert share.stop()["others_time_s"] == pytest.approx(0.0)


def test_a_rank_without_cores_of_its_own_knows_its_delay_only(machine: Machine) -> None:
    share = ProcessorShare((), proc=machine.proc)
    share.start()
    machine.passes(10.0, 1.0, user=10.0)
    unknown = dict.fromkeys(("others_time_s", "stolen_time_s"))
    assert share.stop() == unknown | {"run_delay_s": 0.0}


def test_what_ticks_hide_of_short_epochs_adds_up(machine: Machine) -> None:
    """Others take 5 ms of each 15 ms, the rank 7 ms; of the 3 ms that are idle the kernel counts 10 ms now and then."""
    share, found = ProcessorShare({2}, proc=machine.proc), []
    for epoch in range(1, 101):
        share.start()
        machine.passes(0.015, 0.007, idle=0.01 if epoch * 3 % 10 < 3 else 0.0)
        found.append(share.stop())
    assert min(each["others_time_s"] for each in found) == pytest.approx(-0.002)
    assert sum(each["others_time_s"] for each in found) == pytest.approx(0.5)


@pytest.mark.parametrize("spent_s", [{}, {"user": 4.0, "idle": 2.0}])
def test_an_account_that_leaves_time_out_is_not_believed(machine: Machine, spent_s: dict[str, float]) -> None:
    """Some sandboxes show zeros, or cores of another number."""
    share = ProcessorShare({2, 3}, proc=machine.proc)
    share.start()
    machine.passes(10.0, 10.0, **spent_s)
    assert share.stop()["others_time_s"] is None


def test_a_kernel_that_says_nothing_gives_nulls(tmp_path: Path) -> None:
    share = ProcessorShare({0}, proc=tmp_path)
    share.start()
    assert set(share.stop().values()) == {None}


BUSY = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])}); print(flush=True)\nwhile True: pass"


@pytest.mark.exhaustive
def test_a_program_that_keeps_the_core_busy_is_seen() -> None:
    core = min(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    with subprocess.Popen([sys.executable, "-c", BUSY, str(core)], stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        program.stdout.readline()
        other, share = psutil.Process(program.pid), ProcessorShare({core})
        share.start()
        began = other.cpu_times()
        while other.cpu_times().user - began.user < 0.5:
            sum(range(10_000))
        took_s = other.cpu_times().user - began.user
        taken = share.stop()
        program.kill()
    if taken["others_time_s"] is None:
        pytest.skip("the kernel here does not account for cores")
    # Further programs may run here, so it is the least that others took; the kernel counts in steps of 10 ms.
    assert taken["others_time_s"] > took_s - 0.05


def test_the_smallest_quota_of_all_groups_counts(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/jobs/mine\n")
    groups = tmp_path / "sys/fs/cgroup"
    (groups / "jobs/mine").mkdir(parents=True)
    (groups / "jobs/mine/cpu.max").write_text("max 100000\n")
    assert cpu_quota_cores(tmp_path) is None
    (groups / "jobs/cpu.max").write_text("150000 100000\n")
    assert cpu_quota_cores(tmp_path) == 1.5
    (groups / "jobs/mine/memory.max").write_text("max\n")
    assert memory_limit_bytes(tmp_path) is None
    (groups / "jobs/memory.max").write_text("3000000\n")
    assert memory_limit_bytes(tmp_path) == 3_000_000


def test_the_quota_of_older_groups(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/jobs\n3:cpu,cpuacct:/jobs\n")
    group = tmp_path / "sys/fs/cgroup/cpu,cpuacct/jobs"
    group.mkdir(parents=True)
    (group / "cpu.cfs_period_us").write_text("100000\n")
    (group / "cpu.cfs_quota_us").write_text("-1\n")
    assert cpu_quota_cores(tmp_path) is None
    (group / "cpu.cfs_quota_us").write_text("50000\n")
    assert cpu_quota_cores(tmp_path) == 0.5
