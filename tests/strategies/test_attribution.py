"""Attribution: delays that are planted in a step are found in the phase and on the rank that they belong to."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.pipelining import PipelineStage

from parallelbench.config.components import Batch
from parallelbench.config.run import RunConfig
from parallelbench.loaders.resident import ResidentLoader
from parallelbench.measure import attribution
from parallelbench.measure.attribution import AttributionPass, installed
from parallelbench.strategies.data_parallel import ring
from parallelbench.training.torch_session import build_loader, build_model
from parallelbench.world.spans import PHASES, Spans
from parallelbench.world.world import World
from tests.ranks import run_ranks
from tests.scripted_cuda import CPU, WORLD, ScriptedCuda
from tests.strategies.test_context_parallel import SMALL, TOKENS
from tests.strategies.test_pipeline import pipeline_of, pipelined
from tests.strategies.training import configure, loader_of, prepared

Row = dict[str, Any]

DATA = ["data=synthetic", "data.channels=1", "data.train_samples=96", "data.test_samples=37", "data.image_size=8"]
MLP = [*DATA, "model=mlp", "model.hidden=[24,20,16]"]
NAP_S = 0.06
"""Of a stage: one forward, or one of the two halves of a backward, of one micro-batch."""
DELAY_S = 0.25
"""Planted once in a step, whose own work takes a few ms: even on a busy machine it is most of the quickest step."""


def slow_down(owner: Any, method: str, nap_s: Any) -> None:
    """Let a method sleep before it works; `nap_s` is told its arguments."""
    function = getattr(owner, method)

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(nap_s(*args, **kwargs))
        return function(*args, **kwargs)

    setattr(owner, method, slow)


def pipelines(rank: int, size: int, runs: list[RunConfig]) -> list[list[Row]]:
    """Stages that sleep as long in forward, backward by inputs, and backward by weights."""
    with suppress(PermissionError):  # only root may
        os.nice(-10)
    world = World(rank=rank, size=size, local_rank=rank)
    slow_down(PipelineStage, "forward_one_chunk", lambda *_, **__: NAP_S)
    slow_down(PipelineStage, "backward_one_chunk", lambda *_, full_backward=True, **__: NAP_S * (1 + full_backward))
    slow_down(PipelineStage, "backward_weight_one_chunk", lambda *_, **__: NAP_S)
    found = []
    for run in runs:
        replica: Any = run.strategy.prepare(build_model(run), run, world)
        loader = loader_of(replica, run)
        replica.step(next(loader.train(epoch=1)))
        found.append(AttributionPass(replica, loader, run=run, world=world).attribute(2))
    return found


ATTEMPTS = 12
"""A busy machine only ever lengthens a step: any undisturbed one shows the schedule's own bubble."""
SCHEDULES = ("gpipe", "1f1b", "looped_bfs", "interleaved_1f1b-2", "interleaved_zero_bubble-1", "zbv", "dualpipev")


@pytest.mark.exhaustive
def test_the_bubble_of_sleeping_stages_is_that_of_the_formula(tmp_path: Path) -> None:
    left = {case: pipelined(case, 2, "strategy.micro_batches=4") for case in SCHEDULES}
    formula = {case: pytest.approx(pipeline_of(run).bubble(), abs=0.02) for case, run in left.items()}
    steps: dict[str, list[tuple[Row, ...]]] = {case: [] for case in left}
    for go in range(ATTEMPTS):
        (folder := tmp_path / str(go)).mkdir()
        ranks = run_ranks(pipelines, 2, folder, list(left.values()))
        for case, rows in zip(left, zip(*ranks, strict=True), strict=True):
            assert all(row["communication_s"] is None for rank in rows for row in rank)
            steps[case] += zip(*rows, strict=True)
        # Who wakes from a sleep may have to wait for a busy core: the quickest step was disturbed least.
        quickest = {
            case: min(of, key=lambda step: max(row["step_time_s"] for row in step)) for case, of in steps.items()
        }
        measured = {case: bubble_share(step) for case, step in quickest.items()}
        left = {case: run for case, run in left.items() if measured[case] != formula[case]}
        if not left:
            break
    assert measured == formula


def bubble_share(rows: Iterable[Row]) -> float:
    """Of the time that a schedule takes, what its devices idle."""
    idle = sum(row["bubble_s"] for row in rows)
    return idle / (idle + sum(row["forward_s"] + row["backward_s"] for row in rows))


