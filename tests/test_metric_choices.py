"""Metrics: by hand, the same under every strategy, and refused in words where they can't be computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from parallelbench.config.components import Metric, Shard
from parallelbench.config.run import RunConfig
from parallelbench.config.run_rules import check_run
from parallelbench.errors import ConfigError
from parallelbench.optim.metrics import CalibrationError, MacroF1, NoMetric, TopK
from parallelbench.strategies.replica import added
from parallelbench.strategies.single import Single
from parallelbench.training.checks.before_training import check_parity
from parallelbench.training.checks.components import check_scores
from parallelbench.training.loop import NotFiniteError
from parallelbench.training.observers import metric_value
from parallelbench.training.torch_session import build_model
from parallelbench.world.numerics import MetricSums, Numerics
from parallelbench.world.world import World
from tests.ranks import run_ranks
from tests.strategies.test_context_parallel import SMALL as SMALL_GPT
from tests.strategies.test_context_parallel import TOKENS
from tests.strategies.test_expert_balance import routed
from tests.strategies.test_parity import MODELS, SYNTHETIC
from tests.strategies.training import (
    configure,
    one_device,
    plain_epochs,
    prepared,
    shard_loader,
    summed,
    train,
    trained,
)

TOP = TopK(name="x", k=2)
F1 = MacroF1(name="x")
CALIBRATION = CalibrationError(name="x", bins=4)
GPT = [*TOKENS, *SMALL_GPT]


def a_batch(*positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of 40 samples of 5 classes, at so many positions, and labels, which are never of class 4."""
    draw = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(40, *positions, 5, dtype=torch.float64, generator=draw)
    logits[..., 3] -= 100  # is never predicted
    return logits, torch.randint(4, (40, *positions), generator=draw)


def of(metric: Metric, logits: torch.Tensor, labels: torch.Tensor) -> float:
    return metric.value(metric.build()(logits, labels).double().tolist())


@pytest.mark.parametrize("positions", [(), (3,)])
def test_values_are_those_of_their_definitions(positions: tuple[int, ...]) -> None:
    logits, labels = a_batch(*positions)
    flat, true = logits.reshape(-1, 5), labels.flatten()
    assert of(TOP, logits, labels) == (flat.topk(2).indices == true[:, None]).any(1).double().mean().item()
    predicted, scores = flat.argmax(1), []
    for c in range(5):
        hits = int(((predicted == c) & (true == c)).sum())
        precision, recall = hits / max(1, int((predicted == c).sum())), hits / max(1, int((true == c).sum()))
        scores.append(2 * precision * recall / (precision + recall) if hits else 0.0)
    assert scores[3] == scores[4] == 0.0
    assert of(F1, logits, labels) == pytest.approx(sum(scores) / 5)
    confidence, found = flat.softmax(1).max(1).values, 0.0
    for low in (0.0, 0.25, 0.5, 0.75):
        held = (confidence > low) & (confidence <= low + 0.25)
        if held.any():
            accuracy = (predicted == true)[held].double().mean()
            found += (held.double().mean() * (accuracy - confidence[held].mean()).abs()).item()
    assert of(CALIBRATION, logits, labels) == pytest.approx(found)


def test_limits_of_the_definitions() -> None:
    same = torch.zeros(3, 5, dtype=torch.float64)
    assert of(TOP, same, torch.tensor([0, 1, 4])) == 0.0, "of equal logits, the others come first"
    assert of(TOP, same * torch.nan, torch.tensor([0, 1, 4])) == 0.0, "what is no number is no hit"
    sure = torch.full((3, 5), -1e9, dtype=torch.float64)
    sure[:, 2] = 1e9
    assert of(CALIBRATION, sure, torch.tensor([2, 2, 2])) == 0.0
    assert of(CALIBRATION, sure, torch.tensor([0, 1, 3])) == 1.0
    assert of(F1, sure, torch.tensor([2, 2, 2])) == 1.0, "classes that don't occur don't count"
    assert of(F1, sure, torch.tensor([2, 2, 0])) == pytest.approx((0.8 + 0.0) / 2)


