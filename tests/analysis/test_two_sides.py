"""Two sides are compared where all that defines them is equal, but for what is named; and the gate on that."""

from __future__ import annotations

import json
import math
import re
import shutil
import statistics
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis import UnlikeWork, by, compare, load
from analysis.comparison import gate, printed
from analysis.comparison.baseline import refusals
from analysis.comparison.notes import write
from analysis.comparison.summary import summary
from analysis.runs.reader import Runs
from parallelbench import cli
from parallelbench.errors import ConfigError
from tests.analysis.factory import Fake, config, published, steady
from tests.helpers import interval

pytestmark = pytest.mark.slow

BETWEEN = 1.7e9 + 5e4
"""The start of a side that was measured in turn with the other one: repeats begin every 1e5 s, each in a submit. In odd
repeats it comes first (A B, B A).
"""


def begins(at: float, repeat: int) -> float:
    """When a repeat of a side begins."""
    return at + 1e5 * repeat - (7e4 if at == BETWEEN and repeat % 2 else 0.0)


def sweep(
    root: Path, times: dict[str, list[float]], *, at: float = 1.7e9, commit: str = "0123abc", **more: Any
) -> Runs:
    """Repeats of single × 1 and others × 2 that take these times."""
    changes = more.pop("changes", {})
    environment = json.loads(Fake.environment) | {"git": {"commit": commit}} | more.pop("environment", {})
    for strategy, repeats in times.items():
        for repeat, time_s in enumerate(repeats):
            run = config(root, strategy=strategy, devices=1 if strategy == "single" else 2, repeat=repeat, **changes)
            published(run, steady(time_s, started_at=begins(at, repeat), environment=json.dumps(environment), **more))
    return load(root)


BEFORE = {"single": [10.0, 11.0, 12.0, 13.0], "ddp": [6.0, 6.6, 7.2, 7.8]}


def scaled(factor: float) -> dict[str, list[float]]:
    """The times of `BEFORE`, longer by about that factor."""
    wobble = (1.0, 1.01, 0.99, 1.0)
    return {name: [time * factor * w for time, w in zip(times, wobble, strict=True)] for name, times in BEFORE.items()}


@pytest.mark.exhaustive
def test_two_folders_are_compared_configuration_by_configuration_and_repeat_by_repeat(tmp_path: Path) -> None:
    a = sweep(tmp_path / "a", BEFORE)
    b = sweep(
        tmp_path / "b",
        {"single": [10.0, 10.9, 12.2, 13.0], "ddp": [6.6, 7.33, 7.85, 8.58]},
        at=BETWEEN,
        commit="456def",
    )
    found = compare(a, b)
    assert [row.configuration for row in found.rows] == ["single × 1", "ddp × 2"]
    single, ddp = found.rows
    assert ddp.time is not None
    assert [value for _, value in ddp.time.pairs] == pytest.approx([1.1, 7.33 / 6.6, 7.85 / 7.2, 1.1])
    assert (ddp.verdict, single.verdict) == ("slower", "equal within 5 %")
    assert (ddp.a["steady_epoch_time_s"], ddp.b["steady_epoch_time_s"]) == (6.9, 7.59)
    assert found.overall is not None
    both = [math.sqrt(1.1 * 1.0), math.sqrt(7.33 / 6.6 * 10.9 / 11), math.sqrt(7.85 / 7.2 * 12.2 / 12), math.sqrt(1.1)]
    assert [value for _, value in found.overall.pairs] == pytest.approx(both)
    assert found.notes[0] == "The compared runs differ in git.commit: 0123abc and 456def."
    assert len(found.notes) == 1, "in turn"
    assert (ddp.further_repeats, single.further_repeats) == (None, None), "both are decided"
    time = found.frame.filter(pl.col("metric") == "steady_epoch_time_s")
    assert time["configuration"].to_list() == ["single × 1", "ddp × 2", "all configurations"]
    assert time["verdict"].to_list()[:2] == ["equal within 5 %", "slower"]
    throughput = found.frame.filter(pl.col("metric") == "throughput_samples_per_s")["ratio"]
    assert throughput[1] == pytest.approx(1 / ddp.time.median)
    energy = found.frame.filter(pl.col("metric") == "gpu_energy_per_sample_j")
    assert energy.select("a", "b", "ratio", "verdict").rows() == [(None,) * 4] * 2, "not measured is null"


