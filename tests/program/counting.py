"""A program that trains in many ways, one after the other; each has a journal of its own. See `test_counting.py`."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import parallelbench_shim as shim
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

CASES: dict[str, Callable[[], None]] = {}
SGD = torch.optim.SGD


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


def model() -> nn.Linear:
    return nn.Linear(2, 2)


def loss(of: nn.Module) -> torch.Tensor:
    return of(torch.ones(3, 2)).square().mean()


def train(of: nn.Module, optimizer: Any, steps: int = 4) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        loss(of).backward()
        optimizer.step()


@case
def plain() -> None:
    train(m := model(), SGD(m.parameters(), lr=0.1))


@case
def accumulation() -> None:
    m = model()
    optimizer = SGD(m.parameters(), lr=0.1)
    for _ in range(4):
        for _ in range(3):
            loss(m).backward()
        optimizer.step()
        optimizer.zero_grad()


@case
def lr_schedule() -> None:
    m = model()
    optimizer = SGD(m.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for _ in range(4):
        loss(m).backward()
        optimizer.step()
        schedule.step()


@case
def lbfgs() -> None:
    """Several evaluations per step."""
    m = model()
    optimizer = torch.optim.LBFGS(m.parameters(), lr=0.01, max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(m)
        value.backward()
        return value

    for _ in range(4):
        optimizer.step(closure)


@case
def closure_with_all() -> None:
    """As Lightning does."""
    m = model()
    optimizer = SGD(m.parameters(), lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(m)
        value.backward()
        return value

    for _ in range(4):
        optimizer.step(closure)


class Child(SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@case
def step_of_the_parent() -> None:
    m = model()
    SGD(m.parameters(), lr=0.1)  # from now on, the parent's step has hooks, too
    train(m, Child(m.parameters(), lr=0.1))


class Sharpness(torch.optim.Optimizer):
    """A wrapper that is an optimizer, as SAM is: two backwards per step, one of them within."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        closure()
        self.inner.step()


@case
def wrapper() -> None:
    m = model()
    optimizer = Sharpness(SGD(m.parameters(), lr=0.1))
    for _ in range(4):
        loss(m).backward()
        optimizer.step(lambda: loss(m).backward())


class Duck:
    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@case
def duck() -> None:
    train(m := model(), Duck(SGD(m.parameters(), lr=0.1)))


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@case
def zero_redundancy() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    with one_rank():
        train(m := model(), ZeroRedundancyOptimizer(m.parameters(), SGD, lr=0.1))


@case
def post_local_sgd() -> None:
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    with one_rank():
        m = model()
        train(m, PostLocalSGDOptimizer(SGD(m.parameters(), lr=0.1), PeriodicModelAverager(1)))


def in_backward(m: nn.Module) -> None:
    for parameter in m.parameters():
        optimizer = SGD([parameter], lr=0.1)

        def step(parameter: torch.Tensor, optimizer: SGD = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)


@case
def optimizer_in_backward() -> None:
    in_backward(m := model())
    for _ in range(4):
        loss(m).backward()


@case
def nested_backward() -> None:
    """Recomputation runs a backward within the backward."""
    in_backward(m := model())
    for _ in range(4):
        checkpoint(loss, m, use_reentrant=True)
        start = torch.ones(3, 2, requires_grad=True)
        checkpoint(m, start, use_reentrant=True).sum().backward()


@case
def sub_groups() -> None:
    """As DeepSpeed ZeRO-3: a step for each sub-group, and one of each to begin with."""
    m = model()
    optimizer = SGD(m.parameters(), lr=0.1)
    for begun in range(5):
        if begun:
            loss(m).backward()
        for _ in range(5):
            optimizer.step()


