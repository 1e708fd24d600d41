"""Checkpoints: what a replica saves is all that it needs, and what a disk has spoiled is never used."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch

from parallelbench.config.replica import Replica
from parallelbench.config.run import RunConfig
from parallelbench.errors import ConfigError, StorageError
from parallelbench.results.attempt import Attempt, Outcome
from parallelbench.results.folder import file_sha256
from parallelbench.results.journal import kept_entries
from parallelbench.results.publish import run_row
from parallelbench.strategies.state import load_optimizer, optimizer_state
from parallelbench.training.checkpoint import AUTO_MARGIN, Checkpoints, EpochBoundary, Key, Policy, Resumed, difference
from parallelbench.training.failure import classify
from parallelbench.world.numerics import Numerics
from parallelbench.world.world import World
from tests.analysis.factory import Fake, begin, component, config, write_epochs
from tests.faults import fault
from tests.helpers import torchs_strategies
from tests.ranks import run_ranks
from tests.strategies.test_odd_models import odd_run
from tests.strategies.test_parity import run_of
from tests.strategies.training import configure, loader_of, prepared

EPOCHS = 2
"""Before saving, and again after loading."""
SYNTHETIC = ("data=synthetic", "data.channels=1", "data.train_samples=96", "data.test_samples=37", "data.image_size=32")
MLP = ("model=mlp",)
OWN = {
    # In fp32, in which torch would round the fp64 numbers of its state.
    "sandblaster_lbfgs": ("optimizer=lbfgs", "optimizer.lr=1.0", "batch_size=96", "precision=fp32"),
    "downpour": ("optimizer=adagrad",),
    "parameter_server": ("optimizer=adam",),
}
"""What a strategy needs besides its file; others train with momentum."""
REORDERED = ("ring_ddp",)
"""DDP lays its buckets out anew after its first step, and a ring rounds by where in a bucket a value is."""
ON_GPUS = ("data_parallel",)
SHIPPED = [name for name in torchs_strategies() if name not in ON_GPUS]


TOKENS = ("data=tokens", "data.train_samples=96", "data.test_samples=37", "model.layers=2")
SEQUENCES = (*TOKENS, "model=gpt_tiny")
MODELS = {
    "expert_parallel": (*TOKENS, "model=gpt_moe_tiny"),
    **dict.fromkeys(("context_parallel", "fsdp_cp"), SEQUENCES),
}


def small(strategy: str, *overrides: str) -> RunConfig:
    """The strategy on as few devices as it takes."""
    sizes = MODELS.get(strategy, (*SYNTHETIC, *MLP))
    own = OWN.get(strategy, ("optimizer=sgd", "optimizer.momentum=0.9"))
    for devices in (1, 2, 4, 8):
        with contextlib.suppress(ConfigError):
            return configure(*sizes, *own, f"strategy={strategy}", f"devices={devices}", *overrides)
    raise AssertionError(f"{strategy} refuses 1 to 8 devices")


def train(replica: Replica, run: RunConfig, epochs: range) -> list[Any]:
    """What the loop does with a replica; loaders are made anew, as they have no state."""
    losses = []
    for epoch in epochs:
        loader = loader_of(replica, run)
        results = [replica.step(batch) for batch in loader.train(epoch)]
        evaluated = replica.evaluate(loader.test())
        losses.append([None if result is None else result.tolist() for result in [*results, evaluated]])
        replica.take_pushes()
    return losses


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    return loaded


def interrupted(
    rank: int, size: int, run: RunConfig, *, warm: bool = False
) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
    """Losses and final state of training straight on, and of training that was saved and loaded half-way.

    `warm`: what goes on has taken a step before it loads.
    """
    torch.use_deterministic_algorithms(True)
    first, second = range(1, EPOCHS + 1), range(EPOCHS + 1, 2 * EPOCHS + 1)
    replica = prepared(run, rank, size)
    train(replica, run, first)
    saved = through_a_file(replica.local_state())
    # What training goes on with must not reach what was saved.
    straight = train(replica, run, second), flat(replica.local_state())
    other = prepared(run, rank, size)
    if warm:
        other.step(next(loader_of(other, run).train(epoch=1)))
    other.load_local_state(saved)
    same = equal(flat(other.local_state()), flat(saved))
    assert same, "what is loaded is what was saved"
    resumed = train(other, run, second), flat(other.local_state())
    return *straight, *resumed


def flat(state: Any) -> list[Any]:
    """Everything in it, in a fixed order; tensors as copies."""
    if isinstance(state, torch.Tensor):
        return [state.detach().clone()]
    if isinstance(state, dict):
        return [item for key in sorted(state, key=str) for item in (key, *flat(state[key]))]
    return [item for value in state for item in flat(value)] if isinstance(state, (list, tuple)) else [state]


def equal(a: list[Any], b: list[Any]) -> bool:
    def same(x: Any, y: Any) -> bool:
        return torch.equal(x, y) if isinstance(x, torch.Tensor) else bool(x == y)

    return len(a) == len(b) and all(map(same, a, b))


OPTIONS = {
    # Running statistics, and Adam's moments.
    "resnet_sync 1 single": "optimizer=adam",
    "resnet_sync 2 zero1": "optimizer=adam",
    "gpt_32 2 context_parallel": "strategy.exchange=all_to_all optimizer.momentum=0.9",
    "gpt_32 4 fsdp_cp": "strategy.exchange=ring optimizer.momentum=0.9",
    "gpt 4 dp_tp": "by_vocabulary by_tokens tied optimizer=adam",
    "gpt 4 dp_pp_tp": "by_vocabulary by_tokens optimizer=adam",
    "moe 4 expert_parallel": "strategy.expert_ranks=2 optimizer=adam",
}
"""Model, devices and strategy, as in the table of trainings → options."""
WARM = ("moe 4 expert_parallel",)
"""On four ranks DDP's own sums round by where in a bucket a value is: both sides have the buckets of later steps."""


