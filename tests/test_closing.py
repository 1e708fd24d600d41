"""The checks during and after training let every right strategy pass, and stop faults that begin late."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallelbench.errors import ConfigError
from parallelbench.loaders.batch import Batch
from parallelbench.rank.closing import STEPS, ClosingCheck
from parallelbench.rank.copies import _unlike, checksum
from parallelbench.rank.differences import relative_difference, unmoved
from parallelbench.rank.judge import MARGIN
from parallelbench.rank.numerics import Sums, sums
from parallelbench.rank.session import build_model
from parallelbench.rank.train import Trainer
from parallelbench.rank.world import World
from parallelbench.spec.config import RunConfig
from parallelbench.strategies.single import Single
from tests.ranks import run_ranks
from tests.strategies.test_parity import OVERRIDES, SHIPPED
from tests.strategies.training import configure, shard_loader

DATA = ["data=synthetic", "data.channels=1", "data.train_samples=384", "data.test_samples=100", "batch_size=64"]
SMALL = [*DATA, "model=mlp", "data.image_size=28", "precision=fp32", "epochs=2"]
NORMED = [*DATA, "model=resnet_tiny", "model.norm=batch", "data.image_size=32", "precision=fp32", "epochs=2"]
TRAINED = 12
"""Steps of two epochs."""
Row = dict[str, Any]
Fault = Callable[[Any, int], None]
"""Changes a replica so that it goes wrong after k steps."""


class Rows:
    """Takes the place of a journal."""

    def __init__(self) -> None:
        self.checks: list[Row] = []

    def write(self, table: str, rows: list[Row]) -> None:
        self.checks += rows if table == "checks" else []

    def event(self, name: str, **details: Any) -> None: ...

    def commit(self) -> None: ...


def closed(world: World, run: RunConfig, fault: Fault | None = None, k: int = 0) -> list[Row]:
    """Train a run, with a fault or without; the rows of `checks` on rank 0."""
    torch.set_num_threads(1)
    replica = run.strategy.prepare(build_model(run), run, world)
    if fault is not None:
        fault(replica, k)
    loader, rows = shard_loader(run, replica.data_shard), Rows()
    trainer = Trainer(replica, loader, run=run, world=world, journal=rows, keys={})  # type: ignore[arg-type]
    trainer.train()
    closing = ClosingCheck(replica, loader, run=run, world=world, loader_of=shard_loader)
    (loss, accuracy), sent_bytes = trainer.evaluated, trainer.step_bytes
    found = closing.findings(build_model(run), loss=loss, accuracy=accuracy, sent_bytes=sent_bytes)
    replica.close()
    return rows.checks + [finding.row(run.epochs) for finding in found]


def failed(rows: list[Row]) -> set[str]:
    return {row["check"] for row in rows if row["passed"] is False}


def passed(rows: list[Row]) -> set[str]:
    return {row["check"] for row in rows if row["passed"]} - failed(rows)


def on_ranks(rank: int, size: int, run: RunConfig, mutants: list[tuple[Fault, int]] | None) -> list[list[Row]]:
    """One after the other in the same processes: starting them takes longer than training."""
    world = World(rank=rank, size=size, local_rank=rank)
    if mutants is None:
        return [closed(world, run)]
    return [closed(world, run, fault, k) for fault, k in mutants]


def idles_every_other_step(replica: Any, k: int) -> None:
    step, taken = replica.step, 0

    def idle(batch: Batch) -> Any:
        nonlocal taken
        taken += 1
        if taken <= k or taken % 2:
            return step(batch)
        with torch.no_grad():
            logits, labels, loss = replica._predict(batch.images, batch.labels)
        return sums(loss, logits, labels)

    replica.step = idle


def stops_updating(replica: Any, k: int) -> None:
    after(replica, k, lambda: setattr(replica, "_update", lambda: None))


def stops_communicating(replica: Any, k: int) -> None:
    after(replica, k, lambda: setattr(replica._forward, "require_backward_grad_sync", False))


def after(replica: Any, k: int, change: Callable[[], None]) -> None:
    step, taken = replica.step, 0

    def counted(batch: Batch) -> Any:
        nonlocal taken
        taken += 1
        if taken == k + 1:
            change()
        return step(batch)

    replica.step = counted


def drops_what_exceeds_chunks_of_16(replica: Any, k: int) -> None:
    step = replica.step

    def drop(batch: Batch) -> Any:
        result = step(Batch(batch.images[:16], batch.labels[:16], batch.size))  # type: ignore[index]
        return Sums((), result.tensor() * (batch.size / 16))

    replica.step = drop


def drops_half_of_a_batch(replica: Any, k: int) -> None:
    """For two steps only; the batch that it says it has trained on is whole."""
    step, taken = replica.step, 0

    def drop(batch: Batch) -> Any:
        nonlocal taken
        taken += 1
        half = batch.size // 2 if k < taken <= k + 2 else batch.size
        return step(Batch(batch.images[:half], batch.labels[:half], batch.size))  # type: ignore[index]

    replica.step = drop


def rounds_to_fp8(replica: Any, k: int) -> None:
    update = replica._update

    def rounded() -> None:
        for parameter in replica._module.parameters():
            parameter.grad.copy_(parameter.grad.to(torch.float8_e4m3fn))
        update()

    replica._update = rounded


def keeps_the_last_batch_only(replica: Any, k: int) -> None:
    evaluate = replica.evaluate

    def last(batches: Any) -> Any:
        total = None
        for batch in batches:
            total = evaluate([batch])
        return total

    replica.evaluate = last


def evaluates_with_first_statistics(replica: Any, k: int) -> None:
    evaluate, module = replica.evaluate, replica._module
    first = {name: buffer.clone() for name, buffer in module.named_buffers()}

    def stale(batches: Any) -> Any:
        own = {name: buffer.clone() for name, buffer in module.named_buffers()}
        module.load_state_dict(first, strict=False)
        result = evaluate(batches)
        module.load_state_dict(own, strict=False)
        return result

    replica.evaluate = stale


def keeps_its_statistics(replica: Any, k: int) -> None:
    def freeze() -> None:
        for module in replica._module.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.momentum = 0.0

    after(replica, k, freeze)


def counts_no_bytes(replica: Any, k: int) -> None:
    replica._count_step = None


def scales_gradients(factor: float) -> Fault:
    """Before the update, so that the update is that of these gradients."""

    def fault(replica: Any, k: int) -> None:
        update, taken = replica._update, 0

        def scaled() -> None:
            nonlocal taken
            taken += 1
            for parameter in replica._module.parameters():
                if taken > k:
                    parameter.grad.mul_(factor)
            update()

        replica._update = scaled

    return fault


def scales_rate(factor: float) -> Fault:
    def fault(replica: Any, k: int) -> None:
        (group,) = replica._optimizer.param_groups
        after(replica, k, lambda: group.update(lr=group["lr"] * factor))

    return fault


def forgets(replica: Any, k: int) -> None:
    """The optimizer's state is lost before every step but the first k."""
    before_each(replica, k, replica._optimizer.state.clear)


