"""What a paper may say of made-up sweeps whose answers are known by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis.report.sentence import latex_table, sentences
from analysis.runs.reader import Runs
from parallelbench import cli
from tests.analysis.factory import config, failed, published, steady
from tests.analysis.made_up import SWEEPS, of_variants, written

ON = "On 2 cores of Imaginary CPU (torch 2.15.0)"
WHAT = "an epoch of digits with cnn_small"


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        (
            "nothing is wrong",
            f"{ON}, ddp on 2 devices trained {WHAT} 1.60 times as fast as one device "
            "(95 % interval 1.56–1.64, 6 paired repeats).",
            "",
        ),
        (
            "noise",
            f"{ON}, no difference was shown in how fast ddp on 2 devices and one device trained {WHAT} "
            "(ratio 1.01, 95 % interval 0.68–1.51, 6 paired repeats).",
            "",
        ),
        ("apart", "", "measured apart from one device, so the ratio has no interval"),
        ("unlike", "", "not comparable with one device: see the warnings"),
        ("too fast", "", "not comparable with one device: see the warnings"),
        ("disturbed", "", "other programs disturbed all runs of it or of one device"),
    ],
)
def test_a_sentence_is_said_where_the_runs_support_it_and_else_the_reason(
    usual: Runs, name: str, text: str, reason: str
) -> None:
    (found,) = sentences(SWEEPS[name].alter(usual))
    assert (found.group, found.configuration) == ("digits · cnn_small", "ddp × 2")
    assert (found.text, found.reason) == (text, reason)


def test_options_nodes_and_equal_speeds_are_named(tmp_path: Path) -> None:
    found = {each.configuration: each.text for each in sentences(of_variants(tmp_path))}
    assert found["ddp × 2, bucket mib 1"].startswith(f"{ON}, ddp (bucket mib 1) on 2 devices trained {WHAT} 1.25 times")
    assert found["fsdp × 4 on 2 nodes"].startswith(
        "On 4 cores of Imaginary CPU (2 nodes, torch 2.15.0), fsdp on 4 devices trained"
    )
    assert "single × 1" not in found


def test_what_has_no_runs_repeats_or_baseline_says_so(tmp_path: Path) -> None:
    for repeat in range(2):
        published(config(tmp_path, repeat=repeat), steady(10.0))
        published(config(tmp_path, repeat=repeat, strategy="ddp", devices=2), steady(6.0))
    failed(config(tmp_path, strategy="fsdp", devices=2), "oom", "out of memory", epochs=0)
    published(config(tmp_path, strategy="ddp", devices=2, batch_size=64), steady(7.0))
    from analysis import load

    found = {(each.configuration, each.group): (each.text, each.reason) for each in sentences(load(tmp_path))}
    assert found["fsdp × 2", "digits · cnn_small"] == ("", "none of its runs counts: 1 oom")
    assert found["ddp × 2", "digits · cnn_small"] == ("", "2 paired repeats, and a verdict takes 4")
    assert found["ddp × 2", "digits · cnn_small · batch size 64"] == (
        "",
        "no counted run of one device did the same work",
    )


def test_work_beyond_its_names_and_gpus_are_in_the_sentence(tmp_path: Path) -> None:
    from analysis import load

    for batch_size in (64, 128):
        for repeat in range(6):
            wobble = 1 + repeat / 1000
            for strategy, devices, time_s in (("single", 1, 10.0), ("ddp", 2, 5.0 * wobble)):
                started = 1.7e9 + 1e5 * repeat + (5e4 if (devices == 2) != bool(repeat % 2) else 0.0)
                fake = steady(time_s, started_at=started, device_type="cuda", device_name="Imaginary GPU")
                run = config(
                    tmp_path, strategy=strategy, devices=devices, repeat=repeat, batch_size=batch_size, device="cuda"
                )
                published(run, fake)
    texts = [each.text for each in sentences(load(tmp_path))]
    assert [text.partition(" times as fast")[0] for text in texts] == [
        f"On 2 × Imaginary GPU (torch 2.15.0), ddp on 2 devices trained {WHAT} (batch size {batch}) 2.00"
        for batch in (64, 128)
    ]


def test_the_table_has_the_numbers_of_the_sentences(usual: Runs) -> None:
    lines = latex_table(usual).splitlines()
    (row,) = [line for line in lines if line.startswith("ddp")]
    # Median of six: halfway between 12 · 0.99 and 13 · 1.02, ÷ 1.6.
    assert row.replace("~", " ") == r"ddp \texttimes{} 2 & 6 of 6 & 7.86 & 1.60 (1.56--1.64) & 80.0\,\% & faster \\"
    assert r"\toprule" in lines


def test_the_command_prints_both_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = written(tmp_path)
    assert cli.main(["report", str(tmp_path), "--sentence"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"{ON}, ddp on 2 devices trained {WHAT} 1.60 times as fast as one device")
    assert printed.endswith(latex_table(runs))
    assert not (tmp_path / "report").exists()
    assert cli.main(["report", str(tmp_path), "--sentence", "--out", "x"]) == 2
    assert "leave out one of the two" in capsys.readouterr().err