@pytest.mark.slow
@pytest.mark.parametrize("case", [*SHIPPED, *OPTIONS])
@pytest.mark.cases("ddp", "fsdp", "pipeline", "sandblaster_lbfgs", "dp_tp", "*single", "*context_parallel")
def test_training_that_was_interrupted_is_bitwise_the_same(case: str, tmp_path: Path) -> None:
    if case in OPTIONS:
        model, devices, strategy = case.split()
        run = run_of(model, strategy, int(devices), OPTIONS[case])
    else:
        run = small(strategy := case)
    size, train = run.strategy.processes(run, "cpu"), partial(interrupted, warm=case in WARM)
    for losses, state, losses_resumed, state_resumed in run_ranks(train, size, tmp_path, run):
        if not run.strategy.equals_one_device(run) and size > 2:
            continue  # arrivals differ from one training to the next
        if strategy in REORDERED:
            assert torch.allclose(*map(numbers, (losses_resumed, losses)), rtol=1e-12, atol=0)
            continue
        assert losses_resumed == losses
        assert equal(state_resumed, state)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp", "pipeline"])
@pytest.mark.cases("single")
def test_generators_and_numbers_that_a_model_owns_go_on_bitwise(strategy: str, tmp_path: Path) -> None:
    """torch's, NumPy's and Python's generators in attributes, and a count of calls."""
    run = odd_run(strategy, "own_generators", "optimizer.momentum=0.9")
    size = run.strategy.processes(run, "cpu")
    found = [interrupted(0, 1, run)] if size == 1 else run_ranks(interrupted, size, tmp_path, run)
    for losses, state, losses_resumed, state_resumed in found:
        assert losses_resumed == losses
        assert equal(state_resumed, state)


def test_a_warm_up_draws_nothing_from_generators_that_a_model_owns() -> None:
    run = odd_run("single", "own_generators")
    replica = prepared(run)
    before = flat(replica.local_state())
    replica.compile_warmup(next(loader_of(replica, run).train(epoch=1)))
    assert equal(flat(replica.local_state()), before)


SGD = ("optimizer=sgd", "optimizer.momentum=0.9", "precision=fp32")


def resume(replica: Replica, state: dict[str, Any]) -> None:
    """What an attempt does that goes on."""
    Resumed(1, {"replica": through_a_file(state), "random": World().random_state()}, [], World()).restore(replica)


