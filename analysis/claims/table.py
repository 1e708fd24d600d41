"""The claims and their verdicts for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from analysis import text
from analysis.claims.decision import VERDICTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from analysis.claims.grammar import Claim
    from analysis.claims.verdict import Case, Judgement

_COLOURS = {"reproduced": "green", "refuted": "red", "inconclusive": "yellow"}
_MOST_CASES = 4
"""Cases that the table of all claims shows of one; by its name, all are shown."""

_MOST_WARNINGS = 3


def judgements_table(judgements: Sequence[Judgement]) -> RenderableType:
    """One row per claim with its effects in these runs, then the commands whose runs would decide the others."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 1, 0), expand=True)
    table.add_column("claim", ratio=5)
    table.add_column("verdict", no_wrap=True)
    table.add_column("effect, and in brackets its 95 % interval", ratio=8)
    decided = [judgement for judgement in judgements if judgement.cases]
    for judgement in decided:
        claim = judgement.claim
        quoted = f"[bold]{claim.name}[/] ({judgement.seed}, {escape(claim.section)})\n“{escape(claim.quote)}”"
        verdict = f"[{_COLOURS[judgement.verdict]}]{judgement.verdict}[/]"
        table.add_row(quoted, verdict, escape("\n".join(_lines(judgement, most=_MOST_CASES))))
    shown: list[RenderableType] = [table] if decided else []
    return Group(*shown, Text("\n".join([*_undecided(judgements), "", *_tally(judgements)])))


def _undecided(judgements: Sequence[Judgement]) -> list[str]:
    """The commands whose runs would decide the other claims."""
    lacking: dict[str, list[str]] = {}
    for judgement in judgements:
        if not judgement.cases:
            claim = judgement.claim
            commands = " and ".join(f"parallelbench submit sweep={name}" for name in claim.sweeps)
            where = commands + (" on GPUs" if claim.gpus_only else "")
            lacking.setdefault(where, []).append(claim.name)
    head = ["These runs decide nothing about the claims below. These commands would:"] if lacking else []
    return head + [f"- {where}: {', '.join(names)}" for where, names in lacking.items()]


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
    """The metric, the comparison and the region: "steady_epoch_time_s, ratio above 1.02"."""
    expect = claim.expect
    (low, high), bound = expect.region, expect.above if expect.above is not None else expect.below
    span = f"between {_value(low, claim)} and {_value(high, claim)}"
    if bound is not None:
        span = f"above {_value(low, claim)}" if expect.above is not None else f"below {_value(high, claim)}"
    side = "up to" if expect.above is not None else "from"
    refuted = f" (refuted {side} {_value(bound, claim)})" if expect.by else ""
    return f"{claim.metric}, {claim.compare} {span}{refuted}"


def _lines(judgement: Judgement, *, most: int) -> list[str]:
    claim, cases = judgement.claim, sorted(judgement.cases, key=lambda case: VERDICTS[::-1].index(case.verdict))
    lines = [f"{expected(claim)}"]
    lines += [_effect(case, claim) for case in cases[:most]]
    lines += [f"and {len(cases) - most} more cases"] if len(cases) > most else []
    return [*lines, *([judgement.why] if judgement.why else [])]


def _effect(case: Case, claim: Claim) -> str:
    span = "" if case.low is None else f" ({_value(case.low, claim)} – {_value(case.high, claim)})"
    also = "" if case.also is None else f"; {claim.also}: {_value(case.also, claim)}"
    place = f"{case.where}, {case.step}"
    return f"{_value(case.median, claim)}{span}, {text.repeats(len(case.effects))}: {place}{also}"


def _case(case: Case, claim: Claim) -> list[str]:
    effects = ", ".join(f"{repeat}: {_value(effect, claim)}" for repeat, effect in case.effects)
    decided = case.verdict + (f" ({case.lacks})" if case.lacks else "")
    return [
        f"{_effect(case, claim)}: {decided}",
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
        return f"{value:+.4g}"
    return f"{value:.3f}"


def _tally(judgements: Sequence[Judgement]) -> list[str]:
    counts = [(sum(judgement.verdict == verdict for judgement in judgements), verdict) for verdict in VERDICTS]
    tally = ", ".join(f"{count} {verdict}" for count, verdict in counts)
    devices = list(dict.fromkeys(case.device for judgement in judgements for case in judgement.cases))
    where = f"Measured on {text.listed(devices)}: verdicts on GPUs hold for these. " if devices else ""
    line = f"{len(judgements)} claims: {tally}. {where}`parallelbench claims DIR NAME` shows one with its runs."
    return [line, *_warnings(judgements)]


def _warnings(judgements: Sequence[Judgement]) -> list[str]:
    """The runs' own warnings, and the caveats of comparing them."""
    warnings = list(dict.fromkeys(w for judgement in judgements for case in judgement.cases for w in case.warnings))
    shown = [f"- {warning}" for warning in warnings[:_MOST_WARNINGS]]
    more = (
        [f"- and {len(warnings) - _MOST_WARNINGS} more, beside the claim that you name"]
        if len(warnings) > _MOST_WARNINGS
        else []
    )
    return ["", "Warnings of some of the runs behind these verdicts:", *shown, *more] if warnings else []
