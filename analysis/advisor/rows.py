"""The rows of the advisor's answer, of the suite's own models and of transformers by formula.

Of the suite's own models every strategy with its options is a candidate, and is predicted, or measured where a finished
run is the same; of transformers all layouts at once as columns, in the formulas' own fit to published steps.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

from analysis.advisor.advice import Row
from analysis.advisor.fit import ASSUMED_FACTOR, OTHER_ACCELERATOR, UNTRIED, of_a_step, published_fit
from analysis.advisor.layouts import USUAL, Impossible, options_of, strategy_name
from analysis.advisor.machine import MULTIPROCESSORS, machines_of, made_of
from analysis.advisor.memory import memory_parts, suite_peak_bytes
from analysis.advisor.strategies import SuiteJob, check_formula, forward_flop
from analysis.advisor.transformer import model_flops
from parallelbench.config.identity import canonical_json
from parallelbench.config.run_rules import check_run
from parallelbench.errors import ConfigError
from parallelbench.strategies.single import Single

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from analysis.advisor.fit import Learnt, PublishedFit
    from analysis.advisor.layouts import Layouts, Values
    from analysis.advisor.machine import MachineFigures, Machines
    from analysis.advisor.step import Phases
    from analysis.advisor.sweep_evidence import MeasuredStep
    from parallelbench.config.run import RunConfig
    from parallelbench.config.sites import Hardware
    from parallelbench.measure.layer_records import LayerCount, ModelMemory


MEASURED_WIDTH = 1.05
"""By which factor a measured step may differ when it is measured again: an assumption."""


def configuration_id(run: RunConfig) -> str:
    """Equal for runs whose steps are the same, wherever, how long and with which seeds they train."""
    return canonical_json(of_a_step(run))


GROUP_SIZES = (2, 4, 8, 16, 32, 64)
"""Sizes of groups that are tried."""


@dataclass(frozen=True)
class SuiteCandidate:
    """One run that could be."""

    run: RunConfig
    options: tuple[str, ...]
    """Overrides in which it differs from what was asked for, without strategy and devices."""

    def refused(self, why: str, *, trains: bool = False) -> Impossible:
        """The same, where it can't be; or, where it `trains`, can't be predicted."""
        strategy, devices = self.run.strategy.name, self.run.devices
        return Impossible(strategy=strategy, options=self.options, devices=devices, why=why, trains=trains)


def suite_candidates(
    bases: Sequence[RunConfig],
    devices: Sequence[int],
    *,
    given: frozenset[str],
    device_type: str,
    per_node: int,
    nodes: int | None = None,
) -> tuple[list[SuiteCandidate], list[Impossible]]:
    """Every strategy of `bases` on every number of devices, with all its options but those that were `given`.

    `per_node`: devices of a node; runs on more get as many nodes as they need, unless `nodes` says how many.
    """
    found: list[SuiteCandidate] = []
    impossible: list[Impossible] = []
    alone = any(isinstance(base.strategy, Single) for base in bases)
    for base, count in itertools.product(bases, devices):
        if count == 1 and alone and not isinstance(base.strategy, Single):
            continue  # as in sweeps, every strategy is `single` on one device
        needed = -(-count // per_node)
        spread = nodes or needed
        try:
            placed = msgspec.structs.replace(base, devices=count, nodes=spread, device=device_type)
            if spread < needed:
                why = f"devices={count} need more than nodes={spread} of {per_node} devices"
                raise ConfigError(f"{why}: choose nodes={needed} or more")
        except ConfigError as error:
            why = error.reason
            impossible.append(Impossible(strategy=base.strategy.name, options=(), devices=count, why=why))
        else:
            possible, refused = _of_strategy(placed, given)
            found += possible
            impossible += refused
    return found, impossible


def _of_strategy(run: RunConfig, given: frozenset[str]) -> tuple[list[SuiteCandidate], list[Impossible]]:
    """All options of one strategy on so many devices; where none is possible, the first refusal stands for all."""
    possible: list[SuiteCandidate] = []
    refused: list[Impossible] = []
    for chosen in _options(run, given):
        written = {name: f"strategy.{name}={_text(value)}" for name, value in chosen.items()}
        try:
            # Structs are replaced without their checks of types; the values are from the fields' own ranges.
            varied = msgspec.structs.replace(run, strategy=msgspec.structs.replace(run.strategy, **chosen))
            check_run(varied, run.device)
        except ConfigError as error:
            refused.append(SuiteCandidate(run, tuple(written.values())).refused(error.reason))
        else:
            differ = (text for name, text in written.items() if getattr(run.strategy, name) != chosen[name])
            possible.append(SuiteCandidate(varied, tuple(differ)))
    if not possible:
        return [], refused[:1]
    try:
        check_formula(possible[0].run)
    except ConfigError as error:
        return [], [possible[0].refused(error.reason, trains=True)]
    return possible, []


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _options(run: RunConfig, given: frozenset[str]) -> Iterator[dict[str, Any]]:
    """The values of a strategy's options that decide about time and memory; what was asked for stays."""
    free = {name for name in run.strategy.__struct_fields__ if f"strategy.{name}" not in given}
    axes = {name: values for name, values in _axes(run).items() if name in free}
    for combination in itertools.product(*axes.values()):
        chosen = dict(zip(axes, combination, strict=True))
        if "schedule" in chosen and "stages_per_rank" in free:
            chosen["stages_per_rank"] = 2 if chosen["schedule"] == "interleaved_1f1b" else 1
        yield chosen


