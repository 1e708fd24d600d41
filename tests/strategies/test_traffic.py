"""Bytes that zero1 and model_parallel say they send are those of the formulas; norms report their own."""

from __future__ import annotations

from itertools import chain, count
from pathlib import Path

import msgspec
import pytest
import torch

from parallelbench.config.run import RunConfig
from parallelbench.errors import ConfigError
from parallelbench.measure.counted_bytes import CountedBytes
from parallelbench.training.replica import new_replica
from parallelbench.training.torch_session import build_model
from parallelbench.world.world import World
from tests.faults import fault
from tests.ranks import run_ranks
from tests.strategies.test_parity import OVERRIDES, SHIPPED, SYNTHETIC
from tests.strategies.training import configure, loader_of, prepared

pytestmark = pytest.mark.slow

DATA = ["data=synthetic", "data.channels=1", "data.image_size=28", "data.train_samples=96", "data.test_samples=10"]
CPU = torch.device("cpu")
PARAMETERS, FP64 = 402_442, 8


def one_step(rank: int, size: int, run: RunConfig) -> dict[str, int]:
    replica = prepared(run, rank, size)
    replica.traffic.take()
    replica.step(next(loader_of(replica, run).train(epoch=1)))
    return replica.traffic.take()


@pytest.mark.parametrize("size", [2, 3])
def test_an_owner_sends_its_whole_tensors_to_all_others(size: int, tmp_path: Path) -> None:
    """fc1's weight is most of the model, so whoever owns it sends nearly everything."""
    run = configure(*DATA, "strategy=zero1", f"devices={size}")
    gradient = 2 * (size - 1) / size * PARAMETERS * FP64
    found = run_ranks(one_step, size, tmp_path, run)
    owned = [6272 * 64, PARAMETERS - 6272 * 64] if size == 2 else [6272 * 64, 64 * 10, 32 * 9 + 64 + 32 + 10]
    assert found == [
        {
            "gradient_bytes_sent": round(gradient),
            "activation_bytes_sent": 0,
            "parameter_bytes_sent": (size - 1) * values * FP64,
        }
        for values in owned
    ]
    total = sum(rank["parameter_bytes_sent"] for rank in found)
    assert total == (size - 1) * PARAMETERS * FP64, "n all-gathers', as docs/measurement.md says"


MLP = ["model=mlp", "model.hidden=[24,20,16]"]


@pytest.mark.parametrize(
    "overrides",
    [
        ["strategy=model_parallel", "strategy.device_map={conv1: 0, fc1: 1, fc2: 1}"],
        ["strategy=model_parallel_tutorial", *MLP],
        ["strategy=model_parallel_tutorial", *MLP, "precision=bf16"],
    ],
)
def test_one_process_on_several_devices_counts_what_several_processes_send(
    overrides: list[str], tmp_path: Path
) -> None:
    """One process drives all GPUs; where there are none, two CPU devices stand for them."""
    run = configure(*DATA, "devices=2", *overrides)
    parts = run_ranks(one_step, 2, tmp_path, run)
    replica = run.strategy.prepare(build_model(run), run, World(device_type="cuda", devices=(CPU, CPU)))
    replica.step(next(loader_of(replica, run).train(epoch=1)))
    counted = replica.traffic.take()
    assert counted == {name: sum(part[name] for part in parts) for name in counted}
    assert counted["activation_bytes_sent"] > 0


@pytest.mark.parametrize("devices", [2, 3])
def test_naive_model_parallelism_idles_like_one_micro_batch(devices: int) -> None:
    run = configure(*DATA, "strategy=model_parallel", f"devices={devices}")
    assert run.strategy.bubble(run) == pytest.approx((devices - 1) / devices)


