"""The optimizers: specifications that build a `torch.optim.Optimizer`. Importing this loads no torch."""

from __future__ import annotations

import functools
from abc import abstractmethod
from importlib import metadata
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from msgspec import Meta

from parallelbench.config.components import Optimizer

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from torch import nn

    from parallelbench.config.rule import Rules
    from parallelbench.config.run import RunConfig


Fraction = Annotated[float, Meta(ge=0, lt=1)]
NonNegative = Annotated[float, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]


@functools.cache
def _torch_version() -> tuple[int, int]:
    """Of the installed torch, without importing it: refusals need it on a login node, too."""
    major, minor, *_ = metadata.version("torch").split(".")
    return int(major), int(minor)


class FirstOrder(Optimizer, frozen=True, kw_only=True):
    """Optimizers that take one gradient per step, and update each parameter by itself."""

    torch_name: ClassVar[str]
    """Its class in `torch.optim`."""

    weight_decay: NonNegative
    """L2 penalty (decoupled in AdamW)."""
    implementation: Literal["auto", "for_loop", "foreach", "fused"]
    """How torch executes the update; auto: fused on CUDA (foreach where torch has no such fused update),
    torch's own default on CPU; foreach where the update is compiled (`compile_scope=step`)."""

    can_be_captured: ClassVar[bool] = True
    counts_on_host: ClassVar[bool] = False
    """Whether torch counts updates on the host unless it is told that they are captured."""
    fuses_dtensors: ClassVar[bool] = False
    """Whether torch's fused update takes DTensors, which sharded strategies hold."""
    fuses_on_cuda_since: ClassVar[tuple[int, int]] = (2, 0)
    """First version of torch with a fused update for GPUs."""

    def rules(self, run: RunConfig, device_type: str) -> Rules:
        """Updates that torch lacks, and those that would synchronise host and device in every step."""
        who, key = f"optimizer.implementation={self.implementation}", "optimizer.implementation"
        fused, in_python = self.implementation == "fused", self.implementation in ("for_loop", "foreach")
        yield (
            fused and not self._fuses_tensors(run),
            f"{who} with optimizer={self.name} and strategy={run.strategy.name} is refused: torch has no fused update "
            "of this optimizer for sharded parameters (DTensors)",
            (f"{key}=auto", key),
        )
        needed = self.implementation == "auto" and (run.graph or run.precision == "fp16")
        since, installed = (".".join(map(str, each)) for each in (self.fuses_on_cuda_since, _torch_version()))
        yield (
            not self._fuses_on(device_type) and (fused or needed),
            f"{who} with optimizer={self.name}, graph={str(run.graph).lower()} and precision={run.precision} is "
            f"refused: it needs a fused update for GPUs, which torch has since version {since}, and {installed} is "
            "installed",
            (f"{key}=auto", "graph", "precision=bf16", "optimizer"),
        )
        yield (
            run.graph and in_python,
            f"{who} with graph=true is refused: the host's part of an update would be captured as it was at the first "
            "step",
            (f"{key}=auto", key),
        )
        yield (
            run.compiles_step and fused,
            f"{who} with compile_scope=step is refused: a fused update is one kernel already, which torch.compile "
            "leaves as it is",
            (f"{key}=auto", "compile_scope"),
        )
        yield (
            run.compiles_step and self.counts_on_host and run.precision == "fp64",
            f"compile_scope=step with optimizer={self.name} and precision=fp64 is refused: torch's compiled update "
            "corrects the bias of the running means in fp32",
            ("precision=fp32", "compile_scope"),
        )
        yield (
            device_type == "cuda" and run.precision == "fp16" and in_python,
            f"{who} with precision=fp16 makes the host wait for the GPU in every step (the gradient scaler's check)",
            (f"{key}=auto", f"{key}=fused"),
        )

    def build(self, parameters: Iterable[nn.Parameter], run: RunConfig, device_type: str) -> torch.optim.Optimizer:
        import torch

        how = {
            "auto": self._automatic(run, device_type),
            "for_loop": {"foreach": False, "fused": False},
            "foreach": {"foreach": True},
            "fused": {"fused": True},
        }[self.implementation]
        arguments = {"lr": self.scaled_lr(run), "weight_decay": self.weight_decay, **how, **self.options()}
        if self.counts_on_host and (run.graph or (run.compiles_step and device_type == "cuda")):
            arguments["capturable"] = True
        optimizer: torch.optim.Optimizer = getattr(torch.optim, self.torch_name)(parameters, **arguments)
        if run.compiles_step:
            optimizer.step = torch.compile(optimizer.step)  # type: ignore[method-assign, assignment]
        return optimizer

    def _automatic(self, run: RunConfig, device_type: str) -> dict[str, bool]:
        if run.compiles_step:
            return {"foreach": True}
        can_fuse = self._fuses_tensors(run) and self._fuses_on(device_type)
        return {"fused" if can_fuse else "foreach": True} if device_type == "cuda" else {}

    def _fuses_tensors(self, run: RunConfig) -> bool:
        return self.fuses_dtensors or not run.strategy.shards_tensors

    def _fuses_on(self, device_type: str) -> bool:
        return device_type != "cuda" or _torch_version() >= self.fuses_on_cuda_since

    def kept(self) -> tuple[str, ...] | None:
        """Torch's names of what is kept of each parameter, by which other frameworks hand it over; None: not known."""
        return None

    def states_per_parameter(self) -> int | None:
        """Of what is kept all but the number of updates."""
        kept = self.kept()
        return None if kept is None else sum(key != "step" for key in kept)

    @abstractmethod
    def options(self) -> dict[str, Any]:
        """Its arguments besides the learning rate and the weight decay."""


