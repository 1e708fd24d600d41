"""A comparison says what it rests on: what does not count, what has no steady epoch, what a side has lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from analysis import by, compare, format_exclusions, load
from analysis.comparison import gate
from analysis.comparison.exclusions import excluded
from analysis.comparison.summary import facts, learned, learning, summary
from analysis.report.warnings import warnings
from analysis.runs.reader import Runs
from parallelbench.cli import main
from parallelbench.config.identity import run_id
from tests.analysis.factory import STARTUP, Fake, config, failed, one_and_two, published, steady
from tests.analysis.test_two_sides import BETWEEN, begins
from tests.faults import fault

LATER = BETWEEN
pytestmark = pytest.mark.slow


def measured(root: Path, times: list[float], *, fake: dict[str, Any] | None = None, **changes: Any) -> Runs:
    """Repeats that take these times per epoch."""
    for repeat, time_s in enumerate(times):  # each in a submit of its own
        at = begins((fake or {}).get("started_at", Fake.started_at), repeat)
        published(config(root, repeat=repeat, **changes), steady(time_s, **(fake or {}) | {"started_at": at}))
    return load(root)


def half_dead(root: Path, at: float = LATER) -> Runs:
    """Three repeats of single × 1; of four of ddp × 2 two died, one was not started."""
    measured(root, [10.0, 10.1, 10.2], fake={"started_at": at})
    ddp: dict[str, Any] = {"strategy": "ddp", "devices": 2}
    measured(root, [6.0, 6.1], fake={"started_at": at}, **ddp)
    for repeat in (2, 3):
        failed(config(root, repeat=repeat, **ddp), "oom", "out of memory: rank 1", epochs=1, fake=Fake(started_at=at))
    return load(root)


def whole(root: Path) -> Runs:
    measured(root, [10.0, 10.1, 10.2])
    return measured(root, [6.0, 6.1, 6.2, 6.3], strategy="ddp", devices=2)


# --- what does not count


@fault(
    "numbers",
    "What is measured changes between repeats",
    injection="a data set of one's own is exchanged after the first repeat; another time, torch is",
    outcome="later repeats do not count beside the first; the report names what differs; nothing is pooled",
)
def test_repeats_that_are_unlike_are_not_pooled(tmp_path: Path) -> None:
    newer = Fake.environment.replace("2.15.0", "2.16.0")
    for repeat, share in enumerate((1.0, 0.375, 0.5)):
        learned: dict[str, Any] = {"test_accuracy": lambda epoch, share=share: share}
        fake = {"data_sha256": str(min(repeat, 1)) * 64, "started_at": Fake.started_at + 1e5 * repeat}
        published(config(tmp_path / "data", repeat=repeat), Fake(**learned, **fake))  # type: ignore[arg-type]
        fake = {"environment": newer if repeat else Fake.environment, "started_at": Fake.started_at + 1e5 * repeat}
        published(config(tmp_path / "torch", repeat=repeat), Fake(**learned, **fake))  # type: ignore[arg-type]
    runs = load(tmp_path / "data")
    (row,) = summary(runs).to_dicts()
    assert (row["repeats"], row["runs"], row["final_test_accuracy"]) == (1, 3, 1.0)
    assert format_exclusions(runs) == ["single × 1: 2 of 3 runs do not count (2 other data)."]
    assert set(learning(runs, test="test_accuracy", training="train_accuracy")["repeat"]) == {0}
    (detail,) = facts(runs)["exclusion_detail"].drop_nulls().unique()
    assert detail.startswith(f"data_sha256: {'0' * 64} and {'1' * 64}, in ")
    assert "forget the runs that were measured by mistake" in detail
    runs = load(tmp_path / "torch")
    (row,) = summary(runs).to_dicts()
    assert (row["repeats"], row["exclusions"]) == (1, "2 other environment")
    assert facts(runs)["exclusion_detail"].drop_nulls()[0].startswith("packages.torch: 2.15.0 and 2.16.0, in ")
    assert set(learning(runs, test="test_accuracy", training="train_accuracy")["repeat"]) == {0, 1, 2}, "times alone"


@pytest.mark.exhaustive
def test_what_does_not_count_is_told_by_configuration_and_reason(tmp_path: Path) -> None:
    half_dead(tmp_path)
    published(config(tmp_path, strategy="fsdp", devices=2), Fake(parity_passed=False))
    (tmp_path / "demo" / "half").mkdir()
    assert format_exclusions(load(tmp_path)) == [
        "ddp × 2: 2 of 4 runs do not count (2 oom).",
        "fsdp × 2: 1 of 1 run does not count (1 parity_failed).",
        f"Skipped: {tmp_path}/demo/half: no config.yaml: half-written, or not a run.",
    ]


def test_report_and_claims_tell_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    half_dead(tmp_path)
    monkeypatch.setattr("analysis.report.page.write_report_of", lambda *_: "page")
    for verb in ("report", "claims"):
        assert main([verb, str(tmp_path)]) == 0
        assert "ddp × 2: 2 of 4 runs do not count (2 oom)." in capsys.readouterr().out, verb


# --- what one side lost


@pytest.mark.exhaustive
def test_the_gate_does_not_pass_what_one_side_has_lost(tmp_path: Path) -> None:
    a, b = whole(tmp_path / "a"), half_dead(tmp_path / "b")
    found = compare(a, b)
    assert "B: ddp × 2: 2 of 4 runs do not count (2 oom)." in found.notes
    judged = gate.gate(found, margin=0.5)
    assert judged.code == gate.UNDECIDED
    assert "side B lacks 2 of 4 repeats of ddp × 2" in judged.message
    times = [10.0, 10.1, 10.2, 10.3, 10.4]
    fewer, more = measured(tmp_path / "c", times[:4], fake={"started_at": LATER}), measured(tmp_path / "d", times)
    assert gate.gate(compare(fewer, more), margin=0.5).code == gate.PASSED, "more repeats do no harm"


@pytest.mark.exhaustive
def test_of_two_values_of_a_key_the_failed_runs_are_told_too(tmp_path: Path) -> None:
    runs = half_dead(tmp_path)
    (tmp_path / "demo" / "half").mkdir()
    found = by(load(tmp_path), "strategy", "single", "ddp", across=["devices"])
    assert found.notes[-2] == "B: ddp × 2: 2 of 4 runs do not count (2 oom)."
    assert [note for note in found.notes if "half-written" in note] == list(found.notes[-1:])
    assert found.lost == ("1 of 3 repeats of single × 1",)
    assert by(runs, "strategy", "ddp", "single", across=["devices"]).lost == ()


@pytest.mark.parametrize("invalid", [{"measure": {"deterministic": True}}, {}])
def test_other_data_are_no_repeat_whatever_else_is_wrong_with_the_times(
    invalid: dict[str, Any], tmp_path: Path
) -> None:
    """Of which losses and accuracies would count otherwise."""
    disturbed = {} if invalid else {"others_time_s": lambda epoch, rank: 0.5}
    for repeat, content in enumerate(("0" * 64, "0" * 64, "1" * 64)):
        run = config(tmp_path, repeat=repeat, **invalid)
        at = Fake.started_at + 1e5 * repeat
        published(run, Fake(data_sha256=content, test_accuracy=lambda _, r=repeat: r / 8, started_at=at, **disturbed))
    runs = load(tmp_path)
    assert set(learned(runs)["repeat"]) == {0, 1}
    gone = dict(excluded(runs).join(runs.run, on="run_id").select("repeat", "exclusion").rows())
    times = "deterministic" if invalid else "disturbed"
    assert gone == {0: times, 1: times, 2: "other data"}


def test_of_a_repeat_that_was_measured_twice_what_was_learned_counts_once(tmp_path: Path) -> None:
    """The undisturbed one, though the other one finished first."""
    published(config(tmp_path), Fake(others_time_s=lambda epoch, rank: 0.5))
    unchecked = config(tmp_path, measure={"parity": False})
    published(unchecked, Fake(started_at=Fake.started_at + 1e5))
    runs = load(tmp_path)
    assert learned(runs)["run_id"].to_list() == [run_id(unchecked)]
    assert excluded(runs)["exclusion"].to_list() == ["duplicate"]


# --- what has no time, and per what energy is


def test_one_epoch_has_no_steady_state_and_more_repeats_would_not_help(tmp_path: Path) -> None:
    a = measured(tmp_path / "a", [1.0, 1.1], epochs=1)
    b = measured(tmp_path / "b", [1.0, 1.1], fake={"started_at": LATER})
    found = compare(a, b, across=["epochs"])
    why = "no steady epoch on side A: epochs=1, at least 2 are needed"
    assert [row.shown_verdict for row in found.rows] == [why]
    assert gate.gate(found, margin=0.5).message.startswith(f"UNDECIDED: single × 1: {why}")
    assert compare(b, a, across=["epochs"]).rows[0].shown_verdict == why.replace("side A", "side B")


@pytest.mark.exhaustive
def test_all_configurations_are_all_or_there_is_no_ratio_of_all(tmp_path: Path) -> None:
    a = measured(tmp_path / "a", [10.0, 10.1])
    b = measured(tmp_path / "b", [12.0, 12.2], fake={"started_at": LATER})
    assert compare(a, b).overall is not None
    measured(tmp_path / "a", [6.0, 6.1], batch_size=64, epochs=1)
    measured(tmp_path / "b", [6.0, 6.1], fake={"started_at": LATER}, batch_size=64, epochs=1)
    found = compare(load(tmp_path / "a"), load(tmp_path / "b"))
    assert (found.overall, found.verdict) == (None, "not all have a time")
    assert sorted(row.time is None for row in found.rows) == [False, True]
    assert "all configurations" not in gate.gate(found, margin=0.1).message


def test_energy_is_compared_per_sample_like_time(tmp_path: Path) -> None:
    gpu: dict[str, Any] = {"gpu_power_w": lambda e, r: 300.0, "device_type": "cuda", "device_name": "GPU"}
    sides = [
        measured(tmp_path / side, [time, time], fake=gpu | {"started_at": at}, measure={"steps_per_epoch": steps})
        for side, time, steps, at in (("a", 10.0, 2, 1.7e9), ("b", 20.0, 4, LATER))
    ]
    (row,) = compare(*sides, across=["measure.steps_per_epoch"]).rows
    ratios = {name: ratio and ratio.median for name, ratio in row.ratios.items()}
    assert ratios["steady_epoch_time_s"] == pytest.approx(1.0)
    assert ratios["gpu_energy_per_sample_j"] == pytest.approx(1.0)


@pytest.mark.parametrize(("packed", "compared"), [((True, True), True), ((False, True), False)])
def test_packed_runs_are_compared_with_each_other_only(
    packed: tuple[bool, bool], compared: bool, tmp_path: Path
) -> None:
    """Their processes were forked with torch loaded; what they have no part of is their start."""
    for repeat in range(4):
        for devices, pack in zip((1, 2), packed, strict=True):
            strategy = {1: "single", 2: "ddp"}[devices]
            run = config(tmp_path, repeat=repeat, strategy=strategy, devices=devices, launcher={"pack": pack})
            published(run, Fake(startup=dict.fromkeys(STARTUP) if pack else {}))
    runs = load(tmp_path)
    assert excluded(runs).is_empty()
    row = summary(runs).filter(strategy="ddp")
    assert row["steady_epoch_time_s"].to_list() == [1.0]
    assert row["total_time_s"].to_list() == [None]
    assert row["speed_up"].is_not_null().to_list() == [compared]
    found = by(runs, "configuration", "single × 1", "ddp × 2", across=() if compared else ("packed",))
    assert found.overall is not None, "and where it is asked for"


def test_packed_runs_of_an_older_release_do_not_count(tmp_path: Path) -> None:
    """All their repeats were forked from one process; they are told by their start, which was recorded then."""
    published(config(tmp_path, launcher={"pack": True}))
    runs = load(tmp_path)
    assert excluded(runs)["exclusion"].to_list() == ["packed"]
    assert not any("a new one for each repeat" in warning for warning in warnings(runs))
    assert any("submit again" in warning for warning in warnings(runs))


@pytest.mark.exhaustive
def test_further_repeats_come_after_those_that_do_not_count(tmp_path: Path) -> None:
    one_and_two(tmp_path, ((steady(10.0 + r), steady(6.0 + r / 2, parity_passed=r < 2)) for r in range(5)))
    warning = next(line for line in warnings(load(tmp_path)) if "sweep.repeats" in line)
    assert "add 4 repeats per side, in turn (sweep.repeats=9)." in warning
