"""Tables without what looks like a token, and as CSV that a spreadsheet shows, but does not compute."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from parallelbench.redaction import MARKS, redacted

if TYPE_CHECKING:
    from pathlib import Path

_FORMULA = r"^[=@\t\r]|^[+-].*[A-Za-z=@(|]"
"""Text that spreadsheets compute; a number with its sign is none."""


def without_tokens(frame: pl.DataFrame, *, but: tuple[str, ...] = ("run_id", "folder")) -> pl.DataFrame:
    """The same table, redacted, `but` for these columns: run ids and folders are what runs are found by."""
    texts = [name for name, kind in frame.schema.items() if kind == pl.String and name not in but]
    marked = frame.select(pl.col(texts).str.contains_any(list(MARKS)).any()).row(0) if texts else ()
    found = [name for name, is_marked in zip(texts, marked, strict=True) if is_marked]
    return frame.with_columns(pl.col(name).map_elements(redacted, pl.String) for name in found) if found else frame


def write_csv(frame: pl.DataFrame, path: Path) -> None:
    """Write a table; text that a spreadsheet would take for a formula begins with an apostrophe."""
    text = pl.col(pl.String)
    harmless = pl.when(text.str.contains(_FORMULA)).then("'" + text).otherwise(text).name.keep()
    without_tokens(frame, but=("run_id",)).with_columns(harmless).write_csv(path)
