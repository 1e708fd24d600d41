"""`strategy=auto`: the advisor's choice on each number of devices, made before any run id is."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from launch.sweep import expand, one_run
from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from launch.sweep import PlannedRun
    from launch.sweep.compose import Extension
    from launch.verbs.asking import Question

AUTO = "strategy=auto"


def planned_runs(
    overrides: Sequence[str], extension: Extension, *, tell: Callable[[str], object] = str
) -> list[PlannedRun]:
    """All runs of a sweep, with the strategies that the advisor chooses under `strategy=auto`.

    `tell` is called with a line for each configuration that is left out.
    """
    return _chosen(overrides, extension) if AUTO in overrides else expand(overrides, extension, tell=tell)


def planned_run(overrides: Sequence[str], extension: Extension) -> PlannedRun:
    """The single run that the overrides describe, likewise."""
    if AUTO not in overrides:
        return one_run(overrides, extension)
    plan = _chosen(overrides, extension)
    if len(plan) != 1:
        raise ConfigError(f"these overrides ask for {len(plan)} runs: use `parallelbench submit`, or choose one value")
    return plan[0]


def asked_of(overrides: Sequence[str], extension: Extension) -> Question:
    """What the advisor is asked in place of `strategy=auto`."""
    from launch.verbs.asking import asked

    question = asked([text for text in overrides if text != AUTO], extension)
    if question.gpt is not None:
        raise ConfigError(
            "strategy=auto can't choose for model=gpt, which is predicted by formula: name a strategy, or choose "
            "model=gpt_tiny, whose layers are counted"
        )
    return replace(question, devices=question.devices or [question.bases[0].devices])


def _chosen(overrides: Sequence[str], extension: Extension) -> list[PlannedRun]:
    """The fastest layout that fits, on each number of devices; the reason goes into the intent."""
    from analysis.advisor.conclusion import chosen, sentence
    from launch.verbs.recommending import answered

    question = asked_of(overrides, extension)
    rows = answered(question).rows
    plan: list[PlannedRun] = []
    for count in question.devices or ():
        of_count = [row for row in rows if row.devices == count]
        choice, text = chosen(of_count, "time"), sentence(of_count, "time")
        if choice is None:
            raise ConfigError(f"{AUTO} finds no strategy on devices={count}: {text}")
        placed = [] if "nodes" in question.given or question.bases[0].site.name == "default" else [choice.nodes]
        nodes = [f"nodes={each}" for each in placed]
        what = [f"devices={count}", f"strategy={choice.strategy}", *choice.options, *nodes]
        runs = expand([*question.overrides, *what], extension)
        plan += [replace(run, overrides=[*run.overrides, f"# {AUTO}: {text}"]) for run in runs]
    return plan
