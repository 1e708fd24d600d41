"""Claims are decided by planted effects as planted, and by noise not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest
import yaml
from hypothesis import assume, given
from hypothesis import strategies as st

from analysis import load
from analysis.claims import Judgement, Publication, judge, judge_all, publications, require_claims
from analysis.claims.claim import Claim, Expect
from analysis.claims.table import effect_of, expected, lines
from analysis.claims.verdict import decide
from analysis.runs.reader import Runs
from launch.sweep.compose import group_choices
from parallelbench.cli import main
from parallelbench.config.structure import structure
from parallelbench.errors import ConfigError
from tests.analysis.factory import MIB, Fake, config, failed, one_and_two, published, steady
from tests.analysis.made_up import IN_TWO, altered

pytestmark = pytest.mark.slow

REPEATS = range(6)
WOBBLE = (1.0, 1.003, 0.997, 1.001, 0.999, 1.002)
"""What a quiet machine does to times."""


SHORTER: dict[str, Any] = {"name": "shorter", "section": "1", "quote": "shorter", "metric": "steady_epoch_time_s"}
SHORTER |= {"contrasts": [{"rising": "devices"}], "expect": {"below": 0.98}, "sweep": "demo"}
"""Two devices train an epoch in less time than one."""


def claim(**changes: Any) -> Claim:
    """That of `SHORTER`, with these changes."""
    found: Claim = structure(SHORTER | changes, Claim)
    return found


def two_devices(root: Path, ratios: tuple[float, ...], **changes: Any) -> Runs:
    """single × 1 and ddp × 2, whose epochs take so many times as long, repeat by repeat."""
    levels = [10.0 + repeat for repeat in range(len(ratios))]  # a drift that pairs cancel
    fakes = ((steady(level), steady(level * ratio)) for level, ratio in zip(levels, ratios, strict=True))
    one_and_two(root, fakes, **changes)
    return load(root)


def verdict(runs: Runs, **changes: Any) -> str:
    return judge(runs, claim(**changes), seed="000").verdict


def by_name(runs: Runs) -> dict[str, Judgement]:
    return {finding.claim.name: finding for finding in judge_all(runs)}


def test_bytes_are_told_in_mebibytes_and_metrics_in_words(usual: Runs) -> None:
    sent = altered(usual, gradient_bytes_sent=pl.when(IN_TWO).then(11 * 11 * MIB).otherwise(0))  # in 11 steps
    bytes_sent = claim(metric="gradient_bytes_sent_per_step_sum", compare="difference", expect={"above": 0})
    (case,) = judge(sent, bytes_sent, seed="000").cases
    assert effect_of(case, bytes_sent).startswith("+22 MiB, 6 repeats: ")
    assert expected(bytes_sent) == "difference of gradient bytes sent per step, all processes, above 0 MiB"
    assert expected(claim(expect={"above": 1})).startswith("ratio of time per epoch above 1.000")


@pytest.mark.parametrize("n", [1, 5])
def test_few_repeats_decide_nothing_however_large_the_effect(usual: Runs, n: int) -> None:
    few = usual.only(set(usual.run.filter(pl.col("repeat") < n)["run_id"]))
    finding = judge(few, claim(), seed="000")
    assert finding.verdict == "inconclusive"
    assert f"{n} repeat" in finding.why
    assert "sweep.repeats=6" in finding.why
    assert " (" not in effect_of(finding.cases[0], finding.claim), "no interval seems to say otherwise"


def test_pairs_are_by_repeat(tmp_path: Path) -> None:
    """Six runs on either side, but of different repeats: there is no pair."""
    for repeat in REPEATS:
        published(config(tmp_path, repeat=repeat), steady(10.0))
        published(config(tmp_path, repeat=repeat + 6, strategy="ddp", devices=2), steady(5.0))
    finding = judge(load(tmp_path), claim(), seed="000")
    assert (finding.verdict, finding.cases) == ("inconclusive", ())
    assert "needs runs of the same work with at least two levels of devices; 6 repeats each" in finding.why


@pytest.mark.parametrize("changes", [{"batch_size": 64}, {"optimizer": "adam"}])
def test_unlike_work_is_never_compared(tmp_path: Path, changes: dict[str, Any]) -> None:
    data = {"data": {"name": "digits", "image_size": 32}}  # which the mlp takes, too
    for repeat in REPEATS:
        published(config(tmp_path, repeat=repeat, **data), steady(10.0))
        published(config(tmp_path, repeat=repeat, strategy="ddp", devices=2, **(data | changes)), steady(5.0))
    assert judge(load(tmp_path), claim(), seed="000").cases == ()


@pytest.mark.cases("failed")
@pytest.mark.parametrize("reason", ["oversubscribed", "packed", "parity", "failed"])
def test_invalid_timing_decides_nothing(tmp_path: Path, reason: str) -> None:
    for repeat in REPEATS:
        published(config(tmp_path, repeat=repeat), steady(10.0))
        launcher = {"packed": {"pack": True}, "oversubscribed": {"oversubscribe": True}}.get(reason, {})
        run = config(tmp_path, repeat=repeat, strategy="ddp", devices=2, launcher=launcher)
        fake = steady(5.0, oversubscribed=reason == "oversubscribed", parity_passed=reason != "parity")
        if reason == "failed":
            failed(run, "oom", "out of memory", epochs=3, fake=fake)
        else:
            published(run, fake)
    runs = load(tmp_path)
    finding = judge(runs, claim(), seed="000")
    assert (finding.verdict, finding.cases) == ("inconclusive", ())
    assert "6 runs don't count" in finding.why
    learned = judge(runs, claim(metric="final_test_accuracy", expect={"between": [0.9, 1.1]}), seed="000")
    timing_only = reason in ("oversubscribed", "packed")
    assert learned.verdict == ("reproduced" if timing_only else "inconclusive")


@pytest.mark.exhaustive
def test_another_effect_in_other_work_leaves_the_claim_open(tmp_path: Path) -> None:
    two_devices(tmp_path, tuple(0.6 * w for w in WOBBLE))
    runs = two_devices(tmp_path, tuple(1.5 * w for w in WOBBLE), batch_size=64)
    finding = judge(runs, claim(), seed="000")
    assert sorted(case.verdict for case in finding.cases) == ["refuted", "reproduced"]
    assert finding.verdict == "inconclusive"
    assert finding.why == "1 reproduced, 1 refuted of 2 cases; it depends on the work"
    assert {case.where for case in finding.cases} == {
        "digits · cnn_small · batch size 64",
        "digits · cnn_small · batch size 128",
    }


@pytest.mark.exhaustive
def test_work_with_too_few_repeats_is_told_and_does_not_count(tmp_path: Path) -> None:
    two_devices(tmp_path, (0.6,) * 6)
    finding = judge(two_devices(tmp_path, (1.5,) * 2, batch_size=64), claim(), seed="000")
    assert (finding.verdict, finding.why) == ("reproduced", "1 more with too few repeats")


@pytest.mark.cases("1.0-0.6-reproduced")
@pytest.mark.parametrize(("small", "large", "said"), [(1.0, 0.6, "reproduced"), (0.6, 1.0, "refuted")])
def test_an_effect_of_an_effect(tmp_path: Path, small: float, large: float, said: str) -> None:
    """Devices help more with the larger batch, or less."""
    two_devices(tmp_path, tuple(small * w for w in WOBBLE), batch_size=64)
    runs = two_devices(tmp_path, tuple(large * w for w in WOBBLE), batch_size=128)
    finding = judge(runs, claim(more={"rising": "batch_size"}), seed="000")
    assert finding.verdict == said
    (case,) = finding.cases
    assert case.step == "devices 1 → 2, by batch size 64 → 128"
    assert case.median == pytest.approx(large / small, rel=0.01)
    assert len(case.runs) == 24


@pytest.mark.exhaustive
def test_one_device_stands_for_every_strategy_and_levels_are_compared_step_by_step(tmp_path: Path) -> None:
    for repeat in REPEATS:
        published(config(tmp_path, repeat=repeat), steady(12.0))
        for strategy, devices, time_s in (("ddp", 2, 6.0), ("ddp", 4, 3.0), ("fsdp", 2, 8.0)):
            published(config(tmp_path, repeat=repeat, strategy=strategy, devices=devices), steady(time_s))
    finding = judge(load(tmp_path), claim(), seed="000")
    assert {(case.where, case.step, round(case.median, 3)) for case in finding.cases} == {
        ("digits · cnn_small · strategy ddp", "devices 1 → 2", 0.5),
        ("digits · cnn_small · strategy ddp", "devices 2 → 4", 0.5),
        ("digits · cnn_small · strategy fsdp", "devices 1 → 2", 0.667),
    }
    only = judge(load(tmp_path), claim(where={"strategy": "fsdp"}), seed="000")
    assert [case.step for case in only.cases] == ["devices 1 → 2"]


def weak(root: Path, epoch_times_s: tuple[float, float], total_times_s: tuple[float, float]) -> Runs:
    """30 epochs of as many samples on one and on two devices: what one takes, and all with start-up."""
    for repeat in REPEATS:
        for devices, strategy in ((1, "single"), (2, "ddp")):
            work: dict[str, Any] = {"data": "mnist", "batch_size": 1024, "scaling": "weak", "epochs": 30}
            work |= {"measure": {"parity": False}}
            run = config(root, repeat=repeat, devices=devices, strategy=strategy, device="cuda", **work)
            # The tail that fills no batch is not the same: time per sample is what was published.
            share = run.steps_per_epoch * run.global_batch_size / run.data.train_samples
            time_s, total_s = (times[devices - 1] * share * WOBBLE[repeat] for times in (epoch_times_s, total_times_s))
            startup = {"startup_s": total_s - 30 * time_s, "startup_first_step_s": 0.0}
            published(run, Fake(epoch_time_s=lambda epoch, rank, t=time_s: t, startup=startup, device_type="cuda"))
    return load(root)


@pytest.mark.exhaustive
def test_the_published_scaling_is_told_from_what_start_up_made_of_it(tmp_path: Path) -> None:
    """Publication 002: 59 steps of 43.9 ms against 30 of 67.1 ms; 109.47 s against 78.61 s in all."""
    runs = weak(tmp_path, (59 * 0.04386, 30 * 0.06714), (109.47, 78.61))
    findings = by_name(runs)
    whole, warm = findings["scaling_with_startup"], findings["scaling_steady"]
    assert (whole.verdict, warm.verdict) == ("reproduced", "reproduced")
    assert whole.cases[0].median == pytest.approx(0.6963, abs=1e-4)
    assert warm.cases[0].median == pytest.approx(0.642, abs=5e-4)
    # Each shows the other beside itself.
    assert warm.cases[0].also == pytest.approx(whole.cases[0].median)
    assert whole.cases[0].also == pytest.approx(warm.cases[0].median)
    assert findings["speed_up_not_linear"].verdict == "reproduced"


@pytest.mark.exhaustive
def test_another_scaling_refutes_the_published_one(tmp_path: Path) -> None:
    findings = by_name(weak(tmp_path, (2.0, 0.97), (61.0, 29.6)))
    names = ("scaling_steady", "scaling_with_startup", "speed_up_not_linear")
    assert [findings[name].verdict for name in names] == ["refuted"] * 3


@pytest.mark.exhaustive
def test_epochs_are_compared_within_a_run(usual: Runs) -> None:
    first = judge(
        usual, claim(metric="slowest_epoch_time_s", contrasts=[{"from": {"epoch": 1}, "to": {"epoch": 2}}]), seed="0"
    )
    medians = ((12 * 13) ** 0.5 / 20, (12 * 0.99 * 13 * 1.02) ** 0.5 / 1.6 / 20)
    assert sorted(case.median for case in first.cases) == pytest.approx(sorted(medians))
    assert {case.step for case in first.cases} == {"epoch 1 → epoch 2"}
    last = judge(
        usual, claim(metric="train_loss", contrasts=[{"from": {"epoch": 1}, "to": {"epoch": "last"}}]), seed="0"
    )
    assert {case.median for case in last.cases} == {0.25}  # 2 ÷ 4 epochs against 2 ÷ 1
    assert last.verdict == "reproduced"


@pytest.mark.exhaustive
def test_steps_to_an_accuracy_at_the_best_learning_rate(tmp_path: Path) -> None:
    """Twice the batch: half the steps at its best learning rate, which is another."""
    needed = {(64, 0.1): 2, (64, 0.2): 4, (128, 0.1): 5, (128, 0.2): 2}
    for repeat in REPEATS:
        for (batch, rate), epochs in needed.items():
            run = config(tmp_path, repeat=repeat, batch_size=batch, epochs=6, optimizer={"name": "sgd", "lr": rate})
            published(run, Fake(test_accuracy=lambda epoch, at=epochs: 0.96 if epoch >= at else 0.5))
    changes: dict[str, Any] = {"metric": "steps_to_accuracy", "target": 0.95, "contrasts": [{"rising": "batch_size"}]}
    best = judge(load(tmp_path), claim(**changes, best_of="optimizer.lr"), seed="0")
    assert [case.median for case in best.cases] == [11 * 2 / (22 * 2)]
    assert len(judge(load(tmp_path), claim(**changes), seed="0").cases) == 2  # each rate by itself


@pytest.mark.exhaustive
def test_what_gpus_alone_can_decide_says_so_on_cpus(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"metric": "peak_memory_sum_bytes", "gpus_only": "it is mostly libraries"}
    runs = two_devices(tmp_path / "cpu", (0.6,) * 6)
    finding = judge(runs, claim(**changes), seed="0")
    assert finding.verdict == "inconclusive"
    assert finding.why == "can't be decided on CPUs: it is mostly libraries; it needs sweep=demo on GPUs"
    one, two = (
        Fake(device_type="cuda", peak_allocated_bytes=lambda epoch, rank, n=n: 90 * MIB // n**2)  # type: ignore[misc]
        for n in (1, 2)
    )
    one_and_two(tmp_path / "gpu", [(one, two)] * 6, device="cuda")
    assert judge(load(tmp_path / "gpu"), claim(**changes), seed="0").verdict == "reproduced"


@pytest.mark.exhaustive
def test_where_gpus_were_measured_processors_decide_nothing(tmp_path: Path) -> None:
    """A sweep may have both, as TensorFlow's part runs on processors only."""
    two_devices(tmp_path, (1.5,) * 6)
    one, two = (steady(time_s, device_type="cuda", device_name="GPU") for time_s in (10.0, 5.0))
    one_and_two(tmp_path, [(one, two)] * 6, device="cuda")
    runs = load(tmp_path)
    finding = judge(runs, claim(scope={"device_type": "cuda"}), seed="000")
    assert (finding.verdict, [case.device for case in finding.cases]) == ("reproduced", ["GPU"])
    on_processors = judge(runs, claim(where={"device_type": "cpu"}), seed="000")
    assert (on_processors.verdict, len(on_processors.cases)) == ("refuted", 1)


