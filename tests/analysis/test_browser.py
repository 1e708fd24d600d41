"""The report in a real browser: Debian's Chromium, without a window, driven by Playwright."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from analysis import write_report
from tests.analysis.factory import MIB, Fake, config, failed, published
from tests.surroundings import machine_path, program

sync_api: Any = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.slow

WIDTHS = (400, 1600)
STRATEGIES = ("ddp", "fsdp", "model_parallel")
DRAWN = "figure[data-figure]"
DRAWN_MS = 300_000
"""The machine may be busy with other tests."""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, one device and three strategies on 2 and 4 devices, two repeats, one failure."""
    root = tmp_path_factory.mktemp("browser")
    sent = Fake(epoch_time_s=lambda e, r: 0.6, sent=lambda e, r: (11 * MIB, 0, 0), theoretical_bubble=0.5)
    for model in ("cnn_small", "cnn_large"):
        for repeat in (0, 1):
            published(config(root, model=model, repeat=repeat))
            for strategy in STRATEGIES:
                for devices in (2, 4):
                    run = config(root, model=model, strategy=strategy, devices=devices, repeat=repeat)
                    published(run, sent)
    failed(config(root, strategy="ddp", devices=2, repeat=2), "oom", "out of memory", epochs=1)
    return write_report(root / "demo")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    browser, environment = program("chromium"), {"PATH": machine_path()}  # it may be a script that calls others
    with sync_api.sync_playwright() as playwright:
        # Root needs --no-sandbox; the page is our own.
        started = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"], env=environment)
        yield started
        started.close()


@pytest.fixture
def page(request: pytest.FixtureRequest, browser: Any, report: Path) -> Iterator[Any]:
    """The drawn report; ends with an error if the page complained or asked for anything but itself."""
    complaints: list[str] = []
    page = browser.new_page(viewport={"width": getattr(request, "param", max(WIDTHS)), "height": 900})
    page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    requests: list[str] = []
    page.on("request", lambda asked: requests.append(asked.url))
    page.set_default_timeout(DRAWN_MS)
    page.goto(report.as_uri())
    drawn(page)
    yield page
    page.close()
    assert not complaints
    others = [url for url in requests if url != report.as_uri() and not url.startswith("data:")]
    assert requests
    assert not others, "the page must need nothing but itself"


def drawn(page: Any) -> None:
    """Wait until all figures are there."""
    page.wait_for_selector("body[data-drawn]:not([data-drawn=''])", state="attached")
    page.evaluate("document.querySelectorAll('details').forEach((folded) => { folded.open = true; })")


def bars(page: Any, figure: str) -> int:
    return int(page.locator(f"#figure-{figure} .mark-rect path").count())


def legend(page: Any) -> dict[str, str]:
    """Configuration → colour in the legend of the figure of accuracy."""
    names = page.locator("#figure-accuracy .role-legend-label text").all_text_contents()
    symbols = page.locator("#figure-accuracy .role-legend-symbol path")
    return dict(zip(names, symbols.evaluate_all("found => found.map((s) => s.getAttribute('stroke'))"), strict=True))


@pytest.mark.exhaustive
@pytest.mark.parametrize("page", WIDTHS, indirect=True)
def test_every_figure_is_drawn_and_nothing_is_cut_off(page: Any) -> None:
    specs = page.locator(DRAWN).count()
    assert specs >= 6
    assert page.locator("figure .chart .part:first-child svg").count() == specs
    width = page.viewport_size["width"]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    # Whatever is wider than the window must lie in something that scrolls.
    outside = page.evaluate(
        """(width) => [...document.querySelectorAll("main *")].filter((node) => !node.closest(".scroll, svg")
           && node.getBoundingClientRect().right > width + 0.5).map((node) => node.outerHTML.slice(0, 80))""",
        width,
    )
    assert outside == []
    # Drawn as large as they are shown, or nearly: text in them stays readable.
    shrunk = page.evaluate(
        """[...document.querySelectorAll(".chart svg")].map((svg) =>
           svg.getBoundingClientRect().width / svg.viewBox.baseVal.width)"""
    )
    assert min(shrunk) > 0.85, shrunk


