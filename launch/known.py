"""The suite's keys and words as a table, which loads nothing that knows them; `python -m tests.docs` writes it."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


@cache
def known() -> Mapping[str, Any]:
    """Keys with the choices that have them and their values, the default choices, and words by placeholder."""
    content: Mapping[str, Any] = json.loads(Path(__file__).with_name("known.json").read_bytes())
    return content