def remembers_nothing(replica: Any, k: int) -> None:
    """It is lost after every step but the first k, so that nothing of it is ever seen between two steps."""
    update, taken = replica._update, 0

    def forgetful() -> None:
        nonlocal taken
        taken += 1
        update()
        if taken > k:
            replica._optimizer.state.clear()

    replica._update = forgetful


def before_each(replica: Any, k: int, change: Callable[[], None]) -> None:
    step, taken = replica.step, 0

    def changed(batch: Batch) -> Any:
        nonlocal taken
        taken += 1
        if taken > k:
            change()
        return step(batch)

    replica.step = changed


def reduces_as_well(replica: Any, k: int) -> None:
    """What `dist.reduce` sends is not known; what it reports beside that is wrong."""
    before_each(replica, k, lambda: dist.reduce(torch.ones(1000), 0))


FAULTS: list[tuple[Fault, int, set[str]]] = [
    (idles_every_other_step, 5, {"gradients", "samples"}),
    (stops_updating, 5, {"update"}),
    (stops_communicating, 10, {"gradients", "copies"}),
    (drops_what_exceeds_chunks_of_16, 0, {"gradients", "samples"}),
    (drops_half_of_a_batch, 9, {"samples"}),
    (rounds_to_fp8, 0, {"rounding"}),
    (keeps_the_last_batch_only, 0, {"evaluation loss", "evaluation accuracy"}),
    (counts_no_bytes, 0, {"bytes"}),
]


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> list[set[str]]:
    """What failed of each of `FAULTS`, on two ranks."""
    run = configure(*SMALL, "strategy=ddp", "devices=2")
    mutants = [(fault, k) for fault, k, _ in FAULTS]
    return list(map(failed, run_ranks(on_ranks, 2, tmp_path_factory.mktemp("ranks"), run, mutants)[0]))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(FAULTS)), ids=[fault.__name__ for fault, *_ in FAULTS])
def test_a_fault_is_caught(number: int, faulty: list[set[str]]) -> None:
    assert FAULTS[number][2] <= faulty[number]