@fault(
    "lifecycle",
    "A resume loses what training goes on from",
    injection="after the state is loaded, the optimizer has no momentum, other numbers in one parameter, or another "
    "rate",
    outcome="error with what is lost, before the next epoch; a replica that loads everything goes on",
)
@pytest.mark.parametrize(
    ("place", "lose"),
    [
        ("optimizer.plain.0", lambda replica: replica._optimizer.state.clear()),
        ("optimizer.groups.0.lr", lambda replica: replica._optimizer.param_groups[0].update(lr=0.3)),
        ("tensors.fc2.linear.bias", lambda replica: replica._module.fc2.linear.bias.data.add_(1)),
    ],
    ids=["momentum", "rate", "parameter"],
)
def test_what_a_resume_loses_is_an_error(place: str, lose: Callable[[Any], None]) -> None:
    run = configure(*SYNTHETIC, *MLP, "strategy=single", "devices=1", *SGD)
    replica = prepared(run)
    train(replica, run, range(1, 2))
    saved = replica.local_state()
    resume(other := prepared(run), saved)  # the honest twin
    assert equal(flat(other.local_state()), flat(saved))
    lossy: Any = prepared(run)
    load = lossy.load_local_state
    lossy.load_local_state = lambda state: (load(state), lose(lossy))
    with pytest.raises(ConfigError, match=place):
        resume(lossy, saved)


def numbers(losses: list[Any]) -> torch.Tensor:
    return torch.tensor([value for value in flat(losses) if value is not None], dtype=torch.float64)


@pytest.mark.cases("parameter_server")
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["parameter_server", "downpour"])
def test_what_arrives_in_any_order_is_kept_exactly(strategy: str, tmp_path: Path) -> None:
    """Two workers: `interrupted` itself asserts that each rank loads what it saved; training on reaches the end."""
    options = ["strategy.mode=async", "strategy.n_push=2", "strategy.n_fetch=3"]
    run = configure(*SYNTHETIC, *MLP, "optimizer=adagrad", f"strategy={strategy}", "devices=3", *options)
    run_ranks(interrupted, 3, tmp_path, run)


def test_data_need_no_state() -> None:
    """What an epoch's batches are follows from seed and epoch: a fresh loader yields those of the one that went on."""
    run = configure(*SYNTHETIC, *MLP, "strategy=single", "devices=1")
    replica = prepared(run, 0, 1)
    went_on, anew = loader_of(replica, run), loader_of(replica, run)
    for epoch in (1, 2):
        assert len(list(went_on.train(epoch))) == run.steps_per_epoch
    batches = zip(went_on.train(3), anew.train(3), strict=True)
    assert all(equal([a.images, a.labels], [b.images, b.labels]) for a, b in batches)


def test_the_scale_of_the_loss_is_kept() -> None:
    numerics, other = Numerics("fp16", "cpu"), Numerics("fp16", "cpu")
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    numerics.scale(model(torch.full((1, 2), float("inf"))).sum()).backward()
    numerics.update(optimizer)  # an infinite gradient halves the scale
    other.load_local_state(through_a_file(numerics.local_state()))
    assert other.local_state() == numerics.local_state() != Numerics("fp16", "cpu").local_state()


# --- on disk


ALONE = World()
STATE = {"replica": {"x": torch.arange(5.0)}, "list": [1, None, "text"]}
UNUSED = "the checkpoint after epoch 1 of attempt 1 was not used: it is damaged, or of another version of the suite"


def newest(checkpoints: Checkpoints, usable: Callable[[Key], bool] = lambda key: True) -> tuple[Key, Any, list[Any]]:
    found = checkpoints.newest(lambda key: [] if usable(key) else None)
    assert found is not None
    return found


def test_the_last_two_are_kept_and_a_newer_attempts_are_left_alone(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, ALONE)
    assert checkpoints.newest(lambda key: []) is None
    for epoch in (1, 2, 3):
        assert checkpoints.save(Key(1, epoch), STATE) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["attempt-1-epoch-2", "attempt-1-epoch-3"]
    assert checkpoints.save(Key(2, 3), STATE) is None
    (tmp_path / "attempt-2-epoch-4").mkdir()  # about to be written
    assert checkpoints.save(Key(1, 4), STATE) is None, "by an attempt that was taken for dead"
    assert {path.name for path in tmp_path.iterdir()} >= {"attempt-2-epoch-3", "attempt-2-epoch-4"}
    found = newest(checkpoints)
    assert found[0] == Key(2, 3), "the newest attempt's, whatever others did meanwhile"
    assert equal(flat(found[1]), flat(STATE))


