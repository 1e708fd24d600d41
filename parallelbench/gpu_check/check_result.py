"""What a check has found, and how checks end: with a text, `FailedError`, or `SkippedError`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from parallelbench.errors import one_line

Check = Callable[[], str]
"""Returns what it found, with the figure and its limit."""


class FailedError(Exception):
    """The check's limit is not kept; the text says by how much."""


class SkippedError(Exception):
    """There is nothing to check here; the text says why."""


@dataclass(frozen=True)
class CheckResult:
    """One line of the answer."""

    name: str
    state: Literal["ok", "failed", "skipped"]
    text: str
    took_s: float

    def line(self) -> str:
        """As it is printed."""
        return f"{self.state:8}{self.name:34}{self.text} [{self.took_s:.1f} s]"


def carry_out(name: str, check: Check) -> CheckResult:
    """Whatever a check does, one finding comes of it, and the next check can go on."""
    start = time.perf_counter()
    state: Literal["ok", "failed", "skipped"] = "ok"
    try:
        text = check()
    except SkippedError as skipped:
        state, text = "skipped", str(skipped)
    except FailedError as failed:
        state, text = "failed", str(failed)
    except Exception as error:
        state, text = "failed", f"{type(error).__name__}: {error}"
    return CheckResult(name, state, one_line(text), time.perf_counter() - start)


def at_most(what: str, value: float, limit: float) -> str:
    """The text of a figure that keeps its limit; raises `FailedError` for one that doesn't, a NaN included."""
    text = f"{what} {value:.3g} (limit {limit:g})"
    if not value <= limit:
        raise FailedError(text)
    return text


def between(what: str, value: float, least: float, most: float) -> str:
    """The text of a figure within its limits; raises `FailedError` for one outside."""
    text = f"{what} {value:.3g} (limits {least:g} and {most:g})"
    if not least <= value <= most:
        raise FailedError(text)
    return text