@given(st.lists(st.floats(0.1, 10), min_size=6, max_size=12), st.floats(0.1, 10), st.floats(0.1, 10))
def test_a_region_and_what_lies_around_it_are_never_both_reproduced(
    values: list[float], one: float, other: float
) -> None:
    low, high = sorted((one, other))
    interval = (min(values), max(values))
    assume(low < high)
    inside, *_ = decide(values, interval, Expect(between=(low, high)))
    below, *_ = decide(values, interval, Expect(below=low))
    above, *_ = decide(values, interval, Expect(above=high))
    assert [inside, below, above].count("reproduced") <= 1
    if inside == "reproduced":
        assert (below, above) == ("refuted", "refuted")
    if "reproduced" in (below, above):
        assert inside == "refuted"


def test_every_claim_of_the_publications_is_whole() -> None:
    found = publications()
    seeds = [publication.seed for publication in found]
    assert seeds == sorted(set(seeds)), "two publications of one number"
    assert {"000", "001", "002", "003"} <= set(seeds)
    claims = [claim for publication in found for claim in publication.claims]
    assert len({claim.name for claim in claims}) == len(claims)
    for each in claims:
        assert set(each.sweeps) <= set(group_choices()["sweep"])
        assert len(each.quote.split()) >= 3


BROKEN = [
    ("seed: '9'\n  title: x", "is no YAML"),
    ("just words", "holds no claims"),
    ({"metric": "steady_epoch_time"}, "did you mean steady_epoch_time_s?"),
    ({"expect": {}}, "expect needs exactly one of above, below and between"),
    ({"expect": {"between": [2, 1]}}, "write the lower end first"),
    ({"expect": {"between": [1, 2], "by": 0.1}}, "expect.by=0.1 does not apply to between: leave it out"),
    ({"expect": {"above": 1, "by": -0.1}}, "expect.by=-0.1 is not valid"),
    ({"expect": {"abov": 1}}, "expect.abov is not a key: did you mean above?"),
    ({"contrasts": [{"rising": "device"}]}, "rising=device is no choice: did you mean devices?"),
    ({"contrasts": [{"from": {"devices": 1}}]}, "either from and to, or rising"),
    ({"where": {"strateg": "ddp"}}, "strateg is no key of a run: did you mean strategy?"),
    ({"compare": "efficiency"}, "metric=steady_epoch_time_s has no efficiency, as it is no rate: choose throughput_"),
    (
        {"metric": "throughput_samples_per_s", "also": "total_time_s", "compare": "efficiency"},
        "also=total_time_s has no efficiency",
    ),
    ({"metric": "steps_to_accuracy"}, "target is the accuracy of metric=steps_to_accuracy or time_to_accuracy_s"),
    ({"also": "total_time_s", "best_of": "optimizer.lr"}, "also=total_time_s does not apply with best_of=optimizer.lr"),
    ({"epoch": 1}, "epoch=1 does not apply to metric=steady_epoch_time_s"),
    (
        {"where": {"strategy": ["ddp", "fsdp"]}, "asked_of": {"mirrored": {"dpp": "tf_mirrored"}}},
        "asked_of.mirrored: dpp is no strategy of the claim: did you mean ddp?",
    ),
    ({"asked_of": {"mirrored": {"ddp": "tf_mirrored"}}}, "asked_of.mirrored: ddp is no strategy of the claim"),
    (
        {"where": {"strategy": "ddp"}, "asked_of": {"shorter": {"ddp": "tf_mirrored"}}},
        "shorter is the name of two claims",
    ),
    ({"quote": None}, "claim shorter: quote=None is not valid"),
]


