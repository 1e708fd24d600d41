"""A user's own strategy, from the user's own files: docs/adding-a-strategy.md tells this test as a story."""

from __future__ import annotations

import shutil
from pathlib import Path

import polars as pl
import pytest

import conf
from launch.sweep import one_run
from launch.sweep.compose import Extension, compose_plain, usable_choices
from launch.sweep.extension import extension
from parallelbench.cli import main
from parallelbench.errors import ConfigError
from tests.faults import fault
from tests.launch.conftest import CODE, YAML, forget_the_import
from tests.launch.programs import program

OWN = ["--conf", "conf", "--plugin", "mystrategies"]
SMALL = ["model=logistic_regression", "measure.probe=false", "results=results"]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_users_strategy_trains_on_two_ranks_like_one_device_and_is_in_the_report(
    in_it: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Reports execute nobody's code: of an unfinished run they say what the plugin would tell."""
    small = [*OWN, *SMALL, "epochs=2", "strategy=mine"]
    for said in ("next: parallelbench report", "2 runs are done"):
        assert main(["submit", *small, "devices=1,2", "launcher.oversubscribe=true"]) == 0
        assert said in capsys.readouterr().out
    assert main(["run", *small, "strategy.mark=13"]) == 1
    page = in_it / "results" / "report" / "index.html"
    for plugin, said in (
        ([], "it has no result, and its configuration can"),
        (["--plugin", "mystrategies"], ": AssertionError: bad luck"),
    ):
        forget_the_import()
        assert main(["report", *plugin, "results"]) == 0
        assert said in page.read_text()
        assert ("--plugin PACKAGE adds a package" in page.read_text()) == (not plugin)
    table = pl.read_csv(in_it / "results" / "report" / "tables" / "configurations.csv")
    (mine,) = table.filter((pl.col("strategy") == "mine") & (pl.col("devices") == 2)).to_dicts()
    assert (mine["outcomes"], mine["parity"]) == ("1 ok", "1 of 1")
    assert 0 < mine["parity_difference"] < 1e-9, "two ranks sum in another order than one"
    assert mine["configuration"] in page.read_text()


def test_without_being_named_nothing_of_it_is_imported(user: Path) -> None:
    (user / "mystrategies" / "__init__.py").write_text("raise SystemExit('imported')\n")
    with pytest.raises(ConfigError, match="--plugin PACKAGE adds a package"):
        one_run(["strategy=mine"], Extension(user / "conf"))


def test_only_the_named_package_is_allowed(user: Path) -> None:
    (user / "conf" / "strategy" / "evil.yaml").write_text("_target_: os.system\nname: evil\n")
    with pytest.raises(ConfigError, match="refused: only component classes of parallelbench and mystrategies"):
        one_run(["strategy=evil"], Extension(user / "conf", "mystrategies"))


@pytest.mark.parametrize(
    ("conf", "plugin", "message"),
    [
        ("nowhere", None, "is no folder"),
        (None, "no-such.package", "neither a package's name nor its path"),
        (None, "no_such_package", "there is no package no_such_package in /.*, and none is installed"),
    ],
)
def test_what_is_not_there_is_named(conf: str | None, plugin: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        extension(conf, plugin)


def test_a_folder_with_foreign_groups_is_refused(tmp_path: Path) -> None:
    (tmp_path / "strategys").mkdir()
    (tmp_path / "strategys" / "mine.yaml").write_text(YAML)
    with pytest.raises(ConfigError, match="strategys, which are no groups; valid: "):
        extension(str(tmp_path), None)


@pytest.mark.parametrize(
    ("path", "says"),
    [
        (
            "strategy/ddp.yaml",
            "the suite has a file of that name: rename it, e.g. to my_ddp.yaml, choose strategy=my_ddp",
        ),
        ("sweep/demo.yaml", "choose sweep=my_demo, and write `name: my_demo` into it"),
        ("site/default.yaml", "choose site=my_default"),
        ("config.yaml", "the suite's is read: give its keys on the command line"),
        ("strategy/mine.yml", "only .yaml is read"),
    ],
)
def test_a_file_that_would_be_ignored_is_refused_by_name(user: Path, path: str, says: str) -> None:
    shipped = Path(next(iter(conf.__path__)), path)
    (user / "conf" / path).parent.mkdir(exist_ok=True)
    text = shipped.read_text() if shipped.exists() else YAML
    (user / "conf" / path).write_text(text + "# edited\n")
    with pytest.raises(ConfigError, match=f"--conf .*: {path} would be ignored: .*{says}"):
        extension(str(user / "conf"), None)


def test_a_choice_that_lies_in_a_folder_beside_names_the_option(user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(user)
    with pytest.raises(
        ConfigError, match=r"strategy=mine is no choice: .*; conf/strategy/mine\.yaml is read with --conf"
    ):
        one_run(["strategy=mine"])


def test_exact_copies_of_the_suites_files_change_nothing_and_may_stay(user: Path) -> None:
    shutil.copytree(next(iter(conf.__path__)), user / "conf", dirs_exist_ok=True)
    own = extension(str(user / "conf"), None)
    assert one_run(["strategy=ddp", "devices=2"], own).run == one_run(["strategy=ddp", "devices=2"]).run


def test_a_package_cannot_take_the_name_of_another(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text(CODE)
    with pytest.raises(ConfigError, match="name of its own"):
        extension(None, str(tmp_path / "json.py"))


# --- files of the user's own that are broken: where, and why


def test_a_packages_name_that_is_written_wrongly_is_told_beside_those_that_are_there(
    user: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(user)
    for written in ("mystrategy", str(user / "mystrategy"), "./mystrategy"):
        with pytest.raises(ConfigError, match=r"did you mean mystrategies\?") as caught:
            extension(None, written)
        assert str(user) in str(caught.value)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("x = 1\nimport nonexist\n", r"mystrategies can't be imported: .*__init__\.py:2: .*No module named 'nonexist'"),
        ("x = 1\nclass (\n", r"mystrategies can't be imported: .*__init__\.py:2: invalid syntax"),
        ("def f():\n    1 / 0\nf()\n", r"mystrategies can't be imported: .*__init__\.py:2: ZeroDivisionError"),
        ("class Mine: ...\n", "is refused: it is no strategy"),
        (
            "from parallelbench.config.components import Strategy as Mine\n",
            "it lacks data_parallel_degree, prepare, which",
        ),
        ("class Other: ...\n", r"mystrategies\.Mine does not exist: mystrategies has no class Mine$"),
        (
            "from parallelbench.strategies.single import Single\n\n\nclass Mines(Single, frozen=True): ...\n",
            r"mystrategies has no class Mine: did you mean Mines\?$",
        ),
    ],
)
def test_what_is_wrong_with_a_users_code_is_said_with_the_place(in_it: Path, code: str, message: str) -> None:
    (in_it / "mystrategies" / "__init__.py").write_text(code)
    with pytest.raises(ConfigError, match=message) as caught:
        one_run(["strategy=mine"], Extension(in_it / "conf", "mystrategies"))
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "code",
    [
        "import sys\nsys.exit(0)\n",
        "import argparse\nargparse.ArgumentParser().parse_args(['--help'])\n",
        CODE.replace("        return run.devices\n", "        raise SystemExit\n", 1),
    ],
    ids=["import", "arguments", "call"],
)
def test_a_users_code_that_ends_the_program_is_no_success(
    in_it: Path, capsys: pytest.CaptureFixture[str], code: str
) -> None:
    (in_it / "mystrategies" / "__init__.py").write_text(code)
    assert main(["plan", *OWN, *SMALL, "strategy=mine"]) == 2
    line = next(n for n, text in enumerate(code.splitlines(), 1) if "xit" in text or "parse_args" in text)
    said = capsys.readouterr().err
    assert f"mystrategies/__init__.py:{line}: this code ended the program" in said
    assert len(said.splitlines()) == 1


@pytest.mark.exhaustive
@fault(
    "workers",
    "A user's code ends the program",
    injection="sys.exit(0) or arguments parsed at import, in what a run asks of the package, and in a rank",
    outcome="an error, with file and line, and the exit code of one",
)
@pytest.mark.slow
def test_a_rank_that_a_users_code_ends_has_failed_there(user: Path) -> None:
    code = CODE.replace("        assert self.mark", "        raise SystemExit(0)\n        assert self.mark")
    (user / "mystrategies" / "__init__.py").write_text(code)
    done = program(user, "run", *OWN, *SMALL, "strategy=mine", "measure.telemetry_hz=0", "measure.parity=false")
    assert done.returncode == 1
    line = next(n for n, text in enumerate(code.splitlines(), 1) if "SystemExit" in text)
    said = "".join(done.stdout.split())
    assert "error" in said
    assert f"mystrategies/__init__.py:{line}:thiscodeendedtheprogram(SystemExit:0)" in said


def test_what_is_no_yaml_is_named_with_the_line(user: Path) -> None:
    broken = user / "conf" / "strategy" / "mine.yaml"
    broken.write_text("name: mine\nmark: [\n")
    with pytest.raises(ConfigError, match=rf"{broken} is no YAML that can be read: line 3: .*did not find"):
        extension(str(user / "conf"), None)


@pytest.mark.parametrize("how", ["by hand", "inherited", "by hydra"])
def test_a_file_that_names_its_choice_otherwise_is_refused(user: Path, how: str) -> None:
    (user / "conf" / "strategy" / "yours.yaml").write_text(
        "defaults: [mine, _self_]\nmark: 3\n" if how == "inherited" else YAML
    )
    (user / "conf" / "experiment").mkdir()
    (user / "conf" / "experiment" / "of_yours.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /strategy: yours\n"
    )
    with pytest.raises(ConfigError, match=r"strategy=yours has `name: mine`: .* write `name: yours`"):
        compose_plain(["experiment=of_yours" if how == "by hydra" else "strategy=yours"], user / "conf")


def test_a_site_of_three_lines_says_what_it_lacks_and_the_documented_one_works(user: Path) -> None:
    site = user / "conf" / "site" / "mine.yaml"
    site.parent.mkdir()
    site.write_text("name: mine\npartition: gpu\n")
    own = Extension(user / "conf")
    with pytest.raises(
        ConfigError, match=r"site\.data_dir is missing: add `defaults: \[default, _self_\]` to your file"
    ):
        one_run(["site=mine"], own)
    page = (Path(__file__).parents[2] / "docs" / "slurm.md").read_text()
    site.write_text(page.partition("```yaml\n")[2].partition("```")[0])
    assert one_run(["site=mine"], own).run.site.partition == "gpu"


def test_choices_of_a_package_that_is_not_named_are_left_out(tmp_path: Path) -> None:
    """One folder may serve several packages; help and advise look at all choices."""
    (tmp_path / "strategy").mkdir()
    (tmp_path / "strategy/averaged.yaml").write_text("_target_: me.strategy.Averaged\nname: averaged\n")
    (tmp_path / "strategy/plain.yaml").write_text("_target_: parallelbench.strategies.single.Single\nname: plain\n")
    (tmp_path / ".ipynb_checkpoints").mkdir()
    (tmp_path / ".ipynb_checkpoints/plain-checkpoint.yaml").write_text("_target_: [half\n")
    named = {plugin: usable_choices(Extension(tmp_path, plugin))["strategy"] for plugin in ("me", "mine")}
    assert ("averaged" in named["me"], "averaged" in named["mine"]) == (True, False)
    assert "plain" in named["mine"]


def test_a_folder_without_init_is_said_to_be_no_package(tmp_path: Path) -> None:
    (tmp_path / "lonely").mkdir()
    with pytest.raises(ConfigError, match=r"it lacks an `__init__\.py`"):
        extension(None, str(tmp_path / "lonely"))
