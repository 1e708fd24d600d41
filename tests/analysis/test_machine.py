"""A verdict rests on alike and undisturbed machines, in turn: report, compare and claims say the same of it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from analysis import UnlikeWork, by, compare, excluded, load
from analysis.claims import judge
from analysis.comparison.campaign import campaign
from analysis.comparison.exclusions import format_exclusions
from analysis.comparison.pairing import one_after_the_other
from analysis.comparison.run import sessions_of
from analysis.comparison.summary import summary
from analysis.figures import draw
from analysis.figures.bars import time_to_accuracy
from analysis.metrics.disturbance import partly_unmeasured
from analysis.metrics.runs import per_run
from analysis.report.answers import headline
from analysis.report.warnings import warnings
from analysis.runs.reader import Runs
from parallelbench.errors import ConfigError
from parallelbench.measure.environment_match import differences, entries
from tests.analysis.factory import Fake, config, one_and_two, published, steady
from tests.analysis.made_up import (
    IN_TWO,
    SINGLE_S,
    TWO,
    WOBBLE,
    altered,
    cold,
    disturbed,
    in_environments,
    later,
    rows_of,
)
from tests.analysis.test_claims import REPEATS, claim

pytestmark = pytest.mark.slow


def said(runs: Runs) -> tuple[str, str, str]:
    """What report, `compare` and claims say of the sides; a refusal of `compare`, too."""
    try:
        compared = "\n".join(by(runs, "configuration", "single × 1", "ddp × 2").notes)
    except ConfigError as error:
        compared = str(error)
    (case,) = judge(runs, claim(), seed="0").cases
    return "\n".join(warnings(runs)), compared, "\n".join([case.lacks, *case.warnings])


def in_all(runs: Runs, text: str) -> list[bool]:
    return [text.lower() in each.lower() for each in said(runs)]


def verdict_of(runs: Runs) -> str:
    verdict: str = summary(runs).filter(configuration="ddp × 2")["verdict"].item()
    return verdict


# --- others on a rank's cores


def lost(share: float, epochs: set[int]) -> Any:
    """What others take of rank 0 in these epochs."""
    return lambda epoch, rank: share * 5.0 if epoch in epochs and rank == 0 else 0.0


def test_disturbed_times_count_nowhere_and_what_was_learned_counts(usual: Runs) -> None:
    """That no room compares them: `test_every_room_gives_the_answers`."""
    runs = disturbed(usual, 3, 4)
    gone = excluded(runs)
    assert set(gone["exclusion"]) == {"disturbed"}
    assert "in its steady epochs others took up to 32.0\u202f% of a core" in gone["exclusion_detail"][0], (
        "of two of three"
    )
    assert "when the machine is free, submit the sweep again with `--retry disturbed`" in gone["exclusion_detail"][0]
    learned = judge(runs, claim(metric="final_test_accuracy", expect={"above": 0.9}), seed="0")
    assert learned.verdict == "reproduced"


def test_a_steady_epoch_counts_by_what_others_took_of_all(usual: Runs) -> None:
    """Of one of three as long epochs 12 % is 4 %, and 48 % is 16 %."""
    assert verdict_of(disturbed(usual, 3, share=0.12)) == "faster"
    assert verdict_of(disturbed(usual, 3)) == "disturbed"


@pytest.mark.parametrize(
    ("taken_s", "of_rank", "disturbed"),
    [
        (0.27, {}, False),  # 5 % of 5 s, and 30 ms more that the kernel may miscount
        (0.29, {}, True),
        (0.42, {"cores_per_device": 4}, False),  # three further cores of 1 % each
        (0.44, {"cores_per_device": 4}, True),
        (2.50, {"cores_per_device": 4}, True),  # half of one of four cores: the others wait for it
        (0.42, {"strategy": "tf_mirrored", "devices": 4}, False),  # one process has the cores of four devices
        (0.44, {"strategy": "tf_mirrored", "devices": 4}, True),
        (0.27, {"strategy": "ddp", "devices": 4}, False),  # four have one each
        (0.29, {"strategy": "ddp", "devices": 4}, True),
        (1.05, {"cores_per_device": 16}, False),  # 20 % of 5 s, and 60 ms that may be miscounted on 16 cores
        (1.07, {"cores_per_device": 16}, True),
        (None, {}, None),
    ],
)
def test_the_limit_of_a_disturbance(
    tmp_path: Path, taken_s: float | None, of_rank: dict[str, Any], disturbed: bool | None
) -> None:
    run = config(tmp_path, **of_rank)
    processes = run.strategy.processes(run, "cpu")
    published(run, steady(5.0, others_time_s=lambda epoch, rank: taken_s, processes=processes))
    found = per_run(load(tmp_path))
    assert found["second_disturbed"].item() == disturbed
    share = None if taken_s is None else pytest.approx(taken_s / 5.0)
    assert (found["second_lost_share"].item(), found["steady_lost_share"].item()) == (share, share)


@pytest.mark.parametrize(
    ("time_s", "share", "disturbed"),
    [
        (0.02, 0.0, False),
        (0.02, 0.5, True),  # of an epoch, 10 ms: less than a single one may hide
        (0.02, 0.02, False),
        (0.06, 0.5, True),
        (0.005, 0.5, True),
        (2.0, 0.01, False),
    ],
)
def test_short_epochs_are_judged_together(tmp_path: Path, time_s: float, share: float, disturbed: bool) -> None:
    """On rank 1, each with up to 9 ms that ticks add or take away."""

    def taken_s(epoch: int, rank: int) -> float:
        ticks_s = 0.009 * math.sin(2.5 * epoch + rank)
        return ticks_s + (share * time_s if rank == 1 else 0.0)

    published(config(tmp_path, **TWO, epochs=121), steady(time_s, others_time_s=taken_s))
    found = per_run(load(tmp_path))
    assert found["steady_disturbed"].item() is disturbed
    assert found["first_disturbed"].item() is False
    if disturbed:
        assert found["steady_lost_share"].item() == pytest.approx(share, abs=0.06)


@pytest.mark.parametrize(("taken_s", "disturbed"), [(0.01, True), (0.001, None)])
def test_what_is_known_of_a_load_may_be_enough(tmp_path: Path, taken_s: float, disturbed: bool | None) -> None:
    others: dict[str, Any] = {"others_time_s": lambda epoch, rank: None if epoch == 5 else taken_s}
    published(config(tmp_path, epochs=121), steady(0.02, **others))
    assert per_run(load(tmp_path))["steady_disturbed"].item() is disturbed


@pytest.mark.parametrize("measured_by", [{0}, {0, 1, 2}, {0, 1, 2, 3}])
def test_a_load_that_not_all_ranks_measured_is_unknown(tmp_path: Path, measured_by: set[int]) -> None:
    others: dict[str, Any] = {"others_time_s": lambda epoch, rank: 0.0 if rank in measured_by else None}
    published(config(tmp_path, strategy="ddp", devices=4), steady(5.0, processes=4, **others))
    runs = load(tmp_path)
    found, is_known = per_run(runs), len(measured_by) == 4
    assert found["steady_disturbed"].item() is (False if is_known else None)
    assert found["steady_lost_share"].item() == 0.0
    assert len(partly_unmeasured(runs)) == (0 if is_known else 1)


@pytest.mark.parametrize(("share", "disturbed"), [(0.5, True), (0.0, None)])
def test_epochs_that_nobody_measured_do_not_dilute_a_load(tmp_path: Path, share: float, disturbed: bool | None) -> None:
    """Of 19 steady epochs of 5 s the first alone was measured: half of it is 2.6 % of all."""
    others: dict[str, Any] = {"others_time_s": lambda epoch, rank: {1: 0.0, 2: share * 5.0}.get(epoch)}
    published(config(tmp_path, epochs=20), steady(5.0, **others))
    found = per_run(load(tmp_path))
    assert found["steady_lost_share"].item() == pytest.approx(share)
    assert found["steady_disturbed"].item() is disturbed
    assert found["whole_lost_share"].item() == pytest.approx(share / 4), "the first takes 15 s"


def test_results_without_the_load_say_so(usual: Runs) -> None:
    runs = altered(usual, others_time_s=pl.when(~IN_TWO).then("others_time_s"))
    assert in_all(runs, "not all of the compared runs recorded the load during the run") == [True] * 3
    assert verdict_of(runs) == "faster"


COLD = "measure both sides with measure.parity=false"
FIRST_EPOCH = [{"from": {"epoch": 1}, "to": {"epoch": 2}}]


def with_startup(runs: Runs) -> tuple[float | None, bool, set[str]]:
    """The efficiency of ddp × 2 with start-up, whether the headline has it, and what the scaling figure draws."""
    (figure,) = draw(runs, ["scaling"])
    share = summary(runs).row(1, named=True)["efficiency_with_startup"]
    kinds = {row["kind"] for row in rows_of(figure.chart) if row.get("kind")}
    return share, "start-up included" in headline(runs)[0], kinds


@pytest.mark.parametrize("verdict", [True, None])
def test_start_up_is_not_compared_where_one_side_was_warmed_up(usual: Runs, verdict: bool | None) -> None:
    """Parity is checked by default, but never of one device; without a verdict where one device lacks the memory."""
    runs = altered(usual, "run", parity_passed=pl.when(IN_TWO).then(pl.lit(verdict, pl.Boolean)))
    assert with_startup(runs) == (None, False, {"steady"})
    assert sum(COLD in line for line in warnings(runs)) == 1
    for metric in ("total_time_s", "throughput_with_startup_samples_per_s", "first_epoch_time_s"):
        found = judge(runs, claim(metric=metric), seed="0")
        assert (found.verdict, COLD in found.why) == ("inconclusive", True), metric
    of_epochs = judge(runs, claim(metric="slowest_epoch_time_s", contrasts=FIRST_EPOCH), seed="0")
    warm = {case.where: COLD in case.lacks for case in of_epochs.cases}
    assert [on_two for where, on_two in sorted(warm.items(), key=lambda case: "ddp" in case[0])] == [False, True]
    at_first = judge(runs, claim(metric="slowest_epoch_time_s", epoch=1), seed="0")
    assert COLD in at_first.why
    (whole,) = judge(runs, claim(metric="total_training_time_s"), seed="0").cases
    assert any("warmed up one side only" in warning for warning in whole.warnings)
    (steady_state,) = judge(runs, claim(also="total_time_s"), seed="0").cases
    assert (steady_state.verdict, steady_state.also, steady_state.warnings) == ("reproduced", None, ())


def test_start_up_is_not_compared_where_both_sides_were_warmed_up(usual: Runs) -> None:
    """More ranks take longer to connect, which the check hides."""
    runs = altered(usual, "run", startup_parity_s=pl.lit(0.6))
    assert with_startup(runs)[:2] == (None, False)
    found = judge(runs, claim(metric="total_time_s"), seed="0")
    assert (found.verdict, COLD in found.why) == ("inconclusive", True)
    assert judge(runs, claim(metric="total_training_time_s"), seed="0").cases[0].warnings == ()


def test_start_up_is_compared_where_both_sides_were_cold(usual: Runs) -> None:
    """A start-up of 2.4 s, whose last 0.2 s are in the first epoch, which takes 20 s; then three epochs."""
    runs = cold(usual)
    ratios = sorted(
        (22.2 + 3 * one_s) / (22.2 + 3 * one_s / 1.6 * wobble) for one_s, wobble in zip(SINGLE_S, WOBBLE, strict=True)
    )
    speed_up = (ratios[2] * ratios[3]) ** 0.5
    share, is_told, kinds = with_startup(runs)
    assert (share, is_told, kinds) == (pytest.approx(speed_up / 2), True, {"steady", "with_startup"})
    assert not any("measure.parity" in line for line in warnings(runs) if "start-up" in line)
    found = judge(runs, claim(metric="total_time_s"), seed="0")
    assert (found.verdict, found.cases[0].median) == ("reproduced", pytest.approx(1 / speed_up))
    assert judge(runs, claim(metric="first_epoch_time_s", expect={"above": 0.5}), seed="0").verdict == "reproduced"
    assert judge(runs, claim(metric="slowest_epoch_time_s", contrasts=FIRST_EPOCH), seed="0").verdict == "reproduced"


@pytest.mark.exhaustive
def test_epochs_of_unequal_length_are_said_in_the_same_words(tmp_path: Path) -> None:
    """Report and `compare` go on per sample; a claim about epochs is refused."""
    one_and_two(tmp_path, ((steady(10 + r / 10), steady(5 + r / 10)) for r in REPEATS), scaling="weak")
    runs = load(tmp_path)
    lengths = sorted(set((runs.run["train_samples"] - runs.run["dropped_samples"]).to_list()))
    assert len(lengths) == 2
    assert in_all(runs, f"epochs hold {lengths[0]:,} and {lengths[1]:,} samples") == [True] * 3


# --- in turn


ROUNDS = [float(repeat) for repeat in range(6)]
UNKNOWN = float("-inf")
IN_TURN = [0.5, -0.5] * 3
"""Later in even rounds, earlier in odd ones."""


@pytest.mark.parametrize(
    ("one", "other", "apart"),
    [
        (ROUNDS, [time + lead for time, lead in zip(ROUNDS, IN_TURN, strict=True)], False),
        ([0.0, 2.0, 4.0, 6.0], [1.0, 3.0, 5.0, 7.0], True),  # A B A B: a steady drift is in every pair
        ([0.0, 3.0, 4.0, 7.0], [1.0, 2.0, 5.0, 6.0], False),  # A B, B A
        ([0.0, 3.0, 4.0, 7.0, 8.0], [1.0, 2.0, 5.0, 6.0, 9.0], False),  # one round of a pair is to come
        ([0.0, 3.0, 4.0, 6.0], [1.0, 2.0, 5.0, 7.0], False),  # a round that was not reversed, of four
        (ROUNDS, [time + 0.05 for time in ROUNDS], False),  # at the same time, on other nodes
        (ROUNDS[:2], [0.5, 1.5], False),
        (ROUNDS[:2], [2.0, 3.0], True),
        (ROUNDS, [time + 6 for time in ROUNDS], True),
        (ROUNDS, [-1.0, *(time + 6 for time in ROUNDS[1:])], True),  # one early run
        (ROUNDS, [-3.0, -2.0, -1.0, 6.0, 7.0, 8.0], False),  # half before, half after: a steady drift cancels
        (ROUNDS[:1], [9.0], False),  # a single pair has no interval anyway
        ([UNKNOWN] * 6, ROUNDS, False),
    ],
)
def test_which_sides_were_measured_one_after_the_other(one: list[float], other: list[float], apart: bool) -> None:
    sides = [[(at, at + 0.4) for at in starts] for starts in (one, other)]
    assert one_after_the_other(sides) is apart
    assert one_after_the_other(sides[::-1]) is apart


def test_sides_that_were_not_interleaved_are_named_with_what_would_help(tmp_path: Path, usual: Runs) -> None:
    """One early pair is no second measurement of what changed in between."""
    starts = [
        (1.7e9 + 1e5 * repeat, (1.7e9 + 3e4 * (-1) ** repeat if repeat < 3 else 1.8e9) + 1e5 * repeat)
        for repeat in range(8)
    ]
    one_and_two(tmp_path, ((steady(10.0, started_at=at), steady(5.5, started_at=late)) for at, late in starts))
    for runs, verdict, words in (
        (later(usual, 1e7, but=1), "not interleaved", ("sides were measured apart", "both in turn, by one submit")),
        # Three pairs in turn, and one that stands for all others, show how much changes; most still came first.
        (
            load(tmp_path),
            "faster",
            ("the compared runs were measured one after the other", "one submit of both sides interleaves them"),
        ),
    ):
        assert verdict_of(runs) == verdict
        for each in words:
            assert in_all(runs, each) == [True] * 3


# --- unlike machines


def speeds(start: float, end: float) -> dict[str, Any]:
    return {"speeds": {"probed_start_matmul_flop_per_s": start, "probed_end_matmul_flop_per_s": end}}


def probed(runs: Runs, one: tuple[float, float], other: tuple[float, float]) -> Runs:
    """Matrix products at the start and the end of single × 1, and of ddp × 2."""
    columns = {
        f"probed_{moment}_matmul_flop_per_s": pl.when(IN_TWO).then(pl.lit(of_two)).otherwise(pl.lit(of_one))
        for moment, of_one, of_two in zip(("start", "end"), one, other, strict=True)
    }
    return altered(runs, "run", **columns)


@pytest.mark.parametrize(
    ("interrupted_after", "recorded", "session"),
    [
        (3, True, "Monday's"),
        (1, True, "Friday's"),
        (3, False, "Friday's"),  # an older release kept that of the last attempt
    ],
)
def test_an_interrupted_run_belongs_to_the_submit_that_measured_most_of_it(
    usual: Runs, interrupted_after: int, recorded: bool, session: str
) -> None:
    """Two repeats of ddp × 2 began on Monday; Friday's submit measured the rest of them, and all others in turn."""
    interrupted = IN_TWO & pl.col("repeat").is_in([3, 4])
    number = pl.when(interrupted & (pl.col("epoch") > interrupted_after)).then(2).otherwise(1)
    attempts: list[dict[str, Any]] = [{"attempt": 1, "submit": "Monday's"}, {"attempt": 2, "submit": "Friday's"}]
    known = attempts if recorded else [{"attempt": each["attempt"]} for each in attempts]
    runs = altered(
        altered(usual, "epochs", attempt=number.cast(usual.epochs["attempt"].dtype)),
        "run",
        submit=pl.lit("Friday's"),
        resumed_after=pl.when(interrupted).then(pl.lit(str(interrupted_after))),
        attempts_json=pl.when(interrupted).then(pl.lit(json.dumps(known))),
    )
    ids = set(runs.run.filter(interrupted)["run_id"])
    assert {sessions_of(runs)[run_id] for run_id in ids} == {session}
    assert {name for run_id, name in sessions_of(runs).items() if run_id not in ids} == {"Friday's"}
    ((_, pairing),) = campaign(runs).others
    pools = pairing.pools
    assert len(set(pools)) == (5 if session == "Monday's" else 6), "what changed until Friday is in both ratios"


