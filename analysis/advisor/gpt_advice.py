"""Rows for transformers by formula: all layouts at once as columns, in the formulas' own fit to published steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from analysis.advisor.advice import Row
from analysis.advisor.gpt_layouts import options_of, strategy_name
from analysis.advisor.machines import Machines
from analysis.advisor.published_fit import OTHER_ACCELERATOR, UNTRIED, published_fit
from analysis.advisor.step_model import step_time
from analysis.advisor.suite_advice import capacity_bytes
from analysis.advisor.suite_parameters import ASSUMED_FACTOR
from analysis.advisor.suite_step import Phases
from analysis.advisor.transformer import model_flops
from analysis.advisor.transformer_memory import memory_parts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from analysis.advisor.layouts import Layouts, Values
    from analysis.advisor.machine_figures import MachineFigures
    from parallelbench.config.sites import Hardware

MEASURED_DEVICES = 256
"""Most devices that any published step was measured on."""


@dataclass(frozen=True, kw_only=True)
class GptQuestion:
    """What rows are made from."""

    machines: Machines
    """One row."""
    figures: MachineFigures
    steps_per_epoch: int | None
    assumed: bool
    """Nobody measured or described the machine: its speeds are guesses."""


def machine_of(figures: MachineFigures, hardware: Hardware | None) -> Machines:
    """One machine as the formulas take it: a data sheet, of which their fit says what is reached.

    Of calibrated figures, which are what is reached, the data sheet is inferred.
    """
    from analysis.advisor.machines import machines_of

    if hardware is not None:
        return machines_of([hardware])
    shares = published_fit().parameters
    products = figures.matmul("bf16")
    assert products is not None, "every machine multiplies in fp32"
    network = figures.link if figures.network is None else figures.network
    peak = figures.peak_flops_per_s.get("bf16")
    columns = {
        "peak_flops_per_s": max(products.rates) / shares["matrix_share"] if peak is None else peak.value,
        "flops_per_s": max(products.rates) / shares["matrix_share"],
        "memory_bytes_per_s": figures.memory_bytes_per_s.value / shares["memory_share"],
        "memory_bytes": 0.0 if figures.memory_bytes is None else figures.memory_bytes.value,
        "link_bytes_per_s": figures.link.bytes_per_s.value / shares["link_share"],
        "network_bytes_per_s": network.bytes_per_s.value / shares["network_share"],
        "devices_per_node": float(figures.devices_per_node),
    }
    return Machines(**{name: np.array([value]) for name, value in columns.items()})


def measured_latencies(figures: MachineFigures) -> dict[str, float]:
    """Turns of collectives that were measured on the machine, in place of the fit's."""
    measured = {tier.name: tier.latency_s for tier in figures.tiers if tier.latency_s.origin == "measured"}
    return {f"{name}_latency_s": latency.value for name, latency in measured.items()}


def unpublished(layouts: Layouts) -> NDArray[np.bool_]:
    """Layouts of a kind that no published step has: the formulas know them, and nothing checks them."""
    inner = (layouts.tensor > 1) | (layouts.pipeline > 1)
    result: NDArray[np.bool_] = (
        (layouts.owners > 0)
        | (layouts.copies > 1)
        | (layouts.context > 1)
        | (layouts.chunks > 1)
        | (layouts.sequence_parallel > 0)
        | (layouts.selective > 0)
        | (layouts.experts > 1)
        | ((layouts.sharded > 0) & inner)
    )
    return result


def half_widths(layouts: Layouts, question: GptQuestion) -> Values:
    """Half of each row's 90 % interval of log time: errors on several nodes are others than on one."""
    fitted, figures = published_fit(), question.figures
    several = layouts.devices > figures.devices_per_node
    width = np.where(several, max(fitted.half_width, fitted.across_half_width), fitted.half_width)
    width = width * np.where(unpublished(layouts), UNTRIED, 1.0)
    width = width * np.where(layouts.devices > MEASURED_DEVICES, UNTRIED, 1.0)
    width = width * (1.0 if figures.accelerator in fitted.accelerators else OTHER_ACCELERATOR)
    least = OTHER_ACCELERATOR * np.log(ASSUMED_FACTOR) if question.assumed else 0.0
    result: Values = np.maximum(width, least)
    return result


def gpt_rows(layouts: Layouts, question: GptQuestion) -> list[Row]:
    """A row for each layout."""
    fitted = published_fit()
    machines = question.machines.take(np.zeros(len(layouts), dtype=np.int64))
    time = step_time(layouts, machines, fitted.parameters | measured_latencies(question.figures))
    known = question.figures.accelerator in fitted.accelerators
    columns = {
        "compute_s": time.compute_s,
        "communication_s": time.tensor_s + time.gather_s + time.reduce_s,
        "bubble_s": np.maximum(time.bubble_s, 0.0),
        "optimizer_s": time.update_s,
        "data_s": np.zeros(len(layouts)),
        "other_s": time.fixed_s,
    }
    phases = np.stack(list(columns.values()), axis=1).tolist()
    memory = memory_parts(layouts).peak.tolist()
    peak = "bf16" in question.figures.peak_flops_per_s
    flops = (model_flops(layouts) / (layouts.devices * machines.peak_flops_per_s)).tolist()
    unlike, width = unpublished(layouts).tolist(), np.exp(half_widths(layouts, question)).tolist()
    capacity, power = capacity_bytes(question.figures), question.figures.power_w
    return [
        _row(
            layouts,
            place,
            phases=dict(zip(columns, phases[place], strict=True)),
            width=width[place],
            memory_bytes=memory[place],
            capacity=capacity,
            ideal_s=flops[place] if peak else None,
            power_w=None if power is None else power.value,
            question=question,
            known=known,
            unlike=unlike[place],
        )
        for place in range(len(layouts))
    ]


def _row(
    layouts: Layouts,
    place: int,
    *,
    phases: Mapping[str, float],
    width: float,
    memory_bytes: float,
    capacity: float | None,
    ideal_s: float | None,
    power_w: float | None,
    question: GptQuestion,
    known: bool,
    unlike: bool,
) -> Row:
    parts = Phases(**phases)
    step_s, devices = parts.step_s, round(float(layouts.devices[place]))
    outside = {
        "model": True,
        "strategy": unlike,
        "machine": not known,
        "devices": devices > MEASURED_DEVICES,
    }
    return Row(
        strategy=strategy_name(layouts, place),
        options=options_of(layouts, place),
        devices=devices,
        nodes=-(-devices // question.figures.devices_per_node),
        phases=parts,
        low_s=step_s / width,
        high_s=step_s * width,
        samples_per_step=round(float(layouts.global_batch[place])),
        steps_per_epoch=question.steps_per_epoch,
        memory_bytes=memory_bytes,
        capacity_bytes=capacity,
        mfu=None if ideal_s is None else ideal_s / step_s,
        power_w=power_w,
        measured=False,
        extrapolates=tuple(name for name, applies in outside.items() if applies),
    )
