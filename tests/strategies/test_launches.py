"""How many operations a training step gives a device: on a GPU each is a launch, and launches bound small models."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from parallelbench.config.components import Batch
from parallelbench.strategies.replica import added
from parallelbench.world.numerics import Sums, sums
from tests.helpers import configured
from tests.strategies.training import loader_of, prepared

MOST_LAUNCHES = 24
"""Of one step of cnn_small in fp32, its batch included."""
MOST_TO_ADD_UP = 12
"""Of the sums of `STEPS` steps together."""
STEPS = 64
"""Sums of so many steps are added up together."""
NO_LAUNCH = {
    *("view", "_unsafe_view", "t", "transpose", "detach", "unbind", "select", "expand", "as_strided", "alias"),
    *("permute", "squeeze", "unsqueeze", "slice", "empty", "empty_like", "empty_strided", "new_empty"),
    *("_reshape_alias", "split", "split_with_sizes"),
}
"""Operations that only describe memory."""
READS = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select"}
"""Operations for whose result the host waits."""


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = func._schema.name.partition("::")
        if space == "aten":  # others are a profiler's marks
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.exhaustive
def test_a_step_of_a_small_model_is_few_launches_and_none_that_waits() -> None:
    run = configured(
        *("data=synthetic", "data.channels=1", "data.image_size=28", "batch_size=8", "optimizer.implementation=fused"),
        *(f"data.train_samples={8 * (STEPS + 2)}", "data.test_samples=10"),
    )
    replica = prepared(run)
    batches = loader_of(replica, run).train(epoch=1)
    for batch in islice(batches, 2):
        replica.step(batch)
    total = None
    with Operations() as operations:
        for batch in islice(batches, STEPS):
            result = replica.step(batch)
            assert result is not None
            if total is None:
                total = result
            else:
                total += result
    assert total is not None
    with Operations() as adding:
        total.tensor()
    launches, more = (
        Counter({name: n for name, n in seen.items() if name not in NO_LAUNCH})
        for seen in (operations.seen, adding.seen)
    )
    few = launches.total() + more.total()
    assert few <= STEPS * MOST_LAUNCHES + MOST_TO_ADD_UP, (launches, more)
    assert not READS & (launches.keys() | more.keys())


class Block(nn.Module):
    """A hand-written one of a language model, as nanoGPT has it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.heads = nn.LayerNorm(width), nn.LayerNorm(width), heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        result: torch.Tensor = x + self.fc2(F.gelu(self.fc1(self.norm2(x))))
        return result


class Written(nn.Module):
    """A hand-written language model."""

    def __init__(self, vocabulary: int, width: int, *, layers: int, heads: int, sequence: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Parameter(torch.zeros(sequence, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)), nn.LayerNorm(width))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.blocks(self.tokens(x) + self.places))
        return logits


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_step_of_a_language_model_is_hardly_more_launches_than_a_hand_written_one() -> None:
    run = configured(
        *("model=gpt_tiny", "data=tokens", "optimizer=adamw", "optimizer.implementation=fused", "batch_size=8"),
        *("data.train_samples=24", "data.test_samples=8"),
    )
    replica = prepared(run)
    batches = list(loader_of(replica, run).train(epoch=1))
    model: Any = run.model
    written = Written(model.vocabulary, model.width, layers=model.layers, heads=model.heads, sequence=model.sequence)
    optimizer = torch.optim.AdamW(written.parameters(), fused=True)

    def step(batch: Batch) -> None:
        F.cross_entropy(written(batch.images).flatten(0, 1), batch.labels.flatten()).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    launches = []
    for take in (replica.step, step):
        for batch in batches[:2]:
            take(batch)
        with Operations() as operations:
            take(batches[2])
        launches.append(sum(count for name, count in operations.seen.items() if name not in NO_LAUNCH))
    suites, by_hand = launches
    assert suites <= 1.1 * by_hand, launches


def part(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, 5, generator=made)
    return torch.rand((), generator=made), logits, torch.randint(5, (count,), generator=made)


@pytest.mark.parametrize("sizes", [[8], [8] * 130, [8, 8, 3], [4, 0], [0], [3, 8, 3]])
def test_sums_added_up_together_are_those_of_each_batch(sizes: list[int]) -> None:
    parts = [part(size, seed) for seed, size in enumerate(sizes)]
    together: Sums | None = None
    for each in parts:
        together = added(together, sums(*each))
    loss = sum(loss.double().item() * len(labels) for loss, _, labels in parts if len(labels))
    correct = sum((logits.argmax(1) == labels).sum().item() for _, logits, labels in parts)
    assert together is not None
    assert together.tolist() == [pytest.approx(loss, rel=1e-14), correct]
    assert together.tolist() == [together[0].item(), together[1].item()], "asking changes nothing"
    assert together.tensor().dtype == torch.float64


def test_adding_up_leaves_the_other_one_as_it_is() -> None:
    one, other, expected = sums(*part(8, 1)), sums(*part(8, 2)), sums(*part(8, 2)).tolist()
    alone = sums(*part(8, 1)).tolist()
    one += other
    assert one.tolist() == [alone[0] + expected[0], alone[1] + expected[1]]
    assert (other.tolist(), len(other.losses()), len(one.losses())) == (expected, 1, 2)


def test_an_empty_batch_has_no_loss_whatever_its_mean_is() -> None:
    nothing = (torch.tensor(float("nan")), torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64))
    assert added(sums(*nothing), sums(*part(4, 1))).tolist() == sums(*part(4, 1)).tolist()


def test_logits_of_a_vocabulary_are_not_held_but_count_alike() -> None:
    made = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(4, 128, 1024, generator=made), torch.randint(1024, (4, 128), generator=made)
    assert logits.nbytes > 2**20
    found = sums(torch.tensor(0.5), logits, labels)
    assert [part.logits.nbytes for part in found._parts] == [4 * 128]
    assert found.tolist() == [2.0, (logits.argmax(-1) == labels).sum().item()]


def test_few_logits_are_held() -> None:
    total = sums(*part(8, 0))
    for seed in range(1, 1000):
        total += sums(*part(8, seed))
        assert len(total._parts) < 64
    wide = torch.tensor(1.0), torch.zeros(192, 80), torch.zeros(192, dtype=torch.int64)
    total = sums(*wide)
    for _ in range(16):
        total += sums(*wide)
    assert len(total._parts) == 17, "1,020 KiB may wait"
    assert not added(total, sums(*wide))._parts, "1,080 KiB are added up at once"
