"""The identity of data that are made from options alone."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import msgspec

from parallelbench.config.identity import canonical_json

if TYPE_CHECKING:
    from parallelbench.config.components import Data


def fingerprint_of(data: Data, generator: str) -> str:
    """sha256 of the options that the data are made from, and of `generator`, which must change with what is made."""
    made_from = {key: value for key, value in msgspec.to_builtins(data).items() if key not in ("name", "augment")}
    return hashlib.sha256(canonical_json([generator, made_from]).encode()).hexdigest()
