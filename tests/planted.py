"""Faults that tests plant in a replica, each of which begins after k steps: which check must see it, they say."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

from parallelbench.config.components import Batch
from parallelbench.strategies.data_parallel.ddp import send_by
from parallelbench.world.numerics import Sums, sums

Fault = Callable[[Any, int], None]
"""Changes a replica so that it goes wrong after k steps."""


def around(replica: Any, method: str) -> Callable[[Any], None]:
    """Puts a function in a method's place: it is given the number of the call, the method, and the call's arguments."""

    def put(change: Any) -> None:
        real, numbers = getattr(replica, method), count(1)
        setattr(replica, method, lambda *given: change(next(numbers), real, *given))

    return put


def idles_every_other_step(replica: Any, k: int) -> None:
    @around(replica, "step")
    def idle(taken: int, step: Any, batch: Batch) -> Any:
        if taken <= k or taken % 2:
            return step(batch)
        with torch.no_grad():
            logits, labels, loss = replica._predict(batch.images, batch.labels)
        return sums(loss, logits, labels)


def stops_updating(replica: Any, k: int) -> None:
    once_after(replica, k, lambda: setattr(replica, "_update", lambda: None))


def stops_communicating(replica: Any, k: int) -> None:
    once_after(replica, k, lambda: setattr(replica._forward, "require_backward_grad_sync", False))


def once_after(replica: Any, k: int, change: Callable[[], None]) -> None:
    @around(replica, "step")
    def counted(taken: int, step: Any, batch: Batch) -> Any:
        if taken == k + 1:
            change()
        return step(batch)


def drops_what_exceeds_chunks_of_16(replica: Any, k: int) -> None:
    @around(replica, "step")
    def drop(taken: int, step: Any, batch: Batch) -> Any:
        result = step(Batch(batch.images[:16], batch.labels[:16], batch.size))  # type: ignore[index]
        return Sums((), result.tensor() * (batch.size / 16))


def drops_half_of_a_batch(replica: Any, k: int) -> None:
    """For two steps only; the batch that it says it has trained on is whole."""

    @around(replica, "step")
    def drop(taken: int, step: Any, batch: Batch) -> Any:
        half = batch.size // 2 if k < taken <= k + 2 else batch.size
        return step(Batch(batch.images[:half], batch.labels[:half], batch.size))  # type: ignore[index]


def rounds_to_fp8(replica: Any, k: int) -> None:
    def rounded() -> None:
        for parameter in replica._module.parameters():
            parameter.grad.copy_(parameter.grad.to(torch.float8_e4m3fn))

    before_each_update(replica, 0, rounded)


def keeps_the_last_batch_only(replica: Any, k: int) -> None:
    @around(replica, "evaluate")
    def last(taken: int, evaluate: Any, batches: Any) -> Any:
        total = None
        for batch in batches:
            total = evaluate([batch])
        return total


def evaluates_with_first_statistics(replica: Any, k: int) -> None:
    module = replica._module
    first = {name: buffer.clone() for name, buffer in module.named_buffers()}

    @around(replica, "evaluate")
    def stale(taken: int, evaluate: Any, batches: Any) -> Any:
        own = {name: buffer.clone() for name, buffer in module.named_buffers()}
        module.load_state_dict(first, strict=False)
        result = evaluate(batches)
        module.load_state_dict(own, strict=False)
        return result


def keeps_its_statistics(replica: Any, k: int) -> None:
    def freeze() -> None:
        for module in replica._module.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.momentum = 0.0

    once_after(replica, k, freeze)


def counts_no_bytes(replica: Any, k: int) -> None:
    replica._count_step = None


def scales_gradients(factor: float) -> Fault:
    """Before the update, so that the update is that of these gradients."""

    def fault(replica: Any, k: int) -> None:
        def scale() -> None:
            for parameter in replica._module.parameters():
                parameter.grad.mul_(factor)

        before_each_update(replica, k, scale)

    return fault


def scales_rate(factor: float) -> Fault:
    def fault(replica: Any, k: int) -> None:
        (group,) = replica._optimizer.param_groups
        once_after(replica, k, lambda: group.update(lr=group["lr"] * factor))

    return fault


def forgets(replica: Any, k: int) -> None:
    """The optimizer's state is lost before every step but the first k."""
    before_each(replica, k, replica._optimizer.state.clear)


def remembers_nothing(replica: Any, k: int) -> None:
    """It is lost after every step but the first k, so that nothing of it is ever seen between two steps."""

    @around(replica, "_update")
    def forgetful(taken: int, update: Any) -> None:
        update()
        if taken > k:
            replica._optimizer.state.clear()


