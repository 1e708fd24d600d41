"""Figures become images in a process of their own, beside what else of a report is made.

V8 takes half a second to start, and holds Python's lock while it draws. The process is this file, which imports nothing
of the suite.
"""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from concurrent.futures import Future
    from types import TracebackType


class Pictures:
    """Draws specifications one after the other while its block runs."""

    def __enter__(self) -> Self:
        """Start the process."""
        # Of its own session, so that an interrupt from a terminal reaches this process alone, which ends that one.
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        self._in_order = ThreadPoolExecutor(1)
        return self

    def draw(self, spec: dict[str, Any]) -> Future[str]:
        """The image of a figure's specification as SVG, once it is drawn."""
        return self._in_order.submit(self._drawn, spec)

    def _drawn(self, spec: dict[str, Any]) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(spec).encode() + b"\n")
            self._process.stdin.flush()
            image: str = json.loads(self._process.stdout.readline())
        except (BrokenPipeError, json.JSONDecodeError):
            raise RuntimeError("a figure can't be drawn: the lines above say why") from None
        return image

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """End the process, and what it draws."""
        self._process.kill()
        self._in_order.shutdown(cancel_futures=True)
        self._process.communicate()


def _serve() -> None:
    """Answer each line of the standard input, a specification, by its image."""
    import vl_convert

    vl_convert.vegalite_to_svg({"mark": "point"})  # V8 is ready when the first figure is
    for line in sys.stdin.buffer:
        image = vl_convert.vegalite_to_svg(json.loads(line))
        sys.stdout.buffer.write(json.dumps(image).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    _serve()