def test_unlike_probes_are_unlike_machines_and_those_within_the_tolerance_are_not(usual: Runs) -> None:
    runs = probed(usual, (5e10, 4e10), (3e10, 3.9e10))
    assert (
        in_all(runs, "busy with something else): speed of a matrix product in a short test: 50.0 Gflop/s and 39.0")
        == [True] * 3
    )
    assert in_all(runs, "measure both in one environment, by one submit, or compare across") == [True] * 3
    assert verdict_of(runs) == "not comparable"
    by(runs, "configuration", "single × 1", "ddp × 2", across=["probed_matmul_flop_per_s"])
    near = probed(usual, (5e10, 4.1e10), (4.1e10, 4.1e10))
    assert in_all(near, "short test") == [False] * 3
    assert verdict_of(near) == "faster"


@pytest.mark.parametrize(
    ("flop", "precision", "believed"), [(6e9, "fp32", True), (8e9, "fp32", False), (8e9, "bf16", True)]
)
def test_more_than_a_device_can_compute_is_not_believed(
    flop: float, precision: str, believed: bool, usual: Runs
) -> None:
    """1,408 samples of an epoch in 10 s at best: 141 samples per second and device."""
    runs = probed(usual, (5e8 * 141, 6e8 * 141), (5e8 * 141, 6e8 * 141))
    of_precision = pl.col("config_json").str.replace('"precision":"fp32"', f'"precision":"{precision}"', literal=True)
    runs = altered(runs, "run", least_flop_per_sample=pl.lit(flop / 10), config_json=of_precision)
    words = "flop/s at least, but a matrix product on it reaches 8.46e+10"
    assert in_all(runs, words) == [not believed] * 3
    assert verdict_of(runs) == ("faster" if believed else "not comparable")


