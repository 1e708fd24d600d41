"""`advise … --loop N`: propose runs, train them, fit anew, until the best is known or the budget is spent."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from launch.launcher import launcher_of
from launch.sweep.extension import extension as extension_of
from launch.verbs.console import console, say
from launch.verbs.listing import listing
from parallelbench.errors import ConfigError, count_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from analysis.advisor.advice import Objective, Row
    from launch.sweep.compose import Extension
    from launch.verbs.asking import Question

Key = tuple[str, tuple[str, ...], int]
DEFAULT_BUDGET_H = 1.0
"""Device-hours of all rounds together, where no budget is given."""


def loop(
    overrides: Sequence[str],
    extension: Extension,
    *,
    rounds: int,
    known: Sequence[str],
    objective: str,
    budget_h: float | None,
) -> int:
    """Print of each round what was said of its runs and what they took, and in the end the advice."""
    from analysis.advisor.advice import ranked
    from launch.verbs.asking import asked
    from launch.verbs.recommending import answered, objective_of, recommend

    question, wanted = asked(overrides, extension), objective_of(objective)
    if wanted == "memory":
        raise ConfigError("--loop measures times: choose --objective time, gpu_hours or energy")
    if not launcher_of(question.bases[0]).trains_here:
        raise ConfigError(
            f"--loop waits for its runs, and launcher={question.bases[0].launcher.name} queues them: submit what "
            "--budget proposes, and ask again with --from RESULTS"
        )
    folder, given = Path(question.bases[0].results).expanduser() / "next_runs", list(known)
    left_h = DEFAULT_BUDGET_H if budget_h is None else budget_h
    rows = ranked(answered(question, given).rows, wanted)
    for number in range(1, rounds + 1):
        spent_h = _measured(question, rows, wanted, left_h, number=number)
        if spent_h is None:
            break
        left_h -= spent_h
        given = list(dict.fromkeys([*known, str(folder)]))
        before, rows = rows, ranked(answered(question, given).rows, wanted)
        console().print(listing(("measured", "said", "took", "error"), list(errors(before, rows))), crop=False)
    return recommend(overrides, extension, known=given, objective=objective, budget_h=None, as_json=False)


def _measured(
    question: Question, rows: Sequence[Row], wanted: Objective, left_h: float, *, number: int
) -> float | None:
    """Device-hours that a round's runs were to take; None where nothing was, or need be, measured."""
    from launch.verbs.proposing import proposal_of
    from launch.verbs.running import submit

    if is_known(rows, wanted):
        say(f"round {number}: the best is known, nothing more is measured")
        return None
    try:
        proposal = proposal_of(question, rows, wanted, left_h)
    except ConfigError as error:
        if number == 1:
            raise
        say(f"round {number}: the budget is spent ({error})")
        return None
    if proposal["file"] is None:
        say(f"round {number}: nothing is left to measure here")
        return None
    configurations = count_of(len(proposal["runs"]), "configuration")
    say(f"round {number}: {configurations}, {proposal['device_hours']:.3g} device-hours")
    conf = Path(proposal["file"]).parents[1]
    own = extension_of(str(conf), question.extension.plugin)
    if submit(["sweep=next_runs", *question.overrides], own, retry=None, max_gpu_hours=None, then=None):
        raise ConfigError(
            f"round {number}: a run failed; `parallelbench status {shlex.quote(question.bases[0].results)}` says why"
        )
    return float(proposal["device_hours"])


def key_of(row: Row) -> Key:
    """What a layout is called."""
    return row.strategy, row.options, row.devices


def errors(before: Sequence[Row], after: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    """Of the rows that are measured now and were predicted before: what was said, what it took, and the error."""
    said: dict[Key, Row] = {key_of(row): row for row in before if not row.measured}
    for row in after:
        if row.measured and (old := said.get(key_of(row))) is not None:
            name = f"{' '.join([row.strategy, *row.options])} × {row.devices}"
            yield name, f"{old.step_s:.3g} s", f"{row.step_s:.3g} s", f"{100 * (old.step_s / row.step_s - 1):+.1f} %"


def is_known(rows: Sequence[Row], objective: Objective) -> bool:
    """Whether the best was measured, and no other may be better: intervals hold 90 %, so each end errs in 5 %."""
    from analysis.advisor.advice import Fit

    alike = [row for row in rows if row.trains_alike and row.fit is not Fit.TOO_LARGE]
    if not alike or not alike[0].measured:
        return False
    first, *others = alike
    worst = first.cost(objective) * first.high_s / first.step_s
    return all(row.cost(objective) * row.low_s / row.step_s > worst for row in others)
