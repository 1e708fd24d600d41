"""What language models' columns are computed by: operations of a token, a device's peak, and losses in nats."""

from __future__ import annotations

import msgspec
import polars as pl

from parallelbench.measure.layer_records import LayerCount

FORWARD_AND_BACKWARD = 3
"""Backward does twice the forward's work."""
_NATS = "parallelbench.optim.losses.CrossEntropy"
"""The loss that is nats per token; configurations leave it out, as it is the usual one."""
_PROBED = ("cpu fp32", "cuda fp16", "cuda bf16")
"""Kinds of devices and arithmetic whose peak the probe measures."""


_OF_TOKENS = pl.col("tokens_per_sample").is_not_null()


def model_flop_per_token() -> pl.Expr:
    """Floating-point operations of training on a token, without what is computed twice.

    6·N + 12·L·H·Q·T, as in appendix B of PaLM (Chowdhery et al. 2022, arXiv 2204.02311): L layers of H heads of width
    Q, sequences of T tokens, attention in full. N are the parameters of matrices that a token is multiplied with: of
    looked-up embeddings, vectors and experts that a token is not sent to, none. Computed from the layers as counted
    while one sample passed, which a test holds against that formula. Null where some parameters are frozen: of these
    backward computes no gradients, and of the layers before all others nothing.
    """
    counted = pl.when(_OF_TOKENS).then("layers_json")
    forward = counted.map_elements(_forward_flop, return_dtype=pl.Float64)
    frozen = counted.map_elements(_parameters, return_dtype=pl.Int64) > pl.col("parameters")
    return pl.when(frozen).then(None).otherwise(FORWARD_AND_BACKWARD * forward / pl.col("tokens_per_sample"))


def _forward_flop(layers_json: str) -> float | None:
    return sum(each.product_flop + each.convolution_flop + each.grouped_flop for each in _layers(layers_json)) or None


def _parameters(layers_json: str) -> int:
    """Those that are trained, and frozen ones."""
    return sum(each.parameters for each in _layers(layers_json))


def _layers(layers_json: str) -> list[LayerCount]:
    return msgspec.json.decode(layers_json, type=list[LayerCount])


def peak_flop_per_s() -> pl.Expr:
    """A device's fastest matrix product, of the probes at both ends of the run, in the arithmetic of the training.

    Null where the probe measures another arithmetic than the run's; its matrix products are fp32 on CPUs, and fp16 on
    GPUs, whose peak is that of bf16, too.
    """
    either = pl.max_horizontal("probed_start_matmul_flop_per_s", "probed_end_matmul_flop_per_s")
    known = pl.concat_str("device_type", "precision", separator=" ").is_in(_PROBED)
    return pl.when(_OF_TOKENS, known).then(either)


def in_nats() -> pl.Expr:
    """Whether losses are nats per token: `loss` is cross entropy with whole labels."""
    config = pl.when(_OF_TOKENS).then("config_json")  # others need not be read
    target, smoothing = (config.str.json_path_match(f"$.loss.{key}") for key in ("_target_", "label_smoothing"))
    whole = (target == _NATS) & (smoothing.cast(pl.Float64, strict=False) == 0)
    return _OF_TOKENS & (target.is_null() | whole)


def perplexity(loss: str) -> pl.Expr:
    """The exponential of a loss in nats per token; null where no number is so large."""
    exponential = pl.col(loss).exp()
    return pl.when(exponential.is_finite()).then(exponential)
