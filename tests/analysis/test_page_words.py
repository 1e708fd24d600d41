"""The pages of whole sweeps: no heading without content, and no sentence that says nothing."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import TYPE_CHECKING

import pytest

from analysis import write_report
from tests.analysis.full_sweeps import made_up

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

HEADINGS = ("h1", "h2", "h3")
VOID = ("meta", "br", "img", "input", "link")
SILENT = ("script", "style", "title", "noscript")
NOTHING = (
    re.compile(r"(?<![\d.,])(\d[\d.,]*(?:\s?[%a-zA-Z]+)?) (?:to|and) \1(?![\d%\w]|[.,]\d)"),
    re.compile(r"\b(?:nan|inf)\b"),
    re.compile(r"\((\d[\d.,]*)–\1\)"),
    re.compile("`"),
)
"""A span whose ends are the same, numbers that are none, marks of code that are shown as they are."""


class Page(HTMLParser):
    """A page's words, by heading and by block."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.path: list[str] = []
        self.headings: list[list[str]] = []
        """Of each heading its name, and all words up to the next one of its level or above."""
        self._open: list[tuple[str, list[str]]] = []
        self.blocks: list[str] = [""]
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in HEADINGS:
            self._open = [(level, heading) for level, heading in self._open if level < tag]
            self.headings.append(["", ""])
            self._open.append((tag, self.headings[-1]))
        if tag in ("p", "li", "td", "th", "figcaption", "dd", *HEADINGS):
            self.blocks.append("")
        if tag not in VOID:
            self.path.append(tag)
        if tag in ("svg", "img") or ("class", "chart") in attrs:
            self._below("[drawn]")

    def handle_endtag(self, tag: str) -> None:
        assert self.path.pop() == tag, "elements are nested as they are closed"

    def handle_data(self, data: str) -> None:
        if not set(self.path) & set(SILENT):
            self.blocks[-1] += data
            if set(self.path) & set(HEADINGS):
                self.headings[-1][0] += data.strip()
            else:
                self._below(data.strip())

    def _below(self, shown: str) -> None:
        for _, heading in self._open:
            heading[1] += shown


def require_that_it_says_something(page: Page) -> None:
    assert not page.path
    for heading, below in page.headings:
        assert heading
        assert below, f"{heading} is empty"
    for block in page.blocks:
        for nothing in NOTHING:
            assert not nothing.search(block), block
        if "no difference shown" in block:
            for sentence in re.split(r"; |\. ", block):
                if "one device" in sentence and "%" in sentence:
                    assert "–" in sentence, sentence


def test_the_check_finds_what_says_nothing() -> None:
    whole = "<h1>Title</h1><h2>First</h2><p>{}</p><h2>Next</h2><h3>Part</h3><p>words</p>"
    require_that_it_says_something(Page(whole.format("from 0.13 to 0.132, 12 to 120 s, 1.2–1.4 and 10 and 100 s")))
    for words in (
        "",
        "loss is 0.132 to 0.132 after",
        "between 44.1\u202f% and 44.1\u202f%.",
        "1.0 (0.5–0.5)",
        "takes nan s",
        "measure again (`parallelbench submit`)",
        "achieves 49.1 % in steady state (beside one device no difference shown)",
    ):
        with pytest.raises(AssertionError):
            require_that_it_says_something(Page(whole.format(words)))
    with pytest.raises(AssertionError):
        require_that_it_says_something(Page("<h1>Title</h1><h2>First</h2><h2>Next</h2><p>words</p>"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("sweep", ["demo", "mnist_two_devices", "tutorial_mlp"])
def test_every_heading_of_a_page_has_content_and_every_sentence_says_something(sweep: str, tmp_path: Path) -> None:
    page = write_report(made_up(tmp_path, [f"sweep={sweep}", "measure.telemetry_hz=1"]))
    require_that_it_says_something(Page(page.read_text(encoding="utf-8")))
