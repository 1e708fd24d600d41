"""Writes the report of a folder of runs: one HTML page that needs nothing else, the figures, and their tables.

Each figure is drawn once: the page holds the SVG image that lies beside it.
"""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import uuid
from collections import Counter, defaultdict
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import polars as pl

from analysis import text
from analysis.claims.figures import is_reproduction
from analysis.comparison.baseline import baseline_in_words, in_words
from analysis.comparison.exclusions import Exclusion, require_finished
from analysis.comparison.pairs import of_equal_devices
from analysis.comparison.summary import facts, summary
from analysis.comparison.verdict import SpeedVerdict
from analysis.comparison.work import IS_PROGRAM, PROGRAM, natural
from analysis.figures import drawn
from analysis.figures.finding import NOT_RANKED
from analysis.metrics.columns import explained_columns, page_columns, summary_columns, tables_columns
from analysis.metrics.epochs import per_epoch
from analysis.metrics.runs import require_accuracy
from analysis.report import answers, claims, publication, sentence, warnings
from analysis.report.costs import SMALL_HEADROOM
from analysis.report.figure import captioned
from analysis.report.pictures import Pictures
from analysis.report.programs import in_windows
from analysis.report.svg import inlined
from analysis.report.tables import Cell, Shown, Table, cells
from analysis.report.warnings import environment, with_energy
from analysis.runs.reader import load
from parallelbench.errors import ConfigError, count_of
from parallelbench.redaction import redacted
from parallelbench.results.declaration import Column
from parallelbench.results.files import storage_errors
from parallelbench.world.allowance import require_figures

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from analysis.figures import Figure
    from analysis.runs.reader import Runs
    from parallelbench.results.declaration import Place


GENERATOR = '<meta name="generator" content="parallelbench">'
"""Marks a page as a report: only a folder with such a page is replaced."""


FILTERS = ("data", "model", "strategy", "devices")
"""Columns of `facts` by which the page can be filtered."""
MOST_EPOCHS = 100_000
"""Most rows of the table of epochs as CSV. A longer table is Parquet, a hundredth as large."""
MOST_ROWS = {"configurations": 300, "energy": 300, "runs": 200, "pairs": 100}
"""Most rows of a table of the page. A browser would take seconds to lay out more."""
MOST_ON_PAPER = 100
"""Most rows of the table of runs that are printed while it is folded."""
MOST_VALUES = 60
"""Most rows of the table of a figure's values."""
MOST_QUOTED = 12
"""Most sentences for a paper in the page."""
MOST_PICTURED = 900_000
"""Bytes of the images in the page: those of the first figures. The others lie beside it."""


def write_report(
    path: Path | str, out: Path | str | None = None, *, plugin: str | None = None, target: float | None = None
) -> Path:
    """Write the report on all runs at or below `path` to `out` (default: `<path>/report`); returns its
    `index.html`. For `plugin` see `load`. `target`: the test accuracy that times and energies to an accuracy are told
    for, above 0 and up to 1; None: each group's own.

    An older report there is replaced at the end, in one step. Raises `ConfigError` where there is nothing to
    report or `out` holds something else, `StorageError` where it can't be written.
    """
    require_accuracy(target)
    return write_report_of(replace(load(path, plugin=plugin), target=target), out)


