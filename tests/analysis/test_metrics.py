"""Every metric, by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from analysis import load, per_epoch, per_run, summary
from analysis.figures.bars import memory
from analysis.metrics.columns import page_columns, per_run_columns
from analysis.metrics.runs import accuracy_target, efficiency, energy_to_accuracy, staleness_histogram, time_to_accuracy
from analysis.report.tables import cells
from analysis.text import MISSING
from tests.analysis.factory import MIB, Fake, config, failed, published
from tests.analysis.made_up import rows_of
from tests.helpers import interval

TIMES = {(1, 0): 5.0, (1, 1): 4.0, (2, 0): 2.0, (2, 1): 3.0, (3, 0): 2.5, (3, 1): 1.0, (4, 0): 9.0, (4, 1): 10.0}
SAMPLES = 11 * 128
"""digits: 1,442 training images fill 11 global batches of 128."""


def _one(tmp_path: Path, fake: Fake, **changes: Any) -> dict[str, Any]:
    published(config(tmp_path, **({"strategy": "ddp", "devices": 2, "epochs": 4} | changes)), fake)
    return per_run(load(tmp_path)).row(0, named=True)


def test_times_of_a_run_and_its_epochs(tmp_path: Path) -> None:
    """An epoch takes as long as its slowest rank; a step the median later epoch's time over its steps."""
    row = _one(tmp_path, Fake(epoch_time_s=lambda epoch, rank: TIMES[epoch, rank]))
    epochs = per_epoch(load(tmp_path))
    assert epochs["slowest_epoch_time_s"].to_list() == [5.0, 3.0, 2.5, 10.0]
    assert epochs["training_time_s"].to_list() == [5.0, 8.0, 10.5, 20.5]
    rates = epochs["epoch_throughput_samples_per_s"].to_list()
    assert rates == pytest.approx([SAMPLES / t for t in (5.0, 3.0, 2.5, 10.0)])
    assert (row["epochs_finished"], row["first_epoch_time_s"], row["second_epoch_time_s"]) == (4, 5.0, 3.0)
    assert row["steady_epoch_time_s"] == 3.0  # median of 3, 2.5, 10: the first epoch is not in it
    assert row["throughput_samples_per_s"] == pytest.approx(SAMPLES / 3.0)
    assert row["total_training_time_s"] == 20.5
    # 3.0 s of start-up, of which 0.6 s parity check; 0.2 s of it are step 1, which is in epoch 1 already.
    assert row["startup_without_parity_s"] == pytest.approx(2.4)
    assert row["total_time_s"] == pytest.approx(2.4 + 20.5 - 0.2)
    assert row["throughput_with_startup_samples_per_s"] == pytest.approx(4 * SAMPLES / 22.7)
    assert row["steady_step_time_s"] == pytest.approx(3.0 / 11)  # 11 steps in each
    (column,) = (column for column in page_columns("runs") if column.name == "steady_step_time_s")
    assert (column.title, cells(row, [column])[0].shown) == ("Step (ms)", "273")
    assert cells({"steady_step_time_s": None}, [column])[0].shown == MISSING
    assert summary(load(tmp_path))["steady_step_time_s"].to_list() == pytest.approx([3.0 / 11])


def test_one_epoch_has_no_steady_ones(tmp_path: Path) -> None:
    assert _one(tmp_path, Fake(), epochs=1)["steady_epochs"] is None


def test_each_of_many_epochs_has_its_own_times(tmp_path: Path) -> None:
    """Groups of ranks come in no order once there are many."""
    _one(tmp_path, Fake(epoch_time_s=lambda epoch, rank: float(epoch + rank)), epochs=2000)
    assert per_epoch(load(tmp_path))["slowest_epoch_time_s"].to_list() == [epoch + 1.0 for epoch in range(1, 2001)]


def test_every_attempt_of_a_resumed_run_warms_up(tmp_path: Path) -> None:
    row = _one(tmp_path, Fake(epoch_time_s=lambda epoch, rank: TIMES[epoch, rank], resumed_after=2))
    assert per_epoch(load(tmp_path))["warm_up"].to_list() == [True, False, True, False]
    assert (row["first_epoch_time_s"], row["second_epoch_time_s"]) == (5.0, 3.0)
    assert row["steady_epoch_time_s"] == (3.0 + 10.0) / 2
    assert row["total_training_time_s"] is None, "two warm-ups are in it"
    assert [row["total_time_s"], row["throughput_with_startup_samples_per_s"]] == [None, None], "it started up twice"


