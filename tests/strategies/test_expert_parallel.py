"""Expert parallelism: like one device, bytes by the routing, and what a wrong exchange would show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from parallelbench.config.run import RunConfig
from parallelbench.errors import ConfigError
from parallelbench.measure.counted_bytes import CountedBytes
from parallelbench.models.moe_layers import MixtureOfExperts
from parallelbench.strategies.expert import exchange
from parallelbench.strategies.expert.exchange import TokenExchange
from parallelbench.training.replica import new_replica
from parallelbench.training.torch_session import build_model
from parallelbench.world.world import World
from tests.ranks import run_ranks
from tests.strategies.test_gpt_parity import TOKENS
from tests.strategies.test_moe_parity import EXPERTS, LLAMA, SMALL
from tests.strategies.test_parity import assert_equal
from tests.strategies.training import configure, loader_of, one_device, train
from tests.test_closing import failed, on_ranks, passed

pytestmark = pytest.mark.slow


def small(*options: str, devices: int = 2) -> RunConfig:
    return configure(*TOKENS, *SMALL, *EXPERTS, "strategy=expert_parallel", f"devices={devices}", *options)


@pytest.mark.cases("False")
@pytest.mark.parametrize("repeats", [False, True])
def test_bytes_are_those_of_the_routing(repeats: bool, tmp_path: Path) -> None:
    """Where backward computes blocks again, it sends again what forward sent: by the same routing."""
    recomputation = "full" if repeats else "none"
    run = small(*LLAMA, f"activation_recomputation={recomputation}", devices=4)
    ranks = run_ranks(sent_in_a_step, 4, tmp_path, run)
    width, blocks, per_rank = 16, 2, 1
    for rank, found in enumerate(ranks):
        assert found["counts"][blocks:] == (found["counts"][blocks - 1 :: -1] if repeats else [])
        expected = 0
        for block in range(blocks):
            # Rows of 8-byte numbers that a rank has sent to others, and that others have sent to it.
            leaving = sum(found["counts"][block]) - sum(own(found["counts"][block], rank, per_rank))
            came = sum(sum(own(each["counts"][block], rank, per_rank)) for each in ranks if each is not found)
            expected += (2 + repeats) * (leaving + came) * width * 8
        assert found["activation"] == expected > 0
        assert sum(map(sum, found["counts"][:blocks])) == blocks * 2 * 12 * 24 / 4, "no token is dropped"
        copied = sum(each.numel() * 8 for name, each in build_model(run).named_parameters() if ".experts." not in name)
        assert found["gradient"] == 2 * 3 / 4 * copied
        announced = (1 + repeats) * blocks * 4 * 8 * 3 / 4  # how many rows each of four experts gets
        assert found["counted"] == pytest.approx(found["activation"] + found["gradient"] + announced, rel=1e-12)


def own(counts: list[int], rank: int, per_rank: int) -> list[int]:
    """Of counts per expert, those of a rank's experts."""
    return counts[rank * per_rank : (rank + 1) * per_rank]


def sent_in_a_step(rank: int, size: int, run: RunConfig) -> dict[str, Any]:
    """A third step: DDP has other buckets in its first, and ranks agree on them in the second."""
    replica = new_replica(build_model(run), run, World(rank=rank, size=size, local_rank=rank))
    batches = loader_of(replica, run).train(1)
    replica.step(next(batches))
    replica.step(next(batches))
    counts: list[list[int]] = []
    for module in replica.trained()[0].modules():  # type: ignore[attr-defined]
        if isinstance(module, MixtureOfExperts):
            module.router.register_forward_hook(lambda _, __, logits: counts.append(chosen_in(logits)))
    replica.traffic.take()
    with CountedBytes() as counted:
        replica.step(next(batches))
    sent = {kind: getattr(replica.traffic, kind) for kind in ("activation", "gradient")}
    return {"counts": counts, "counted": counted.sent_bytes + counted.control_bytes, **sent}


def chosen_in(logits: Tensor) -> list[int]:
    found: list[int] = torch.bincount(logits.topk(2, dim=-1).indices.flatten(), minlength=logits.shape[-1]).tolist()
    return found


def summed_gradients(rank: int, size: int, run: RunConfig) -> dict[str, Any]:
    """Experts' gradients are not divided by the number of ranks."""
    DTensor.register_hook = lambda *_: None  # type: ignore[method-assign, assignment]
    return train(rank, size, run)


def unsorted_rows(rank: int, size: int, run: RunConfig) -> dict[str, Any]:
    """Rows come back one place further on."""
    genuine = TokenExchange.__call__
    TokenExchange.__call__ = lambda *given: genuine(*given).roll(1, 0)  # type: ignore[method-assign]
    return train(rank, size, run)


def kept_gradients(rank: int, size: int, run: RunConfig) -> dict[str, Any]:
    """Gradients of rows don't travel back."""
    exchange._RowsToRanks.backward = staticmethod(  # type: ignore[method-assign, assignment]
        lambda ctx, gradient: (gradient.new_zeros(sum(ctx.leaving), gradient.shape[1]), None, None)
    )
    return train(rank, size, run)


@pytest.mark.parametrize("wrong", [summed_gradients, unsorted_rows, kept_gradients])
@pytest.mark.cases("unsorted_rows", "summed_gradients")
def test_the_gate_sees_a_wrong_exchange(wrong: Any, tmp_path: Path) -> None:
    ranks = run_ranks(wrong, 2, tmp_path, run := small())
    with pytest.raises(AssertionError):
        assert_equal(ranks, one_device(run), tolerance=1e-9)


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.cases("bf16")
def test_it_passes_the_closing_check(precision: str, tmp_path: Path) -> None:
    run = small(f"precision={precision}", "epochs=1", "clip_norm=1.0", "optimizer=adamw")
    (rows,) = run_ranks(on_ranks, 2, tmp_path, run, None)[0]
    assert not failed(rows), [row for row in rows if row["passed"] is False]
    assert {"settled", "exchanges", "loss", "bytes", "gradients", "update", "evaluation loss"} <= passed(rows)


def test_each_rank_holds_its_experts_only(tmp_path: Path) -> None:
    run = small(devices=4)
    whole = sum(each.numel() for each in build_model(run).parameters())
    shards = run.strategy.state_shards(run)
    assert shards is not None
    assert run_ranks(held, 4, tmp_path, run) == [pytest.approx(whole * shards.parameters)] * 4
    assert shards.parameters < 0.7


def held(rank: int, size: int, run: RunConfig) -> int:
    replica = run.strategy.prepare(build_model(run), run, World(rank=rank, size=size, local_rank=rank))
    state = replica.local_state()["tensors"]
    assert dist.get_world_size() == size
    return sum(each.numel() for each in state.values())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["devices=3", "batch_size=24"], ["model.experts=4", "devices=3", "choose devices=2 or 4"]),
        (["devices=1"], ["two devices"]),
        (["precision=fp16"], ["precision=fp16"]),
    ],
)
def test_what_does_not_fit_is_refused_with_the_fix(options: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        small(*options)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"finds no experts in model=gpt_tiny"):
        configure("data=tokens", "model=gpt_tiny", "strategy=expert_parallel", "devices=2")
