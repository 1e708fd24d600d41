"""Vega as a page carries it: one script that loads nothing, compressed. Bundling it takes longer than reading it."""

from __future__ import annotations

import base64
import gzip
import hashlib
import os
import uuid
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path


def packed(words: str) -> str:
    """Compressed, in base64: what a browser unpacks by itself. The same words always give the same."""
    return base64.b64encode(gzip.compress(words.encode(), mtime=0)).decode()


def packed_vega() -> str:
    """The bundle of the installed release, from the cache of this account; bundled anew where that lacks or damaged
    it, and kept there where it may be written.
    """
    kept = _cache()
    if kept is not None and (known := _kept(kept)) is not None:
        return known
    import vl_convert

    bundle = packed(vl_convert.javascript_bundle())  # type: ignore[call-arg]  # its stub forgets the default
    if kept is not None:
        _keep(kept, bundle)
    return bundle


def _cache() -> Path | None:
    """The file; None for an account without a home."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    return folder / "parallelbench" / f"vega-{version('vl-convert-python')}" if folder.is_absolute() else None


def _kept(path: Path) -> str | None:
    """What is kept, if it is what was kept."""
    with suppress(OSError, ValueError):  # ValueError: not text, or without a sum
        known, bundle = path.read_text(encoding="ascii").split("\n")
        if known == _sum(bundle):
            return bundle
    return None


def _sum(bundle: str) -> str:
    return hashlib.sha256(bundle.encode()).hexdigest()


def _keep(path: Path, bundle: str) -> None:
    """Written under another name and renamed: another report may read it now. Without room, nothing is kept."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_text(f"{_sum(bundle)}\n{bundle}", encoding="ascii")
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
