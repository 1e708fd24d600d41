"""Models whose outputs are no logits of the data's labels are refused before training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from launch.sweep import one_run
from parallelbench.config.components import Anatomy, Vocabulary
from parallelbench.errors import ConfigError
from parallelbench.models.mlp import LogisticRegression
from parallelbench.models.modules import sequence
from parallelbench.training.checks.components import check_logits
from parallelbench.training.torch_session import Session
from tests.strategies.training import configure

pytestmark = pytest.mark.slow
CONF = Path(__file__).parents[1] / "conf"
TOKENS = ("data=tokens", "data.sequence=16", "data.vocabulary=50", "batch_size=8")
IMAGES = ("data=synthetic", "data.channels=3", "data.image_size=32", "data.num_classes=10", "batch_size=8")


class Reshaping(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values.reshape(len(values), *self.shape) if self.shape else values.flatten()


class Looking(nn.Module):
    """Looks at values, which tensors without values don't have."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        assert values.abs().max().item() < 1e6
        return values


class Squeezing(nn.Module):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values.squeeze()


class Tupling(nn.Module):
    def forward(self, values: torch.Tensor) -> Any:
        return values, values


class Odd(LogisticRegression, frozen=True, kw_only=True):
    """A model whose last layer gives `logits`, and what is done to them."""

    logits: int
    hidden: int = 8
    end: Any = None
    taken: int | None = None
    """Values that the last linear layer takes; None: what it gets."""

    @property
    def layer_names(self) -> tuple[str, ...]:
        return ("flat", "hidden", "out", *(["end"] if self.end else []))

    def build(self, *, in_channels: int, image_size: int, num_classes: int) -> nn.Sequential:
        inputs = in_channels * image_size**2
        out = nn.Sequential(nn.ReLU(), nn.Linear(self.taken or self.hidden, self.logits))
        layers = [nn.Flatten(), nn.Linear(inputs, self.hidden), out]
        return sequence(self.layer_names, [*layers, *([self.end()] if self.end else [])])


class Unnamed(Odd, frozen=True, kw_only=True):
    def build(self, *, in_channels: int, image_size: int, num_classes: int) -> nn.Sequential:
        return nn.Sequential(nn.Flatten(), nn.Linear(in_channels * image_size**2, num_classes))


def odd(
    logits: int,
    end: Any = None,
    *,
    hidden: int = 8,
    batch_size: int = 8,
    taken: int | None = None,
    cls: type[Odd] = Odd,
) -> Any:
    run = configure(*IMAGES, "data.num_classes=3", f"batch_size={batch_size}", "model=logistic_regression")
    return msgspec.structs.replace(run, model=cls(name="odd", logits=logits, hidden=hidden, end=end, taken=taken))


@pytest.mark.parametrize(
    ("logits", "end", "message"),
    [
        (4, None, r"gives \(4, 4\), not logits of shape \(4, 3\): change its last layer, num_classes"),
        (2, None, r"gives \(4, 2\), not logits of shape \(4, 3\)"),
        (3, lambda: Reshaping(1, 3), r"gives \(4, 1, 3\), not logits of shape \(4, 3\)"),
        (3, Reshaping, r"gives \(12,\), not logits of shape \(4, 3\)"),
        (1, Squeezing, r"gives \(4,\), not logits of shape \(4, 3\)"),
        (3, Tupling, r"gives tuple, not logits of shape \(4, 3\)"),
    ],
)
def test_another_shape_is_refused(logits: int, end: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"model=odd, called on 4 samples, {message}"):
        check_logits(odd(logits, end))


@pytest.mark.parametrize("hidden", [8, 400], ids=["with values", "without values"])
def test_the_layer_that_does_not_fit_is_named_with_what_it_gets(hidden: int) -> None:
    message = (
        rf"model=odd: layer out can't take \(4, {hidden}\), which layer hidden gives it: "
        r"Linear\(in_features=9, out_features=3, bias=True\): .*cannot be multiplied .*; correct its sizes in build "
        rf"\({__file__}:\d+\)$"
    )
    with pytest.raises(ConfigError, match=message):
        check_logits(odd(3, hidden=hidden, taken=9))


