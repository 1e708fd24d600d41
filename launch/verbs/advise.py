"""The verb `advise`: which strategy, on how many devices, and what to measure next."""

from __future__ import annotations

import json
import math
import shlex
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Column, Table
from rich.text import Text

from launch.launcher import launcher_of
from launch.sweep import expand
from launch.sweep.compose import parse, usable_choices, values_of
from launch.verbs.console import console, listing, say
from parallelbench.config.plugin import package_path
from parallelbench.config.structure import Count, structure
from parallelbench.errors import ConfigError, count_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from hydra.core.override_parser.types import Override

    from analysis.advisor.advice import Objective, Row
    from analysis.advisor.knowledge import Knowledge
    from analysis.advisor.layouts import Impossible
    from analysis.advisor.machine import MachineFigures
    from analysis.advisor.rows import Guessed
    from launch.sweep.compose import Extension
    from parallelbench.config.run import RunConfig


@dataclass(frozen=True, kw_only=True)
class Answer:
    """All rows, what can't be, and what the figures rest on."""

    rows: list[Row]
    impossible: list[Impossible]
    figures: MachineFigures
    notes: list[str]
    speeds: str
    """What the machine's figures are, and what of them is assumed all the same."""
    calibrated: bool
    """Whether `calibrate` measured them."""
    left_out: Sequence[str]
    """Measured configurations that need a plugin which was not named, in words."""


ASSUMED = "speeds are assumed"
GPUS_OF_A_NODE = 8
"""Where GPUs are asked about that this machine has not, and no site describes."""


