"""A claim is decided by runs that its publication speaks of, and by no others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from analysis import load
from analysis.claims import Judgement, judge, judge_all
from analysis.claims.verdict import decide
from analysis.runs.reader import Runs
from parallelbench.config.run import RunConfig
from tests.analysis.factory import MIB, Fake, config, one_and_two, published, steady
from tests.analysis.test_claims import REPEATS, WOBBLE, claim
from tests.helpers import plan

ON_GPUS: dict[str, Any] = {"scope": {"device_type": "cuda", "batch_size": [128, 512]}}
BATCH_RISES: dict[str, Any] = {"contrasts": [{"rising": "batch_size"}], "scope": {"batch_size": [128, 512]}}
BATCH_RISES |= {"metric": "throughput_samples_per_s", "expect": {"above": 1, "by": 0.02}}


def plant(root: Path, ratio: float, *, wobble: Sequence[float] = WOBBLE, gpu: bool = True, **changes: Any) -> None:
    """single × 1 and ddp × 2, whose epochs take so many times as long."""
    device = "cuda" if gpu else "cpu"
    fakes = [[steady(time_s, device_type=device) for time_s in (10.0, 10.0 * ratio * each)] for each in wobble]
    one_and_two(root, ((one, two) for one, two in fakes), device=device, **changes)


def test_other_runs_decide_nothing(usual: Runs) -> None:
    finding = judge(usual, claim(**ON_GPUS), seed="0")
    assert (finding.verdict, finding.cases) == ("inconclusive", ())
    assert "device_type=cuda batch_size=128,512" in finding.why


@pytest.mark.exhaustive
def test_other_runs_change_no_verdict(tmp_path: Path) -> None:
    """Many that decide the opposite, of another kind of device and of another batch; not even an interval."""
    plant(tmp_path, 0.6)
    alone = judge(load(tmp_path), claim(**ON_GPUS), seed="0")
    plant(tmp_path, 1.5, gpu=False)
    plant(tmp_path, 1.0, gpu=False, batch_size=64, wobble=(1.3, 0.75, 1.1, 0.9, 1.2, 0.8))
    plant(tmp_path, 1.5, batch_size=64)
    both = judge(load(tmp_path), claim(**ON_GPUS), seed="0")
    assert (both.verdict, len(both.cases)) == ("reproduced", 1)
    assert (both.cases[0].low, both.cases[0].high) == (alone.cases[0].low, alone.cases[0].high)


@pytest.mark.exhaustive
def test_other_levels_do_not_come_between_those_of_the_publication(tmp_path: Path) -> None:
    """Batches of 128 and 512 are compared although somebody has measured 256, too."""
    for batch, time_s in ((128, 10.0), (256, 20.0), (512, 5.0)):
        for repeat in REPEATS:
            published(config(tmp_path, repeat=repeat, batch_size=batch), steady(time_s * WOBBLE[repeat]))
    finding = judge(load(tmp_path), claim(**BATCH_RISES), seed="0")
    assert [(case.step, case.verdict) for case in finding.cases] == [("batch size 128 → 512", "reproduced")]


@pytest.mark.exhaustive
def test_steps_of_another_run_than_theirs_decide_nothing(tmp_path: Path) -> None:
    """11 and 5 steps an epoch, of digits in doubled batches, where 002 had 59 and 30 of MNIST."""
    plant(tmp_path, 0.7, epochs=10, scaling="weak")
    findings = {each.claim.name: each for each in judge_all(load(tmp_path))}
    for name in ("scaling_with_startup", "two_gpus_more_accurate", "loss_lower_from_the_start"):
        assert findings[name].cases == ()


@pytest.mark.parametrize(
    ("interval", "margin", "said", "why"),
    [
        ((0.992, 1.005), 0.02, "refuted", ""),  # nil, to within the margin of 2 per cent
        ((0.9, 1.005), 0.02, "refuted", ""),  # nil or the opposite
        ((0.992, 1.03), 0.02, "inconclusive", "allows for all claims holds "),
        ((1.001, 1.005), 0.02, "inconclusive", "the effect is within the margin (0.02)"),
        ((1.021, 1.05), 0.02, "reproduced", ""),
        ((0.489, 0.491), 0.02, "refuted", ""),
        ((0.999, 1.001), 0.0, "inconclusive", "allows for all claims holds "),  # without a margin nothing is nil
    ],
)
def test_an_effect_that_is_measured_to_be_nil_refutes_and_a_small_one_does_not(
    interval: tuple[float, float], margin: float, said: str, why: str
) -> None:
    by = {"by": margin} if margin else {}
    rises, falls = claim(expect={"above": 1} | by).expect, claim(expect={"below": 1} | by).expect
    for ends, expect in ((interval, rises), ((2 - interval[1], 2 - interval[0]), falls)):
        verdict, lacks, _ = decide([sum(ends) / 2] * 6, ends, expect)
        assert verdict == said
        assert (why in lacks, bool(lacks)) == (True, bool(why)), lacks


@pytest.mark.parametrize("timed", [True, False])
def test_where_no_repeats_decide_a_quiet_machine_may(timed: bool) -> None:
    """Steps and losses are as they are on any machine."""
    values = (0.7, 0.8, 1.2, 1.3, 0.9, 1.1)
    _, lacks, _ = decide(values, (0.9, 1.1), claim().expect, after=lambda more: (0.9, 1.1), timed=timed)
    assert ("too near the effect" in lacks, "quiet machine" in lacks) == (True, timed)


def test_weak_scaling_is_named_beside_a_claims_work(tmp_path: Path) -> None:
    """Strong scaling of the same work may stand beside it."""
    plant(tmp_path, 0.7, scaling="weak")
    (case,) = judge(load(tmp_path), claim(**ON_GPUS | {"scope": {}}), seed="0").cases
    assert case.where == "digits · cnn_small · scaling weak"


PARAMETERS = {"logistic_regression": 30730, "cnn": 10**5, "vit": 10**6, "resnet50": 10**7}


def made_up(run: RunConfig) -> Fake:
    """Something of all that claims look at."""
    asked, processes = run.strategy.__struct_fields__, run.strategy.processes(run, run.device)
    busy = {"forward": 1.0, "backward": 1.0, "communication": 0.5} | ({"bubble": 0.5} if "schedule" in asked else {})
    phases = (lambda rank, step: busy) if run.measure.attribution_steps and run.devices > 1 else None
    some: dict[str, Any] = {"sent": lambda epoch, rank: (10**6, 10**5, 0), "device_type": run.device, "phases": phases}
    return Fake(
        parameters=PARAMETERS.get(run.model.name, 402442),
        peak_allocated_bytes=lambda epoch, rank: 100 * MIB,
        peak_allocated_bytes_by_device=lambda epoch, rank: ",".join([str(100 * MIB)] * (run.devices // processes)),
        processes=processes,
        **some,
    )


def copies(run: RunConfig) -> int:
    """How often the training set holds its images."""
    return getattr(run.data, "copies", 1)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> list[Judgement]:
    """The publications' sweeps in one folder, on GPUs where they say nothing else, and two small twins."""
    root = tmp_path_factory.mktemp("full")
    sweeps = ("asu_data_parallel", "asu_model_parallel", "tutorial_mlp", "mnist_two_devices", "uw_frameworks")
    sweeps += ("uw_largest_batch", "megatron", "recomputation")
    for sweep in (*sweeps, "asu_data_parallel_small", "mnist_two_devices_small"):
        for planned in plan(sweep):
            if planned.run.batch_size == 256 or planned.run.batch_size > 2048 or copies(planned.run) == 4:
                continue  # two levels are enough
            device = "cpu" if planned.run.device == "cpu" or sweep.endswith("_small") else "cuda"
            shorter = {"epochs": 10} if planned.run.epochs == 100 else {}
            run = structs.replace(planned.run, results=str(root), repeat=0, device=device, **shorter)
            published(run, made_up(run))
    return judge_all(load(root))


