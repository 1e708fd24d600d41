"""The result of one check. A check returns a text, or raises `FailedError` or `SkippedError`."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Literal

import msgspec

from parallelbench.errors import one_line

Check = Callable[[], str]
"""Returns the figure and its limit as text."""


class FailedError(Exception):
    """A figure exceeds its limit; the text says by how much."""


class SkippedError(Exception):
    """There is nothing to check here; the text says why."""


class CheckResult(msgspec.Struct, frozen=True):
    """One line of the report."""

    name: str
    state: Literal["ok", "failed", "skipped"]
    text: str
    took_s: float
    node: str = ""
    """Where it was found."""

    def line(self) -> str:
        """As it is printed."""
        return f"{self.state:8}{self.name:40}{self.text} [{self.took_s:.1f} s]"


def carry_out(name: str, check: Check) -> CheckResult:
    """Run a check; an error of any kind becomes a failed result, so that the next check can run."""
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
    return CheckResult(name, state, one_line(text), time.perf_counter() - start, socket.gethostname())


def at_most(what: str, value: float, limit: float) -> str:
    """Text for a figure within its limit; raises `FailedError` above it, and for NaN."""
    text = f"{what} {value:.3g} (limit {limit:g})"
    if not value <= limit:
        raise FailedError(text)
    return text


def between(what: str, value: float, least: float, most: float) -> str:
    """Text for a figure within its limits; raises `FailedError` outside."""
    text = f"{what} {value:.3g} (limits {least:g} and {most:g})"
    if not least <= value <= most:
        raise FailedError(text)
    return text
