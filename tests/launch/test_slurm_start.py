"""How a Slurm job starts, and where its nodes meet, without a Slurm."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from launch.attempt.processes import Rendezvous, environment
from launch.slurm import errands, rendezvous, scheduler, start
from launch.slurm.errands import gpu_check_job, main
from launch.slurm.sbatch import FIND_MODULE, STOP_AT_FAILURE, Job, shape_of
from parallelbench.errors import ConfigError
from tests.helpers import configured
from tests.launch.fake_slurm import FakeSlurm, of_sbatch


def test_a_folder_that_is_looked_at_stays_the_one_that_is_read(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir(mode=0o700)
    (mine / "call").write_text("mine")
    held = start.held(mine)
    mine.rename(tmp_path / "aside")
    mine.mkdir()
    (mine / "call").write_text("another's")
    assert (held / "call").read_text() == "mine"
    mine.chmod(0o777)
    with pytest.raises(ConfigError, match=f"{mine} may be written by others"):
        start.held(mine)


def test_what_is_not_the_users_own_is_not_started(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs").chmod(0o770)
    for name, word in (("theirs", "may be written by others"), ("nowhere", "No such file")):
        assert start.main([str(tmp_path / name)]) == 1
        printed = capsys.readouterr().err
        assert word in printed
        assert printed.count("\n") == 1


@pytest.mark.parametrize("route", ["10.1.2.3", "127.0.0.1", None])
def test_nodes_do_not_meet_where_only_one_of_them_can_be_reached(
    route: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian gives a host's own name an address that no other host can reach."""
    real = socket.socket

    class Routed(real):  # type: ignore[misc, valid-type]
        def connect(self, address: Any) -> None:
            if route is None:
                raise OSError("Network is unreachable")

        def getsockname(self) -> Any:
            return (route, 1) if self.type == socket.SOCK_DGRAM else super().getsockname()

        def bind(self, address: Any) -> None:
            super().bind(("127.0.0.1", address[1]))

    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    monkeypatch.setattr(socket, "socket", Routed)
    if route == "10.1.2.3":
        assert rendezvous.address_of(None, nodes=2) == route
    else:
        with pytest.raises(OSError, match=r"other nodes can't reach: set site\.network_interface"):
            rendezvous.choose("1.0", nodes=2, interface=None)
    assert rendezvous.choose("1.0", nodes=1, interface=None).host == "127.0.1.1"
    assert rendezvous.address_of("lo", nodes=2) == "127.0.0.1"


