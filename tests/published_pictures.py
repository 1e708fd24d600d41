"""The pictures and tables of docs/seed-figures.md: `python -m tests.published_pictures RESULTS` draws those that are
not current.

They are drawn from made-up runs of the full sweeps, which are written below RESULTS where they are not there yet: some
minutes for each sweep. Runs that an older `MADE_UP` wrote stay there, and are not drawn.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import astuple
from functools import cache
from pathlib import Path

from analysis.runs.reader import Runs
from tests.published_figures import FOLDER, TABLES, Picture, Tabled, pictures, tables

ROOT = Path(__file__).resolve().parents[1]
MADE_UP = ("tests/analysis/full_sweeps.py", "tests/analysis/factory.py")
"""What makes up the runs."""
PICTURES = ROOT / "docs" / FOLDER
DRAWN = PICTURES / "drawn.json"
"""Name of a picture → the hash of what it was drawn from, `source`."""
MOST_BYTES = 60_000
PIXELS_PER_INCH = 170
_COLOURS = 256


def source(shown: Picture | Tabled) -> str:
    """Changes with what is drawn, its declaration, its sweep's file and what makes up its runs: then it is drawn again.

    Not with how it is drawn: remove a picture whose figure was changed, and it is drawn again.
    """
    return _digest(json.dumps(astuple(shown)), *_texts(f"conf/sweep/{shown.sweep}.yaml", *MADE_UP))


def _texts(*paths: str) -> list[str]:
    return [(ROOT / path).read_text(encoding="utf-8") for path in paths]


def _digest(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def not_current() -> list[str]:
    """The pictures and tables that have to be drawn, or drawn again."""
    known = _known()
    return [name for name, shown in _asked().items() if known.get(name) != source(shown) or not _place(name).exists()]


def _asked() -> dict[str, Picture | Tabled]:
    return {**pictures(), **tables()}


def _place(name: str) -> Path:
    return (TABLES if name.endswith(".md") else PICTURES) / name


def _known() -> dict[str, str]:
    known: dict[str, str] = json.loads(DRAWN.read_text()) if DRAWN.exists() else {}
    return known


def drawn(picture: Picture, results: Path) -> bytes:
    """The picture as PNG, from made-up runs below `results`."""
    import vl_convert
    from PIL import Image

    from analysis.figures import draw
    from analysis.figures.chart import only
    from analysis.report.figure import captioned, fitted

    with only(picture.panel or None):
        (figure,) = draw(_runs(picture.sweep, picture.repeats, results), [picture.figure])
    assert figure.chart is not None, figure.finding
    image = fitted(captioned(figure.chart), width_mm=picture.width_mm)
    large = Image.open(io.BytesIO(vl_convert.svg_to_png(image, ppi=PIXELS_PER_INCH)))
    small = io.BytesIO()
    large.convert("RGB").quantize(_COLOURS).save(small, "PNG", optimize=True)
    return small.getvalue()


def tabulated(table: Tabled, results: Path) -> str:
    """The table as Markdown, from made-up runs below `results`."""
    from analysis.report.publication import accuracies, accuracies_side_by_side, experiment

    runs = _runs(table.sweep, table.repeats, results)
    if table.table == "experiment":
        return _markdown(("Experiment", "Values"), experiment(runs))
    heads = [
        (each, ("Model", "Configuration", *map(_epochs, each.epochs)))
        for each in accuracies_side_by_side(accuracies(runs))
    ]
    return "\n".join(
        f"{each.work}, test accuracy in per cent: mean ± standard deviation over the repeats (how many):\n\n"
        + _markdown(head, [(row.model, row.configuration, *row.cells) for row in each.rows])
        for each, head in heads
    )


def _epochs(count: int) -> str:
    return f"{count} epochs"


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = (head, ["---"] * len(head), *rows)
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


@cache
def _runs(sweep: str, repeats: int, results: Path) -> Runs:
    from analysis import load
    from tests.analysis.full_sweeps import made_up

    return load(made_up(results / _digest(*_texts(*MADE_UP)), [f"sweep={sweep}", f"sweep.repeats={repeats}"]))


def main(results: Path) -> None:
    """Draw what is not current, and remove what the page does not show."""
    for folder in (PICTURES, TABLES):
        folder.mkdir(parents=True, exist_ok=True)
    asked = _asked()
    for name in not_current():
        shown = asked[name]
        image = drawn(shown, results) if isinstance(shown, Picture) else tabulated(shown, results).encode()
        _place(name).write_bytes(image)
        kept = {other: digest for other, digest in _known().items() if other in asked}
        DRAWN.write_text(json.dumps(dict(sorted((kept | {name: source(asked[name])}).items())), indent=1) + "\n")
        print(name, _place(name).stat().st_size, flush=True)
    for stray in {path.name for path in (*PICTURES.glob("*.png"), *TABLES.glob("*.md"))} - asked.keys():
        _place(stray).unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
