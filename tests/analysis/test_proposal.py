"""The page for an allocation, of made-up sweeps whose answers are known by hand."""

from __future__ import annotations

import html
import math
import re
import statistics
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl
import pytest

from analysis import load
from analysis.comparison.issues import FLAGS
from analysis.report.proposal import page_of, write_proposal
from parallelbench import cli
from parallelbench.errors import ConfigError
from tests.analysis.factory import Fake, config, failed, published, steady, words_of
from tests.analysis.made_up import IN_TWO, SINGLE_S, WOBBLE, altered, disturbed, environment, flagged
from tests.program.test_answers import measured
from tests.program.test_answers import runs as programs

if TYPE_CHECKING:
    from analysis.report.proposal import Page
    from analysis.runs.reader import Runs

NASTY = r"50%_$x^{2} & <b>GPU</b> #1 \end{document} ~"


def column(page: Page, table: int, name: str) -> dict[str, str]:
    """ "ddp 2" → the cell of this column, whose heading begins so."""
    head = page.tables[table].head
    (at,) = (n for n, each in enumerate(head) if each.startswith(name))
    who, devices = head.index("Configuration"), head.index("Devices")
    return {f"{row[who]} {row[devices]}": row[at] for row in page.tables[table].rows}


def told(page: Page, name: str) -> str:
    return dict(page.method)[name]


def interval(values: list[float]) -> tuple[float, float, float]:
    """Of six values: t of five degrees of freedom that errs 3.2 · 0.05^1.125 · 6^-1.5 = 0.748625 % is 4.331853."""
    logarithms = sorted(math.log(value) for value in values)
    reach = 4.331853 * statistics.stdev(logarithms) / math.sqrt(6)
    mean = statistics.fmean(logarithms)
    return math.exp(statistics.median(logarithms)), math.exp(mean - reach), math.exp(mean + reach)


def shown(values: list[float]) -> str:
    """Three significant digits of the median and of the ends."""
    middle, low, high = (f"{value:#.3g}".rstrip(".") for value in interval(values))
    return f"{middle} ({low}–{high})"


def test_hours_are_start_up_the_first_epoch_and_the_others_at_the_steady_rate(usual: Runs) -> None:
    """By hand: 2.4 s to the end of the first step, which takes 0.2 s and is in the first epoch, of 20 s; 9 further
    epochs. The parity check of two devices, of 0.6 s, is in no hour.
    """
    page = page_of(usual, epochs=10)
    one = [(2.4 - 0.2 + 20 + 9 * time_s) / 3600 for time_s in SINGLE_S]
    two = [(2.2 + 20 + 9 * time_s / 1.6 * off) / 3600 for time_s, off in zip(SINGLE_S, WOBBLE, strict=True)]
    assert f"{math.sqrt(130.2 * 139.2) / 3600:.4f}" == shown(one).partition(" ")[0] == "0.0374"
    assert column(page, 1, "Wall time, 10 epochs") == {"single 1": shown(one), "ddp 2": shown(two)}
    twice = shown([2 * hours for hours in two])
    assert column(page, 1, "Device-hours, 10 epochs") == {"single 1": shown(one), "ddp 2": twice}
    assert "extrapolated from 4 measured" in page.tables[1].caption
    assert f"10 epochs take {shown(two)} h, {twice} device-hours" in page.lead[0]


def test_a_checkpoint_is_told_of_each_configuration_that_saved_one(usual: Runs) -> None:
    saved = pl.when(pl.col("strategy") == "ddp")
    columns = {"checkpoint_bytes": saved.then(3 * 2**20), "checkpoint_save_s": saved.then(0.25)}
    page = page_of(altered(usual, "run", **columns))
    assert told(page, "Checkpoint") == "3.0 MiB in 0.250\u202fs with ddp × 2, while training stands still"
    assert not any("checkpoint" in line for line in page.unknown)


def test_scaling_has_the_speed_up_of_the_report_with_its_interval(usual: Runs) -> None:
    page = page_of(usual)
    assert column(page, 0, "Speed-up")["ddp 2"] == "1.60 (1.56–1.64)"
    assert column(page, 0, "Efficiency")["ddp 2"] == "80.0 (78.0–82.0) %"
    assert column(page, 0, "Epoch (s)")["single 1"] == shown(list(SINGLE_S))
    assert set(column(page, 0, "Repeats").values()) == {"6"}
    assert "Nodes" not in page.tables[0].head, "all have one"
    assert told(page, "Repeats") == "6 of each configuration, measured in turn with the baseline's"
    assert "extrapolated" not in page.tables[1].caption


