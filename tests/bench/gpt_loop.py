"""The training loop with all its probes, on a language model, against a bare loop in the style of nanoGPT."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch.nn import functional as F

from launch.sweep import one_run
from parallelbench.config.run import RunConfig
from parallelbench.loaders.order import generator
from parallelbench.training.torch_session import build_model
from tests.bench.loop import Suite
from tests.bench.measure import Figure, paired, ratios

STEPS, BATCH = 100, 16
OVERRIDES = [
    *("model=gpt_tiny", "data=text", "optimizer=adamw", "epochs=1", f"batch_size={BATCH}"),
    *(f"data.train_samples={STEPS * BATCH}", "data.test_samples=64"),
    "measure.parity=false",  # checksums are taken outside of the windows
]
LOGGED_EVERY = 10
"""Steps; as nanoGPT's train.py, which reads the loss from the device then."""


def figures() -> list[Figure]:
    """Bare time ÷ suite time of an epoch; the parameters afterwards are asserted to be the same bits."""
    run = one_run(OVERRIDES).run
    suite, bare = Suite(run), _BareTokens(run)
    results = paired({"suite": suite.epoch, "bare": bare.epoch})
    for name, value in bare.model.state_dict().items():
        assert torch.equal(value, suite.model.state_dict()[name]), f"the work was not identical: {name} differs"
    note = f"gpt_tiny, {BATCH} windows of {run.data.shape[0]} bytes, {STEPS} steps; identical parameters afterwards"
    speed = ratios(results, "bare", "suite")
    return [Figure("language model: training loop with all probes ÷ bare loop, speed", speed, "", 0.99, True, note)]


class _BareTokens:
    """What nanoGPT's train.py does in a step: windows from an array of tokens, loss, backward, AdamW; no accuracy."""

    def __init__(self, run: RunConfig) -> None:
        arrays, self._run = run.data.load(Path("nowhere")), run
        self.model = build_model(run)
        asked = {"lr": run.optimizer.lr, "weight_decay": run.optimizer.weight_decay}
        self._optimizer = torch.optim.AdamW(self.model.parameters(), **asked)
        self._inputs = torch.from_numpy(arrays.train_images.copy())
        self._targets = torch.from_numpy(arrays.train_labels.copy())
        self._epoch = 0

    def epoch(self) -> float:
        self._epoch += 1
        model, optimizer = self.model, self._optimizer
        start = time.perf_counter()
        order = torch.randperm(len(self._inputs), generator=generator(seed=0, epoch=self._epoch, purpose="order"))
        for step, index in enumerate(order.split(self._run.batch_size)):
            inputs, targets = self._inputs[index].long(), self._targets[index]
            logits = model(inputs)
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if step % LOGGED_EVERY == 0:
                loss.item()
        return time.perf_counter() - start
