"""The report, compare, claims and notebooks give one verdict on the same runs: refused alike, or the same ratio."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from analysis import UnlikeWork, by, load, notebook, summary
from analysis.claims import Publication, judge, judge_all
from analysis.claims.figures.uw_benchmark import FIRST, SECOND, epoch_rates
from analysis.claims.table import effect_of
from analysis.comparison.exclusions import excluded
from analysis.comparison.notes import Code
from analysis.comparison.pairing import paired
from analysis.comparison.run import compared_runs
from analysis.comparison.summary import learned
from analysis.comparison.verdict import SpeedVerdict
from analysis.figures import draw
from analysis.report import answers, warnings
from analysis.runs.published import LOADED
from analysis.runs.reader import Runs
from parallelbench.cli import main
from parallelbench.errors import ConfigError
from parallelbench.measure.environment_match import LINKS, MUST_MATCH, PACKED, REPORTED, SET_BY_LAUNCHER, WHERE_BOTH
from tests.analysis.factory import Fake, config, failed, one_and_two, published, steady
from tests.analysis.made_up import (
    ENERGY_RATIO,
    IN_TWO,
    ONE,
    SPEED_UP,
    SWEEPS,
    TWO,
    altered,
    cold,
    disturbed,
    environment,
    flagged,
    in_environments,
    of_variants,
    rows_of,
)
from tests.analysis.test_claims import claim
from tests.analysis.test_notebooks import FOLDER

pytestmark = pytest.mark.slow

VARIABLES = [f"variables.{name}" for name in ("NCCL_ALGO", "GLOO_TUNED_TO", "OMP_PROC_BIND", "MKL_DYNAMIC")]
VARIABLES += [f"variables.{name}" for name in ("MALLOC_ARENA_MAX", "TORCH_LOGS", "PYTORCH_CUDA_ALLOC_CONF")]
SHORTER = claim(contrasts=[{"from": ONE, "to": TWO}])
NO_ENDS = (None, None)
LONGER = claim(contrasts=[{"from": ONE, "to": TWO}], expect={"above": 1.02})


@pytest.mark.cases("unlike", "nothing is wrong", "disturbed")
@pytest.mark.parametrize("name", SWEEPS)
def test_every_room_gives_the_answers(
    name: str, usual: Runs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = SWEEPS[name]
    runs, ratio = sweep.alter(usual), sweep.speed_up and 1 / sweep.speed_up
    words: dict[str, str] = {}

    one, two = summary(runs).to_dicts()
    names = ("configuration", "steady_epoch_time_s", "verdict", "speed_up", "efficiency")
    assert [one[name] for name in names] == ["single × 1", 12.5, "baseline", 1.0, 1.0]
    half = sweep.speed_up and sweep.speed_up / 2
    expected = ["ddp × 2", sweep.time_s, sweep.verdict, sweep.speed_up, half]
    assert [two[name] for name in names] == [
        each if isinstance(each, str) else pytest.approx(each) for each in expected
    ]
    assert (two["runs"], two["repeats"]) == (6, sweep.counted)
    assert two["speed_up_pairs"] == (6 if sweep.speed_up else 0)
    assert (two["speed_up_low"], two["speed_up_high"]) == (pytest.approx(sweep.interval) if sweep.interval else NO_ENDS)
    ends = (pytest.approx(1 / sweep.interval[1]), pytest.approx(1 / sweep.interval[0])) if sweep.interval else NO_ENDS
    started = summary(cold(runs)).row(1, named=True)["efficiency_with_startup"]
    assert (started is None) == (sweep.speed_up is None)
    assert two["energy_ratio"] == (sweep.speed_up and pytest.approx(ENERGY_RATIO))

    try:
        found = by(runs, "strategy", "single", "ddp", across=["devices"])
        (row,) = found.rows
        assert row.time is not None
        assert (row.verdict.value, row.time.median) == (sweep.verdict, pytest.approx(ratio))
        assert (row.time.low, row.time.high) == ends
        words["compare"] = "\n".join(found.notes)
    except ConfigError as refusal:
        assert sweep.speed_up is None
        words["compare"] = str(refusal)

    judgement = judge(runs, SHORTER, seed="0")
    assert judgement.verdict == sweep.shorter
    assert judge(runs, LONGER, seed="0").verdict == ("refuted" if sweep.shorter == "reproduced" else "inconclusive")
    assert [case.median for case in judgement.cases] == [pytest.approx(sweep.time_ratio)] * bool(sweep.counted)
    assert sweep.interval is None or [(case.low, case.high) for case in judgement.cases] == [ends]
    words["claims"] = "\n".join([judgement.why, *(line for case in judgement.cases for line in case.warnings)])
    if sweep.counted:
        own = Publication(seed="002", title="its own", claims=[SHORTER])
        monkeypatch.setattr("analysis.claims.publications", lambda: (own,))
        monkeypatch.setattr(notebook, "_WIDTH", 1000)
        notebook.claims(runs, "002")
        words["notebook"] = capsys.readouterr().out

    figures = {figure.name: figure for figure in draw(runs, ["runtime", "memory", "time_to_accuracy", "scaling"])}
    for ranking in ("runtime", "memory", "time_to_accuracy"):
        words[ranking] = figures[ranking].finding
        assert ("this does not rank them" in words[ranking]) == bool(sweep.why), ranking
    assert (figures["scaling"].chart is not None) == (sweep.speed_up is not None)
    if sweep.counted:
        words["scaling"] = figures["scaling"].finding
    words["report"] = "\n".join([*answers.headline(runs), *warnings.warnings(runs)])
    for room, said in words.items():
        assert sweep.why in said, room
        assert sweep.why or not any(each.why and each.why in said for each in SWEEPS.values()), room
    assert sweep.speed_up is None or f"{sweep.speed_up:.2f} times as fast" in answers.headline(runs)[0]


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return of_variants(tmp_path_factory.mktemp("variants"))


@pytest.mark.parametrize(
    ("contrast", "where", "cases"),
    [
        (
            {"from": ONE, "to": TWO},
            {},
            {"ddp × 2, bucket mib 1.0": (0.8, 2.4), "ddp × 2, bucket mib 25.0": (0.6, 3.6)},
        ),
        (
            {"from": {"devices": 2}, "to": {"devices": 4}},
            {"strategy": "fsdp"},
            {"fsdp × 2 → fsdp × 4": (5 / 9, 1.5), "fsdp × 2 on 2 nodes → fsdp × 4 on 2 nodes": (5.5 / 9.5, 320 / 210)},
        ),
    ],
)
def test_each_case_of_a_claim_names_its_own_configuration_with_its_own_numbers(
    contrast: dict[str, Any], where: dict[str, Any], cases: dict[str, tuple[float, float]], variants: Runs
) -> None:
    """Time and memory of all processes together."""
    asked = claim(contrasts=[contrast], where=where, also="peak_memory_sum_bytes")
    found = judge(variants, asked, seed="0")
    lines = {effect_of(case, asked): case for case in found.cases}
    named = {name: next(case for line, case in lines.items() if f"{name})" in line) for name in cases}
    assert {name: (case.median, case.also) for name, case in named.items()} == {
        name: pytest.approx(values, rel=1e-6) for name, values in cases.items()
    }


@pytest.mark.parametrize(
    ("flag", "compared", "drawn"), [("short", False, {"single × 1"}), ("from_power", True, {"single × 1", "ddp × 2"})]
)
def test_energies_that_are_not_to_be_quoted_are_not_ranked(
    flag: str, compared: bool, drawn: set[str], usual: Runs
) -> None:
    """One device needs 0.189 J for a sample: 300 J for 1,587 of them, less the tail. Two need 1.2 times as much."""
    (figure,) = draw(usual, ["energy"])
    assert figure.finding.index("single × 1") < figure.finding.index("ddp × 2"), "else the test shows nothing"
    runs = flagged(usual, flag)
    (figure,) = draw(runs, ["energy"])
    ranked, left = figure.finding.split("\n")
    assert "single × 1" in ranked
    assert "ddp × 2" not in ranked
    assert left == "Not ranked, as their readings are flagged (see the warnings): ddp × 2."
    assert {row["configuration"] for row in rows_of(figure.chart)} == drawn
    assert (summary(runs).row(1, named=True)["energy_ratio"] is not None) == compared
    (line,) = [line for line in answers.headline(runs) if line.startswith("Energy")]
    assert "ddp × 2" not in line


@pytest.mark.parametrize("epoch", [1, 2])
def test_rates_of_disturbed_epochs_are_marked_and_not_ranked(epoch: int, usual: Runs) -> None:
    assert "this does not rank them" not in epoch_rates.finding(usual)
    runs = disturbed(usual, epoch, share=0.12)
    assert excluded(runs).is_empty(), "4 % of the steady epochs at most"
    assert "this does not rank them, since others disturbed runs of ddp × 2" in epoch_rates.finding(runs)
    assert "apart from these" in epoch_rates.finding(runs)
    marked = {(row["configuration"], row["which"]) for row in rows_of(epoch_rates.figure(runs)) if row["disturbed"]}
    assert marked == {("ddp × 2", FIRST if epoch == 1 else SECOND)}


BY_THEMSELVES = {PACKED, LINKS}
"""A column; and what must match on equal devices only."""


@pytest.mark.parametrize(("number", "key"), list(enumerate(sorted({*MUST_MATCH, *VARIABLES} - BY_THEMSELVES))))
@pytest.mark.cases("*-packages.torch", "*-threads", "*-variables.GLOO_TUNED_TO")
def test_what_must_match_is_refused(number: int, key: str, usual: Runs) -> None:
    """Unlike or missing."""
    runs = in_environments(usual, {key: "one"}, {key: "another" if number % 2 or key in WHERE_BOTH else None})
    assert summary(runs).row(1, named=True)["verdict"] == SpeedVerdict.NOT_COMPARABLE.value


def test_a_repeat_in_another_environment_does_not_count_or_blocks_where_it_is_the_one_that_counts(usual: Runs) -> None:
    """A side's first repeat counts, and those that are like it."""
    other = environment(**{"packages.torch": "2.11.0"})
    for repeat, verdict, pairs in ((0, SpeedVerdict.NOT_COMPARABLE, 0), (3, SpeedVerdict.FASTER, 5)):
        texts = pl.when(IN_TWO & (pl.col("repeat") == repeat)).then(pl.lit(other)).otherwise("environment_json")
        row = summary(altered(usual, "run", environment_json=texts)).row(1, named=True)
        assert (row["verdict"], row["speed_up_pairs"]) == (verdict.value, pairs)
        assert row["exclusions"] == ("5 other environment" if repeat == 0 else "1 other environment")