@pytest.mark.exhaustive
@pytest.mark.slow
def test_no_publication_is_judged_by_anothers_runs(full: list[Judgement]) -> None:
    """Sweeps of one publication, which begin alike, share the runs on one device; small twins decide nothing here."""
    for finding in full:
        used = {sweep for case in finding.cases for sweep in case.sweeps}
        own = {sweep.partition("_")[0] for sweep in finding.claim.sweeps}
        assert {sweep.partition("_")[0] for sweep in used} <= own, finding.claim.name
        assert not [sweep for sweep in used if sweep.endswith("_small")], finding.claim.name


@pytest.mark.exhaustive
@pytest.mark.slow
def test_each_publications_sweep_has_runs_for_its_claims(full: list[Judgement]) -> None:
    """All but those of later epochs, of sweeps that are not here, of TensorFlow on GPUs, and of what nobody made up."""
    lacking = {finding.claim.name for finding in full if not finding.cases}
    known = {
        finding.claim.name
        for finding in full
        if {"batch_size_regimes", "preprocessing", "strategy_comparison"} & set(finding.claim.sweeps)
        or finding.claim.name.endswith("_with_epochs")
        or (finding.claim.name.startswith("mirrored") and "device_type" in finding.claim.scope)
    }
    assert lacking <= known, lacking - known