@pytest.mark.parametrize("metric", [TOP, F1, CALIBRATION])
def test_sums_of_pieces_are_those_of_the_whole(metric: Metric) -> None:
    """Also where a rank has none of the last samples."""
    logits, labels = a_batch(3)
    numerics = Numerics("fp64", "cpu", metric=MetricSums(metric.size(5), metric.build()), loss=lambda x, y: x.mean())
    whole = metric.build()(logits, labels).double()
    assert whole.shape == (metric.size(5),)
    with torch.no_grad():
        total, first = None, 0
        for size in (1, 16, 16, 0, 7):
            piece = logits[first : first + size], labels[first : first + size]
            part = numerics.sums(numerics.loss(*piece), *piece)
            total, first = added(total, part), first + size
    assert total is not None
    found = total.tensor()
    assert found[1] == (logits.argmax(-1) == labels).sum()
    torch.testing.assert_close(found[2:], whole, rtol=1e-12 if metric is CALIBRATION else 0, atol=0)


def test_half_types_are_widened_first() -> None:
    logits, labels = a_batch()
    numerics = Numerics("bf16", "cpu", metric=MetricSums(12, CALIBRATION.build()))
    with torch.no_grad():
        found = numerics.sums(torch.tensor(0.0), logits.bfloat16(), labels).tensor()
    expected = CALIBRATION.build()(logits.bfloat16().float(), labels)
    torch.testing.assert_close(found[2:], expected, rtol=1e-6, atol=0)


@pytest.mark.slow
def test_parts_of_sequences_count_each_label_once(tmp_path: Path) -> None:
    chosen = ["metric=macro_f1", "strategy=context_parallel", "strategy.exchange=ring", "devices=2"]
    counts_each_label_once(configure(*GPT, *chosen), tmp_path)


@pytest.mark.cases("expert_parallel")
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["tensor_parallel", "expert_parallel"])
def test_divided_experts_count_each_label_once(strategy: str, tmp_path: Path) -> None:
    counts_each_label_once(routed(strategy, "metric=macro_f1"), tmp_path)


def counts_each_label_once(run: RunConfig, folder: Path) -> None:
    ranks, expected = run_ranks(train, run.devices, folder, run), one_device(run)
    found, classes = summed([rank["evaluated"] for rank in ranks]), 24
    assert len(found) == 2 + 3 * classes, "of the model's vocabulary, which is larger than that of the data"
    assert sum(found[-classes:]) == 13 * run.data.labels_per_sample
    assert found[1:] == expected["evaluated"][1:]


def measured(run: RunConfig) -> list[float | None]:
    """After each epoch on one device."""
    return [row["test_metric"] for row in trained(0, 1, run)[0]["epochs"]]


def by_hand(run: RunConfig) -> list[float]:
    """A loop in plain PyTorch, and the share of labels among the five largest logits after each epoch."""
    model, found = build_model(run).double(), []
    loader = shard_loader(run, Shard())
    for _ in plain_epochs(model, run):
        hits = [(model(b.images).topk(5).indices == b.labels[:, None]).any(1) for b in loader.test() if b.size]
        found.append(torch.cat(hits).double().mean().item())
    return found


SMALL = (*SYNTHETIC, *MODELS["mlp"], "epochs=3", "measure.parity=false")


@pytest.mark.cases("options0")
@pytest.mark.slow
@pytest.mark.parametrize("options", [["strategy=ddp", "strategy.micro_batches=2"], ["strategy=pipeline"]])
def test_after_each_epoch_the_table_has_it(options: list[str], tmp_path: Path) -> None:
    run = configure(*SMALL, *options, "devices=2", "metric=top5")
    first, other = ([row["test_metric"] for row in rows["epochs"]] for rows, _ in run_ranks(trained, 2, tmp_path, run))
    assert first == by_hand(configure(*SMALL, "metric=top5")) == measured(configure(*SMALL, "metric=top5"))
    assert other == [], "rank 0 writes"
    assert len(first) == 3


def test_without_a_metric_the_table_has_none() -> None:
    assert measured(configure(*SMALL)) == [None] * 3


