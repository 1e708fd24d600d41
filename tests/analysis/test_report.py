"""The report: self-contained, true to its tables, and never half there."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import statistics
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from msgspec import structs

from analysis import Runs, load, summary, write_report
from analysis import figures as figures_module
from analysis.comparison import summary as of_summary
from analysis.comparison.summary import learning
from analysis.figures import chart, draw
from analysis.metrics.epochs import per_epoch
from analysis.report import page as page_module
from analysis.report.page import _columns, _table
from parallelbench.errors import ConfigError, StorageError
from tests.analysis.factory import MIB, Fake, config, failed, foreign, published
from tests.analysis.made_up import altered, rows_of
from tests.analysis.test_compare import pair
from tests.faults import fault

pytestmark = pytest.mark.slow


class Page(HTMLParser):
    """What a browser would load, and the numbers in the tables."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.values: list[str] = []
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        found = dict(attrs)
        asked = [str(found[name]) for name in ("src", "href", "srcset", "data", "action") if name in found]
        (self.links if tag == "a" else self.loads).extend(asked)
        if tag == "data":
            self.values.append(str(found["value"]))


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two repeats of single × 1 and ddp × 2, one run that failed, one foreign folder, and their report."""
    root = tmp_path_factory.mktemp("results")
    pair(root, [(10.0, 8.0), (10.0, 5.0)])
    failed(config(root, strategy="model_parallel", devices=2), "oom", "<b>out</b> of memory", epochs=1)
    (root / "demo" / "stray").mkdir()
    return root / "demo"


@pytest.fixture(scope="module")
def page(sweep: Path) -> Page:
    write_report(sweep)
    return Page((sweep / "report" / "index.html").read_text(encoding="utf-8"))


@pytest.mark.exhaustive
def test_the_page_loads_nothing(sweep: Path, page: Page) -> None:
    assert page.loads == []
    tables = {target for target in page.links if not target.startswith("#")}
    assert tables == {f"tables/{path.name}" for path in (sweep / "report/tables").glob("*.csv")}
    assert not {"link", "img", "iframe", "object", "embed", "base"} & set(page.tags)
    text = (sweep / "report" / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"@import|url\(\s*['\"]?(?!#)", text)
    ids = re.findall(r'\sid="([^"]*)"', text)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r"url\(#([^)]*)\)", text)) <= set(ids)


@pytest.mark.usefixtures("page")
def test_the_page_holds_each_figure_that_lies_beside_it(sweep: Path) -> None:
    text = (sweep / "report" / "index.html").read_text(encoding="utf-8")
    files = sorted(path.name for path in (sweep / "report" / "figures").iterdir())
    assert files == sorted(f"{name}.svg" for name in re.findall(r'<figure id="figure-(\w+)"', text))
    assert text.count('<svg version="1.1"') == len(files)
    assert re.search(r"<title>ddp × 2, repeat 0[^<]*</title>", text), "a mark tells what it is"


@pytest.mark.exhaustive
@fault(
    "storage and input",
    "A name that is markup",
    injection="a strategy of a user's own whose name ends the image and begins a script",
    outcome="in the page's images, tooltips, tables and filters it is words",
)
def test_no_name_is_markup(tmp_path: Path) -> None:
    hostile = "</svg></title></script><script>alert(1)</script>"
    for repeat in (0, 1):
        published(config(tmp_path, repeat=repeat))
        published(foreign(config(tmp_path, devices=2, repeat=repeat), "harmless"))
    renamed = pl.col("config_json").str.replace_all('"harmless"', json.dumps(hostile), literal=True)
    runs = altered(load(tmp_path), "run", config_json=renamed, strategy=pl.col("strategy").replace("harmless", hostile))
    text = page_module.write_report_of(runs, tmp_path / "page").read_text(encoding="utf-8")
    assert len(re.findall(r"<title>[^<]*&lt;/svg&gt;", text)) > 2
    assert Page(text).tags.count("script") == 2
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)" in text


@pytest.mark.usefixtures("page")
def test_images_that_would_make_the_page_too_large_lie_beside_it(
    sweep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_module, "MOST_PICTURED", 1)
    report = write_report(sweep, tmp_path / "report")
    found = Page(report.read_text(encoding="utf-8"))
    beside = {target for target in found.links if target.startswith("figures/")}
    figures = {f"figures/{path.name}" for path in (report.parent / "figures").iterdir()}
    assert figures - beside == {"figures/runtime.svg"}, "the first one is there at once"


def test_the_values_of_a_figure_are_a_table_beside_it() -> None:
    frame = pl.DataFrame(
        {
            "group": ["digits", "digits", "mnist"],
            "configuration": ["single × 1", "ddp × 2", "ddp × 2"],
            "Time per epoch (s)": [1.0, 0.61234, None],
            "repeats": [1234, 4, 0],
            "disturbed": [False, True, False],
            "goal": [None, None, None],
        }
    )
    found = page_module._values(frame)
    assert found.columns == ["configuration", "Time per epoch (s)", "repeats", "disturbed"]
    assert found.groups == [
        (
            "digits",
            [("single × 1", ["single × 1", "1.00", "1,234", "no"]), ("ddp × 2", ["ddp × 2", "0.612", "4", "yes"])],
        ),
        ("mnist", [("ddp × 2", ["ddp × 2", "–", "0", "no"])]),
    ]


def test_the_pages_numbers_are_those_of_the_csv_file(sweep: Path, page: Page) -> None:
    with (sweep / "report" / "tables" / "configurations.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["configuration"] for row in rows] == ["single × 1", "ddp × 2", "model_parallel × 2"]
    shown = iter(page.values)
    table = _table(summary(load(sweep)), "configurations")
    every = _columns(summary(load(sweep)), "configurations")
    assert len(table.columns) + len(table.alike) + len(table.missing) == len(every), "none is lost"
    alike = [cell.column for cell in table.alike]
    for row, columns in (*((row, table.columns) for row in rows), (rows[0], alike)):
        for column in columns:
            if column.numeric and row[column.name]:
                assert float(next(shown)) == pytest.approx(float(row[column.name]), rel=1e-12)
    assert rows[1]["speed_up"] == str(math.exp(statistics.median([math.log(1.25), math.log(2.0)])))


@pytest.mark.usefixtures("page")
def test_every_figure_is_valid_svg(sweep: Path) -> None:
    folder = sweep / "report" / "figures"
    drawn = {path.stem for path in folder.glob("*.svg")}
    assert drawn >= {"runtime", "scaling", "memory", "accuracy", "loss", "time_to_accuracy"}
    for name in drawn:
        root = ET.parse(folder / f"{name}.svg").getroot()
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert float(root.get("width", "0")) > 100


def test_a_file_of_ones_own_declares_figures(sweep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_own.py").write_text(
        "from polars import DataFrame\n"
        "from analysis.figures.chart import Own\n"
        "def finding(runs): return f'There are {runs.run.height} runs.'\n"
        "my_own = Own(order=0, title='Of my own', rows=lambda runs: DataFrame(), draw=None, finding=finding)\n"
    )
    (tmp_path / "my_bars.py").write_text(
        "from dataclasses import replace\n"
        "from analysis.figures.bars import runtime\n"
        "my_runtime = replace(runtime, order=20, title='Epochs')\n"
    )
    monkeypatch.setattr(figures_module, "__path__", [*figures_module.__path__, str(tmp_path)])
    runs = load(sweep)
    first, *shipped, last = draw(runs)
    assert (first.name, first.title, first.chart) == ("my_own", "Of my own", None)
    assert first.finding == f"There are {runs.run.height} runs."
    assert (last.name, last.title, last.finding) == ("my_runtime", "Epochs", shipped[0].finding)
    assert shipped[0].name == "runtime"
    assert last.chart is not None
    with pytest.raises(ConfigError, match="my_owm is no figure: did you mean my_own"):
        draw(runs, ["my_owm"])


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch, sweep: Path) -> Runs:
    """A sweep for which a few points, panels and epochs are very many."""
    monkeypatch.setattr(chart, "MOST_POINTS", 3)
    monkeypatch.setattr(chart, "MOST_PANELS", 1)
    monkeypatch.setattr(of_summary, "MOST_POINTS", 6)
    monkeypatch.setattr(of_summary, "FEWEST_EPOCHS", 1)
    monkeypatch.setattr(page_module, "MOST_EPOCHS", 3)
    return load(sweep)


def test_of_very_many_repeats_and_panels_medians_of_the_first_are_drawn(many: Runs) -> None:
    (figure,) = draw(many, ["runtime"])
    values = rows_of(figure.chart)
    assert [(row["panel"], row["configuration"], row["repeat"], row["value"]) for row in values] == [
        ("Later epochs (median)", "single × 1", "median of 2", 10.0),
        ("Later epochs (median)", "ddp × 2", "median of 2", 6.5),
    ]
    assert figure.finding.endswith(
        "\n1 of 2 panels are drawn; the tables have all, and report --figure --panel draws any."
    )
    assert " ".join(figure.chart.to_dict()["title"]["subtitle"]) == figure.remark
    with chart.only("first epoch"):  # of one work, panels are not named by it
        (other,) = draw(many, ["runtime"])
    assert {row["panel"] for row in rows_of(other.chart)} == {"First epoch"}


def test_of_very_long_curves_some_epochs_are_drawn_the_last_always(many: Runs) -> None:
    found = learning(many, test="test_loss", training="train_loss")
    assert found["x"].unique().to_list() == [1, 3]
    assert found["value"].max() == 2.2


@pytest.mark.usefixtures("undrawn")
def test_very_many_epochs_are_a_parquet_file(many: Runs, tmp_path: Path) -> None:
    write_report(many.root, tmp_path / "report")
    found = pl.read_parquet(tmp_path / "report" / "tables" / "epochs.parquet")
    assert found.equals(per_epoch(many))
    assert not (tmp_path / "report" / "tables" / "epochs.csv").exists()


@pytest.mark.usefixtures("page")
def test_the_page_says_what_a_sceptic_must_know(sweep: Path) -> None:
    text = (sweep / "report" / "index.html").read_text(encoding="utf-8").replace("\u202f", " ")
    assert "ddp × 2 trains an epoch 1.58 times as fast as one device in 2 repeats, too few for an interval: " in text
    assert "oom: &lt;b&gt;out&lt;/b&gt; of memory" in text
    assert "Skipped: stray: no config.yaml" in text
    assert "34 of 1,442 are left out (digits · cnn_small)." in text
    assert "repeats per side, in turn (sweep.repeats=6)." in text
    assert "2.15.0" in text
    assert "0123abc" in text


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports without figures: drawing takes seconds."""
    monkeypatch.setattr(page_module, "drawn", lambda runs: [])


