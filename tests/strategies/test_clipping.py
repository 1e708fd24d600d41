"""Gradient clipping: the norm of the whole gradient on whichever ranks its parts are, its bytes, and its time."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.nn import functional as F

from parallelbench.config.check import check_run
from parallelbench.config.components import Shard
from parallelbench.config.identity import run_id
from parallelbench.config.run import RunConfig
from parallelbench.errors import ConfigError
from parallelbench.measure.spans import Spans, divided_by
from parallelbench.measure.traffic import Traffic
from parallelbench.strategies.clipping import Clipping
from parallelbench.strategies.data_parallel import Ddp
from parallelbench.strategies.fsdp import Fsdp
from parallelbench.strategies.pipeline.split import LayerSplitReplica
from parallelbench.training.checks.parity import as_checked
from parallelbench.training.torch_session import build_model
from parallelbench.world.world import World
from tests.helpers import configured
from tests.ranks import run_ranks
from tests.strategies.test_parity import MODELS, OVERRIDES, SYNTHETIC
from tests.strategies.training import STEPS, configure, loader_of, one_device, shard_loader
from tests.test_closing import NORMED, SMALL, closed, failed, on_ranks, passed, stays_right
from tests.test_parity_gate import gate

CLIPPED = "clip_norm=0.2"
"""Below the norm of each gradient here."""
WITHOUT = ("sandblaster_lbfgs", "downpour")
"""Strategies that refuse to clip."""


def clipping(strategy: str, *overrides: str, model: str = "mlp") -> RunConfig:
    """The strategy on as few devices as it takes; that of GPUs alone is skipped."""
    own = OVERRIDES.get(strategy, [])
    for devices in (2, 4, 8):
        with contextlib.suppress(ConfigError):
            chosen = [f"strategy={strategy}", f"devices={devices}", *own, CLIPPED, *overrides]
            return configure(*SYNTHETIC, *MODELS[model], *chosen)
    pytest.skip("GPUs only")


def test_one_device_clips_as_torch_does() -> None:
    run = configure(*SYNTHETIC, *MODELS["cnn_small"], "strategy=single", CLIPPED)
    model = build_model(run).double()
    optimizer = run.optimizer.build(model.parameters(), run, "cpu")
    loader = shard_loader(run, Shard())
    batches, norms = itertools.chain.from_iterable(map(loader.train, itertools.count(1))), []
    for batch in itertools.islice(batches, STEPS):
        optimizer.zero_grad()
        F.cross_entropy(model(batch.images), batch.labels).backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2).item())
        optimizer.step()
    assert min(norms) > 0.2
    found = one_device(run)
    torch.testing.assert_close(found["state"], dict(model.state_dict()), rtol=0, atol=1e-12)
    torch.testing.assert_close(found["gradients"], gradients, rtol=1e-12, atol=1e-12)


def test_short_gradients_stay_as_they_are() -> None:
    run = configure(*SYNTHETIC, *MODELS["mlp"], "strategy=single", "clip_norm=1000.0")
    torch.testing.assert_close(
        one_device(run), one_device(msgspec.structs.replace(run, clip_norm=None)), rtol=0, atol=0
    )


# --- bytes and time


def gradient_bytes(rank: int, size: int, runs: list[RunConfig]) -> list[int]:
    """Bytes of gradients that a rank sends in the second step of each run."""
    sent = []
    for run in runs:
        replica = run.strategy.prepare(build_model(run), run, World(rank=rank, size=size, local_rank=rank))
        batches = loader_of(replica, run).train(epoch=1)
        replica.step(next(batches))
        replica.traffic.take()
        replica.step(next(batches))
        sent.append(replica.traffic.take()["gradient_bytes_sent"])
    return sent


def of_a_sum(ranks: int, sums: int = 1) -> int:
    """Bytes that a rank sends for so many sums of squares, each of 8 bytes, over so many ranks."""
    return round(2 * (ranks - 1) / ranks * 8 * sums)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["strategy=ddp", "devices=2"], [0, 0]),
        (["strategy=zero1", "devices=2"], [0, 0]),
        (["strategy=fsdp", "devices=2"], [of_a_sum(2)] * 2),
        (["strategy=fsdp", "devices=4"], [of_a_sum(4)] * 4),
        (["strategy=hsdp", "devices=4", "strategy.shard=2"], [of_a_sum(2)] * 4),
        (["strategy=model_parallel", "devices=2"], [of_a_sum(2)] * 2),
        (["strategy=pipeline", "devices=2"], [of_a_sum(2)] * 2),
        (["strategy=dp_pp", "devices=4"], [of_a_sum(2)] * 4),
        (["strategy=tensor_parallel", "devices=2"], [of_a_sum(2)] * 2),
        # What is cut both ways, and what the data dimension alone cuts; then the first over the tensor dimension.
        (["strategy=dp_tp", "devices=4"], [of_a_sum(2, sums=2) + of_a_sum(2)] * 4),
        (["strategy=parameter_server", "devices=3"], [0, 0, 0]),
        (["strategy=parameter_server", "strategy.servers=2", "devices=4"], [0, 0, of_a_sum(2), of_a_sum(2)]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value[0], str) else "",
)
@pytest.mark.cases("*fsdp devices=2*", "*dp_tp*", "*servers*")
def test_a_sum_of_squares_is_all_that_is_sent(options: list[str], expected: list[int], tmp_path: Path) -> None:
    run = configure(*SYNTHETIC, *MODELS["mlp"], *options, CLIPPED)
    runs = [run, msgspec.structs.replace(run, clip_norm=None)]
    found = run_ranks(gradient_bytes, run.devices, tmp_path, runs)
    assert [clipped - plain for clipped, plain in found] == expected


def summing_phase(rank: int, size: int, run: RunConfig) -> list[str | None]:
    """The innermost phase while squares are added up."""
    replica: Any = run.strategy.prepare(build_model(run), run, World(rank=rank, size=size, local_rank=rank))
    spans, seen = Spans(lambda: 0.0), []
    batch = next(loader_of(replica, run).train(epoch=1))
    sum_over_ranks = replica._clipping.sum_over_ranks

    def noted(squares: Any) -> Any:
        seen.append(spans.innermost)
        return sum_over_ranks(squares)

    replica._clipping.sum_over_ranks = noted
    with divided_by(spans), spans.step():
        replica.step(batch)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "expected"),
    [("fsdp", ["communication"]), ("pipeline", ["communication"]), ("ddp", [])],
)
def test_its_time_is_communication_and_the_rest_the_optimizers(
    strategy: str, expected: list[str], tmp_path: Path
) -> None:
    assert run_ranks(summing_phase, 2, tmp_path, clipping(strategy)) == [expected] * 2


# --- what counts


def test_a_parameter_that_two_ranks_share_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LayerSplitReplica, "_ranks_group", None)
    run = clipping("model_parallel")
    names = []
    for rank in (0, 1):
        first, second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        second.weight = first.weight
        model = torch.nn.Sequential()
        model.add_module("first", first)
        model.add_module("second", second)
        owners = {"first": 0, "second": 1}
        replica = LayerSplitReplica(model, owners, run=run, world=World(rank=rank, size=2, local_rank=rank))
        (counted, _), named = replica._counted(), dict(replica._layers.named_parameters())
        names.append({name for name, each in named.items() if any(each is one for one in counted)})
        others = {name for name, each in named.items() if any(each is one for one in replica._uncounted())}
        assert others == named.keys() - names[-1], "scaled all the same"
    assert names == [{"first.weight", "first.bias"}, {"second.bias"}]


def test_what_counts_elsewhere_is_scaled_here(monkeypatch: pytest.MonkeyPatch) -> None:
    counted, elsewhere = (torch.nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(2))
    group: Any = "the other ranks"
    clipping = Clipping(1.0, [counted], over=(group,), traffic=Traffic(), uncounted=[elsewhere])
    monkeypatch.setattr(clipping, "sum_over_ranks", lambda squares: sum(squares.values()) + 16.0)
    counted.grad, elsewhere.grad = torch.full((1,), 3.0).double(), torch.full((1,), 4.0).double()
    clipping.clip()
    assert counted.grad.item() == pytest.approx(3 / 5)
    assert elsewhere.grad.item() == pytest.approx(4 / 5)


def test_gradients_in_several_types_are_scaled_each_in_its_own() -> None:
    parameters = [torch.nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in (torch.float32, torch.float64)]
    for parameter in parameters:
        parameter.grad = 3 * torch.ones_like(parameter)
    clipping = Clipping(1.0, parameters, over=(), traffic=Traffic())
    clipping.clip()
    norm = torch.cat([p.grad.double() for p in parameters if p.grad is not None]).norm().item()
    assert norm == pytest.approx(1.0, rel=1e-5)
    assert parameters[1].grad is not None
    (restored,) = clipping.unclipped({"x": parameters[1].grad}).values()
    torch.testing.assert_close(restored, torch.full((3,), 3.0, dtype=torch.float64), rtol=1e-6, atol=0)


# --- refusals and identity


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optimizer=lbfgs", "batch_size=96"], "a line search needs the gradient of the loss itself"),
        (["strategy=parameter_server", "strategy.mode=async", "devices=3"], "no server has a whole gradient"),
        (
            ["strategy=downpour", "devices=3", "optimizer.momentum=0.0"],
            "choose clip_norm=null, or strategy=parameter_server",
        ),
        (["strategy=tf_single"], "strategy=tf_single has updates of its own, which clip nothing"),
        (["clip_norm=0"], "clip_norm=0 is not valid"),
    ],
)
def test_what_can_not_clip_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configure(*SYNTHETIC, *MODELS["mlp"], CLIPPED, *overrides)


def test_a_captured_step_does_not_clip() -> None:
    run = configure(*SYNTHETIC, *MODELS["mlp"], CLIPPED)
    with pytest.raises(ConfigError, match="is refused: graph=true captures no clipping"):
        check_run(msgspec.structs.replace(run, graph=True), "cuda")


def test_runs_that_clip_nothing_keep_their_id() -> None:
    assert run_id(configured("clip_norm=null")) == run_id(configured())
    assert len({run_id(configured(*more)) for more in ([], ["clip_norm=1.0"], ["clip_norm=0.5"])}) == 3


# --- the checks


class SumsGradients(Ddp, frozen=True, kw_only=True):
    """Gradients twice as long as they should be, which clipping hides from the parameters."""

    def prepare(self, model: Any, run: RunConfig, world: Any) -> Any:
        replica: Any = super().prepare(model, run, world)
        clip = replica._clip

        def double(clipping: Any) -> None:
            for parameter in replica._module.parameters():
                parameter.grad.mul_(2)
            clip(clipping)

        replica._clip = double
        return replica


class ClipsItsShardAlone(Fsdp, frozen=True, kw_only=True):
    """The norm is that of a rank's own shards."""

    def prepare(self, model: Any, run: RunConfig, world: Any) -> Any:
        replica: Any = super().prepare(model, run, world)
        replica._clipping.sum_over_ranks = lambda squares: sum(squares.values())
        return replica


