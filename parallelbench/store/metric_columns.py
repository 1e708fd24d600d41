"""Columns of the table `epochs` about the metric that `metric` names."""

from __future__ import annotations

from parallelbench.store.columns import Column, Over

METRIC = (
    Column(
        "test_metric",
        "float64",
        "the run's `metric` on the test set after the epoch, from sums over all ranks",
        null="metric=none, no finite number, or an older release",
        into=(
            Column(
                "last_test_metric",
                "float64",
                "the run's `metric` on the test set after the last finished epoch that has it",
                null="metric=none, no epoch finished, or an older release",
                over=Over.LAST,
                repeats=Over.MEDIAN,
                heading="Test metric",
                where_known=True,
            ),
        ),
    ),
)
