"""Gradient clipping: the norm of the whole gradient on whichever ranks its parts are, its bytes, and its time."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from parallelbench.config.run import RunConfig
from parallelbench.errors import ConfigError
from parallelbench.measure.traffic import Traffic
from parallelbench.strategies.clipping import Clipping
from parallelbench.world.spans import Spans, divided_by
from parallelbench.world.world import World
from tests.ranks import run_ranks
from tests.strategies.test_parity import MODELS, OVERRIDES, SYNTHETIC
from tests.strategies.training import configure, loader_of, one_device, prepared, sent_in_a_step
from tests.test_closing import NORMED, SMALL, closed, failed

CLIPPED = "clip_norm=0.2"
"""Below the norm of each gradient here."""


def clipping(strategy: str, *overrides: str, model: str = "mlp") -> RunConfig:
    """The strategy on as few devices as it takes; that of GPUs alone is skipped."""
    own = OVERRIDES.get(strategy, [])
    for devices in (2, 4, 8):
        with contextlib.suppress(ConfigError):
            chosen = [f"strategy={strategy}", f"devices={devices}", *own, CLIPPED, *overrides]
            return configure(*SYNTHETIC, *MODELS[model], *chosen)
    pytest.skip("GPUs only")


def test_short_gradients_stay_as_they_are() -> None:
    run = configure(*SYNTHETIC, *MODELS["mlp"], "strategy=single", "clip_norm=1000.0")
    torch.testing.assert_close(
        one_device(run), one_device(msgspec.structs.replace(run, clip_norm=None)), rtol=0, atol=0
    )


# --- bytes and time


def of_a_sum(ranks: int, sums: int = 1) -> int:
    """Bytes that a rank sends for so many sums of squares, each of 8 bytes, over so many ranks."""
    return round(2 * (ranks - 1) / ranks * 8 * sums)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["strategy=zero1", "devices=2"], [0, 0]),
        (["strategy=fsdp", "devices=2"], [of_a_sum(2)] * 2),
        (["strategy=fsdp", "devices=4"], [of_a_sum(4)] * 4),
        (["strategy=hsdp", "devices=4", "strategy.shard=2"], [of_a_sum(2)] * 4),
        (["strategy=dp_pp", "devices=4"], [of_a_sum(2)] * 4),
        # What is cut both ways, and what the data dimension alone cuts; then the first over the tensor dimension.
        (["strategy=dp_tp", "devices=4"], [of_a_sum(2, sums=2) + of_a_sum(2)] * 4),
        (["strategy=parameter_server", "strategy.servers=2", "devices=4"], [0, 0, of_a_sum(2), of_a_sum(2)]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value[0], str) else "",
)
@pytest.mark.cases("*fsdp devices=2*", "*dp_tp*")
def test_a_sum_of_squares_is_all_that_is_sent(options: list[str], expected: list[int], tmp_path: Path) -> None:
    run = configure(*SYNTHETIC, *MODELS["mlp"], *options, CLIPPED)
    plain = msgspec.structs.replace(run, clip_norm=None)
    both = (run_ranks(sent_in_a_step, run.devices, tmp_path, each) for each in (run, plain))
    assert [one["gradient"] - other["gradient"] for one, other in zip(*both, strict=True)] == expected


def summing_phase(rank: int, size: int, run: RunConfig) -> list[str | None]:
    """The innermost phase while squares are added up."""
    replica: Any = prepared(run, rank, size)
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
    ("strategy", "expected"), [("fsdp", ["communication"]), ("pipeline", ["communication"]), ("ddp", [])]
)
def test_its_time_is_communication_and_the_rest_the_optimizers(
    strategy: str, expected: list[str], tmp_path: Path
) -> None:
    assert run_ranks(summing_phase, 2, tmp_path, clipping(strategy)) == [expected] * 2


# --- what counts


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


# --- the checks


@pytest.mark.cases("bf16")
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_the_closing_check_clips_in_plain_code(precision: str) -> None:
    run = configure(*SMALL, "strategy=single", f"precision={precision}", CLIPPED)
    assert failed(closed(World(), run)) == set()

    def not_at_all(replica: Any, k: int) -> None:
        replica._clip = lambda clipping: replica._numerics.unscale(replica._optimizer)

    assert "update" in failed(closed(World(), run, not_at_all))


@pytest.mark.exhaustive
def test_statistics_are_none_of_the_gradient() -> None:
    run = configure(*NORMED, "strategy=single", CLIPPED)
    assert failed(closed(World(), run)) == set()
