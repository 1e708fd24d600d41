"""Training and evaluation in plain PyTorch on one device, from a state that is given: no code of any strategy."""

from __future__ import annotations

import math
import time
from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from parallelbench.optim.optimizers import Lbfgs
from parallelbench.world.numerics import MetricSums, dtype_of, in_arithmetic, wide

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from parallelbench.config.components import Batch, MeanLoss
    from parallelbench.config.run import RunConfig
    from parallelbench.world.world import World


def stay_in_evaluation(model: nn.Module) -> None:
    """Let a model, and its copies, compute as in evaluation whatever mode they are told to take."""
    for module in model.modules():
        module.training = False
        module.train = MethodType(_stayed, module)  # type: ignore[method-assign]


@contextmanager
def in_evaluation(model: nn.Module) -> Iterator[None]:
    """The same until the end."""
    before = [(module, module.training) for module in model.modules()]
    stay_in_evaluation(model)
    try:
        yield
    finally:
        for module, training in before:
            del module.train
            module.training = training


def _stayed(module: nn.Module, mode: bool = True) -> nn.Module:
    """What `train` does: nothing."""
    return module


HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Precisions whose forward passes are autocast."""


class TooSlowError(Exception):
    """Plain code has not come to an end by its deadline."""


class PlainStep(NamedTuple):
    """What one step from a given state must leave."""

    loss: float
    """Mean over the global batch."""
    gradients: dict[str, Tensor]
    """On the CPU, in fp64, real and imaginary parts beside each other."""
    buffers: dict[str, Tensor]
    """After the step, as the first data shard has them; likewise. Counters are left out."""


class PlainModel:
    """The run's model on one device.

    `pieces`: slices of a global batch that are computed one after the other, each by its own batch statistics.
    `metric`: whose sums evaluations give, too.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: MeanLoss,
        *,
        device: torch.device,
        pieces: int = 1,
        metric: MetricSums | None = None,
    ) -> None:
        self._model, self._mean_loss, self._device = model, loss, device
        self._pieces, self._metric = pieces, metric
        self.deadline = math.inf
        """By `time.perf_counter`; past it, a step or an evaluation raises `TooSlowError` after a piece or a batch."""

    def step(self, state: Mapping[str, Tensor], batch: Batch, *, precision: str, scale: float = 1.0) -> PlainStep:
        """Loss and gradients of a global batch at `state`; nothing is updated but buffers.

        `scale`: factor of the loss in backward, which gradients are divided by afterwards (fp16).
        """
        model = self._at(state, precision)
        model.train()
        model.zero_grad(set_to_none=True)
        images, labels = self._inputs(batch, precision)
        loss_sum, buffers = 0.0, dict[str, Tensor]()
        for piece, targets in zip(images.chunk(self._pieces), labels.chunk(self._pieces), strict=True):
            self._load(model, state, buffers_only=True)
            loss = self._mean_loss(_logits(model, piece, precision), targets) * len(targets)
            (loss * (scale / len(labels))).backward()
            loss_sum += loss.item()
            self._require_time()
            buffers = buffers or {
                name: _wide(each)
                for name, each in model.named_buffers()
                if each.is_floating_point() or each.is_complex()
            }
        gradients = {name: _wide(p.grad) / scale for name, p in model.named_parameters() if p.grad is not None}
        return PlainStep(loss_sum / len(labels), gradients, buffers)

    @torch.no_grad()
    def evaluate(self, state: Mapping[str, Tensor], batches: Iterable[Batch], *, precision: str) -> list[float]:
        """Sums over these batches at `state`: of the loss, of correct predictions, and the metric's."""
        model = self._at(state, precision)
        model.eval()
        total = [0.0] * (2 + (self._metric.size if self._metric else 0))
        for batch in batches:
            images, labels = self._inputs(batch, precision)
            logits = _logits(model, images, precision)
            if not len(labels):
                continue
            loss, correct = self._mean_loss(logits, labels).item() * len(labels), (logits.argmax(dim=-1) == labels)
            more = self._metric.over(logits, labels).tolist() if self._metric else []
            sums = [loss, correct.sum().item(), *more]
            total = [before + each for before, each in zip(total, sums, strict=True)]
            self._require_time()
        return total

    def _require_time(self) -> None:
        if time.perf_counter() > self.deadline:
            raise TooSlowError

    def _at(self, state: Mapping[str, Tensor], precision: str) -> nn.Module:
        model = in_arithmetic(self._model, dtype_of(precision), self._device)
        self._load(model, state)
        return model

    @torch.no_grad()
    def _load(self, model: nn.Module, state: Mapping[str, Tensor], *, buffers_only: bool = False) -> None:
        own = dict(model.named_buffers()) if buffers_only else model.state_dict()
        for name in own.keys() & state.keys():  # a buffer that is not persistent is in no state
            own[name].copy_(state[name])

    def _inputs(self, batch: Batch, precision: str) -> tuple[Tensor, Tensor]:
        assert batch.images is not None
        assert batch.labels is not None
        dtype = dtype_of(precision)
        kept = batch.images.dtype if not batch.images.is_floating_point() else dtype  # tokens are whole numbers
        # Copies: a model may change them in place, and a batch is computed in two formats.
        return batch.images.to(self._device, kept, copy=True), batch.labels.to(self._device, copy=True)