@pytest.mark.usefixtures("undrawn")
def test_a_second_report_replaces_the_first_and_leaves_nothing_behind(tmp_path: Path) -> None:
    published(config(tmp_path))
    first = write_report(tmp_path / "demo")
    (first.parent / "old.svg").write_text("stale")
    assert write_report(tmp_path / "demo") == first
    assert not (first.parent / "old.svg").exists()
    assert sorted(path.name for path in (tmp_path / "demo").iterdir() if "digits" not in path.name) == ["report"]


@pytest.mark.exhaustive
@pytest.mark.usefixtures("undrawn")
def test_a_report_that_fails_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published(config(tmp_path))
    page = write_report(tmp_path / "demo")
    before = page.read_bytes()

    def fail(*_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(page_module, "render", fail)
    with pytest.raises(StorageError, match="the disk is full"):
        write_report(tmp_path / "demo")
    assert page.read_bytes() == before
    assert sorted(path.name for path in (tmp_path / "demo").iterdir() if "digits" not in path.name) == ["report"]


@pytest.mark.usefixtures("undrawn")
def test_a_folder_that_is_no_report_is_never_replaced(tmp_path: Path) -> None:
    published(config(tmp_path))
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="precious is not a report"):
        write_report(tmp_path / "demo", out=precious)
    assert (precious / "thesis.tex").exists()
    assert write_report(tmp_path / "demo", out=tmp_path / "elsewhere") == tmp_path / "elsewhere" / "index.html"


