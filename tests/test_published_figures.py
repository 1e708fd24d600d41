"""The page of the publications' figures: all of them are on it, each with what draws it, or why nothing does."""

from __future__ import annotations

from pathlib import Path

from analysis.paper import WIDTHS_MM
from tests import published_figures as published

ROOT = Path(__file__).resolve().parents[1]
NUMBERED = {
    "000": {
        *("Figure 1", "Figure 2", "Figure 3", "Figure 4", "Figure 5", "Figure 6", "Figure 7", "Figure 8", "Figure 9"),
        *("Table 1", "Table 2"),
    },
    "001": set(),
    "002": set(),
    "003": {"Figure 1", "Figure 2", "Figure 4", "Figure 5a", "Figure 5b", "Figure 5c", "Figure 5d", "Figure 5e"},
}
"""What each publication numbers; 003 has no figure 3."""


def test_every_numbered_figure_is_listed_and_has_a_picture_or_a_reason() -> None:
    listed = {title[:3]: figures for title, figures in published.PUBLICATIONS.items()}
    assert listed.keys() == NUMBERED.keys()
    for publication, numbers in NUMBERED.items():
        assert numbers <= {each.number for each in listed[publication]}
        assert all(each.pictures or each.here for each in listed[publication])


def test_what_draws_them_exists() -> None:
    pictures = [picture for figures in published.PUBLICATIONS.values() for each in figures for picture in each.pictures]
    assert len(pictures) == len(set(pictures)) > 15
    for picture in pictures:
        assert (ROOT / "conf" / "sweep" / f"{picture.sweep}.yaml").is_file()
        assert (ROOT / "analysis" / "figures" / f"{picture.figure}.py").is_file()
        assert picture.width_mm in WIDTHS_MM
