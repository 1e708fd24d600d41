"""The results of gpu-check so far, so that a check that ends the process costs only itself; and the table of them."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from parallelbench.gpu_check.check_result import CheckResult

if TYPE_CHECKING:
    from collections.abc import Iterable

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


def default_path(*, rehearsed: bool = False) -> Path:
    """One file per machine: home folders are often shared."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    name = "gpu-check-rehearsal" if rehearsed else "gpu-check"
    return Path(cache).expanduser() / "parallelbench" / f"{name}-{socket.gethostname()}.jsonl"


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
