"""Ends a rank that waits for ever inside its framework's runtime, where no exception reaches it."""

from __future__ import annotations

import math
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_LOOKS = 4
"""How often it looks within the time that a rank may wait."""


class Watchdog:
    """A context, entered again and again; `bite` is called in a thread of its own where one lasts too long."""

    def __init__(self, timeout_s: float, bite: Callable[[], None]) -> None:
        self._timeout_s, self._bite = timeout_s, bite
        self._deadline = math.inf
        threading.Thread(target=self._watch, daemon=True).start()

    def __enter__(self) -> None:
        self._deadline = time.monotonic() + self._timeout_s

    def __exit__(self, *_: object) -> None:
        self._deadline = math.inf

    def _watch(self) -> None:
        while time.monotonic() < self._deadline:
            time.sleep(self._timeout_s / _LOOKS)
        self._bite()
