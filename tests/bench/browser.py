"""The page of a whole published sweep in a browser: how long until its figures can be used."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from analysis import write_report
from tests.analysis.full_sweeps import made_up
from tests.bench.measure import Figure

SWEEP = "asu_data_parallel_faithful"
WIDTH, HEIGHT = 1600, 900
ROUNDS = 7
DRAWN_MS = 300_000
"""The machine may be busy."""
_DRAWN = "body[data-drawn]:not([data-drawn=''])"
_MARKS = "performance.getEntriesByName('drawn').map((mark) => mark.startTime)"
"""Of each figure, when the page had drawn it: ms since the browser was told to open the page."""


def figures() -> list[Figure]:
    """Seconds from opening the page to its figures, in a browser that runs, on all cores; a tab of its own each."""
    program = shutil.which("chromium")
    if program is None or importlib.util.find_spec("playwright") is None:
        return []
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    with tempfile.TemporaryDirectory() as folder:
        page = write_report(made_up(Path(folder), [f"sweep={SWEEP}"]))
        rounds = _rounds(program, page.as_uri())
        weight = f"{page.stat().st_size / 1e6:.1f} MB, {len(rounds[0])} figures"
    what = f"page of sweep={SWEEP}, made-up runs, in Chromium: from opening it"
    first, last = ([times[place] for times in rounds] for place in (0, -1))
    size = f"{weight}, {WIDTH} × {HEIGHT}; a click or a scroll comes between any two figures"
    longest = max(later - earlier for times in rounds for earlier, later in pairwise(times))
    return [
        Figure(f"{what} until the first figure can be used", first, "s", 3, False, size),
        Figure(
            f"{what} until all figures can be used",
            last,
            "s",
            3,
            False,
            f"median of the first {median(first):.2f} s; the longest that a figure took {longest:.2f} s",
        ),
    ]


def _rounds(program: str, address: str) -> list[list[float]]:
    """Of each round, when the figures were drawn, s."""
    sync_api: Any = importlib.import_module("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        _drawn(browser, address)  # warm: its own files, and the page's
        rounds = [_drawn(browser, address) for _ in range(ROUNDS)]
        browser.close()
    return rounds


def _drawn(browser: Any, address: str) -> list[float]:
    """When each figure was drawn, in their order, s since the browser began to open the page."""
    context = browser.new_context(viewport={"width": WIDTH, "height": HEIGHT})
    page = context.new_page()
    page.goto(address)
    page.wait_for_selector(_DRAWN, state="attached", timeout=DRAWN_MS)
    times: list[float] = page.evaluate(_MARKS)
    context.close()
    assert len(times) > 1, "the page draws several figures"
    return [time / 1000 for time in times]
