"""A cluster of CPUs, described as docs/slurm.md says: what its jobs ask for, and what `plan` refuses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launch.slurm import scheduler
from parallelbench import cli
from tests.launch.fake_slurm import FakeSlurm

PAGE = Path(__file__).resolve().parents[2] / "docs" / "slurm.md"
SINFO = "cpu|cpu*|up|infinite|4|64|128000|(null)|(null)|0/4/0/4|idle\n"


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    """The folder that the page has its reader make."""
    found = re.search(r"```yaml\n(# my/conf/site/mine_cpus.yaml.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    folder = tmp_path / "conf"
    (folder / "site").mkdir(parents=True)
    (folder / "site" / "mine_cpus.yaml").write_text(found[1])
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "code", "shown"),
    [
        ([], 0, ["#SBATCH --cpus-per-task=64", "#SBATCH --mem=65536M", "#SBATCH --nodes=2", "CPU device-hours"]),
        (["nodes=1", "devices=17", "batch_size=170"], 2, ["site.devices_per_node=16: choose nodes="]),
        (["device=cuda"], 2, ["site=mine_cpus has gpus_per_node=0: choose device=cpu"]),
    ],
)
def test_a_cluster_of_cpus_is_planned_as_the_page_says(
    conf: Path,
    fake: FakeSlurm,
    options: list[str],
    code: int,
    shown: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(scheduler, "available", lambda: True)
    fake.answers["sinfo"] = SINFO
    (command,) = re.findall(r"^parallelbench (plan --conf my/conf .*site=mine_cpus.*)$", PAGE.read_text(), re.MULTILINE)
    words = command.replace("my/conf", str(conf)).split()
    keys = {option.partition("=")[0] for option in options}
    kept = [word for word in words if word.partition("=")[0] not in keys]
    assert cli.main([*kept, "data=synthetic", f"results={tmp_path}/results", *options]) == code
    text = capsys.readouterr().out
    assert all(part in text for part in shown), text
    assert "gres" not in text
    assert "--gpus-per-node" not in text
