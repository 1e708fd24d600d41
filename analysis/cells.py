"""The columns of the page's tables: which number, under which heading, rounded how."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from analysis import text
from analysis.comparison.exclusions import describe
from analysis.comparison.speed import SpeedVerdict

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class Column(NamedTuple):
    """A column of a table on the page."""

    name: str
    """Its column in the CSV file."""
    heading: str
    show: Callable[[Any], str] = text.number
    numeric: bool = True


class Cell(NamedTuple):
    """A cell: the text on the page, and the number as the CSV file has it."""

    column: Column
    value: Any
    shown: str


class Shown(NamedTuple):
    """A row of a table."""

    configuration: str
    cells: list[Cell]


def _words(value: Any) -> str:
    return text.MISSING if value is None else str(value)


def _name(value: str) -> str:
    return value.replace("× ", "×\u00a0")  # the devices stay beside their sign where a line breaks


def _interval(shown: str) -> str:
    return shown.replace("–", "\u2060–\u2060") if "(" in shown else shown  # breaks before its interval only


def _verdict(value: str | None) -> str:
    return _words(value).replace("indistinguishable", "indistin\u00adguishable")  # where it may break


CONFIGURATIONS = (
    Column("configuration", "Configuration", _name, numeric=False),
    Column("repeats", "Runs counted", _words),
    Column("steady_epoch_time_s", "Time per epoch (s)"),
    Column("speed_up", "Speed-up and interval"),
    Column("verdict", "Against one device", _verdict, numeric=False),
    Column("efficiency", "Efficiency, steady", text.percent),
    Column("efficiency_with_startup", "Efficiency with start-up", text.percent),
    Column("first_epoch_time_s", "First epoch (s)"),
    Column("startup_without_parity_s", "Start-up (s)"),
    Column("throughput_samples_per_s", "Samples per second"),
    Column("peak_memory_max_bytes", "Memory, largest process (MiB)", text.mebibytes),
    Column("peak_memory_sum_bytes", "Memory, all processes (MiB)", text.mebibytes),
    Column("theoretical_state_bytes", "Model states in theory (MiB)", text.mebibytes),
    Column("bytes_sent_per_step_sum", "Sent per step (MiB)", text.sent),
    Column("theoretical_bubble", "Bubble in theory", text.percent),
    Column("staleness_mean", "Staleness, mean (max)"),
    Column("final_test_accuracy", "Final test accuracy", text.percent),
    Column("parity", "Parity passed", _words, numeric=False),
)

ENERGY = (
    Column("configuration", "Configuration", _name, numeric=False),
    Column("gpu_energy_per_epoch_j", "GPU energy per epoch (J)"),
    Column("gpu_energy_per_sample_j", "Per sample (J)"),
    Column("energy_ratio", "Per sample, against one device, and interval"),
    Column("gpu_power_mean_w", "Power, all GPUs (W)"),
    Column("gpu_power_max_w", "Highest of one GPU (W)"),
    Column("energy_to_accuracy_j", "To the target accuracy (J)"),
    Column("accuracy_target", "Target", text.percent),
    Column("cpu_energy_per_epoch_j", "Processors' energy per epoch (J)"),
    Column("gpu_hours", "GPU-hours of a run"),
    Column("energy_flags", "Flags", _words, numeric=False),
)
"""Shown where any of it was measured."""

RUNS = (
    Column("slug", "Run", _words, numeric=False),
    Column("outcome", "Outcome", _words, numeric=False),
    Column("reason", "Reason", _words, numeric=False),
    Column("exclusion", "Left out of comparisons", _words, numeric=False),
    Column("repeat", "Repeat", _words),
    Column("attempt", "Attempt", _words),
    Column("epochs_finished", "Epochs finished", _words),
    Column("first_epoch_time_s", "First epoch (s)"),
    Column("second_epoch_time_s", "Second epoch (s)"),
    Column("steady_epoch_time_s", "Time per epoch (s)"),
    Column("total_training_time_s", "Training (s)"),
    Column("startup_s", "Start-up, parity check included (s)"),
    Column("throughput_samples_per_s", "Throughput (samples/s)"),
    Column("peak_memory_max_bytes", "Memory, largest process (MiB)", text.mebibytes),
    Column("peak_memory_sum_bytes", "Memory, all processes (MiB)", text.mebibytes),
    Column("bytes_sent_per_step_sum", "Sent per step, all processes (MiB)", text.sent),
    Column("bytes_sent_per_step_busiest", "Sent per step, busiest process (MiB)", text.sent),
    Column("theoretical_bubble", "Bubble in theory", text.percent),
    Column("staleness_mean", "Staleness, mean (max)"),
    Column("final_test_accuracy", "Final test accuracy", text.percent),
    Column("parity_passed", "Parity", text.parity, numeric=False),
    Column(
        "parity_difference",
        "Parity difference",
        lambda value: text.MISSING if value is None else f"{value:.1e}",
    ),
)


def cells(row: Mapping[str, Any], columns: tuple[Column, ...]) -> list[Cell]:
    """The cells of a row of `summary` or `facts`."""
    return [_cell(row, column) for column in columns]


def _cell(row: Mapping[str, Any], column: Column) -> Cell:
    value = row[column.name]
    if column.name == "speed_up":
        return Cell(column, value, _interval(text.speed_up(row)))
    if column.name == "staleness_mean":
        return Cell(column, value, text.staleness(row))
    if column.name == "energy_ratio":
        return Cell(column, value, _interval(text.ratio(row, "energy_ratio")))
    if column.name == "verdict" and value == SpeedVerdict.TOO_FEW:
        return Cell(column, value, f"{value}: n={row['speed_up_pairs']}")
    if column.name == "repeats" and "runs" in row:
        return Cell(column, value, f"{value} of {row['runs']}")
    if column.name == "exclusion" and value is not None:
        return Cell(column, value, describe(value, row["exclusion_detail"]))
    if column.name == "outcome" and value is None:
        return Cell(column, row["state"], row["state"])
    return Cell(column, value, column.show(value))