def write_report_of(runs: Runs, out: Path | str | None = None) -> Path:
    """The same of runs that are loaded already."""
    require_figures()
    require_finished(runs)
    final = Path(out).expanduser() if out is not None else runs.root / "report"
    _require_replaceable(final)
    temporary = final.with_name(f".{final.name}.{uuid.uuid4().hex}.tmp")
    with storage_errors(final, option="--out DIR"), _without_search_for_cycles():
        try:
            (temporary / "figures").mkdir(parents=True)
            (temporary / "tables").mkdir()
            with Pictures() as pictures:
                figures, asked = [], {}
                for each in drawn(runs):
                    figures.append(each)
                    if each.chart is not None:
                        asked[each.name] = pictures.draw(captioned(each.chart))
                _write_tables(runs, temporary / "tables")
                images = {name: in_windows(runs, image.result()) for name, image in asked.items()}
            for name, image in images.items():
                (temporary / "figures" / f"{name}.svg").write_text(image, encoding="utf-8")
            files = sorted(path.name for path in (temporary / "tables").iterdir() if path.suffix != ".tex")
            (temporary / "index.html").write_text(redacted(render(runs, figures, images, files)), encoding="utf-8")
            _swap(temporary, final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return final / "index.html"


@contextmanager
def _without_search_for_cycles() -> Iterator[None]:
    """A report makes millions of small objects that live to its end: of ten thousand runs, searching them for cycles
    over and over took 15 % of the processor time, and saved 3 % of the memory.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _require_replaceable(final: Path) -> None:
    if not final.exists():
        return
    page = final / "index.html"
    ours = page.is_file() and GENERATOR in page.read_text(encoding="utf-8", errors="replace")[:2000]
    if not (final.is_dir() and (ours or not any(final.iterdir()))):
        raise ConfigError(f"{final} is not a report and would be replaced: choose another folder with --out DIR")


def _swap(temporary: Path, final: Path) -> None:
    """Replace the old report by the new one; the old one is deleted last."""
    old = final.with_name(f".{final.name}.{uuid.uuid4().hex}.old")
    if final.exists():
        os.rename(final, old)
    try:
        os.rename(temporary, final)
    except OSError:
        if old.exists():
            os.rename(old, final)
        raise
    shutil.rmtree(old, ignore_errors=True)


def script_json(value: Any) -> str:
    """JSON that can't end the script element around it."""
    return json.dumps(value).replace("<", "\\u003c")


def tables(runs: Runs) -> Iterator[Table]:
    """All that are written."""
    yield Table("configurations", summary(runs), sentence.captioned(runs))
    yield Table("pairs", of_equal_devices(runs))
    yield publication.accuracy_table(publication.accuracies(runs))
    yield publication.experiment_table(publication.experiment(runs))
    yield publication.hyperparameter_table(publication.hyperparameters(runs))
    if is_reproduction(runs):
        yield claims.table(claims.judged(runs))
    yield Table("runs", facts(runs).drop("config_json", "environment_json"))
    names = ("table", "column", "unit", "meaning")
    columns = [(table, c.name, c.unit, c.doc) for table, listed in tables_columns().items() for c in listed]
    yield Table("columns", pl.DataFrame(columns, dict.fromkeys(names, pl.String), orient="row"))


def _write_tables(runs: Runs, folder: Path) -> None:
    for table in tables(runs):
        table.write(folder)
    epochs = per_epoch(runs)
    if epochs.height <= MOST_EPOCHS:
        Table("epochs", epochs).write(folder)
    else:
        epochs.write_parquet(folder / "epochs.parquet")


def render(runs: Runs, figures: Sequence[Figure], images: Mapping[str, str], files: Sequence[str] = ()) -> str:
    """The page. `images`: name of a figure with a chart → its SVG; `files`: names of the tables beside it."""
    import jinja2

    templates = Path(__file__).parent / "templates"
    pages = jinja2.Environment(loader=jinja2.FileSystemLoader(templates), autoescape=True, trim_blocks=True)
    pages.filters["windows"] = partial(in_windows, runs)
    return pages.get_template("report.html.j2").render(
        generator=GENERATOR,
        title=" + ".join(sorted(set(runs.run["sweep"]))),
        answers=answers.first_screen(runs),
        paper=answers.PAPER,
        trust=answers.TRUST,
        quotes=_quotes(runs),
        programs=bool(facts(runs).select(IS_PROGRAM.any()).item()),
        all_programs=bool(facts(runs).select(IS_PROGRAM.all()).item()),
        matrix=matrix(runs),
        warnings=warnings.warnings(runs),
        not_runs=warnings.not_runs(runs),
        measured=_measured(runs),
        files=files,
        **_figures(figures, images),
        configurations=_table(summary(runs), "configurations"),
        energy=_table(with_energy(summary(runs)), "energy"),
        pairs=_pairs(of_equal_devices(runs)),
        pairs_target=None if runs.target is None else text.accuracy(runs.target),
        **_runs_table(facts(runs)),
        **_filters(facts(runs)),
        explained=explained_columns(),
        accuracies=publication.accuracies_side_by_side(publication.accuracies(runs)),
        accuracies_caption=publication.ACCURACIES_CAPTION,
        experiment=publication.experiment(runs),
        reproduction=is_reproduction(runs),
        claims_at_a_glance=claims.at_a_glance(judgements := claims.judged(runs)),
        claims=claims.shown(judgements),
        claims_summed_up=claims.summed_up(judgements, runs.root),
        hyperparameters=publication.hyperparameters(runs),
        environment={name: _few_values(values) for name, values in environment(runs).items()},
        css=(templates / "report.css").read_text(encoding="utf-8"),
        script=(templates / "report.js").read_text(encoding="utf-8"),
    )


class Quotes(NamedTuple):
    """What may be written in a paper: see `analysis.report.sentence`."""

    first: str
    """Stands on the first screen itself."""
    sentences: list[str]
    """The others."""
    left: int
    """Sentences that only `report --sentence` prints."""
    latex: str


def _quotes(runs: Runs) -> Quotes | None:
    """None where these runs support no sentence."""
    known = answers.quotable(runs)
    shown = known[:MOST_QUOTED]
    return Quotes(shown[0], shown[1:], len(known) - len(shown), sentence.latex_table(runs)) if known else None


_MOST_ENTRIES = 4
"""Most values of an entry of the environment."""


def _few_values(values: Sequence[str]) -> list[str]:
    """Without decimals that nobody reads; of very many, the first, or the least and the most of numbers."""
    numbers = [float(value) for value in values if re.fullmatch(r"-?\d+(\.\d+)?", value)]
    if len(numbers) == len(values) > _MOST_ENTRIES:
        return [f"{text.number(min(numbers))} to {text.number(max(numbers))} ({len(values)} values)"]
    rounded = [f"{float(value):.3g}" if re.fullmatch(r"-?\d+\.\d{5,}", value) else value for value in values]
    more = len(values) - _MOST_ENTRIES
    return rounded[:_MOST_ENTRIES] + ([f"… {more} more value{'s' if more > 1 else ''}"] if more > 0 else [])


def _runs_table(rows: pl.DataFrame) -> dict[str, Any]:
    """The table of runs with its caption. Of very many runs, excluded ones come first."""
    most, every = MOST_ROWS["runs"], rows
    caption = "Every run with its outcome and, if it is excluded, the reason."
    if rows.height > most:
        # Choose excluded runs first; then restore the order of the table of configurations.
        first = rows.with_row_index("place").sort(pl.col("exclusion").is_null(), maintain_order=True).head(most)
        caption = (
            f"{most} of {rows.height:,} runs, excluded ones first, with the outcome and the reason. "
            "The others are in the file."
        )
        rows = first.sort("place")
    return {"runs": _table(rows, "runs", every=every), "runs_caption": caption, "long": rows.height > MOST_ON_PAPER}


def _filters(rows: pl.DataFrame) -> dict[str, Any]:
    """The page's filters: the values to choose from, and each configuration's values."""
    columns = rows.select("group", "configuration", *(pl.col(name).cast(pl.String) for name in FILTERS))
    index = columns.unique(maintain_order=True)
    choices = {name: list(index[name].unique(maintain_order=True)) for name in FILTERS}
    choices["devices"].sort(key=int)
    return {
        "choices": {name: values for name, values in choices.items() if len(values) > 1},
        "index": script_json(index.to_dicts()),
    }


ANSWERS = ("runtime", "scaling", "memory", "accuracy")
"""The figures that stand open, the first one beside the answers: how fast, how it scales, what it takes, what it
learns. The others are a click away."""


class Values(NamedTuple):
    """A figure's numbers as a table of the page, by kind of work: for readers of screens, and to copy."""

    columns: list[str]
    numeric: list[bool]
    groups: list[tuple[str | None, list[tuple[str | None, list[str]]]]]
    """Name of the group, if rows have one → configuration and cells of each row."""
    shown: int
    known: int


class PageFigure(NamedTuple):
    """A figure of the page: what it shows in words, the image, and the numbers."""

    name: str
    title: str
    caption: str
    more: str
    """What is folded of its caption."""
    image: str
    """Markup; empty: it lies beside the page."""
    values: Values | None


def _figures(figures: Sequence[Figure], images: Mapping[str, str]) -> dict[str, list[PageFigure] | list[Figure]]:
    """The picture beside the answers, the figures that stand open, the folded ones, and those without a chart."""
    charts = [each for each in figures if each.chart is not None]
    answers = [each for each in charts if each.name in ANSWERS] or charts[:1]
    folded = [each for each in charts if each not in answers]
    shown: list[PageFigure] = []
    left = MOST_PICTURED
    for each in (*answers, *folded):
        is_known = each.name in images and left > 0
        image = inlined(images[each.name], each.name, labelled_by=f"{each.name}-title") if is_known else ""
        if len(image) > left and shown:
            image, left = "", 0
        left -= len(image)
        shown.append(_on_page(each, image))
    return {
        "picture": shown[:1],
        "figures": shown[1 : len(answers)],
        "folded": shown[len(answers) :],
        "not_drawn": [each for each in figures if each.chart is None],
    }


def _on_page(figure: Figure, image: str) -> PageFigure:
    lines = figure.finding.splitlines()
    first, rest = lines[: 2 if figure.remark else 1], lines[2 if figure.remark else 1 :]
    # What withdraws a ranking stands beside it.
    caption = "\n".join([*first, *(line for line in rest if NOT_RANKED in line)])
    more = "\n".join(line for line in rest if NOT_RANKED not in line)
    table = None if figure.values is None else _values(figure.values)
    return PageFigure(figure.name, figure.title, caption, more, image, table)


def _values(frame: pl.DataFrame) -> Values:
    names = [name for name in frame.columns if name != "group" and frame[name].count()]
    groups: dict[str | None, list[tuple[str | None, list[str]]]] = defaultdict(list)
    for row in frame.head(MOST_VALUES).iter_rows(named=True):
        groups[row.get("group")].append((row.get("configuration"), [_plainly(row[name]) for name in names]))
    numeric = [frame.schema[name].is_numeric() for name in names]
    columns = [name.replace("_", " ") for name in names]
    return Values(columns, numeric, list(groups.items()), min(frame.height, MOST_VALUES), frame.height)


def _plainly(value: Any) -> str:
    """A measured number with three digits, a count with all, words as they are."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return text.number(value) if isinstance(value, float) or value is None else str(value)


class PageTable(NamedTuple):
    """A table of the page: its columns tell rows apart; what is the same in every row stands below, once, and so does
    what no row has.
    """

    columns: list[Column]
    groups: list[tuple[str, list[Shown]]]
    alike: list[Cell]
    missing: list[Column]
    left: int
    """Rows that only the file has."""


ALWAYS = ("configuration", "slug", "repeats", "outcome", "steady_epoch_time_s", "speed_up", "verdict", "other")
"""Columns that a table of the page shows even where all rows are alike, as far as they have any value."""


def _table(
    rows: pl.DataFrame, table: Place, *, every: pl.DataFrame | None = None, first: tuple[Column, ...] = ()
) -> PageTable:
    """`every`: the rows of which these are some; `first`: columns of the page alone, before the others."""
    columns = (*first, *_columns(rows if every is None else every, table))
    left = max(0, rows.height - MOST_ROWS[table])
    rows = rows.head(MOST_ROWS[table])
    groups = _grouped(rows, columns)
    of_rows = [row.cells for _, members in groups for row in members]
    told = [n for n, c in enumerate(columns) if _tells(rows, c, {row[n].shown for row in of_rows})]
    rest = [cell for n, cell in enumerate(of_rows[0]) if n not in told] if of_rows else []
    alike = [cell for cell in rest if cell.shown != text.MISSING]
    missing = [cell.column for cell in rest if cell.shown == text.MISSING]
    shown = [
        (group, [Shown(row.configuration, [row.cells[n] for n in told]) for row in members])
        for group, members in groups
    ]
    return PageTable([columns[n] for n in told], shown, alike, missing, left)


def _tells(rows: pl.DataFrame, column: Column, shown: set[str]) -> bool:
    """Whether a column tells rows apart; of a single row, whether it holds anything."""
    return len(shown) > 1 or (rows[column.name].count() > 0 and (column.name in ALWAYS or rows.height == 1))


def _columns(rows: pl.DataFrame, table: Place) -> tuple[Column, ...]:
    """Those that the table shows."""
    columns = page_columns(table)
    if table == "configurations" and (rows["strategy"] == PROGRAM).all():  # of windows, steps are what readers know
        step = next(column for column in summary_columns() if column.name == "steady_step_time_s")
        columns = tuple(step if column.name == "steady_epoch_time_s" else column for column in columns)
    return tuple(column for column in columns if not column.where_known or rows[column.name].count())


_FOUND = Column("found", "what the repeats of the two say of their speeds", type="string", heading="Speed")
_SIDES = ("device_hours", "cost", "co2_g")
"""Columns of pairs that both sides have, the other one's with `other_` before the name."""
_OPPOSITE = {SpeedVerdict.SLOWER.value: SpeedVerdict.FASTER.value, SpeedVerdict.FASTER.value: SpeedVerdict.SLOWER.value}


def _pairs(rows: pl.DataFrame) -> PageTable:
    """The pairs as sentences, of each the one first that seems to be the faster."""
    ordered = [_faster_first(row) for row in rows.to_dicts()]
    told = pl.Series("found", [_of_pair(row) for row in ordered], dtype=pl.String)
    frame = pl.DataFrame(ordered, schema=rows.schema, orient="row").with_columns(told)
    return _table(frame, "pairs", first=(_FOUND,))


def _faster_first(row: dict[str, Any]) -> dict[str, Any]:
    """A row of the pairs, whose ratios are the other's over the configuration's, as the first's over the second's; the
    first is the one that seems to be the faster.
    """
    if row["speed_ratio"] is not None and row["speed_ratio"] >= 1:
        turned = {"configuration": row["other"], "other": row["configuration"]}
        turned |= {name: row[f"other_{name}"] for name in _SIDES} | {f"other_{name}": row[name] for name in _SIDES}
        return row | turned
    inverse = {"verdict": _OPPOSITE.get(row["verdict"], row["verdict"])}
    for name in ("speed_ratio", "energy_ratio"):
        for end, of in (("", ""), ("_low", "_high"), ("_high", "_low")):
            value = row[f"{name}{of}"]
            inverse[f"{name}{end}"] = 1 / value if value else None
    return row | inverse


def _of_pair(row: dict[str, Any]) -> str:
    """ "zero1 × 4 is 1.25 times as fast as ddp × 4 (95 % interval 1.22–1.28)"."""
    first, second = row["configuration"], row["other"]
    ratio, low, high = (row[f"speed_ratio{end}"] for end in ("", "_low", "_high"))
    if ratio is None:
        return f"{first} and {second}: {row['verdict']}"
    interval = "" if low is None else f" ({text.interval_of_95(low, high)})"
    times = f"{text.estimate(ratio, low, high)} times as fast"
    if row["verdict"] in _OPPOSITE:
        return f"{first} is {times} as {second}{interval}"
    return f"{row['verdict']}: {first} seems {times} as {second}{interval}"


def _grouped(rows: pl.DataFrame, columns: tuple[Column, ...]) -> list[tuple[str, list[Shown]]]:
    groups: dict[str, list[Shown]] = defaultdict(list)
    for row in rows.iter_rows(named=True):
        groups[row["group"]].append(Shown(row["configuration"], cells(row, columns)))
    return list(groups.items())


def _measured(runs: Runs) -> str:
    """On what the runs were measured, how many count, why the others don't, and on which days."""
    reasons = Counter(facts(runs).select(_in_words()).to_series())
    counting = reasons.pop(None, 0)
    told = [f"{counting} count{'s' if counting == 1 else ''}"]
    told += [f"{count} {reason}" for reason, count in sorted(reasons.items())]
    low, high = runs.epochs.select(low=pl.col("finished_at").min(), high=pl.col("finished_at").max()).row(0)
    days = sorted({datetime.fromtimestamp(t, tz=UTC).strftime("%Y-%m-%d") for t in (low, high) if t is not None})
    when = f"; measured {' to '.join(days)} (UTC)" if days else ""
    names, devices = (runs.run[key].drop_nulls().unique().sort().to_list() for key in ("device_name", "devices"))
    on = f" on {text.listed(names)}, {'up to ' if len(devices) > 1 else ''}{count_of(devices[-1], 'device')}"
    return f"{count_of(runs.run.height, 'run')}{on if names else ''}: {', '.join(told)}{when}"


class Glance(NamedTuple):
    """A verdict beside the baseline, or why no run counts; all empty where there is no such configuration."""

    verdict: str = ""
    speed_up: str = ""
    interval: str = ""
    memory: str = ""
    """How many of its runs were out of memory, or how little of it they left."""

    @property
    def mark(self) -> str:
        """Stands for a verdict that says nothing of the speed, and that many cells may share."""
        return _MARKS.get(self.verdict, "")


_MARKS = {SpeedVerdict.TOO_FEW.value: "†", SpeedVerdict.NOT_INTERLEAVED.value: "‡"}
_MEANT = {
    "†": "too few repeats for an interval",
    "‡": "not interleaved: measured apart from the baseline, no interval",
}


class Matrix(NamedTuple):
    """Groups of like work against configurations: whichever are fewer are the columns."""

    over: str
    """What their verdicts are beside."""
    alike: str
    """What all groups have in common; their labels say the rest."""
    columns: list[str]
    rows: list[tuple[str, list[Glance]]]

    @property
    def meant(self) -> list[str]:
        """What the marks of its cells mean."""
        marks = {cell.mark for _, cells in self.rows for cell in cells}
        return [f"{mark} {words}" for mark, words in _MEANT.items() if mark in marks]


def matrix(runs: Runs) -> Matrix | None:
    """The verdicts of all groups; None where one group alone has any, as sentences say it better.

    Columns of configurations begin with most devices: a phone shows a few. What most are not compared with, names say.
    """
    rows = _glances(runs)
    axes = {"group": [natural("group")], "configuration": [pl.col("devices"), natural("configuration")]}
    names = {axis: rows.sort(order)[axis].unique(maintain_order=True).to_list() for axis, order in axes.items()}
    if len(names["group"]) < 2:
        return None
    down, across = sorted(names, key=lambda axis: -len(names[axis]))
    if across == "configuration":
        names[across].sort(key=dict(rows.select(across, -pl.col("devices")).rows()).__getitem__)
    alike, labels = _told_apart(names["group"])
    over = baseline_in_words(runs)
    labels |= _beside_others(rows, over)
    cells = {(row[down], row[across]): _cell(row) for row in rows.iter_rows(named=True)}
    return Matrix(
        over,
        alike,
        [labels.get(name, name) for name in names[across]],
        [
            (labels.get(name, name), [cells.get((name, other), Glance()) for other in names[across]])
            for name in names[down]
        ],
    )


def _beside_others(rows: pl.DataFrame, over: str) -> dict[str, str]:
    """Labels of configurations whose baseline is another one than the heading says: that of another framework, or any,
    where the heading says "the baseline".
    """
    is_other = (pl.col("framework") != "torch") | pl.lit(over == in_words(None))
    of = rows.drop_nulls("baseline").filter(is_other).group_by("configuration").agg(pl.col("baseline").unique())
    return {name: f"{name} (beside {ones[0]})" for name, ones in of.rows() if len(ones) == 1}


def _glances(runs: Runs) -> pl.DataFrame:
    """The rows of `summary` that have a verdict beside others; where no run counts, it says why."""
    keys = ("group", "configuration")
    why = facts(runs).group_by(keys).agg(why=_in_words().unique(maintain_order=True).str.join(", "))
    told = pl.coalesce("verdict", pl.when(pl.col("repeats") == 0).then("why"))
    rows = summary(runs).join(why, on=keys, maintain_order="left").with_columns(verdict=told)
    return rows.filter(pl.col("verdict").is_not_null(), pl.col("verdict") != SpeedVerdict.BASELINE.value)


_IN_WORDS = {Exclusion.OOM.value: "out of memory", Exclusion.PARITY_FAILED.value: "parity failed"}
"""Reasons of which the value in tables is no English."""


def _in_words() -> pl.Expr:
    """Why a run doesn't count."""
    words: pl.Expr = pl.col("exclusion").replace_strict(_IN_WORDS, default=pl.col("exclusion"))
    return words


def _told_apart(groups: list[str]) -> tuple[str, dict[str, str]]:
    """What all labels of groups have in common, and each label without it."""
    parts = {group: group.split(" · ") for group in groups}
    alike = [part for part in parts[groups[0]] if all(part in others for others in parts.values())]
    rest = {group: " · ".join(part for part in own if part not in alike) for group, own in parts.items()}
    return (" · ".join(alike), rest) if all(rest.values()) else ("", {})


def _cell(row: dict[str, Any]) -> Glance:
    low, high = row["speed_up_low"], row["speed_up_high"]
    speed_up = "" if row["speed_up"] is None else f"{text.estimate(row['speed_up'], low, high)} ×"
    return Glance(row["verdict"], speed_up, "" if low is None else text.interval_of_95(low, high), _memory(row))


def _memory(row: dict[str, Any]) -> str:
    if failed := row["oom_runs"]:
        what = "" if row["verdict"] == _IN_WORDS[Exclusion.OOM.value] else "out of memory "
        return f"{what}in {failed} of {failed + row['repeats']}"
    left = row["memory_headroom"]
    return f"{text.percent(left)} of memory left" if left is not None and left < SMALL_HEADROOM else ""