def test_what_is_unusable_is_passed_over_and_named(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, ALONE)
    for epoch in (9, 10):
        checkpoints.save(Key(1, epoch), STATE)
    found = newest(checkpoints, lambda key: key.epoch < 10)
    assert (found[0], checkpoints.damaged) == (Key(1, 9), [Key(1, 10)])


def test_a_checkpoint_that_was_never_finished_is_none(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, ALONE)
    checkpoints.save(Key(1, 1), STATE)
    checkpoints.save(Key(1, 2), STATE)
    (tmp_path / "attempt-1-epoch-2" / "manifest.json").unlink()
    (tmp_path / "attempt-x-epoch-3").mkdir()
    found = newest(checkpoints)
    assert (found[0], checkpoints.damaged) == (Key(1, 1), [])


def test_the_checkpoint_of_another_number_of_ranks_is_not_used(tmp_path: Path) -> None:
    Checkpoints(tmp_path, ALONE).save(Key(1, 1), STATE)
    manifest = tmp_path / "attempt-1-epoch-1" / "manifest.json"
    digest = json.loads(manifest.read_bytes())["sha256"][0]
    manifest.write_text(json.dumps({"sha256": [digest, digest]}))
    assert Checkpoints(tmp_path, ALONE).newest(lambda key: []) is None


LACKING = [
    MemoryError(),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:128] DefaultCPUAllocator: can't allocate memory: you tried to allocate"
    ),
]


@fault(
    "storage and input",
    "Memory is short while a checkpoint is read",
    injection="reading a rank's file raises what Python, and what torch's allocator, says of a lack of memory",
    outcome="oom: the run does not begin anew, and the checkpoint stays",
)
@pytest.mark.parametrize("lacking", LACKING, ids=["Python", "torch"])
def test_a_checkpoint_that_memory_was_too_short_for_is_not_passed_over(tmp_path: Path, lacking: Exception) -> None:
    Checkpoints(tmp_path, ALONE).save(Key(1, 40), STATE)
    checkpoints = Checkpoints(tmp_path, ALONE)
    with mock.patch.object(World, "read_state", side_effect=lacking), pytest.raises(type(lacking)) as caught:
        checkpoints.newest(lambda key: [])
    assert classify(caught.value)[0] == "oom"
    assert newest(checkpoints)[0] == Key(1, 40)


def test_what_was_only_unread_is_never_deleted(tmp_path: Path) -> None:
    """What another version of torch wrote may be read by that version again; what is spoiled, by nobody."""
    for epoch in (1, 2):
        Checkpoints(tmp_path, ALONE).save(Key(1, epoch), STATE)
    (tmp_path / "attempt-1-epoch-2" / "rank0.pt").write_bytes(b"spoiled")
    checkpoints = Checkpoints(tmp_path, ALONE)
    with mock.patch.object(World, "read_state", side_effect=RuntimeError("of another version")):
        assert checkpoints.newest(lambda key: []) is None
    for epoch in (3, 4, 5):
        assert checkpoints.save(Key(2, epoch), STATE) is None
    assert {path.name for path in tmp_path.iterdir()} == {
        f"attempt-{key}" for key in ("1-epoch-1", "2-epoch-4", "2-epoch-5")
    }


def test_nothing_in_a_checkpoint_is_executed(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, ALONE)
    checkpoints.save(Key(1, 1), {"replica": Path("/")})
    assert checkpoints.newest(lambda key: []) is None, "torch.load takes tensors and plain data only"


@pytest.mark.slow
def test_ranks_agree_on_the_newest_that_is_whole_everywhere(tmp_path: Path) -> None:
    assert run_ranks(disagreeing, 2, tmp_path, tmp_path / "checkpoints") == [(1, [3, 2], 7)] * 2


def disagreeing(rank: int, size: int, folder: Path) -> tuple[int, list[int], int]:
    world = World(rank=rank, size=size)
    checkpoints = Checkpoints(folder, world)
    for epoch in (1, 2, 3):
        with mock.patch("parallelbench.training.checkpoint.KEPT", 3):
            assert checkpoints.save(Key(1, epoch), {"epoch": epoch, "rank": rank}) is None
    world.barrier()
    (folder / f"attempt-1-epoch-{3 - rank}" / f"rank{rank}.pt").write_bytes(b"spoiled")
    world.barrier()
    found = newest(checkpoints)
    assert found[1] == {"epoch": 1, "rank": rank}
    return found[0].epoch, [key.epoch for key in checkpoints.damaged], failing_save(rank, world, folder)


