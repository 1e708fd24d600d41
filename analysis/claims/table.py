"""The claims and their verdicts for a terminal."""

from __future__ import annotations

import re
import shlex
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Group
from rich.markup import escape
from rich.padding import Padding
from rich.text import Text

from analysis import text
from analysis.claims.claim import TO_ACCURACY
from analysis.claims.verdict import VERDICTS
from analysis.metrics.columns import tables_columns
from parallelbench.errors import count_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rich.console import RenderableType

    from analysis.claims.claim import Claim
    from analysis.claims.verdict import Case, Judgement
    from parallelbench.results.declaration import Column

_COLOURS = {"reproduced": "green", "refuted": "red", "inconclusive": "yellow"}
_MOST_CASES = 4
"""Cases that the table of all claims shows of one; by its name, all are shown."""

_MOST_WARNINGS = 3


def judgements_table(judgements: Sequence[Judgement], folder: Path) -> RenderableType:
    """Of each claim its verdict and its effects in the runs of the folder, then the commands whose runs would decide
    the others.

    One line where nothing is decided.
    """
    decided = [judgement for judgement in judgements if judgement.cases]
    if not decided:
        return Text(nothing(judgements, folder))
    claims = (part for judgement in decided for part in _shown(judgement))
    return Group(*claims, Text("\n".join([*_undecided(judgements), "", *tally(judgements, folder)])))


def _shown(judgement: Judgement) -> tuple[RenderableType, RenderableType]:
    """A claim's whole name, which no narrow terminal cuts, and a few lines below it."""
    claim, colour = judgement.claim, _COLOURS[judgement.verdict]
    head = f"[{colour}]{judgement.verdict}[/] · {judgement.seed}, {escape(claim.section)}: “{escape(claim.quote)}”\n"
    body = Text.from_markup(head) + Text("\n".join(chain(*lines(judgement, most=_MOST_CASES))))
    return Text.from_markup(f"[bold]{claim.name}[/]", overflow="ignore"), Padding(body, (0, 0, 1, 4))


def nothing(judgements: Sequence[Judgement], folder: Path) -> str:
    """The whole answer where nothing can be said of the runs of the folder."""
    claims = count_of(len(judgements), "claim")
    of = "none is decided, as no comparison of these runs is a publication's own."
    return f"{claims}: {of} {_command(judgements[0], folder)} says which runs the first one needs."


def _command(judgement: Judgement, folder: Path) -> str:
    """What shows one claim in full."""
    return f"`parallelbench claims {shlex.quote(str(folder))} {judgement.claim.name}`"


def _undecided(judgements: Sequence[Judgement]) -> list[str]:
    """The commands whose runs would decide the other claims."""
    lacking: dict[str, list[str]] = {}
    for judgement in judgements:
        if not judgement.cases:
            lacking.setdefault(_needed(judgement), []).append(judgement.claim.name)
    head = ["Nothing decides the claims below. These commands would:"] if lacking else []
    return head + [f"- {where}: {', '.join(names)}" for where, names in lacking.items()]


def _needed(judgement: Judgement) -> str:
    claim = judgement.claim
    commands = " and ".join(f"parallelbench submit sweep={name}" for name in claim.sweeps)
    return f"{commands} on GPUs" if claim.gpus_only or claim.scope.get("device_type") == "cuda" else commands


def details(judgement: Judgement) -> RenderableType:
    """One claim with every case, every repeat and every run behind it."""
    claim = judgement.claim
    head = [
        f"{claim.name}: {judgement.verdict}" + (f" ({judgement.why})" if judgement.why else ""),
        f"publication {judgement.seed}, {claim.section}: “{claim.quote}”",
        *([claim.note] if claim.note else []),
        f"expected: {expected(claim)}",
    ]
    rows = [line for case in judgement.cases for line in ("", *_case(case, claim))]
    return Text("\n".join([*head, *rows, ""]))


def expected(claim: Claim) -> str:
    """The metric, the comparison and the region: "ratio of time per epoch above 1.02"."""
    expect = claim.expect
    (low, high), bound = expect.region, expect.above if expect.above is not None else expect.below
    span = f"between {_value(low, claim)} and {_value(high, claim)}"
    if bound is not None:
        span = f"above {_value(low, claim)}" if expect.above is not None else f"below {_value(high, claim)}"
    side = "up to" if expect.above is not None else "from"
    refuted = f" (refuted {side} {_value(bound, claim)})" if expect.by else ""
    metric = _in_words(claim.metric)
    return f"{claim.compare} of {metric}{',' if ',' in metric else ''} {span}{refuted}"


@cache
def _columns() -> dict[str, Column]:
    return {column.name: column for columns in tables_columns().values() for column in columns}


def _in_words(metric: str) -> str:
    """As tables head it, or else what its name says, without the unit."""
    column = _columns().get(metric)
    if column is not None and column.heading:
        return column.heading[0].lower() + column.heading[1:]
    words = re.sub("_sum$", ", all processes", re.sub("^slowest_|(_samples_per_s|_s|_j|_w|_bytes)$", "", metric))
    return words.replace("_", " ")


