"""The page of the publications' figures: its pictures are there, and what draws them exists."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from analysis import load
from analysis.comparison.configurations import summary
from analysis.figures import _known
from analysis.report.figure import COLUMN_MM, PAGE_MM
from tests import published_figures as published
from tests import published_pictures as pictures
from tests.analysis.full_sweeps import made_up

ROOT = Path(__file__).resolve().parents[1]


def test_what_draws_them_exists() -> None:
    listed = [picture for figures in published.PUBLICATIONS.values() for each in figures for picture in each.pictures]
    assert len(listed) == len(set(listed)) == len(published.pictures()) > 15
    for picture in listed:
        assert (ROOT / "conf" / "sweep" / f"{picture.sweep}.yaml").is_file()
        assert picture.figure in _known()
        assert picture.width_mm in (COLUMN_MM, PAGE_MM)


def test_each_picture_and_table_of_the_page_is_there_current_and_small() -> None:
    stale = pictures.not_current()
    assert not stale, "run `python -m tests.published_pictures RESULTS`"
    assert {path.name for path in pictures.PICTURES.glob("*.png")} == published.pictures().keys()
    assert {path.name for path in published.TABLES.glob("*.md")} == published.tables().keys()
    for name, picture in published.pictures().items():
        path = pictures.PICTURES / name
        assert path.stat().st_size <= pictures.MOST_BYTES, name
        with Image.open(path) as image:
            inches = picture.width_mm / 25.4
            assert image.width == pytest.approx(pictures.PIXELS_PER_INCH * inches, abs=3)
            assert image.height < 4 * image.width


def test_other_made_up_runs_are_drawn_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = next(iter(published.pictures().values()))
    drawn_from = pictures.source(picture)
    for name in (f"conf/sweep/{picture.sweep}.yaml", *pictures.MADE_UP):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    monkeypatch.setattr(pictures, "ROOT", tmp_path)
    assert pictures.source(picture) == drawn_from
    for name in pictures.MADE_UP:
        before = pictures.source(picture)
        (tmp_path / name).write_text((ROOT / name).read_text() + "\n")
        assert pictures.source(picture) != before


@pytest.mark.slow
@pytest.mark.exhaustive
def test_made_up_runs_on_one_device_are_their_own_baseline(tmp_path: Path) -> None:
    """Of each framework; and all GPUs of a process take power."""
    runs = load(made_up(tmp_path, ["sweep=mnist_two_devices", "sweep.repeats=1", "scaling=weak"]))
    rows = {row["configuration"]: row for row in summary(runs).to_dicts()}
    assert {name for name, row in rows.items() if row["speed_up"] == 1} == {"single × 1", "tf_single × 1"}
    assert rows["ddp × 2"]["speed_up"] > 1.5
    assert rows["tf_mirrored × 2"]["steady_gpu_power_mean_w"] == pytest.approx(
        rows["ddp × 2"]["steady_gpu_power_mean_w"], rel=0.05
    )


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_picture_is_drawn_from_made_up_runs_of_its_sweep(tmp_path: Path) -> None:
    """And from those that are there, once they are."""
    picture = published.Picture("tutorial_mlp", "runtime", width_mm=85, repeats=1)
    (tmp_path / "picture.png").write_bytes(first := pictures.drawn(picture, tmp_path))
    with Image.open(tmp_path / "picture.png") as image:
        assert len(image.convert("RGB").getcolors(10_000)) > 4, "something is on it"
    pictures._runs.cache_clear()
    written = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.parquet")}
    assert written
    assert pictures.drawn(picture, tmp_path) == first
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.parquet")} == written
