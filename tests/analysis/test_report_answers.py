"""What a report answers at full size: verdicts at a glance, claims, panels in order, sentences that say something."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import pytest

from analysis import load, text, write_report
from analysis.claims import judge
from analysis.claims.table import effect_of
from analysis.comparison.configurations import facts
from analysis.comparison.exclusions import disturbed_lines
from analysis.comparison.work import work_label
from analysis.figures import draw, models
from analysis.figures.curves import loss
from analysis.metrics.runs import computation_per_communication
from analysis.report import notes
from analysis.report import page as page_module
from analysis.report.claims import MOST_ROWS, by_publication, shown, summed_up, table
from analysis.report.page import matrix
from parallelbench.cli import main
from tests.analysis.factory import Fake, config, published
from tests.analysis.test_claims import REPEATS, WOBBLE, claim, steady
from tests.analysis.test_machine import lost, sides


def plant(root: Path, times: dict[tuple[str, int], float], **work: Any) -> None:
    """Six repeats on each of these (strategy, devices), with their time per epoch."""
    for repeat in REPEATS:
        for (strategy, devices), time_s in times.items():
            run = config(root, repeat=repeat, strategy=strategy, devices=devices, **work)
            published(run, steady(time_s * WOBBLE[(repeat + devices) % 6]))


@pytest.mark.exhaustive
def test_the_verdicts_of_several_works_are_one_matrix(tmp_path: Path) -> None:
    plant(tmp_path, {("single", 1): 10.0, ("ddp", 2): 6.0, ("ddp", 4): 4.0}, batch_size=128)
    assert matrix(load(tmp_path)) is None, "of one work, sentences say it"
    plant(tmp_path, {("single", 1): 10.0, ("ddp", 2): 15.0}, batch_size=64)
    found = matrix(load(tmp_path))
    assert found is not None
    assert (found.columns, found.omitted) == (["ddp × 2", "ddp × 4"], 0)
    verdicts = {group: [cell.verdict for cell in cells] for group, cells in found.rows}
    assert verdicts == {
        "digits · cnn_small · batch size 64": ["slower", ""],
        "digits · cnn_small · batch size 128": ["faster", "faster"],
    }
    assert [group for group, _ in found.rows] == list(verdicts), "numbers sort as numbers"
    assert found.rows[0][1][0].speed_up == "0.67 ×"
    told = notes.headline(load(tmp_path))
    assert told[0] == "Beside one device, over 2 kinds of work and 3 configurations: 2 faster, 1 slower."
    assert [line.partition(" (")[0] for line in told[1:3]] == ["ddp × 4", "ddp × 2"]
    runs = sides(tmp_path, {}, {"others_time_s": lost(0.48, {2, 3})}, batch_size=32)
    (disturbed,) = disturbed_lines(runs)
    assert disturbed in notes.headline(runs), "also where configurations are counted"


def test_epochs_sort_as_numbers(tmp_path: Path) -> None:
    for epochs in (100, 10, 30):
        published(config(tmp_path, epochs=epochs, measure={"steps_per_epoch": 1}), Fake())
    groups = facts(load(tmp_path))["group"].to_list()
    assert groups == [f"digits · cnn_small · epochs {epochs}" for epochs in (10, 30, 100)]


@pytest.mark.slow
def test_models_tell_two_devices_from_four(tmp_path: Path) -> None:
    for model in ("cnn_small", "cnn_large"):
        for strategy, devices in (("single", 1), ("ddp", 2), ("ddp", 4)):
            work = {"data": "mnist", "model": model, "strategy": strategy, "devices": devices}
            published(config(tmp_path, **work), Fake(parameters=10**6 if model == "cnn_large" else 10**5))
    chart = models.figure(load(tmp_path))
    assert chart is not None
    scale = chart.to_dict()["spec"]["layer"][1]["encoding"]["shape"]["scale"]
    shapes = dict(zip(scale["domain"], scale["range"], strict=True))
    assert len(set(shapes.values())) == 3
    assert shapes.keys() == {"single × 1", "ddp × 2", "ddp × 4"}


def test_the_loss_is_told_by_configuration_and_says_nothing_twice(tmp_path: Path) -> None:
    for strategy, devices, last in (("single", 1, 0.1320001), ("ddp", 2, 0.1320002)):
        course = {1: 2.0 * devices, 2: 1.0, 3: last}
        published(
            config(tmp_path, strategy=strategy, devices=devices, repeat=devices),  # another seed: nobody's counterpart
            Fake(test_loss=lambda epoch, course=course: course[epoch]),  # type: ignore[misc]
        )
    assert loss.finding(load(tmp_path)) == (
        "Median test loss is 2.00 to 4.00 after epoch 1 and 0.132 after the last, by configuration."
    )


@pytest.mark.exhaustive
def test_an_efficiency_has_its_interval_and_its_verdict(tmp_path: Path) -> None:
    noisy = (1.3, 0.75, 1.1, 0.9, 1.2, 0.8)
    for repeat in REPEATS:
        published(config(tmp_path, repeat=repeat), steady(10.0))
        published(config(tmp_path, repeat=repeat, strategy="ddp", devices=2), steady(10.0 * noisy[repeat]))
    (figure,) = draw(load(tmp_path), ["scaling"])
    assert " % in steady state (" in figure.finding.replace("\u202f", " ")
    assert "; beside one device no difference shown)" in figure.finding


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [(0.9, 1.2, "1.00 (0.90–1.20)"), (1e-5, 141220.16, "1.00 (interval wider than a factor of 100)")],
)
def test_an_interval_that_says_nothing_is_not_printed(low: float, high: float, words: str) -> None:
    assert text.interval(1.0, low, high) == words


@pytest.mark.exhaustive
def test_ends_that_say_nothing_are_printed_nowhere(tmp_path: Path) -> None:
    """Neither in the headline, nor at a glance, nor below a figure, nor beside a claim."""
    for model in ("cnn_small", "mlp"):
        for repeat, factor in enumerate((1.0, 20.0, 0.05)):
            published(config(tmp_path, model=model, repeat=repeat), steady(10.0))
            published(config(tmp_path, model=model, repeat=repeat, strategy="ddp", devices=2), steady(10.0 * factor))
    runs, wide = load(tmp_path), "interval wider than a factor of 100"
    glances = matrix(runs)
    assert glances is not None
    assert {cell.interval for _, cells in glances.rows for cell in cells} == {f"95 % {wide}"}
    assert all(f"({f'95 % {wide}'}, 3 repeats)" in line for line in notes.headline(runs))
    (figure,) = draw(runs, ["scaling"])
    assert f"({wide}; beside one device no difference shown)" in figure.finding
    asked = claim(
        contrasts=[{"from": {"strategy": "single", "devices": 1}, "to": {"strategy": "ddp", "devices": 2}}],
        expect={"above": 1},
    )
    effects = [effect_of(case, asked) for case in judge(runs, asked, seed="0").cases]
    assert len(effects) == 2
    assert all(f" ({wide}), 3 repeats: " in words for words in effects)


@pytest.mark.slow
def test_what_is_true_of_several_works_is_one_warning(tmp_path: Path) -> None:
    """Samples that no batch holds, no run of one device, one that was measured with another torch."""
    apart, without = tmp_path / "apart", tmp_path / "without"
    older = Fake().environment.replace("2.15.0", "2.14.0")
    for model in ("cnn_small", "mlp"):
        for root in (apart, without):
            published(config(root, model=model, strategy="ddp", devices=2), Fake())
        published(config(apart, model=model), Fake(environment=older))
    told = notes.warnings(load(without))
    both = "digits · cnn_small; and digits · mlp"
    assert sum(line.startswith(f"No speed-up for {both}: no counted run") for line in told) == 1
    assert sum(f"(they fill no global batch, or the epoch was cut short): {both}." in line for line in told) == 1
    assert not [line for line in told if "digits · mlp" in line and both not in line]
    refused = [line for line in notes.warnings(load(apart)) if "can't be compared with single × 1" in line]
    assert [line.partition(" can't")[0] for line in refused] == [f"ddp × 2 ({both})"]


def test_computation_for_each_second_of_communication(tmp_path: Path) -> None:
    """Two ranks, two steps: 12 s of forward and backward each, and 0, 0, 4 and 8 s of communication."""
    busy = {"data_wait": 1.0, "forward": 4.0, "backward": 8.0}
    fake = Fake(phases=lambda rank, step: busy | {"communication": 4.0 * rank * step})
    published(config(tmp_path, devices=2, strategy="ddp"), fake)
    published(config(tmp_path), Fake(phases=lambda rank, step: busy))
    (found,) = computation_per_communication(load(tmp_path))["computation_per_communication"]
    assert found == pytest.approx(4 * 12 / (4 + 8))


@pytest.mark.exhaustive
def test_a_claim_about_computation_and_communication_is_decided(tmp_path: Path) -> None:
    for repeat in REPEATS:
        for model, forward in (("cnn_small", 1.0), ("cnn_large", 5.0)):
            times = {"forward": forward, "backward": 1.0, "communication": 1.0 + repeat / 100}
            run = config(tmp_path, repeat=repeat, data="mnist", model=model, strategy="ddp", devices=2)
            published(run, Fake(phases=lambda rank, step, times=times: times))  # type: ignore[misc]
    asked = claim(
        metric="computation_per_communication",
        contrasts=[{"from": {"model": "cnn_small"}, "to": {"model": "cnn_large"}}],
        expect={"above": 1, "by": 0.02},
    )
    finding = judge(load(tmp_path), asked, seed="0")
    assert (finding.verdict, finding.cases[0].median) == ("reproduced", pytest.approx(3.0))


@pytest.mark.exhaustive
def test_claims_are_rows_of_the_page_the_csv_file_and_the_latex_table(tmp_path: Path) -> None:
    plant(tmp_path, {("single", 1): 10.0, ("ddp", 2): 6.0})
    runs = load(tmp_path)
    inside = judge(runs, claim(), seed="007")
    elsewhere = judge(runs, claim(name="other", scope={"data": "mnist"}), seed="007")
    rows = shown([elsewhere, inside])
    assert [(row.name, row.verdict, row.elsewhere) for row in rows] == [
        ("shorter", "reproduced", ""),
        ("other", "", "reproduced"),
    ]
    foreign = judge(runs, claim(name="other", scope={"data": "mnist"}), seed="008")
    parts = by_publication(shown([elsewhere, inside, foreign]))
    assert [[(row.publication, row.name) for row in part] for part in parts] == [
        [("007", "shorter"), ("007", "other")],
        [("008", "other")],
    ]
    assert summed_up([elsewhere, inside]) == (
        "Of 2 claims: 1 reproduced, 0 refuted, 0 inconclusive; 1 measured elsewhere only, on runs that are not the "
        "publications'."
    )
    cells = table([inside, elsewhere]).rows.select("claim", "verdict", "runs", "outside", "finding").rows()
    assert cells == [
        ("shorter", "reproduced", "the publication's", "", "reproduced"),
        ("other", "inconclusive", "elsewhere", "data=digits", "reproduced"),
    ]
    latex = table([inside, elsewhere]).latex
    assert "007 shorter & reproduced & 0.6" in latex
    assert "other" not in latex
    assert r"their own runs}\label{tab:claims-1}" in latex
    assert table([elsewhere]).latex.count("table") == 0, "nothing was decided"
    many = table([inside] * (2 * MOST_ROWS + 1)).latex.split(r"\end{table}")[:-1]
    assert [part.count("007 shorter") for part in many] == [MOST_ROWS, MOST_ROWS, 1], "no table is longer than a page"
    for number, part in enumerate(many, 1):
        assert rf"their own runs ({number} of 3)}}\label{{tab:claims-{number}}}" in part


@pytest.mark.exhaustive
def test_the_page_has_claims_a_line_for_what_is_not_drawn_and_no_empty_heading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(tmp_path, {("single", 1): 10.0, ("ddp", 2): 6.0})
    monkeypatch.setattr(page_module, "draw", lambda runs: draw(runs, ["staleness", "energy", "loss"]))
    page = write_report(tmp_path / "demo").read_text(encoding="utf-8")
    assert page.count('<figure id="figure-') == 1
    assert 'id="figure-loss"' in page
    told = page.partition('id="not-drawn"')[2].partition("</ul>")[0]
    assert "No run that counts pushed to a parameter server" in told
    assert "No run that counts measured the energy of its GPUs" in told
    assert "elsewhere, with model=cnn_small data=digits device_type=cpu (demo)" in page
    with (tmp_path / "demo" / "report" / "tables" / "claims.csv").open(encoding="utf-8") as file:
        found = {row["claim"]: row for row in csv.DictReader(file) if row["runs"] == "elsewhere"}
    assert found["sequential_training_slowest"]["finding"] == "reproduced"
    assert (tmp_path / "demo" / "report" / "tables" / "claims.tex").read_text().startswith("% Needs")


@pytest.mark.exhaustive
def test_the_terminal_tells_the_answers_before_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plant(tmp_path / "demo", {("single", 1): 10.0, ("ddp", 2): 6.0})
    assert main(["report", str(tmp_path / "demo")]) == 0
    told = capsys.readouterr().out
    answer, rest = told.index("ddp × 2 trains an epoch"), told.index("configuration")
    assert told.lstrip().startswith("ddp × 2 trains an epoch 1.67 times as fast as one device")
    assert answer < rest


def test_a_group_says_once_what_two_keys_say() -> None:
    work = {"data.name": "tokens", "model.name": "gpt", "data.sequence": 256, "model.sequence": 256, "batch_size": 4}
    keys = ["batch_size", "data.sequence", "model.sequence"]
    assert work_label(work, keys) == "tokens · gpt · batch size 4 · sequence 256"
    assert work_label(work | {"model.sequence": 512}, keys).endswith("batch size 4 · sequence 256 · sequence 512")


@pytest.mark.exhaustive
def test_repeats_that_would_decide_do_decide(tmp_path: Path) -> None:
    """One device, and two that are 1.2 times as fast in the middle, by 1.05 and 1.37 in turn."""

    def sentence(repeats: range) -> str:
        for repeat in repeats:
            published(config(tmp_path, repeat=repeat, strategy="single", devices=1), steady(10.0))
            published(config(tmp_path, repeat=repeat, strategy="ddp", devices=2), steady(10 / (1.05, 1.37)[repeat % 2]))
        return notes.answers(load(tmp_path))[0]

    told = sentence(range(4))
    assert told.startswith("ddp × 2: no difference shown: 1.20 times as fast as one device (")
    would = int(re.search(r"(\d+) repeats would decide", told)[1])  # type: ignore[index]
    assert 4 < would < 20
    assert "no difference" in sentence(range(4, would // 2))
    assert sentence(range(would // 2, would)).startswith("ddp × 2 trains an epoch 1.")
