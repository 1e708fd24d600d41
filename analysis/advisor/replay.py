"""Pipeline schedules as lists of actions, and their replay with given times of stages and sends."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from analysis.advisor.layouts import Values


_FIRST_ROUNDS, _CYCLE_ROUNDS = 6, 12
Kind = Literal["gpipe", "1f1b", "interleaved_1f1b"]
Action = tuple[bool, int, int]
"""Whether it is a forward pass, of which stage, of which micro-batch."""


def actions(kind: Kind, devices: int, micro_batches: int, stages_per_device: int = 1) -> list[list[Action]]:
    """Each device's actions in their order, as torch's schedules have them; stages go round and round the devices.

    gpipe: Huang et al. 2019. 1f1b: PipeDream-Flush, Narayanan et al. 2021 (arXiv 2006.09503). interleaved_1f1b:
    Narayanan et al. 2021 (arXiv 2104.04473), where `micro_batches` is a multiple of `devices`.
    """
    if kind == "gpipe":
        every = range(micro_batches)
        return [[(True, d, m) for m in every] + [(False, d, m) for m in every] for d in range(devices)]
    if kind == "1f1b":
        return [_alternating(devices, micro_batches, 1, device=d, warm_up=devices - d) for d in range(devices)]
    rounds = (stages_per_device - 1) * devices
    return [
        _alternating(devices, micro_batches, stages_per_device, device=d, warm_up=rounds + 1 + 2 * (devices - 1 - d))
        for d in range(devices)
    ]


def _alternating(devices: int, micro_batches: int, chunks: int, *, device: int, warm_up: int) -> list[Action]:
    """`warm_up` forward passes, then backward and forward in turn until the forwards have ended, then backwards."""
    total = chunks * micro_batches
    group = min(devices, micro_batches) if chunks > 1 else micro_batches

    def action(forward: bool, step: int) -> Action:
        chunk = step // group % chunks
        micro = step // (group * chunks) * group + step % group
        return forward, (chunk if forward else chunks - 1 - chunk) * devices + device, micro

    start = min(warm_up, total)
    order = [action(True, step) for step in range(start)]
    for step in range(total):
        order.append(action(False, step))
        if start + step < total:
            order.append(action(True, start + step))
    return order


@dataclass(frozen=True)
class _Turn:
    """One action in an order in which every action stands behind what it waits for."""

    forward: bool
    stage: int
    before: int | None
    """Where the action before it on the same device stands."""
    same_device: tuple[int, ...]
    """Where actions stand whose results it takes from its own device."""
    sent: tuple[int, ...]
    """Where actions stand whose results another device sends."""


@cache
def _ordered(kind: Kind, devices: int, micro_batches: int, chunks: int) -> list[_Turn]:
    """All devices' actions, merged."""
    orders = actions(kind, devices, micro_batches, chunks)
    last, places, turns = devices * chunks - 1, dict[Action, int](), list[_Turn]()
    positions = [0] * devices
    while len(turns) < sum(map(len, orders)):
        known = len(turns)
        for device, order in enumerate(orders):
            while positions[device] < len(order):
                action, position = order[positions[device]], positions[device]
                awaited = _awaited(action, last)
                if any(other not in places for other in awaited):
                    break
                near = tuple(places[other] for other in awaited if other[1] % devices == device)
                far = tuple(places[other] for other in awaited if other[1] % devices != device)
                before = places[order[position - 1]] if position else None
                places[action] = len(turns)
                turns.append(_Turn(action[0], action[1], before, near, far))
                positions[device] += 1
        assert len(turns) > known, "the schedule waits for itself"
    return turns


def _awaited(action: Action, last: int) -> list[Action]:
    """The actions whose results an action takes."""
    forward, stage, micro = action
    if forward:
        return [(True, stage - 1, micro)] if stage else []
    return [(True, stage, micro), *([(False, stage + 1, micro)] if stage < last else [])]


def replayed(
    kind: Kind,
    devices: int,
    micro_batches: int,
    forward_s: Sequence[Values],
    backward_s: Sequence[Values],
    *,
    send_s: Values,
) -> Values:
    """Seconds from the first action to the last, where the times of each stage are arrays of equal shape.

    A send keeps neither device busy and delays the other by `send_s`. `micro_batches` is a number, alike for all.
    """
    ends: list[Values] = []
    latest = np.zeros(())
    for turn in _ordered(kind, devices, micro_batches, len(forward_s) // devices):
        ready = np.zeros(()) if turn.before is None else ends[turn.before]
        for place in turn.same_device:
            ready = np.maximum(ready, ends[place])
        for place in turn.sent:
            ready = np.maximum(ready, ends[place] + send_s)
        ends.append(ready + (forward_s if turn.forward else backward_s)[turn.stage])
        if not turn.forward:
            latest = np.maximum(latest, ends[-1])
    return latest


def pipeline_s(
    kind: Kind,
    devices: int,
    micro_batches: int,
    forward_s: Sequence[Values],
    backward_s: Sequence[Values],
    *,
    send_s: Values,
) -> Values:
    """The same, replaying only as many micro-batches as it takes until the times repeat, which GPipe's never do.

    After some rounds of as many micro-batches as there are devices, each round adds the same time, or a few rounds in
    turn do: 2 to 5 where sends are slow. Twelve rounds are made of such turns, but for those of 5, 1 % apart at most.
    """

    def of(count: int) -> Values:
        return replayed(kind, devices, count, forward_s, backward_s, send_s=send_s)

    cycle = _CYCLE_ROUNDS * devices
    cycles = 0 if kind == "gpipe" else (micro_batches - _FIRST_ROUNDS * devices) // cycle
    if cycles <= 1:
        return of(micro_batches)
    fewest = micro_batches - cycles * cycle
    short, longer = of(fewest), of(fewest + cycle)
    return longer + (cycles - 1) * (longer - short)