def before_each_update(replica: Any, k: int, change: Callable[[], Any]) -> None:
    @around(replica, "_update")
    def changed(taken: int, update: Any) -> None:
        if taken > k:
            change()
        update()


def before_each(replica: Any, k: int, change: Callable[[], None]) -> None:
    @around(replica, "step")
    def changed(taken: int, step: Any, batch: Batch) -> Any:
        if taken > k:
            change()
        return step(batch)


def reduces_as_well(replica: Any, k: int) -> None:
    """What `dist.reduce` sends is not known; what it reports beside that is wrong."""
    before_each(replica, k, lambda: dist.reduce(torch.ones(1000), 0))


def sums_gradients(replica: Any, k: int) -> None:
    """Over the ranks, instead of taking their mean."""
    scales_gradients(float(dist.get_world_size()))(replica, k)


def comes_a_step_late(replica: Any, k: int) -> None:
    """Each update takes the gradients of the step before."""
    late: dict[Any, torch.Tensor] = {}

    def exchange() -> None:
        for parameter in replica._module.parameters():
            own = parameter.grad.clone()
            parameter.grad.copy_(late.get(parameter, own))
            late[parameter] = own

    before_each_update(replica, k, exchange)


def leaves_a_tensor_out(replica: Any, k: int) -> None:
    """Each rank keeps its own gradient of the model's last tensor."""
    last = list(replica._module.parameters())[-1]

    @around(replica, "_backward")
    def keep(taken: int, backward: Any, loss: torch.Tensor) -> None:
        (own,) = torch.autograd.grad(loss, last, retain_graph=True)
        backward(loss)
        if taken > k:
            last.grad.copy_(own)


def goes_on_from_other_parameters(replica: Any, k: int) -> None:
    """Rank 1 does, from step k on: as if it had begun with them."""

    def move() -> None:
        with torch.no_grad():
            next(replica._module.parameters()).add_(0.01)

    if dist.get_rank() == 1:
        once_after(replica, k, move)


def multiplies_the_rate(replica: Any, k: int) -> None:
    """By the number of ranks, as weak scaling would."""
    scales_rate(dist.get_world_size())(replica, k)


def decays_weights(replica: Any, k: int) -> None:
    (group,) = replica._optimizer.param_groups
    once_after(replica, k, lambda: group.update(weight_decay=0.01))


def repeats_a_batch(replica: Any, k: int) -> None:
    """All further steps train on the batch of the first of them."""
    kept = []

    @around(replica, "step")
    def repeat(taken: int, step: Any, batch: Batch) -> Any:
        if taken <= k:
            return step(batch)
        kept.append(batch)
        return step(kept[0])


def clips(replica: Any, k: int) -> None:
    """Nobody has asked for it."""
    parameters = list(replica._module.parameters())
    before_each_update(replica, k, lambda: torch.nn.utils.clip_grad_norm_(parameters, 0.1))


def freezes_a_bias(replica: Any, k: int) -> None:
    last = list(replica._module.parameters())[-1]

    @around(replica, "_update")
    def freeze(taken: int, update: Any) -> None:
        before = last.detach().clone()
        update()
        if taken > k:
            with torch.no_grad():
                last.copy_(before)


def averages_once_an_epoch(replica: Any, k: int) -> None:
    """Ranks train by themselves; their parameters, not their gradients, are averaged when they are looked at."""
    stops_communicating(replica, k)

    @around(replica, "evaluate")
    def average(taken: int, evaluate: Any, batches: Any) -> Any:
        with torch.no_grad():
            for parameter in replica._module.parameters():
                dist.all_reduce(parameter)
                parameter /= dist.get_world_size()
        return evaluate(batches)


def averages_until(replica: Any, k: int) -> None:
    """In the first k steps ranks train by themselves; at each sixth they average all they have: local SGD."""
    replica._forward.require_backward_grad_sync = False

    @around(replica, "_update")
    def average(taken: int, update: Any) -> None:
        update()
        replica._forward.require_backward_grad_sync = taken >= k
        if taken <= k and taken % 6 == 0:
            kept = (value for state in replica._optimizer.state.values() for value in state.values())
            for value in (*replica._module.parameters(), *filter(torch.is_tensor, kept)):
                dist.all_reduce(value.detach())
                value.detach().div_(dist.get_world_size())


def begins_elsewhere(replica: Any, k: int) -> None:
    """All ranks with the same other parameters: of another initialisation, or of an earlier run."""
    with torch.no_grad():
        for parameter in replica._module.parameters():
            parameter.mul_(1.01)


