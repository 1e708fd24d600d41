"""The job of `make gpu-check LAUNCHER=slurm`, as it is asked for; tests/slurm starts one."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.slurm import scheduler
from launch.slurm.errands import gpu_check_job, main
from launch.slurm.jobs import Job
from parallelbench.errors import ConfigError
from tests.helpers import configured
from tests.launch.fake_slurm import FakeSlurm

SITE = ("launcher=slurm", "site.gpus_per_node=4", "site.gpu_type=a100", "site.network_interface=ib0", "site.qos=public")


def test_the_job_has_all_gpus_of_its_nodes() -> None:
    run = configured(*SITE, "nodes=2", "devices=2", "launcher.cpus_per_gpu=3", "launcher.memory_gib_per_device=2.0")
    *words, shell, _, script = gpu_check_job(run, Path("/shared/folder"), ["--fresh"]).srun()
    assert shell == "bash"
    assert words[0] == "srun"
    wanted = {"--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=a100:4", "--cpus-per-task=12", "--mem=8192M"}
    assert {*wanted, "--qos=public", "--time=60"} <= set(words)
    assert script.endswith("-m parallelbench.entry launch.slurm.errands gpu-check-on-node /shared/folder ib0 --fresh")


def test_a_site_without_gpus_is_refused_unless_it_rehearses() -> None:
    run = configured("launcher=slurm", "site.gpus_per_node=0")
    with pytest.raises(ConfigError, match=r"site\.gpus_per_node=0: set it to the GPUs of a node"):
        gpu_check_job(run, Path("folder"), [])
    assert not [word for word in gpu_check_job(run, Path("folder"), ["--rehearse"]).srun() if word.startswith("--gpus")]


def test_a_site_of_ones_own_is_found(
    tmp_path: Path, fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (conf := tmp_path / "conf" / "site").mkdir(parents=True)
    (conf / "mine.yaml").write_text("defaults: [default, _self_]\nname: mine\npartition: fast\n")
    asked: list[list[str]] = []
    monkeypatch.setattr(scheduler, "available", lambda: True)

    def srun(job: Job) -> list[str]:
        asked.append([job.site.partition or "", *job.program[4:]])
        return ["true"]

    monkeypatch.setattr(Job, "srun", srun)
    arguments = ["gpu-check", "--conf", str(conf.parent), "site=mine", f"results={tmp_path / 'results'}"]
    assert main([*arguments, "--rehearse", "--only=strategy *"]) == 0
    assert asked == [["fast", "--rehearse", "--only=strategy *"]]
    assert main([*arguments, "site.gpus_per_node=-1"]) == 2
    assert "gpu-check: site.gpus_per_node=-1" in capsys.readouterr().err
