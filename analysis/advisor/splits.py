"""Which rows a fit sees and which it is judged by: fixed before anything was fitted, the same in every version."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from analysis.advisor.layouts import Layouts

FOLDS = 5
"""Folds of the cross-validation."""
_KEY = (
    *("hidden", "layers", "heads", "vocabulary", "sequence", "global_batch", "micro_batch", "tensor", "pipeline"),
    *("data", "recompute", "sharded", "fused_attention"),
)
"""What a fold follows from; later columns of a layout don't move rows to other folds."""
LARGEST_FITTED = {"vtrain": 64, "llm_foundry": 8}
"""Extrapolation: fitted on at most so many devices, judged on more. vTrain: on one node and on 3.6 billion parameters
on 64 devices, judged on 18.4 billion on 256."""


def folds(layouts: Layouts) -> NDArray[np.int64]:
    """The fold of each row, by a hash of what was asked, never of what was measured or where the row stands.

    So rows that repeat a layout are always in one fold, and a row is in the same fold whatever file it is in.
    """
    rows = (layouts.row(i) for i in range(len(layouts)))
    keys = ("|".join(f"{name}={row[name]:g}" for name in _KEY) for row in rows)
    return np.array([int(hashlib.sha256(key.encode()).hexdigest()[:8], 16) % FOLDS for key in keys], dtype=np.int64)


def beyond(layouts: Layouts, largest: int) -> NDArray[np.bool_]:
    """Rows on more devices than a fit may see."""
    return layouts.devices > largest