def test_a_machine_that_changes_its_speed_during_a_run_is_a_caveat(usual: Runs) -> None:
    runs = probed(usual, (5e10, 3e10), (5e10, 5e10))
    changed = "changed by more than 25% during a run: speed of a matrix product in a short test: 50.0 Gflop/s and 30.0"
    assert in_all(runs, changed) == [True] * 3
    assert verdict_of(runs) == "faster"
    assert ["quote it with its interval" in headline(each)[0] for each in (runs, usual)] == [True, False]


def test_data_of_one_name_and_other_contents_are_not_compared(usual: Runs) -> None:
    contents = pl.when(IN_TWO).then(pl.lit("b" * 64)).otherwise(pl.lit("a" * 64))
    runs = altered(usual, "run", data_sha256=contents)
    assert in_all(runs, "other contents (sha256 aaaaaaaaaaaa and bbbbbbbbbbbb") == [True] * 3
    assert verdict_of(runs) == "not comparable"
    with_time = by(runs, "configuration", "single × 1", "ddp × 2")
    assert [row.time for row in with_time.rows] == [None]


SLOWING = """ATEN_CPU_CAPABILITY ONEDNN_MAX_CPU_ISA DNNL_MAX_CPU_ISA KMP_BLOCKTIME GOMP_SPINCOUNT LD_PRELOAD
GLIBC_TUNABLES PYTHONMALLOC CUBLAS_WORKSPACE_CONFIG NVIDIA_TF32_OVERRIDE CUDA_LAUNCH_BLOCKING
CUDA_DEVICE_MAX_CONNECTIONS NCCL_TOPO_FILE NCCL_GRAPH_FILE NCCL_TUNER_CONFIG_FILE OPENBLAS_NUM_THREADS BLIS_NUM_THREADS
TCMALLOC_OVERRIDE TORCHINDUCTOR_MAX_AUTOTUNE TORCHDYNAMO_DISABLE"""
PLACES = "TORCHINDUCTOR_CACHE_DIR NCCL_DEBUG_FILE NCCL_TOPO_DUMP_FILE CUDA_VISIBLE_DEVICES SLURM_JOB_ID"
SYSTEM = "cpu_capability cpu_boost cpu_quota_cores nice scheduling_policy transparent_hugepages"


