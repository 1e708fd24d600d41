"""Documentation that follows from the code is up to date, and what it refers to exists."""

from __future__ import annotations

import re

import pytest

from parallelbench.gpu_check.__main__ import checks
from tests.docs import DOCS, PAGES
from tests.gpu_findings import FINDINGS

ROOT = DOCS.parent


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "strategies.md" else name for name in PAGES]
)
def test_generated_pages_are_up_to_date(name: str) -> None:
    assert (DOCS / name).read_text() == PAGES[name](), "run `make docs`"


@pytest.mark.parametrize("path", [*ROOT.glob("*.md"), *DOCS.glob("*.md")], ids=lambda path: path.name)
def test_links_and_paths_in_the_documentation_exist(path) -> None:
    text = path.read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    missing = [link for link in links if not (path.parent / link).exists()]
    named = re.findall(r"`((?:parallelbench|launch|analysis|conf|tests|docs)/[\w/.]+)(?:::\w+)?`", text)
    missing += [name for name in named if not (ROOT / name).exists()]
    assert not missing


def test_make_targets_named_in_the_documentation_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for path in [*ROOT.glob("*.md"), *DOCS.glob("*.md")]:
        named = set(re.findall(r"`make ([a-z-]+)", path.read_text()))
        assert named <= targets, f"{path.name}: {named - targets}"


def test_each_finding_about_gpus_names_a_test_that_exists_and_a_line_of_gpu_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.set_device", lambda _: None)
    lines = {name for name, _ in checks("cuda", 2)}
    for finding in FINDINGS:
        assert finding.tests
        for test in finding.tests:
            path, _, name = test.partition("::")
            assert f"def {name}" in (ROOT / path).read_text(), test
        assert not finding.gpu_check or finding.gpu_check in lines