# --- one device


class SleepyLoader(ResidentLoader):
    """Needs its time for each batch."""

    def train(self, epoch: int) -> Iterator[Batch]:
        for batch in super().train(epoch):
            time.sleep(DELAY_S)
            yield batch


def single(*overrides: str) -> tuple[Any, RunConfig]:
    run = configure(*MLP, "strategy=single", *overrides)
    return prepared(run), run


def planted_in_loader(replica: Any) -> None:
    """Nothing in the replica: the test exchanges the loader."""


def planted_in_layer(replica: Any) -> None:
    replica.trained()[0][1].register_forward_pre_hook(lambda *_: time.sleep(DELAY_S))


def planted_in_gradient(replica: Any) -> None:
    replica.trained()[0][1].register_full_backward_hook(lambda *_: time.sleep(DELAY_S))


def planted_in_optimizer(replica: Any) -> None:
    replica.trained()[1].register_step_pre_hook(lambda *_: time.sleep(DELAY_S))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "phase"),
    [
        (planted_in_loader, "data_wait_s"),
        (planted_in_layer, "forward_s"),
        (planted_in_gradient, "backward_s"),
        (planted_in_optimizer, "optimizer_s"),
    ],
)
def test_a_delay_is_found_where_it_was_planted_and_nowhere_else(plant: Any, phase: str) -> None:
    replica, run = single()
    loader = loader_of(replica, run)
    if plant is planted_in_loader:
        loader.__class__ = SleepyLoader
    plant(replica)
    rows = AttributionPass(replica, loader, run=run, world=World()).attribute(4)
    quickest = min(rows, key=lambda row: row["step_time_s"])
    assert quickest[phase] >= DELAY_S
    assert quickest[phase] > 0.5 * quickest["step_time_s"]  # more than all the rest
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        parts = [row[f"{phase}_s"] for phase in PHASES]
        assert sum(part for part in parts if part is not None) == pytest.approx(row["step_time_s"], rel=1e-9)
        # One device has nobody to wait for, and its data lies there: null, not 0.
        assert row["communication_s"] is row["bubble_s"] is row["host_to_device_s"] is None


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dataloader", "tensor_dataset", "streamed"])
def test_moving_a_batch_to_a_gpu_is_a_phase_of_its_own(kind: str, tmp_path: Path) -> None:
    replica, run = single(f"loader={kind}", f"site.data_dir={tmp_path}", f"results={tmp_path}")
    arrays = run.data.load(run.site.data_folder)
    loader: Any = build_loader(arrays, run, World(), replica.data_shard)
    loader._moves_batches = True  # as on a GPU
    moving = loader._moving

    @contextmanager
    def slowly() -> Iterator[None]:
        with moving():
            time.sleep(DELAY_S)
            yield

    loader._moving = slowly
    rows = AttributionPass(replica, loader, run=run, world=World()).attribute(3)
    assert all(row["host_to_device_s"] >= DELAY_S for row in rows)
    assert min(row["data_wait_s"] for row in rows) < DELAY_S
    loader._moves_batches = False
    assert AttributionPass(replica, loader, run=run, world=World()).attribute(1)[0]["host_to_device_s"] is None
    loader.close()


def test_outside_of_the_pass_nothing_is_installed() -> None:
    replica, run = single()
    waits = (dist.Work.wait, torch.ops._c10d_functional.wait_tensor)
    spans = Spans(time.perf_counter)
    with installed(spans, outside="communication"):
        assert dist.Work.wait is not waits[0]
    assert (dist.Work.wait, torch.ops._c10d_functional.wait_tensor) == waits
    with spans.step():
        replica.step(next(loader_of(replica, run).train(epoch=1)))
    assert spans.seen == {"other"}


