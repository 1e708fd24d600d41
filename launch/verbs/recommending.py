"""The verb `advise` without --check: which strategy, on how many devices, and what to measure next."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from launch.verbs.asking import asked
from parallelbench.errors import ConfigError, choices, count_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from analysis.advisor.advice import Impossible, Objective, Row
    from analysis.advisor.knowledge import Knowledge
    from analysis.advisor.machine_figures import MachineFigures
    from launch.sweep.compose import Extension
    from launch.verbs.asking import Question
    from parallelbench.config.run import RunConfig


@dataclass(frozen=True, kw_only=True)
class Answer:
    """All rows, what can't be, and what the figures rest on."""

    rows: list[Row]
    impossible: list[Impossible]
    figures: MachineFigures
    notes: list[str]


def figures_of_site(run: RunConfig) -> tuple[MachineFigures, list[str]]:
    """What is known of the machine, and what a reader must know of that; assumed where nothing is."""
    from analysis.advisor.assumptions import assumed_figures, site_figures

    if (found := site_figures(run.site)) is not None:
        return found, [f"speeds are shares of data sheets (site={run.site.name}): nothing was calibrated there"]
    from parallelbench.world.machine import this_machine

    machine = this_machine()
    here = run.site.name == "default"
    kind = machine.device_type(run.device) if here else run.site.device if run.device == "auto" else run.device
    own = len(machine.gpus) if kind == "cuda" else max(1, machine.usable_cores // run.cores_per_device)
    count = max(1, own) if here else run.site.devices_per_node
    figures = assumed_figures(
        "cuda" if kind == "cuda" else "cpu",
        devices_per_node=count,
        memory_bytes=_host_bytes() / count if here and kind == "cpu" else None,
    )
    return figures, [
        f"nothing was measured on site={run.site.name}, so its speeds are assumed: times may be wrong by a factor; run "
        "`parallelbench calibrate` there first, or measure runs and add them with --from RESULTS"
    ]


def _host_bytes() -> float:
    import os

    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def answered(question: Question, known: Sequence[str] = ()) -> Answer:
    """Predict every layout, from calibrations and finished runs where `known` names any."""
    from analysis.advisor.knowledge import Knowledge, read_knowledge

    run = question.bases[0]
    knowledge = read_knowledge([Path(each).expanduser() for each in known]) if known else Knowledge()
    figures, notes = figures_of_site(run)
    if knowledge.figures is not None:
        figures, notes = _measured(knowledge, run, figures)
    if knowledge.learnt.rows and question.gpt is None:
        notes.append(f"fitted to {knowledge.learnt.rows} measured configurations")
    devices = question.devices or [2**power for power in range(figures.devices_per_node.bit_length())]
    allowed, beyond = _within_site(devices, run, figures)
    if question.gpt is not None:
        rows, impossible = _gpt(question, allowed, figures, measured=knowledge.figures is not None)
    else:
        rows, impossible = _suite(question, allowed, figures, knowledge)
    return Answer(rows=rows, impossible=beyond + impossible, figures=figures, notes=notes)


def _measured(knowledge: Knowledge, run: RunConfig, otherwise: MachineFigures) -> tuple[MachineFigures, list[str]]:
    """Measured figures in place of the site's, and what a reader must know; raises where the site contradicts them."""
    from analysis.advisor.same_site import devices_of_node, require_site

    measured = knowledge.figures
    assert measured is not None, "asked for without figures"
    require_site(measured, run.site, run.device, whole_nodes=knowledge.calibrated)
    figures = _completed(measured, otherwise)
    if run.site.name != "default":
        figures = replace(figures, devices_per_node=devices_of_node(run.site))
    where = f"speeds were measured on {measured.accelerator}, {count_of(measured.devices_per_node, 'device')} per node"
    return figures, [where, *measured.notes]


def _completed(measured: MachineFigures, otherwise: MachineFigures) -> MachineFigures:
    """Measured figures, and of what was not measured those of the site; assumed where it has no such devices."""
    from analysis.advisor.assumptions import assumed_figures

    if measured.device_type != otherwise.device_type:
        count = measured.devices_per_node
        otherwise = assumed_figures(measured.device_type, devices_per_node=count, memory_bytes=None)
    return replace(
        measured,
        memory_bytes=measured.memory_bytes or otherwise.memory_bytes,
        overhead_bytes=measured.overhead_bytes or otherwise.overhead_bytes,
        network=measured.network or otherwise.network,
        peak_flops_per_s=measured.peak_flops_per_s or otherwise.peak_flops_per_s,
    )


def _within_site(devices: Sequence[int], run: RunConfig, figures: MachineFigures) -> tuple[list[int], list[Impossible]]:
    """Numbers of devices that the site's nodes have, and those beyond."""
    from analysis.advisor.advice import Impossible

    nodes = run.site.max_nodes
    most = None if nodes is None else nodes * figures.devices_per_node
    beyond = [
        Impossible(
            strategy="all",
            options=(),
            devices=count,
            why=f"devices={count} is beyond site={run.site.name}, where a job has {nodes} nodes of "
            f"{figures.devices_per_node} devices: choose {most} or fewer",
        )
        for count in devices
        if most is not None and count > most
    ]
    return [count for count in devices if most is None or count <= most], beyond


def _suite(
    question: Question, devices: Sequence[int], figures: MachineFigures, knowledge: Knowledge
) -> tuple[list[Row], list[Impossible]]:
    from analysis.advisor.model_layers import model_layers, model_memory
    from analysis.advisor.suite_advice import KnownStep, SuiteQuestion, configuration_id, suite_rows
    from analysis.advisor.suite_candidates import suite_candidates

    run, plugin = question.bases[0], question.extension.plugin
    run.model.check(**run.data.model_input)
    candidates = suite_candidates(
        question.bases,
        devices,
        given=question.given,
        device_type=figures.device_type,
        per_node=figures.devices_per_node,
    )
    asked_for = SuiteQuestion(
        layers=model_layers(run, plugin=plugin),
        memory=model_memory(run, plugin=plugin),
        figures=figures,
        learnt=knowledge.learnt,
        measured={
            configuration_id(step.run): KnownStep(step_s=step.step_s, energy_j=step.energy_j)
            for step in (knowledge.evidence.steps if knowledge.evidence else ())
        },
    )
    return suite_rows(candidates, asked_for)


def _gpt(
    question: Question, devices: Sequence[int], figures: MachineFigures, *, measured: bool
) -> tuple[list[Row], list[Impossible]]:
    from analysis.advisor.gpt_advice import GptQuestion, gpt_rows, machine_of
    from analysis.advisor.gpt_layouts import KEPT, gpt_layouts
    from analysis.advisor.gpt_shape import gpt_shape

    run = question.bases[0]
    shape = gpt_shape(question.gpt or {})
    layouts, impossible = gpt_layouts(
        shape,
        devices,
        batch_size=run.batch_size,
        per_node=figures.devices_per_node,
        recomputation=list(KEPT),
    )
    if layouts is None:
        return [], impossible
    machines = machine_of(figures, None if measured else run.site.hardware)
    assumed = run.site.hardware is None and not measured
    steps = (
        None if question.gpt_tokens is None else _steps_per_epoch(question.gpt_tokens, run.batch_size, shape.sequence)
    )
    rows = gpt_rows(layouts, GptQuestion(machines=machines, figures=figures, steps_per_epoch=steps, assumed=assumed))
    wanted = question.gpt_strategies
    return (
        [row for row in rows if wanted is None or row.strategy in wanted],
        [each for each in impossible if wanted is None or each.strategy in wanted],
    )


def _steps_per_epoch(tokens: float, batch_size: int, sequence: int) -> int:
    """Whole steps that a data set's tokens make; raises `ConfigError` where they make none."""
    of_step = batch_size * sequence
    if tokens < of_step:
        raise ConfigError(
            f"data.tokens={tokens:g} is less than one step of batch_size={batch_size} × model.sequence={sequence} = "
            f"{of_step} tokens: give more tokens, or a smaller batch"
        )
    return int(tokens // of_step)


def recommend(
    overrides: Sequence[str],
    extension: Extension,
    *,
    known: Sequence[str],
    objective: str,
    budget_h: float | None,
    as_json: bool,
) -> int:
    """Print the ranked layouts, what to do, and what to measure next."""
    from analysis.advisor.advice import ranked
    from analysis.advisor.conclusion import sentence
    from launch.verbs.advice_page import print_answer
    from launch.verbs.proposing import proposal_of

    wanted = objective_of(objective)
    question = asked(overrides, extension)
    answer = answered(question, known)
    if wanted == "energy" and not any(row.power_w is not None for row in answer.rows):
        raise ConfigError(
            "--objective energy needs a measured power, and none was: choose --objective gpu_hours, or add runs that "
            "sampled energy with --from RESULTS"
        )
    rows = ranked(answer.rows, wanted)
    text = sentence(rows, wanted)
    proposal = None if budget_h is None else proposal_of(question, rows, wanted, budget_h)
    if as_json:
        plain = {"rows": [row.as_dict() for row in rows], "impossible": [each.as_dict() for each in answer.impossible]}
        said = {"advice": text, "notes": answer.notes, "objective": wanted, "next_runs": proposal}
        print(json.dumps(plain | said | {"figures": asdict(answer.figures)}))
    else:
        print_answer(rows, answer.impossible, notes=answer.notes, advice=text, proposal=proposal)
    return 0


def objective_of(text: str) -> Objective:
    """What is to be least; raises `ConfigError` for anything else."""
    valid: tuple[Objective, ...] = ("time", "energy", "gpu_hours", "memory")
    for each in valid:
        if text == each:
            return each
    raise ConfigError(f"--objective {text} is none: {choices(text, valid)}")
