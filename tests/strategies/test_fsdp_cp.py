"""FSDP × context parallelism: trains like one device, faults of either dimension are seen, bytes are the formulas'."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from parallelbench.config.components import Shard
from parallelbench.config.run import RunConfig
from parallelbench.errors import ConfigError
from parallelbench.strategies.context import FsdpCp
from parallelbench.strategies.context.attention import Ring
from parallelbench.strategies.context.tokens import ContextGroup
from parallelbench.strategies.mesh import device_mesh
from parallelbench.training.torch_session import build_model
from parallelbench.world.world import World
from tests.ranks import PATIENCE_S, run_ranks
from tests.strategies import test_context_parallel as alone
from tests.strategies.test_attribution import shares, with_a_slow_rank
from tests.strategies.test_compile import train_compiled
from tests.strategies.test_parity import assert_equal, timeouts_s
from tests.strategies.test_sharded import held, padded_bytes
from tests.strategies.training import configure, one_device
from tests.test_checkpoint import equal, interrupted
from tests.test_closing import failed, on_ranks, passed

LLAMA, EXCHANGES, FP64 = alone.LLAMA, alone.EXCHANGES, alone.FP64
FULL = "activation_recomputation=full"


def meshed(exchange: str, devices: int, *options: str) -> RunConfig:
    asked = ("strategy=fsdp_cp", f"strategy.exchange={exchange}", f"devices={devices}")
    return configure(*alone.TOKENS, *alone.SMALL, *asked, *options)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.usefixtures("compiler")
def test_compiled_layers_train_like_one_device(tmp_path: Path) -> None:
    run = meshed("ring", 2, "compile=true")
    ranks = run_ranks(train_compiled, 2, tmp_path, run)
    assert_equal(ranks, one_device(msgspec.structs.replace(run, compile=False)), tolerance=1e-9)


# --- faults


def averages_over_the_sequence_only(replica: Any) -> None:
    for layer in replica.trained()[0].modules():
        if isinstance(layer, FSDPModule):
            layer.set_gradient_divide_factor(2.0)


def reads_the_same_slice_everywhere(replica: Any) -> None:
    replica.data_shard = Shard(0, 2)


def attends_to_another_slice(replica: Any) -> None:
    """In training, in rings of the data dimension's ranks, which hold the same parts of as many other samples."""
    mesh = device_mesh(replica._world, data=2, context=2)
    across = Ring(ContextGroup(mesh.get_local_rank("data"), 2, group=mesh.get_group("data")), replica.traffic)
    for layer in alone._layers(replica, alone.CausalAttention):
        own = layer.join
        layer.join = lambda q, k, v, own=own: (across if torch.is_grad_enabled() else own)(q, k, v)


FAULTS: dict[str, Callable[[Any], None]] = {
    **{each.__name__: each for each in (averages_over_the_sequence_only, reads_the_same_slice_everywhere)},
    "attends_to_another_slice": attends_to_another_slice,
    "attends_to_own_tokens_only": alone.attends_to_own_tokens_only,
    "halves_a_gradient": alone.halves_a_gradient,
    "counts_positions_from_zero": alone.counts_positions_from_zero,
    "reads_the_same_part_everywhere": alone.reads_the_same_part_everywhere,
    "counts_its_tokens_twice": alone.counts_its_tokens_twice,
}


class FaultyFsdpCp(FsdpCp, frozen=True, kw_only=True):
    """With one of `FAULTS`."""

    fault: str

    def prepare(self, model: nn.Sequential, run: RunConfig, world: World) -> Any:
        replica = super().prepare(model, run, world)
        FAULTS[self.fault](replica)
        return replica


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.cases("ring")
def test_the_parity_gate_sees_faults_of_either_dimension(exchange: str, tmp_path: Path) -> None:
    right, wrong = meshed(exchange, 4), []
    chosen = {key: getattr(right.strategy, key) for key in FsdpCp.__struct_fields__}
    for name in FAULTS:
        wrong.append(msgspec.structs.replace(right, strategy=FaultyFsdpCp(**chosen, fault=name)))
    lets_pass = run_ranks(alone.gates, 4, tmp_path, [right, *wrong])[0]
    assert dict(zip(["right", *FAULTS], lets_pass, strict=True)) == {"right": True, **dict.fromkeys(FAULTS, False)}


