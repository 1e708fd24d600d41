"""The batch script as bash reads it, and the commands that are printed, as a shell and a terminal read them."""

from __future__ import annotations

import io
import os
import shlex
import subprocess
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from launch.launcher import Prepared, SubmitOptions
from launch.slurm import launcher, scheduler
from launch.slurm.cluster import Partition, ignored_variables, suits
from launch.slurm.launcher import OnSlurm
from launch.slurm.sbatch import FIRST_LINES, as_words, charged_devices, job_of_runs, shape_of, site_lines, slurm
from launch.slurm.submit import prepare_for_site
from launch.sweep import PlannedRun, one_run
from parallelbench.config.sites import Site
from parallelbench.errors import ConfigError
from parallelbench.results.folder import RunFolder
from tests.launch.fake_slurm import ON_SITE, run_of, submission


def after_set_up(tmp_path: Path, **changes: list[str]) -> subprocess.CompletedProcess[str]:
    """What bash does with the set-up lines of a site, before a program that prints."""
    site: Site = msgspec.structs.replace(run_of().site, **changes)
    module = 'module() { false; [ "$2" = cuda/12.4 ] || { echo "unknown module $2" >&2; return 3; }; }'
    script = tmp_path / "script.sh"
    script.write_text("\n".join(["#!/bin/bash", module, *FIRST_LINES, *site_lines(site), "false", "echo the program"]))
    return subprocess.run(["bash", str(script)], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("changes", "line", "code"),
    [
        ({"modules": ["cuda/12.4", "cuda/99"]}, 10, 3),
        ({"setup": ["cd /nowhere", "true"]}, 7, 1),
        ({"setup": ["source /nowhere/activate"]}, 7, 1),
    ],
)
def test_a_set_up_that_fails_ends_the_job(changes: dict[str, list[str]], line: int, code: int, tmp_path: Path) -> None:
    done = after_set_up(tmp_path, **changes)
    assert done.returncode == code
    assert done.stdout == f"parallelbench: set-up failed with exit code {code} in line {line} of the script\n"


@pytest.mark.parametrize(
    ("variables", "files", "loads"),
    [
        ({"LMOD_PKG": "lmod", "MODULESHOME": "modules"}, ["lmod", "modules", "profile"], "lmod cuda/12.4"),
        ({"MODULESHOME": "modules"}, ["lmod", "modules", "profile"], "modules cuda/12.4"),
        ({"MODULESHOME": "modules"}, ["profile"], "profile cuda/12.4"),  # the node has it in another place
        ({}, ["profile"], "profile cuda/12.4"),
        ({}, ["idle", "profile"], "profile cuda/12.4"),
        ({}, [], "parallelbench: site.modules, but no command module on "),
    ],
)
def test_modules_are_found_whatever_the_login_shell(
    variables: dict[str, str], files: list[str], loads: str, tmp_path: Path
) -> None:
    """Which is no bash, so that no function `module` is in the environment."""
    places = {
        **{name: f"{name}/init/bash" for name in ("lmod", "modules")},
        "idle": "profile.d/z00_lmod.sh",
        "profile": "profile.d/modules.sh",
    }
    for name in files:
        (path := tmp_path / places[name]).parent.mkdir(parents=True, exist_ok=True)
        path.write_text("false\n" if name == "idle" else f'false\nmodule() {{ echo "{name} $2"; }}\n')
    site = msgspec.structs.replace(run_of().site, modules=["cuda/12.4"])
    script = "\n".join([*FIRST_LINES, *site_lines(site), "echo the program"]).replace("/etc/", f"{tmp_path}/")
    folders = {variable: str(tmp_path / name) for variable, name in variables.items()}
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, check=False, env={"PATH": os.environ["PATH"], **folders}
    )
    said = done.stdout.splitlines()
    assert said[0].startswith(loads)
    assert (done.returncode, said[1:]) == ((0, ["the program"]) if files else (127, []))


