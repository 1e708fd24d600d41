"""A smaller model of the same kind, which the parity check takes in place of a language model that is large.

The check computes in fp64, on one device alone besides the strategy, so the whole model could need several times the
memory of its training. Loads no framework.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from parallelbench.config.build import package_of
from parallelbench.config.components import Arrays
from parallelbench.data.synthetic import Synthetic
from parallelbench.data.tokens import Tokens
from parallelbench.models.gpt import Gpt
from parallelbench.strategies.context import ContextParallel, FsdpCp
from parallelbench.strategies.pipeline import ModelParallel, PipelineStrategy
from parallelbench.strategies.tensor import divides_sequence
from parallelbench.training.checks.comparability import PARITY_TEST_SAMPLES
from parallelbench.training.checks.parity import checked_batch_size

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from parallelbench.config.run import RunConfig


SMALL_BYTES = 2 * 2**30
"""The whole model is checked where this suffices: no device of a training that is worth several has less."""
_BYTES = 8
"""Of a number in fp64."""
_LAYERS, _TOKENS, _ENTRIES, _HEAD_WIDTH = 2, 64, 256, 8
"""Least sizes of an excerpt: blocks of each stage, tokens of a sample, entries of the vocabulary, values per head."""


class Excerpt(NamedTuple):
    """What the parity check trains."""

    run: RunConfig
    smaller: str | None
    """How much of the model it is, in words; None: the whole."""
    fewer_samples: bool = False
    """Whether the first samples stand for a training set that is one batch."""

    def arrays(self, whole: Arrays) -> Arrays:
        """What it trains on: of the arrays of the whole run the first samples' first tokens."""
        if self.smaller is None and not self.fewer_samples:
            return whole
        import numpy as np

        data = self.run.data

        def cut(values: NDArray[Any], samples: int) -> NDArray[Any]:
            if self.fewer_samples:
                return values[:samples]
            taken = values[np.arange(samples) % len(values), : data.shape[0]]
            return taken.astype(np.int64) % data.vocabulary

        return Arrays(
            train_images=cut(whole.train_images, data.train_samples),
            train_labels=cut(whole.train_labels, data.train_samples),
            test_images=cut(whole.test_images, data.test_samples),
            test_labels=cut(whole.test_labels, data.test_samples),
        )

    def warnings(self) -> list[str]:
        """What was checked in place of the whole model; empty: all of it."""
        if self.smaller is None:
            return []
        return [
            f"parity was checked on a smaller model of the same kind ({self.smaller}), which the strategy cuts alike: "
            "in fp64 the whole one may need more memory than its training"
        ]


def excerpt(run: RunConfig) -> Excerpt:
    """A run that is to be checked, with a smaller model and shorter samples where the whole would take too much.

    Every kind of layer is there, every expert and head. What the strategy cuts has as many parts, and is as uneven:
    stages of two blocks (of one where two take too much), hidden units, vocabulary and sequence. Of images that are one
    batch, the first samples are taken. What is not the suite's own may name layers or sizes of the whole model, so it
    gets that, and all samples.
    """
    parts = (run.model, run.strategy, run.optimizer, run.loss, run.metric)
    shipped = all(package_of(type(part)) == "parallelbench" for part in parts)
    if shipped and run.steps_per_epoch == 1 and run.data.kind == "images":
        return _first_samples(run)
    if not shipped or not isinstance(run.model, Gpt) or run.data.tokens_per_sample is None:
        return Excerpt(run, None)
    if whole_bytes(run) <= SMALL_BYTES:
        return Excerpt(run, None)
    small = _small_run(run, blocks=_LAYERS)
    if whole_bytes(small) > SMALL_BYTES:
        small = _small_run(run, blocks=1)
    smaller = _fewer(run, small)
    return Excerpt(small if smaller else run, smaller or None)


def _first_samples(run: RunConfig) -> Excerpt:
    """Of a training set that is one batch, as many as other runs' batches have when they are checked."""
    samples = checked_batch_size(run)
    if samples == run.global_batch_size:
        return Excerpt(run, None)
    channels, image_size, _ = run.data.shape
    data = Synthetic(
        name=run.data.name,
        augment=run.data.augment,
        channels=channels,
        image_size=image_size,
        num_classes=run.data.num_classes,
        train_samples=samples,
        test_samples=min(run.data.test_samples, PARITY_TEST_SAMPLES),
        noise=0.0,
        data_seed=0,
    )
    return Excerpt(msgspec.structs.replace(run, data=data, batch_size=samples), None, fewer_samples=True)


def _small_run(run: RunConfig, *, blocks: int) -> RunConfig:
    """With so many blocks for each stage, as far as the model has them."""
    model, data, strategy = _small_model(run, blocks=blocks), run.data, run.strategy
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


def _small_model(run: RunConfig, *, blocks: int) -> Gpt:
    model, tokens, stages = run.model, run.data.tokens_per_sample, _stages(run)
    assert isinstance(model, Gpt)
    assert tokens is not None
    width = model.heads * min(_HEAD_WIDTH, model.width // model.heads)

    def hidden(units: int) -> int:
        """As many for the width as before."""
        return _alike(units, -(-units * width // model.width), parts=run.devices)

    cuts_sequence = isinstance(run.strategy, (ContextParallel, FsdpCp)) or divides_sequence(run)
    sizes: dict[str, Any] = {
        "layers": _alike(model.layers, max(_LAYERS, blocks * stages), parts=stages),
        "width": width,
        "mlp_width": hidden(model.hidden_units),
        # Zig-zag gives each device two parts.
        "sequence": _alike(tokens, _TOKENS, parts=2 * run.devices if cuts_sequence else 1),
        "vocabulary": _alike(model.vocabulary, _ENTRIES, parts=run.devices),
    }
    if (shared := getattr(model, "shared_width", None)) is not None:
        sizes["shared_width"] = hidden(shared)
    return msgspec.structs.replace(model, **sizes)


def _alike(size: int, least: int, *, parts: int) -> int:
    """A number from `least` to `size` of which the parts are as uneven: the remainder is the same."""
    return min(least + (size - least) % parts, size)


def _fewer(whole: RunConfig, small: RunConfig) -> str:
    """What is smaller, in words; empty: nothing."""
    assert isinstance(small.model, Gpt)
    assert isinstance(whole.model, Gpt)
    sizes = {
        "blocks": (small.model.layers, whole.model.layers),
        "values per token": (small.model.width, whole.model.width),
        "entries of the vocabulary": (small.model.vocabulary, whole.model.vocabulary),
        "tokens per sample": (*small.data.shape, *whole.data.shape),
    }
    return ", ".join(f"{few} of {many} {name}" for name, (few, many) in sizes.items() if few < many)


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
