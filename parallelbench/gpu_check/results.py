"""The result of one check (a text, `FailedError` or `SkippedError`), and the results so far, kept in a file."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from parallelbench.errors import one_line
from parallelbench.processes import die_with_parent

if TYPE_CHECKING:
    from collections.abc import Iterable
    from multiprocessing.connection import Connection


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


CHECK_S = 180.0
"""How long a check of `apart` may take."""
_FORK = multiprocessing.get_context("fork")


def apart(function: Callable[[], Any]) -> Callable[[], Any]:
    """The same function in a fork of this process, which must not have used CUDA.

    After an illegal access CUDA serves a process no more, a crash would end all checks, and so would one that waits
    for ever. Raises `FailedError` for all of that, and what the function raises.
    """
    return partial(_in_a_fork, function)


def _in_a_fork(function: Callable[[], Any]) -> Any:
    receiving, sending = _FORK.Pipe(duplex=False)
    process = _FORK.Process(target=_answer, args=(function, sending))
    process.start()
    sending.close()
    try:
        if not receiving.poll(CHECK_S):
            raise FailedError(f"ended after {CHECK_S:g} s")
        answer = receiving.recv()
    except EOFError:
        process.join()
        assert process.exitcode is not None
        raise FailedError(f"its process {ended(process.exitcode)}") from None
    finally:
        process.kill()
        process.join()
    if isinstance(answer, Exception):
        raise answer
    return answer


def _answer(function: Callable[[], Any], sending: Connection) -> None:
    die_with_parent()
    try:
        answer = function()
    except (FailedError, SkippedError) as said:
        answer = said
    except Exception as error:  # of any class, which the other process may not know
        answer = FailedError(f"{type(error).__name__}: {error}")
    sending.send(answer)


def ended(code: int) -> str:
    """How a process has ended, e.g. “was killed by SIGSEGV”."""
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was killed by {signal.Signals(-code).name if -code in set(signal.Signals) else f'signal {-code}'}"


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
        """Keep a result before the next check begins; a full disk ends no check."""
        with suppress(OSError), self._path.open("ab") as file:
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
    """One file per kind of check and machine: home folders are often shared.

    Below the folder of temporary files where there is no home that can be written, as in some containers.
    """
    cache = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    for place in (cache, f"{tempfile.gettempdir()}/{os.getuid()}"):
        folder = Path(place, "parallelbench")
        if place.startswith("~"):
            continue  # nobody knows this user's home
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                break
    return folder / f"gpu-check{kind}-{socket.gethostname()}.jsonl"


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
