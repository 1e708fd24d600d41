"""Jobs in a container: what is put before the program, and that it runs, with stand-ins for Apptainer and srun."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from launch.slurm import job, scheduler
from launch.slurm.job import Job
from launch.slurm.sbatch import job_groups, needed_folders, shape_of, step_command
from launch.slurm.submit import prepare_for_site
from launch.sweep import PlannedRun, one_run
from launch.sweep.compose import Extension
from parallelbench.config.run import RunConfig
from parallelbench.errors import ConfigError
from tests.launch.fake_slurm import submission

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


def step_of(run: RunConfig, *program: str) -> list[str]:
    folders = needed_folders(run.site, run.sweep_folder, [])
    return step_command(shape_of(run, "cuda" if run.site.gpus_per_node else "cpu"), run.site, folders, program)


def test_a_supervisor_is_outside_of_the_container(tmp_path: Path) -> None:
    """Inside there is no Slurm."""
    for runtime in ("apptainer", "pyxis"):
        (group,) = job_groups([prepare_for_site(planned(tmp_path, runtime=runtime))])
        last = group.job.script().strip().splitlines()[-1]
        assert last.startswith(f"exec {sys.executable} -u -m parallelbench.entry launch.slurm.start ")


def test_apptainer_is_put_before_the_program_and_sees_what_the_step_needs(tmp_path: Path) -> None:
    extra = "[/scratch/fast:/fast:ro]"
    words = step_of(planned(tmp_path, runtime="apptainer", mounts=extra).run, "module")
    line = " ".join(words)
    assert line.startswith("srun ")
    sweep, data = f"{tmp_path}/results/adhoc", f"{tmp_path}/data"
    binds = f"--bind {sweep}:{sweep} --bind {data}:{data} --bind /scratch/fast:/fast:ro"
    assert line.endswith(f" apptainer exec --nv {binds} {IMAGE} /opt/bin/python -u -m parallelbench.entry module")
    without_gpus = step_of(planned(tmp_path, "site.gpus_per_node=0", runtime="singularity").run, "module")
    assert " singularity exec --bind " in " ".join(without_gpus)


def test_pyxis_gets_flags_of_srun(tmp_path: Path) -> None:
    image = "docker://lab/bench:1.0"
    words = step_of(planned(tmp_path, runtime="pyxis", image=image).run, "module")
    mounts = ",".join(f"{folder}:{folder}" for folder in (f"{tmp_path}/results/adhoc", f"{tmp_path}/data"))
    assert {f"--container-image={image}", f"--container-mounts={mounts}"} <= set(words)
    assert words[-5:] == ["/opt/bin/python", "-u", "-m", "parallelbench.entry", "module"]


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


def test_a_request_to_queue_again_that_gets_no_answer_is_repeated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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
    job._requeue(Job(submission(), id="17", restarts=0, task=0))
    assert asked == [["scontrol", "requeue", "17"]] * 3
    assert capsys.readouterr().out == ""
