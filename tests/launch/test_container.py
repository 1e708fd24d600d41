"""Jobs in a container: what is put before the program, and that it runs, with stand-ins for Apptainer and srun."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from launch.slurm import errands, job, scheduler
from launch.slurm.job import Job
from launch.slurm.sbatch import ask_outside, job_groups, shape_of
from launch.slurm.submit import prepare_for_site
from launch.sweep import PlannedRun, one_run
from launch.sweep.compose import Extension
from parallelbench.config.sites import Site
from parallelbench.errors import ConfigError
from tests.launch.fake_slurm import SRUN, programs, submission

IMAGE = "/images/bench.sif"


def site_of(conf: Path, **container: Any) -> list[str]:
    """Overrides that choose a site with a container, whose file is written."""
    (conf / "site").mkdir(parents=True, exist_ok=True)
    fields = {"image": IMAGE, "python": "/opt/bin/python"} | container
    lines = "".join(f"  {key}: {value}\n" for key, value in fields.items())
    plain = "defaults: [local_cluster, _self_]\nname: mine\n"
    (conf / "site" / "mine.yaml").write_text(f"{plain}data_dir: {conf}/data\ncontainer:\n{lines}")
    (conf / "data").mkdir(exist_ok=True)
    return ["launcher=slurm", "site=mine", f"results={conf}/results"]


def planned(conf: Path, *overrides: str, **container: Any) -> PlannedRun:
    return one_run([*site_of(conf, **container), *overrides], Extension(conf))


def script_of(run: PlannedRun) -> str:
    (group,) = job_groups([prepare_for_site(run)])
    return group.job.script()


def test_apptainer_is_put_before_the_program_and_sees_what_the_job_needs(tmp_path: Path) -> None:
    extra = "[/scratch/fast:/fast:ro]"
    line = next(
        line
        for line in script_of(planned(tmp_path, runtime="apptainer", mounts=extra)).splitlines()
        if "launch.slurm.start" in line
    )
    assert line.startswith("srun ")
    sweep, data = f"{tmp_path}/results/adhoc", f"{tmp_path}/data"
    binds = f"--bind {sweep}:{sweep} --bind {data}:{data} --bind /scratch/fast:/fast:ro"
    assert f" apptainer exec --nv {binds} {IMAGE} /opt/bin/python -u -m parallelbench.entry launch.slurm.start " in line
    without_gpus = script_of(planned(tmp_path, "site.gpus_per_node=0", runtime="singularity"))
    assert " singularity exec --bind " in without_gpus


def test_pyxis_gets_flags_of_srun(tmp_path: Path) -> None:
    image = "docker://lab/bench:1.0"
    script = script_of(planned(tmp_path, runtime="pyxis", image=image))
    line = next(line for line in script.splitlines() if "launch.slurm.start" in line)
    flags, _, program = line.partition(" /opt/bin/python ")
    assert f"--container-image={image}" in flags
    mounts = ",".join(f"{folder}:{folder}" for folder in (f"{tmp_path}/results/adhoc", f"{tmp_path}/data"))
    assert f"--container-mounts={mounts}" in flags
    assert program.startswith("-u -m parallelbench.entry launch.slurm.start ")


@pytest.mark.parametrize("runtime", ["apptainer", "pyxis"])
def test_short_jobs_run_in_it_too(runtime: str, tmp_path: Path) -> None:
    run = planned(tmp_path, "site.modules=[cuda/12]", runtime=runtime).run
    *words, script = errands.errand(run, shape_of(run, "cpu"), tmp_path, "x", minutes=1).srun()
    inside = runtime == "pyxis"
    assert any(word.startswith("--container-image=") for word in words) == inside
    assert ("apptainer exec" in script) != inside
    assert ("module load cuda/12" in script) != inside, "modules are those of the node"
    assert script.splitlines()[-1].partition("/opt/bin/python")[2].startswith(" -u -m parallelbench.entry ")


@pytest.mark.parametrize(
    ("container", "message"),
    [
        ({"runtime": "docker"}, "site.container.runtime=docker is no choice: valid"),
        ({"runtime": "apptainer", "image": "'a b'"}, "site.container.image='a b'"),
        ({"runtime": "apptainer", "image": "'--nv'"}, "site.container.image='--nv'"),
        ({"runtime": "apptainer", "mounts": "[/a]"}, "site.container.mounts"),
        ({"runtime": "apptainer", "python": "'x; y'"}, "site.container.python="),
    ],
)
def test_what_is_no_container_is_refused(container: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        planned(tmp_path, **container)


def test_folders_that_it_could_not_be_given_are_refused(tmp_path: Path) -> None:
    run = planned(tmp_path, runtime="apptainer")
    comma = msgspec.structs.replace(run.run, results=f"{tmp_path}/a,b")
    with pytest.raises(ConfigError, match="has ',', which no folder of a container may have: choose another"):
        prepare_for_site(PlannedRun(comma, []))
    home = msgspec.structs.replace(planned(tmp_path, runtime="pyxis").run.site, data_dir="~/data")
    with pytest.raises(ConfigError, match=r"site\.data_dir=~/data with a container of Pyxis, .* write the path out"):
        prepare_for_site(PlannedRun(msgspec.structs.replace(run.run, site=home), []))


def in_container(conf: Path) -> Site:
    return planned(conf, runtime="apptainer").run.site


@pytest.mark.parametrize(
    ("asks", "task", "requeued"),
    [
        (True, {}, "requeue 17\n"),
        (True, {"SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "3"}, "requeue 17_3\n"),
        (False, {}, ""),
    ],
)
def test_the_script_queues_a_job_again_that_asks_for_it_from_inside(
    asks: bool, task: dict[str, str], requeued: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside there is no scontrol: the job leaves a file, and its batch script does it."""
    run = planned(tmp_path, runtime="apptainer")
    script = script_of(run)
    folder = run.run.sweep_folder / "submissions" / "TOKEN"
    folder.mkdir(parents=True)
    marker = f"touch {folder}/requeue-17;" if asks else ""
    asked, told = tmp_path / "asked", tmp_path / "told"
    inside = f'echo "$@" > {asked}; while [[ $1 != /opt/bin/python ]]; do shift; done; shift; {marker} exit 3'
    programs(tmp_path / "bin", monkeypatch, srun=SRUN, apptainer=inside, scontrol=f'echo "$@" >> {told}')
    env = os.environ | {"SLURM_JOB_ID": "17"} | task
    done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    assert (told.read_text() if told.exists() else "") == requeued
    assert not (folder / "requeue-17").exists()
    assert asked.read_text().startswith("exec --nv --bind ")