@pytest.mark.parametrize(
    ("named", "nodes", "site", "told"),
    [
        ("127.0.1.1", 2, None, "ib0"),
        ("10.1.2.3", 2, None, None),
        ("", 2, None, "ib0"),
        ("127.0.1.1", 2, "eth7", "eth7"),
        ("127.0.1.1", 1, None, None),
    ],
)
def test_gloo_is_told_an_interface_where_the_hosts_name_means_loopback(
    named: str, nodes: int, site: str | None, told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It binds to the address of the name by itself, and gives that to the other nodes."""

    def resolved(name: str) -> str:
        if name == "node7":  # as Slurm calls it; gloo asks for the host's own name
            return "10.9.9.9"
        if not named:
            raise socket.gaierror(f"{name}: Name or service not known")
        return named

    monkeypatch.setenv("SLURMD_NODENAME", "node7")

    interfaces = {"lo": [SimpleNamespace(address="127.0.0.1")], "ib0": [SimpleNamespace(address="10.1.2.3")]}
    monkeypatch.setattr(socket, "gethostbyname", resolved)
    monkeypatch.setattr(rendezvous, "_address_of_route", lambda: "10.1.2.3")
    monkeypatch.setattr(rendezvous.psutil, "net_if_addrs", lambda: interfaces)
    meeting = Rendezvous(1, nodes, "h", 1, "1.0", "s", rendezvous.interface_of(site, nodes=nodes))
    run = configured("strategy=ddp", "devices=2", "nodes=2", *([f"site.network_interface={site}"] if site else []))
    found = environment(run, "cpu", {}, rendezvous=meeting)
    assert (found.get("GLOO_SOCKET_IFNAME"), found.get("NCCL_SOCKET_IFNAME")) == (told, site)


def test_a_host_whose_name_has_no_address_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> str:
        raise socket.gaierror(f"{name}: Name or service not known")

    monkeypatch.setattr(socket, "gethostbyname", unknown)
    with pytest.raises(OSError, match=r"this host's name \(.+\) has no address: set site\.network_interface"):
        rendezvous.choose("1.0", nodes=2, interface=None)


def test_a_node_of_a_step_knows_what_the_first_one_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    meeting = rendezvous.choose("7.1", nodes=2, interface="lo")
    for name, value in {**rendezvous.to_environment(meeting), "SLURM_NODEID": "1", "SLURM_NTASKS": "2"}.items():
        monkeypatch.setenv(name, value)
    assert rendezvous.from_environment("lo") == replace(meeting, node=1)
    assert "PARALLELBENCH_MEETING" not in os.environ, "what ranks start does not inherit the secret"


def test_a_job_that_is_no_runs_starts_like_any_job(tmp_path: Path) -> None:
    run = configured("launcher=slurm", "site=local_cluster", "nodes=2", "devices=2")
    site = msgspec.structs.replace(run.site, modules=["cuda/12.4"], setup=["source it"])
    job = errands.errand(msgspec.structs.replace(run, site=site), shape_of(run, "cpu"), tmp_path, "x", minutes=1)
    own = [*FIND_MODULE, *STOP_AT_FAILURE, "module load cuda/12.4", "source it", "trap - ERR"]
    assert "\n".join(["umask 077", "export PYTHONSAFEPATH=1", *own]) in job.script()


# --- the job of `make gpu-check LAUNCHER=slurm`

SITE = ("launcher=slurm", "site.gpus_per_node=4", "site.gpu_type=a100", "site.network_interface=ib0", "site.qos=public")


def test_the_job_has_all_gpus_of_its_nodes() -> None:
    run = configured(*SITE, "nodes=2", "devices=2", "launcher.cpus_per_gpu=3", "launcher.memory_gib_per_device=2.0")
    script = gpu_check_job(run, Path("/shared/folder"), ["--fresh"]).script()
    wanted = {"--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=a100:4", "--cpus-per-task=12", "--mem=8192M"}
    assert {*wanted, "--qos=public", "--time=60"} <= set(of_sbatch(script))
    last = script.strip().splitlines()[-1]
    assert last.endswith("-m parallelbench.entry launch.slurm.errands gpu-check-on-node /shared/folder ib0 --fresh")
    assert " launch.slurm.errands head ib0 2 srun --nodes=2 " in last


def test_a_site_without_gpus_is_refused_unless_it_rehearses() -> None:
    run = configured("launcher=slurm", "site.gpus_per_node=0")
    with pytest.raises(ConfigError, match=r"site\.gpus_per_node=0: set it to the GPUs of a node"):
        gpu_check_job(run, Path("folder"), [])
    assert "--gpus" not in gpu_check_job(run, Path("folder"), ["--rehearse"]).script()


def test_a_site_of_ones_own_is_found(
    tmp_path: Path, fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (conf := tmp_path / "conf" / "site").mkdir(parents=True)
    (conf / "mine.yaml").write_text("defaults: [default, _self_]\nname: mine\npartition: fast\n")
    asked: list[list[str]] = []
    monkeypatch.setattr(scheduler, "available", lambda: True)

    def script(job: Job, **_: object) -> str:
        words = list(job.program)
        asked.append([job.site.partition or "", *words[words.index("gpu-check-on-node") + 3 :]])
        return ""

    monkeypatch.setattr(Job, "script", script)
    monkeypatch.setattr(scheduler, "run_to_its_end", lambda *_, **__: 0)
    arguments = ["gpu-check", "--conf", str(conf.parent), "site=mine", f"results={tmp_path / 'results'}"]
    assert main([*arguments, "--rehearse", "--only=strategy *"]) == 0
    assert asked[-1] == ["fast", "--rehearse", "--only=strategy *"]
    assert main([*arguments, "site.gpus_per_node=-1"]) == 2
    assert "gpu-check: site.gpus_per_node=-1" in capsys.readouterr().err
