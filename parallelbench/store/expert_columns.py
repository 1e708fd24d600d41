"""The column of the table `epochs` about how evenly tokens fall on experts."""

from __future__ import annotations

from parallelbench.store.columns import Column, Over

_NULL = "the model has no experts among which tokens are divided, or an older release"

EXPERT_BALANCE = (
    Column(
        "expert_imbalance",
        "float64",
        "tokens of a block's busiest expert ÷ mean of the block's experts, all of the epoch's training and all ranks "
        "together; mean over the blocks. 1: even",
        null=_NULL,
        into=(
            Column(
                "final_expert_imbalance",
                "float64",
                "expert_imbalance of the last finished epoch",
                null=f"{_NULL}; no epoch finished",
                over=Over.LAST,
                repeats=Over.MEDIAN,
                heading="Expert imbalance",
                where_known=True,
            ),
        ),
    ),
)
"""1 + MaxVio_global of Wang et al. 2024 (arXiv 2408.15664, section 4.1), which they average over layers, too."""
