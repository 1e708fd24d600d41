"""The job of `make gpu-check LAUNCHER=slurm`, as it is asked for; tests/slurm starts one."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.slurm import gpu_check, scheduler
from launch.slurm.gpu_check import command, main
from parallelbench.errors import ConfigError
from tests.helpers import configured

SITE = ("launcher=slurm", "site.gpus_per_node=4", "site.gpu_type=a100", "site.network_interface=ib0", "site.qos=public")


def test_the_job_has_all_gpus_of_its_nodes() -> None:
    run = configured(*SITE, "nodes=2", "devices=2", "launcher.cpus_per_gpu=3", "launcher.memory_gib_per_device=2.0")
    *words, shell, _, script = command(run, Path("/shared/folder"), ["--fresh"])
    assert shell == "bash"
    assert words[0] == "srun"
    wanted = {"--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=a100:4", "--cpus-per-task=12", "--mem=8192M"}
    assert {*wanted, "--qos=public", "--time=60"} <= set(words)
    assert script.endswith("-m parallelbench.entry launch.slurm.gpu_check on-node /shared/folder ib0 --fresh")


def test_a_site_without_gpus_is_refused_unless_it_rehearses() -> None:
    run = configured("launcher=slurm", "site.gpus_per_node=0")
    with pytest.raises(ConfigError, match=r"site\.gpus_per_node=0: set it to the GPUs of a node"):
        command(run, Path("folder"), [])
    assert not [word for word in command(run, Path("folder"), ["--rehearse"]) if word.startswith("--gpus")]


def test_a_site_of_ones_own_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (conf := tmp_path / "conf" / "site").mkdir(parents=True)
    (conf / "mine.yaml").write_text("defaults: [default, _self_]\nname: mine\npartition: fast\n")
    asked: list[list[str]] = []
    monkeypatch.setattr(scheduler, "available", lambda: True)
    monkeypatch.setattr(
        gpu_check, "command", lambda run, _, options: asked.append([run.site.partition, *options]) or ["true"]
    )
    arguments = ["--conf", str(conf.parent), "site=mine", f"results={tmp_path / 'results'}"]
    assert main([*arguments, "--rehearse", "--only=strategy *"]) == 0
    assert asked == [["fast", "--rehearse", "--only=strategy *"]]
    assert main([*arguments, "site.gpus_per_node=-1"]) == 2
    assert "gpu-check: site.gpus_per_node=-1" in capsys.readouterr().err


def test_without_slurm_it_says_where_to_go(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(scheduler, "available", lambda: False)
    assert main(["site=default"]) == 2
    assert "there is no Slurm here: run this on the login node" in capsys.readouterr().err