class ClipsNothing(Ddp, frozen=True, kw_only=True):
    """As a strategy that updates by itself."""

    def prepare(self, model: Any, run: RunConfig, world: Any) -> Any:
        replica: Any = super().prepare(model, run, world)
        replica._clip = lambda clipping: None
        return replica


@pytest.mark.cases("SumsGradients-ddp")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "strategy"), [(SumsGradients, "ddp"), (ClipsItsShardAlone, "fsdp"), (ClipsNothing, "ddp")]
)
def test_the_parity_check_finds_who_clips_wrongly(kind: Any, strategy: str, tmp_path: Path) -> None:
    run = clipping(strategy, "clip_norm=1000.0")
    assert as_checked(run).clip_norm == 1e-4, "so that something is clipped at all"
    options = {field: getattr(run.strategy, field) for field in run.strategy.__struct_fields__}
    right = run_ranks(gate, 2, tmp_path, as_checked(run))[0]
    wrong = run_ranks(gate, 2, tmp_path, as_checked(msgspec.structs.replace(run, strategy=kind(**options))))[0]
    assert all(row["passed"] for row in right)
    assert not any(row["passed"] for row in wrong)


@pytest.mark.cases("bf16")
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_the_closing_check_clips_in_plain_code(precision: str) -> None:
    run = configure(*SMALL, "strategy=single", f"precision={precision}", CLIPPED)
    assert failed(closed(World(), run)) == set()

    def not_at_all(replica: Any, k: int) -> None:
        replica._clip = lambda clipping: replica._numerics.unscale(replica._optimizer)

    assert "update" in failed(closed(World(), run, not_at_all))


