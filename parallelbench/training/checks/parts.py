"""Whether a model, a loss and a metric are what every strategy takes them for: asked before training."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from parallelbench.errors import ConfigError, count_of, raised_at
from parallelbench.models.modules import blank, built
from parallelbench.training.observers import metric_value

if TYPE_CHECKING:
    from torch import nn

    from parallelbench.config.run import RunConfig


_SAMPLES_OF_LOGITS = 4
"""Or a whole global batch where that is smaller: what removes dimensions of one sees the training's samples."""
_LARGE = 1_000_000
"""Parameters from which a model is called on tensors without values."""


def check_logits(run: RunConfig) -> None:
    """Raise `ConfigError` unless the model maps blank samples to (samples, *label_shape, classes).

    Fewer classes than the data have can't be labels; more would be trained on what no sample is. A language model that
    declares its own vocabulary has that many.
    """
    samples = min(_SAMPLES_OF_LOGITS, run.global_batch_size)
    asked = count_of(samples, "blank sample")
    called = f"model={run.model.name}, built for num_classes={run.data.num_classes} and called on {asked}"
    try:
        found = _output(run, samples)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # a user's model may raise anything
        raise ConfigError(f"{called}, fails: {raised_at(error)}; mend it, or choose another model") from None
    expected = (samples, *run.data.label_shape, run.logits_per_label)
    if not isinstance(found, torch.Tensor):
        raise ConfigError(f"{called}, gives {type(found).__name__}: return one tensor, of shape {expected}")
    if found.shape != expected:
        raise ConfigError(f"{called}, gives shape {tuple(found.shape)}, not {expected}: {_fix(run, found, expected)}")


def _fix(run: RunConfig, found: torch.Tensor, expected: tuple[int, ...]) -> str:
    classes = expected[-1]
    if found.shape[:-1] != expected[:-1]:
        per = "for each position of each sample" if run.data.label_shape else "for each sample"
        return f"return {classes} logits {per}, and no other dimensions"
    if run.data.label_shape and found.shape[-1] > classes:
        return f"let its last layer give {classes} logits, or declare vocabulary_entries={found.shape[-1]} in the model"
    return f"let its last layer give {classes} logits, or correct num_classes of data={run.data.name}"


def _output(run: RunConfig, samples: int) -> Any:
    """What the model gives in evaluation."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # optimizers have loaded it

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        # A user's model may look at values; then it has to get some.
        with contextlib.suppress(Exception), FakeTensorMode(allow_non_fake_inputs=True):
            model = _built(run)
            if sum(each.numel() for each in model.parameters()) >= _LARGE:
                return model(blank(run.data, samples))
        # Small ones get values at once: what code keeps outside its model (a mask in a cache) can be used again.
        return _built(run)(blank(run.data, samples))


def _built(run: RunConfig) -> nn.Sequential:
    return built(run, torch.float32).eval()


_SAMPLES = 8
_ROUNDING = 1e-4
"""Largest relative difference of two means: of a sum it would be a half."""


def check_mean(run: RunConfig, device: torch.device | str) -> None:
    """Raise `ConfigError` unless the loss of random outputs is one number, and the mean of that of their halves.

    Losses that such outputs have no finite loss of are taken as they are.
    """
    mean = run.loss.build()
    draw = torch.Generator().manual_seed(0)
    shape, classes = (_SAMPLES, *run.data.label_shape), run.data.num_classes
    dtype = torch.float64 if run.precision == "fp64" else torch.float32
    logits = torch.rand((*shape, classes), generator=draw, dtype=torch.float64).to(device, dtype)
    labels = torch.randint(classes, shape, generator=draw).to(device)
    built = f"loss={run.loss.name}: the function that loss.build returns must give the mean over a batch as one number"
    whole = mean(logits, labels)
    if not isinstance(whole, torch.Tensor) or whole.shape != ():
        found = f"a tensor of shape {tuple(whole.shape)}" if isinstance(whole, torch.Tensor) else type(whole).__name__
        raise ConfigError(f'{built}, but it gives {found}: average over all labels, e.g. by reduction="mean"')
    if not whole.isfinite():
        return
    halves = torch.stack([mean(*half) for half in zip(logits.chunk(2), labels.chunk(2), strict=True)]).mean().item()
    if not abs(whole.item() - halves) <= _ROUNDING * max(abs(whole.item()), abs(halves)):
        raise ConfigError(
            f"{built}, but of a batch it is {whole.item():.4g} and the mean of its two halves' is {halves:.4g}: divide "
            'by the number of labels, e.g. by reduction="mean" without weights of classes'
        )


_ROUNDING_OF_SUMS = 1e-4
"""Largest relative difference of two sums: of a mean it would be a half."""


def check_sums(run: RunConfig, device: torch.device | str) -> None:
    """Raise `ConfigError` unless the sums over random outputs are those of their halves, and give a finite number.

    So must outputs that all predict one class, as a model may in its first epochs.
    """
    if not run.metric_size:
        return
    draw = torch.Generator().manual_seed(0)
    shape, classes = (_SAMPLES, *run.data.label_shape), run.logits_per_label
    dtype = torch.float64 if run.precision == "fp64" else torch.float32
    logits = torch.rand((*shape, classes), generator=draw, dtype=torch.float64).to(device, dtype)
    labels = torch.randint(run.data.num_classes, shape, generator=draw).to(device)
    whole = _sums(run, logits, labels)
    first, second = (_sums(run, *half) for half in zip(logits.chunk(2), labels.chunk(2), strict=True))
    both = first + second
    off = (whole - both).abs().nan_to_num(torch.inf)
    if not (off <= _ROUNDING_OF_SUMS * torch.maximum(whole.abs(), both.abs())).all():
        place = int(off.argmax())
        raise ConfigError(
            f"{_metric_of(run)} must give sums, but number {place + 1} of a batch is "
            f"{whole[place].item():.4g}, and of its two halves together {both[place].item():.4g}: add up over labels, "
            "and divide in value"
        )
    alike = torch.zeros_like(logits).index_fill_(-1, torch.zeros(1, dtype=torch.int64, device=device), 1.0)
    for sums, predictions in ((whole, "random predictions"), (_sums(run, alike, labels), "equal predictions")):
        if metric_value(run, sums.tolist()) is None:
            raise ConfigError(
                f"metric={run.metric.name}: {type(run.metric).__qualname__}.value gives no finite number for "
                f"{predictions}: return a number for any sums"
            )


def _sums(run: RunConfig, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    size = run.metric_size
    try:
        found: Any = run.metric.build()(logits, labels)
    except (Exception, SystemExit) as error:  # a user's metric may raise anything
        raise ConfigError(f"{_metric_of(run)} fails: {raised_at(error)}") from None
    if not isinstance(found, torch.Tensor) or found.shape != (size,):
        kind = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else type(found).__name__
        raise ConfigError(f"{_metric_of(run)} must give a tensor of shape ({size},), as size says, but it gives {kind}")
    return found.double()


def _metric_of(run: RunConfig) -> str:
    return f"metric={run.metric.name}: the function that metric.build returns"