@pytest.mark.exhaustive
def test_the_same_times_of_day_are_the_same_run_and_no_comparison(tmp_path: Path) -> None:
    sweep(tmp_path / "a", BEFORE)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    with pytest.raises(ConfigError, match="both sides hold the same run"):
        compare(load(tmp_path / "a"), load(tmp_path / "b"))


@pytest.mark.exhaustive
def test_a_refusal_names_all_that_differs_and_naming_it_compares(tmp_path: Path) -> None:
    a = sweep(tmp_path / "a", BEFORE)
    there = {"packages": {"torch": "2.16.0"}, "cuda": {"driver": "600"}, "variables": {"NCCL_ALGO": "Tree"}}
    b = sweep(
        tmp_path / "b", scaled(0.5), at=BETWEEN, device_name="H200", environment=there, changes={"precision": "bf16"}
    )
    with pytest.raises(UnlikeWork) as refusal:
        compare(a, b)
    differences, names = str(refusal.value), refusal.value.across
    assert f"`parallelbench compare … --across {','.join(names)}`" in differences
    assert sorted(names) == [
        "cuda.driver", "device_name", "packages.torch", "precision", "variables.NCCL_ALGO",
    ]  # fmt: skip
    for difference in ("device_name: Imaginary CPU and H200", "packages.torch: 2.15.0 and 2.16.0", "null and Tree"):
        assert difference in differences
    assert {row.verdict for row in compare(a, b, across=names).rows} == {"faster"}
    with pytest.raises(UnlikeWork, match=r"^the sides differ in precision: fp32 and bf16; compare across"):
        compare(a, b, across=[name for name in names if name != "precision"])
    with pytest.raises(ConfigError, match="--across prcision is no key of these runs; did you mean precision"):
        compare(a, b, across=["prcision"])


@pytest.mark.exhaustive
def test_what_one_side_lacks_is_named_and_what_does_not_count_is_not_compared(tmp_path: Path) -> None:
    a = sweep(tmp_path / "a", BEFORE | {"fsdp": [7.0]})
    sweep(tmp_path / "b", {"ddp": BEFORE["ddp"], "model_parallel": [12.0]}, at=BETWEEN)
    for repeat in range(3):
        published(config(tmp_path / "b", repeat=repeat), Fake(parity_passed=False))
    published(config(tmp_path / "b", repeat=1, strategy="fsdp", devices=2), Fake(started_at=BETWEEN))
    found = compare(a, load(tmp_path / "b"))
    assert [(row.configuration, row.shown_verdict) for row in found.rows] == [
        ("ddp × 2", "equal within 5 %"),
        ("fsdp × 2", "no repeat in common"),
    ]
    assert (found.only_a, found.only_b) == (("single × 1",), ("model_parallel × 2",))
    assert "Only A has counted runs of single × 1." in printed.notes(found)