def written(path: Path, changes: dict[str, Any] | str) -> Path:
    whole = {"seed": "9", "title": "mine", "claims": [SHORTER | changes]} if isinstance(changes, dict) else None
    path.write_text(changes if whole is None else yaml.safe_dump(whole))
    return path


@pytest.mark.parametrize(("changes", "message"), BROKEN, ids=[message for _, message in BROKEN])
def test_a_broken_file_is_refused_with_the_reason(tmp_path: Path, changes: dict[str, Any] | str, message: str) -> None:
    path = written(tmp_path / "mine.yaml", changes)
    with pytest.raises(ConfigError) as error:
        Publication.read(path)
    assert message in str(error.value)
    assert str(error.value).startswith(str(path))


def test_names_that_are_no_claims_are_refused() -> None:
    with pytest.raises(ConfigError, match="scaling_stead is no claim: did you mean scaling_steady"):
        require_claims(["scaling_stead"])


@pytest.mark.exhaustive
def test_the_verb_prints_verdicts_and_what_is_lacking(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two_devices(tmp_path / "runs", tuple(0.6 * w for w in WOBBLE))
    path, runs = written(tmp_path / "mine.yaml", {}), str(tmp_path / "runs")
    (tmp_path / "runs" / "odd").mkdir()
    (tmp_path / "runs" / "odd" / "config.yaml").write_text("no configuration")
    for words, code, said in (
        ([runs, "--file", str(path)], 0, "1 claim: 1 reproduced, 0 refuted, 0 inconclusive"),
        ([runs], 0, "95 claims: none is decided"),
        ([runs, "--file", str(path)], 0, "Skipped: "),
        ([str(tmp_path / "runs" / "odd")], 2, "holds no readable run"),
        ([str(tmp_path / "none")], 2, "is no folder"),
        ([runs, "--file", str(tmp_path / "none.yaml")], 2, "none.yaml can't be read: No such file"),
    ):
        assert main(["claims", *words]) == code
        assert said in "".join(capsys.readouterr())
    assert main(["claims", runs, "shorter", "--file", str(path)]) == 0
    assert capsys.readouterr().out.count("digits-cnn_small-ddp-x2-r") == 6


@pytest.mark.parametrize(
    ("one", "two", "verdict", "why"),
    [
        (1.0, 1.0, "inconclusive", "saturated: both sides are 0.1 points or less below 100 %"),
        (0.999, 0.9995, "inconclusive", "saturated"),
        (1.0, 0.98, "refuted", ""),
        (0.98, 0.98, "refuted", ""),
        (0.98, 0.99, "reproduced", ""),
    ],
)
def test_an_accuracy_that_can_rise_no_further_refutes_nothing(
    one: float, two: float, verdict: str, why: str, tmp_path: Path
) -> None:
    one_and_two(tmp_path, ((Fake(train_accuracy=lambda e: one), Fake(train_accuracy=lambda e: two)) for _ in REPEATS))
    asked = claim(metric="train_accuracy", compare="difference", expect={"above": 0, "by": 0.001})
    finding = judge(load(tmp_path), asked, seed="000")
    assert finding.verdict == verdict
    assert finding.why.startswith(why)
    low = f"{100 * (two - one):+.2f}".replace("-", "−")
    assert f"{low} points ({low} – {low} points), 6 repeats" in effect_of(finding.cases[0], asked)


@pytest.mark.parametrize(
    ("ratio", "told"), [(0.5, ["so far for the claim"]), (1.5, ["so far against the claim"]), (0.99, [])]
)
def test_an_undecided_claim_tells_to_which_side_it_tends(ratio: float, told: list[str], tmp_path: Path) -> None:
    asked = claim(expect={"below": 1, "by": 0.02})
    finding = judge(two_devices(tmp_path, (ratio, ratio * 1.01, ratio)), asked, seed="000")
    assert finding.verdict == "inconclusive"
    assert [line for line in lines(finding, most=4).reasons if line.startswith("so far")] == told