def test_an_epoch_that_a_run_was_resumed_with_is_no_second_epoch(tmp_path: Path) -> None:
    row = _one(tmp_path, Fake(epoch_time_s=lambda epoch, rank: TIMES[epoch, rank], resumed_after=1))
    assert (row["first_epoch_time_s"], row["second_epoch_time_s"], row["steady_epoch_time_s"]) == (5.0, None, 6.25)


def test_start_up_without_a_parity_check_is_taken_as_it_is(tmp_path: Path) -> None:
    row = _one(tmp_path, Fake(parity_passed=None, startup={"startup_s": 2.4, "startup_parity_s": None}))
    assert row["startup_without_parity_s"] == pytest.approx(2.4)
    assert row["parity_difference"] is None


def test_samples_are_counted_once_whichever_ranks_own_them(tmp_path: Path) -> None:
    last_stage = Fake(owner=lambda rank: rank == 1)
    row = _one(tmp_path, last_stage, strategy="model_parallel")
    assert row["throughput_samples_per_s"] == pytest.approx(SAMPLES)


def test_one_epoch_has_no_steady_state(tmp_path: Path) -> None:
    row = _one(tmp_path, Fake(), epochs=1)
    nulls = ("second_epoch_time_s", "steady_epoch_time_s", "steady_step_time_s", "throughput_samples_per_s")
    assert [row[name] for name in nulls] == [None] * 4
    assert row["first_epoch_time_s"] == row["total_training_time_s"] == 1.0


def test_host_memory_on_a_cpu_is_each_ranks_peak_then_largest_and_sum(tmp_path: Path) -> None:
    peaks = {(1, 0): 100, (2, 0): 300, (3, 0): 200, (4, 0): 200, (1, 1): 250, (2, 1): 240, (3, 1): 100, (4, 1): 100}
    row = _one(tmp_path, Fake(host_peak_rss_bytes=lambda epoch, rank: peaks[epoch, rank] * MIB))
    assert row["memory_kind"] == "host"
    assert row["peak_memory_max_bytes"] == 300 * MIB
    assert row["peak_memory_sum_bytes"] == 550 * MIB


def test_host_memory_includes_a_loaders_workers(tmp_path: Path) -> None:
    workers = {
        "loader_cpu_time_s": lambda epoch, rank: 0.1,
        "loader_memory_bytes": lambda epoch, rank: 40 * MIB * epoch,
    }
    row = _one(tmp_path / "known", Fake(host_peak_rss_bytes=lambda epoch, rank: 100 * MIB, **workers))
    assert (row["peak_memory_max_bytes"], row["peak_memory_sum_bytes"]) == (260 * MIB, 520 * MIB), "of the fourth epoch"
    ended = Fake(loader_cpu_time_s=lambda epoch, rank: 0.1)
    assert _one(tmp_path / "ended", ended)["peak_memory_sum_bytes"] is None


def test_device_memory_on_cuda_is_what_tensors_held(tmp_path: Path) -> None:
    fake = Fake(device_type="cuda", device_name="GPU", peak_allocated_bytes=lambda epoch, rank: (rank + 1) * 7)
    row = _one(tmp_path, fake)
    assert (row["memory_kind"], row["peak_memory_max_bytes"], row["peak_memory_sum_bytes"]) == ("device", 14, 21)


OF_ONE_PROCESS: dict[str, Any] = {"device_type": "cuda", "device_name": "GPU", "processes": 1}
"""Which drives all GPUs."""


@pytest.mark.parametrize(
    ("texts", "expected"),
    [(["9,80", "70,8", "100,7", "2,1"], 100), (["9,80", None, "100,7", "2,1"], None), ([None] * 4, None)],
)
def test_memory_of_a_device_is_that_of_the_fullest(
    texts: list[str | None], expected: int | None, tmp_path: Path
) -> None:
    """Of a process with several GPUs; the peaks of two devices may be of different epochs. None: an older release."""
    fake = Fake(
        **OF_ONE_PROCESS,
        peak_allocated_bytes=lambda epoch, rank: 107,
        peak_allocated_bytes_by_device=lambda epoch, rank: texts[epoch - 1],
    )
    row = _one(tmp_path, fake)
    assert (row["peak_memory_device_bytes"], row["peak_memory_max_bytes"], row["peak_memory_sum_bytes"]) == (
        expected, 107, 107
    )  # fmt: skip


