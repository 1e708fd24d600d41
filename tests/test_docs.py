"""Documentation that follows from the code is up to date, and what it refers to exists."""

from __future__ import annotations

import ast
import functools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from launch.known import known
from launch.sweep import expand
from launch.sweep.compose import group_choices
from launch.sweep.extension import extension
from launch.sweep.program import translated
from parallelbench import cli
from tests.docs import DOCS, EVIDENCE, PAGES, SITE_PAGES

ROOT = DOCS.parent
STARTER = ROOT / "launch" / "starter" / "files" / "program"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "strategies.md" else name for name in PAGES]
)
def test_generated_pages_are_up_to_date(name: str) -> None:
    assert (DOCS / name).read_text() == PAGES[name](), "run `python -m tests.docs`"


WRITTEN = [path for path in (*ROOT.glob("*.md"), *DOCS.glob("*.md")) if path.name not in SITE_PAGES]


@pytest.mark.parametrize(
    "path",
    [*WRITTEN, *(pytest.param(DOCS / name, marks=pytest.mark.slow) for name in SITE_PAGES)],
    ids=lambda path: path.name,
)
def test_links_paths_and_tests_in_the_documentation_exist(path: Path) -> None:
    text = SITE_PAGES[path.name]() if path.name in SITE_PAGES else path.read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    missing = [link for link in links if not (path.parent / link).exists()]
    named = re.findall(r"`((?:parallelbench|launch|analysis|conf|tests|docs)/[\w/.]+)(?:::\w+)?`", text)
    missing += [name for name in named if not (ROOT / name).exists()]
    assert not missing
    for file, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text):
        assert name in functions(ROOT / file), f"{file} has no {name}"


@functools.cache
def functions(path: Path) -> set[str]:
    """Names of a file's functions, of which nothing is executed."""
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


def test_each_number_names_the_test_that_holds_it() -> None:
    """Or says that nothing does, or that only a GPU can."""
    table = EVIDENCE.read_text().partition("\n\n")[2]
    rows = [row.strip("| ").split("|") for row in table.strip().splitlines()[2:]]
    assert len(rows) > 25
    for row in rows:
        number, against, _, *where = map(str.strip, row)
        held = where and (re.findall(r"`tests/[\w/]+\.py::\w+`", where[0]) or "#checking-a-gpu" in where[0])
        assert held or against == "nothing", number


def test_make_targets_named_in_the_documentation_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    targets |= {f"venv-{path.stem}" for path in (ROOT / "environments").glob("*.txt")}
    for path in WRITTEN:
        named = set(re.findall(r"`make ([a-z-]+)", path.read_text()))
        assert named <= targets, f"{path.name}: {named - targets}"


OWN_WORDS = ("me", "mine", "wide", "shapes", "local_sgd", "sizes", "NAME", "<", "…")
"""Beginnings of choices that a page has the reader make."""


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command in the blocks of code, and of those in tables and sentences that have arguments."""
    in_code = False
    for line in text.splitlines():
        if line.startswith("```"):
            in_code = not in_code
        found = [line] if in_code else re.findall(r"`(parallelbench [^`]+ [^`]+)`", line)
        for command in found:
            for part in re.split(r" && | \\$", command.replace("\\|", "|")):
                if part.strip().startswith("parallelbench ") and "|" not in part:
                    yield shlex.split(part, comments=True)[1:]


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for --conf with the reader's `program=mine`, as `init --program` writes it."""
    conf = tmp_path_factory.mktemp("conf")
    (conf / "program").mkdir()
    (conf / "program" / "mine.yaml").write_text((STARTER / "mine.yaml").read_text())
    return conf


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: path.name)
def test_commands_in_the_documentation_are_taken(path: Path, mine: Path) -> None:
    """Verbs and options exist, keys are keys, and choices are choices, but for the reader's own."""
    for words in commands(path.read_text()):
        words = [word.strip("[]") for word in words if word != "…" and "$" not in word]
        options = cli._options(words)
        for override in translated(getattr(options, "overrides", []), mine):
            key, equals, value = override.lstrip("+").partition("=")
            if options.verb == "advise" and key.startswith(("model.", "data.")):
                continue  # transformers have keys of their own
            if key == "program.name" or key.startswith("program.axes."):
                continue  # names of the reader's
            groups = group_choices()
            assert equals, f"{path.name}: {words}"
            assert key in known()["keys"] or key in groups or key in ("experiment", "…"), (
                f"{path.name}: {key} is no key"
            )
            for name in value.split(",") if key in groups else ():
                valid = name in groups[key] or name.startswith(OWN_WORDS) or (options.verb, name) == ("advise", "gpt")
                valid |= (key, name) in (("strategy", "auto"), ("sweep", "next_runs"))
                assert valid, f"{path.name}: {key}={name} is no choice"


def programs() -> Iterator[list[str]]:
    """Overrides of the runs that the page, its tables of launchers and the README of `init --program` ask for."""
    page = (DOCS / "your-own-program.md").read_text()
    for text in (page, (STARTER / "README.md").read_text()):
        for words in commands(text):
            options = cli._options(words)
            if options.verb == "submit":
                yield options.overrides
    lines = page.partition("\n## Launchers\n")[2]
    for command in re.findall(r"^\| [^|`]+ \| `([^`]+)`", lines, flags=re.MULTILINE):
        yield [f"program={command}", "devices=1,2" if "{" in command else "devices=1"]


def test_the_programs_of_the_page_are_planned(mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    extended = extension(str(mine), None)
    planned = [expand([*words, "device=cpu"], extended) for words in programs()]
    assert len(planned) > 10
    assert all({each.run.strategy.name for each in runs} == {"program"} for runs in planned)


def test_the_sweep_of_the_page_has_the_runs_that_the_page_says(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "sweeps.md").read_text()
    example = page.partition("```yaml\n")[2].partition("```")[0]
    assert yaml.safe_load(example)["name"] == "sizes"
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "sizes.yaml").write_text(example)
    mine = extension(str(tmp_path), None)
    runs = [planned.run for planned in expand(["sweep=sizes"], mine)]
    said = re.search(r"That makes (\d+) configurations and (\d+) runs", page)
    assert said is not None
    assert (len(runs) / 6, len(runs)) == tuple(map(int, said.groups()))
    assert not [run for run in runs if run.model.name == "mlp" and run.strategy.name == "pipeline"]
    (one_size, *_) = {run.batch_size for run in (p.run for p in expand(["sweep=sizes", "batch_size=128"], mine))}
    assert one_size == 128, "the command line wins"


def test_the_first_hours_sweep_has_the_runs_that_the_page_says() -> None:
    page = (ROOT / "docs" / "first-hour.md").read_text()
    (words,) = [words for words in commands(page) if words[0] == "plan"]
    runs = [planned.run for planned in expand(words[1:])]
    assert f"shows the {len(runs)} runs" in page
    assert {run.strategy.name for run in runs if run.devices == 1} == {"single"}
