"""How advice looks on a terminal: the ranked table, what is impossible, and what to do."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from launch.verbs.console import console, say
from launch.verbs.listing import listing

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from analysis.advisor.advice import Impossible, Row

SHOWN = 30
"""Rows that a terminal gets; --json has all."""
REASONS = 12
"""Reasons that are written out."""
GIB = 2.0**30
PHASES = {"compute": "compute_s", "comm.": "communication_s", "bubble": "bubble_s", "update": "optimizer_s"}
"""Shares of a step that get a column."""


def print_answer(
    rows: Sequence[Row],
    impossible: Sequence[Impossible],
    *,
    notes: Sequence[str],
    advice: str,
    proposal: Mapping[str, Any] | None,
) -> None:
    """Print all of it; the sentence stands last but for the next runs."""
    for note in notes:
        say(note)
    best = _best(rows)
    if best:
        columns = ("strategy", "devices", "step", "90 %", "epoch", "samples/s", "MFU", "memory", *PHASES, "rests on")
        console().print(listing(columns, [_cells(row) for row in best[:SHOWN]]), crop=False)
    if len(rows) > min(SHOWN, len(best)):
        say(
            f"{len(rows)} layouts in all; the table has the best of each strategy and number of devices: --json has all"
        )
    for line in _impossible(impossible):
        say(line)
    say(advice)
    if proposal is not None:
        for line in _next(proposal):
            say(line)


def _best(rows: Sequence[Row]) -> list[Row]:
    """The best row of each strategy on each number of devices, in the order of the rows."""
    found: dict[tuple[str, int], Row] = {}
    for row in rows:
        found.setdefault((row.strategy, row.devices), row)
    return list(found.values())


def _cells(row: Row) -> tuple[str, ...]:
    name = " ".join((row.strategy, *(option.removeprefix("strategy.") for option in row.options)))
    return (
        name if row.trains_alike else f"{name} (trains otherwise)",
        str(row.devices) if row.nodes == 1 else f"{row.devices} on {row.nodes} nodes",
        _time(row.step_s),
        f"{_time(row.low_s)} – {_time(row.high_s)}",
        "–" if row.epoch_s is None else _time(row.epoch_s),
        f"{row.samples_per_s:.3g}",
        "–" if row.mfu is None else f"{100 * row.mfu:.0f} %",
        _memory(row),
        *(f"{100 * getattr(row.phases, name) / row.step_s:.0f} %" for name in PHASES.values()),
        _basis(row),
    )


def _basis(row: Row) -> str:
    """What a row rests on, in a word or two."""
    if row.measured:
        return "measured"
    return f"extrapolates {', '.join(row.extrapolates)}" if row.extrapolates else "measured runs like it"


def _memory(row: Row) -> str:
    if row.memory_bytes is None:
        return "–"
    size = f"{row.memory_bytes / GIB:.3g} GiB"
    from analysis.advisor.advice import Fit

    if row.fit is Fit.UNKNOWN:
        return f"{size}, capacity not known"
    return f"{size}, {row.fit}" if row.fit in (Fit.TOO_CLOSE, Fit.TOO_LARGE) else size


def _time(seconds: float) -> str:
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 7200 else f"{seconds / 3600:.3g} h"


def _impossible(impossible: Sequence[Impossible]) -> Iterator[str]:
    """Each reason once, with what it holds for."""
    found: dict[str, list[str]] = defaultdict(list)
    for each in impossible:
        found[each.why].append(f"{each.strategy} × {each.devices}")
    for why, cases in list(found.items())[:REASONS]:
        more = f" and {len(cases) - 3} more" if len(cases) > 3 else ""
        yield f"impossible: {', '.join(cases[:3])}{more}: {why}"
    if len(found) > REASONS:
        yield f"impossible: {len(found) - REASONS} further reasons: --json has all"


def _next(proposal: Mapping[str, Any]) -> Iterator[str]:
    if not proposal["runs"]:
        yield "Nothing is left to measure that could change the choice."
        return
    names = ", ".join(f"{run['strategy']} × {run['devices']}" for run in proposal["runs"])
    yield f"Measure next ({proposal['device_hours']:.2g} device-hours): {names}"
    if proposal["left_out"]:
        yield f"The budget leaves out {proposal['left_out']} more."
    yield proposal["command"]
