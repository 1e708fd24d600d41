"""Names of nodes as Slurm writes them: `n[1-3,07],gpu4` are n1, n2, n3, n07 and gpu4."""

from __future__ import annotations

import itertools
import math
import re
from typing import TYPE_CHECKING

from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

_NAME = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_MOST = 100_000
"""Most numbers of one range, and names of one entry; no cluster has more nodes."""


def hosts(text: str | None) -> frozenset[str]:
    """The nodes of a list; empty for none."""
    return frozenset(name for found in _NAME.findall(text or "") for name in _names(found))


def _names(text: str) -> Iterator[str]:
    """Those of one entry, which may have several brackets: `r[1-2]n[1-4]`."""
    parts = [list(_numbers(match[1])) if match[1] else [match[0]] for match in _PART.finditer(text)]
    if (count := math.prod(map(len, parts))) > _MOST:
        raise ConfigError(f"{text} are {count} nodes, and no cluster has more than {_MOST}: name fewer")
    yield from map("".join, itertools.product(*parts))


def _numbers(text: str) -> Iterator[str]:
    """The numbers between brackets, each as wide as the first of its range is written."""
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not (dash and first.isdecimal() and last.isdecimal()):
            yield part
            continue
        for number in range(int(first), min(int(last), int(first) + _MOST) + 1):
            yield f"{number:0{len(first)}d}"
