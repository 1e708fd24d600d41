"""A verdict rests on alike and undisturbed machines, in turn: report, compare and claims say the same of it."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest

from analysis import UnlikeWork, by, compare, excluded, load
from analysis.claims import judge
from analysis.comparison.baseline import against_one_device
from analysis.comparison.configurations import summary
from analysis.comparison.exclusions import format_exclusions
from analysis.comparison.pairing import one_after_the_other
from analysis.figures.bars import time_to_accuracy
from analysis.metrics import per_epoch, per_run
from analysis.report.notes import warnings
from parallelbench.errors import ConfigError
from parallelbench.measure.environment_match import ADDED, differences, entries
from tests.analysis.factory import Fake, config, published
from tests.analysis.test_claims import REPEATS, claim
from tests.analysis.test_compare import steady

if TYPE_CHECKING:
    from pathlib import Path

    from analysis.runs.reader import Runs

pytestmark = pytest.mark.slow

DDP: dict[str, Any] = {"strategy": "ddp", "devices": 2}


def sides(root: Path, one: dict[str, Any], other: dict[str, Any], **changes: Any) -> Runs:
    """single × 1 and ddp × 2, twice as fast, six repeats in turn; what else their runs have measured."""
    for repeat in REPEATS:
        at = Fake.started_at + 1e5 * repeat
        published(config(root, repeat=repeat, **changes), steady(10.0 + repeat / 10, **({"started_at": at} | one)))
        fake = steady(5.0 + repeat / 10, **({"started_at": at + 5e4} | other))
        published(config(root, repeat=repeat, **DDP, **changes), fake)
    return load(root)


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


@pytest.mark.exhaustive
def test_a_median_that_may_rest_on_disturbed_epochs_counts_nowhere(tmp_path: Path) -> None:
    runs = sides(tmp_path, {}, {"others_time_s": lost(0.48, {3})}, epochs=3)
    gone = excluded(runs)
    assert set(gone["exclusion"]) == {"disturbed"}
    assert gone.height == len(REPEATS)
    assert "1 of 2 steady epochs, in which others took up to 48% of a core" in gone["exclusion_detail"][0]
    assert "when the machine is free, submit the sweep again with `--retry disturbed`" in gone["exclusion_detail"][0]
    assert "GPU" not in gone["exclusion_detail"][0], "these runs have none"
    on_gpus = sides(tmp_path / "gpus", {}, {"others_time_s": lost(0.48, {3}), "device_type": "cuda"}, epochs=3)
    assert (
        "48% of a core or computed on its GPU: when the machine is free, submit"
        in excluded(on_gpus)["exclusion_detail"][0]
    )
    assert summary(runs).filter(configuration="ddp × 2")["speed_up"].item() is None
    assert "disturbed" in "\n".join(warnings(runs))
    with pytest.raises(ConfigError, match="disturbed"):
        by(runs, "configuration", "single × 1", "ddp × 2")
    finding = judge(runs, claim(), seed="0")
    assert (finding.verdict, "6 runs don't count: disturbed" in finding.why) == ("inconclusive", True)


@pytest.mark.exhaustive
def test_what_a_disturbed_run_has_learned_counts(tmp_path: Path) -> None:
    runs = sides(tmp_path, {}, {"others_time_s": lost(0.48, {2, 3})}, epochs=3)
    learned = judge(runs, claim(metric="final_test_accuracy", expect={"above": 0.9}), seed="0")
    assert learned.verdict == "reproduced"


@pytest.mark.exhaustive
def test_fewer_disturbed_epochs_than_half_are_a_caveat(tmp_path: Path) -> None:
    runs = sides(tmp_path, {}, {"others_time_s": lost(0.48, {3})}, epochs=4)
    assert excluded(runs).is_empty()
    assert in_all(runs, "others disturbed 6 of 36 steady epochs of the compared runs") == [True] * 3
    assert verdict_of(runs) == "faster"


@pytest.mark.parametrize(
    ("taken_s", "cores", "disturbed"),
    [
        (0.27, 1, False),  # 5 % of 5 s, and 30 ms more that the kernel may miscount
        (0.29, 1, True),
        (0.42, 4, False),  # three further cores of 1 % each
        (0.44, 4, True),
        (2.50, 4, True),  # half of one of four cores: the others wait for it
        (None, 1, None),
    ],
)
def test_the_limit_of_a_disturbance(tmp_path: Path, taken_s: float | None, cores: int, disturbed: bool | None) -> None:
    run = config(tmp_path, cores_per_device=cores)
    published(run, steady(5.0, others_time_s=lambda epoch, rank: taken_s))
    found = per_epoch(load(tmp_path)).filter(epoch=2)
    assert found["disturbed"].item() == disturbed
    assert found["lost_share"].item() == (None if taken_s is None else pytest.approx(taken_s / 5.0))
    counted = None if disturbed is None else 2 * disturbed
    assert per_run(load(tmp_path))["disturbed_epochs"].item() == counted


@pytest.mark.parametrize(
    ("time_s", "share", "disturbed"),
    [
        (0.02, 0.0, 0),
        (0.02, 0.5, 120),  # of an epoch, 10 ms: less than a single one may hide
        (0.02, 0.02, 0),
        (0.06, 0.5, 120),
        (0.005, 0.5, 120),
        (2.0, 0.01, 0),
    ],
)
def test_short_epochs_are_judged_together(tmp_path: Path, time_s: float, share: float, disturbed: int) -> None:
    """On rank 1, each with up to 9 ms that ticks add or take away."""

    def taken_s(epoch: int, rank: int) -> float:
        ticks_s = 0.009 * math.sin(2.5 * epoch + rank)
        return ticks_s + (share * time_s if rank == 1 else 0.0)

    published(config(tmp_path, **DDP, epochs=121), steady(time_s, others_time_s=taken_s))
    runs = load(tmp_path)
    assert per_run(runs)["disturbed_epochs"].item() == disturbed
    epochs = per_epoch(runs)
    assert epochs.filter(epoch=1)["disturbed"].item() is False
    if disturbed:
        assert epochs.filter(~pl.col("warm_up"))["lost_share"].mean() == pytest.approx(share, abs=0.06)


def test_an_epoch_of_unknown_load_leaves_its_pool_unknown(tmp_path: Path) -> None:
    others = {"others_time_s": lambda epoch, rank: None if epoch == 5 else 0.01}
    published(config(tmp_path, epochs=121), steady(0.02, **others))
    found = per_epoch(load(tmp_path)).filter(epoch=4)
    assert found["disturbed"].item() is False
    assert per_run(load(tmp_path))["disturbed_epochs"].item() == 70, "pools of a second, but for the first one"


@pytest.mark.exhaustive
def test_results_without_the_load_say_so(tmp_path: Path) -> None:
    runs = sides(tmp_path, {}, {"others_time_s": lambda epoch, rank: None})
    assert in_all(runs, "not all of the compared runs recorded the load during the run") == [True] * 3
    assert verdict_of(runs) == "faster"


@pytest.mark.exhaustive
def test_parity_on_one_side_only_is_said(tmp_path: Path) -> None:
    """The check warms up devices and libraries before the first epoch."""
    for repeat in REPEATS:
        published(config(tmp_path, repeat=repeat, measure={"parity": False}), steady(10.0, parity_passed=None))
        published(config(tmp_path, repeat=repeat, **DDP), steady(5.0 + repeat / 10))
    runs = load(tmp_path)
    _, compared, claimed = said(runs)
    assert "measure.parity: false and true" in compared
    assert "measure.parity: false and true" in claimed
    both = tmp_path / "both"
    for repeat in REPEATS:
        published(config(both, repeat=repeat), steady(10.0))
        published(config(both, repeat=repeat, **DDP), steady(5.0 + repeat / 10))
    assert "measure.parity" not in "".join(said(load(both)))


@pytest.mark.exhaustive
def test_epochs_of_unequal_length_are_said_in_the_same_words(tmp_path: Path) -> None:
    """Report and `compare` go on per sample; a claim about epochs is refused."""
    runs = sides(tmp_path, {}, {}, scaling="weak")
    lengths = sorted(set((runs.run["train_samples"] - runs.run["dropped_samples"]).to_list()))
    assert len(lengths) == 2
    assert in_all(runs, f"epochs hold {lengths[0]:,} and {lengths[1]:,} samples") == [True] * 3


# --- in turn


ROUNDS = [float(repeat) for repeat in range(6)]


@pytest.mark.parametrize(
    ("one", "other", "apart"),
    [
        (ROUNDS, [time + 0.5 for time in ROUNDS], False),
        (ROUNDS[:2], [0.5, 1.5], False),
        (ROUNDS[:2], [2.0, 3.0], True),
        (ROUNDS, [time + 6 for time in ROUNDS], True),
        (ROUNDS, [-1.0, *(time + 6 for time in ROUNDS[1:])], True),  # one early run
        (ROUNDS, [-3.0, -2.0, -1.0, 6.0, 7.0, 8.0], False),  # half before, half after: a steady drift cancels
        (ROUNDS[:1], [9.0], False),  # a single pair has no interval anyway
        ([float("-inf")] * 6, ROUNDS, False),  # unknown
    ],
)
def test_which_sides_were_measured_one_after_the_other(one: list[float], other: list[float], apart: bool) -> None:
    assert one_after_the_other([one, other]) is apart
    assert one_after_the_other([other, one]) is apart


@pytest.mark.cases("1-6-not interleaved-words0")
@pytest.mark.parametrize(
    ("in_turn", "repeats", "verdict", "words"),
    [
        # One early pair is no second measurement of what changed in between.
        (
            1,
            6,
            "not interleaved",
            ("the two sides were measured apart", "measure both in turn (`parallelbench submit "),
        ),
        # Two pairs in turn, and one that stands for all others, show how much changes; most still came first.
        (2, 7, "faster", ("the compared runs were measured one after the other", "` interleaves them")),
    ],
)
def test_sides_that_were_not_interleaved_are_named_with_the_command_that_would(
    tmp_path: Path, in_turn: int, repeats: int, verdict: str, words: tuple[str, ...]
) -> None:
    for repeat in range(repeats):
        published(config(tmp_path, repeat=repeat), steady(10.0, started_at=1.7e9 + 1e5 * repeat))
        later = 1.7e9 + 5e4 if repeat < in_turn else 1.8e9
        published(config(tmp_path, repeat=repeat, **DDP), steady(5.5, started_at=later + 1e5 * repeat))
    runs = load(tmp_path)
    assert verdict_of(runs) == verdict
    for each in words:
        assert in_all(runs, each) == [True] * 3
    assert in_all(runs, "`parallelbench submit launcher=local") == [True] * 3


# --- unlike machines


def speeds(start: float, end: float) -> dict[str, Any]:
    return {"speeds": {"probed_start_matmul_flop_per_s": start, "probed_end_matmul_flop_per_s": end}}


@pytest.mark.exhaustive
def test_unlike_probes_are_unlike_machines(tmp_path: Path) -> None:
    runs = sides(tmp_path, speeds(5e10, 4e10), speeds(3e10, 3.9e10))
    assert (
        in_all(runs, "busier machine: speed of a matrix product in a short test: 50.0 Gflop/s and 39.0") == [True] * 3
    )
    assert in_all(runs, "measure both in one environment (`parallelbench submit ") == [True] * 3
    assert verdict_of(runs) == "not comparable"
    by(runs, "configuration", "single × 1", "ddp × 2", across=["probed_matmul_flop_per_s"])


@pytest.mark.exhaustive
def test_probes_within_the_tolerance_say_nothing(tmp_path: Path) -> None:
    runs = sides(tmp_path, speeds(5e10, 4.1e10), speeds(4.1e10, 4.1e10))
    assert in_all(runs, "short test") == [False] * 3
    assert verdict_of(runs) == "faster"


@pytest.mark.cases("8000000000.0-fp32-False")
@pytest.mark.parametrize(
    ("flop", "precision", "believed"), [(6e9, "fp32", True), (8e9, "fp32", False), (8e9, "bf16", True)]
)
def test_more_than_a_device_can_compute_is_not_believed(
    tmp_path: Path, flop: float, precision: str, believed: bool
) -> None:
    """1,408 samples of an epoch in 10 s, or in 5 s on two devices: 141 samples per second and device."""
    fake = {"speeds": speeds(5e8 * 141, 6e8 * 141)["speeds"] | {"least_flop_per_sample": flop / 10}}
    runs = sides(tmp_path, fake, fake, precision=precision)
    words = "flop/s at least, but a matrix product on it reaches 8.46e+10"
    assert in_all(runs, words) == [not believed] * 3
    assert verdict_of(runs) == ("faster" if believed else "not comparable")


@pytest.mark.exhaustive
def test_a_machine_that_changes_its_speed_during_a_run_is_a_caveat(tmp_path: Path) -> None:
    runs = sides(tmp_path, speeds(5e10, 3e10), speeds(5e10, 5e10))
    changed = "changed by more than 25% during a run: speed of a matrix product in a short test: 50.0 Gflop/s and 30.0"
    assert in_all(runs, changed) == [True] * 3
    assert verdict_of(runs) == "faster"


@pytest.mark.exhaustive
def test_data_of_one_name_and_other_contents_are_not_compared(tmp_path: Path) -> None:
    runs = sides(tmp_path, {"data_sha256": "a" * 64}, {"data_sha256": "b" * 64})
    assert in_all(runs, "other contents (sha256 aaaaaaaaaaaa and bbbbbbbbbbbb") == [True] * 3
    assert verdict_of(runs) == "not comparable"
    with_time = by(runs, "configuration", "single × 1", "ddp × 2")
    assert [row.time for row in with_time.rows] == [None]


SLOWING = [
    *({"variables": {name: "1"}} for name in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")),
    *({"variables": {name: "1"}} for name in ("KMP_BLOCKTIME", "GOMP_SPINCOUNT", "LD_PRELOAD", "GLIBC_TUNABLES")),
    *({"variables": {name: "1"}} for name in ("PYTHONMALLOC", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE")),
    *({"variables": {name: "1"}} for name in ("CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS")),
    *({"variables": {name: "1"}} for name in ("NCCL_TOPO_FILE", "NCCL_GRAPH_FILE", "NCCL_TUNER_CONFIG_FILE")),
    *({"variables": {name: "1"}} for name in ("OPENBLAS_NUM_THREADS", "BLIS_NUM_THREADS", "TCMALLOC_OVERRIDE")),
    *({"variables": {name: "1"}} for name in ("TORCHINDUCTOR_MAX_AUTOTUNE", "TORCHDYNAMO_DISABLE")),
    *({name: "other"} for name in ADDED),
]


@pytest.mark.parametrize("slowing", SLOWING, ids=lambda entry: next(iter(entry.get("variables", entry))))
def test_what_halves_the_speed_must_match(slowing: dict[str, Any]) -> None:
    usual = json.loads(Fake.environment)
    assert len(differences(entries(usual), entries(usual | slowing))) == 1


@pytest.mark.exhaustive
def test_a_slowing_variable_is_refused_everywhere(tmp_path: Path) -> None:
    slowed = json.dumps(json.loads(Fake.environment) | {"variables": {"ATEN_CPU_CAPABILITY": "default"}})
    runs = sides(tmp_path, {}, {"environment": slowed})
    refused = "the sides differ in variables.ATEN_CPU_CAPABILITY: null and default"
    assert in_all(runs, refused) == [True] * 3
    assert verdict_of(runs) == "not comparable"


@pytest.mark.parametrize(
    "name",
    ["TORCHINDUCTOR_CACHE_DIR", "NCCL_DEBUG_FILE", "NCCL_TOPO_DUMP_FILE", "CUDA_VISIBLE_DEVICES", "SLURM_JOB_ID"],
)
def test_where_something_is_and_which_job_it_was_need_not_match(name: str) -> None:
    usual = json.loads(Fake.environment)
    assert differences(entries(usual), entries(usual | {"variables": {name: "/tmp/7"}})) == {}


def older_environment() -> str:
    older = json.loads(Fake.environment)
    del older["entries_version"]
    return json.dumps(older)


@pytest.mark.exhaustive
def test_what_an_older_release_could_not_record_is_not_known_to_match(tmp_path: Path) -> None:
    older = {"environment": older_environment()}
    runs = sides(tmp_path, older, older)
    assert in_all(runs, "not all of the compared runs recorded cpu_capability, ") == [True] * 3
    assert in_all(runs, "whether they match is not known") == [True] * 3
    assert verdict_of(runs) == "faster"


@pytest.mark.exhaustive
def test_of_the_release_before_only_what_it_lacks_is_not_known_to_match(tmp_path: Path) -> None:
    before = {"environment": json.dumps(json.loads(Fake.environment) | {"entries_version": 2})}
    runs = sides(tmp_path, before, before)
    assert in_all(runs, "not all of the compared runs recorded OPENBLAS_*, BLIS_*, TCMALLOC_*") == [True] * 3
    assert in_all(runs, "cpu_capability") == [False] * 3


@pytest.mark.exhaustive
def test_what_only_one_side_could_record_is_refused(tmp_path: Path) -> None:
    newer = json.dumps(json.loads(Fake.environment) | {"nice": 0})
    runs = sides(tmp_path, {"environment": older_environment()}, {"environment": newer})
    assert in_all(runs, "the sides differ in nice: null and 0") == [True] * 3


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
        published(config(tmp_path / scaling, scaling=scaling, **DDP), steady(10.0))
    with pytest.raises(ConfigError, match="strong and weak scaling are not compared"):
        compare(load(tmp_path / "strong"), load(tmp_path / "weak"), across=["scaling"])
    for scaling in ("strong", "weak"):
        published(config(tmp_path / "both", scaling=scaling, **DDP), steady(10.0))
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


@pytest.mark.exhaustive
def test_half_of_the_epochs_are_enough_whatever_was_not_measured_of_the_others(tmp_path: Path) -> None:
    share = lost(0.48, {2, 3, 4, 5, 6})
    runs = sides(
        tmp_path, {}, {"others_time_s": lambda epoch, rank: None if epoch == 4 else share(epoch, rank)}, epochs=6
    )
    gone = excluded(runs)
    assert set(gone["exclusion"]) == {"disturbed"}
    assert set(per_run(runs).join(gone, on="run_id", how="semi")["disturbed_epochs"]) == {4}


@pytest.mark.cases("epochs2-total_training_time_s")
@pytest.mark.parametrize(
    ("epochs", "metric"),
    [({1}, "first_epoch_time_s"), ({2}, "second_epoch_time_s"), ({1, 2}, "total_training_time_s")],
)
def test_times_of_disturbed_epochs_decide_nothing(tmp_path: Path, epochs: set[int], metric: str) -> None:
    quiet = sides(tmp_path / "quiet", {}, {"others_time_s": lost(0.0, set())}, epochs=12)
    busy = sides(tmp_path / "busy", {}, {"others_time_s": lost(0.48, epochs)}, epochs=12)
    assert excluded(busy).is_empty()
    assert judge(quiet, claim(metric=metric), seed="0").cases
    assert not judge(busy, claim(metric=metric), seed="0").cases
    assert any("shown, but not compared" in line for line in format_exclusions(busy))
    assert judge(busy, claim(metric="steady_epoch_time_s"), seed="0").cases
    (pairing,) = (found for (_, name), found in against_one_device(busy).items() if name == "ddp × 2")
    assert (pairing.speed_up(with_startup=True) is None) == (metric == "total_training_time_s")
    assert pairing.speed_up() is not None


@pytest.mark.exhaustive
def test_a_disturbed_way_to_the_target_ranks_nobody(tmp_path: Path) -> None:
    """Though the runs count: their steady epochs were undisturbed."""
    quiet = sides(tmp_path / "quiet", {}, {"others_time_s": lost(0.0, set())}, epochs=6)
    busy = sides(tmp_path / "busy", {}, {"others_time_s": lost(0.48, {1})}, epochs=6)
    assert excluded(busy).is_empty()
    refusal = "this does not rank them, since others disturbed runs of ddp × 2"
    assert [refusal in time_to_accuracy.finding(runs) for runs in (quiet, busy)] == [False, True]