@case
def skipped_by_scaler() -> None:
    """The second of five steps overflows."""
    m = model()
    optimizer, scaler = SGD(m.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    for step in range(5):
        optimizer.zero_grad()
        scaler.scale(loss(m) * (float("inf") if step == 1 else 1)).backward()
        scaler.step(optimizer)
        scaler.update()


@case
def compiled_step() -> None:
    m = model()
    optimizer = SGD(m.parameters(), lr=0.1)
    step = torch.compile(optimizer.step, backend="eager")
    for _ in range(4):
        loss(m).backward()
        step()


class Descent(torch.optim.Optimizer):
    """Can be traced as a whole, which torch's own can't."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(0.1 * parameter.grad)


@case
def compiled_whole_step() -> None:
    m = model()
    optimizer = Descent(m.parameters())
    torch._dynamo.reset()  # it has given up on calls of `step`, in the case before
    step = torch.compile(optimizer.step, backend="eager", fullgraph=True)
    for _ in range(4):
        loss(m).backward()
        before = m.weight.detach().clone()
        step()
        assert torch.equal(m.weight, before - 0.1 * m.weight.grad)


@case
def hand_written() -> None:
    m = model()
    for _ in range(4):
        loss(m).backward()
        with torch.no_grad():
            for parameter in m.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None


@case
def no_backward() -> None:
    """As evolution strategies do."""
    m = model()
    optimizer = SGD(m.parameters(), lr=0.1)
    for _ in range(4):
        for parameter in m.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()


def adversaries(critic_steps: int = 1) -> None:
    generator, critic = model(), model()
    of_critic, of_generator = SGD(critic.parameters(), lr=0.1), torch.optim.Adam(generator.parameters())
    for _ in range(4):
        for _ in range(critic_steps):
            train(critic, of_critic, 1)
        train(generator, of_generator, 1)


@case
def gan() -> None:
    adversaries()


@case
def gan_steps_of_0() -> None:
    adversaries()


@case
def gan_steps_of_1() -> None:
    adversaries(critic_steps=3)


def two_after_one_backward() -> None:
    m, other = model(), model()
    first, second = SGD(m.parameters(), lr=0.1), torch.optim.AdamW(other.parameters())
    for _ in range(4):
        (loss(m) + loss(other)).backward()
        first.step()
        second.step()


@case
def two_optimizers() -> None:
    two_after_one_backward()


@case
def two_optimizers_steps_of_1() -> None:
    two_after_one_backward()


@case
def by_grad() -> None:
    from torch.autograd import grad

    m = model()
    optimizer = SGD(m.parameters(), lr=0.1)
    for _ in range(4):
        for parameter, of_it in zip(m.parameters(), grad(loss(m), list(m.parameters())), strict=True):
            parameter.grad = of_it
        optimizer.step()


@case
def gradient_penalty() -> None:
    m = model()
    optimizer = SGD(m.parameters(), lr=0.1)
    for _ in range(4):
        value = loss(m)
        (penalty,) = torch.autograd.grad(value, [m.weight], create_graph=True)
        (value + penalty.square().sum()).backward()
        optimizer.step()


class Failing(SGD):
    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise RuntimeError("a planted failure")
        return super().step(closure)


@case
def step_raises() -> None:
    """Two of six steps fail, and the program goes on."""
    m = model()
    SGD(m.parameters(), lr=0.1)
    optimizer = Failing(m.parameters(), lr=0.1)
    for step in range(6):
        optimizer.fails = step in (0, 3)
        loss(m).backward()
        with contextlib.suppress(RuntimeError):
            optimizer.step()


@case
def closure_raises() -> None:
    """Within the parent's step, within the child's: two calls are left open."""
    m = model()
    SGD(m.parameters(), lr=0.1)
    optimizer = Child(m.parameters(), lr=0.1)
    for step in range(6):
        loss(m).backward()
        with contextlib.suppress(ZeroDivisionError):
            optimizer.step(lambda divisor=step % 3: 1 / divisor)


@case
def inner_step_raises() -> None:
    m = model()
    inner = Failing(m.parameters(), lr=0.1)

    class Forgiving(Sharpness):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            with contextlib.suppress(RuntimeError):
                inner.step()

    optimizer = Forgiving(inner)
    for step in range(4):
        inner.fails = step % 2 == 0
        loss(m).backward()
        optimizer.step()


@case
def backward_raises() -> None:
    """The third of five backwards fails; its batch is left out."""
    m = model()
    optimizer = SGD(m.parameters(), lr=0.1)

    def fail(grad: torch.Tensor) -> None:
        raise RuntimeError("a planted failure")

    for step in range(5):
        value = loss(m)
        if step == 2:
            value.register_hook(fail)
        try:
            value.backward()
        except RuntimeError:
            continue
        optimizer.step()


@case
def optimizer_per_epoch() -> None:
    m = model()
    kept = []
    for _ in range(2):
        kept.append(SGD(m.parameters(), lr=0.1))
        train(m, kept[-1], 2)


@case
def in_a_thread() -> None:
    thread = threading.Thread(target=plain)
    thread.start()
    thread.join()


@case
def loaders() -> None:
    """Two epochs of four batches, the last of them smaller; after each, two batches are evaluated."""
    m = model()
    optimizer = SGD(m.parameters(), lr=0.1)
    training = DataLoader(TensorDataset(torch.ones(14, 2)), batch_size=4)
    evaluation = DataLoader(TensorDataset(torch.ones(6, 2)), batch_size=3)
    for _ in range(2):
        for (batch,) in training:
            m(batch).sum().backward()
            optimizer.step()
        with torch.no_grad():
            for (batch,) in evaluation:
                m(batch)


@case
def odd_batches() -> None:
    """A dict; images of different sizes that are not stacked; a scalar."""
    m = model()
    optimizer = SGD(m.parameters(), lr=0.1)
    for length, collate in (
        (8, lambda rows: {"x": torch.stack([row[0] for row in rows])}),
        (9, lambda rows: tuple(zip(*[(torch.ones(3, 5 + place, 4), 0) for place, _ in enumerate(rows)], strict=True))),
        (10, lambda rows: torch.tensor(1.0)),
    ):
        for _ in DataLoader(TensorDataset(torch.ones(length, 2)), batch_size=4, drop_last=True, collate_fn=collate):
            train(m, optimizer, 1)


class Idle(torch.optim.Optimizer):
    """Looks like one, and updates nothing."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


@case
def idle_step() -> None:
    train(m := model(), Idle(m.parameters()))


@case
def rate_of_0() -> None:
    """Of a schedule by mistake."""
    m = model()
    optimizer = torch.optim.AdamW(m.parameters(), lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.0)
    train(m, optimizer)


@case
def detached_loss() -> None:
    m = model()
    optimizer = SGD(m.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        loss(m).detach().requires_grad_().backward()
        optimizer.step()


@case
def gradients_of_another() -> None:
    """The optimizer has a copy's parameters."""
    train(model(), SGD(model().parameters(), lr=0.1))


@case
def gradients_that_are_cleared() -> None:
    m = model()
    optimizer = SGD(m.parameters(), lr=0.1, momentum=0.9)
    for _ in range(4):
        loss(m).backward()
        optimizer.zero_grad()
        optimizer.step()


@case
def frozen_layers() -> None:
    """Two of four parameters, of which the optimizer knows."""
    m = nn.Sequential(model(), model())
    m[0].requires_grad_(False)
    train(m, SGD(m.parameters(), lr=0.1))


@case
def fused_step() -> None:
    """Its kernel counts no update of the tensors."""
    train(m := model(), SGD(m.parameters(), lr=0.1, fused=True))


class ByData(torch.optim.Optimizer):
    """As older optimizers do: these updates aren't counted either."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter.data.add_(parameter.grad.data, alpha=-0.1)


@case
def update_by_data() -> None:
    train(m := model(), ByData(m.parameters()))


@case
def rows_of_a_large_table() -> None:
    """Seven of 300,000 numbers change."""
    m = nn.EmbeddingBag(100_000, 3)
    optimizer = SGD(m.parameters(), lr=0.1)
    for _ in range(4):
        m(torch.tensor([[7, 8]])).square().sum().backward()
        optimizer.step()


@case
def odd_tensors() -> None:
    """Not contiguous, complex, of two bytes, empty, a scalar."""
    tensors = [torch.ones(3, 5).t(), torch.ones(3, dtype=torch.complex64), torch.ones(5, dtype=torch.bfloat16)]
    parameters = [nn.Parameter(each) for each in (*tensors, torch.ones(0), torch.ones(()))]
    optimizer = SGD(parameters, lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        torch.stack([each.abs().square().sum().float() for each in parameters]).sum().backward()
        optimizer.step()


class Averaging(SGD):
    """As schedule-free ones: the parameters lie between an average and where the gradients lead."""

    def step(self, closure: Any = None) -> Any:
        before = [each.detach().clone() for each in self.param_groups[0]["params"]]
        super().step(closure)
        for each, old in zip(self.param_groups[0]["params"], before, strict=True):
            each.data.lerp_(old, 0.9)


@case
def averages() -> None:
    train(m := model(), Averaging(m.parameters(), lr=0.1))


def main() -> None:
    folder, journals = os.environ[shim.FOLDER], {}
    asked = sys.argv[1:] or list(CASES)
    for name in asked:
        before = set(Path(folder).iterdir())
        _, _, number = name.partition("_steps_of_")
        os.environ[shim.STEPS_OF] = number
        shim.recorder = shim.Recorder(torch, folder)
        CASES[name]()
        shim.finish()
        (journals[name],) = [path.name for path in set(Path(folder).iterdir()) - before]
    print(json.dumps(journals))


if __name__ == "__main__":
    main()
