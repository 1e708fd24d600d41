"""Parity takes no more memory than the training, or little, in every shipped sweep: by the counter."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

import conf
from analysis.advisor.memory import suite_peak_bytes
from analysis.advisor.strategies import SuiteJob
from launch.sweep import expand, one_run
from parallelbench.config.run import RunConfig
from parallelbench.data.tokens import Tokens
from parallelbench.models.gpt import Gpt
from parallelbench.models.moe import GptMoe
from parallelbench.optim.optimizers import Lbfgs
from parallelbench.strategies.tensor import divides_sequence, divides_vocabulary
from parallelbench.training.checks.comparability import as_reference
from parallelbench.training.checks.excerpt import SMALL_BYTES, excerpt
from parallelbench.training.checks.parity import as_checked, checks_parity
from tests.advisor.machine import machine

pytestmark = pytest.mark.slow

FILES = (Path(conf.__file__).parent / "sweep").glob("*.yaml")
TEXTS = {path.stem: path.read_text() for path in FILES}
ABOVE = {"tutorial_mlp": 2.54 * 2**30}
"""What takes more than the bound: an MLP of 38 million parameters under Adam, whole in fp64, twice; most by
`data_parallel`, which has its gradients twice.
"""
SWEEPS = sorted(name for name, text in TEXTS.items() if "model: gpt" in text or "model: mpt" in text)


@pytest.mark.exhaustive
@pytest.mark.parametrize("sweep", SWEEPS)
def test_the_check_takes_no_more_memory_than_the_training(sweep: str) -> None:
    runs = [planned.run for planned in expand([f"sweep={sweep}", "sweep.repeats=1"])]
    for run in runs:
        if isinstance(run.model, Gpt) and checks_parity(run):
            assert_fits(run)


@pytest.mark.exhaustive
@pytest.mark.parametrize("sweep", sorted(TEXTS.keys() - set(SWEEPS)))
def test_the_check_of_a_vision_model_takes_no_more_than_its_training_or_a_small_device_has(sweep: str) -> None:
    """Its batches are small. What L-BFGS keeps isn't counted; `test_excerpt` shows how few samples it is given."""
    runs = [planned.run for planned in expand([f"sweep={sweep}", "sweep.repeats=1"])]
    runs = [run for run in runs if checks_parity(run) and run.strategy.framework == "torch"]
    for run in (run for run in runs if not isinstance(run.optimizer, Lbfgs)):
        checked = excerpt(as_checked(run)).run
        taken = peak_bytes(checked) + peak_bytes(as_reference(checked))
        assert taken <= max(ABOVE.get(sweep, SMALL_BYTES), peak_bytes(run)), (
            f"{run.strategy.name} × {run.devices}: {taken / 2**30:.2f} GiB"
        )


def test_the_check_of_a_large_model_fits_where_its_training_does() -> None:
    """Whole, the strategy's part of it alone took 117 GiB, and the training 52."""
    large = (
        "model=mpt_1b",
        "data=tokens",
        "data.sequence=2048",
        "data.vocabulary=50257",
        "optimizer=adamw",
        "model.tied=false",
    )
    layout = (
        "strategy=tensor_parallel",
        "devices=8",
        "batch_size=32",
        "precision=bf16",
        "activation_recomputation=full",
    )
    assert_fits(one_run([*large, *layout]).run)


def assert_fits(run: RunConfig) -> None:
    """Whoever trains has as much as a small check takes; a large one takes no more than the training."""
    checked, smaller, _ = excerpt(as_checked(run))
    run.strategy.check(checked, "cuda")
    taken = peak_bytes(checked) + peak_bytes(as_reference(checked))  # of the first rank, at most
    which = f"{run.strategy.name} × {run.devices}: {taken / 2**30:.2f} GiB"
    assert taken <= SMALL_BYTES, which
    if smaller is not None:
        assert taken <= least_of_training(run, checked.model.layers), which  # type: ignore[attr-defined]


def least_of_training(run: RunConfig, layers: int) -> float:
    """Peak of a training that takes less: fewer blocks, and everywhere a part of what ranks have parts of somewhere."""
    assert isinstance(run.model, Gpt)
    tensor, context = (getattr(run.strategy, name, run.devices) for name in ("tensor", "context"))
    cuts_sequence = run.strategy.name in ("context_parallel", "fsdp_cp")
    tokens = run.data.shape[0] // (context if cuts_sequence else tensor if divides_sequence(run) else 1)
    model = msgspec.structs.replace(
        run.model,
        layers=layers,
        vocabulary=max(run.data.vocabulary, run.model.vocabulary) // (tensor if divides_vocabulary(run) else 1),
    )
    data = Tokens(
        **{name: getattr(run.data, name) for name in ("name", "augment", "train_samples", "test_samples")},
        sequence=tokens,
        vocabulary=min(run.data.vocabulary, model.vocabulary),
        branches=1,
        data_seed=0,
    )
    return peak_bytes(msgspec.structs.replace(run, model=model, data=data))


def peak_bytes(run: RunConfig) -> float:
    """The fullest device's, on GPUs."""
    layers, memory = model_counts(Counted(run))
    return suite_peak_bytes(SuiteJob(run=run, layers=layers, figures=GPUS), memory)


GPUS = machine(device_type="cuda")


class Counted:
    """A run, equal to others of the same counts."""

    def __init__(self, run: RunConfig) -> None:
        model = run.model
        if isinstance(model, GptMoe):  # a loss of its own is there or not, whatever it is multiplied by
            model = msgspec.structs.replace(model, balance=float(model.balance > 0))
        parts = (model, run.data.shape, run.data.num_classes, run.optimizer, run.loss)
        self.run, self._key = run, msgspec.json.encode([*parts, run.precision, run.activation_recomputation])

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Counted) and other._key == self._key


@cache
def model_counts(of: Counted) -> tuple[Any, Any]:
    """On tensors without values."""
    from parallelbench.measure.count_layers import counts_without_values
    from parallelbench.measure.layer_memory import model_memory

    return counts_without_values(of.run).layers, model_memory(of.run)


@pytest.mark.exhaustive
def test_what_a_cluster_would_train_is_checked_in_little_memory() -> None:
    """70 billion parameters on 64 GPUs."""
    words = ["model=mpt_70b", "data=tokens", "data.vocabulary=50257", "data.sequence=2048", "batch_size=64"]
    for layout in (["strategy=fsdp"], ["strategy=dp_tp", "strategy.tensor=8"]):
        checked = excerpt(as_checked(one_run([*words, *layout, "devices=64", "optimizer=adamw"]).run)).run
        assert peak_bytes(checked) + peak_bytes(as_reference(checked)) <= SMALL_BYTES