def test_memory_is_the_peak_of_the_fullest_device_and_mfu_that_is_unknown_is_named(usual: Runs) -> None:
    page = page_of(usual)
    assert set(column(page, 1, "Memory per process (GiB)").values()) == {f"{500 / 1024:.3f}"}
    assert any("MFU" in line for line in page.unknown)
    assert any("checkpoint: no run saved one" in line and "402,442 parameters" in line for line in page.unknown)


@pytest.mark.parametrize("flag", ["short", "sparse", "from_power"])
def test_energies_that_are_not_to_be_quoted_are_left_out(flag: str, usual: Runs) -> None:
    """300 J of an epoch of 11 batches of 128 samples; those of two devices are flagged."""
    page = page_of(flagged(usual, flag))
    assert column(page, 1, "GPU energy") == {"single 1": f"{300 / 1408:.3f}", "ddp 2": "–"}
    assert f"Without the energies of 1 configuration: {FLAGS[flag]} ({flag})." in page.tables[1].caption
    assert "Without the energies" not in page_of(usual).tables[1].caption


def test_a_start_up_that_nobody_measured_is_left_out_and_named(usual: Runs) -> None:
    page = page_of(altered(usual, "run", startup_s=pl.lit(None, pl.Float64)), epochs=10)
    hours = [(20 + 9 * time_s) / 3600 for time_s in SINGLE_S]
    assert column(page, 1, "Wall time")["single 1"] == shown(hours)
    assert "Without queueing, start-up, evaluation" in page.tables[1].caption


def test_a_start_up_that_is_unknown_in_one_repeat_is_in_no_hour(usual: Runs) -> None:
    """Of two devices; those of one device leave it out, too."""
    lost = IN_TWO & (pl.col("repeat") == 0)
    page = page_of(altered(usual, "run", startup_s=pl.when(~lost).then("startup_s")), epochs=10)
    one = [(20 + 9 * time_s) / 3600 for time_s in SINGLE_S]
    two = [(20 + 9 * time_s / 1.6 * off) / 3600 for time_s, off in zip(SINGLE_S, WOBBLE, strict=True)]
    assert column(page, 1, "Wall time") == {"single 1": shown(one), "ddp 2": shown(two)}
    assert f"10 epochs take {shown(two)} h" in page.lead[0]
    assert "Without queueing, start-up, evaluation" in page.tables[1].caption


@pytest.mark.parametrize(
    ("repeats", "order"),
    [
        (1, "1 of each configuration, 1 configuration of 1 beside one run of the baseline only"),
        (2, "2 of each configuration, measured in turn with the baseline's"),
    ],
)
def test_one_pair_is_not_in_turn(repeats: int, order: str, usual: Runs) -> None:
    few = usual.only(usual.run.filter(pl.col("repeat") < repeats)["run_id"].to_list())
    assert told(page_of(few), "Repeats") == order


def test_sides_that_were_measured_apart_have_no_interval_and_the_page_says_so(usual: Runs) -> None:
    by = pl.when(IN_TWO).then(1e7).otherwise(0.0)
    page = page_of(
        altered(
            usual,
            training_started_at=pl.col("training_started_at") + by,
            training_ended_at=pl.col("training_ended_at") + by,
        )
    )
    assert column(page, 0, "Speed-up")["ddp 2"] == "1.60"
    assert "1 configuration of 1 not measured in turn" in told(page, "Repeats")


def test_speed_ups_over_several_devices_are_over_their_ratio(tmp_path: Path) -> None:
    """× 4 takes 10 s and × 8 takes 6.25 s: 1.6 times as fast on twice the devices is 80 %."""
    for repeat in range(4):
        for place, (devices, time_s) in enumerate([(4, 10.0), (8, 6.25)][:: 1 if repeat % 2 else -1]):
            fake = steady(time_s, started_at=Fake.started_at + 1e5 * repeat + 3e4 * place)
            published(config(tmp_path, repeat=repeat, strategy="ddp", devices=devices), fake)
    page = page_of(load(tmp_path))
    assert column(page, 0, "Speed-up")["ddp 8"].startswith("1.60")
    assert column(page, 0, "Efficiency")["ddp 8"].startswith("80.0")
    assert "over ddp × 4; efficiency is speed-up ÷ (devices ÷ 4)" in page.tables[0].caption
    assert "one device was not measured" in told(page, "Limits")


def test_the_lead_is_over_its_own_baseline_alone(tmp_path: Path) -> None:
    """tf_single has its own: × 2 takes 10 s and × 4 takes 6.25 s."""
    for way, time_s in ((("tf_single", 1), 20.0), (("fsdp", 2), 10.0), (("fsdp", 4), 6.25)):
        published(config(tmp_path, strategy=way[0], devices=way[1]), steady(time_s))
    page = page_of(load(tmp_path))
    assert "Speed-up is over tf_single × 1 and fsdp × 2;" in page.tables[0].caption
    assert page.lead[0].startswith("Strong scaling: fsdp on 4 devices: 1.60 times as fast as fsdp × 2, efficiency 80.0")