# --- what is sent and held


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    ("exchange", "options", "pieces", "repeats"),
    [
        ("ring", (), 1, False),
        ("ring", ("strategy.reshard_after_forward=false", "activation_recomputation=selective"), 1, True),
        ("all_gather", ("strategy.micro_batches=2", "model.kv_heads=2"), 2, False),
        ("all_gather", (FULL,), 1, True),
        ("all_to_all", (FULL, "strategy.micro_batches=3"), 3, True),
    ],
)
@pytest.mark.cases("ring-options0*", "all_gather-options2*", "all_to_all*")
def test_bytes_are_those_of_the_formulas(
    exchange: str, options: tuple[str, ...], pieces: int, repeats: bool, tmp_path: Path
) -> None:
    """Of two slices by two parts: all four ranks share the state, two the sequences of half of the batch."""
    run = meshed(exchange, 4, *options)
    padded = padded_bytes(run, 4)
    gathers = pieces * (2 if run.strategy.reshard_after_forward else 1)  # type: ignore[attr-defined]
    keys = alone.WIDTH * run.model.kv_heads // 4 if run.model.kv_heads else alone.WIDTH  # type: ignore[attr-defined]
    expected = {
        "gradient_bytes_sent": 3 / 4 * padded,
        "parameter_bytes_sent": gathers * 3 / 4 * padded,
        "activation_bytes_sent": alone.values_sent(exchange, 2, keys=keys, repeats=repeats) * FP64 / 2,
    }
    for sent in run_ranks(alone.sent_in_a_step, 4, tmp_path, run):
        assert sent["said"] == expected
        assert sent["passed_through"] == pytest.approx(sum(expected.values()), rel=1e-12)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_rank_holds_what_the_formula_says(tmp_path: Path) -> None:
    run = meshed("all_to_all", 4, "optimizer=adam")
    formula = run.strategy.state_bytes(run, sum(parameter.numel() for parameter in build_model(run).parameters()))
    assert formula is not None
    ranks = [sum(parts.values()) for parts in run_ranks(held, 4, tmp_path, run)]
    assert ranks == pytest.approx([formula] * 4, rel=0.02)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_training_that_was_interrupted_is_bitwise_the_same(tmp_path: Path) -> None:
    run = meshed("ring", 4, "optimizer.momentum=0.9")
    for losses, state, losses_resumed, state_resumed in run_ranks(interrupted, 4, tmp_path, run):
        assert losses_resumed == losses
        assert equal(state_resumed, state)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    ("exchange", "options"),
    [
        ("ring", ("precision=fp32", "clip_norm=1.0")),
        ("all_gather", ("precision=bf16", "strategy.gather=bf16")),
        ("all_to_all", ("precision=bf16", *LLAMA)),
    ],
)
@pytest.mark.cases("ring*", "all_gather*")
def test_the_closing_check_passes_and_evaluates_every_sample_once(
    exchange: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    (rows,) = run_ranks(on_ranks, 4, tmp_path, meshed(exchange, 4, "epochs=1", *options), None)[0]
    assert not failed(rows), [row for row in rows if row["passed"] is False]
    expected = {"evaluation loss", "evaluation accuracy", "loss", "gradients", "update", "bytes", "exchanges"}
    assert expected | {"samples"} <= passed(rows)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_slow_rank_is_what_the_others_wait_for(tmp_path: Path) -> None:
    """Those of its sequence, and those of the other slice, which need its shards."""
    ranks = run_ranks(with_a_slow_rank, 4, tmp_path, {"fsdp_cp": meshed("ring", 4)}, {"fsdp_cp": 3})
    assert [shares(ranks[rank]["fsdp_cp"], "communication_s") > 0.5 for rank in range(3)] == [True] * 3
    assert shares(ranks[3]["fsdp_cp"], "forward_s") > 0.5


def prepared_timeouts_s(rank: int, size: int, run: RunConfig) -> set[float]:
    run.strategy.prepare(build_model(run), run, World(rank=rank, size=size, local_rank=rank))
    return timeouts_s()


@pytest.mark.exhaustive
@pytest.mark.slow
def test_every_group_of_ranks_has_the_runs_timeout(tmp_path: Path) -> None:
    run = meshed("ring", 4, f"launcher.collective_timeout_s={PATIENCE_S}")
    assert set().union(*run_ranks(prepared_timeouts_s, 4, tmp_path, run)) == {PATIENCE_S}


@pytest.mark.parametrize(
    ("exchange", "devices", "overrides", "words"),
    [
        ("ring", 1, [], ["strategy.context=2", "multiple of 2 devices", "devices=1"]),
        ("ring", 3, [], ["strategy.context=2", "multiple of 2 devices", "devices=3"]),
        ("ring", 4, ["strategy.context=1"], ["strategy.context=1 leaves"]),
        ("ring", 6, ["strategy.context=3"], ["6 equal parts", "strategy.context=3", "data.sequence=18 or 12"]),
        ("all_to_all", 6, ["strategy.context=3"], ["3 equal parts"]),
        ("all_to_all", 8, ["strategy.context=8"], ["model.heads=4"]),
        ("ring", 4, ["strategy.micro_batches=5"], ["batch of 12 samples", "strategy.micro_batches=4 or 6"]),
        ("ring", 4, ["batch_size=23"], ["batch_size=23", "2 equal parts", "choose batch_size=22 or 24"]),
        ("ring", 2, ["precision=fp16"], ["precision=fp16"]),
        ("ring", 2, ["strategy.gather=bf16"], ["strategy.gather=bf16 with precision=fp64"]),
    ],
)
def test_what_does_not_fit_is_refused_with_the_fix(
    exchange: str, devices: int, overrides: list[str], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        meshed(exchange, devices, *overrides)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_models_of_images_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"no such attention"):
        configure("model=mlp", "data=synthetic", "strategy=fsdp_cp", "devices=2")
