"""Data that are no images: vectors, and tokens with a label at each position, in every loader, strategy and check."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
import torch

from launch.sweep import one_run
from parallelbench import cli
from parallelbench.config.components import Arrays, Data, Model, Shard
from parallelbench.config.dataset_check import checked
from parallelbench.config.run import RunConfig
from parallelbench.config.run_rules import check_run
from parallelbench.data.sklearn import BreastCancer
from parallelbench.errors import ConfigError
from parallelbench.measure.count_layers import model_counts
from parallelbench.measure.layer_memory import model_memory
from parallelbench.training.checks.plain import PlainModel
from parallelbench.training.loop import Trainer
from parallelbench.training.torch_session import build_loader, build_model
from parallelbench.world.world import World
from tests.strategies.training import Rows, configure, prepared, shard_loader
from tests.test_closing import closed, failed, passed

VECTORS = ["data=breast_cancer", "model=mlp", "model.hidden=[24,20,16]", "batch_size=24"]
NOWHERE = Path("nowhere")
POSITIONS, VOCABULARY, CLASSES = 6, 11, 11


class NextTokens(Data, frozen=True, kw_only=True):
    """Counting modulo 11 from a random number on; at each position the label is the next token."""

    mean: ClassVar[tuple[float, ...]] = ()
    std: ClassVar[tuple[float, ...]] = ()
    flip: ClassVar[bool] = False
    train_samples: int = 96  # type: ignore[assignment]
    test_samples: int = 37  # type: ignore[assignment]

    @property
    def kind(self) -> Any:
        return "tokens"

    @property
    def shape(self) -> tuple[int, ...]:
        return (POSITIONS,)

    @property
    def vocabulary(self) -> int:
        return VOCABULARY

    @property
    def label_shape(self) -> tuple[int, ...]:
        return (POSITIONS,)

    @property
    def num_classes(self) -> int:
        return CLASSES

    def missing_files(self, data_dir: Path) -> list[Path]:
        return []

    def load(self, data_dir: Path) -> Arrays:
        begins = np.random.default_rng(0).integers(0, VOCABULARY, (self.train_samples + self.test_samples, 1))
        tokens = ((begins + np.arange(POSITIONS + 1)) % VOCABULARY).astype(np.int32)
        cut, labels = self.train_samples, tokens[:, 1:].astype(np.int64)
        return Arrays(tokens[:cut, :-1], labels[:cut], tokens[cut:, :-1], labels[cut:])


class Embedded(Model, frozen=True, kw_only=True):
    """An embedding, a hidden layer and a head, at each position by itself."""

    takes: ClassVar[tuple[Any, ...]] = ("tokens",)
    predicts_positions: ClassVar[bool] = True

    @property
    def layer_names(self) -> tuple[str, ...]:
        return ("embed", "hidden", "head")

    def build(self, *, in_channels: int, image_size: int, num_classes: int) -> torch.nn.Sequential:
        from parallelbench.models.modules import sequence

        assert (in_channels, image_size) == (VOCABULARY, POSITIONS)
        hidden = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh())
        return sequence(
            self.layer_names, [torch.nn.Embedding(VOCABULARY, 16), hidden, torch.nn.Linear(16, num_classes)]
        )


def on_tokens(*overrides: str) -> RunConfig:
    base = one_run(["precision=fp64", "batch_size=24", "optimizer=sgd", "optimizer.lr=0.5", *overrides]).run
    run = msgspec.structs.replace(
        base, data=NextTokens(name="next_tokens", augment=False), model=Embedded(name="embedded")
    )
    check_run(run, "cpu")
    return run


# --- the bundled vectors


def test_the_tumours_are_those_of_scikit_learn() -> None:
    from sklearn.datasets import load_breast_cancer

    data = configure(*VECTORS).data
    arrays = checked(data, data.load(NOWHERE))
    vectors, labels = load_breast_cancer(return_X_y=True)
    assert sorted(map(tuple, np.concatenate([arrays.train_images, arrays.test_images]))) == sorted(
        map(tuple, vectors.astype(np.float32))
    )
    assert np.bincount(arrays.test_labels).tolist() == [42, 71]
    assert np.bincount(arrays.train_labels).tolist() == [170, 286]
    assert {label for row, label in zip(vectors, labels, strict=True) if row[0] == 17.99} == {0}
    whole = arrays.train_images.astype(np.float64)
    np.testing.assert_allclose(whole.mean(0), BreastCancer.mean, rtol=1e-3)
    np.testing.assert_allclose(whole.std(0), BreastCancer.std, rtol=1e-3)


@pytest.mark.parametrize("loader", ["resident", "tensor_dataset", "dataloader"])
@pytest.mark.parametrize("tokens", [False, True], ids=["vectors", "tokens"])
@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_every_loader_feeds_the_same(loader: str, tokens: bool, precision: str) -> None:
    options = [f"loader={loader}", f"precision={precision}", *(["loader.workers=0"] if loader != "resident" else [])]
    run = on_tokens(*options) if tokens else configure(*VECTORS, *options)
    arrays = checked(run.data, run.data.load(NOWHERE))
    feed = build_loader(arrays, run, World(), Shard(1, 2))
    taken, order = [*feed.train(1)], feed.plan(1).samples
    images, labels = (torch.cat([getattr(batch, name) for batch in taken]) for name in ("images", "labels"))
    stored = torch.from_numpy(np.array(arrays.train_images))[order]
    if tokens:
        assert torch.equal(images, stored.long())
        assert images.dtype == torch.int64
    else:
        mean, std = (torch.tensor(values, dtype=torch.float64) for values in (run.data.mean, run.data.std))
        assert images.dtype == (torch.float64 if precision == "fp64" else torch.float32)
        torch.testing.assert_close(images.double(), (stored.double() - mean) / std, rtol=1e-5, atol=1e-5)
        assert images.abs().mean().item() == pytest.approx(0.75, abs=0.15), "of one scale"
    assert torch.equal(labels, torch.from_numpy(np.array(arrays.train_labels))[order])
    tested = [*feed.test()]
    assert sum(batch.size for batch in tested) == len(arrays.test_labels) // 2 + len(arrays.test_labels) % 2
    assert sum(len(batch.images) for batch in tested if batch.images is not None) == sum(b.size for b in tested)
    assert next(iter(feed.test(1))).images.shape[1:] == run.data.shape, "one of the shards has no sample"  # type: ignore[union-attr]
    feed.close()


# --- strategies and checks


@pytest.mark.parametrize(("tokens", "precision"), [(False, "fp32"), (False, "fp16"), (True, "bf16")])
def test_the_closing_check_knows_them(tokens: bool, precision: str) -> None:
    options = [f"precision={precision}", "epochs=2", "strategy=single"]
    rows = closed(World(), on_tokens(*options) if tokens else configure(*VECTORS, *options))
    assert failed(rows) == set()
    assert {"evaluation loss", "evaluation accuracy", "samples", "gradients", "update"} <= passed(rows)


def test_accuracy_is_the_share_of_all_labels() -> None:
    run = on_tokens("epochs=40", "strategy=single")
    replica = prepared(run)
    rows = Rows()
    loader = shard_loader(run, replica.data_shard)
    trainer = Trainer(replica, loader, run=run, world=World(), journal=rows)  # type: ignore[arg-type]
    trainer.train()
    written = rows.of["epochs"]
    assert written[-1]["test_accuracy"] == trainer.evaluated[1] == 1.0, "the next token follows from each"
    assert 0 < written[0]["train_accuracy"] < written[-1]["train_accuracy"] <= 1.0


@pytest.mark.slow
def test_models_of_tokens_are_counted() -> None:
    run = on_tokens()
    assert [row.name for row in model_counts(run).layers] == ["embed", "hidden", "head"]
    flop = model_counts(run).least_flop
    assert flop is not None
    assert flop == 3 * POSITIONS * 2 * (16 * 16 + 16 * CLASSES), "the embedding's output needs its gradient"
    assert model_memory(run).input_bytes == 8 * POSITIONS
    assert model_memory(configure(*VECTORS)).input_bytes == 8 * 30


# --- refusals


class CountsOn(Embedded, frozen=True, kw_only=True):
    """Its forward pass changes the tokens that it is given, in place."""

    def build(self, **arguments: Any) -> torch.nn.Sequential:
        model = super().build(**arguments)
        model[0].register_forward_pre_hook(lambda _, inputs: (inputs[0].add_(1).remainder_(VOCABULARY),))
        return model


class StoredAsFed(NextTokens, frozen=True, kw_only=True):
    """Of 64 bits, so that nothing has to convert them."""

    def load(self, data_dir: Path) -> Arrays:
        arrays = super().load(data_dir)
        train, test = (images.astype(np.int64) for images in (arrays.train_images, arrays.test_images))
        return Arrays(train, arrays.train_labels, test, arrays.test_labels)


@pytest.mark.parametrize("precision", ["fp32"])
def test_a_model_that_changes_its_batch_in_place_trains_and_is_checked_as_any(precision: str) -> None:
    run = on_tokens(f"precision={precision}", "epochs=3", "strategy=single")
    data = StoredAsFed(name="stored_as_fed", augment=False)
    models = (Embedded(name="plain"), CountsOn(name="counts_on"))
    plain, changed = (closed(World(), msgspec.structs.replace(run, data=data, model=model)) for model in models)
    assert failed(plain) == failed(changed) == set()
    assert passed(plain) == passed(changed)
    batch = next(shard_loader(run := msgspec.structs.replace(run, data=data, model=models[1]), Shard()).train(1))
    assert batch.images is not None
    before, model = batch.images.clone(), build_model(run)
    judge = PlainModel(model, run.loss.build(), device=torch.device("cpu"), pieces=1)
    judge.step(deepcopy(model.state_dict()), batch, precision="fp64")
    assert torch.equal(batch.images, before), "plain code computes it once more, in the run's own precision"


def test_models_and_labels_go_together() -> None:
    tokens, digits = on_tokens(), configure("model=mlp")
    with pytest.raises(ConfigError, match="takes images and vectors, but data=next_tokens holds tokens"):
        check_run(msgspec.structs.replace(tokens, model=digits.model), "cpu")

    class Whole(Embedded, frozen=True, kw_only=True):
        predicts_positions: ClassVar[bool] = False

    message = "predicts a label for each sample, but data=next_tokens has one at each position"
    with pytest.raises(ConfigError, match=message):
        check_run(msgspec.structs.replace(tokens, model=Whole(name="whole")), "cpu")


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (np.zeros((456, 30)), "train_images are float64, but float32 is expected"),
        (np.zeros((456, 29), np.float32), r"have shape \(456, 29\), not \(456, 30\) by .* shape=\(30,\)"),
        (np.full((456, 30), np.nan, np.float32), "NaN"),
        (np.zeros((455, 30), np.float32), r"have shape \(455, 30\), not \(456, 30\) by train_samples=456"),
    ],
)
def test_other_vectors_than_declared_are_refused(samples: Any, message: str) -> None:
    data = configure(*VECTORS).data
    arrays = data.load(NOWHERE)
    wrong = Arrays(samples, arrays.train_labels, arrays.test_images, arrays.test_labels)
    with pytest.raises(ConfigError, match=message):
        checked(data, wrong)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_images": np.zeros((96, 6), np.float32)}, "but integers is expected"),
        ({"train_images": np.full((96, 6), 11)}, "go from 11 to 11; vocabulary=11 allows 0 to 10"),
        ({"train_images": np.zeros((96, 5), int)}, r"\(96, 5\), not \(96, 6\) by .* shape=\(6,\)"),
        ({"train_labels": np.zeros(96, int)}, r"\(96,\), not \(96, 6\) by .* label_shape=\(6,\)"),
        ({"test_labels": np.full((37, 6), 12)}, "num_classes=11 allows 0 to 10"),
    ],
)
def test_other_tokens_than_declared_are_refused(change: dict[str, Any], message: str) -> None:
    data = on_tokens().data
    arrays = data.load(NOWHERE)
    fields = {name: getattr(arrays, name) for name in Arrays.__dataclass_fields__} | change
    with pytest.raises(ConfigError, match=message):
        checked(data, Arrays(**fields))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": (1, 30, 30)}, r"none of vectors: declare \(features,\)"),
        ({"std": (0.0,)}, "is not above 0: give 1"),
        ({"mean": (1.0, 2.0)}, "mean has 2 values: declare one, or 30"),
        ({"label_shape": (2, 3)}, r"declare \(\), or \(positions,\)"),
    ],
)
def test_declarations_that_can_not_be_are_refused(
    change: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = configure(*VECTORS).data
    for name, value in change.items():
        monkeypatch.setattr(BreastCancer, name, value)
    with pytest.raises(ConfigError, match=message):
        checked(data, data.load(NOWHERE))


@pytest.mark.slow
def test_a_run_on_vectors_ends_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    chosen = [*VECTORS, "precision=fp32", "epochs=3", "launcher=inline", "device=cpu"]
    assert cli.main(["submit", *chosen]) == 0
    (outcome,) = tmp_path.rglob("outcome.json")
    assert '"outcome":"ok"' in outcome.read_text()