def test_a_folder_with_no_finished_run_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    failed(config(tmp_path), "oom", "out of memory", epochs=1)
    with pytest.raises(ConfigError, match=r"holds no finished run \(1 oom\)"):
        write_report(tmp_path)
    assert not (tmp_path / "report").exists()


@pytest.mark.usefixtures("undrawn")
def test_nulls_are_reasons_or_dashes_and_never_zero(tmp_path: Path) -> None:
    fake = Fake(host_peak_rss_bytes=lambda e, r: None, parity_passed=None, sent=lambda e, r: (MIB, 0, 0))
    published(config(tmp_path, epochs=1), fake)
    runs = load(tmp_path)
    page = write_report(tmp_path).read_text(encoding="utf-8")
    row = summary(runs).row(0, named=True)
    assert row["steady_epoch_time_s"] is None
    assert row["peak_memory_max_bytes"] is None
    cells = re.findall(r"<(?:td|dd)[^>]*>(.*?)</(?:td|dd)>", page.partition('id="runs"')[0], re.DOTALL)
    assert "not measured on every rank, or workers had ended by then" in cells
    assert not any(re.fullmatch(r"(<data.*>)?0(\.0+)?(</data>)?", cell.strip()) for cell in cells)
    table = csv.DictReader(io.StringIO((tmp_path / "report" / "tables" / "runs.csv").read_text(encoding="utf-8")))
    assert next(table)["peak_memory_max_bytes"] == ""