def figures_of_site(run: RunConfig) -> tuple[MachineFigures, list[str]]:
    """What is known of the machine, and what a reader must know of that; assumed where nothing is."""
    from analysis.advisor.machine import assumed_figures, figures_of

    if (described := run.site.hardware) is not None:
        return figures_of(described), [
            f"speeds are shares of data sheets (site={run.site.name}): nothing was calibrated there"
        ]
    from parallelbench.world.machine import host_memory_bytes, this_machine

    machine = this_machine()
    here = run.site.name == "default"
    kind: str = run.device  # this machine need not have it: what other machines would do is asked, too
    if kind == "auto":
        kind = machine.device_type(kind) if here else run.site.device
    own = len(machine.gpus) if kind == "cuda" else max(1, machine.usable_cores // run.cores_per_device)
    count = (own or GPUS_OF_A_NODE) if here else run.site.devices_per_node
    figures = assumed_figures(
        "cuda" if kind == "cuda" else "cpu",
        devices_per_node=count,
        memory_bytes=float(host_memory_bytes()) if here and kind == "cpu" else None,
    )
    elsewhere = [f"this machine has no GPU: a node is taken to have {count}"] if here and not own else []
    return figures, [
        f"nothing was measured on site={run.site.name}, so its speeds are assumed: times may be wrong by a factor; run "
        "`parallelbench calibrate` there first, or measure runs and add them with --from RESULTS",
        *elsewhere,
    ]


def answered(question: Question, known: Sequence[str] = ()) -> Answer:
    """Predict every layout, from calibrations and finished runs where `known` names any."""
    from analysis.advisor.knowledge import Knowledge, read_knowledge

    run = question.bases[0]
    paths, plugin = [Path(each).expanduser() for each in known], question.extension.plugin
    knowledge = read_knowledge(paths, plugin=plugin) if known else Knowledge()
    figures, notes = figures_of_site(run)
    if knowledge.figures is not None:
        figures, notes = _measured(knowledge, run, figures)
    if knowledge.learnt.runs and question.gpt is None:
        notes.append(f"fitted to {len(knowledge.learnt.runs)} measured configurations")
    left_out = knowledge.evidence.left_out if knowledge.evidence else ()
    notes += left_out
    of_node = [2**power for power in range(figures.devices_per_node.bit_length())]
    devices = question.devices or [(question.nodes or 1) * count for count in of_node]
    most = run.site.max_nodes
    if question.nodes and most and question.nodes > most:
        raise ConfigError(f"nodes={question.nodes}, but site={run.site.name} allows a job site.max_nodes={most}")
    allowed, beyond = _within_site(devices, run, figures)
    if question.gpt is not None:
        rows, impossible = _gpt(question, allowed, figures, knowledge)
    else:
        rows, impossible = _suite(question, allowed, figures, knowledge)
    if knowledge.figures is not None:
        unknown = "network" in _guessed(knowledge, run) and any(row.nodes > 1 for row in rows)
        network = ["the network between nodes is assumed"] if unknown else []
        notes += network
        speeds = "; ".join(["speeds were measured", *knowledge.figures.notes, *network])
    else:
        speeds = "speeds are shares of data sheets" if run.site.hardware is not None else ASSUMED
    return Answer(
        rows=rows,
        impossible=beyond + impossible,
        figures=figures,
        notes=notes,
        speeds=speeds,
        calibrated=knowledge.calibrated,
        left_out=left_out,
    )


def _measured(knowledge: Knowledge, run: RunConfig, otherwise: MachineFigures) -> tuple[MachineFigures, list[str]]:
    """Measured figures in place of the site's, and what a reader must know; raises where the site contradicts them."""
    from analysis.advisor.machine import devices_of_node, require_site
    from parallelbench.world.machine import cpu_name

    measured = knowledge.figures
    assert measured is not None, "asked for without figures"
    require_site(measured, run.site, run.device, whole_nodes=knowledge.calibrated)
    figures = _completed(measured, otherwise)
    if measured.memory_bytes is None and measured.device_type == "cpu" and measured.accelerator != cpu_name():
        figures = replace(figures, memory_bytes=None)  # the runs are another machine's
    if run.site.name != "default":
        figures = replace(figures, devices_per_node=devices_of_node(run.site))
    where = f"speeds were measured on {measured.accelerator}, {count_of(measured.devices_per_node, 'device')} per node"
    return figures, [where, *measured.notes]


def _completed(measured: MachineFigures, otherwise: MachineFigures) -> MachineFigures:
    """Measured figures, and of what was not measured those of the site; assumed where it has no such devices."""
    from analysis.advisor.machine import assumed_figures

    if measured.device_type != otherwise.device_type:
        count = measured.devices_per_node
        otherwise = assumed_figures(measured.device_type, devices_per_node=count, memory_bytes=None)
    return replace(
        measured,
        memory_bytes=measured.memory_bytes or otherwise.memory_bytes,
        overhead_bytes=measured.overhead_bytes or otherwise.overhead_bytes,
        network=measured.network or otherwise.network,
        multiprocessors=measured.multiprocessors or otherwise.multiprocessors,
        peak_flops_per_s=measured.peak_flops_per_s or otherwise.peak_flops_per_s,
    )


def _within_site(devices: Sequence[int], run: RunConfig, figures: MachineFigures) -> tuple[list[int], list[Impossible]]:
    """Numbers of devices that the site's nodes have, and those beyond."""
    from analysis.advisor.layouts import Impossible

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
    from analysis.advisor.rows import configuration_id, suite_candidates, suite_rows

    run, plugin = question.bases[0], question.extension.plugin
    run.model.check(**run.data.model_input)
    candidates, impossible = suite_candidates(
        question.bases,
        devices,
        given=question.given,
        device_type=figures.device_type,
        per_node=figures.devices_per_node,
        nodes=question.nodes,
    )
    if not candidates:
        return [], impossible  # nothing has to be counted
    steps = knowledge.evidence.steps if knowledge.evidence else ()
    rows, unknown = suite_rows(
        candidates,
        layers=model_layers(run, plugin=plugin),
        memory=model_memory(run, plugin=plugin),
        figures=figures,
        learnt=knowledge.learnt,
        measured={configuration_id(step.run): step for step in steps},
    )
    return rows, impossible + unknown


def _guessed(knowledge: Knowledge, run: RunConfig) -> frozenset[Guessed]:
    """What of the machine was neither measured nor described; the formulas were fitted to GPUs, not to processors."""
    described, measured = run.site.hardware is not None, knowledge.figures
    if measured is None:
        return frozenset(() if described else ("devices",))
    found: set[Guessed] = {each.name for each in measured.tiers if each.bytes_per_s.origin == "assumed"}
    if not (described or measured.network):
        found.add("network")
    if measured.device_type == "cpu":
        found.add("devices")
    return frozenset(found)


def _gpt(
    question: Question, devices: Sequence[int], figures: MachineFigures, knowledge: Knowledge
) -> tuple[list[Row], list[Impossible]]:
    from analysis.advisor.layouts import gpt_layouts
    from analysis.advisor.rows import gpt_rows, machine_of
    from analysis.advisor.transformer import gpt_shape

    run = question.bases[0]
    shape = gpt_shape(question.gpt or {})
    layouts, impossible = gpt_layouts(
        shape,
        devices,
        batch_size=run.batch_size,
        per_node=figures.devices_per_node,
    )
    if layouts is None:
        return [], impossible
    machines = machine_of(figures, run.site.hardware if knowledge.figures is None else None)
    steps = (
        None if question.gpt_tokens is None else _steps_per_epoch(question.gpt_tokens, run.batch_size, shape.sequence)
    )
    rows = gpt_rows(layouts, machines, figures, steps_per_epoch=steps, guessed=_guessed(knowledge, run))
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


def advise(
    overrides: Sequence[str],
    extension: Extension,
    *,
    objective: Objective,
    budget_h: float | None,
    check: str | None,
    known: Sequence[str],
    whole: bool,
    as_json: bool,
) -> int:
    """Print what to do, how sure that is, and what to measure next; with `whole` every layout too, and why others can't
    be. `check`: errors of predictions instead.
    """
    from analysis.advisor.advice import ranked, sentence
    from launch.verbs import advice_errors

    if check is not None:
        if budget_h is not None:
            raise ConfigError("--budget proposes runs, and --check judges predictions: leave one of them out")
        return advice_errors.advise(overrides, extension, check=check, known=known, as_json=as_json)
    question = asked(overrides, extension)
    answer = answered(question, known)
    if objective == "energy" and not any(row.power_w is not None for row in answer.rows):
        raise ConfigError(
            "--objective energy needs a measured power, and none was: choose --objective gpu_hours, or add runs that "
            "sampled energy with --from RESULTS"
        )
    rows = ranked(answer.rows, objective)
    proposal = None if budget_h is None else proposal_of(question, rows, objective, budget_h)
    if as_json:
        told = {
            "rows": [row.as_dict() for row in rows],
            "impossible": [asdict(each) for each in answer.impossible],
            "advice": sentence(rows, objective, answer.impossible),
            "notes": answer.notes,
            "objective": objective,
            "next_runs": proposal,
            "starts": [asdict(each) for each in starts(question, rows)[0]],
            "figures": asdict(answer.figures),
        }
        print(json.dumps(told))
        return 0
    if whole:
        print_all(rows, answer)
    print_brief(question, answer, rows, objective, proposal)
    return 0


GPT = "gpt"
"""The model that is predicted by formula."""
TOKENS = "data.tokens"
"""Its data set's size, which no data set of the suite has."""
GPT_KEYS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("batch_size", "site", "results"), ()),
    "scaling": ("strong",),
    "precision": ("bf16", "fp16"),
    "optimizer": ("adam", "adamw"),
}
"""What one may set for it besides, and to which values; (): to any."""
GPT_STRATEGIES: Mapping[str, str] = {
    **{name: name for name in ("single", "ddp", "zero1", "fsdp", "hsdp")},
    "tensor_parallel": "tp",
    "pipeline": "pp",
    "dp_tp": "ddp×tp",
    "dp_pp": "ddp×pp",
    "dp_pp_tp": "ddp×tp×pp",
}
"""The suite's strategies that it has a formula for, and what its layouts call them."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked, from overrides and options."""

    bases: list[RunConfig]
    """One run per strategy, on one device."""
    devices: list[int] | None
    """None: 1, 2, 4, … up to a node, of each node that is asked for."""
    nodes: int | None
    """None: as many as the devices need."""
    given: frozenset[str]
    """Keys that the command line sets."""
    overrides: list[str]
    """Those without strategy and devices."""
    gpt: dict[str, Any] | None
    """Options of a transformer that is predicted by formula; None: the model's layers are counted."""
    gpt_tokens: float | None = None
    """Tokens of its data set; None: not known, and so is the time of an epoch."""
    gpt_strategies: frozenset[str] | None = None
    """Which of its strategies are asked for, as its layouts name them; None: all."""
    extension: Extension