def test_a_job_knows_its_end_before_its_set_up_begins(tmp_path: Path) -> None:
    """From Slurm, or where that says nothing, from its beginning and its limit."""
    run = run_of("launcher.time_limit_min=90")
    site = msgspec.structs.replace(run.site, setup=["date +%s; echo $SLURM_JOB_END_TIME; exit"])
    job = job_of_runs(submission(launcher=slurm(run), site=site), shape_of(run, "cpu"), tmp_path / "a" / "b" / "c")
    said = []
    for told in ({"SLURM_JOB_END_TIME": "1800000000"}, {}):
        done = subprocess.run(["bash", "-c", job.script()], capture_output=True, text=True, check=True, env=told)
        said.append(list(map(int, done.stdout.split())))
    (_, from_slurm), (set_up_at, own) = said
    assert from_slurm == 1_800_000_000
    assert set_up_at < own <= set_up_at + 90 * 60


def test_a_set_up_may_ask_and_go_on(tmp_path: Path) -> None:
    """What fails within a function, a sourced file, or a question is no failure of the line."""
    sourced = tmp_path / "sourced"
    sourced.write_text("false\nexport SEEN=1\n")
    lines = ["if [ -d /nowhere ]; then", "  cd /nowhere", "fi", "[ -d /nowhere ] && cd /nowhere", f"source {sourced}"]
    done = after_set_up(tmp_path, modules=["cuda/12.4"], setup=lines)
    assert (done.returncode, done.stdout) == (0, "the program\n")


@pytest.mark.parametrize("name", ["a[/b]", "a[bold]b", "$(touch X)", "two words"])
def test_what_submit_prints_can_be_copied(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = msgspec.structs.replace(run_of(), results=str(tmp_path / name))
    item = Prepared(PlannedRun(run, []), RunFolder.of(run))
    monkeypatch.setattr(launcher, "submit", lambda *_: [submission(job="7")])
    console = Console(width=60, file=io.StringIO())
    assert OnSlurm().submit([item], SubmitOptions(), console) == 0
    _, command, _ = console.file.getvalue().split("`")  # type: ignore[attr-defined]
    assert shlex.split(command) == ["parallelbench", "status", str(run.sweep_folder)]


def test_variables_of_sbatchs_are_noted_and_reach_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ignored_variables() == ""
    for name in ("SBATCH_ACCOUNT", "SLURM_CLUSTERS"):
        monkeypatch.setenv(name, "theirs")
    assert ignored_variables().startswith("SBATCH_ACCOUNT, SLURM_CLUSTERS of the environment have no effect: set site.")
    prepare_for_site(one_run([*ON_SITE, "site.account=mine"]))
    with scheduler.clean_environment():
        assert ignored_variables() == ""


@pytest.mark.parametrize(
    ("site", "asked"),
    [
        ([], {"--mem=65536M", "--gpus-per-node=a100:2"}),
        (["gpus_by=gres"], {"--mem=65536M", "--gres=gpu:a100:2"}),
        (["memory_by=cpu"], {"--mem-per-cpu=4096M", "--gpus-per-node=a100:2"}),
        (["memory_by=none", "gpus_by=none", "exclusive=true"], set()),
    ],
)
def test_jobs_ask_for_memory_and_gpus_as_the_cluster_demands(site: list[str], asked: set[str]) -> None:
    own = ["strategy=ddp", "devices=2", "site=asu_sol", "site.data_dir=data", "launcher=slurm"]
    run = one_run([*own, *(f"site.{each}" for each in site)]).run
    job = job_of_runs(submission(launcher=slurm(run), site=run.site), shape_of(run, "cuda"), Path("a/b/c"))
    words = ("--mem", "--gpus", "--gres")
    assert {word for word in as_words(job.flags) if word.startswith(words)} == asked
    gres = "gpu:a100:4" if asked else ""  # Slurm knows nothing of GPUs that it does not allocate
    size = {"nodes": 1, "cpus_per_node": 64, "memory_mib": 2**20}
    assert suits(Partition(name="p", default=True, state="up", limit_min=None, gres=gres, features="", **size), job)


def test_gpus_that_slurm_does_not_allocate_are_shared_with_nobody() -> None:
    run = one_run(
        ["strategy=ddp", "devices=2", "site=asu_sol", "site.data_dir=data", "launcher=slurm", "site.gpus_by=none"]
    ).run
    with pytest.raises(ConfigError, match=r"other users' jobs could take the same GPUs: set site\.exclusive=true"):
        shape_of(run, "cuda")
    site = msgspec.structs.replace(run.site, exclusive=True)
    alone = msgspec.structs.replace(run, site=site)
    assert charged_devices(shape_of(alone, "cuda"), site) == 4, "all GPUs of its node"