@pytest.mark.exhaustive
@fault(
    "storage and input",
    "A name or an option that a spreadsheet takes for a formula",
    injection="strategies, options and sweeps that begin with =, @, + or -",
    outcome="in each CSV file of a report they begin with an apostrophe; numbers stay as they are",
)
@pytest.mark.usefixtures("undrawn")
def test_no_cell_of_a_csv_file_is_a_formula(tmp_path: Path) -> None:
    """Names and options of one's own may be anything: a spreadsheet shows them, and executes none."""
    hostile = ("=1+1", "@SUM(A1)", "+cmd|' C calc'!A0", "-2+3+cmd|' C calc'!A0")
    for name in hostile:
        run = foreign(config(tmp_path, devices=2), name)
        published(structs.replace(run, optimizer=structs.replace(run.optimizer, name=name), sweep_name=name))
    tables = write_report(tmp_path, tmp_path / "page").parent / "tables"
    cells = [cell for file in tables.glob("*.csv") for row in csv.reader(file.read_text().splitlines()) for cell in row]
    assert {name for name in hostile if any(name in cell for cell in cells)} == {*hostile}
    numbers = re.compile(r"[+-][\d.e+ %×-]+")
    assert [cell for cell in cells if cell.startswith(("=", "@", "+", "-")) and not numbers.fullmatch(cell)] == []


