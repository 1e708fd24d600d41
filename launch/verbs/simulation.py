"""`advise … --simulate`: what slow devices, broken links and failures may cost; nothing of it is measured."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from launch.verbs.console import console, listing, say
from parallelbench.errors import ConfigError, choices

if TYPE_CHECKING:
    from collections.abc import Sequence

    from analysis.advisor.advice import Row
    from analysis.advisor.simulation import Assumptions, Simulated
    from launch.sweep.compose import Extension
    from launch.verbs.advise import Question


_HEADINGS = (
    *("simulation of", "devices", "step, predicted", "jitter", "a slow device", "broken links", "checkpoint every"),
    *("failures per day", "goodput"),
)


def simulate(
    overrides: Sequence[str],
    extension: Extension,
    *,
    known: Sequence[str],
    objective: str,
    assumed: Sequence[str],
    as_json: bool,
) -> int:
    """Print what the best layout on each number of devices may lose, with every assumption."""
    from analysis.advisor.advice import ranked
    from launch.verbs.advise import answered, asked, objective_of

    assumptions, question = assumptions_of(assumed), asked(overrides, extension)
    answer = answered(question, known)
    best = best_rows(ranked(answer.rows, objective_of(objective)))
    if not best:
        why = answer.impossible[0].why if answer.impossible else "no layout fits into memory: ask for more devices=…"
        raise ConfigError(f"nothing can be simulated: {why}")
    parameters = _parameters(question)
    found = [(row, _simulated(row, parameters, assumptions)) for row in best]
    stated = _stated(assumptions)
    if as_json:
        rows = [_row(row) | simulated.as_dict() for row, simulated in found]
        print(json.dumps({"kind": "simulation", "assumptions": stated, "notes": answer.notes, "rows": rows}))
        return 0
    console().print(listing(_HEADINGS, [_cells(row, simulated) for row, simulated in found]), crop=False)
    say("Simulation: nothing above was measured at these sizes. It assumes:")
    for name, entry in stated.items():
        say(f"  {name}={entry['value']:g}: {entry['doc']}")
    for note in answer.notes:
        say(note)
    return 0


def assumptions_of(words: Sequence[str]) -> Assumptions:
    """The defaults with what `--assume KEY=VALUE` changes; raises `ConfigError` for unknown keys and bad values."""
    from analysis.advisor.simulation import Assumptions
    from parallelbench.config.structure import structure

    given: dict[str, Any] = {}
    for word in words:
        key, sign, text = word.partition("=")
        if not sign or key not in Assumptions.__struct_fields__:
            raise ConfigError(f"--assume {word} assumes nothing: {choices(key, Assumptions.__struct_fields__)}")
        try:
            given[key] = float(text)
        except ValueError:
            raise ConfigError(f"--assume {word} is not valid: expected a number, e.g. {key}=1.5") from None
    found: Assumptions = structure(given, Assumptions, "--assume")
    return found


def best_rows(rows: Sequence[Row]) -> list[Row]:
    """Of each number of devices the first that trains like one device and is not known to be too large."""
    from analysis.advisor.advice import Fit

    best: dict[int, Row] = {}
    for row in rows:
        if row.trains_alike and row.fit is not Fit.TOO_LARGE:
            best.setdefault(row.devices, row)
    return [best[devices] for devices in sorted(best)]


def _simulated(row: Row, parameters: float, assumptions: Assumptions) -> Simulated:
    from analysis.advisor.simulation import SimulatedJob, simulated

    phases = row.phases
    job = SimulatedJob(
        step_s=row.step_s,
        compute_s=phases.compute_s + phases.optimizer_s + phases.data_s,
        communication_s=phases.communication_s,
        devices=row.devices,
        nodes=row.nodes,
        parameters=parameters,
        asynchronous=row.strategy == "downpour",
    )
    return simulated(job, assumptions)


def _parameters(question: Question) -> float:
    """Of the whole model."""
    if question.gpt is None:
        from analysis.advisor.model_layers import model_layers

        layers = model_layers(question.bases[0], plugin=question.extension.plugin)
        return float(sum(layer.parameters for layer in layers))
    from analysis.advisor.layouts import KEPT, gpt_layouts
    from analysis.advisor.transformer import gpt_shape, parameters

    layouts, _ = gpt_layouts(gpt_shape(question.gpt), [1], batch_size=1, per_node=1, recomputation=list(KEPT))
    assert layouts is not None, "every transformer has a layout on one device"
    return float(parameters(layouts)[0])


def _stated(assumptions: Assumptions) -> dict[str, dict[str, Any]]:
    """Each assumption's value and meaning, with its source."""
    from analysis.advisor.simulation import ASSUMED

    return {name: {"value": getattr(assumptions, name), "doc": doc} for name, doc in ASSUMED.items()}


def _row(row: Row) -> dict[str, Any]:
    return {"strategy": row.strategy, "options": list(row.options), "devices": row.devices, "predicted_s": row.step_s}


def _cells(row: Row, simulated: Simulated) -> tuple[str, ...]:
    name = " ".join([row.strategy, *row.options])
    steps = (row.step_s, simulated.jitter_step_s, simulated.slow_device_step_s)
    return (
        name,
        f"{row.devices:,}",
        *(f"{each:.3g} s" for each in steps),
        f"{simulated.broken_links:.2g}",
        f"{simulated.checkpoint_every_s / 60:.3g} min",
        f"{simulated.failures_per_day:.2g}",
        f"{100 * simulated.goodput:.1f} %",
    )