def test_on_a_gpu_each_phase_lasts_until_its_stream_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host launches in no time; what other streams do goes on, and belongs to no phase."""
    device = ScriptedCuda()
    device.install(monkeypatch)
    monkeypatch.setattr(attribution.time, "perf_counter", lambda: device.now_s)
    replica, run = single()
    side = device.new_stream(CPU)
    for method, took_s in (("_predict", 2.0), ("_backward", 3.0), ("_apply_gradients", 0.5)):
        launch(device, replica, method, took_s)
    slow_down(replica, "_backward", lambda *_: side.launch(100.0) or 0.0)
    rows = AttributionPass(replica, loader_of(replica, run), run=run, world=WORLD).attribute(2)
    for row in rows:
        assert (row["forward_s"], row["backward_s"], row["optimizer_s"]) == (2.0, 3.0, 0.5)
        assert row["step_time_s"] == 5.5
        assert row["other_s"] == row["data_wait_s"] == 0.0
        assert row["communication_s"] is None
    assert side.ends_s >= 300.0, "nobody has waited for the other stream"
    assert "synchronize" not in device.calls, "nor for the whole device"


def launch(device: ScriptedCuda, owner: Any, name: str, took_s: float) -> None:
    """Let a method give the device work besides its own."""
    method = getattr(owner, name)

    def launching(*args: Any, **kwargs: Any) -> Any:
        device.launch(took_s)
        return method(*args, **kwargs)

    setattr(owner, name, launching)


# --- several


ON_TWO: dict[str, tuple[list[str], str]] = {
    "ddp": ([], "communication_s"),
    "ring_ddp": ([], "communication_s"),
    "zero1": ([], "communication_s"),
    "fsdp": ([], "communication_s"),
    "tensor_parallel": ([], "communication_s"),
    "context_parallel": (["strategy.exchange=ring"], "communication_s"),
    "model_parallel": ([], "bubble_s"),
    "pipeline": (["strategy.micro_batches=4"], "bubble_s"),
    "parameter_server": ([], "communication_s"),
    "downpour": (["optimizer.momentum=0.0"], "communication_s"),
    "sandblaster_lbfgs": (["optimizer=lbfgs", "batch_size=96"], "communication_s"),
}
"""Strategy → its options, and what the other rank does while the slow one computes."""
ON_FOUR: dict[str, tuple[list[str], tuple[str, str, str]]] = {
    "hsdp": ([], ("communication_s",) * 3),
    "fsdp_cp": ([], ("communication_s",) * 3),
    "dp_tp": ([], ("communication_s",) * 3),
    "dp_pp": (["strategy.micro_batches=4"], ("communication_s", "communication_s", "bubble_s")),
    "dp_pp_tp": (["strategy.micro_batches=4"], ("bubble_s", "bubble_s", "communication_s")),
}
"""The same of ranks 0, 1 and 2, where rank 3 is slow: in dp_pp its pipeline is 2 → 3, in dp_pp_tp (0, 1) → (2, 3)."""


def run_with(strategy: str, *options: str) -> RunConfig:
    cuts_sequences = strategy in ("context_parallel", "fsdp_cp")
    return configure(*((*TOKENS, *SMALL) if cuts_sequences else MLP), f"strategy={strategy}", *options)


def with_a_slow_rank(rank: int, size: int, runs: dict[str, RunConfig], slow: dict[str, int]) -> dict[str, list[Row]]:
    """Rank `slow` sleeps in forward."""
    world = World(rank=rank, size=size, local_rank=rank)
    found = {}
    for name, run in runs.items():
        replica: Any = run.strategy.prepare(build_model(run), run, world)
        if rank == slow[name]:
            layer = next(layer for layer in replica.trained()[0].modules() if not [*layer.children()])
            layer.register_forward_pre_hook(lambda *_: time.sleep(DELAY_S))
        loader = loader_of(replica, run)
        found[name] = AttributionPass(replica, loader, run=run, world=world).attribute(3)
        replica.close()
    return found


def shares(rows: list[Row], phase: str) -> float:
    """Largest share of a step: of several, one was disturbed least by whatever else this machine does."""
    return max(row[phase] / row["step_time_s"] for row in rows)


@pytest.mark.exhaustive
def test_a_slow_rank_is_what_the_others_wait_for(tmp_path: Path) -> None:
    runs = {name: run_with(name, "devices=2", *more) for name, (more, _) in ON_TWO.items()}
    # With one worker and one server, the worker is slow.
    slow = {name: 0 if name in ("parameter_server", "downpour") else 1 for name in ON_TWO}
    ranks = run_ranks(with_a_slow_rank, 2, tmp_path, runs, slow)
    waited = {name: shares(ranks[1 - slow[name]][name], phase) for name, (_, phase) in ON_TWO.items()}
    worked = {name: shares(ranks[slow[name]][name], "forward_s") for name in ON_TWO}
    assert {name: share for name, share in waited.items() if share < 0.5} == {}
    assert {name: share for name, share in worked.items() if share < 0.5} == {}
    assert all(row["forward_s"] is None for row in ranks[1]["parameter_server"])  # a server has none


def with_slow_hooks(rank: int, size: int, runs: list[RunConfig]) -> list[list[Row]]:
    """DDP's communication hook sleeps before its work, on every rank alike."""
    world = World(rank=rank, size=size, local_rank=rank)
    found = []
    ring_hook, compress = ring.ring_hook, default_hooks.bf16_compress_hook
    ring.ring_hook = lambda *options: slow(ring_hook(*options))
    default_hooks.bf16_compress_hook = slow(compress)
    for run in runs:
        replica: Any = run.strategy.prepare(build_model(run), run, world)
        found.append(AttributionPass(replica, loader_of(replica, run), run=run, world=world).attribute(3))
        replica.close()
    return found


