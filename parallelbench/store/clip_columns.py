"""Columns of the table `ranks` about gradients that `clip_norm` has clipped."""

from __future__ import annotations

from parallelbench.store.columns import Column, Over

_NULL = "clip_norm is null, this rank clips no gradient (workers of parameter servers), or an older release"
_NONE = "no rank has clipped"
_STEPS = "without those that overflowed, which are skipped (precision=fp16)"

CLIPPING = (
    Column(
        "gradient_norm_mean",
        "float64",
        "norm of the whole gradient before it was clipped, over all ranks that hold a part: mean over the epoch's "
        f"steps, {_STEPS}",
        null=_NULL,
        into=(
            Column(
                "mean_gradient_norm",
                "float64",
                "norm of the gradient before it was clipped: mean over the epoch's steps",
                null=_NONE,
                over=Over.MAX,
                into=(
                    Column(
                        "steady_gradient_norm",
                        "float64",
                        "mean_gradient_norm: median over the epochs without each attempt's first one",
                        null=f"{_NONE}, or no such epoch",
                        over=Over.MEDIAN,
                        steady=True,
                        repeats=Over.MEDIAN,
                        heading="Gradient norm before clipping",
                        where_known=True,
                    ),
                ),
            ),
        ),
    ),
    Column(
        "gradient_norm_max",
        "float64",
        f"the largest of these norms in the epoch, {_STEPS}",
        null=_NULL,
        into=(
            Column(
                "largest_gradient_norm",
                "float64",
                "norm of the gradient before it was clipped: the largest of the epoch's steps",
                null=_NONE,
                over=Over.MAX,
                into=(
                    Column(
                        "highest_gradient_norm",
                        "float64",
                        "largest_gradient_norm of any finished epoch",
                        null=_NONE,
                        over=Over.MAX,
                        repeats=Over.MAX,
                        heading="Largest gradient norm before clipping",
                        where_known=True,
                    ),
                ),
            ),
        ),
    ),
    Column(
        "clipped_share",
        "float64",
        f"share of the epoch's steps in which this norm exceeded clip_norm, {_STEPS}",
        "share",
        null=_NULL,
        into=(
            Column(
                "share_of_steps_clipped",
                "float64",
                "share of the epoch's steps in which the gradient's norm exceeded clip_norm",
                "share",
                null=_NONE,
                over=Over.MAX,
                into=(
                    Column(
                        "clipped_steps_share",
                        "float64",
                        "share_of_steps_clipped: mean over all finished epochs",
                        "share",
                        null=_NONE,
                        over=Over.MEAN,
                        repeats=Over.MEDIAN,
                        heading="Steps clipped",
                        where_known=True,
                    ),
                ),
            ),
        ),
    ),
)
"""The same on every rank that clips."""
