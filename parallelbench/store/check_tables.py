"""The tables of what was compared with one device: `parity` before training, `checks` during and after it."""

from __future__ import annotations

from parallelbench.store.columns import EPOCH, KEYS, Column

_NO_NUMBER = "it is not a number"
PARITY = (
    *KEYS,
    Column("step", "int32", "counts from 1"),
    Column("loss", "float64", "loss of the strategy", null=_NO_NUMBER),
    Column("loss_reference", "float64", "loss of one device"),
    Column("loss_difference", "float64", "|difference| ÷ max(1, |reference|)", null=_NO_NUMBER),
    Column(
        "gradient_difference",
        "float64",
        "largest |difference| of a gradient ÷ largest |gradient| of the model",
        null=_NO_NUMBER,
    ),
    Column(
        "parameter_difference",
        "float64",
        "largest |difference| of a parameter ÷ max(1, largest |parameter|)",
        null=_NO_NUMBER,
    ),
    Column(
        "evaluation_difference",
        "float64",
        "on 37 test samples, the larger of: |difference| of the loss ÷ max(1, |reference|); |difference| of the share "
        "of correct predictions ÷ 10",
        null=_NO_NUMBER,
    ),
    Column("tolerance", "float64", "limit of each of the four differences"),
    Column("passed", "bool", "all four are within the tolerance"),
)

COPIES, SAMPLES, SETTLED = "copies", "samples", "settled"
"""Checks that are made after each epoch."""
INITIAL = "initial"
"""Before the first."""
CLOSING = "closing check"
"""Stands for all checks after the last epoch, where they did not end."""
CHECKS = (
    *KEYS,
    EPOCH,
    Column(
        "check",
        "string",
        "initial: parameters and buffers before the first step; copies: of parameters, after each epoch; samples: "
        "those that gradients were taken of, after the last one or "
        "where they are not all; settled: parameters that changed between training and the end of the evaluation, "
        "likewise; the rest after the last: evaluation loss and accuracy, loss, gradients, update, "
        "buffers, bytes, exchanges, settings of torch; steps: why none was compared; closing check: it did not end",
    ),
    Column("detail", "string", "what was compared with what, or why nothing was"),
    Column("step", "int32", "step over all epochs, counts from 1", null="not of a step"),
    Column(
        "difference",
        "float64",
        "difference that was found; relative, or a number of ranks or tensors",
        null=("nothing was compared, or it is not a number"),
    ),
    Column("limit", "float64", "largest difference that passes", null="nothing was compared"),
    Column("passed", "bool", "the difference is within the limit", null="nothing was compared"),
)