def test_a_process_with_one_device_is_the_device_whatever_the_release(tmp_path: Path) -> None:
    """No process says what each of its devices holds, as under tables of before version 9."""
    row = _one(tmp_path / "cpu", Fake(host_peak_rss_bytes=lambda epoch, rank: (rank + 1) * MIB))
    assert row["peak_memory_device_bytes"] == row["peak_memory_max_bytes"] == 2 * MIB
    row = _one(tmp_path / "gpu", Fake(device_type="cuda", peak_allocated_bytes=lambda epoch, rank: (rank + 1) * 7))
    assert row["peak_memory_device_bytes"] == row["peak_memory_max_bytes"] == 14


def test_devices_of_a_cpu_in_one_process_share_its_memory(tmp_path: Path) -> None:
    row = _one(tmp_path, Fake(processes=1))
    assert (row["peak_memory_device_bytes"], row["peak_memory_max_bytes"]) == (None, 500 * MIB)


@pytest.mark.slow
def test_memory_is_drawn_by_device_also_where_one_process_drives_several(tmp_path: Path) -> None:
    peaks = {"single": ("60", 1), "data_parallel": ("90,50", 2), "model_parallel": (None, 2)}
    for name, (text, devices) in peaks.items():
        held = sum(map(int, (text or "140").split(",")))
        fake = Fake(
            **OF_ONE_PROCESS,
            peak_allocated_bytes=lambda epoch, rank, held=held: held * MIB,  # type: ignore[misc]
            peak_allocated_bytes_by_device=lambda epoch, rank, text=text: (  # type: ignore[misc]
                text and ",".join(f"{int(each) * MIB}" for each in text.split(","))
            ),
        )
        published(config(tmp_path, strategy=name, devices=devices), fake)
    rows = rows_of(memory.figure(load(tmp_path)))
    device, several, whole = (
        f"Device memory (allocated), {label}"
        for label in ("largest device", "largest process, several devices each", "sum of all processes")
    )
    assert {(row["panel"], row["configuration"]): row["median"] for row in rows} == {
        (device, "single × 1"): 60,
        (device, "data_parallel × 2"): 90,
        (several, "model_parallel × 2"): 140,
        (whole, "single × 1"): 60,
        (whole, "data_parallel × 2"): 140,
        (whole, "model_parallel × 2"): 140,
    }
    said = memory.finding(load(tmp_path))
    assert said.startswith("The largest device takes 60.0 MiB with single × 1 (60.0 MiB over all its processes)")
    assert "140 MiB with model_parallel × 2 (140 MiB over all its processes; that is the largest process" in said


@pytest.mark.parametrize("missing", [{(e, r) for e in range(1, 5) for r in (0, 1)}, {(2, 1)}])
def test_memory_that_one_rank_did_not_measure_is_null_not_less(tmp_path: Path, missing: set[tuple[int, int]]) -> None:
    row = _one(tmp_path, Fake(host_peak_rss_bytes=lambda e, r: None if (e, r) in missing else 5))
    assert row["peak_memory_max_bytes"] is None
    assert row["peak_memory_sum_bytes"] is None


