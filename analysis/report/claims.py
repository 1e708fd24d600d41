"""The claims as the report shows them: on its page, as CSV and as LaTeX."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import polars as pl

from analysis.claims import judge_all
from analysis.claims.table import effect_of, lines, nothing, told
from analysis.claims.verdict import VERDICTS
from analysis.report import latex
from analysis.report.tables import Table
from analysis.runs.reader import once
from parallelbench.errors import count_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from analysis.claims.claim import Claim
    from analysis.claims.verdict import Case, Judgement
    from analysis.runs.reader import Runs


MOST_CASES = 8
"""Cases that the page shows of one claim; the CSV has all."""
MOST_ROWS = 18
"""Of a table in LaTeX: of three lines each, in footnotesize, they fit on a page."""
_SHAPE = (latex.broken(0.28), "l", latex.broken(0.5))
_COLUMNS = {
    **dict.fromkeys(("publication", "claim", "section", "verdict", "why", "runs", "outside", "sweeps"), pl.String),
    **dict.fromkeys(("work", "step", "device", "metric", "compare"), pl.String),
    "repeats": pl.Int64,
    **dict.fromkeys(("median", "low", "high"), pl.Float64),
    **dict.fromkeys(("finding", "lacks"), pl.String),
}


@once
def judged(runs: Runs) -> tuple[Judgement, ...]:
    """All claims of the suite's publications by these runs."""
    return tuple(judge_all(runs))


class ShownClaim(NamedTuple):
    """A claim as a row of the page."""

    publication: str
    name: str
    section: str
    quote: str
    verdict: str
    """Of the publication's runs; empty where there are none."""
    elsewhere: str
    """What other runs say of it, which decides nothing; empty where they say nothing."""
    lines: tuple[str, ...]
    """What is expected, and the effects."""


def shown(judgements: Sequence[Judgement]) -> list[ShownClaim]:
    """The claims that these runs say something of: those with a verdict first, then those measured elsewhere."""
    rows = [
        ShownClaim(
            judgement.seed,
            judgement.claim.name,
            judgement.claim.section,
            judgement.claim.quote,
            judgement.verdict if judgement.cases else "",
            ", ".join(dict.fromkeys(each.finding for each in told(judgement))),
            tuple(lines(judgement, most=MOST_CASES)),
        )
        for judgement in judgements
        if judgement.cases or told(judgement)
    ]
    return sorted(rows, key=lambda row: not row.verdict)


class ShownClaims(NamedTuple):
    """The rows in two groups."""

    own: list[ShownClaim]
    """Of the publications of which these runs decide any claim."""
    others: list[ShownClaim]


def by_publication(rows: Sequence[ShownClaim]) -> ShownClaims:
    """Claims that these runs are about, and those of other publications."""
    own = {row.publication for row in rows if row.verdict}
    parts = ([row for row in rows if (row.publication in own) is decides] for decides in (True, False))
    return ShownClaims(*parts)


def summed_up(judgements: Sequence[Judgement]) -> str:
    """All claims in one sentence."""
    rows = shown(judgements)
    if not rows:
        return nothing(judgements)
    verdicts = [row.verdict for row in rows if row.verdict]
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in VERDICTS) if verdicts else "none decided"
    elsewhere = len(rows) - len(verdicts)
    rest = len(judgements) - len(rows)
    words = [f"Of {count_of(len(judgements), 'claim')}: {counts}"]
    words += [f"{elsewhere} measured elsewhere only, on runs that are not the publications'"] if elsewhere else []
    words += [f"{rest} not measured"] if rest else []
    return "; ".join(words) + "."


def table(judgements: Sequence[Judgement]) -> Table:
    """One row per effect, and one per claim without any. In LaTeX the effects of the publications' own runs: claim,
    verdict, effect with its interval, work.
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
        every = [*judgement.cases, *(case for each in judgement.elsewhere for case in each.cases)]
        for case in every:
            yield (*head, *_case(case, claim))
        if not every:
            yield (*head, "none", "", "", "", "", "", claim.metric, claim.compare, 0, None, None, None, "", "")


def _case(case: Case, claim: Claim) -> tuple[object, ...]:
    where = ("elsewhere" if case.outside else "the publication's", " ".join(case.outside), " ".join(case.sweeps))
    numbers = (len(case.effects), case.median, case.low, case.high)
    return (*where, case.where, case.step, case.device, claim.metric, claim.compare, *numbers, case.verdict, case.lacks)