ASYNC_ERRORS = "variables.TORCH_NCCL_ASYNC_ERROR_HANDLING"


@pytest.mark.parametrize("key", [*REPORTED, ASYNC_ERRORS, "load_average_1min", "variables.SLURM_JOB_ID"])
def test_what_may_differ_is_compared_and_told(key: str, usual: Runs) -> None:
    runs = in_environments(usual, {key: "one"}, {key: "another"})
    assert summary(runs).row(1, named=True)["speed_up"] == pytest.approx(SPEED_UP)
    told = [*warnings.warnings(runs), *by(runs, "strategy", "ddp", "single", across=["devices"]).notes]
    assert sum(f"differ in {key}" in note for note in told) == (2 if key in REPORTED else 0)


@pytest.mark.parametrize("key", WHERE_BOTH)
def test_what_one_side_could_not_record_is_compared(key: str, usual: Runs) -> None:
    runs = in_environments(usual, {key: "one"}, {key: None})
    assert summary(runs).row(1, named=True)["speed_up"] == pytest.approx(SPEED_UP)


def test_links_that_follow_from_the_number_of_gpus_are_told(usual: Runs) -> None:
    runs = in_environments(usual, {LINKS: "NV4"}, {LINKS: "NV4, SYS"})
    assert summary(runs).row(1, named=True)["speed_up"] == pytest.approx(SPEED_UP)
    assert any("differ in cuda.links: NV4 and NV4, SYS" in warning for warning in warnings.warnings(runs))