def test_a_job_asks_outside_only_from_a_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(*_: object, **__: object) -> str:
        raise scheduler.NoSlurmError("there is no scontrol here")

    monkeypatch.setattr(scheduler, "tell", missing)
    inside, plain = submission(site=in_container(tmp_path)), submission()
    job._requeue(Job(inside, id="17", restarts=0, task=0, node=0), tmp_path)
    assert (tmp_path / "requeue-17").exists()
    assert capsys.readouterr().out == ""
    job._requeue(Job(plain, id="18", restarts=0, task=0, node=0), tmp_path)
    assert not (tmp_path / "requeue-18").exists()
    assert "could not be queued again (there is no scontrol here)" in capsys.readouterr().out
    assert not ask_outside(plain.site, tmp_path, "19")


def test_a_request_to_queue_again_that_gets_no_answer_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Slurm warns all tasks of an array at once, and they all ask."""
    asked = []

    def busy(command: list[str], **_: object) -> str:
        asked.append(command)
        if len(asked) < 3:
            raise scheduler.SchedulerError("slurm_requeue error: Socket timed out on send/recv operation")
        return ""

    monkeypatch.setattr(scheduler, "_run", busy)
    monkeypatch.setattr(scheduler, "PAUSES_S", (0.0,) * 4)
    job._requeue(Job(submission(), id="17", restarts=0, task=0, node=0), tmp_path)
    assert asked == [["scontrol", "requeue", "17"]] * 3
    assert capsys.readouterr().out == ""
