"""`help`, and files of one's own that set many keys: what a key means, and `experiment=`."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.sweep import expand
from launch.sweep.compose import Extension, compose_plain
from launch.sweep.extension import extension
from parallelbench import cli
from parallelbench.errors import ConfigError
from tests.test_cli import here, refused

__all__ = ["here"]


def test_help_takes_a_choice_of_ones_own(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = here / "conf" / "optimizer" / "slow_sgd.yaml"
    own.parent.mkdir(parents=True)
    shipped = Path(__file__).parents[1] / "conf" / "optimizer" / "sgd.yaml"
    rate = compose_plain(["optimizer=sgd"])["optimizer"]["lr"]
    own.write_text(shipped.read_text().replace(f"lr: {rate}", "lr: 0.00123"))
    assert cli.main(["help", "optimizer.lr", "optimizer=slow_sgd", "--conf", str(here / "conf")]) == 0
    text = capsys.readouterr().out
    assert text.count("default  ") == 1
    assert "default  0.00123 with optimizer=slow_sgd\n" in text
    assert "did you mean sgd?" in refused(capsys, "help", "optimizer.lr", "optimizer=slow_sgd")


def test_help_takes_an_override_that_other_verbs_take(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["help", "site.data_dir=/x", "strategy=ddp"]) == 0
    assert capsys.readouterr().out.startswith("site.data_dir\n  meaning  Folder of the prepared data sets")
    assert "did you mean epochs?" in refused(capsys, "help", "epohcs=3")


@pytest.fixture
def mine(tmp_path: Path) -> Extension:
    """A folder with experiments as Hydra's users have them."""
    folder = tmp_path / "conf" / "experiment"
    folder.mkdir(parents=True)
    (folder / "quick.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /model: mlp\n  - override /optimizer: sgd\n"
        "epochs: 2\noptimizer:\n  lr: 0.25\n"
    )
    (folder / "long.yaml").write_text("# @package _global_\nepochs: 9\n")
    (folder / "lost.yaml").write_text("epochs: 9\n")
    return extension(str(tmp_path / "conf"), None)


@pytest.mark.exhaustive
def test_experiments_set_keys_of_the_whole_configuration(mine: Extension) -> None:
    for word in ("experiment=quick", "+experiment=quick"):
        (planned,) = expand([word], mine)
        run = planned.run
        assert (run.model.name, run.optimizer.name, run.optimizer.lr, run.epochs) == ("mlp", "sgd", 0.25, 2)
    assert [each.run.epochs for each in expand(["experiment=quick", "epochs=3"], mine)] == [3], "the command line wins"
    assert [each.run.optimizer.name for each in expand(["experiment=quick", "optimizer=adam"], mine)] == ["adam"]
    assert sorted(each.run.epochs for each in expand(["experiment=quick,long", "devices=1"], mine)) == [2, 9]
    assert len(expand(["experiment=quick", "sweep=demo"], mine)) == 24


def test_experiments_that_set_nothing_or_do_not_exist_are_refused(mine: Extension) -> None:
    with pytest.raises(ConfigError, match="let its first line be `# @package _global_`"):
        expand(["experiment=lost"], mine)
    with pytest.raises(ConfigError, match=r"experiment=quik is no choice: did you mean quick\?"):
        expand(["experiment=quik"], mine)