def failing_save(rank: int, world: World, folder: Path) -> int:
    """One rank can't write its file: nothing of the checkpoint stays, and rank 0 says so."""
    problem = Checkpoints(folder, world).save(Key(1, 7), Unwritable() if rank else {"x": 1})
    assert problem is not None
    world.barrier()
    assert not (folder / "attempt-1-epoch-7").exists()
    return 7


class Unwritable(dict[str, Any]):
    def __reduce_ex__(self, protocol: Any) -> Any:
        raise OSError(28, "No space left on device")


@fault(
    "storage and input",
    "What was written can't be read again, listed or deleted (a stale NFS handle)",
    injection="every reading, listing and deleting of checkpoints raises ESTALE while one is saved",
    outcome="training goes on; the checkpoint is whole, for its sha256 is that of the bytes that were written",
)
def test_saving_reads_nothing_back(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, ALONE)
    for epoch in (1, 2):
        checkpoints.save(Key(1, epoch), STATE)
    stale = mock.patch.multiple("parallelbench.training.checkpoint", file_sha256=_stale)
    with stale, mock.patch.object(os, "listdir", _stale):
        assert checkpoints.save(Key(1, 3), STATE) is None
        with mock.patch.object(Path, "unlink", _stale), mock.patch.object(World, "write_state", _stale):
            assert "Stale" in (checkpoints.save(Key(1, 4), STATE) or ""), "said in words, not raised"
    found = newest(checkpoints)
    assert (found[0], checkpoints.damaged) == (Key(1, 3), [])
    assert equal(flat(found[1]), flat(STATE))


def _stale(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))


@fault(
    "storage and input",
    "What a run goes on from can't be listed or read for the moment (a stale NFS handle)",
    injection="ESTALE for the folder of checkpoints, a manifest, a rank's file, or an earlier attempt's journal",
    outcome="storage, so submitting again tries again; the run neither ends as an error nor begins anew",
)
@pytest.mark.parametrize("name", ["checkpoints", "manifest.json", "rank0.pt", "journal-rank0.jsonl"])
def test_what_cannot_be_reached_when_a_run_goes_on_is_a_storage_error(tmp_path: Path, name: str) -> None:
    run = config(tmp_path, launcher=component("launcher", {"name": "local", "checkpoint": "always"}))
    _, attempt = begin(run, Fake())
    assert Checkpoints(attempt.checkpoints, ALONE).save(Key(1, 1), STATE) is None
    warned: list[str] = []
    boundary = EpochBoundary(run, attempt, ALONE, journal=mock.Mock(), warn=warned.append)

    def stale_there(genuine: Any) -> Any:
        return lambda path, *rest, **named: (_stale if Path(path).name == name else genuine)(path, *rest, **named)

    def read_and_taken(path: Path, *, through: int) -> list[Any]:
        kept_entries(path, through=through)
        return []

    with contextlib.ExitStack() as faults:
        faults.enter_context(mock.patch("parallelbench.training.checkpoint.kept_entries", read_and_taken))
        for each in ("stat", "listdir", "scandir"):
            faults.enter_context(mock.patch.object(os, each, stale_there(getattr(os, each))))
        faults.enter_context(mock.patch.object(io, "open", stale_there(open)))
        with pytest.raises(StorageError, match=f"can't read .*/{name}: Stale file handle") as caught:
            boundary.resume()
    assert (classify(caught.value)[0], warned) == ("storage", [])


def test_a_disk_that_stays_full_is_warned_of_once(tmp_path: Path) -> None:
    run = config(tmp_path, launcher=component("launcher", {"name": "local", "checkpoint": "always"}))
    _, attempt = begin(run, Fake())
    warned: list[str] = []
    journal, replica = mock.Mock(), mock.Mock(**{"local_state.return_value": STATE})
    boundary = EpochBoundary(run, attempt, ALONE, journal=journal, warn=warned.append)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with mock.patch.object(os, "fsync", side_effect=full):
        for epoch in range(1, 4):
            boundary.save(epoch, replica)
    assert len(warned) == 1
    assert warned[0].startswith("no checkpoint after epoch 1: can't write ")
    assert [call.args[0] for call in journal.event.call_args_list] == ["unsaved"] * 3
    assert boundary.saved == 0