def test_what_halves_the_speed_must_match_but_not_where_something_is_nor_which_job_it_was() -> None:
    usual = json.loads(Fake.environment)
    variables = dict.fromkeys(f"{SLOWING} {PLACES}".split(), "1")
    found = differences(entries(usual), entries(usual | {"variables": variables} | dict.fromkeys(SYSTEM.split(), "x")))
    assert found.keys() == {f"variables.{name}" for name in SLOWING.split()} | {*SYSTEM.split()}


OLDER: dict[str, Any] = {"entries_version": None}


@pytest.mark.exhaustive
def test_what_an_older_release_could_not_record_is_not_known_to_match(usual: Runs) -> None:
    runs = in_environments(usual, OLDER, OLDER)
    assert in_all(runs, "not all of the compared runs recorded all that is recorded of an environment") == [True] * 3
    assert in_all(runs, "whether they match is not known") == [True] * 3
    assert verdict_of(runs) == "faster"
    assert in_all(in_environments(usual, OLDER, {"nice": 0}), "the sides differ in nice: null and 0") == [True] * 3


# --- which runs are compared


def test_of_two_measurements_of_a_repeat_the_first_to_finish_counts(tmp_path: Path) -> None:
    first = published(config(tmp_path), steady(10.0, started_at=1.6e9))
    for number, changes in enumerate(({"parity": False}, {"parity_steps": 2}, {"trace": True})):
        published(config(tmp_path, measure=changes), steady(10.0, started_at=1.7e9 + number))
    found = excluded(load(tmp_path))
    assert set(found["exclusion"]) == {"duplicate"}
    assert found.height == 3
    name = first.path.name
    assert set(found["exclusion_detail"]) == {
        f"{name} of the same configuration and repeat counts, which finished first"
    }