def asked(overrides: Sequence[str], extension: Extension) -> Question:
    """Read the overrides; raises `ConfigError` for lists of anything but strategy and devices."""
    own = extension.conf is not None and (extension.conf / "model" / f"{GPT}.yaml").is_file()
    by_formula = f"model={GPT}" in overrides and not own
    parsed = parse([text for text in overrides if not (by_formula and text == f"model={GPT}")], extension.conf)
    options: dict[str, Any] = {}
    axes: dict[str, list[Any]] = {}
    others: list[Override] = []
    for each in parsed:
        key = each.key_or_group
        if key in ("devices", "strategy"):
            axes[key] = values_of(each)
        elif each.is_sweep_override() or key == "sweep":
            raise ConfigError(
                f"{each.input_line} asks for several runs: advise takes lists of devices and strategy only; choose one"
            )
        elif by_formula and (key.startswith("model.") or key == TOKENS):
            options[key.removeprefix("model.")] = each.value()
        else:
            others.append(each)
    tokens = _tokens(options.pop(TOKENS)) if TOKENS in options else None
    if by_formula:
        _require_formula(others)
    named = ["single"] if by_formula else axes.get("strategy") or usable_choices(extension)["strategy"]
    strategies = [str(name) for name in named]
    kept = [str(each.input_line) for each in others]
    devices = {structure(count, Count, "devices") for count in axes.get("devices", ())}
    nodes = [each.value() for each in others if each.key_or_group == "nodes"]
    of_bases = [str(each.input_line) for each in others if each.key_or_group != "nodes"]  # bases have one device
    plan = expand([*of_bases, f"strategy={','.join(strategies)}"], extension)
    return Question(
        bases=sorted((planned.run for planned in plan), key=lambda run: strategies.index(run.strategy.name)),
        devices=sorted(devices) or None,
        nodes=structure(nodes[-1], Count, "nodes") if nodes else None,
        given=frozenset(each.key_or_group for each in parsed),
        overrides=kept,
        gpt=options if by_formula else None,
        gpt_tokens=tokens,
        gpt_strategies=_gpt_strategies(axes["strategy"]) if by_formula and "strategy" in axes else None,
        extension=extension,
    )