def test_what_was_learned_is_the_last_that_is_known_and_the_best(tmp_path: Path) -> None:
    """A worker of a parameter server clips nothing, and knows no norm of gradients."""
    norms = {1: (4.0, 9.0, 1.0), 2: (2.0, 3.0, 0.5), 3: (1.0, 8.0, 0.25), 4: (0.5, 0.75, 0.0)}
    fake = Fake(
        norms=lambda epoch, rank: norms[epoch] if rank else None,
        expert_imbalance=lambda epoch: [3.0, 2.5, 1.25, 1.5][epoch - 1],
        test_metric=lambda epoch: [0.5, 0.25, 0.75, None][epoch - 1],
        test_accuracy=lambda epoch: [0.5, 0.9, 0.8, 0.7][epoch - 1],
    )
    row = _one(tmp_path, fake)
    epochs = per_epoch(load(tmp_path))
    assert epochs["mean_gradient_norm"].to_list() == [4.0, 2.0, 1.0, 0.5]
    assert epochs["largest_gradient_norm"].to_list() == [9.0, 3.0, 8.0, 0.75]
    assert epochs["share_of_steps_clipped"].to_list() == [1.0, 0.5, 0.25, 0.0]
    assert epochs["test_metric"].to_list() == [0.5, 0.25, 0.75, None]
    assert (row["steady_gradient_norm"], row["highest_gradient_norm"]) == (1.0, 9.0)
    assert row["clipped_steps_share"] == (1.0 + 0.5 + 0.25 + 0.0) / 4
    assert (row["final_expert_imbalance"], row["final_test_metric"]) == (1.5, 0.75)
    assert (row["final_test_accuracy"], row["best_test_accuracy"]) == (0.7, 0.9)
    assert row["parity_difference"] == pytest.approx(3e-7), "the largest of all steps and kinds"


def test_what_was_not_measured_is_null_and_what_one_process_sends_is_0(tmp_path: Path) -> None:
    row = _one(tmp_path, Fake(), strategy="single", devices=1)
    names = ("steady_gradient_norm", "highest_gradient_norm", "clipped_steps_share", "final_expert_imbalance")
    names += ("final_test_metric", "staleness_mean", "staleness_max", "gpu_hours", "gpu_energy_per_epoch_j")
    names += ("steady_gpu_power_max_w", "energy_flags")
    assert {name: row[name] for name in names} == dict.fromkeys(names)
    assert staleness_histogram(load(tmp_path)).is_empty()
    assert row["bytes_sent_per_step_sum"] == 0.0


def test_bytes_sent_per_step_are_summed_over_ranks_and_those_of_the_busiest_rank(tmp_path: Path) -> None:
    # 4 epochs of 11 steps. Rank 0 sends 2,200 + 440 bytes in each, rank 1 nothing but 1,100, and 6,600 in the last.
    def sent(epoch: int, rank: int) -> tuple[int, int, int]:
        return (2200, 0, 440) if rank == 0 else (0, 6600 if epoch == 4 else 1100, 0)

    row = _one(tmp_path, Fake(sent=sent))
    kinds = ("bytes_sent", "gradient_bytes_sent", "activation_bytes_sent", "parameter_bytes_sent")
    # Rank 0: 10,560 bytes in 44 steps; rank 1: 9,900.
    assert [row[f"{kind}_per_step_sum"] for kind in kinds] == [465.0, 200.0, 225.0, 40.0]
    assert [row[f"{kind}_per_step_busiest"] for kind in kinds] == [240.0, 200.0, 0.0, 40.0]


def test_what_is_sent_in_an_unfinished_run_is_that_of_its_finished_epochs(tmp_path: Path) -> None:
    failed(config(tmp_path, epochs=4), "killed", "signal 9", epochs=2, fake=Fake(sent=lambda e, r: (0, 0, 110 * e)))
    row = per_run(load(tmp_path)).row(0, named=True)
    assert row["parameter_bytes_sent_per_step_sum"] == row["bytes_sent_per_step_busiest"] == 330 / 22


STALENESS = {(1, 0): [0, 0, 1], (1, 1): [2, 1], (2, 0): [0, 0, 0], (2, 1): [3, 1]}


def test_staleness_is_over_all_pushes_of_all_workers_and_epochs(tmp_path: Path) -> None:
    row = _one(tmp_path, Fake(staleness=lambda epoch, rank: STALENESS[epoch, rank]), epochs=2)
    assert row["staleness_mean"] == pytest.approx(8 / 10)
    assert row["staleness_max"] == 3
    histogram = staleness_histogram(load(tmp_path)).select("staleness", "pushes", "share").rows()
    assert histogram == [(0, 5, 0.5), (1, 3, 0.3), (2, 1, 0.1), (3, 1, 0.1)]