def test_strong_and_weak_scaling_are_not_compared(tmp_path: Path) -> None:
    for scaling in ("strong", "weak"):
        published(config(tmp_path / scaling, scaling=scaling, **TWO), steady(10.0))
    with pytest.raises(ConfigError, match="strong and weak scaling are not compared"):
        compare(load(tmp_path / "strong"), load(tmp_path / "weak"), across=["scaling"])
    for scaling in ("strong", "weak"):
        published(config(tmp_path / "both", scaling=scaling, **TWO), steady(10.0))
    with pytest.raises(ConfigError, match="strong and weak scaling are not compared"):
        by(load(tmp_path / "both"), "scaling", "strong", "weak")


def test_hosts_and_commits_are_keys_of_by(tmp_path: Path) -> None:
    for repeat, host in enumerate(("n1", "n2")):
        environment = json.dumps(json.loads(Fake.environment) | {"host": host})
        published(config(tmp_path, repeat=repeat), steady(10.0, environment=environment))
    found = by(load(tmp_path), "host", "n1", "n2")
    assert [row.verdict.value for row in found.rows] == ["no repeat in common"]
    with pytest.raises(ConfigError, match=r"no run in .* has host=n3"):
        by(load(tmp_path), "host", "n1", "n3")


def test_a_probe_of_other_cores_is_no_probe_of_another_machine(tmp_path: Path) -> None:
    """A device of two cores multiplies faster than one of one core."""
    published(config(tmp_path / "a", repeat=0), steady(10.0, **speeds(5e10, 5e10)))
    published(config(tmp_path / "b", repeat=0, cores_per_device=2), steady(9.0, **speeds(9e10, 9e10)))
    a, b = load(tmp_path / "a"), load(tmp_path / "b")
    with pytest.raises(UnlikeWork) as refused:
        compare(a, b)
    assert "probed" not in str(refused.value)
    compare(a, b, across=["cores_per_device"])


