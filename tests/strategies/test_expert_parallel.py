"""Expert parallelism: bytes by the routing, what a rank holds, and groups that hold copies of each other's experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallelbench.config.run import RunConfig
from parallelbench.measure.counted_bytes import CountedBytes
from parallelbench.models.moe_layers import MixtureOfExperts
from parallelbench.training.replica import new_replica
from parallelbench.training.torch_session import build_model
from parallelbench.world.spans import Spans, divided_by
from parallelbench.world.world import World
from tests.planted import once_after
from tests.ranks import run_ranks
from tests.strategies.test_expert_balance import EXPERTS, SMALL
from tests.strategies.training import TOKENS, configure, loader_of, prepared
from tests.test_closing import failed, on_ranks, passed, stays_right

pytestmark = pytest.mark.slow

LLAMA = ("model.positions=rope", "model.mlp=swiglu", "model.kv_heads=2", "model.shared_width=20")


def small(*options: str, devices: int = 2) -> RunConfig:
    return configure(*TOKENS, *SMALL, *EXPERTS, "strategy=expert_parallel", f"devices={devices}", *options)


@pytest.mark.cases("False-4")
@pytest.mark.parametrize(("repeats", "ranks"), [(False, 4), (True, 4), (False, 2)])
def test_bytes_are_those_of_the_routing(repeats: bool, ranks: int, tmp_path: Path) -> None:
    """Within groups of so many ranks; over the groups the gradients of experts are summed.

    Where backward computes blocks again, it sends again what forward sent: by the same routing.
    """
    groups, recomputed = 4 // ranks, "full" if repeats else "none"
    options = [f"activation_recomputation={recomputed}", *([f"strategy.expert_ranks={ranks}"] if groups > 1 else [])]
    run = small(*LLAMA, *options, devices=4)
    each_found = run_ranks(sent_by_routing, 4, tmp_path, run)
    width, blocks, per_rank = 16, 2, 4 // ranks
    whole = {name: each.numel() * 8 for name, each in build_model(run).named_parameters()}
    of_experts = sum(size for name, size in whole.items() if ".experts." in name)
    for rank, found in enumerate(each_found):
        place, mates = rank % ranks, each_found[rank // ranks * ranks :][:ranks]
        assert found["counts"][blocks:] == (found["counts"][blocks - 1 :: -1] if repeats else [])
        expected = 0
        for block in range(blocks):
            # Rows of 8-byte numbers that a rank has sent to others, and that others have sent to it.
            leaving = sum(found["counts"][block]) - sum(own(found["counts"][block], place, per_rank))
            came = sum(sum(own(each["counts"][block], place, per_rank)) for each in mates if each is not found)
            expected += (2 + repeats) * (leaving + came) * width * 8
        assert found["activation"] == expected > 0
        assert sum(map(sum, found["counts"][:blocks])) == blocks * 2 * 12 * 24 / 4, "no token is dropped"
        copied = 2 * 3 / 4 * (sum(whole.values()) - of_experts)
        assert found["gradient"] == copied + 2 * (groups - 1) / groups * of_experts / ranks
        announced = (1 + repeats) * blocks * 4 * 8 * (ranks - 1) / ranks  # how many rows each of four experts gets
        assert found["counted"] == pytest.approx(found["activation"] + found["gradient"] + announced, rel=1e-12)


def own(counts: list[int], rank: int, per_rank: int) -> list[int]:
    """Of counts per expert, those of a rank's experts."""
    return counts[rank * per_rank : (rank + 1) * per_rank]


def sent_by_routing(rank: int, size: int, run: RunConfig) -> dict[str, Any]:
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


@pytest.mark.parametrize(("options", "most"), [([], 0.7), (["strategy.expert_ranks=2"], 0.8)])
@pytest.mark.cases("options0-0.7")
def test_each_rank_holds_its_experts_only(options: list[str], most: float, tmp_path: Path) -> None:
    run = small(*options, devices=4)
    whole = sum(each.numel() for each in build_model(run).parameters())
    shards = run.strategy.state_shards(run)
    assert shards is not None
    assert run_ranks(held, 4, tmp_path, run) == [pytest.approx(whole * shards.parameters)] * 4
    assert shards.parameters < most


def held(rank: int, size: int, run: RunConfig) -> int:
    replica = prepared(run, rank, size)
    return sum(each.numel() for each in replica.local_state()["tensors"].values())


# --- groups that hold copies of each other's experts

RANKS = 2
"""Of a group, in worlds of four."""


def grouped(*options: str) -> RunConfig:
    return small(f"strategy.expert_ranks={RANKS}", *options, devices=4)


def one_expert_drifts(replica: Any, k: int) -> None:
    """On the last rank, by far less than any loss shows."""

    def drift() -> None:
        with torch.no_grad():
            [*replica.copied().values()][-1][-1].view(-1)[0] += 1e-6

    if replica._world.rank == 3:
        once_after(replica, k, drift)


def every_groups_second_drifts(replica: Any, k: int) -> None:
    """In what all ranks hold; ranks with the same experts stay alike."""

    def drift() -> None:
        with torch.no_grad():
            next(iter(replica.copied()[0])).view(-1)[0] += 1e-6

    if replica._world.rank % RANKS:
        once_after(replica, k, drift)


def no_sums_from_now_on(replica: Any, k: int) -> None:
    """As if the groups lost each other after so many steps."""

    def part() -> None:
        replica._after_backward.__self__._group = dist.new_subgroups(1)[0]

    once_after(replica, k, part)


@pytest.mark.exhaustive
def test_groups_pass_the_closing_check_which_compares_their_experts(tmp_path: Path) -> None:
    run = grouped("precision=fp32", "epochs=1", "clip_norm=1.0", "optimizer=adamw")
    mutants = [(stays_right, 0), (one_expert_drifts, 2), (every_groups_second_drifts, 2), (no_sums_from_now_on, 2)]
    right, drifted, together, apart = run_ranks(on_ranks, 4, tmp_path, run, mutants)[0]
    assert not failed(right), [row for row in right if row["passed"] is False]
    expected = {"settled", "exchanges", "copies", "loss", "bytes", "gradients", "update", "evaluation loss"}
    assert expected <= passed(right)
    assert "copies" in failed(drifted)
    assert "copies" in failed(together)
    assert {"copies", "gradients", "bytes"} <= failed(apart)


def phases_of_the_sums(rank: int, size: int, run: RunConfig) -> list[str | None]:
    """The innermost phase where each sum begins, and where they are waited for."""
    replica: Any = prepared(run, rank, size)
    spans, seen = Spans(lambda: 0.0), []
    wait, all_reduce = replica._after_backward, dist.all_reduce

    def noted_wait(traffic: Any) -> None:
        seen.append(spans.innermost)
        wait(traffic)

    def noted_sum(*args: Any, **options: Any) -> Any:
        seen.append(spans.innermost)
        return all_reduce(*args, **options)

    replica._after_backward, dist.all_reduce = noted_wait, noted_sum
    with divided_by(spans), spans.step():
        replica.step(next(loader_of(replica, run).train(epoch=1)))
    return seen


@pytest.mark.exhaustive
def test_sums_begin_within_backward_and_waiting_for_them_is_communication(tmp_path: Path) -> None:
    sums = 2 * 4  # of two blocks; two matrices and their biases
    for seen in run_ranks(phases_of_the_sums, 4, tmp_path, grouped()):
        assert seen == ["backward"] * sums + ["communication"]