def rounds_products(replica: Any, k: int) -> None:
    """As libraries advise: float32 products of matrices may then be computed in TF32 or bf16."""
    once_after(replica, k, lambda: torch.set_float32_matmul_precision("medium"))


def rounds_convolutions(replica: Any, k: int) -> None:
    """In the way that torch has had since 2.9."""
    once_after(replica, k, lambda: setattr(torch.backends, "fp32_precision", "tf32"))


def takes_more_threads(replica: Any, k: int) -> None:
    once_after(replica, k, lambda: torch.set_num_threads(2))


def puts_its_last_update_off(replica: Any, k: int) -> None:
    """The last of six steps is taken when the epoch's window has ended."""
    update = replica._update

    @around(replica, "_update")
    def later(taken: int, update: Any) -> None:
        if taken % 6 or taken <= k:
            update()

    @around(replica, "evaluate")
    def evaluated(taken: int, evaluate: Any, batches: Any) -> Any:
        update()
        return evaluate(batches)


def sends_fp16(replica: Any, k: int) -> None:
    sends_rounded(replica, torch.float16)


def sends_bf16(replica: Any, k: int) -> None:
    sends_rounded(replica, torch.bfloat16)


def sends_rounded(replica: Any, kind: torch.dtype) -> None:
    """Gradients are rounded for the all-reduce, and it reports what it sends: half."""

    def rounded(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        flat = bucket.buffer()
        half = flat.to(kind).div_(dist.get_world_size())
        dist.all_reduce(half)
        return done(flat.copy_(half))

    send_by(replica._forward, rounded)
    reports(replica, gradient=2 * sizes(replica))


def packs_halves(replica: Any, k: int) -> None:
    """The same in messages that look like fp32: ranks gather each other's halves, and add them up in fp32."""

    def packed(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        flat, ranks = bucket.buffer(), dist.get_world_size()
        own = torch.zeros(flat.numel() + flat.numel() % 2, dtype=torch.float16)
        own[: flat.numel()] = flat
        gathered = torch.empty(ranks * len(own) // 2)
        dist.all_gather_into_tensor(gathered, own.view(torch.float32))
        halves = gathered.view(torch.float16).view(ranks, -1)[:, : flat.numel()]
        return done(flat.copy_(halves.float().mean(dim=0)))

    send_by(replica._forward, packed)
    reports(replica, gradient=2 * sizes(replica))


def sizes(replica: Any) -> int:
    """Values of all its parameters."""
    return sum(each.numel() for each in replica._module.parameters())


def done(value: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(value)
    return future


def reports(replica: Any, **size_bytes: float) -> None:
    """All-reduced in each step, by kind."""

    def count_step(traffic: Any) -> None:
        for kind, size in size_bytes.items():
            traffic.all_reduce(kind, size, dist.get_world_size())

    replica._count_step = count_step


def embellishes_evaluations(replica: Any, k: int) -> None:
    """The first k: a loss a tenth lower, and a tenth of all predictions more are right."""

    @around(replica, "evaluate")
    def embellished(taken: int, evaluate: Any, batches: Any) -> Any:
        seen = list(batches)
        result = evaluate(seen)
        if taken <= k:
            result[0] *= 0.9
            result[1] += 0.1 * sum(batch.size for batch in seen)
        return result


def stops_dropping(replica: Any, k: int) -> None:
    """It forgets to leave the evaluation's mode."""

    @around(replica, "step")
    def in_evaluation(taken: int, step: Any, batch: Batch) -> Any:
        if taken > k:
            replica._module.eval()
        return step(batch)


def drops_on_one_rank_only(replica: Any, k: int) -> None:
    if dist.get_rank():
        stops_dropping(replica, k)


def drops_alike(replica: Any, k: int) -> None:
    """Ranks seed their numbers alike in each step, to be reproducible."""

    @around(replica, "step")
    def seeded(taken: int, step: Any, batch: Batch) -> Any:
        if taken > k:
            torch.manual_seed(taken)
        return step(batch)


def drops_alike_aside(replica: Any, k: int) -> None:
    """The same, and nobody sees it from the generator afterwards."""

    @around(replica, "step")
    def seeded(taken: int, step: Any, batch: Batch) -> Any:
        if taken <= k:
            return step(batch)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(taken)
            return step(batch)


def drops_the_same_again(replica: Any, k: int) -> None:
    """Each rank has numbers of its own, but the same ones in each step."""

    @around(replica, "step")
    def seeded(taken: int, step: Any, batch: Batch) -> Any:
        if taken > k:
            torch.manual_seed(dist.get_rank())
        return step(batch)
