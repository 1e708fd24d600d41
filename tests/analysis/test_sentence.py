"""What a paper may say of made-up sweeps whose answers are known by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from analysis import load
from analysis.report.sentence import latex_table, sentences
from analysis.runs.reader import Runs
from parallelbench import cli
from tests.analysis.factory import Fake, config, failed, published, steady
from tests.analysis.made_up import SWEEPS, written

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


def in_turn(root: Path, ways: list[tuple[dict[str, Any], Callable[[int], float], dict[str, Any]]]) -> None:
    """Six repeats of each way, whose epochs take so long in a repeat; the order is reversed in every other repeat."""
    for repeat in range(6):
        for place, (way, time_s, fake) in enumerate(ways if repeat % 2 else ways[::-1]):
            at = Fake.started_at + 1e5 * repeat + 1e4 * place
            published(config(root, repeat=repeat, **way), steady(time_s(repeat), started_at=at, **fake))


def test_options_nodes_and_equal_speeds_are_named(tmp_path: Path) -> None:
    """Equal ones by hand: logarithms of the ratios are ∓0.01 in turn, s = 0.0110, t = 4.332: 1.00 · e^±0.0194."""
    in_turn(
        tmp_path,
        [
            ({}, lambda repeat: 10.0, {}),
            ({"strategy": {"name": "ddp", "bucket_mib": 1}, "devices": 2}, lambda repeat: 8.0, {}),
            ({"strategy": {"name": "ddp", "bucket_mib": 25}, "devices": 2}, lambda repeat: 12.5, {}),
            ({"strategy": "fsdp", "devices": 4, "nodes": 2}, lambda repeat: 10.1 if repeat % 2 else 9.9, {}),
        ],
    )
    found = {each.configuration: each for each in sentences(load(tmp_path))}
    assert [each.reason for each in found.values()] == [""] * 3
    for mib, times in ((1, "1.25"), (25, "0.80")):
        said = f"{ON}, ddp (bucket mib {mib}.0) on 2 devices trained {WHAT} {times} times as fast as one device ("
        assert found[f"ddp × 2, bucket mib {mib}.0"].text.startswith(said)
    assert found["fsdp × 4 on 2 nodes"].text == (
        "On 4 cores of Imaginary CPU (2 nodes, torch 2.15.0), fsdp on 4 devices trained "
        f"{WHAT} as fast as one device to within 5 % (1.00 times, 95 % interval 0.98–1.02, 6 paired repeats)."
    )


def test_what_has_no_runs_repeats_or_baseline_says_so(tmp_path: Path) -> None:
    for repeat in range(2):
        published(config(tmp_path, repeat=repeat), steady(10.0))
        published(config(tmp_path, repeat=repeat, strategy="ddp", devices=2), steady(6.0))
    failed(config(tmp_path, strategy="fsdp", devices=2), "oom", "out of memory", epochs=1)
    published(config(tmp_path, strategy="ddp", devices=2, batch_size=64), steady(7.0))
    found = {(each.configuration, each.group): (each.text, each.reason) for each in sentences(load(tmp_path))}
    assert found["fsdp × 2", "digits · cnn_small · batch size 128"] == ("", "none of its runs counts: 1 oom")
    assert found["ddp × 2", "digits · cnn_small · batch size 128"] == ("", "2 paired repeats, and a verdict takes 4")
    assert found["ddp × 2", "digits · cnn_small · batch size 64"] == (
        "",
        "nothing to compare it with: see the warnings",
    )


def test_work_beyond_its_names_weak_scaling_and_gpus_are_in_the_sentence(tmp_path: Path) -> None:
    on_gpus = {"device_type": "cuda", "device_name": "Imaginary GPU"}
    works: list[dict[str, Any]] = [{"batch_size": 64}, {"batch_size": 128}, {"scaling": "weak"}]
    for number, work in enumerate(works):
        ways = [
            (work | {"device": "cuda"}, lambda repeat: 10.0, on_gpus),
            (work | {"device": "cuda", "strategy": "ddp", "devices": 2}, lambda repeat: 8.0, on_gpus),
        ]
        in_turn(tmp_path / str(number), ways)
    texts = [each.text.partition(" times as fast")[0] for n in range(3) for each in sentences(load(tmp_path / str(n)))]
    ddp = "On 2 × Imaginary GPU (torch 2.15.0), ddp on 2 devices trained"
    assert texts[:2] == [f"{ddp} {WHAT} 1.25"] * 2
    # 5 batches of 256 in 8 s, beside 11 batches of 128 in 10 s: 160 ÷ 140.8 samples per second.
    assert texts[2] == f"{ddp} digits with cnn_small (weak scaling, samples per second) 1.14"
    together = tmp_path / "together"
    together.mkdir()
    for number in range(2):
        (tmp_path / str(number)).rename(together / str(number))
        (together / str(number) / "demo").rename(together / f"demo{number}")
    told = {each.text.partition(" 1.25")[0] for each in sentences(load(together))}
    assert told == {f"{ddp} {WHAT} (batch size {batch})" for batch in (64, 128)}


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