def test_training_computes_none_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    run = configure(*SMALL, "metric=macro_f1")
    counted, calls = run.metric.build(), 0

    def counting(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return counted(logits, labels)

    monkeypatch.setattr(MacroF1, "build", lambda self: counting)
    replica = prepared(run)
    loader = shard_loader(run, Shard())
    result = replica.step(next(iter(loader.train(1))))
    assert result is not None
    assert result.tensor().shape == (2,)
    assert calls == 0
    evaluated = replica.evaluate(loader.test())
    assert evaluated is not None
    assert evaluated.shape == (32,)
    assert calls > 0


class OwnMetric(TopK, frozen=True, kw_only=True):
    """A metric as a user may have written it; `name` says how."""

    def build(self) -> Any:
        sums = super().build()
        return {
            "number": lambda logits, labels: 3.0,
            "long": lambda logits, labels: torch.zeros(3),
            "mean": lambda logits, labels: sums(logits, labels) / len(labels),
            "ratio": lambda logits, labels: torch.zeros(2) / (len(labels) // 8),  # of a class that few samples lack
        }.get(self.name, sums)

    def size(self, classes: int) -> Any:
        return {"less": -1, "half": 0.5}.get(self.name) or classes // (0 if self.name == "divides" else 5)


def own(name: str) -> RunConfig:
    return msgspec.structs.replace(configure(*SMALL), metric=OwnMetric(name=name, k=2))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("number", r"must give sums, a tensor of shape \(2,\), but it gives float"),
        ("long", r"must give sums, a tensor of shape \(2,\), but it gives \(3,\)"),
        ("mean", r"must give sums, but it gives \[.*, 1\.0\], and by its two halves \[.*, 2\.0\]"),
        ("ratio", r"it gives \[0\.0, 0\.0\], and by its two halves \[nan, nan\]"),
    ],
)
def test_what_is_no_metric_is_refused_before_training(name: str, message: str) -> None:
    check_run(own(name), "cpu")
    with pytest.raises(ConfigError, match=message) as refused:
        check_scores(own(name), "cpu")
    assert "\n" not in str(refused.value)
    assert f"metric={name}" in str(refused.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("less", "OwnMetric.size is -1: return how many sums there are, a whole number"),
        ("half", "OwnMetric.size is 0.5: return"),
        ("divides", r"OwnMetric.size fails: .*test_metric_choices.py:\d+: ZeroDivisionError"),
    ],
)
def test_a_number_of_sums_that_is_none_is_refused_before_anything_starts(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"metric={name}: {message}"):
        check_run(own(name), "cpu")


@pytest.mark.parametrize("metric", [NoMetric(name="none"), TOP, F1, CALIBRATION, OwnMetric(name="right", k=1)])
def test_metrics_pass(metric: Metric) -> None:
    check_scores(msgspec.structs.replace(configure(*SMALL), metric=metric), "cpu")


class Evaluates(Single, frozen=True, kw_only=True):
    """A user's strategy, whose replica evaluates in a way of its own; `name` says how."""

    def prepare(self, *given: Any) -> Any:
        replica = super().prepare(*given)
        evaluate = replica.evaluate

        def others(batches: Any) -> Any:
            found = evaluate(batches)
            assert found is not None
            return found[:2] if self.name == "two" else torch.cat([found[:2], 2 * found[2:]])

        replica.evaluate = others  # type: ignore[method-assign]
        return replica


def test_a_replica_that_leaves_them_out_is_refused() -> None:
    run = msgspec.structs.replace(configure(*SMALL, "metric=top5"), strategy=Evaluates(name="two"))
    message = r"metric=top5 with strategy=two is refused: .* returns 2 sums, not 2 and the metric's 2: return those"
    with pytest.raises(ConfigError, match=message):
        trained(0, 1, run)
    with pytest.raises(ConfigError, match=message):
        check_parity(build_model(run), run, World(), shard_loader)
    assert measured(msgspec.structs.replace(run, metric=NoMetric(name="none"))) == [None] * 3


def test_the_parity_check_compares_the_sums() -> None:
    run = configure(*SMALL, "metric=macro_f1")
    rows = check_parity(build_model(run), run, World(), shard_loader)
    assert rows
    assert all(row["passed"] for row in rows)
    twice = msgspec.structs.replace(run, strategy=Evaluates(name="twice"))
    rows = check_parity(build_model(twice), twice, World(), shard_loader)
    assert rows
    assert not any(row["passed"] for row in rows)
    assert {row["loss_difference"] for row in rows} == {0.0}
    assert min(row["evaluation_difference"] for row in rows) > 1e-3


def test_a_share_of_nothing_is_no_number() -> None:
    """As the precision of a class that an evaluation predicts nowhere: an epoch must not end the run."""
    assert metric_value(configure(*SMALL, "metric=top5"), [0.0, 0.0]) is None


def test_a_run_that_diverges_says_that_and_has_no_metric() -> None:
    run = configure(*SMALL, "metric=calibration_error", "optimizer.lr=1e200")
    with pytest.raises(NotFiniteError, match="loss was not finite in epoch 1"):
        trained(0, 1, run)
    assert metric_value(run, [1.0] * 44 + [float("nan")]) is None
