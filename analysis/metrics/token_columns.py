"""The derived numbers of language models, null where the data are not tokens."""

from __future__ import annotations

from parallelbench.results.tables import Column, Over

_OTHERWISE = "the data are not tokens, or an older release measured it"
_NO_NATS = f"{_OTHERWISE}, or `loss` is not cross entropy with whole labels"
PERPLEXITY = Column(
    "perplexity",
    "float64",
    "exponential of test_loss, which is in nats per token",
    null=_NO_NATS,
)
"""Of an epoch."""
OF_TOKENS = (
    Column(
        "tokens_per_s",
        "float64",
        "tokens trained on per second: tokens_per_sample × throughput_samples_per_s",
        "tokens/s",
        null=f"{_OTHERWISE}, or no epoch but each attempt's first one",
        repeats=Over.MEDIAN,
        heading="Token throughput",
        where_known=True,
    ),
    Column(
        "model_flop_per_token",
        "float64",
        "floating-point operations of training on a token, without what is computed twice: 6·N + 12·L·H·Q·T, as in "
        "appendix B of PaLM (arXiv 2204.02311), with the parameters of matrices as N; from the counted layers",
        null=f"{_OTHERWISE}, or the model was not counted",
        repeats=Over.MEDIAN,
        heading="Operations per token",
        tables=("configurations",),
        where_known=True,
    ),
    Column(
        "peak_flop_per_s",
        "float64",
        "what mfu rests on: a device's fastest matrix product as probed at the run's start or end, CPUs in fp32, GPUs "
        "in fp16",
        "flop/s",
        null="the data are not tokens, not probed (`measure.probe`), or the run's arithmetic is another (GPUs: bf16 "
        "has fp16's peak)",
        repeats=Over.MEDIAN,
        heading="Measured peak of a device",
        tables=("configurations",),
        where_known=True,
    ),
    Column(
        "mfu",
        "float64",
        "model FLOP utilisation: model_flop_per_token × tokens_per_s ÷ (devices × peak_flop_per_s)",
        "share",
        null="one of these is null",
        repeats=Over.MEDIAN,
        heading="MFU of the measured peak",
        where_known=True,
    ),
    Column(
        "final_loss_per_token",
        "float64",
        "test_loss after the last epoch, in nats per token",
        null=f"the run did not finish, {_NO_NATS}",
        repeats=Over.MEDIAN,
        heading="Final test loss, nats per token",
        where_known=True,
    ),
    Column(
        "final_perplexity",
        "float64",
        "exponential of final_loss_per_token",
        null=f"the run did not finish, {_NO_NATS}",
        repeats=Over.MEDIAN,
        heading="Final perplexity",
        where_known=True,
    ),
)
"""Of a run."""