class Doubling(nn.Module):
    """Makes a tensor of its own, in another type."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values @ torch.eye(values.shape[1], dtype=torch.float64)


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 3)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.table(values).sum(1)


@pytest.mark.parametrize(
    ("end", "message"),
    [
        (Doubling, r"same dtype.*; it gets torch\.float32 and would take torch\.float64"),
        (Embedding, r"scalar types.*; it gets torch\.float32 and would take torch\.int64"),
    ],
)
def test_a_fault_of_types_is_no_fault_of_sizes(end: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"layer end can't take \(4, 3\), .*{message}") as caught:
        check_logits(odd(3, end))
    assert "sizes" not in str(caught.value)


def test_a_linear_layer_of_tokens_is_told_what_it_gets() -> None:
    run = configure(*TOKENS, "model=gpt_tiny", "model.vocabulary=64")

    class Unembedded(type(run.model), frozen=True, kw_only=True):  # type: ignore[misc]
        def build(self, **_: int) -> nn.Sequential:
            return sequence(self.layer_names, [nn.Linear(16, 64) for _ in self.layer_names])

    model = Unembedded(**msgspec.structs.asdict(run.model))
    with pytest.raises(ConfigError, match=r"it gets torch\.int64 and would take torch\.float32: .*nn\.Embedding"):
        check_logits(msgspec.structs.replace(run, model=model))


def test_layers_without_their_names_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"build returns \('0', '1'\), not the layers \('flat', 'hidden', 'out'\)"):
        check_logits(odd(3, cls=Unnamed))


@pytest.mark.parametrize("hidden", [8, 400], ids=["with values", "without values"])
def test_a_model_that_looks_at_values_is_called_on_some(hidden: int) -> None:
    check_logits(odd(3, Looking, hidden=hidden))
    with pytest.raises(ConfigError, match=r"gives \(4, 4\)"):
        check_logits(odd(4, Looking, hidden=hidden))


def test_dimensions_of_one_are_those_of_the_batch() -> None:
    check_logits(odd(3, Squeezing, batch_size=2))
    with pytest.raises(ConfigError, match=r"called on 1 sample, gives \(3,\), not logits of shape \(1, 3\)"):
        check_logits(odd(3, Squeezing, batch_size=1))


def test_a_language_model_may_have_a_larger_vocabulary_that_it_declares() -> None:
    run = configure(*TOKENS, "model=gpt_tiny", "model.vocabulary=64")
    check_logits(run)

    class Undeclared(type(run.model), frozen=True, kw_only=True):  # type: ignore[misc]
        def anatomy(self) -> Anatomy:
            return super().anatomy()._replace(vocabulary=Vocabulary())

    model = Undeclared(**msgspec.structs.asdict(run.model))
    with pytest.raises(ConfigError, match=r"gives \(4, 16, 64\), not logits of shape \(4, 16, 50\): .* Vocabulary of"):
        check_logits(msgspec.structs.replace(run, model=model))


@pytest.mark.parametrize("name", sorted(path.stem for path in (CONF / "model").glob("*.yaml")))
def test_every_shipped_model_passes_and_nothing_is_drawn(name: str) -> None:
    text = (CONF / "model" / f"{name}.yaml").read_text()
    language = "gpt" in text
    data = ("data=tokens", "data.sequence=16", "data.vocabulary=50", "batch_size=8") if language else IMAGES
    torch.manual_seed(3)
    state = torch.get_rng_state()
    check_logits(one_run([*data, f"model={name}"]).run)
    assert torch.equal(torch.get_rng_state(), state)


def test_every_session_checks_it_before_parity(monkeypatch: pytest.MonkeyPatch) -> None:
    session = object.__new__(Session)
    session._run, session._world = odd(4), type("Alone", (), {"device": torch.device("cpu")})()  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"gives \(4, 4\)"):
        session._check_parts()