class Lines(NamedTuple):
    """What is shown of a claim, in short lines."""

    reasons: list[str]
    """What is expected, in how many cases it holds, and what a verdict lacks."""
    effects: list[str]


def lines(judgement: Judgement, *, most: int) -> Lines:
    """What is expected, what a verdict lacks, and the effects."""
    claim = judgement.claim
    cases = sorted(judgement.cases, key=lambda case: VERDICTS[::-1].index(case.verdict))
    effects = [effect_of(case, claim) for case in cases[:most]]
    more = [f"and {len(cases) - most} more cases"] if len(cases) > most else []
    reasons = (*judgement.reasons, *_leaning(judgement)) if cases else ()
    return Lines([f"expected: {expected(claim)}", *reasons], effects + more)


def _leaning(judgement: Judgement) -> list[str]:
    """To which side the medians of an undecided claim tend."""
    if judgement.verdict != "inconclusive":
        return []
    leans = [case.leans for case in judgement.cases if case.leans]
    if len(set(leans)) < 2:
        return [f"so far {leans[0]} the claim"] if leans else []
    return [f"so far for the claim in {leans.count('for')} cases, against it in {leans.count('against')}"]


def effect_of(case: Case, claim: Claim) -> str:
    """ "0.512 (0.498 – 0.530), 6 repeats: mnist · cnn_small, devices 1 → 2"; no interval of too few for a verdict."""
    ends = {_value(end, claim) for end in (case.median, case.low, case.high)}
    varies = len(ends) > 1 or claim.metric.endswith("_accuracy")  # bytes are the same in every repeat
    known = case.enough and varies and case.low is not None and case.high is not None
    span = f" ({_ends(case.low, case.high, claim)})" if known else ""  # type: ignore[arg-type]
    also = f"; {_in_words(claim.also)}: {_value(case.also, claim)}" if claim.also and case.also is not None else ""
    place = f"{case.where}, {case.compared}"
    return f"{_value(case.median, claim)}{span}, {count_of(len(case.effects), 'repeat')}: {place}{also}"


def _ends(low: float, high: float, claim: Claim) -> str:
    if claim.compare != "difference" and text.is_wide(low, high):
        return text.ends(low, high)
    first, last = _value(low, claim), _value(high, claim)
    unit = " points"  # said once
    return f"{first.removesuffix(unit) if last.endswith(unit) else first} – {last}"


def _case(case: Case, claim: Claim) -> list[str]:
    effects = ", ".join(f"{repeat}: {_value(effect, claim)}" for repeat, effect in case.effects)
    decided = case.verdict + (f" ({case.lacks})" if case.lacks else "")
    return [
        f"{effect_of(case, claim)}: {decided}",
        f"  on {case.device}; by repeat {effects}",
        *(f"  {slug}" for slug in case.runs),
        *(f"  warning: {warning}" for warning in case.warnings),
    ]


def _value(value: float | None, claim: Claim) -> str:
    if value is None:
        return text.MISSING
    if claim.compare == "efficiency":
        return text.percent(value)
    if claim.compare == "difference":
        return _difference(value, claim.metric).replace("-", "−")
    return f"{value:.3f}"


def _difference(value: float, metric: str) -> str:
    if metric.endswith("_accuracy") and metric not in TO_ACCURACY:
        return f"{100 * value:+.2f} points"
    column = _columns().get(metric)
    unit = column.unit if column is not None else None
    size, shown = (value / text.MIB, "MiB") if unit == "bytes" else (value, unit)
    return " ".join(filter(None, [f"{size:+.4g}" if size else "0", shown]))


def counted(judgements: Sequence[Judgement]) -> str:
    """ "3 reproduced, 1 refuted, 2 inconclusive; 89 not measured"."""
    verdicts = [judgement.verdict for judgement in judgements if judgement.cases]
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in VERDICTS)
    return counts + (f"; {len(judgements) - len(verdicts)} not measured" if len(verdicts) < len(judgements) else "")


def tally(judgements: Sequence[Judgement], folder: Path) -> list[str]:
    """How many claims have which verdict, and how many have no runs; then the runs' warnings."""
    shown = [case for judgement in judgements for case in judgement.cases]
    devices = list(dict.fromkeys(case.device for case in shown))
    where = f"Measured on {text.listed(devices)}: verdicts on GPUs hold for these. " if devices else ""
    first = next(judgement for judgement in judgements if judgement.cases)
    line = (
        f"{count_of(len(judgements), 'claim')}: {counted(judgements)}. {where}{_command(first, folder)} shows one with "
        "its runs."
    )
    return [line, *_warnings(shown)]


def _warnings(cases: Sequence[Case]) -> list[str]:
    """The runs' own warnings, and the caveats of comparing them."""
    warnings = list(dict.fromkeys(warning for case in cases for warning in case.warnings))
    shown = [f"- {warning}" for warning in warnings[:_MOST_WARNINGS]]
    more = (
        [f"- and {len(warnings) - _MOST_WARNINGS} more, beside the claim that you name"]
        if len(warnings) > _MOST_WARNINGS
        else []
    )
    return ["", "Warnings of some of the runs behind these verdicts:", *shown, *more] if warnings else []
