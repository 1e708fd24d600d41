"""One figure for a paper: its size, its panels, and what is said of one that does not exist."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from PIL import Image

from launch.verbs.report import report
from parallelbench.cli import main
from parallelbench.errors import ConfigError
from tests.analysis.factory import Fake, config, published

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models on one device and two, of which cnn_large has fsdp beside ddp."""
    root = tmp_path_factory.mktemp("paper")
    for model, strategies in (("cnn_small", ("ddp",)), ("cnn_large", ("ddp", "fsdp"))):
        for repeat in (0, 1):
            published(config(root, model=model, repeat=repeat))
            for strategy in strategies:
                run = config(root, model=model, strategy=strategy, devices=2, repeat=repeat)
                published(run, Fake(epoch_time_s=lambda epoch, rank: 0.6))
    return root / "demo"


def written(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[Path]:
    assert main(["report", *arguments]) == 0
    lines = capsys.readouterr().out.replace("\n", " \n").split()
    return [Path(line) for line in lines if line.endswith((".pdf", ".svg", ".png"))]


@pytest.mark.cases("175")
@pytest.mark.parametrize("width_mm", [85, 175])
def test_a_figure_is_as_wide_as_a_papers_column(
    sweep: Path, tmp_path: Path, width_mm: int, capsys: pytest.CaptureFixture[str]
) -> None:
    given = (str(sweep), "--figure", "runtime", "--width", str(width_mm), "--out", str(tmp_path))
    pdf, vector, picture = written(capsys, *given)
    (box,) = re.findall(rb"MediaBox ?\[0 0 ([\d.]+) ([\d.]+)\]", pdf.read_bytes())
    assert float(box[0]) == pytest.approx(width_mm / 25.4 * 72, abs=0.2)
    root = ET.parse(vector).getroot()
    assert root.attrib["width"] == f"{width_mm:.2f}mm"
    drawn = [float(size) for size in root.attrib["viewBox"].split()]
    assert float(root.attrib["height"].removesuffix("mm")) == pytest.approx(width_mm * drawn[3] / drawn[2], rel=0.01)
    assert Image.open(picture).width == pytest.approx(width_mm / 25.4 * 300, abs=2)
    points = 12 * width_mm / 25.4 * 72 / drawn[2]
    assert 6.5 < points < 8.5, "the size in which its words are set"


def test_words_choose_panels_and_the_legend_names_what_is_in_them(
    sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = (str(sweep), "--figure", "loss", "--panel", "cnn_small test cnn_small", "--out", str(tmp_path))
    _, vector, _ = written(capsys, *given)
    assert vector.name == "loss-cnn_small-test-85mm.svg"
    words = vector.read_text()
    assert "cnn_small" in words
    assert "Test set" in words
    assert "ddp × 2" in words
    assert not {name for name in ("cnn_large", "while training", "fsdp") if name in words}


@pytest.mark.parametrize(
    ("options", "answer"),
    [
        ({"figure": "runtme"}, "runtme is no figure: did you mean runtime? valid: runtime, "),
        (
            {"figure": "bubble"},
            "bubble can't be drawn from these runs: No configuration that counts runs by a schedule",
        ),
        ({"figure": "loss", "panel": "vit"}, "no panel's heading holds vit: choose words of one of these: "),
        ({"figure": "loss", "panel": ""}, "no panel's heading holds '': choose words of one of these: "),
        ({"figure": "loss", "panel": " · "}, "no panel's heading holds ' · ': choose words of one of these: "),
        ({"panel": "vit"}, "--panel vit is of one figure: name it with --figure NAME"),
        ({"width": 85}, "--width 85 is of one figure: name it with --figure NAME"),
    ],
)
def test_what_does_not_exist_is_answered_by_what_does(sweep: Path, options: dict[str, str], answer: str) -> None:
    from launch.sweep.compose import Extension

    asked: dict = dict.fromkeys(("out", "target", "figure", "panel", "width")) | options
    with pytest.raises(ConfigError, match=re.escape(answer)):
        report(str(sweep), Extension(), **asked)
    assert not (sweep / "paper").exists()
