"""A smaller model of the same kind, which the parity check takes in place of a language model that is large.

The check computes in fp64, on one device alone besides the strategy, so the whole model could need several times the
memory of its training. Loads no framework.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec

from parallelbench.config.build import package_of
from parallelbench.config.components import Arrays
from parallelbench.data.tokens import Tokens
from parallelbench.models.gpt import Gpt
from parallelbench.strategies.pipeline import ModelParallel, PipelineStrategy
from parallelbench.training.checks.compared import PARITY_TEST_SAMPLES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from parallelbench.config.run import RunConfig


SMALL_BYTES = 2 * 2**30
"""The whole model is checked where this suffices: no device of a training that is worth several has less."""
_BYTES = 8
"""Of a number in fp64."""
_LAYERS, _TOKENS, _ENTRIES, _HEAD_WIDTH = 2, 64, 256, 8
"""Least sizes of an excerpt: blocks, tokens of a sample, entries of the vocabulary, values of an attention head."""


def excerpt(run: RunConfig) -> RunConfig:
    """A run that is to be checked, with a smaller model and shorter samples where the whole would take too much.

    Every kind of layer is there, every expert and head, and what the strategy cuts can be cut alike: a block or more
    for each stage, equal parts of heads, hidden units, vocabulary and sequence, about as many buckets.
    """
    shipped = isinstance(run.model, Gpt) and package_of(type(run.model)) == "parallelbench"
    if not shipped or run.data.tokens_per_sample is None or whole_bytes(run) <= SMALL_BYTES:
        return run
    model, data, strategy = _small_model(run), run.data, run.strategy
    samples = Tokens(
        name=data.name,
        augment=False,
        sequence=model.sequence,
        vocabulary=min(data.vocabulary, model.vocabulary),
        branches=1,
        train_samples=run.global_batch_size * run.steps_per_epoch,
        test_samples=min(data.test_samples, PARITY_TEST_SAMPLES),
        data_seed=0,
    )
    if (bucket := getattr(strategy, "bucket_mib", None)) is not None:
        share = 2 * model.parameters / run.model.parameters  # type: ignore[attr-defined]  # gradients are in fp64
        strategy = msgspec.structs.replace(strategy, bucket_mib=bucket * share)
    return msgspec.structs.replace(run, model=model, data=samples, strategy=strategy)


def _small_model(run: RunConfig) -> Gpt:
    model, tokens = run.model, run.data.tokens_per_sample
    assert isinstance(model, Gpt)
    assert tokens is not None
    width = model.heads * min(_HEAD_WIDTH, model.width // model.heads)

    def hidden(units: int) -> int:
        """As many for the width as before, in parts of which every head of keys has as many."""
        return -(-units * width // model.width // model.key_heads) * model.key_heads

    sizes: dict[str, Any] = {
        "layers": min(model.layers, max(_LAYERS, _stages(run))),
        "width": width,
        "mlp_width": hidden(model.hidden_units),
        "sequence": _divisible(tokens, _TOKENS, parts=2 * run.devices),  # zig-zag gives each device two
        "vocabulary": _divisible(model.vocabulary, _ENTRIES, parts=run.devices),
    }
    if (shared := getattr(model, "shared_width", None)) is not None:
        sizes["shared_width"] = hidden(shared)
    return msgspec.structs.replace(model, **sizes)


def _divisible(size: int, least: int, *, parts: int) -> int:
    """A number from `least` to `size`, which whatever divides both `size` and `parts` divides too."""
    common = math.gcd(size, parts)
    return min(-(-least // common) * common, size)


def _stages(run: RunConfig) -> int:
    """Parts that the strategy makes of the layers; all of them where it names each layer's."""
    strategy, layers = run.strategy, len(run.model.layer_names)
    if isinstance(strategy, ModelParallel):
        return run.devices if strategy.device_map is None else layers
    if isinstance(strategy, PipelineStrategy):
        return strategy.pipeline(run).stages if strategy.stage_map is None else layers
    return 1


def whole_bytes(run: RunConfig) -> int:
    """About what the check of a whole `Gpt` takes on its first device, without what the strategy spares it.

    Parameters, gradients and the optimizer's states twice, the strategy's and those of one device; and the values of a
    batch, or those that an evaluation holds at once. Attention's scores are held: in fp64 GPUs have no fused kernel.
    """
    model, tokens = run.model, run.data.tokens_per_sample
    assert isinstance(model, Gpt)
    assert tokens is not None
    states = run.optimizer.states_per_parameter() or 0
    block = 16 * model.width + model.token_weights // model.width + 2 * model.heads * tokens
    logits = 4 * model.vocabulary
    step = run.global_batch_size * (logits + model.layers * block)
    evaluation = min(run.data.test_samples, PARITY_TEST_SAMPLES) * (logits + block)
    return _BYTES * (2 * (2 + states) * model.parameters + tokens * max(step, evaluation))


def excerpt_of(arrays: Arrays, whole: RunConfig, checked: RunConfig) -> Arrays:
    """What `checked` trains on: of the arrays of the whole run the first samples' first tokens."""
    data = checked.data
    if data == whole.data:
        return arrays
    import numpy as np

    def cut(values: NDArray[Any], samples: int) -> NDArray[np.int64]:
        taken = values[np.arange(samples) % len(values), : data.shape[0]]
        return taken.astype(np.int64) % data.vocabulary

    return Arrays(
        train_images=cut(arrays.train_images, data.train_samples),
        train_labels=cut(arrays.train_labels, data.train_samples),
        test_images=cut(arrays.test_images, data.test_samples),
        test_labels=cut(arrays.test_labels, data.test_samples),
    )


def excerpt_warnings(whole: RunConfig, checked: RunConfig) -> list[str]:
    """What was checked in place of the whole model; empty: all of it."""
    if checked.data == whole.data:
        return []
    assert isinstance(checked.model, Gpt)
    assert isinstance(whole.model, Gpt)
    sizes = {
        "blocks": (checked.model.layers, whole.model.layers),
        "values per token": (checked.model.width, whole.model.width),
        "entries of the vocabulary": (checked.model.vocabulary, whole.model.vocabulary),
        "tokens per sample": (*checked.data.shape, *whole.data.shape),
    }
    fewer = ", ".join(f"{few} of {many} {name}" for name, (few, many) in sizes.items() if few < many)
    return [
        f"parity was checked on a smaller model of the same kind ({fewer}), which the strategy cuts alike: in fp64 the "
        "whole one may need more memory than its training"
    ]