BLOCKING: dict[str, list[str]] = {
    "sandblaster_lbfgs": [*MLP, "strategy=sandblaster_lbfgs", "optimizer=lbfgs", "batch_size=96"],
    "norm=sync": [*DATA, "model=resnet_tiny", "model.norm=sync", "strategy=ddp"],
}
"""What sends messages that a step waits for in C++, where nothing but the step itself can say so (NCCL's)."""
WAIT = dist.Work.wait


def with_late_messages(rank: int, size: int, runs: list[RunConfig]) -> list[list[Row]]:
    """Blocking collectives last, on every rank alike, and no handle is waited for."""
    world, found = World(rank=rank, size=size, local_rank=rank), []
    for run in runs:
        replica: Any = run.strategy.prepare(build_model(run), run, world)
        with ExitStack() as late:
            for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"):
                late.enter_context(replaced(name, unseen(getattr(dist, name))))
            found.append(AttributionPass(replica, loader_of(replica, run), run=run, world=world).attribute(3))
        replica.close()
    return found


def unseen(collective: Any) -> Any:
    def blocking(*given: Any, **more: Any) -> None:
        work = collective(*given, **more, async_op=True)
        if given[0].numel() > 16:  # none of the step's own scalars
            time.sleep(DELAY_S / 5)
        WAIT(work)

    return blocking


@contextmanager
def replaced(name: str, value: Any) -> Iterator[None]:
    genuine = getattr(dist, name)
    setattr(dist, name, value)
    try:
        yield
    finally:
        setattr(dist, name, genuine)


@pytest.mark.exhaustive
def test_messages_that_a_step_waits_for_unseen_are_communication(tmp_path: Path) -> None:
    runs = [configure(*options, "devices=2") for options in BLOCKING.values()]
    for rows in run_ranks(with_late_messages, 2, tmp_path, runs):
        found = {name: shares(of_run, "communication_s") for name, of_run in zip(BLOCKING, rows, strict=True)}
        assert {name: share for name, share in found.items() if share < 0.6} == {}


def slow(hook: Any) -> Any:
    return lambda *given: (time.sleep(DELAY_S), hook(*given))[1]


@pytest.mark.exhaustive
def test_a_delay_in_ddps_communication_hook_is_communication_and_no_part_of_backward(tmp_path: Path) -> None:
    hooked = (["strategy=ddp", "strategy.compression=bf16"], ["strategy=ring_ddp"])
    runs = [configure(*MLP, *strategy, "devices=2") for strategy in hooked]
    for rows in run_ranks(with_slow_hooks, 2, tmp_path, runs):
        for of_run in rows:
            quickest = min(of_run, key=lambda row: row["step_time_s"])
            assert quickest["communication_s"] >= DELAY_S
            assert quickest["backward_s"] < DELAY_S / 2


@pytest.mark.exhaustive
def test_in_meshes_too(tmp_path: Path) -> None:
    runs = {name: run_with(name, "devices=4", *more) for name, (more, _) in ON_FOUR.items()}
    ranks = run_ranks(with_a_slow_rank, 4, tmp_path, runs, dict.fromkeys(ON_FOUR, 3))
    expected = {(name, rank): phase for name, (_, phases) in ON_FOUR.items() for rank, phase in enumerate(phases)}
    found = {(name, rank): shares(ranks[rank][name], phase) for (name, rank), phase in expected.items()}
    found |= {(name, 3): shares(ranks[3][name], "forward_s") for name in ON_FOUR}
    assert {key: share for key, share in found.items() if share < 0.5} == {}