@pytest.mark.exhaustive
@pytest.mark.slow
def test_what_is_sent_to_clip_does_not_count_as_lost_bytes(tmp_path: Path) -> None:
    run = configure(*SMALL, "strategy=fsdp", "devices=2", CLIPPED)
    rows = run_ranks(on_ranks, 2, tmp_path, run, [(stays_right, 0)])[0][0]
    assert failed(rows) == set()
    assert {"bytes", "exchanges", "update", "gradients"} <= passed(rows)


@pytest.mark.exhaustive
def test_statistics_are_none_of_the_gradient() -> None:
    run = configure(*NORMED, "strategy=single", CLIPPED)
    assert failed(closed(World(), run)) == set()


@pytest.mark.slow
def test_groups_are_dimensions_of_one_mesh(tmp_path: Path) -> None:
    assert run_ranks(total_of_four, 4, tmp_path) == [30.0 + 8.0] * 4


def total_of_four(rank: int, size: int) -> float:
    """Ranks 0 … 3 in a mesh of 2 × 2: squares (rank + 1)² cut both ways, and 4 that the first dimension alone cuts."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    data, tensor = mesh.get_group("data"), mesh.get_group("tensor")
    traffic = Traffic()
    clipping = Clipping(1.0, [torch.nn.Parameter(torch.ones(1))], over=(), traffic=traffic)
    both, alone = torch.tensor((rank + 1.0) ** 2), torch.tensor(4.0)
    total = clipping.sum_over_ranks({(): torch.tensor(0.0), (data, tensor): both, (data,): alone})
    assert traffic.gradient == of_a_sum(2, sums=2) + of_a_sum(2)
    return total.item()