def bytes_of_norms(rank: int, size: int, runs: list[RunConfig]) -> list[dict[str, float]]:
    """Of a step and of an evaluation, with each norm."""
    found = []
    for run in runs:
        replica = new_replica(build_model(run), run, World(rank=rank, size=size, local_rank=rank))
        loader = loader_of(replica, run)
        batches = chain.from_iterable(map(loader.train, count(1)))
        replica.step(next(batches))
        replica.traffic.take()
        with CountedBytes() as counted:
            replica.step(next(batches))
        step = {"reported": sum(replica.traffic.take().values()), "large": counted.sent_bytes}
        step["counted"] = counted.sent_bytes + counted.control_bytes
        with CountedBytes() as counted:
            replica.evaluate(loader.test())
        found.append(step | {"evaluation": counted.sent_bytes + counted.control_bytes})
        replica.close()
    return found


@fault(
    "numbers",
    "Layers that send messages of their own",
    injection="norms over all ranks (model.norm=sync) under every strategy that takes them, on 2 or on 4 ranks",
    outcome="what they send in forward and backward is reported to the byte, and nothing is sent in evaluation",
)
@pytest.mark.parametrize(
    ("strategy", "size"),
    [*((name, 4 if name in ("hsdp", "dp_pp") else 2) for name in SHIPPED), ("ddp", 4), ("zero1", 4)],
)
@pytest.mark.cases("ddp-4", "fsdp-2")
def test_what_norms_over_all_ranks_send_is_reported(strategy: str, size: int, tmp_path: Path) -> None:
    small = ["model=resnet_tiny", "data.image_size=8"]
    asked = [*small, f"strategy={strategy}", f"devices={size}", *OVERRIDES.get(strategy, [])]
    try:
        runs = [configure(*SYNTHETIC, *asked, f"model.norm={norm}") for norm in ("sync", "batch")]
    except ConfigError as error:
        pytest.skip(f"refused: {error}")
    ranks = run_ranks(bytes_of_norms, runs[0].strategy.processes(runs[0], "cpu"), tmp_path, runs)
    sync, batch = ({key: sum(rank[index][key] for rank in ranks) for key in ranks[0][0]} for index in (0, 1))
    assert sync["large"] - size <= sync["reported"] <= sync["counted"] + size, "rounded on each rank"
    assert sync["evaluation"] == batch["evaluation"]
    if strategy != "sandblaster_lbfgs":  # whose line search evaluates as often as it needs
        sent, reported = (sync[key] - batch[key] for key in ("counted", "reported"))
        assert reported == pytest.approx(sent, abs=2 * size)
        assert sent > 0 or runs[0].strategy.data_parallel_degree(runs[0]) == 1


@pytest.mark.exhaustive
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    ("strategy", "size", "recomputation"),
    [(["strategy=ddp"], 2, "full"), (["strategy=dp_pp", "strategy.micro_batches=2"], 4, "none")],
)
def test_compiled_norms_are_reported_as_they_are(
    strategy: list[str], size: int, recomputation: str, tmp_path: Path
) -> None:
    """As many messages are sent as by uncompiled code, also where backward computes layers again."""
    strategy = [*strategy, f"activation_recomputation={recomputation}"]
    model = ["model=cnn", "model.widths=[8]", "model.norm=sync", "data.image_size=8"]
    runs = [configure(*SYNTHETIC, *model, *strategy, f"devices={size}")]
    runs.append(msgspec.structs.replace(runs[0], compile=True))
    for eager, compiled in run_ranks(reported_by_each, size, tmp_path, runs):
        assert compiled == eager


def reported_by_each(rank: int, size: int, runs: list[RunConfig]) -> list[dict[str, int]]:
    found = []
    for run in runs:
        world = World(rank=rank, size=size, local_rank=rank)
        replica = new_replica(build_model(run), run, world)
        batches = loader_of(replica, run).train(epoch=1)
        batch = next(batches)
        replica.compile_warmup(batch)
        replica.traffic.take()
        exchanges = world.exchange_counter()
        before = exchanges()
        replica.step(batch)
        found.append(replica.traffic.take() | {"messages": exchanges() - before})
        replica.close()
    return found