def test_pushes_without_delay_have_a_staleness_of_0(tmp_path: Path) -> None:
    row = _one(tmp_path, Fake(staleness=lambda epoch, rank: [0, 0]))
    assert (row["staleness_mean"], row["staleness_max"]) == (0.0, 0)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_memory_is_drawn_beside_the_formula_on_gpus_only(tmp_path: Path) -> None:
    for kind, name in (("cuda", "GPU"), ("cpu", "CPU")):
        fake = Fake(
            device_type=kind,
            device_name=name,
            peak_allocated_bytes=lambda epoch, rank: 80 * MIB,
            theoretical_state_bytes=32 * MIB,
        )
        published(config(tmp_path / kind, device=kind), fake)
        rows = rows_of(memory.figure(load(tmp_path / kind)))
        lines = {row["panel"]: row.get("formula") for row in rows}
        said = memory.finding(load(tmp_path / kind))
        if kind == "cuda":
            assert lines == {
                "Device memory (allocated), largest device": 32.0,
                "Device memory (allocated), sum of all processes": None,
            }
            assert said.startswith("The largest device takes 80.0 MiB with single × 1 (80.0 MiB over")
            assert said.endswith("parameters, gradients and optimizer state by formula 32.0 MiB).")
        else:
            assert set(lines.values()) == {None}
            assert "formula" not in said


def test_a_run_that_did_not_finish_has_no_totals(tmp_path: Path) -> None:
    failed(config(tmp_path, epochs=4), "killed", "signal 9", epochs=3)
    row = per_run(load(tmp_path)).row(0, named=True)
    assert row["epochs_finished"] == 3
    assert row["steady_epoch_time_s"] == 1.0
    assert row["best_test_accuracy"] == 0.875
    for name in ("total_training_time_s", "final_test_accuracy", "total_time_s"):
        assert row[name] is None


def test_a_run_that_never_trained_has_nothing(tmp_path: Path) -> None:
    failed(config(tmp_path), "error", "no module", epochs=0, fake=Fake(parity_passed=None))
    row = per_run(load(tmp_path)).row(0, named=True)
    measured = {name for name, value in row.items() if value is not None}
    assert measured == {"run_id", "epochs_finished", "startup_without_parity_s", "closed"}
    assert row["epochs_finished"] == 0
    assert [name for name in row if name != "run_id"] == [column.name for column in per_run_columns()]


def test_time_to_accuracy_is_the_training_time_of_the_first_epoch_that_reaches_it(tmp_path: Path) -> None:
    accuracy = [0.5, 0.9, 0.8, 0.95]
    fake = Fake(epoch_time_s=lambda e, r: TIMES[e, r], test_accuracy=lambda e: accuracy[e - 1])
    _one(tmp_path, fake)
    runs = load(tmp_path)
    for target, expected in ((0.5, 5.0), (0.8, 8.0), (0.9, 8.0), (0.95, 20.5)):
        assert time_to_accuracy(runs, target)["time_to_accuracy_s"].to_list() == [expected]
    assert time_to_accuracy(runs, 0.96).is_empty()


def test_energy_to_accuracy_is_null_once_an_epochs_is(tmp_path: Path) -> None:
    accuracy = [0.5, 0.8, 0.9, 0.95]
    _one(tmp_path, Fake(test_accuracy=lambda e: accuracy[e - 1]))
    runs = load(tmp_path)
    epochs = runs.epochs.with_columns(gpu_energy_j=pl.Series([100.0, 50.0, None, 20.0]))
    runs = dataclasses.replace(runs, tables={**runs.tables, "epochs": epochs})
    for target, expected in ((0.5, 100.0), (0.8, 150.0), (0.9, None), (0.95, None)):
        assert energy_to_accuracy(runs, target)["energy_to_accuracy_j"].to_list() == [expected]
    assert energy_to_accuracy(runs, 0.96).is_empty()
    whole = epochs.with_columns(gpu_energy_j=pl.lit(50.0))
    for attempts, expected in (([1, 1, 1, 1], 150.0), ([1, 1, 2, 2], None)):
        of_attempts = {**runs.tables, "epochs": whole.with_columns(attempt=pl.Series(attempts, dtype=pl.Int32))}
        found = energy_to_accuracy(dataclasses.replace(runs, tables=of_attempts), 0.9)
        assert found["energy_to_accuracy_j"].to_list() == [expected], "as little as its time, of a resumed run"


def powered(power_w: Any, **more: Any) -> Fake:
    """A run on GPUs whose counters are sampled."""
    return Fake(device_type="cuda", device_name="GPU", gpu_power_w=power_w, **more)