def test_what_a_checkpoint_takes_is_in_the_result(tmp_path: Path) -> None:
    run = config(tmp_path, launcher=component("launcher", {"name": "local", "checkpoint": "always"}))
    _, attempt = begin(run, Fake())
    journal, replica = mock.Mock(), mock.Mock(**{"local_state.return_value": STATE})
    boundary = EpochBoundary(run, attempt, ALONE, journal=journal, warn=mock.Mock())
    boundary.save(1, replica)
    (event,) = journal.event.call_args_list
    (file,) = attempt.checkpoints.glob("*/rank*.pt")
    assert event.kwargs["bytes"] == file.stat().st_size
    done = Outcome(outcome="ok", reason="", finished_at=2.0)
    took = [{"event": "checkpoint", "save_s": save_s, "bytes": size} for save_s, size in ((3.0, 5), (1.0, 6), (2.0, 7))]
    row = run_row(run, attempt, done, took)
    assert (row["checkpoint_save_s"], row["checkpoint_bytes"]) == (2.0, 7), "the median, and the last one's"
    assert run_row(run, attempt, done, [])["checkpoint_bytes"] is None


@pytest.mark.parametrize(
    ("column", "is_used"), [("host_peak_rss_bytes", True), ("epoch_time_s", False), ("epoch", False)]
)
def test_a_run_goes_on_under_a_version_whose_further_columns_may_be_null(
    column: str, is_used: bool, tmp_path: Path
) -> None:
    run = config(tmp_path, launcher=component("launcher", {"name": "local", "checkpoint": "always"}))
    _, attempt = begin(run, Fake())
    write_epochs(run, attempt, Fake(), epochs=1)
    assert Checkpoints(attempt.checkpoints, ALONE).save(Key(1, 1), STATE) is None
    journal = attempt.path / "journal-rank0.jsonl"
    journal.write_text(journal.read_text().replace(f'"{column}":', '"unknown":'))
    warned: list[str] = []
    resumed = EpochBoundary(run, attempt, ALONE, journal=mock.Mock(), warn=warned.append).resume()
    assert (resumed is not None) == is_used
    assert warned == ([] if is_used else [UNUSED])


@pytest.mark.parametrize(
    ("model", "layer", "is_used"),
    [("gpt_tiny", "query", False), ("gpt_moe_tiny", "query", False), ("gpt_tiny", "qkv", True), ("vit", "query", True)],
)
def test_a_language_model_does_not_go_on_from_layers_that_it_has_no_more(
    model: str, layer: str, is_used: bool, tmp_path: Path
) -> None:
    run = config(tmp_path, model=model, launcher=component("launcher", {"name": "local", "checkpoint": "always"}))
    _, attempt = begin(run, Fake())
    write_epochs(run, attempt, Fake(), epochs=1)
    state = {"replica": {"tensors": {f"block1.attention.{layer}.weight": torch.ones(2)}}}
    assert Checkpoints(attempt.checkpoints, ALONE).save(Key(1, 1), state) is None
    warned: list[str] = []
    resumed = EpochBoundary(run, attempt, ALONE, journal=mock.Mock(), warn=warned.append).resume()
    assert (resumed is not None, warned) == (is_used, [] if is_used else [UNUSED])


def test_a_file_of_a_checkpoint_that_the_disk_has_lost_is_passed_over(tmp_path: Path) -> None:
    """Trying again would not help: the checkpoint before it does."""
    checkpoints = Checkpoints(tmp_path, ALONE)
    for epoch in (1, 2, 3):
        with mock.patch("parallelbench.training.checkpoint.KEPT", 3):
            checkpoints.save(Key(1, epoch), STATE)
    (tmp_path / "attempt-1-epoch-3" / "rank0.pt").unlink()
    spoiled = tmp_path / "attempt-1-epoch-2" / "rank0.pt"

    def bad_sector(path: Path) -> str:
        if path == spoiled:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return file_sha256(path)

    with mock.patch("parallelbench.training.checkpoint.file_sha256", bad_sector):
        found = newest(checkpoints)
    assert (found[0], checkpoints.damaged) == (Key(1, 1), [Key(1, 3), Key(1, 2)])


# --- when