def _axes(run: RunConfig) -> dict[str, list[Any]]:
    """Option → the values that are tried; the shipped value first."""
    smaller = [size for size in GROUP_SIZES if size < run.devices]
    up_to = [size for size in GROUP_SIZES if size <= run.devices]
    # Accumulating gradients only costs time; no formula has it.
    pieces = {"micro_batches": [4, 8, 16, 32]} if run.strategy.has_stages else {}
    return {
        "shard": smaller or [2],
        "stages": up_to or [2],
        "tensor": up_to or [2],
        "servers": [size for size in (1, 2, 4) if size < run.devices] or [1],
        "reshard_after_forward": [True, False],
        "schedule": ["1f1b", "gpipe", "interleaved_1f1b"],
        **pieces,
    }


def suite_rows(
    candidates: Sequence[SuiteCandidate],
    *,
    layers: Sequence[LayerCount],
    memory: ModelMemory | None,
    figures: MachineFigures,
    learnt: Learnt,
    measured: Mapping[str, MeasuredStep],
) -> tuple[list[Row], list[Impossible]]:
    """A row for each candidate that can be, and the reason for each that can't.

    `measured`: what finished runs say of a configuration (`configuration_id`).
    """
    rows: list[Row] = []
    impossible: list[Impossible] = []
    for each in candidates:
        try:
            row = _suite_row(each, SuiteJob(run=each.run, layers=layers, figures=figures), memory, learnt)
            found = measured.get(configuration_id(each.run))
            rows.append(row if found is None else _as_measured(row, found))
        except ConfigError as error:
            impossible.append(each.refused(str(error), trains=True))
    return rows, impossible