@pytest.mark.exhaustive
def test_the_filter_leaves_what_is_chosen_in_tables_and_figures(page: Any) -> None:
    everything, before = bars(page, "runtime"), legend(page)
    rows = page.locator("#configurations tr[data-configuration]:visible")
    assert rows.count() == 14
    assert everything == 2 * 14
    page.locator("#filter label", has_text="cnn_large").click()
    page.locator("#filter label", has_text="fsdp").click()
    page.locator("#filter label", has_text="single").click()
    drawn(page)
    assert rows.locator("th").all_inner_texts() == ["single ×\u00a01", "fsdp ×\u00a02", "fsdp ×\u00a04"]
    assert page.locator("#configurations tr.group:visible").all_inner_texts() == ["digits · cnn_large"]
    assert bars(page, "runtime") == 2 * 3
    assert page.locator("#filter output").inner_text() == "Shown: 3 of 14 configurations."
    # Lines: the legend names what is drawn, in the colours that it had before.
    after = legend(page)
    assert list(after) == ["single × 1", "fsdp × 2", "fsdp × 4"]
    assert after.items() <= before.items()
    # No schedule of a chosen strategy has a bubble: the figure says so instead of standing there empty.
    page.locator("#filter label", has_text="fsdp").click()
    drawn(page)
    assert page.locator("#figure-bubble.empty[data-empty=here]").count() == 1
    # No run of one device alone has four of them: that is said, and no figure promises a panel that nobody can draw.
    page.locator("#filter fieldset", has_text="Devices").locator("label", has_text="4").click()
    drawn(page)
    assert rows.count() == 0
    assert page.locator("#filter output").inner_text() == "No configuration has all of these."
    assert page.locator(f"{DRAWN}.empty[data-empty=all]").count() == page.locator(DRAWN).count()
    page.locator("#filter button").click()
    drawn(page)
    assert rows.count() == 14
    assert bars(page, "runtime") == everything
    assert legend(page) == before
    assert page.locator(f"{DRAWN}.empty").count() == 0


def test_in_print_every_figure_fits_its_page(browser: Any, report: Path, tmp_path: Path) -> None:
    page = browser.new_page(viewport={"width": 1600, "height": 900})
    page.set_default_timeout(DRAWN_MS)
    page.goto(report.as_uri())
    drawn(page)
    page.emulate_media(media="print")
    assert not page.locator("#filter").is_visible()
    # A4 landscape less its margins, in CSS pixels.
    page.set_viewport_size({"width": 1017, "height": 688})
    heights = page.locator("figure").evaluate_all("figures => figures.map((f) => f.getBoundingClientRect().height)")
    assert max(heights) <= 688, heights
    # What is folded is printed, too, and panels are drawn for paper before printing goes on, without a timer.
    page.evaluate("document.querySelectorAll('details').forEach((folded) => { folded.open = false; })")
    page.evaluate(
        """addEventListener("beforeprint", () => setTimeout(() => {
           window.papers = document.querySelectorAll(".paper svg").length;
           window.shut = document.querySelectorAll("details:not([open])").length; }))
           || dispatchEvent(new Event("beforeprint"))"""
    )
    page.wait_for_function("window.papers !== undefined")
    assert page.evaluate("window.papers") >= page.locator(DRAWN).count()
    assert page.evaluate("window.shut") == 0
    heights = page.locator(".paper > div").evaluate_all("rows => rows.map((r) => r.getBoundingClientRect().height)")
    assert 0 < min(heights) <= max(heights) <= 688, heights
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator(".paper, details[open]").count() == 0
    assert page.pdf(prefer_css_page_size=True).startswith(b"%PDF")
    page.close()


def test_without_scripts_the_page_shows_the_same_figures_as_images(browser: Any, report: Path) -> None:
    context = browser.new_context(java_script_enabled=False, viewport={"width": 400, "height": 900})
    page = context.new_page()
    page.set_default_timeout(DRAWN_MS)
    page.goto(report.as_uri())
    assert page.locator("figure .chart img").count() == page.locator(DRAWN).count()
    assert not page.locator("#filter").is_visible()
    context.close()