@pytest.mark.cases("cudnn_benchmark", "cuda.links")
@pytest.mark.parametrize("key", SET_BY_LAUNCHER)
def test_what_the_launcher_sets_must_match_between_runs_on_equal_devices(key: str, tmp_path: Path) -> None:
    for repeat, time_s in enumerate((10.0, 11.0)):
        for batch, value in ((64, "one"), (128, "another")):
            run = config(tmp_path, repeat=repeat, batch_size=batch)
            published(run, steady(time_s, environment=environment(**{key: value})))
    with pytest.raises(UnlikeWork, match=f"the sides differ in {key}: one and another"):
        by(load(tmp_path), "batch_size", 64, 128)
    assert by(load(tmp_path), "batch_size", 64, 128, across=[key]).rows[0].time is not None
    (finding,) = [figure.finding for figure in draw(load(tmp_path), ["throughput_batch"])]
    assert f"is not compared: the sides differ in {key}: one and another" in finding


def test_across_compares_what_is_refused_otherwise(usual: Runs) -> None:
    runs = SWEEPS["unlike"].alter(usual)
    (row,) = by(runs, "strategy", "single", "ddp", across=["devices", "packages.torch"]).rows
    assert row.verdict is SpeedVerdict.FASTER


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_the_launcher_shares_the_cores_out_among_gpus_and_a_cpu_device_keeps_its_threads(
    device_type: str, usual: Runs
) -> None:
    key = "threads"
    runs = altered(in_environments(usual, {key: "8"}, {key: "4"}), "run", device_type=pl.lit(device_type))
    if device_type == "cpu":
        assert summary(runs).row(1, named=True)["verdict"] == SpeedVerdict.NOT_COMPARABLE.value
        return
    assert summary(runs).row(1, named=True)["verdict"] == SpeedVerdict.FASTER.value
    assert any(f"{key}: " in note for note in by(runs, "strategy", "single", "ddp", across=["devices"]).notes)
    assert any(key in warning for warning in warnings.warnings(runs)), "a difference that the launcher explains is told"