def _suite_row(candidate: SuiteCandidate, job: SuiteJob, memory: ModelMemory | None, learnt: Learnt) -> Row:
    run = candidate.run
    phases, outside = learnt.fit.phases(job), learnt.outside(run)
    width = float(np.exp(learnt.half_width_of(outside)))
    return Row(
        strategy=run.strategy.name,
        options=candidate.options,
        devices=run.devices,
        nodes=run.nodes,
        phases=phases,
        low_s=phases.step_s / width,
        high_s=phases.step_s * width,
        samples_per_step=run.global_batch_size,
        steps_per_epoch=run.steps_per_epoch,
        memory_bytes=None if memory is None else suite_peak_bytes(job, memory),
        capacity_bytes=capacity_bytes(job.figures, run.devices // run.nodes),
        mfu=_mfu(job, phases.step_s),
        power_w=_power_w(learnt, phases),
        measured=False,
        extrapolates=outside,
        trains_alike=run.strategy.equals_one_device(run),
    )


def _as_measured(row: Row, found: MeasuredStep) -> Row:
    """The row with the measured time; its phases keep their shares."""
    return replace(
        row,
        phases=row.phases.stretched(found.step_s / row.step_s),
        low_s=found.step_s / MEASURED_WIDTH,
        high_s=found.step_s * MEASURED_WIDTH,
        power_w=row.power_w if found.energy_j is None else found.energy_j / found.step_s / row.devices,
        measured=True,
        extrapolates=(),
    )


def _power_w(learnt: Learnt, phases: Phases[float]) -> float | None:
    """Mean power of one device in a step, from its power while it computes and while it waits."""
    if learnt.powers_w is None:
        return None
    (busy_w, waiting_w), waiting = learnt.powers_w, (phases.communication_s + phases.bubble_s) / phases.step_s
    return busy_w * (1.0 - waiting) + waiting_w * waiting


def capacity_bytes(figures: MachineFigures, in_use: int) -> float | None:
    """Memory of a device, less what libraries take; so many processors of a node share its memory."""
    if figures.memory_bytes is None:
        return None
    shared = in_use if figures.device_type == "cpu" else 1
    taken = 0.0 if figures.overhead_bytes is None else figures.overhead_bytes.value
    return figures.memory_bytes.value / shared - taken


def _mfu(job: SuiteJob, step_s: float) -> float | None:
    """FLOPs of products and convolutions, forward and twice that backward, ÷ what all devices could do."""
    peak = job.figures.peak_flops_per_s.get(job.run.precision)
    if peak is None:
        return None
    return 3.0 * forward_flop(job.run, job.layers) / (step_s * job.run.devices * peak.value)


Guessed = Literal["devices", "link", "network"]


def machine_of(figures: MachineFigures, hardware: Hardware | None) -> Machines:
    """One machine as the formulas take it: a data sheet, of which their fit says what is reached.

    Of calibrated figures, which are what is reached, the data sheet is inferred.
    """
    if hardware is not None:
        return machines_of([hardware])
    scales = published_fit().parameters
    products = figures.matmul("bf16")
    assert products is not None, "every machine multiplies in fp32"
    network = figures.link if figures.network is None else figures.network
    peak = figures.peak_flops_per_s.get("bf16")
    columns = {
        "peak_flops_per_s": max(products.rates) * scales["product_scale"] if peak is None else peak.value,
        "flops_per_s": max(products.rates) * scales["product_scale"],
        "memory_bytes_per_s": figures.memory_bytes_per_s.value * scales["traffic_scale"],
        "link_bytes_per_s": figures.link.bytes_per_s.value * scales["link_scale"],
        "network_bytes_per_s": network.bytes_per_s.value * scales["network_scale"],
        "devices_per_node": float(figures.devices_per_node),
        "multiprocessors": float(figures.multiprocessors or MULTIPROCESSORS),
    }
    latencies = {f"{tier.name}_latency_s": tier.latency_s for tier in figures.tiers}
    return made_of(columns | {name: known.value for name, known in latencies.items() if known.origin == "measured"})


def unpublished(layouts: Layouts) -> NDArray[np.bool_]:
    """Layouts of a kind that no published step has: the formulas know them, and nothing checks them."""
    inner = (layouts.tensor > 1) | (layouts.pipeline > 1)
    names = ("owners", "copies", "stays_gathered", "context", "chunks", "sequence_parallel", "selective", "experts")
    result: NDArray[np.bool_] = np.any([getattr(layouts, name) > USUAL[name] for name in names], axis=0)
    return result | ((layouts.sharded > 0) & inner)


def extrapolated(layouts: Layouts, fit: PublishedFit, *, known: NDArray[np.bool_]) -> list[tuple[str, ...]]:
    """In which respects no published step is like each row; `known`: the fit has steps of its accelerator."""
    respects = {
        "model": np.ones(len(layouts), dtype=bool),
        "strategy": unpublished(layouts),
        "machine": ~known,
        "devices": layouts.devices > fit.most_devices,
    }
    columns = zip(*(values.tolist() for values in respects.values()), strict=True)
    return [tuple(name for name, outside in zip(respects, row, strict=True) if outside) for row in columns]


def half_widths(layouts: Layouts, fit: PublishedFit, *, per_node: Values, known: NDArray[np.bool_]) -> Values:
    """Half of each row's 90 % interval of log time."""
    width = np.array(fit.half_widths)[fit.interval_kinds(layouts, per_node)]
    width = width * np.where(unpublished(layouts), UNTRIED, 1.0)
    width = width * np.where(layouts.devices > fit.most_devices, UNTRIED, 1.0)
    return width * np.where(known, 1.0, OTHER_ACCELERATOR)


def gpt_rows(
    layouts: Layouts,
    machine: Machines,
    figures: MachineFigures,
    *,
    steps_per_epoch: int | None,
    guessed: Collection[Guessed],
) -> list[Row]:
    """A row for each layout on a machine; `guessed`: what of it nobody measured or described."""
    fit, per_node = published_fit(), figures.devices_per_node
    machines = machine.take(np.zeros(len(layouts), dtype=np.int64))
    like = np.full(len(layouts), figures.accelerator in fit.accelerators)
    if not like.all():
        fit = msgspec.structs.replace(fit, kernels={})
    found, memory = fit.phases(layouts, machines), memory_parts(layouts).peak.tolist()
    beyond = {"devices": 0, "link": 1, "network": per_node}
    rests_on = layouts.devices > min((beyond[each] for each in guessed), default=np.inf)
    least = np.where(rests_on, OTHER_ACCELERATOR * np.log(ASSUMED_FACTOR), 0.0)
    half = half_widths(layouts, fit, per_node=machines.devices_per_node, known=like)
    width, outside = np.exp(np.maximum(half, least)).tolist(), extrapolated(layouts, fit, known=like)
    ideal_s = (model_flops(layouts) / (layouts.devices * machines.peak_flops_per_s)).tolist()
    rows = []
    for place, devices in enumerate(map(round, layouts.devices.tolist())):
        phases, nodes, layout = found.at(place), -(-devices // per_node), layouts.row(place)
        rows.append(
            Row(
                strategy=strategy_name(layout),
                options=options_of(layout),
                devices=devices,
                nodes=nodes,
                phases=phases,
                low_s=phases.step_s / width[place],
                high_s=phases.step_s * width[place],
                samples_per_step=round(layout["global_batch"]),
                steps_per_epoch=steps_per_epoch,
                memory_bytes=memory[place],
                capacity_bytes=capacity_bytes(figures, -(-devices // nodes)),
                mfu=ideal_s[place] / phases.step_s if "bf16" in figures.peak_flops_per_s else None,
                power_w=None,
                measured=False,
                extrapolates=outside[place],
            )
        )
    return rows
