"""The page of the publications' figures: its pictures are there, and what draws them exists."""

from __future__ import annotations

from pathlib import Path

from analysis.figures import _known
from tests import published_figures as published
from tests import published_pictures as pictures

ROOT = Path(__file__).resolve().parents[1]


def test_what_draws_them_exists() -> None:
    for picture in published.pictures().values():
        assert (ROOT / "conf" / "sweep" / f"{picture.sweep}.yaml").is_file()
        assert picture.figure in _known()


def test_each_picture_and_table_of_the_page_is_there_and_current() -> None:
    stale = pictures.not_current()
    assert not stale, "run `python -m tests.published_pictures RESULTS`"
    assert {path.name for path in pictures.PICTURES.glob("*.png")} == published.pictures().keys()
    assert {path.name for path in published.TABLES.glob("*.md")} == published.tables().keys()
