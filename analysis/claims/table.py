"""The claims and their verdicts for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from analysis import text
from analysis.claims.verdict import VERDICTS, Case, Finding

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from analysis.claims.grammar import Claim

_COLOURS = {"reproduced": "green", "refuted": "red", "inconclusive": "yellow"}
_MOST_CASES = 4
"""Cases that the table of all claims shows of one; by its name, all are shown."""

_MOST_WARNINGS = 3


def findings_table(findings: Sequence[Finding]) -> RenderableType:
    """One row per claim that these runs say something about, the effects below it; then what decides the others."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 1, 0), expand=True)
    table.add_column("claim", ratio=5)
    table.add_column("verdict", no_wrap=True)
    table.add_column("effect, and in brackets its 95 % interval", ratio=8)
    told = [finding for finding in findings if finding.cases]
    for finding in told:
        claim = finding.claim
        said = f"[bold]{claim.name}[/] ({finding.seed}, {escape(claim.section)})\n“{escape(claim.quote)}”"
        verdict = f"[{_COLOURS[finding.verdict]}]{finding.verdict}[/]"
        table.add_row(said, verdict, escape("\n".join(_lines(finding, most=_MOST_CASES))))
    shown: list[RenderableType] = [table] if told else []
    return Group(*shown, Text("\n".join([*_untold(findings), "", *_tally(findings)])))


def _untold(findings: Sequence[Finding]) -> list[str]:
    """What would decide the claims that these runs say nothing about."""
    lacking: dict[str, list[str]] = {}
    for finding in findings:
        if not finding.cases:
            claim = finding.claim
            commands = " and ".join(f"parallelbench submit sweep={name}" for name in claim.sweeps)
            where = commands + (" on GPUs" if claim.gpus_only else "")
            lacking.setdefault(where, []).append(claim.name)
    head = ["These runs say nothing about the claims below; what would:"] if lacking else []
    return head + [f"- {where}: {', '.join(names)}" for where, names in lacking.items()]


def details(finding: Finding) -> RenderableType:
    """One claim with every case, every repeat and every run behind it."""
    claim = finding.claim
    head = [
        f"{claim.name}: {finding.verdict}" + (f" ({finding.why})" if finding.why else ""),
        f"publication {finding.seed}, {claim.section}: “{claim.quote}”",
        *([claim.note] if claim.note else []),
        f"expected: {expected(claim)}",
    ]
    rows = [line for case in finding.cases for line in ("", *_case(case, claim))]
    return Text("\n".join([*head, *rows, ""]))


def expected(claim: Claim) -> str:
    """What is compared, and where it must lie: "steady_epoch_time_s, ratio above 1.02"."""
    expect = claim.expect
    (low, high), bound = expect.region, expect.above if expect.above is not None else expect.below
    span = f"between {_value(low, claim)} and {_value(high, claim)}"
    if bound is not None:
        span = f"above {_value(low, claim)}" if expect.above is not None else f"below {_value(high, claim)}"
    side = "up to" if expect.above is not None else "from"
    refuted = f" (refuted {side} {_value(bound, claim)})" if expect.by else ""
    return f"{claim.metric}, {claim.compare} {span}{refuted}"


def _lines(finding: Finding, *, most: int) -> list[str]:
    claim, cases = finding.claim, sorted(finding.cases, key=lambda case: VERDICTS[::-1].index(case.verdict))
    lines = [f"{expected(claim)}"]
    lines += [_effect(case, claim) for case in cases[:most]]
    lines += [f"and {len(cases) - most} more cases"] if len(cases) > most else []
    return [*lines, *([finding.why] if finding.why else [])]


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


def _tally(findings: Sequence[Finding]) -> list[str]:
    counts = [(sum(finding.verdict == verdict for finding in findings), verdict) for verdict in VERDICTS]
    told = ", ".join(f"{count} {verdict}" for count, verdict in counts)
    devices = list(dict.fromkeys(case.device for finding in findings for case in finding.cases))
    where = f"Measured on {text.listed(devices)}: what is said of GPUs is decided for these. " if devices else ""
    line = f"{len(findings)} claims: {told}. {where}`parallelbench claims DIR NAME` shows what is behind one."
    return [line, *_warnings(findings)]


def _warnings(findings: Sequence[Finding]) -> list[str]:
    """What limits all this: the runs' own warnings, and in what those that were compared are not alike."""
    found = list(dict.fromkeys(w for finding in findings for case in finding.cases for w in case.warnings))
    shown = [f"- {warning}" for warning in found[:_MOST_WARNINGS]]
    more = (
        [f"- and {len(found) - _MOST_WARNINGS} more, beside the claim that you name"]
        if len(found) > _MOST_WARNINGS
        else []
    )
    return ["", "What to know of some of the runs behind these verdicts:", *shown, *more] if found else []