class Sgd(FirstOrder, frozen=True, kw_only=True):
    """Stochastic gradient descent."""

    can_be_compiled: ClassVar[bool] = True
    torch_name: ClassVar[str] = "SGD"

    momentum: Fraction
    """Share of the previous update that is kept."""
    nesterov: bool
    """Look ahead along the momentum (Sutskever et al. 2013)."""

    def rules(self, run: RunConfig, device_type: str) -> Rules:
        yield (
            self.nesterov and not self.momentum,
            "optimizer.nesterov=true with optimizer.momentum=0 is refused: there is no momentum to look ahead along",
            ("optimizer.momentum=0.9", "optimizer.nesterov=false"),
        )
        yield from super().rules(run, device_type)

    def options(self) -> dict[str, Any]:
        return {"momentum": self.momentum, "nesterov": self.nesterov}

    def kept(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.momentum else ()


class Adam(FirstOrder, frozen=True, kw_only=True):
    """Adam (Kingma and Ba 2015, arXiv 1412.6980)."""

    can_be_compiled: ClassVar[bool] = True
    counts_on_host: ClassVar[bool] = True
    fuses_dtensors: ClassVar[bool] = True
    torch_name: ClassVar[str] = "Adam"

    beta1: Fraction
    """Decay of the gradient's running mean."""
    beta2: Fraction
    """Decay of the squared gradient's running mean."""
    eps: Positive
    """Added to the denominator."""

    def options(self) -> dict[str, Any]:
        return {"betas": (self.beta1, self.beta2), "eps": self.eps}

    def kept(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", "step")


class AdamW(Adam, frozen=True, kw_only=True):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, arXiv 1711.05101)."""

    can_be_compiled: ClassVar[bool] = True
    torch_name: ClassVar[str] = "AdamW"


class Adagrad(FirstOrder, frozen=True, kw_only=True):
    """Adagrad (Duchi et al. 2011)."""

    can_be_compiled: ClassVar[bool] = True
    fuses_on_cuda_since: ClassVar[tuple[int, int]] = (2, 12)
    torch_name: ClassVar[str] = "Adagrad"

    eps: Positive
    """Added to the denominator."""

    def options(self) -> dict[str, Any]:
        return {"eps": self.eps}

    def kept(self) -> tuple[str, ...]:
        return ("sum", "step")


class Lbfgs(Optimizer, frozen=True, kw_only=True):
    """L-BFGS with a line search for the strong Wolfe conditions (Liu and Nocedal 1989): full batches only.

    A step is one iteration: it takes the gradient at the start and at every step length that the line search tries, and
    counts as one pass over the training set.
    """

    history_size: Annotated[int, Meta(ge=1, le=1000)]
    """Pairs of vectors, each of the parameters' length, that approximate the curvature."""
    line_search_evaluations: Annotated[int, Meta(ge=1, le=1000)]
    """Step lengths after the first that an iteration tries at most."""

    def rules(self, run: RunConfig, device_type: str) -> Rules:
        """Strategies that update by one gradient, mini-batches, and losses too coarse for a line search."""
        who = f"with optimizer={self.name} is refused"
        yield (
            not run.strategy.evaluates_repeatedly,
            f"optimizer={self.name} with strategy={run.strategy.name} is refused: a step needs several gradients, as "
            "sandblaster_lbfgs and single take them",
            ("optimizer", "strategy"),
        )
        needed = self.full_batch(run) // (run.global_batch_size // run.batch_size)
        yield (
            run.strategy.evaluates_repeatedly and run.global_batch_size != self.full_batch(run),
            f"batch_size={run.batch_size} {who}: an iteration takes the whole training set of data={run.data.name}",
            (f"batch_size={needed}",),
        )
        yield (
            run.precision in ("fp16", "bf16"),
            f"precision={run.precision} {who}: the line search compares losses that differ by less than it resolves",
            ("precision=fp32", "precision=fp64"),
        )
        yield run.channels_last, f"channels_last=true {who}", ("channels_last",)
        yield (
            run.measure.waits != "allowed" and device_type == "cuda",
            f"measure.waits={run.measure.waits} {who}: a line search reads each loss",
            ("measure.waits",),
        )
        yield (
            run.lr_schedule.changes,
            f"lr_schedule={run.lr_schedule.name} {who}: a line search finds each step's length",
            ("lr_schedule=constant",),
        )
        if run.clip_norm is not None:
            yield (
                True,
                f"clip_norm={run.clip_norm:g} {who}: a line search needs the gradient of the loss itself",
                ("clip_norm",),
            )

    def full_batch(self, run: RunConfig) -> int:
        """The training set, less the samples that can't be divided among the data shards."""
        samples = run.data.train_samples
        return samples - samples % run.strategy.data_parallel_degree(run)

    def build(self, parameters: Iterable[nn.Parameter], run: RunConfig, device_type: str) -> torch.optim.Optimizer:
        import torch

        return torch.optim.LBFGS(
            parameters,
            lr=self.scaled_lr(run),
            max_iter=1,
            max_eval=1 + self.line_search_evaluations,
            history_size=self.history_size,
            line_search_fn="strong_wolfe",
        )