def test_a_side_without_a_counted_run_says_why(tmp_path: Path) -> None:
    a = sweep(tmp_path / "a", BEFORE)
    published(config(tmp_path / "b"), Fake(oversubscribed=True))
    with pytest.raises(ConfigError, match=r"b holds no run that counts \(oversubscribed: .*\): there is nothing to"):
        compare(a, load(tmp_path / "b"))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("seed=", "values of seed here: 0"),
        ("seed=0,1", "has seed=1; valid: 0"),
        ("strategy=ddp", "values of strategy here: ddp, single"),
        ("strategy=single\n,ddp", "--by 'strategy=single\\n,ddp' holds a line end"),
    ],
)
def test_the_values_that_a_key_has_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: str, words: str
) -> None:
    sweep(tmp_path, {"single": [10.0], "ddp": [6.0]})
    assert cli.main(["compare", str(tmp_path), "--by", given]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.cases("optimizer.lr=0.10,1000000.0")
@pytest.mark.parametrize("given", ["optimizer.lr=0.10,1000000.0", "optimizer.lr=1e-1, 1e6\n"])
def test_values_are_those_that_are_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str], given: str) -> None:
    for rate in (0.1, 1e6):
        for repeat in range(4):
            at = begins(Fake.started_at if rate < 1 else BETWEEN, repeat)
            fake = steady(10.0 if rate < 1 else 5.0, started_at=at)
            published(config(tmp_path, repeat=repeat, optimizer={"name": "sgd", "lr": rate}), fake)
    assert cli.main(["compare", str(tmp_path), "--by", given]) == 0
    assert "faster" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_two_values_of_a_key_are_compared_all_else_being_equal(tmp_path: Path) -> None:
    runs = sweep(tmp_path, BEFORE | {"fsdp": [6.6, 7.26, 8.0, 8.58]})
    found = by(runs, "strategy", "ddp", "fsdp")
    assert [(row.configuration, row.verdict) for row in found.rows] == [("ddp × 2 → fsdp × 2", "slower")]
    assert found.notes == (), "interleaved, by one commit"
    with pytest.raises(UnlikeWork, match=r"devices: 1 and 2; compare across .* --across devices`$"):
        by(runs, "strategy", "single", "ddp")
    found = by(runs, "strategy", "single", "ddp", across=["devices"])
    assert [row.time and row.time.median for row in found.rows] == pytest.approx([0.6])
    with pytest.raises(ConfigError, match=r"no run in .* has strategy=dpd; did you mean ddp"):
        by(runs, "strategy", "dpd", "fsdp")
    with pytest.raises(ConfigError, match="no run has this key; did you mean strategy"):
        by(runs, "strategyy", "ddp", "fsdp")
    published(config(tmp_path, strategy="ddp", devices=4), steady(3.0))
    with pytest.raises(UnlikeWork, match=r"choose folders, or --by, so that each side has one of these$"):
        by(load(tmp_path), "strategy", "single", "ddp")


@pytest.mark.exhaustive
def test_what_may_differ_must_not_differ_within_a_side(tmp_path: Path) -> None:
    sweep(tmp_path / "a", BEFORE)
    sweep(tmp_path / "a", BEFORE, changes={"batch_size": 64})
    b = sweep(tmp_path / "b", BEFORE, at=BETWEEN, changes={"batch_size": 32})
    with pytest.raises(ConfigError, match=r"the first side has runs that differ \(batch_size: "):
        compare(load(tmp_path / "a"), b, across=["batch_size"])
    same = sweep(tmp_path / "c", BEFORE, at=BETWEEN, changes={"batch_size": 64})
    found = compare(load(tmp_path / "a"), same)
    assert [row.verdict for row in found.rows] == ["equal within 5 %"] * 2
    assert len(found.only_a) == 2
    assert "batch size 128" in found.only_a[0]


@pytest.mark.exhaustive
def test_the_reports_refusals_name_the_keys_of_all_works_so_that_compare_takes_them(tmp_path: Path) -> None:
    sweep(tmp_path, BEFORE)
    sweep(tmp_path, {"single": BEFORE["single"]}, changes={"batch_size": 64})
    sweep(tmp_path, {"fsdp": BEFORE["ddp"]}, environment={"nice": 5})
    runs = sweep(tmp_path, {"fsdp": BEFORE["ddp"]}, environment={"python": "3.11"}, changes={"batch_size": 64})
    lines = write(refusals(runs))
    assert ["differ in nice" in line for line in lines].count(True) == 1 == len(lines) - 1
    asked = {line.partition("`parallelbench compare … --across ")[2].removesuffix("`.") for line in lines}
    assert {tuple(sorted(keys.split(","))) for keys in asked} == {("nice", "python")}
    with pytest.raises(UnlikeWork, match=r"`parallelbench compare … --across (nice,python|python,nice)`$"):
        by(runs, "configuration", "single × 1", "fsdp × 2")
    assert by(runs, "configuration", "single × 1", "fsdp × 2", across=["nice", "python"]).rows