def _require_formula(overrides: Sequence[Override]) -> None:
    """Refuse for a transformer what its formula would not follow."""
    for each in overrides:
        key = each.key_or_group
        valid = GPT_KEYS.get(key.partition(".")[0]) if key.startswith("site.") else GPT_KEYS.get(key)
        if valid is None:
            raise ConfigError(
                f"{each.input_line} does not change what is predicted of model={GPT}: leave it out; it takes "
                f"{', '.join(['model.…', TOKENS, 'strategy', 'devices', *GPT_KEYS])}"
            )
        if valid and str(each.value()) not in valid:
            raise ConfigError(f"{each.input_line}: model={GPT} is predicted for {key}={' or '.join(valid)} only")


def _gpt_strategies(values: Sequence[Any]) -> frozenset[str]:
    for value in values:
        if value not in GPT_STRATEGIES:
            raise ConfigError(f"strategy={value} is none of model={GPT}: choose {', '.join(GPT_STRATEGIES)}")
    return frozenset(GPT_STRATEGIES[value] for value in values)


def _tokens(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value <= 1e18:
        raise ConfigError(f"{TOKENS}={value} is no number of tokens: give one from 1 to 1e18, e.g. {TOKENS}=300e9")
    return float(value)


WIDTH = 80
"""Columns of the short answer."""
PHASES = {"compute": "compute_s", "comm.": "communication_s", "bubble": "bubble_s", "update": "optimizer_s"}
"""Shares of a step that get a column."""


def print_all(rows: Sequence[Row], answer: Answer) -> None:
    """Print what the figures rest on, the best row of each strategy and number of devices, and what can't be."""
    from analysis.advisor.advice import one_each

    for note in answer.notes:
        say(note)
    best = one_each(rows)
    if best:
        columns = ("strategy", "devices", "step", "90 %", "epoch", "samples/s", "MFU", "memory", *PHASES, "rests on")
        console().print(listing(columns, [_cells(row) for row in best]), crop=False)
    if len(rows) > len(best):
        say(
            f"{len(rows)} layouts in all; the table has the best of each strategy and number of devices: --json has all"
        )
    for line in _impossible(answer.impossible):
        say(line)


def print_brief(
    question: Question, answer: Answer, rows: Sequence[Row], wanted: Objective, proposal: Mapping[str, Any] | None
) -> None:
    """Print what to do, how sure that is, and what to measure next; as wide as a terminal of 80 columns."""
    from analysis.advisor.advice import chosen, doubts, how_long, limits, nothing, what_to_do

    choice = chosen(rows, wanted)
    if choice is None:
        lines = {"do": nothing(rows, answer.impossible), "sure": "\n".join(_impossible(answer.impossible))}
    else:
        epoch = "" if choice.epoch_s is None else f", {_time(choice.epoch_s)} per epoch"
        lines = {
            "do": "; ".join([what_to_do(choice) + epoch, *limits(rows, choice)]),
            "sure": "; ".join(
                [how_long(choice), *_rests_on(choice, answer), *answer.left_out, *doubts(rows, choice, wanted)]
            ),
            "when": _when(*starts(question, rows)),
            "next": _next(question, answer, rows, wanted, proposal),
            "not": "\n".join(_impossible(asked_in_vain(question, answer))),
        }
    grid = Table.grid(Column(style="bold"), Column(overflow="fold"), padding=(0, 2, 0, 0))
    for label, text in lines.items():
        if text:
            grid.add_row(label, Text(text))
    console().print(grid, width=min(WIDTH, console().width))
    if proposal is not None and proposal["command"]:
        say(proposal["command"])


def asked_in_vain(question: Question, answer: Answer) -> list[Impossible]:
    """Why there is no row of a strategy, or of a number of devices, that was asked for by name."""
    counts, strategies = ({getattr(row, name) for row in answer.rows} for name in ("devices", "strategy"))
    return [
        each
        for each in answer.impossible
        if (question.devices is not None and each.devices not in counts)
        or ("strategy" in question.given and each.strategy not in strategies)
    ]


@dataclass(frozen=True, kw_only=True)
class Start:
    """When the best layout on so many devices would be done if it were submitted now."""

    devices: int
    strategy: str
    wait_s: float
    """As the scheduler expects."""
    run_s: float
    """Of all epochs, checks and evaluation as `START_S` has them."""


def starts(question: Question, rows: Sequence[Row]) -> tuple[list[Start], str]:
    """Of the best layout on each number of devices, for which a scheduler says when it would start; and why one can't
    be submitted, if so.
    """
    from analysis.advisor.advice import START_S, fastest

    run = question.bases[0]
    if question.gpt is not None or (launcher := launcher_of(run)).trains_here:
        return [], ""
    found, refusal = [], ""
    for count, row in fastest(rows).items():
        what = [f"devices={count}", f"nodes={row.nodes}", f"strategy={row.strategy}", *row.options]
        try:
            wait_s = launcher.wait_s(launcher.prepare(expand([*question.overrides, *what], question.extension)[0]))
        except ConfigError as error:
            refusal = refusal or str(error)
            continue
        if wait_s is not None and row.epoch_s is not None:
            run_s = START_S + run.epochs * row.epoch_s
            found.append(Start(devices=count, strategy=row.strategy, wait_s=wait_s, run_s=run_s))
    return found, refusal


def _when(found: Sequence[Start], refusal: str) -> str:
    """How long a result takes with the queue: the fastest layout may start late."""
    from analysis.advisor.advice import START_S

    if not found:
        return f"unknown, as it can't be submitted here: {refusal}" if refusal else ""
    first = min(found, key=lambda each: each.wait_s + each.run_s)
    each = [
        f"{start.devices} would start {f'in {_time(start.wait_s)}' if start.wait_s >= 60 else 'at once'} and take "
        f"{_time(start.run_s)}"
        for start in found
    ]
    around = f"{START_S:.0f} s assumed around the training"
    return f"first done on {count_of(first.devices, 'device')}: {'; '.join(each)} ({around})"


def _next(
    question: Question, answer: Answer, rows: Sequence[Row], wanted: Objective, proposal: Mapping[str, Any] | None
) -> str:
    """What to measure: what was proposed, or, where no budget was given, what one would buy."""
    if proposal is None and not answer.calibrated:
        return "parallelbench calibrate on that machine (minutes), then this again with --from its table"
    if proposal is None and question.gpt is not None:
        return "a few steps of your own beside these: parallelbench advise --check FILE.csv"
    within = proposal or proposal_of(question, rows, wanted, math.inf, write=False)
    if not within["runs"]:
        most = _most_devices(question.bases[0])
        where = "" if most is None else f" on the {count_of(most, 'device')} that there are"
        return f"nothing is left to measure{where} that could change the choice"
    names, hours = ", ".join(f"{run['strategy']} × {run['devices']}" for run in within["runs"]), within["device_hours"]
    if proposal is None:
        return f"{names}: --budget {math.ceil(round(10 * hours, 6)) / 10:g}h writes the sweep"
    rest = f"; the budget leaves out {proposal['left_out']} more" if proposal["left_out"] else ""
    return f"{names} ({hours:.2g} device-hours{rest}):"


def _cells(row: Row) -> tuple[str, ...]:
    name = " ".join((row.strategy, *(option.removeprefix("strategy.") for option in row.options)))
    return (
        name if row.trains_alike else f"{name} (trains otherwise)",
        str(row.devices) if row.nodes == 1 else f"{row.devices} on {row.nodes} nodes",
        _time(row.step_s),
        f"{_time(row.low_s)} – {_time(row.high_s)}",
        "–" if row.epoch_s is None else _time(row.epoch_s),
        _rate(row.samples_per_s),
        "–" if row.mfu is None else f"{100 * row.mfu:.0f} %",
        _memory(row),
        *(f"{100 * getattr(row.phases, name) / row.step_s:.0f} %" for name in PHASES.values()),
        _basis(row),
    )


def _rests_on(choice: Row, answer: Answer) -> list[str]:
    from analysis.advisor.fit import EVERYTHING

    if choice.extrapolates == EVERYTHING and answer.speeds == ASSUMED:
        return [f"nothing was measured here, so {ASSUMED}"]
    return [_basis(choice), answer.speeds]


def _basis(row: Row) -> str:
    """What a row rests on, in a word or two."""
    from analysis.advisor.fit import EVERYTHING

    if row.measured:
        return "measured"
    if row.extrapolates == EVERYTHING:
        return "no run was measured"
    return f"extrapolates {', '.join(row.extrapolates)}" if row.extrapolates else "measured runs are like it"


def _rate(per_s: float) -> str:
    """Three digits, never with an exponent: "34,600", "0.123"."""
    return f"{float(f'{per_s:.3g}'):,.0f}" if per_s >= 100 else f"{per_s:.3g}"


def _memory(row: Row) -> str:
    if row.memory_bytes is None:
        return "–"
    from analysis.advisor.advice import Fit, size_of

    size = size_of(row.memory_bytes)
    if row.fit is Fit.UNKNOWN:
        return f"{size}, capacity not known"
    return f"{size}, {row.fit}" if row.fit in (Fit.TOO_CLOSE, Fit.TOO_LARGE) else size


def _time(seconds: float) -> str:
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    if seconds < 100:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"


def _impossible(impossible: Sequence[Impossible]) -> Iterator[str]:
    """Each reason once, with what it holds for."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for each in impossible:
        what = "not predicted" if each.trains else "impossible"
        found[what, each.why].append(f"{each.strategy} × {each.devices}")
    for (what, why), cases in found.items():
        more = f" and {len(cases) - 3} more" if len(cases) > 3 else ""
        yield f"{what}: {', '.join(cases[:3])}{more}: {why}"


def proposal_of(
    question: Question, rows: Sequence[Row], objective: Objective, budget_h: float, *, write: bool = True
) -> dict[str, Any]:
    """The next runs, what they cost, and, where `write` is true, their sweep's file and the command that submits it."""
    from analysis.advisor.advice import proposed, sweep_of

    if question.gpt is not None:
        raise ConfigError(
            "model=gpt is predicted by formula, so no runs can be proposed: leave out --budget, or choose "
            "model=gpt_tiny, whose layers are counted"
        )
    run = question.bases[0]
    rows = _measurable(question, rows)
    found = proposed(rows, objective, budget_s=3600.0 * budget_h, most_devices=_most_devices(run))
    folder = Path(run.results).expanduser() / "advice"
    place = folder / "sweep" / "next_runs.yaml"
    write = write and bool(found.rows)
    if write:
        import yaml

        words = parse(question.overrides, question.extension.conf)
        common = [(word.key_or_group, word.value()) for word in words]
        _copy_conf(question.extension.conf, folder)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(yaml.safe_dump(sweep_of(found, common, name="next_runs"), sort_keys=False))
    return {
        "file": str(place) if write else None,
        "command": shlex.join(_submit(folder, question.extension.plugin)) if write else None,
        "runs": [
            {"strategy": row.strategy, "options": list(row.options), "devices": row.devices} for row in found.rows
        ],
        "device_hours": found.device_s / 3600.0,
        "left_out": found.left_out,
    }


def _copy_conf(conf: Path | None, folder: Path) -> None:
    """Put a user's own configuration files beside the sweep's: `submit` takes one folder of them."""
    for file in sorted(conf.glob("*/*.yaml")) if conf else ():
        content, copy = file.read_bytes(), folder / file.parent.name / file.name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(content)


def _submit(folder: Path, plugin: str | None) -> list[str]:
    """The command, which finds the user's package from any folder."""
    own = ["--plugin", str(package_path(plugin))] if plugin else []
    return ["parallelbench", "submit", "--conf", str(folder), *own, "sweep=next_runs"]


def _measurable(question: Question, rows: Sequence[Row]) -> list[Row]:
    """Those that may be measured as far as nodes go: this machine is one."""
    run = question.bases[0]
    here = run.site.name == "default" and launcher_of(run).trains_here
    return [row for row in rows if row.nodes == 1 or not here]


def _most_devices(run: RunConfig) -> int | None:
    """Devices that runs can be measured on: this machine's, or a site's."""
    if run.site.name != "default":
        return None if run.site.max_nodes is None else run.site.max_nodes * run.site.devices_per_node
    from parallelbench.world.machine import this_machine

    machine = this_machine()
    return len(machine.gpus) or max(1, machine.usable_cores // run.cores_per_device)
