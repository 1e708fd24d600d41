"""The claims as the report shows them: on its page, as CSV and as LaTeX."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from analysis import text
from analysis.claims import judge_all, publications
from analysis.claims.table import counted, effect_of, lines, nothing
from analysis.claims.verdict import VERDICTS
from analysis.comparison.ratio import ENOUGH_REPEATS
from analysis.report import latex
from analysis.report.tables import Table
from analysis.runs.reader import once
from parallelbench.errors import count_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from analysis.claims.table import Lines
    from analysis.claims.verdict import Judgement
    from analysis.runs.reader import Runs


MOST_CASES = 8
"""Cases that the page shows of one claim; the CSV has all."""
MOST_ROWS = 18
"""Of a table in LaTeX: of three lines each, in footnotesize, they fit on a page."""
_INTERVALS = (
    "An interval in brackets allows for all effects of all claims together: it is another than that of the same ratio "
    f"beside a speed-up, and often wider. Fewer than {ENOUGH_REPEATS} repeats have none."
)
_SHAPE = (latex.broken(0.28), "l", latex.broken(0.5))
_COLUMNS = {
    **dict.fromkeys(("publication", "claim", "section", "verdict", "why", "sweeps"), pl.String),
    **dict.fromkeys(("work", "step", "device", "metric", "compare"), pl.String),
    "repeats": pl.Int64,
    **dict.fromkeys(("median", "low", "high"), pl.Float64),
    **dict.fromkeys(("finding", "lacks"), pl.String),
}


@once
def judged(runs: Runs) -> tuple[Judgement, ...]:
    """All claims of the suite's publications by these runs."""
    return tuple(judge_all(runs))


def shown(judgements: Sequence[Judgement]) -> list[tuple[Judgement, Lines]]:
    """The claims that these runs say something of, decided ones first, each with what is expected, and the effects."""
    told = sorted(judgements, key=lambda judgement: VERDICTS.index(judgement.verdict))
    return [(judgement, lines(judgement, most=MOST_CASES)) for judgement in told if judgement.cases]


def at_a_glance(judgements: Sequence[Judgement]) -> str:
    """How many claims have which verdict, in one line; empty where these runs say nothing of any."""
    told = [judgement for judgement in judgements if judgement.cases]
    refuted, reproduced, undecided = (
        [each.claim.name for each in told if each.verdict == verdict]
        for verdict in ("refuted", "reproduced", "inconclusive")
    )
    parts = [f"{len(refuted)} of {len(judgements)} refuted" + (f" ({text.listed(refuted)})" if refuted else "")]
    parts += [f"{len(reproduced)} reproduced", f"{len(undecided)} undecided"]
    return f"Claims of the publications: {', '.join(parts)}." if told else ""


def summed_up(judgements: Sequence[Judgement], folder: Path) -> str:
    """All claims by the runs of the folder in one sentence, and what an interval beside them is."""
    if not any(judgement.cases for judgement in judgements):
        return nothing(judgements, folder)
    return f"Of {count_of(len(judgements), 'claim')}: {counted(judgements)}. {_INTERVALS}{_titles(judgements)}"


def _titles(judgements: Sequence[Judgement]) -> str:
    """What the numbers of the shown claims' publications stand for."""
    seeds = {judgement.seed for judgement in judgements if judgement.cases}
    named = [f"{each.seed}: {each.title}" for each in publications() if each.seed in seeds]
    return f" Publications: {'; '.join(named)}." if named else ""


def table(judgements: Sequence[Judgement]) -> Table:
    """One row per effect, and one per claim without any. In LaTeX the effects: claim, verdict, effect with its
    interval, work.
    """
    body = [
        [f"{judgement.seed} {judgement.claim.name.replace('_', ' ')}", case.verdict, effect_of(case, judgement.claim)]
        for judgement in judgements
        for case in judgement.cases
    ]
    tabular = latex.Rows(_SHAPE, ("Claim", "Verdict", "Effect, its interval, and the work"), body)
    caption = "Claims of the publications, decided by their own runs"
    rows = pl.DataFrame([*_rows(judgements)], schema=_COLUMNS, orient="row")
    return Table("claims", rows, [(caption, [tabular])], most=MOST_ROWS)


def _rows(judgements: Sequence[Judgement]) -> Iterator[tuple[object, ...]]:
    for judgement in judgements:
        claim = judgement.claim
        head = (judgement.seed, claim.name, claim.section, judgement.verdict, judgement.why)
        for case in judgement.cases:
            place = (" ".join(case.sweeps), case.where, case.compared, case.device, claim.metric, claim.compare)
            yield (*head, *place, len(case.effects), case.median, case.low, case.high, case.verdict, case.lacks)
        if not judgement.cases:
            yield (*head, "", "", "", "", claim.metric, claim.compare, 0, None, None, None, "", "")
