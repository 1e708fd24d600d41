"""Groups that hold copies of each other's experts: like one device, exact bytes, and what wrong groups would show."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from parallelbench.config.check import check_run
from parallelbench.errors import ConfigError
from parallelbench.measure.spans import Spans, divided_by
from parallelbench.strategies.expert.exchange import GroupSums, TokenExchange, expert_mesh
from parallelbench.training.torch_session import build_model
from parallelbench.world.world import World
from tests.planted import once_after
from tests.ranks import run_ranks
from tests.strategies.test_expert_parallel import held, own, sent_in_a_step, small
from tests.strategies.test_moe_parity import LLAMA
from tests.strategies.test_parity import assert_equal
from tests.strategies.training import loader_of, one_device, train
from tests.test_closing import failed, on_ranks, passed, stays_right

if TYPE_CHECKING:
    from pathlib import Path

    from parallelbench.config.run import RunConfig

RANKS = 2
"""Of a group, in worlds of four."""


def grouped(*options: str, devices: int = 4, expert_ranks: int = RANKS) -> RunConfig:
    return small(f"strategy.expert_ranks={expert_ranks}", *options, devices=devices)


def groups_apart(rank: int, size: int, run: RunConfig) -> Any:
    """Nothing is added up over the groups."""
    GroupSums.begin = lambda *_: None  # type: ignore[method-assign]
    return train(rank, size, run)


def divided_by_the_groups_ranks(rank: int, size: int, run: RunConfig) -> Any:
    """As if a group were all ranks."""
    genuine = DTensor.register_hook
    DTensor.register_hook = lambda self, hook: genuine(  # type: ignore[method-assign, assignment]
        self, lambda gradient: hook(gradient) * (size // RANKS)
    )
    return train(rank, size, run)


def added_up_within_the_group(rank: int, size: int, run: RunConfig) -> Any:
    """Over ranks that hold other experts."""
    world = World(rank=rank, size=size, local_rank=rank)
    begin = GroupSums.begin

    def wrong(self: GroupSums, parameter: torch.Tensor) -> None:
        self._group = expert_mesh(world, RANKS).get_group("expert")
        begin(self, parameter)

    GroupSums.begin = wrong  # type: ignore[method-assign]
    return train(rank, size, run)


def tokens_leave_the_group(rank: int, size: int, run: RunConfig) -> Any:
    """To the ranks of other groups, half of which hold other experts."""
    world, exchange = World(rank=rank, size=size, local_rank=rank), TokenExchange.__init__

    def wrong(self: Any, _group: Any, traffic: Any) -> None:
        exchange(self, expert_mesh(world, RANKS).get_group("replicate"), traffic)

    TokenExchange.__init__ = wrong  # type: ignore[method-assign]
    return train(rank, size, run)


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrong", [groups_apart, divided_by_the_groups_ranks, added_up_within_the_group, tokens_leave_the_group]
)
@pytest.mark.cases("groups_apart", "added_up_within_the_group")
def test_the_gate_sees_wrong_groups(wrong: Any, tmp_path: Path) -> None:
    ranks = run_ranks(wrong, 4, tmp_path, run := grouped())
    with pytest.raises(AssertionError):
        assert_equal(ranks, one_device(run), tolerance=1e-9)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_bytes_are_those_of_the_routing_within_groups_and_of_both_sums(tmp_path: Path) -> None:
    run = grouped(*LLAMA)
    ranks = run_ranks(sent_in_a_step, 4, tmp_path, run)
    width, blocks, experts, groups = 16, 2, 4, 2
    named = dict(build_model(run).named_parameters())
    whole = {name: each.numel() * 8 for name, each in named.items()}
    routed = sum(size for name, size in whole.items() if ".experts." in name)
    for rank, found in enumerate(ranks):
        place, mates = rank % RANKS, ranks[rank // RANKS * RANKS :][:RANKS]
        expected = 0
        for block in range(blocks):
            leaving = sum(found["counts"][block]) - sum(own(found["counts"][block], place, experts // RANKS))
            came = sum(sum(own(each["counts"][block], place, experts // RANKS)) for each in mates if each is not found)
            expected += 2 * (leaving + came) * width * 8
        assert found["activation"] == expected > 0
        copied = 2 * 3 / 4 * (sum(whole.values()) - routed)
        assert found["gradient"] == copied + 2 * (groups - 1) / groups * routed / RANKS
        announced = blocks * experts * 8 / RANKS  # how many rows each expert gets: half of these numbers leave
        sent = found["activation"] + found["gradient"] + announced
        assert found["counted"] == pytest.approx(sent, rel=1e-12)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_each_rank_holds_a_share_of_the_experts_by_its_groups_ranks(tmp_path: Path) -> None:
    run = grouped()
    whole = sum(each.numel() for each in build_model(run).parameters())
    shards, all_ranks = run.strategy.state_shards(run), small(devices=4).strategy.state_shards(run)
    assert shards is not None
    assert all_ranks is not None
    assert run_ranks(held, 4, tmp_path, run) == [pytest.approx(whole * shards.parameters)] * 4
    assert all_ranks.parameters < shards.parameters < 0.8


def one_expert_drifts(replica: Any, k: int) -> None:
    """On the last rank, by far less than any loss shows."""

    def drift() -> None:
        with torch.no_grad():
            [*replica.copied()][-1].view(-1)[0] += 1e-6

    if replica._world.rank == 3:
        once_after(replica, k, drift)


def no_sums_from_now_on(replica: Any, k: int) -> None:
    """As if the groups lost each other after so many steps."""

    def part() -> None:
        replica._after_backward.__self__._group = dist.new_subgroups(1)[0]

    once_after(replica, k, part)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_groups_pass_the_closing_check_which_compares_their_experts(tmp_path: Path) -> None:
    run = grouped("precision=fp32", "epochs=1", "clip_norm=1.0", "optimizer=adamw")
    mutants = [(stays_right, 0), (one_expert_drifts, 2), (no_sums_from_now_on, 2)]
    right, drifted, apart = run_ranks(on_ranks, 4, tmp_path, run, mutants)[0]
    assert not failed(right), [row for row in right if row["passed"] is False]
    expected = {"settled", "exchanges", "copies", "loss", "bytes", "gradients", "update", "evaluation loss"}
    assert expected <= passed(right)
    assert "copies" in failed(drifted)
    assert {"copies", "gradients", "bytes"} <= failed(apart)


def phases_of_the_sums(rank: int, size: int, run: RunConfig) -> list[str | None]:
    """The innermost phase where each sum begins, and where they are waited for."""
    replica: Any = run.strategy.prepare(build_model(run), run, World(rank=rank, size=size, local_rank=rank))
    spans, seen = Spans(lambda: 0.0), []
    wait, all_reduce = replica._after_backward, dist.all_reduce

    def noted_wait() -> None:
        seen.append(spans.innermost)
        wait()

    def noted_sum(*args: Any, **options: Any) -> Any:
        seen.append(spans.innermost)
        return all_reduce(*args, **options)

    replica._after_backward, dist.all_reduce = noted_wait, noted_sum
    with divided_by(spans), spans.step():
        replica.step(next(loader_of(replica, run).train(epoch=1)))
    return seen


@pytest.mark.exhaustive
@pytest.mark.slow
def test_sums_begin_within_backward_and_waiting_for_them_is_communication(tmp_path: Path) -> None:
    sums = 2 * 4  # of two blocks; two matrices and their biases
    for seen in run_ranks(phases_of_the_sums, 4, tmp_path, grouped()):
        assert seen == ["backward"] * sums + ["communication"]


@pytest.mark.parametrize(
    ("devices", "ranks", "words"),
    [
        (4, 1, "divides no experts"),
        (4, 8, "is more than devices=4"),
        (4, 4, "is all of devices=4, which strategy.expert_ranks=null says"),
        (4, 3, "does not divide devices=4"),
        (8, 3, "does not divide devices=8"),
        (12, 6, "does not divide model.experts=4"),
        (3, 2, "does not divide devices=3"),
    ],
)
def test_groups_that_do_not_fit_are_refused_with_the_nearest_that_do(devices: int, ranks: int, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"^strategy\.expert_ranks={ranks} {words}"):
        grouped(devices=devices, expert_ranks=ranks)


def test_where_devices_do_not_divide_the_experts_groups_are_proposed() -> None:
    with pytest.raises(ConfigError, match=r"can't divide model\.experts=4 among devices=8: choose devices=4"):
        small(devices=8)
    check_run(grouped(devices=8, expert_ranks=4), "cpu")
