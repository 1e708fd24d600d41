"""The result of one check (a text, `FailedError` or `SkippedError`), and the results so far, kept in a file."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from parallelbench.errors import one_line

if TYPE_CHECKING:
    from collections.abc import Iterable


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


_CELL = {"|": "\\|", "\n": " "}


class KeptResults:
    """Results of this machine's checks, kept in a file. They count for as long as the `setting` is the same."""

    def __init__(self, path: Path, setting: str) -> None:
        """`setting`: what the results depend on: versions and devices."""
        self._path, self._setting = path, setting
        self.passed = {result.name: result for result in self._read() if result.state == "ok"}
        """What need not be checked again."""
        self._write(list(self.passed.values()))

    def add(self, result: CheckResult) -> None:
        """Keep a result before the next check begins."""
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(result) + b"\n")

    def forget(self) -> None:
        """Begin anew next time."""
        self._path.unlink(missing_ok=True)

    def _read(self) -> list[CheckResult]:
        try:
            first, *rest = self._path.read_bytes().splitlines()
            if msgspec.json.decode(first) != self._setting:
                return []
            return [msgspec.json.decode(line, type=CheckResult) for line in rest]
        except (OSError, ValueError, msgspec.DecodeError):
            return []  # none, or cut off in the middle

    def _write(self, results: Iterable[CheckResult]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        lines = [msgspec.json.encode(self._setting), *map(msgspec.json.encode, results)]
        self._path.write_bytes(b"".join(line + b"\n" for line in lines))


def default_path(kind: str = "") -> Path:
    """One file per kind of check and machine: home folders are often shared."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "parallelbench" / f"gpu-check{kind}-{socket.gethostname()}.jsonl"


def markdown(setting: str, results: Iterable[CheckResult]) -> str:
    """A table to paste into an issue."""
    here = socket.gethostname()
    lines = [setting, "", "| check | result | figures | s |", "|---|---|---|---|"]
    for result in results:
        text = result.text if result.node in ("", here) else f"{result.text} (on {result.node})"
        for letter, written in _CELL.items():
            text = text.replace(letter, written)
        lines.append(f"| {result.name} | {result.state} | {text} | {result.took_s:.1f} |")
    return "\n".join(lines)