@pytest.mark.cases("1-not comparable")
@pytest.mark.parametrize(("nodes", "verdict"), [(1, SpeedVerdict.NOT_COMPARABLE), (2, SpeedVerdict.FASTER)])
def test_the_interface_is_another_only_between_nodes(nodes: int, verdict: SpeedVerdict, tmp_path: Path) -> None:
    for repeat, (one_s, two_s) in enumerate(((10.0, 7.0), (11.0, 7.5), (10.5, 7.4), (10.6, 7.4))):
        for ways, time_s, value in ((ONE, one_s, "8"), (TWO | {"nodes": nodes}, two_s, "4")):
            entries = environment(**{"variables.GLOO_SOCKET_IFNAME": value})
            published(config(tmp_path, repeat=repeat, **ways), steady(time_s, environment=entries))
    assert summary(load(tmp_path)).row(1, named=True)["verdict"] == verdict.value


@pytest.mark.exhaustive
def test_an_effect_of_an_effect_holds_all_four_runs_against_each_other(tmp_path: Path) -> None:
    """The second effect's epochs hold 1,088 and 1,024 samples: the larger batch drops the rest."""
    for repeat in range(6):
        for samples in (1024, 1088):
            for batch, time_s in ((64, 10.0), (128, 6.0 if samples == 1024 else 3.0)):
                data = {"name": "synthetic", "train_samples": samples}
                published(config(tmp_path, repeat=repeat, batch_size=batch, data=data), steady(time_s + repeat / 100))
    asked = claim(contrasts=[{"rising": "batch_size"}], more={"rising": "train_samples"})
    (case,) = judge(load(tmp_path), asked, seed="0").cases
    assert (case.verdict, case.lacks) == (
        "inconclusive",
        "epochs hold 1,024 and 1,088 samples: compare samples per second",
    )


@pytest.mark.exhaustive
def test_the_best_of_several_is_chosen_among_runs_of_one_environment(tmp_path: Path) -> None:
    needed = {(64, 0.1): 10.0, (64, 0.2): 11.0, (128, 0.1): 5.0, (128, 0.2): 6.0}
    for repeat in range(6):
        for (batch, rate), time_s in needed.items():
            run = config(tmp_path, repeat=repeat, batch_size=batch, optimizer={"name": "sgd", "lr": rate})
            torch = {"packages.torch": "2.11.0" if rate == 0.2 else "2.15.0"}
            published(run, steady(time_s + repeat / 100, environment=environment(**torch)))
    (case,) = judge(load(tmp_path), claim(contrasts=[{"rising": "batch_size"}], best_of="optimizer.lr"), seed="0").cases
    assert case.verdict == "inconclusive"
    assert "packages.torch: 2.15.0 and 2.11.0" in case.lacks or "packages.torch: 2.11.0 and 2.15.0" in case.lacks