def test_energy_is_the_median_of_the_later_epochs_of_all_gpus(tmp_path: Path) -> None:
    # Epochs of 5, 3, 2.5 and 10 s on the slowest rank; each GPU counts to its end. The first warms up.
    fake = powered(lambda epoch, rank: 100.0 * (rank + 1), epoch_time_s=lambda epoch, rank: TIMES[epoch, rank])
    row = _one(tmp_path, fake)
    assert row["gpu_energy_per_epoch_j"] == pytest.approx(300 * 3.0)
    assert row["gpu_energy_per_sample_j"] == pytest.approx(300 * 3.0 / SAMPLES)
    assert (row["steady_gpu_power_mean_w"], row["steady_gpu_power_max_w"]) == pytest.approx((300.0, 200.0))
    assert row["cpu_energy_per_epoch_j"] is None
    assert row["energy_flags"] == "sparse"
    assert row["gpu_hours"] == pytest.approx(2 * (2.4 + 20.5 - 0.2) / 3600)


def test_an_epoch_without_energy_is_not_0_and_all_without_are_null(tmp_path: Path) -> None:
    lost = _one(tmp_path / "a", powered(lambda epoch, rank: None if (epoch, rank) == (3, 1) else 100.0))
    assert lost["gpu_energy_per_epoch_j"] == pytest.approx(200.0)
    assert lost["energy_flags"] == "short sparse"
    none = _one(tmp_path / "b", powered(lambda epoch, rank: 100.0 if rank == 0 else None))
    assert (none["gpu_energy_per_epoch_j"], none["gpu_energy_per_sample_j"], none["steady_gpu_power_mean_w"]) == (
        None,
    ) * 3


@pytest.mark.slow
def test_a_configurations_energy_is_paired_with_one_devices(tmp_path: Path) -> None:
    """In epochs of 4 s: of shorter ones no energies are compared."""
    for repeat, (one, two) in enumerate([(100.0, 150.0), (110.0, 154.0), (90.0, 144.0)]):
        timed: dict[str, Any] = {"epoch_time_s": lambda e, r: 4.0}
        published(config(tmp_path, repeat=repeat), powered(lambda e, r, energy_j=one: energy_j / 4, **timed))
        run = config(tmp_path, repeat=repeat, strategy="ddp", devices=2)
        published(run, powered(lambda e, r, energy_j=two: energy_j / 2 / 4, **timed))
    single, ddp = summary(load(tmp_path)).to_dicts()
    assert single["energy_ratio"] == 1.0
    assert (single["energy_ratio_low"], single["gpu_energy_per_epoch_j"]) == (None, pytest.approx(100.0))
    assert ddp["energy_ratio"] == pytest.approx(1.5)
    assert (ddp["energy_ratio_low"], ddp["energy_ratio_high"]) == pytest.approx(interval((1.5, 1.4, 1.6)))
    assert ddp["gpu_energy_per_sample_j"] == pytest.approx(150.0 / SAMPLES)
    # 87.5 % after three epochs, 80 % is the target.
    assert (ddp["accuracy_target"], ddp["energy_to_accuracy_j"]) == (0.8, pytest.approx(450.0))
    assert ddp["gpu_hours"] == pytest.approx(2 * (2.4 + 12 - 0.2) / 3600)


@pytest.mark.parametrize(
    ("best", "target"),
    [
        ([[0.96, 0.951, 0.99]], 0.95),
        ([[0.95]], 0.95),
        ([[0.1], [0.99]], None),
        ([], None),
        ([[0.9], [None]], None),
        ([[1.0]], 0.999),
        ([[0.96, 0.951, 0.1], [0.99, 0.98, 0.97]], 0.95),
        ([[0.96, None, 0.951]], 0.95),
        ([[0.96, 0.1]], None),
    ],
)
def test_the_target_is_the_highest_step_that_most_runs_of_each_configuration_reach(
    best: list[list[float | None]], target: float | None
) -> None:
    assert accuracy_target(best) == target


def test_efficiency_is_the_speed_up_per_device() -> None:
    # t_1 = 100 s, t_2 = 71.8 s: 100 ÷ (2·71.8)
    assert efficiency(100 / 71.8, times_devices=2) == pytest.approx(0.6964, abs=1e-4)
    assert efficiency(None, times_devices=2) is None