def stays_right(replica: Any, k: int) -> None: ...


def drifts_on_the_last_rank(replica: Any, k: int) -> None:
    """One value of what others hold, too, by far less than any loss shows."""

    def drift() -> None:
        with torch.no_grad():
            next(filter(torch.numel, replica.copied())).view(-1)[0] += 1e-6

    if dist.get_rank() == dist.get_world_size() - 1:
        after(replica, k, drift)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["strategy=hsdp", "strategy.shard=2"],
        ["strategy=hsdp", "strategy.shard=2", "model=vit_tiny"],  # its class token has fewer rows than shards
        ["strategy=dp_pp"],
    ],
    ids=["hsdp", "hsdp-vit", "dp_pp"],
)
def test_copies_of_shards_and_stages_are_compared(options: list[str], tmp_path: Path) -> None:
    run = configure(*SMALL, *options, "devices=4", "epochs=1")
    right, wrong = run_ranks(on_ranks, 4, tmp_path, run, [(stays_right, 0), (drifts_on_the_last_rank, 5)])[0]
    assert "copies" in passed(right)
    assert "copies" in failed(wrong)


def test_copies_are_compared_within_their_group() -> None:
    shards = [(0, 1, 1), (1, 2, 2), (0, 1, 1), (1, 2, 2)]
    assert _unlike(shards) == (4, 0)
    assert _unlike([*shards[:3], (1, 2, 3)]) == (4, 1)
    assert _unlike([(0, 1, 1), (1, 2, 2), (2, 3, 3)]) == (0, 0), "nobody holds a copy"
    assert _unlike([(0, 1, 1), (0, 1, 1), (1, 5, 5)]) == (2, 0)


@pytest.mark.slow
def test_a_fault_that_begins_after_any_step_is_caught(tmp_path: Path) -> None:
    run = configure(*SMALL, "strategy=ddp", "devices=2")
    kinds = [idles_every_other_step, stops_updating, stops_communicating]
    mutants = [(fault, random.randrange(TRAINED + 1)) for fault in kinds]
    for (fault, k), rows in zip(mutants, run_ranks(on_ranks, 2, tmp_path, run, mutants)[0], strict=True):
        assert failed(rows), f"{fault.__name__} after {k} steps"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "seen"),
    [(evaluates_with_first_statistics, "evaluation loss"), (keeps_its_statistics, "buffers")],
)
def test_stale_statistics_are_caught(fault: Fault, seen: str) -> None:
    run = configure(*NORMED, "strategy=single")
    assert failed(closed(World(), run)) == set()
    assert seen in failed(closed(World(), run, fault, 7))


def test_bytes_are_not_compared_where_some_operation_is_unknown(tmp_path: Path) -> None:
    run = configure(*SMALL, "strategy=ddp", "devices=2")
    (rows,) = run_ranks(on_ranks, 2, tmp_path, run, [(reduces_as_well, TRAINED)])[0]
    assert failed(rows) == set()
    (row,) = [row for row in rows if row["check"] == "bytes"]
    assert (row["passed"], row["detail"].rpartition(": ")[2]) == (None, "c10d::reduce")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("factor", [0.5, 2.0, 1e-9, 0.0])
def test_gradients_of_another_size_are_caught(factor: float, precision: str) -> None:
    run = configure(*SMALL, "strategy=single", f"precision={precision}")
    assert "gradients" in failed(closed(World(), run, scales_gradients(factor), 3))


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize(
    ("fault", "k"),
    [(scales_rate(0.5), 10), (scales_rate(0.1), 1), (scales_rate(1.01), 3), (forgets, 3), (remembers_nothing, 3)],
    ids=["half the rate", "a tenth of the rate", "1 % more", "forgets", "remembers nothing"],
)
def test_an_update_of_another_size_is_caught(fault: Fault, k: int, optimizer: str) -> None:
    run = configure(*SMALL, "strategy=single", f"optimizer={optimizer}", "optimizer.lr=0.01")
    assert failed(closed(World(), run, fault, k)) == {"update"}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("model", ["mlp", "resnet_batch", "vit_tiny"])