def test_what_was_measured_may_be_enough(usual: Runs) -> None:
    known = pl.when(pl.col("epoch") != 4).then("others_time_s")
    runs = altered(disturbed(usual, 2, 3), others_time_s=known)
    gone = excluded(runs)
    assert set(gone["exclusion"]) == {"disturbed"}


@pytest.mark.parametrize(
    ("epochs", "metric"), [({1}, "first_epoch_time_s"), ({2}, "second_epoch_time_s"), ({1, 2}, "total_training_time_s")]
)
def test_times_of_disturbed_epochs_decide_nothing(usual: Runs, epochs: set[int], metric: str) -> None:
    """Of one epoch more than a 20th was taken, of the whole training only where two were disturbed."""
    busy = disturbed(usual, *epochs, share=0.09)
    assert excluded(busy).is_empty()
    assert judge(usual, claim(metric=metric), seed="0").cases
    assert not judge(busy, claim(metric=metric), seed="0").cases
    assert any("shown, but not compared" in line for line in format_exclusions(busy))
    assert judge(busy, claim(metric="steady_epoch_time_s"), seed="0").cases
    ((_, pairing),) = campaign(cold(busy)).others
    of_whole = metric == "total_training_time_s"
    assert (pairing.speed_up(with_startup=True) is None) == of_whole
    assert pairing.speed_up() is not None
    refusal = "this does not rank them, since others disturbed runs of ddp × 2"
    assert (refusal in time_to_accuracy.finding(busy)) == of_whole, "the way to the target is all epochs"
