"""A plugin's sources are a part of its runs' identity: a changed one makes new runs."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from launch.launcher import SubmitOptions, launcher_of
from launch.sweep import expand, one_run
from launch.sweep.compose import Extension
from parallelbench.cli import main
from parallelbench.config.build import from_mapping, to_mapping
from parallelbench.config.identity import run_id
from parallelbench.config.plugin import sources_now
from parallelbench.config.run import RunConfig
from parallelbench.errors import ConfigError
from parallelbench.measure.environment import capture
from parallelbench.results.folder import RunFolder
from tests.helpers import TINY
from tests.launch.conftest import CODE, forget_the_import

MINE = [*TINY, "strategy=mine", "measure=debug", "launcher=inline", "epochs=1"]
CHANGED = CODE + "\n# another version\n"
Tree = dict[str, str]


def write(folder: Path, code: str) -> None:
    """Change the package, and forget that it was imported."""
    (folder / "mystrategies" / "__init__.py").write_text(code)
    forget_the_import()


def asked(*overrides: str) -> RunConfig:
    return one_run([*MINE, *overrides], Extension(Path("conf").absolute(), "mystrategies")).run


names = st.sampled_from(["a.py", "b.py", "sub/a.py", "sub/deep/c.py", "__init__.py"])
trees = st.dictionaries(names, st.text(st.characters(codec="utf-8"), max_size=20), min_size=1, max_size=4)


def of_tree(tree: Tree, *, besides: Tree | None = None) -> str:
    """The sources of a package with these files, in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "treepackage"
        for name, text in {"__init__.py": "", **tree, **(besides or {})}.items():
            (package / name).parent.mkdir(parents=True, exist_ok=True)
            (package / name).write_bytes(text.encode())
        module = type(sys)("treepackage")
        module.__path__ = [str(package)]
        sys.modules["treepackage"] = module
        try:
            return sources_now("treepackage")
        finally:
            del sys.modules["treepackage"]


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(one=trees, other=trees)
def test_packages_have_the_same_sources_exactly_if_their_python_files_are_the_same(one: Tree, other: Tree) -> None:
    same = {"__init__.py": "", **one} == {"__init__.py": "", **other}
    assert (of_tree(one) == of_tree(other)) == same


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(tree=trees, text=st.text(st.characters(codec="utf-8"), max_size=20))
def test_files_that_nobody_imports_are_no_sources(tree: Tree, text: str) -> None:
    besides = {"notes.md": text, "__pycache__/a.pyc": text, ".ipynb_checkpoints/a.py": text, "sub/.a.py": text}
    assert of_tree(tree, besides=besides) == of_tree(tree)


def test_text_can_not_move_from_one_file_to_the_next_unseen() -> None:
    assert of_tree({"a.py": "x", "b.py": "yz"}) != of_tree({"a.py": "xy", "b.py": "z"})


@pytest.mark.exhaustive
def test_a_changed_plugin_makes_other_runs_of_its_classes_and_of_no_others(in_it: Path) -> None:
    mine, single = asked(), asked("strategy=single")
    assert mine.plugin_sources == sources_now("mystrategies")
    assert single.plugin_sources == ""
    write(in_it, CHANGED)
    assert run_id(asked()) != run_id(mine)
    assert run_id(asked("strategy=single")) == run_id(single)
    write(in_it, CODE)
    assert run_id(asked()) == run_id(mine), "and back again"


def test_a_run_folder_keeps_the_identity_it_was_made_with(in_it: Path) -> None:
    mine = asked()
    folder = RunFolder.of(mine)
    folder.write_intent(mine, [])
    write(in_it, CHANGED)
    read = folder.config("mystrategies")
    assert to_mapping(read) == to_mapping(mine)
    assert run_id(read) == run_id(mine)
    assert "plugin_sources" in to_mapping(mine)["strategy"]
    assert "plugin_sources" not in to_mapping(mine)["model"], "the suite's own"


@pytest.mark.slow
def test_a_component_of_the_suite_has_no_such_key(in_it: Path) -> None:
    plain = to_mapping(asked("strategy=single"))
    plain["strategy"]["plugin_sources"] = "mystrategies@0"
    with pytest.raises(ConfigError, match=r"strategy\.plugin_sources is not a key"):
        from_mapping(plain)


def test_a_run_does_not_start_with_other_sources_than_it_was_asked_for_with(in_it: Path) -> None:
    planned = expand(MINE, Extension(in_it / "conf", "mystrategies"))[0]
    launcher = launcher_of(planned.run)
    prepared = [launcher.prepare(planned)]
    (in_it / "mystrategies" / "helper.py").write_text("x = 1\n")  # while the run waits in a queue
    assert launcher.submit(prepared, SubmitOptions(), Console(file=io.StringIO())) == 1
    outcome = RunFolder.of(planned.run).state().outcome
    assert outcome is not None
    assert outcome.outcome == "error"
    assert "mystrategies has changed since this run was asked for (mystrategies@" in outcome.reason


def test_the_environment_tells_the_sources_and_their_commit(in_it: Path) -> None:
    asked()
    plugin = capture(plugin="mystrategies")["plugin"]
    assert plugin["sources"] == sources_now("mystrategies")
    assert plugin["git"].keys() == {"unknown"}, "why there is no commit"
    assert "plugin" not in capture()
    git = ["git", "-C", str(in_it), "-c", "user.name=me", "-c", "user.email=me@example.org"]
    for arguments in (["init"], ["add", "mystrategies"], ["commit", "-m", "first"]):
        subprocess.run([*git, *arguments], check=True, capture_output=True)
    clean = capture(plugin="mystrategies")["plugin"]["git"]
    assert (len(clean["commit"]), clean["dirty"]) == (40, False), "files besides the package do not count"
    (in_it / "mystrategies" / "new.py").write_text("")
    assert capture(plugin="mystrategies")["plugin"]["git"] == {"commit": clean["commit"], "dirty": True}


@pytest.mark.exhaustive
@pytest.mark.slow
def test_an_edited_plugin_is_to_be_measured_and_plan_says_why(in_it: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(verb: str, *options: str) -> str:
        forget_the_import()  # each is a program of its own
        assert main([verb, *options, "--conf", "conf", "--plugin", "mystrategies", *MINE]) == 0
        return " ".join(capsys.readouterr().out.split())

    said("submit")
    write(in_it, CHANGED)
    plan = said("plan")
    assert "1 run is new, since mystrategies has changed: it is mystrategies@" in plan
    assert "missing" in plan
    notes = json.loads(said("plan", "--json"))["notes"]
    assert "1 run is new, since mystrategies has changed" in " ".join(notes)
    said("submit")
    assert len(list((in_it / "results" / "adhoc").glob("*/result/manifest.json"))) == 2