def test_accuracies_that_do_not_count_are_left_out_of_the_finding(tmp_path: Path) -> None:
    for repeat in range(2):
        for strategy, devices, accuracy in (("single", 1, 0.9), ("ddp", 2, 0.88)):
            run = config(tmp_path, repeat=repeat, strategy=strategy, devices=devices)
            published(run, Fake(test_accuracy=lambda _, at=accuracy: at))
    again = config(tmp_path, strategy="ddp", devices=2, measure={"parity": False})
    published(again, Fake(test_accuracy=lambda _: 0.88, parity_passed=None))
    runs = load(tmp_path)
    (twice,) = excluded(runs)["run_id"]
    assert twice not in set(learned(runs)["run_id"])
    (figure,) = draw(runs, ["accuracy"])
    assert "configurations differ by at most 2 percentage points" in figure.finding


def test_data_of_one_name_and_another_size_is_refused_everywhere(usual: Runs) -> None:
    """As a user's own data set may be, whose size depends on its files."""
    halved = pl.when(IN_TWO).then(pl.col("train_samples") // 2).otherwise("train_samples").cast(pl.Int64)
    runs = altered(usual, "run", train_samples=halved)
    assert summary(runs).row(1, named=True)["verdict"] == SpeedVerdict.NOT_COMPARABLE.value
    (case,) = judge(runs, SHORTER, seed="0").cases
    assert case.verdict == "inconclusive"
    assert "these are two data sets" in case.lacks
    (row,) = by(runs, "strategy", "single", "ddp", across=["devices"]).rows
    assert row.time is None


@pytest.mark.exhaustive
def test_an_effect_of_effects_is_blocked_by_any_two_of_its_runs(tmp_path: Path) -> None:
    """Both effects are five times what two devices can do, so that the one ÷ the other is 1."""
    for repeat, share in enumerate((0.11, 0.111, 0.109, 0.112, 0.108, 0.11)):
        for model in ("mlp", "cnn_small"):
            for ways, time_s in ((ONE, 10.0), (TWO, 10.0 * share)):
                published(config(tmp_path, repeat=repeat, model=model, **ways), steady(time_s))
    runs = load(tmp_path)
    more = {"from": {"model": "mlp"}, "to": {"model": "cnn_small"}}
    asked = claim(contrasts=[{"from": ONE, "to": TWO}], more=more, expect={"between": [0.9, 1.1]})
    (case,) = judge(runs, asked, seed="0").cases
    assert (case.verdict, "is not believed" in case.lacks) == ("inconclusive", True)


@pytest.mark.cases("1.8", "three workers")
@pytest.mark.parametrize(
    ("strategy", "share", "kind"),
    [
        ("ddp", 0.55, None),
        ("ddp", 0.4, Code.ABOVE_IDEAL),
        ("ddp", 0.1, Code.SUPERLINEAR),
        ("parameter_server", 0.4, None),
    ],
    ids=["1.8", "2.5", "10", "three workers"],
)
def test_more_devices_of_one_strategy_are_not_faster_by_any_factor(
    tmp_path: Path, strategy: str, share: float, kind: Code | None
) -> None:
    """One of a parameter server's devices computes nothing: three workers may be three times as fast as one."""
    for repeat in range(6):
        for devices, time_s in ((2, 10.0), (4, 10.0 * share)):
            published(config(tmp_path, repeat=repeat, strategy=strategy, devices=devices), steady(time_s))
    sides = [[run for run in compared_runs(load(tmp_path)).values() if run.definition["devices"] == n] for n in (2, 4)]
    pairing = paired(*sides)
    kinds = [issue.code for issue in (*pairing.blockers(), *pairing.caveats())]
    assert kinds == ([kind] if kind else [])
    assert [issue.code for issue in paired(*sides[::-1]).blockers()] == kinds[: kind is Code.SUPERLINEAR]


@pytest.mark.cases("True")
@pytest.mark.parametrize("apart", [False, True])
def test_a_figure_across_works_gives_the_verdict_of_compare(apart: bool, tmp_path: Path) -> None:
    for repeat, wobble in enumerate((1.0, 1.01, 0.99, 1.02, 0.98, 1.0)):
        for batch, time_s in ((64, 10.0), (128, 5.0 * wobble)):
            for strategy, devices in (("single", 1), ("ddp", 2)):
                later_s = 1e7 if apart else 3e4 * (-1) ** repeat
                at = Fake.started_at + 1e5 * repeat + (batch > 64) * later_s
                run = config(tmp_path, repeat=repeat, batch_size=batch, strategy=strategy, devices=devices)
                published(run, steady(time_s, started_at=at))
    runs = load(tmp_path)
    (figure,) = draw(runs, ["throughput_batch"])
    compared = by(runs, "batch_size", 64, 128)
    for row in compared.rows:
        rate = row.ratios["throughput_samples_per_s"]
        assert rate is not None
        span = " (not interleaved)" if apart else f" ({rate.low:.2f}–{rate.high:.2f})"
        assert f"{rate.median:.2f} times as many{span} with {row.configuration}" in figure.finding
    assert ("measured apart" in figure.finding) is apart


def test_a_ratio_has_one_interval_whatever_is_shown_beside_it(tmp_path: Path) -> None:
    """Four configurations, three of which nothing tells from one device: the verdict on the fourth allows for them."""
    ways = {"ddp": 0.965, "fsdp": 1.0, "zero1": 1.01, "tensor_parallel": 0.99}
    wobbles = (
        (1.0, 1.02, 0.98, 1.03, 0.97, 1.0),
        (1.01, 0.98, 1.03, 0.97, 1.0, 1.02),
        (0.98, 1.02, 1.0, 1.0, 1.03, 0.97),
    )
    quiet = (1.0, 1.02, 0.985, 1.015, 0.98, 1.0)
    for repeat in range(6):
        published(config(tmp_path, repeat=repeat), steady(10.0))
        for place, (strategy, factor) in enumerate(ways.items()):
            wobble = wobbles[place - 1][repeat] if place else quiet[repeat]
            published(config(tmp_path, repeat=repeat, strategy=strategy, devices=2), steady(10.0 * factor * wobble))
    runs = load(tmp_path)
    # exp(m ± t·s/√6) as in `made_up`, of the speed-ups 1 / (0.965 · wobble).
    logs = [-math.log(0.965 * wobble) for wobble in quiet]
    mean, reach = statistics.fmean(logs), 4.331853 * statistics.stdev(logs) / math.sqrt(6)
    ends = pytest.approx((math.exp(mean - reach), math.exp(mean + reach)), rel=1e-6)
    assert math.exp(mean - reach) > 1, "by itself it is faster"

    (row,) = summary(runs).filter(strategy="ddp").to_dicts()
    assert (row["speed_up_low"], row["speed_up_high"]) == ends
    assert row["verdict"] == "no difference shown", "among four"
    (told,) = [line for line in answers.headline(runs) if line.startswith("ddp × 2")]
    assert "not enough among so many verdicts" in told
    (alone,) = by(runs, "strategy", "ddp", "single", across=["devices"]).rows
    assert alone.time is not None
    assert ((alone.time.low, alone.time.high), alone.verdict) == (ends, "slower"), "one comparison, one verdict"
    shorter = judge(runs, SHORTER, seed="0").cases
    assert [(1 / (case.high or 1), 1 / (case.low or 1)) for case in shorter] == [ends]


@pytest.mark.exhaustive
def test_a_claim_that_is_named_has_the_verdict_that_it_has_among_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One effect decides by itself, but not among ten."""
    wobble = (1.0, 1.03, 0.98, 1.04, 0.97, 1.02)
    one_and_two(tmp_path / "runs", ((steady(10.0), steady(9.35 * factor)) for factor in wobble))
    named = {"section": "1", "quote": "shorter", "metric": "steady_epoch_time_s", "sweep": "demo"}
    named |= {"contrasts": [{"rising": "devices"}]}
    expected: list[dict[str, float]] = [{"below": 1.0}, *({"below": 0.93 + 0.001 * place} for place in range(1, 10))]
    claims = [named | {"name": f"claim_{place}", "expect": each} for place, each in enumerate(expected)]
    path = tmp_path / "mine.yaml"
    path.write_text(json.dumps({"seed": "9", "title": "mine", "claims": claims}))
    publications, runs = [Publication.read(path)], load(tmp_path / "runs")
    among = judge_all(runs, publications)[0]
    assert judge(runs, among.claim, seed="9").verdict != among.verdict, "else the test shows nothing"
    (alone,) = judge_all(runs, publications, names=["claim_0"])
    assert (alone.verdict, alone.cases) == (among.verdict, among.cases)
    assert main(["claims", str(tmp_path / "runs"), "claim_0", "--file", str(path)]) == 0
    assert f"claim_0: {among.verdict}" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_a_choice_that_lacks_a_candidate_in_one_repeat_is_judged(tmp_path: Path) -> None:
    needed = {(64, 0.1): 10.0, (64, 0.2): 11.0, (128, 0.1): 5.0, (128, 0.2): 6.0}
    for repeat in range(7):
        for (batch, rate), time_s in needed.items():
            run = config(tmp_path, repeat=repeat, batch_size=batch, optimizer={"name": "sgd", "lr": rate})
            if (repeat, batch, rate) == (2, 64, 0.2):
                failed(run, "nan", "the loss is not finite", epochs=1)
            else:
                published(run, steady(time_s + repeat / 100))
    asked = claim(contrasts=[{"rising": "batch_size"}], best_of="optimizer.lr")
    (case,) = judge(load(tmp_path), asked, seed="0").cases
    assert (case.verdict, len(case.effects)) == ("reproduced", 7)
    # What stands alone in its repeat must have the same environment all the same, or it does not count.
    run = config(tmp_path, repeat=7, batch_size=128, optimizer={"name": "sgd", "lr": 0.1})
    published(run, steady(5.0, environment=environment(**{"packages.torch": "2.11.0"})))
    published(config(tmp_path, repeat=7, batch_size=64, optimizer={"name": "sgd", "lr": 0.1}), steady(10.0))
    (case,) = judge(load(tmp_path), asked, seed="0").cases
    assert (case.verdict, len(case.effects)) == ("reproduced", 7)


def test_a_run_that_is_wrong_does_not_count_for_what_it_learned_because_its_times_are_invalid(tmp_path: Path) -> None:
    published(config(tmp_path), steady(10.0, oversubscribed=True))
    published(config(tmp_path, repeat=1), steady(10.0, oversubscribed=True))
    loaded = load(tmp_path)
    lost = pl.when(pl.col("run_id") == loaded.run["run_id"][0]).then(1).otherwise(0)
    epochs = loaded.epochs.with_columns(train_samples=pl.col("train_samples") + lost)
    runs = replace(loaded, tables={**{name: loaded.tables[name] for name in LOADED}, "epochs": epochs})
    found = dict(excluded(runs).select("run_id", "exclusion").rows())
    assert [found[run_id] for run_id in loaded.run["run_id"]] == ["miscounted", "oversubscribed"]
    assert set(learned(runs)["run_id"]) == {loaded.run["run_id"][1]}


def test_a_notebook_shows_the_medians_of_the_report(tmp_path: Path) -> None:
    metric = "steady_epoch_time_s"
    for repeat in range(6):
        taken = {"others_time_s": lambda epoch, rank: 10.0} if repeat > 2 else {}
        published(config(tmp_path, repeat=repeat), steady(10.0 if repeat < 3 else 20.0, first_s=12.0 + repeat, **taken))
    runs = load(tmp_path)
    page = json.loads((FOLDER / "quick_look.ipynb").read_text())
    sources = ["".join(cell["source"]) for cell in page["cells"] if cell["cell_type"] == "code"]
    (source,) = [source for source in sources if source == "overview(runs)"]
    table = eval(source, {"runs": runs, "overview": notebook.overview})
    assert table.select(metric, "repeats").rows() == summary(runs).select(metric, "repeats").rows()
    assert table["repeats"].to_list() == [3]