def test_what_was_sent_idle_and_stale_is_drawn_and_said(tmp_path: Path) -> None:
    """Two repeats of one device, and of strategies on two of which each has something of its own."""
    special = {
        "ddp": Fake(sent=lambda e, r: (11 * MIB, 0, 0)),
        "pipeline": Fake(
            epoch_time_s=lambda e, r: 0.625,
            sent=lambda e, r: (0, 11 * MIB if r == 0 else 11 * MIB // 2, 0),
            theoretical_bubble=1 / 9,
        ),
        "downpour": Fake(
            sent=lambda e, r: (11 * MIB, 0, 0) if r == 0 else (0, 0, 33 * MIB),
            staleness=lambda e, r: [0, 0, 1, 3] if r == 0 else [],
            parity_passed=None,
        ),
    }
    for repeat in (0, 1):
        published(config(tmp_path, repeat=repeat))
        for name, fake in special.items():
            published(config(tmp_path, strategy=name, repeat=repeat, devices=2), fake)
    figures = {each.name: each for each in draw(load(tmp_path), ["communication", "bubble", "staleness"])}
    found = {name: figure.finding.replace("\u202f", " ") for name, figure in figures.items()}
    assert found["communication"] == (
        "Per optimizer step, from 1.50 MiB with pipeline × 2 (activations and their gradients) to 4.00 MiB with "
        "downpour × 2 (75.0 % of it parameters and buffers) are sent between processes."
    )
    # Speed-up 1 ÷ 0.625 = 1.6, efficiency 0.8.
    assert "pipeline × 2 lacks 20.0 % (idle by its schedule, were all stages equal: 11.1 %)" in found["bubble"]
    assert "Idle time itself was not measured" in found["bubble"]
    assert found["staleness"] == (
        "Between fetch and use, others' updates per push are on average 1.00 with downpour × 2 (at most 3)."
    )

    def rows(figure: str, configuration: str) -> list[dict[str, Any]]:
        values: list[dict[str, Any]] = figures[figure].chart.data.values  # type: ignore[union-attr]
        return [row for row in values if row["configuration"] == configuration]

    parts = [(row["panel"], row["from"], row["to"]) for row in rows("communication", "downpour × 2") if row["value"]]
    together, busiest = "All processes together", "Busiest process"
    assert parts == [(together, 0.0, 1.0), (together, 1.0, 4.0), (busiest, 0.0, 3.0)]
    assert [row["value"] for row in rows("bubble", "pipeline × 2")] == pytest.approx([20.0, 20.0])
    assert [row["bubble"] for row in rows("bubble", "pipeline × 2")] == pytest.approx([100 / 9] * 2)
    shares = [(row["x"], row["value"]) for row in rows("staleness", "downpour × 2") if row["repeat"] == 0]
    assert shares == [(0, 50.0), (1, 25.0), (2, 0.0), (3, 25.0)]


def test_nearly_all_is_100_per_cent_and_hardly_anything_is_not_0(tmp_path: Path) -> None:
    busy = {"forward": 1.0, "communication": 0.0002}
    sent = Fake(sent=lambda e, r: (10**9, 0, 1000), phases=lambda rank, step: busy)
    published(config(tmp_path, strategy="ddp", devices=2), sent)
    figures = draw(load(tmp_path), ["communication", "attribution"])
    bytes_sent, spent = (figure.finding.replace("\u202f", " ") for figure in figures)
    assert "(100 % of it gradients)" in bytes_sent
    assert "ddp × 2 spends 100 % on forward and 0.02 % on exposed communication" in spent


@pytest.mark.exhaustive
def test_more_than_the_ideal_is_not_a_lack(tmp_path: Path) -> None:
    published(config(tmp_path))
    pipeline = foreign(config(tmp_path, devices=2), "pipeline")
    published(pipeline, Fake(theoretical_bubble=0.25, epoch_time_s=lambda e, r: 0.48))
    (figure,) = draw(load(tmp_path), ["bubble"])
    assert "pipeline × 2 exceeds it by 4.2\u202f% (idle by its schedule" in figure.finding


@pytest.mark.exhaustive
def test_small_differences_of_accuracy_are_not_none(tmp_path: Path) -> None:
    """Nor are runs of one configuration, with the parity check and without, compared with each other."""

    def finding(root: Path) -> str:
        (figure,) = draw(load(root), ["accuracy"])
        return figure.finding

    published(config(tmp_path / "a"), Fake(test_accuracy=lambda epoch: 0.9912))
    published(config(tmp_path / "a", measure={"parity": False}), Fake(test_accuracy=lambda epoch: 0.9912))
    assert "configurations" not in finding(tmp_path / "a")
    published(config(tmp_path / "a", strategy="ddp", devices=2), Fake(test_accuracy=lambda epoch: 0.9916))
    assert finding(tmp_path / "a").endswith(
        "with equal seeds, configurations differ by at most 0.04 percentage points."
    )


@pytest.mark.exhaustive
def test_no_bubble_can_be_told_from_a_shortfall_without_one_device(tmp_path: Path) -> None:
    published(foreign(config(tmp_path, devices=2), "pipeline"), Fake(theoretical_bubble=0.25))
    (figure,) = draw(load(tmp_path), ["bubble"])
    assert figure.chart is not None
    assert [row["value"] for row in figure.chart.data.values] == [None]
    assert "pipeline × 2 is not known (idle by its schedule, were all stages equal: 25.0\u202f%)" in figure.finding
