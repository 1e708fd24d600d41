"""The column of the table `epochs` about what `metric` names."""

from __future__ import annotations

from parallelbench.store.columns import Column, Over

_NULL = "metric=none, no finite number, or an older release"

METRIC = (
    Column(
        "test_metric",
        "float64",
        "the run's `metric` on the test set after the epoch, from sums over all ranks",
        null=_NULL,
        into=(
            Column(
                "final_test_metric",
                "float64",
                "test_metric of the last finished epoch that has it",
                null=f"{_NULL}; no epoch finished",
                over=Over.LAST,
                repeats=Over.MEDIAN,
                heading="Test metric",
                where_known=True,
            ),
        ),
    ),
)