def _logits(model: nn.Module, images: Tensor, precision: str) -> Tensor:
    """Logits, in fp64 or fp32."""
    if precision not in HALF:
        return model(images)  # type: ignore[no-any-return]
    with torch.autocast(images.device.type, dtype=HALF[precision]):
        return model(images).to(torch.float32)  # type: ignore[no-any-return]


def _wide(tensor: Tensor) -> Tensor:
    return wide(tensor.detach().to("cpu", copy=True))


class PlainTraining(PlainModel):
    """The run's training on one device, each step from a state that is given."""

    def __init__(self, model: nn.Module, run: RunConfig, world: World) -> None:
        """`model` is consumed."""
        self._run = plain = _in_a_loop(run)
        metric = MetricSums(run.metric_size, run.metric.build()) if run.metric_size else None
        super().__init__(model, run.model.with_own_loss(run.loss.build()), device=world.device, metric=metric)
        in_arithmetic(model, dtype_of(run.precision), world.device)
        self._optimizer = plain.optimizer.build(model.parameters(), plain, world.device_type)
        self._taken = 0

    def state(self) -> dict[str, Tensor]:
        """Parameters and buffers after the last step: the live ones."""
        return self._model.state_dict()

    def train(self, before: Mapping[str, Tensor], batch: Batch) -> tuple[float, dict[str, Tensor]]:
        """Update from `before`: the loss there, and the gradients, before they are clipped, of the last evaluation."""
        run, losses, gradients = self._run, list[float](), dict[str, Tensor]()
        self._taken += 1
        for group in self._optimizer.param_groups if run.lr_schedule.changes else ():
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * run.rate_factor(self._taken)

        def evaluated() -> float:
            losses.append(self.step(self.state() if losses else before, batch, precision=run.precision).loss)
            named = self._model.named_parameters()
            gradients.update({name: p.grad.to("cpu", copy=True) for name, p in named if p.grad is not None})
            if run.clip_norm is not None:
                nn.utils.clip_grad_norm_(self._model.parameters(), run.clip_norm)
            return losses[-1]

        if isinstance(run.optimizer, Lbfgs):
            self._optimizer.step(evaluated)  # which moves the model, and evaluates again
        else:
            evaluated()
            self._optimizer.step()
        return losses[0], gradients