def test_a_baseline_on_the_most_devices_leads_without_a_speed_up(usual: Runs) -> None:
    (lead,) = page_of(replace(usual, baseline="ddp × 2")).lead
    assert lead.startswith("Strong scaling: ddp on 2 devices: 4 epochs take ")
    assert "times as fast" not in lead


@pytest.mark.parametrize(
    ("epochs", "second", "taken_s", "words"),
    [
        (1, 0, 0.0, " No speed-up: no steady epoch."),
        (3, 1, 0.0, " Speed-up is over one device (–: no repeat in common); efficiency is speed-up ÷ devices."),
        (3, 0, 5.0, " No speed-up: disturbed."),
        (3, 0, 0.0, " Speed-up is over one device; efficiency is speed-up ÷ devices."),
    ],
)
def test_why_there_is_no_speed_up(epochs: int, second: int, taken_s: float, words: str, tmp_path: Path) -> None:
    """ddp × 2 has the `second` repeat alone; of all steady epochs, of 5 s and more, others took so much."""
    for strategy, devices, repeat in (("single", 1, 0), ("ddp", 2, second)):
        fake = steady(10.0 / devices, others_time_s=lambda epoch, rank: taken_s)
        published(config(tmp_path, strategy=strategy, devices=devices, repeat=repeat, epochs=epochs), fake)
    assert words in page_of(load(tmp_path)).tables[0].caption


def test_weak_and_strong_scaling_are_a_table_each_and_a_second_batch_is_left_out(tmp_path: Path) -> None:
    for scaling, batch, ways in (("strong", 128, (1, 2, 4)), ("strong", 64, (1, 2)), ("weak", 64, (1, 2))):
        for devices in ways:
            strategy = "ddp" if devices > 1 else "single"
            run = config(tmp_path, strategy=strategy, devices=devices, scaling=scaling, batch_size=batch)
            published(run, steady(10.0 / devices))
    page = page_of(load(tmp_path))
    assert [table.name for table in page.tables] == ["strong-scaling", "weak-scaling", "resources"]
    assert "(128 samples)" in page.tables[0].caption
    assert [row[:3] for row in page.tables[2].rows] == [
        *(("strong", way, devices) for way, devices in (("single", "1"), ("ddp", "2"), ("ddp", "4"))),
        *(("weak", way, devices) for way, devices in (("single", "1"), ("ddp", "2"))),
    ]
    assert told(page, "Left out").startswith("2 configurations")


def test_many_configurations_leave_the_fastest_variants(tmp_path: Path) -> None:
    """One device and five ways on four counts of devices are 21 rows, of which one and four ways have room in 20."""
    slower = {"ddp": 1.0, "fsdp": 1.1, "zero1": 1.2, "ring_ddp": 1.3, "data_parallel": 1.4}
    published(config(tmp_path, batch_size=120), steady(10.0))
    for (strategy, factor), devices in product(slower.items(), (2, 3, 4, 5)):
        run = config(tmp_path, strategy=strategy, devices=devices, batch_size=120)
        published(run, steady(10.0 / devices * factor))
    page = page_of(load(tmp_path))
    assert {row[0] for row in page.tables[0].rows} == {"single", "ddp", "fsdp", "zero1", "ring_ddp"}
    assert len(page.tables[0].rows) == 17
    assert told(page, "Left out").startswith("4 configurations")