def test_epochs_of_unequal_length_are_compared_by_sample(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weak = {"scaling": "weak", "batch_size": 100, "measure": {"steps_per_epoch": 4}}
    runs = sweep(tmp_path, {"single": [4.0, 4.1], "ddp": [5.0, 5.1]}, changes=weak)
    found = by(runs, "strategy", "single", "ddp", across=["devices"])
    assert found.rows[0].time is not None
    assert found.rows[0].time.median == pytest.approx(statistics.geometric_mean([5 / 8, 5.1 / 8.2]))
    assert "ratios of times and energies are per sample" in found.notes[0]
    assert printed.table(found)[0][4].startswith("time per sample B ÷ A\n")
    by_strategy = ["--by", "strategy=single,ddp", "--across", "devices"]
    assert cli.main(["compare", str(tmp_path), *by_strategy, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    (row,) = shown["configurations"]
    assert (row["per_sample"], shown["all"]["per_sample"]) == (True, True)
    times, rates = ([row[f"{side}_{name}"] for side in "ab"] for name in ("epoch_time_s", "samples_per_s"))
    assert times == pytest.approx([4.05, 5.05])
    assert rates == pytest.approx([statistics.mean([400 / 4, 400 / 4.1]), statistics.mean([800 / 5, 800 / 5.1])])
    alike = sweep(tmp_path / "alike", BEFORE)
    found = by(alike, "strategy", "single", "ddp", across=["devices"])
    assert (found.per_sample, printed.table(found)[0][4]) == (False, "time B ÷ A\n(95 % interval)")


def test_memory_of_processes_is_not_divided_by_that_of_tensors(tmp_path: Path) -> None:
    """Which would be less: a process holds its libraries, too."""
    cuda: dict[str, Any] = {"device_type": "cuda", "device_name": "GPU", "peak_allocated_bytes": lambda e, r: 2**26}
    a = sweep(tmp_path / "a", {"single": BEFORE["single"]})
    b = sweep(tmp_path / "b", {"single": BEFORE["single"]}, at=BETWEEN, **cuda)
    found = compare(a, b, across=["device_type", "device_name"])
    (row,) = found.rows
    assert (row.ratios["peak_memory_sum_bytes"], row.verdict) == (None, "equal within 5 %")
    assert any(
        note.startswith("Memory is not compared, as peaks on CPUs are those of processes") for note in found.notes
    )
    assert not any("memory" in column for column in printed.table(found)[0])


# --- the gate


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("factor", "code", "message"),
    [
        (1.10, 1, "FAIL: slower by more than 3 %: single × 1 by 10 % (at least "),
        (1.04, 2, " may be slower by up to 5."),
        (1.02, 2, " may be slower by up to 3."),
        (1.00, 0, "PASS: nothing is slower by more than 3 % with confidence: at most 1."),
        (0.80, 0, "PASS: nothing is slower by more than 3 % with confidence: all are faster, by 18."),
    ],
)
def test_the_gate_fails_what_is_slower_with_confidence_and_passes_nothing_that_may_be(
    tmp_path: Path, factor: float, code: int, message: str
) -> None:
    before = {"single": [10.0 + r for r in range(6)], "ddp": [6.0 + 0.6 * r for r in range(6)]}
    wobble = (1.0, 1.01, 0.99, 1.01, 0.99, 1.0)
    after = {name: [t * factor * w for t, w in zip(times, wobble, strict=True)] for name, times in before.items()}
    found = compare(sweep(tmp_path / "a", before), sweep(tmp_path / "b", after, at=BETWEEN))
    judged = gate.gate(found, margin=0.03)
    assert judged.code == code
    assert message in judged.message, "both are slower by as much, so either may be named"
    assert code == 1 or re.search(
        r"; with these repeats a slow-down of \d\.\d+ % or more fails in 80 % of cases", judged.message
    )


def test_submits_of_one_side_after_those_of_the_other_are_no_more_than_one(tmp_path: Path) -> None:
    """However many there are: the machine may be slower from the first submit of the second side on."""
    wobble = (1.0, 1.001, 0.999, 1.0)
    a = sweep(tmp_path / "a", {"single": [10.0 * w for w in wobble]})
    b = sweep(tmp_path / "b", {"single": [10.3 * w for w in wobble[::-1]]}, at=1.8e9)
    for one, other in ((a, b), (b, a)):
        found = compare(one, other)
        (row,) = found.rows
        assert row.time is not None
        assert (row.verdict, row.time.low, row.time.n) == ("not interleaved", None, 4)
        assert any("submit each side 4 times or more, in alternation" in note for note in found.notes)
        judged = gate.gate(found, margin=0.01)
        assert judged == (2, "UNDECIDED: single × 1: not interleaved. Measure both sides in turn, then compare")
    # As it advises, it decides.
    c = sweep(tmp_path / "c", {"single": [10.3 * w for w in wobble]}, at=BETWEEN)
    assert (compare(a, c).rows[0].verdict, gate.gate(compare(a, c), margin=0.01).code) == ("slower", 1)


@pytest.mark.parametrize("what", ["too fast", "slow probes", "another torch"])
def test_a_row_that_is_not_comparable_leaves_the_others_as_in_the_report(what: str, tmp_path: Path) -> None:
    """`ddp` against `single` on two models, of which one is not comparable; then on that one alone."""
    for model in ("mlp", "cnn_small"):
        for repeat in range(4):
            for later_s, (strategy, time_s) in enumerate((("single", 10.0), ("ddp", 6.0 + repeat / 100))):
                odd = model == "mlp" and strategy == "ddp"
                fake: dict[str, Any] = {"started_at": begins(BETWEEN if later_s else Fake.started_at, repeat)}
                speed = 1e9 if what == "slow probes" and odd else 2e9
                fake["speeds"] = {f"probed_{moment}_matmul_flop_per_s": speed for moment in ("start", "end")}
                if what == "another torch" and odd:
                    fake["environment"] = Fake.environment.replace("2.15.0", "2.11.0")
                run = config(tmp_path, model=model, strategy=strategy, devices=1 + later_s, repeat=repeat)
                published(run, steady(time_s / (10 if what == "too fast" and odd else 1), **fake))
    runs = load(tmp_path)
    found = by(runs, "configuration", "single × 1", "ddp × 2")
    verdicts = {row.group: row.shown_verdict for row in found.rows}
    assert verdicts == {"digits · cnn_small": "faster", "digits · mlp": "not comparable"}
    report = summary(runs).filter(pl.col("devices") == 2)
    assert dict(report.select("group", "verdict").rows()) == verdicts
    assert (found.overall, found.verdict.value) == (None, "not all have a time")
    assert any("digits · mlp" in note for note in found.notes), "which says why"
    assert gate.gate(found, margin=0.5).code == gate.UNDECIDED
    alone = runs.only(runs.run.filter(pl.col("model") == "mlp")["run_id"].to_list())
    with pytest.raises(ConfigError):
        by(alone, "configuration", "single × 1", "ddp × 2")


@pytest.mark.exhaustive
def test_what_limits_one_row_names_it(tmp_path: Path) -> None:
    sweep(tmp_path / "a", BEFORE)
    sweep(tmp_path / "b", {"ddp": BEFORE["ddp"]}, at=BETWEEN)
    sweep(tmp_path / "b", {"single": BEFORE["single"]}, at=1.8e9)
    found = compare(load(tmp_path / "a"), load(tmp_path / "b"))
    assert [row.verdict for row in found.rows] == ["not interleaved", "equal within 5 %"]
    assert any(note.startswith("single × 1: The two sides were measured apart") for note in found.notes)


@pytest.mark.exhaustive
def test_intervals_are_those_of_a_single_row_and_verdicts_allow_for_all(tmp_path: Path) -> None:
    times = [10.0, 10.1, 9.9, 10.0, 10.1, 9.9]
    later = {"single": 1.03, "ddp": 0.99, "fsdp": 1.01, "zero1": 1.0}
    for name, factor in later.items():
        for at, side, scale in ((1.7e9, "a", 1.0), (BETWEEN, "b", factor)):
            wobble = (1.0, 1.02, 0.98, 1.03, 0.97, 1.0) if side == "b" else (1.0,) * 6
            measured = [time * scale * w for time, w in zip(times, wobble, strict=True)]
            cuda: dict[str, Any] = {"device_type": "cuda", "device_name": "GPU", "gpu_power_w": lambda e, r: 300.0}
            sweep(tmp_path / side, {name: measured}, at=at, **cuda)
    found = compare(load(tmp_path / "a"), load(tmp_path / "b"))
    for metric in ("steady_epoch_time_s", "throughput_samples_per_s", "gpu_energy_per_sample_j"):
        for row in found.rows:
            ratio = row.ratios[metric]
            assert ratio is not None
            (shown,) = found.frame.filter(configuration=row.configuration, metric=metric).to_dicts()
            assert (shown["low"], shown["high"]) == interval([value for _, value in ratio.pairs])
    for row in found.rows:
        time, rate = row.ratios["steady_epoch_time_s"], row.ratios["throughput_samples_per_s"]
        assert time is not None
        assert rate is not None
        assert rate.low == pytest.approx(1 / (time.high or 0))
        assert time.deciding is not None
        assert time.deciding[0] < (time.low or 0), "a verdict among five takes more"


@pytest.mark.exhaustive
def test_the_gate_says_how_many_repeats_decide_and_they_do(tmp_path: Path) -> None:
    def measured(root: Path, repeats: int) -> gate.Gate:
        wobble = [(1.0, 1.02, 0.98)[repeat % 3] for repeat in range(repeats)]
        a = sweep(root / "a", {"single": [10.0] * repeats})
        return gate.gate(compare(a, sweep(root / "b", {"single": [10.0 * w for w in wobble]}, at=BETWEEN)), margin=0.02)

    before = measured(tmp_path / "before", 6)
    assert before.code == 2
    told = re.search(r"add (\d+) repeats? per side, in turn, which decides if the ratios stay$", before.message)
    assert told is not None, before.message
    assert measured(tmp_path / "after", 6 + int(told[1])).code == 0


@pytest.mark.exhaustive
def test_what_can_not_be_judged_does_not_pass(tmp_path: Path) -> None:
    a = sweep(tmp_path / "a", BEFORE)
    one = compare(a, sweep(tmp_path / "b", {"single": [10.0], "ddp": [6.0]}, at=BETWEEN))
    judged = gate.gate(one, margin=0.03)
    assert judged.code == 2
    assert judged.message.startswith("UNDECIDED: single × 1: too few repeats: n=1; ddp × 2: too few repeats: n=1; ")
    assert judged.message.endswith(" Add 3 repeats per side, in turn; and measure the missing runs, then compare")
    lacking = compare(a, sweep(tmp_path / "c", {"ddp": BEFORE["ddp"]}, at=BETWEEN))
    assert gate.gate(lacking, margin=0.03)[:2] == (
        2,
        "UNDECIDED: single × 1: no counted run on side B. Measure the missing runs, then compare",
    )
    assert gate.gate(compare(load(tmp_path / "c"), a), margin=0.03).code == gate.PASSED, "what is new hinders nothing"


@pytest.mark.parametrize(("given", "share"), [("0%", 0.0), (" 2.5 %", 0.025)])
def test_percentages(given: str, share: float) -> None:
    assert gate.percentage(given) == pytest.approx(share)


@given(text=st.text(alphabet="0123456789.%-+ enaif٣", max_size=8))
def test_any_text_is_a_percentage_or_refused(text: str) -> None:
    try:
        share = gate.percentage(text)
    except ConfigError:
        return
    assert 0 <= share < 100
    assert text.strip().endswith("%")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a"], "compare takes two folders, or one and --by KEY=A,B"),
        (["a", "a"], "a and a are the same folder: a comparison needs two"),
        (["a", "b", "a"], "compare takes two folders"),
        (["a", "b", "--by", "strategy=ddp,fsdp"], "--by compares runs of one folder"),
        (["a", "--by", "strategy"], "--by strategy: expected a key and two values"),
        (["a", "--by", "strategy=ddp"], "expected a key and two values"),
        (["a", "--by", "strategy=ddp,ddp"], "expected a key and two values"),
        (["a", "nowhere"], "nowhere is no folder"),
        (["a", "empty"], "empty holds no runs: name a results folder"),
        (["a", "b", "--fail-if-slower", "3"], "--fail-if-slower 3: expected a percentage"),
        (["a", "b", "--fail-if-slower", ""], "--fail-if-slower : expected a percentage"),
        (["a", "--by", ""], "--by : expected a key and two values"),
        (["a", "b", "--across", "gpu"], "--across gpu is no key of these runs"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    sweep(tmp_path / "a", {"single": [1.0, 2.0]})
    sweep(tmp_path / "b", {"single": [1.0, 2.0]}, at=BETWEEN)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    assert cli.main(["compare", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert message in line