@pytest.mark.parametrize("strategy", SHIPPED)
@pytest.mark.cases("*-mlp-fp32", "ddp-*-bf16", "zero1-resnet_batch-fp32")
def test_every_shipped_strategy_passes(strategy: str, model: str, precision: str, tmp_path: Path) -> None:
    models = {
        "mlp": ["model=mlp"],
        "resnet_batch": ["model=resnet_tiny", "model.norm=batch"],
        "vit_tiny": ["model=vit_tiny"],
    }
    for size in (2, 4):
        try:
            options = [f"strategy={strategy}", f"devices={size}", f"precision={precision}", "data.image_size=32"]
            options += OVERRIDES.get(strategy, [])
            full = ["batch_size=384"] if strategy == "sandblaster_lbfgs" else []
            run = configure(*DATA, *models[model], "epochs=1", *options, *full)
            break
        except ConfigError as error:
            refused = error
    else:
        pytest.skip(f"refused: {refused}")
    (rows,) = run_ranks(on_ranks, run.strategy.processes(run, "cpu"), tmp_path, run, None)[0]
    assert not failed(rows), [row for row in rows if row["passed"] is False]
    assert {"evaluation loss", "evaluation accuracy"} <= passed(rows)
    if run.strategy.equals_one_device(run):
        assert {"loss", "bytes"} <= passed(rows)
        assert strategy == "sandblaster_lbfgs" or {"gradients", "update", "rounding"} <= passed(rows)
    else:
        assert {row["check"]: row["passed"] for row in rows if row["check"] in ("steps", "bytes")} == {
            "steps": None,
            "bytes": None,
        }


def test_single_is_held_against_plain_code_too() -> None:
    run = configure(*SMALL, "strategy=single")
    assert isinstance(run.strategy, Single)
    rows = closed(World(), run)
    assert passed(rows) >= {"evaluation loss", "evaluation accuracy", "loss", "gradients", "update"}
    assert [row["step"] for row in rows if row["check"] == "gradients"] == [TRAINED + n for n in range(1, STEPS + 1)]
    (unchecked,) = [row for row in rows if row["check"] == "bytes"]
    assert unchecked["passed"] is None
    assert failed(closed(World(), run, idles_every_other_step, 3)) >= {"gradients"}


def test_a_tensor_without_a_gradient_may_stay_where_it_began() -> None:
    """An attention's key bias begins at zero, and its gradient is rounding; fp16 makes it zero."""
    before = {"weight": torch.ones(3), "key_bias": torch.zeros(3)}
    gradients = {"weight": torch.ones(3).double(), "key_bias": torch.full((3,), 1e-17).double()}
    for after, stayed in ((before | {"weight": torch.zeros(3)}, 0), (before, 1)):
        assert unmoved(before, after, gradients, lr=0.1) == stayed
    small = gradients | {"key_bias": torch.full((3,), 1e-6).double()}
    assert unmoved(before, before, small, lr=0.1) == 2, "a small gradient is none too small"


@pytest.mark.slow
def test_the_limit_follows_what_the_number_format_does() -> None:
    """In bf16 gradients differ from fp64's by some per cent already on one device, and the limit says so."""
    limits = {}
    for precision in ("fp64", "fp32", "bf16"):
        run = configure(*SMALL, "strategy=single", f"precision={precision}")
        (row,) = [row for row in closed(World(), run) if row["check"] == "rounding"]
        assert row["difference"] <= row["limit"] / MARGIN
        limits[precision] = row["limit"]
    assert limits["fp64"] < limits["fp32"] < limits["bf16"] < 1


def test_a_checksum_depends_on_every_bit_and_place() -> None:
    values = torch.randn(1000)
    other = values.clone()
    other.view(torch.int32)[500] ^= 1
    assert checksum([values]) == checksum([values.clone()])
    distinct = [[values], [other], [values.flip(0)], [values[:500], values[500:].flip(0)], [values.double()]]
    assert len({checksum(tensors) for tensors in distinct}) == len(distinct)
    assert checksum([values.bfloat16()]) != checksum([values.half()])


def test_a_difference_of_names_or_shapes_is_infinite_and_a_nan_stays() -> None:
    one = {"a": torch.ones(3), "b": torch.ones(2)}
    assert relative_difference(one, one) == 0.0
    assert relative_difference({"a": torch.ones(3)}, one) == float("inf")
    assert relative_difference({"a": torch.ones(3), "b": torch.ones(3)}, one) == float("inf")
    assert not relative_difference({"a": torch.ones(3), "b": torch.tensor([1.0, torch.nan])}, one) <= 1e9
    assert relative_difference({"a": torch.ones(3), "b": torch.full((2,), 1.5)}, one) == pytest.approx(0.5)
    tiny = {"a": torch.ones(4), "b": torch.zeros(2)}
    assert relative_difference(tiny | {"b": torch.tensor([1e-3, 0.0])}, tiny) == pytest.approx(1e-3 / 0.02)