def policy(tmp_path: Path, *, epochs: int = 10, clock: list[float], **launcher: Any) -> tuple[Policy, Attempt]:
    options = {"name": "local", "checkpoint_every_s": 10.0} | launcher
    run = config(tmp_path, epochs=epochs, launcher=component("launcher", options))
    _, attempt = begin(run, Fake())
    info = attempt.info()
    assert info is not None
    clock[0] += info.launched_at
    return Policy(run, attempt, clock=lambda: clock[0]), attempt


@pytest.mark.parametrize(
    ("limit_s", "saves"),
    [(None, False), (1000.0, False), (90.0 * AUTO_MARGIN + 1, False), (90.0 * AUTO_MARGIN - 1, True), (10.0, True)],
)
def test_auto_saves_where_the_limit_leaves_no_margin_over_what_the_run_seems_to_take(
    tmp_path: Path, limit_s: float | None, saves: bool
) -> None:
    clock = [0.0]
    decide, _ = policy(tmp_path, clock=clock, checkpoint="auto", timeout_s=limit_s)
    found = []
    for epoch in range(1, 11):
        clock[0] += 10 if epoch > 1 else 0  # no start-up: the first epoch ends at once, and took 10 s
        found.append(decide.after(epoch, 10.0))
    assert found[0] == (False, False), "not so soon"
    assert found[1:-1] == [(False, saves)] * 8
    assert found[-1] == (False, False), "the result follows"


def test_auto_begins_to_save_where_epochs_turn_out_longer_and_does_not_end_where_they_get_shorter(
    tmp_path: Path,
) -> None:
    clock = [0.0]
    decide, _ = policy(tmp_path, clock=clock, checkpoint="auto", timeout_s=150.0)
    found = []
    for epoch, took_s in enumerate((10.0, 10.0, 20.0, 20.0, 10.0), start=1):
        clock[0] += took_s
        found.append(decide.after(epoch, took_s)[1])
    assert found == [False, False, True, True, True], "40 s have passed, and 7 epochs of 20 s are left"


@pytest.mark.parametrize(("left_min", "saves"), [(None, False), (60, False), (45, True)])
def test_auto_counts_what_a_job_did_before_its_run_began(tmp_path: Path, left_min: int | None, saves: bool) -> None:
    """Ten epochs of 270 s fit into a job of an hour, but not into what its set-up left of it."""
    launcher = component("launcher", {"name": "slurm", "time_limit_min": 60, "checkpoint_every_s": 100.0})
    run = config(tmp_path, epochs=10, launcher=launcher)
    _, attempt = begin(run, Fake())
    info = attempt.info()
    assert info is not None
    ends_at = None if left_min is None else info.launched_at + 60 * left_min
    described = msgspec.structs.replace(info, job_ends_at=ends_at)
    (attempt.path / "attempt.json").write_bytes(msgspec.json.encode(described))
    clock = [info.launched_at]
    decide = Policy(run, attempt, clock=lambda: clock[0])
    found = []
    for epoch in (1, 2):
        clock[0] += 270
        found.append(decide.after(epoch, 270.0)[1])
    assert found == [saves, saves]


def test_so_long_passes_between_two_checkpoints(tmp_path: Path) -> None:
    clock = [0.0]
    decide, attempt = policy(tmp_path, clock=clock, checkpoint="always")
    found = []
    for epoch in range(1, 7):
        clock[0] += 4
        found.append(decide.after(epoch, 4.0)[1])
    assert found == [False, False, True, False, False, True]
    attempt.ask_to_stop()
    assert decide.after(7, 4.0) == (True, True)
    assert decide.after(10, 4.0) == (False, False), "all epochs are done"


def test_never_is_never(tmp_path: Path) -> None:
    decide, attempt = policy(tmp_path, clock=[0.0], checkpoint="never", timeout_s=1.0)
    assert decide.after(1, 100.0) == (False, False)
    attempt.ask_to_stop()
    assert decide.after(2, 100.0) == (True, False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.float32])
def test_an_optimizers_state_keeps_its_format(dtype: torch.dtype) -> None:
    """Own optimizers keep momenta in halves, or in doubles; torch would give them their parameter's format."""
    weights = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    saving, loading = (torch.optim.SGD([weight], lr=0.1, momentum=0.9) for weight in weights)
    saving.state[weights[0]]["momentum_buffer"] = torch.tensor([0.1, 0.2, 0.3], dtype=dtype)
    load_optimizer(loading, optimizer_state(saving))
    assert difference(optimizer_state(saving), optimizer_state(loading)) == ""
