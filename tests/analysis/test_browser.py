"""The report in a real browser: Debian's Chromium, without a window, driven by Playwright."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from analysis import Runs, load, write_report
from analysis.report.page import write_report_of
from analysis.runs.published import LOADED
from tests.analysis.factory import MIB, Fake, config, failed, published, steady
from tests.faults import fault
from tests.surroundings import machine_path, program

sync_api: Any = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.slow

WIDTHS = (400, 1600)
STRATEGIES = ("ddp", "fsdp", "model_parallel")


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
    """The report; ends with an error if the page complained or asked for anything but itself."""
    complaints: list[str] = []
    page = browser.new_page(viewport={"width": getattr(request, "param", max(WIDTHS)), "height": 900})
    page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    requests: list[str] = []
    page.on("request", lambda asked: requests.append(asked.url))
    page.goto(report.as_uri())
    yield page
    page.close()
    assert not complaints
    assert requests == [report.as_uri()], "the page must need nothing but itself"


def unfold(page: Any) -> None:
    page.evaluate("document.querySelectorAll('details').forEach((folded) => { folded.open = true; })")


@pytest.mark.exhaustive
@pytest.mark.parametrize("page", WIDTHS, indirect=True)
def test_every_figure_is_there_and_nothing_is_cut_off(page: Any) -> None:
    assert page.locator("#figure-runtime svg").is_visible()
    unfold(page)
    figures = page.locator("figure").count()
    assert page.locator("figure .chart > svg").count() == figures >= 6
    width = page.viewport_size["width"]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    # Whatever is wider than the window must lie in something that scrolls.
    outside = page.evaluate(
        """(width) => [...document.querySelectorAll("main *")].filter((node) => !node.closest(".scroll, .chart svg")
           && node.getBoundingClientRect().right > width + 0.5).map((node) => node.outerHTML.slice(0, 80))""",
        width,
    )
    assert outside == []
    # Text in them stays readable: of 12 pixels, 8.5 are left.
    shrunk = page.evaluate(
        """[...document.querySelectorAll(".chart svg")].map((svg) =>
           svg.getScreenCTM().a)"""
    )
    assert min(shrunk) > 0.7, shrunk


@pytest.mark.exhaustive
def test_the_filter_leaves_the_rows_of_what_is_chosen_by_keyboard_too(page: Any) -> None:
    unfold(page)
    rows = page.locator("#configurations tr[data-configuration]:visible")
    assert rows.count() == 14
    page.locator("#filter label", has_text="cnn_large").click()
    page.locator("#filter label", has_text="fsdp").click()
    single = page.locator("#filter input[value=single]")
    single.focus()
    page.keyboard.press("Space")
    assert single.is_checked()
    assert rows.locator("th").all_inner_texts() == ["single ×\u00a01", "fsdp ×\u00a02", "fsdp ×\u00a04"]
    assert page.locator("#configurations tr.group:visible").all_inner_texts() == ["digits · cnn_large"]
    assert page.locator("#runs tr[data-configuration]:visible").count() == 2 * 3
    assert page.locator("#filter output").inner_text() == "Shown: 3 of 14 configurations."
    # No run of one device alone has four of them, which is said.
    page.locator("#filter label", has_text="fsdp").click()
    page.locator("#filter fieldset", has_text="Devices").locator("label", has_text="4").click()
    assert rows.count() == 0
    assert page.locator("#filter output").inner_text() == "No configuration has all of these."
    page.locator("#filter button").click()
    page.wait_for_function("!document.querySelector('tr[data-configuration][hidden]')")
    assert rows.count() == 14


def test_in_print_every_figure_fits_its_page_and_what_is_folded_is_there(browser: Any, report: Path) -> None:
    page = browser.new_page(viewport={"width": 1600, "height": 900}, color_scheme="dark")
    page.goto(report.as_uri())
    assert page.evaluate("getComputedStyle(document.querySelector('.chart svg')).filter") != "none"
    page.emulate_media(media="print")
    assert not page.locator("#filter").is_visible()
    # A4 landscape less its margins, in CSS pixels.
    page.set_viewport_size({"width": 1017, "height": 688})
    sizes = page.locator(".chart svg").evaluate_all("all => all.map((svg) => svg.getBoundingClientRect().toJSON())")
    assert max(size["height"] for size in sizes) <= 688
    assert min(size["height"] for size in sizes) > 50, "folded ones have their size, too"
    assert max(size["right"] for size in sizes) <= 1017
    assert page.evaluate("getComputedStyle(document.querySelector('.chart svg')).filter") == "none", "on white"
    assert page.pdf(prefer_css_page_size=True).startswith(b"%PDF")
    page.close()


def test_without_scripts_the_page_is_whole(browser: Any, report: Path) -> None:
    context = browser.new_context(java_script_enabled=False, viewport={"width": 400, "height": 900})
    page = context.new_page()
    page.goto(report.as_uri())
    assert page.locator("#figure-runtime svg").is_visible()
    assert page.locator("#configurations tr[data-configuration]:visible").count() == 14
    assert not page.locator("#filter").is_visible()
    context.close()


@pytest.mark.exhaustive
@fault(
    "storage and input",
    "Very many configurations",
    injection="a sweep of 300 configurations, five each of 60 works",
    outcome="the page has less than 2 MB and 15,000 pixels, on a telephone, too",
)
def test_of_300_configurations_the_page_stays_small(browser: Any, tmp_path: Path) -> None:
    for strategy, devices in (("single", 1), ("ddp", 2), ("ddp", 4), ("fsdp", 2), ("fsdp", 4)):
        published(config(tmp_path, strategy=strategy, devices=devices, epochs=2), steady(1 / devices))
    file = write_report_of(_at_batches(load(tmp_path), 60), tmp_path / "report")
    assert file.stat().st_size < 2e6
    for width in WIDTHS:
        page = browser.new_page(viewport={"width": width, "height": 900})
        page.goto(file.as_uri())
        assert page.locator("#configurations tr[data-configuration]").count() == 300
        assert page.evaluate("document.documentElement.scrollHeight") < 15_000
        page.close()


def _at_batches(runs: Runs, count: int) -> Runs:
    """The same runs once for each of so many batch sizes."""

    def copied(table: pl.DataFrame, number: int) -> pl.DataFrame:
        own = {"run_id": pl.format("{}-{}", "run_id", pl.lit(number))}
        if "config_json" in table.columns:
            batch = f'"batch_size":{32 + 8 * number}'
            own["config_json"] = pl.col("config_json").str.replace(r'"batch_size":\d+', batch)
        return table.with_columns(**own)

    tables = {name: pl.concat([copied(runs.tables[name], number) for number in range(count)]) for name in LOADED}
    return replace(runs, tables=tables)
