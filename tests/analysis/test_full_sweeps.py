"""Pages of whole published sweeps, of made-up runs: light enough to send, whatever was measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis import write_report
from tests.analysis.full_sweeps import made_up

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

MOST_BYTES = 5_000_000
SWEEPS = (
    ("sweep=asu_data_parallel_faithful",),
    ("sweep=mnist_two_devices",),
    ("sweep=uw_frameworks", "sweep.repeats=2"),
)
"""Repeats make points, which weigh little, and rows of the table of runs, of which the page has 500 at most."""


@pytest.mark.parametrize("overrides", SWEEPS, ids=lambda overrides: overrides[0].partition("=")[2])
def test_a_published_sweeps_page_is_light(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    page = write_report(made_up(tmp_path, overrides))
    assert 500_000 < page.stat().st_size < MOST_BYTES
