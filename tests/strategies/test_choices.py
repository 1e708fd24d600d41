"""Whatever a run chooses beside its strategy, it trains like one device: loss, metric, schedule, clipping, vectors."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from parallelbench.config.run import RunConfig
from parallelbench.errors import ConfigError
from tests.ranks import run_ranks
from tests.strategies.test_parity import MODELS, OVERRIDES, SHIPPED, SYNTHETIC, assert_equal
from tests.strategies.training import STEPS, configure, one_device, summed, train

IMAGES = [*SYNTHETIC, *MODELS["mlp"]]
VECTORS = ["data=breast_cancer", "model=mlp", "model.hidden=[24,20,16]"]
CHOICES = {
    "nothing": IMAGES,
    "loss": [*IMAGES, "loss=mse"],
    "metric": [*IMAGES, "metric=macro_f1"],
    # One step of warm-up, and another rate in each of the four steps of the run.
    "schedule": [*IMAGES, "lr_schedule=cosine", "lr_schedule.warmup_epochs=0.25", "epochs=1"],
    "clipping": [*IMAGES, "clip_norm=0.2"],  # below the norm of each gradient here
    "vectors": VECTORS,
}
REFUSED = {"sandblaster_lbfgs": {"schedule", "clipping", "vectors"}}
"""What strategies do not take: their own tests say why."""


def fewest(strategy: str, choice: str) -> RunConfig | None:
    """The strategy on as few devices as it takes; None where it takes none."""
    for devices in (2, 4, 8):
        with contextlib.suppress(ConfigError):
            own = OVERRIDES.get(strategy, [])
            return configure(*CHOICES[choice], f"strategy={strategy}", f"devices={devices}", *own)
    return None


def train_each(rank: int, size: int, runs: list[RunConfig]) -> list[dict[str, Any]]:
    """One after the other in the same processes: starting them takes longer than training."""
    return [train(rank, size, run) for run in runs]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", SHIPPED)
@pytest.mark.cases("ddp", "zero1", "fsdp", "pipeline", "model_parallel", "parameter_server")
def test_every_strategy_trains_on_what_is_chosen_like_one_device(strategy: str, tmp_path: Path) -> None:
    runs = {choice: run for choice in CHOICES if (run := fewest(strategy, choice))}
    if not runs:
        pytest.skip("GPUs only, or sequences only")
    if not runs["nothing"].strategy.equals_one_device(runs["nothing"]):
        pytest.skip("asynchronous: compared with a sequential simulation elsewhere")
    assert set(runs) == set(CHOICES) - REFUSED.get(strategy, set())
    assert "schedule" not in runs or len({runs["schedule"].rate_factor(step) for step in (1, 2, 3)}) == 3
    (size,) = {run.strategy.processes(run, "cpu") for run in runs.values()}
    each = zip(*run_ranks(train_each, size, tmp_path, list(runs.values())), strict=True)
    for (choice, run), ranks in zip(runs.items(), each, strict=True):
        expected = one_device(run)
        assert_equal(list(ranks), expected, tolerance=1e-9)
        if choice in ("loss", "schedule", "clipping"):
            with pytest.raises(AssertionError):
                assert_equal(list(ranks), one_device(runs["nothing"]), tolerance=1e-9)
        if choice == "metric":
            assert_counted(list(ranks), expected)


def assert_counted(ranks: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """The sums of F1 are whole numbers: per class, what was predicted rightly, what was predicted, and the labels."""
    found = summed([rank["evaluated"] for rank in ranks])
    assert len(found) == 2 + 3 * 10
    assert sum(found[-10:]) == 37, "all labels"
    assert found[1:] == expected["evaluated"][1:]
    assert sum(found[2:12]) == found[1]
    trained = [sums for rank in ranks for sums in rank["steps"] if sums is not None]
    assert len(trained) >= STEPS
    assert {len(sums) for sums in trained} == {2}, "training computes none of it"