@pytest.fixture(scope="module")
def nasty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three repeats of one and two devices whose name is full of commands."""
    root = tmp_path_factory.mktemp("nasty")
    for repeat in range(3):
        for strategy, devices in (("single", 1), ("ddp", 2)):
            fake = steady(10.0 / devices, device_name=NASTY, environment=environment(**{"cuda.driver": "1_&<2>"}))
            published(config(root, repeat=repeat, strategy=strategy, devices=devices), fake)
    return root


def test_hostile_names_are_text_in_both_documents(nasty: Path, tmp_path: Path) -> None:
    page, document = write_proposal(load(nasty), tmp_path / "out")
    written = page.read_text()
    assert "<b>GPU" not in written
    assert html.escape(NASTY, quote=False) in written
    assert NASTY in words_of(written)
    source = document.read_text()
    assert source.count(r"\end{document}") == 1
    assert r"50\%\_\$x\textasciicircum{}\{2\} \& \textless{}b\textgreater{}GPU" in source
    assert source.count("{") - source.count(r"\{") == source.count("}") - source.count(r"\}")


def test_both_documents_hold_the_tables_and_the_figure(nasty: Path, tmp_path: Path) -> None:
    page, document = write_proposal(load(nasty), tmp_path / "out", epochs=7)
    (picture,) = re.findall(r"\\includegraphics\[[^]]*\]\{([^}]*)\}", document.read_text())
    assert (tmp_path / "out" / picture).read_bytes().startswith(b"%PDF")
    assert page.read_text().count("<svg") == 1
    for written in (words_of(page.read_text()), document.read_text()):
        assert "Device-hours" in written
        assert "2.00" in written
        assert "7" in written


def test_a_program_is_told_in_steps(tmp_path: Path) -> None:
    """100 steps of 0.02 s after 5 s: 7 s."""
    for number, run in enumerate(programs(tmp_path, "devices=1,2")):
        measured(run, 0.02 / run.devices, at=1.7e9 + 1e4 * number)
    page = page_of(load(tmp_path), steps=100)
    assert column(page, 1, "Wall time, 100 steps")["program 1"].startswith(f"{7 / 3600:.5f}")
    assert column(page, 1, "Device-hours, 100 steps")["program 2"].startswith(f"{2 * 6 / 3600:.5f}")
    with pytest.raises(ConfigError, match="say how many steps: --steps N"):
        page_of(load(tmp_path), epochs=3)


def test_several_works_are_named_and_one_is_chosen(tmp_path: Path) -> None:
    for model in ("cnn_small", "mlp"):
        published(config(tmp_path, model=model), steady(10.0))
    runs = load(tmp_path)
    with pytest.raises(ConfigError, match=r"2 kinds of work.*--work WORDS.*cnn_small.*mlp"):
        write_proposal(runs, tmp_path / "out")
    written, _ = write_proposal(runs, tmp_path / "out", work="mlp")
    assert "digits · mlp" in words_of(written.read_text())


def test_what_can_not_be_told_is_one_line(nasty: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failed(config(tmp_path, sweep_name="lost"), "oom", "no room", epochs=0)
    for words, why in (
        ([str(tmp_path / "lost"), "--proposal"], "no finished run"),
        ([str(nasty), "--epochs", "3"], "add --proposal"),
        ([str(nasty), "--proposal", "--epochs", "3", "--steps", "4"], "leave out one"),
        ([str(nasty), "--proposal", "--figure", "scaling"], "leave out one"),
        ([str(nasty), "--proposal", "--sentence"], "leave out one"),
        ([str(nasty), "--proposal", "--work", "other"], "choose words"),
    ):
        assert cli.main(["report", *words]) == 2, words
        said = capsys.readouterr()
        assert not said.out
        assert len(said.err.strip().splitlines()) == 1, said.err
        assert why in said.err
    assert not (tmp_path / "lost" / "proposal").exists()


def test_the_command_prints_where_the_documents_are(nasty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(nasty), "--proposal", "--epochs", "90"]) == 0
    documents = [Path(line) for line in capsys.readouterr().out.split()]
    assert [document.name for document in documents] == ["proposal.html", "proposal.tex"]
    assert all("90 epochs" in document.read_text() for document in documents)


def test_disturbed_runs_are_marked(usual: Runs) -> None:
    lost = pl.when(IN_TWO & (pl.col("rank") == 0)).then(0.48 * pl.col("epoch_time_s")).otherwise(0.0)
    page = page_of(altered(usual, others_time_s=lost))
    assert column(page, 0, "Repeats") == {"single 1": "6", "ddp 2": "6*"}
    assert "* Other programs disturbed" in page.tables[0].caption
    assert column(page, 0, "Speed-up")["ddp 2"] == "–"


def test_hours_of_disturbed_first_epochs_are_marked(usual: Runs) -> None:
    """The runs count: their steady epochs are undisturbed."""
    runs = disturbed(usual, 1)
    page = page_of(runs)
    assert column(page, 0, "Repeats") == {"single 1": "6", "ddp 2": "6"}
    for name in ("Wall time", "Device-hours"):
        hours, undisturbed = column(page, 1, name), column(page_of(usual), 1, name)
        assert hours == undisturbed | {"ddp 2": f"{undisturbed['ddp 2']}*"}
    assert "* Other programs disturbed epochs that these hours rest on." in page.tables[1].caption
    assert page.lead[0].endswith("device-hours (others disturbed these runs).")
    assert "Others disturbed the first epoch of 6 runs of ddp × 2" in told(page, "Limits")
    assert "*" not in column(page_of(runs, steps=100), 1, "Wall time")["ddp 2"], "steps rest on steady epochs"
