"""What takes long to find, kept in the user's cache folder under all that it depends on: counted layers, and fits."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from parallelbench.config.identity import canonical_json
from parallelbench.measure.environment import version

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


def kept(kind: str, key: Any, make: Callable[[], str], decode: Callable[[str], T]) -> T:
    """What `decode` makes of the text that `make` returns; that is kept for the same key, sources and libraries.

    A file that `decode` does not take, as one that was cut off, counts for none.
    """
    file = place(kind, key)
    with suppress(OSError, ValueError):
        return decode(file.read_text())
    text = make()
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}")
        partial.write_text(text)
        partial.replace(file)
    return decode(text)


def place(kind: str, key: Any) -> Path:
    """Where it is kept; named after the key, the suite's sources, and the versions of what computes."""
    folder = Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache"))
    versions = [version(name) for name in ("torch", "numpy", "scipy")]
    digest = hashlib.sha256(canonical_json([key, _sources(), versions]).encode()).hexdigest()
    return folder / "parallelbench" / kind / f"{digest[:32]}.json"


@cache
def _sources() -> str:
    """A digest of the suite's files: models, optimizers and losses are among what is counted."""
    digest = hashlib.sha256()
    for package in ("parallelbench", "analysis"):
        for file in sorted(Path(str(resources.files(package))).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()
