"""Activation recomputation on one device: what is kept for backward, and a step's time, beside what is expected."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, cast

from launch.sweep import one_run
from parallelbench.config.components import Shard
from parallelbench.measure.layer_memory import model_memory
from parallelbench.training.replica import new_replica
from parallelbench.training.torch_session import build_model
from parallelbench.world.world import World
from tests.bench.context import kept_bytes
from tests.bench.measure import Figure, paired, ratios
from tests.strategies.training import shard_loader

if TYPE_CHECKING:
    from parallelbench.config.run import RunConfig

TOKENS, BATCH, STEPS = 256, 16, 4
"""Of a sample; samples of a step; steps of a round."""
WORK = [
    *("model=gpt_tiny", "model.layers=8", f"model.sequence={TOKENS}", "data=tokens", f"data.sequence={TOKENS}"),
    *(f"data.train_samples={STEPS * BATCH}", "data.test_samples=16", f"batch_size={BATCH}"),
    *("optimizer=sgd", "strategy=single"),
]
FP32_BYTES = 4
NONE, SELECTIVE, FULL = "none", "selective", "full"


def figures() -> list[Figure]:
    """Kept bytes against counted ones, and the step's time ÷ that of none; equal losses are asserted."""
    runs = {name: one_run([*WORK, f"activation_recomputation={name}"]).run for name in (NONE, SELECTIVE, FULL)}
    kept = {name: kept_bytes(run) for name, run in runs.items()}
    steps = {name: _Steps(run) for name, run in runs.items()}
    results = paired({name: each.seconds for name, each in steps.items()})
    losses = {name: each.losses for name, each in steps.items()}
    assert losses[SELECTIVE] == losses[FULL] == losses[NONE], f"not the same work: {losses}"
    found = []
    for name, run in runs.items():
        size = f"{kept[name] / 1e6:.1f} MB, {kept[name] / kept[NONE]:.3g} of none's"
        note = f"gpt_tiny of 8 blocks, {BATCH} samples of {TOKENS} tokens; {size}"
        what = f"activation_recomputation={name}: kept for backward, off the advisor's count by"
        found.append(Figure(what, [100 * abs(kept[name] / counted_bytes(run) - 1)], "%", 5, False, note))
    for name, more in repeated_shares(runs[NONE]).items():
        what = f"activation_recomputation={name}: step ÷ none's, time"
        note = f"the same; by formula, 1 + the operations that are repeated ÷ all, {1 + more:.3f}"
        found.append(Figure(what, ratios(results, name, NONE), "×", None, False, note))
    return found


def counted_bytes(run: RunConfig) -> float:
    """Kept for backward by all layers and the loss, as the advisor counts a batch on tensors without values.

    Without the logits, which the advisor counts too: the step holds them during backward, autograd does not.
    """
    memory, model = model_memory(run), cast("Any", run.model)
    logits = run.batch_size * TOKENS * model.vocabulary * FP32_BYTES
    return sum(part.kept.at(run.batch_size) for part in (*memory.layers, memory.loss)) - logits


def repeated_shares(run: RunConfig) -> dict[str, float]:
    """Operations that a step repeats ÷ all of its operations, by formula: a forward pass is a third of them.

    selective repeats the two products of attention, 12·L·width·T of all (PaLM, arXiv 2204.02311, appendix B); full
    repeats all layers but the head, whose matrix takes 6·width·vocabulary.
    """
    model: Any = run.model
    whole = model.flop_per_sample(TOKENS)
    attention = 12 * model.layers * model.width * TOKENS * TOKENS
    head = 6 * model.width * model.vocabulary * TOKENS
    return {SELECTIVE: attention / whole / 3, FULL: (whole - head) / whole / 3}


class _Steps:
    """Training by one alternative, a few steps per round."""

    def __init__(self, run: RunConfig) -> None:
        self._replica = new_replica(build_model(run), run, World())
        self._loader, self._epoch = shard_loader(run, Shard()), 0
        self.losses: list[float] = []

    def seconds(self) -> float:
        """Seconds of the round's steps."""
        self._epoch += 1
        batches = list(self._loader.train(self._epoch))
        start = time.perf_counter()
        results = [self._replica.step(batch) for batch in batches]
        seconds = time.perf_counter() - start
        self.losses += [result[0].item() for result in results if result is not None]
        return seconds