class PlainOptimizer:
    """The run's optimizer in fp64 on the CPU, over copies of all of a model's parameters.

    `state`: what it begins with: key → parameter → tensor. Afterwards it keeps its own. `examples`: of each key what
    `kept_of_one` has found. `steps`: updates until then; None: as many as `state` says.
    """

    def __init__(
        self,
        run: RunConfig,
        model: nn.Module,
        state: Mapping[str, Mapping[str, Tensor]],
        examples: Mapping[str, Any],
        *,
        steps: int | None,
    ) -> None:
        plain = _in_a_loop(run)
        self._held = {name: nn.Parameter(_wide(each)) for name, each in model.named_parameters()}
        self._optimizer = plain.optimizer.build(self._held.values(), plain, "cpu")
        for key, tensors in state.items():
            example = examples[key]
            for name in tensors.keys() & self._held.keys():
                value: Any = wide(tensors[name])
                if _is_number(example):
                    first = tensors[name].flatten()[0].real.item() if tensors[name].numel() else 0.0
                    number = float(first if steps is None or key != "step" else steps)
                    value = torch.full_like(example, number) if torch.is_tensor(example) else type(example)(number)
                self._optimizer.state[self._held[name]][key] = value

    @torch.no_grad()
    def step(self, before: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The parameters with a gradient after an update at the full rate; all in fp64, as real numbers."""
        moved = {name: parameter for name, parameter in self._held.items() if name in gradients}
        for name, parameter in self._held.items():
            parameter.grad = gradients.get(name)
        for name, parameter in moved.items():
            parameter.copy_(wide(before[name]))
        self._optimizer.step()
        return {name: parameter.detach() for name, parameter in moved.items()}


def clipped(gradients: Mapping[str, Tensor], most: float | None) -> dict[str, Tensor]:
    """Gradients in fp64, scaled down by torch's own function where their norm exceeds `most`; None: nothing does."""
    parameters = {name: nn.Parameter(torch.zeros_like(wide(each))) for name, each in gradients.items()}
    for name, parameter in parameters.items():
        parameter.grad = wide(gradients[name]).clone()
    if most is not None:
        nn.utils.clip_grad_norm_(parameters.values(), most)
    return {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}


def kept_of_one(run: RunConfig) -> tuple[dict[str, Any], str]:
    """Key → what the run's optimizer keeps of a parameter; and why its updates can't be followed, else empty.

    They can where all that it keeps is numbers and tensors of the parameter's shape, and where it updates each
    parameter by itself, and not at random. The same on every rank.
    """
    try:
        alone, kept = updated(run)
        together, _ = updated(run, parameters=2)
    except Exception as error:  # a user's optimizer may raise anything
        return {}, f"the optimizer does not update a parameter by itself ({type(error).__name__})"
    if odd := [
        key for key, value in kept.items() if not (_is_number(value) or getattr(value, "shape", None) == alone.shape)
    ]:
        return {}, f"the optimizer keeps something of another shape than the parameter's ({', '.join(odd)})"
    if not torch.equal(alone, together):
        return {}, "the optimizer updates parameters together, or at random"
    return {key: value for key, value in kept.items() if value is not None}, ""


def updated(run: RunConfig, *, parameters: int = 1, factors: Sequence[float] = (1.0,)) -> tuple[Tensor, dict[str, Any]]:
    """The first of some small parameters after an update for each factor of the rate; and what is kept of it."""
    plain = _in_a_loop(run)
    several = [nn.Parameter(torch.linspace(1.0 + place, 2.0, 6).reshape(2, 3).double()) for place in range(parameters)]
    optimizer = plain.optimizer.build(several, plain, "cpu")
    for factor in factors:
        for group in optimizer.param_groups if factor != 1 else ():
            group["lr"] *= factor
        for parameter in several:
            parameter.grad = parameter.detach().flip(1) - 1.5
        optimizer.step()
    return several[0].detach(), dict(sorted(optimizer.state[several[0]].items()))


def _in_a_loop(run: RunConfig) -> RunConfig:
    """The run with torch's own choice of an update, which on a CPU is a loop over parameters."""
    changes = {"implementation": "auto"} if "implementation" in run.optimizer.__struct_fields__ else {}
    return msgspec.structs.replace(
        run, graph=False, compile=False, optimizer=msgspec.structs.replace(run.optimizer, **changes)
    )


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
