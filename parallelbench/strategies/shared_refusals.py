"""Refusals that several strategies share; loads no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from parallelbench.config.components import Traits
    from parallelbench.config.rule import Rules
    from parallelbench.config.run import RunConfig


_MOST_NAMES = 3


def two_devices(run: RunConfig) -> Rules:
    """Refuses one device, where there is nothing to distribute."""
    yield (
        run.devices < 2,
        f"strategy={run.strategy.name} needs two devices or more",
        ("devices=2", "strategy=single devices=1", "devices"),
    )


def one_device(run: RunConfig) -> Rules:
    """Refuses several devices."""
    yield (
        run.devices != 1,
        f"strategy={run.strategy.name} trains on one device, not devices={run.devices}",
        ("devices=1", "strategy"),
    )


def one_node(run: RunConfig) -> Rules:
    """Refuses several nodes, whose GPUs one process can't drive."""
    yield (
        run.nodes > 1,
        f"strategy={run.strategy.name} drives all GPUs from one process and so needs nodes=1, not nodes={run.nodes}",
        (on_one_node(run), "strategy"),
    )


def on_one_node(run: RunConfig) -> str:
    """What brings a run onto one node: fewer devices, where a node has too few."""
    most = run.site.devices_per_node
    return "nodes=1" if run.launcher.fewest_nodes(run.devices, run.site) == 1 else f"nodes=1 devices={most}"


def some_worker(run: RunConfig, servers: int) -> Rules:
    """Refuses so many servers where none of the devices is left to train."""
    yield (
        run.devices <= servers,
        f"strategy.servers={servers} of devices={run.devices} leaves no worker",
        ("strategy.servers", f"devices={servers + 1}", "devices"),
    )


def no_fp16(run: RunConfig, reason: str) -> Rules:
    """Refuses fp16, whose gradients are scaled by one process; `reason` says why the strategy has none that could."""
    yield (
        run.precision == "fp16",
        f"precision=fp16 with strategy={run.strategy.name} is refused: {reason}",
        ("precision=bf16", "precision"),
    )


SCALES_ALONE = "each process would scale gradients on its own"
"""The reason of strategies whose processes hold different parts of the model."""


def first_of(*reasons: str) -> str:
    """The first that is one; empty: none is."""
    return next(filter(None, reasons), "")


def why_untouched(traits: Traits) -> str:
    """Why a strategy that waits for the gradient of each parameter in each step can't have them; empty: it can."""
    if not traits.untouched:
        return ""
    mend = "let build call requires_grad_(False) on what is not trained"
    if traits.draws:
        mend = "multiply what a layer adds by what it draws, instead of leaving it out"
    return f"steps leave {_named(traits.untouched)} without a gradient, which it waits for: {mend}, or {_SINGLE}"


def why_uncut(traits: Traits) -> str:
    """Why a strategy that cuts each parameter along its first dimension can't; empty: it can."""
    if traits.scalars:
        return (
            f"it cuts parameters along their first dimension, which {_named(traits.scalars)} lacks: let it have one "
            "value in one dimension (torch.ones(1)), or choose strategy=ddp"
        )
    if traits.empty:
        return f"it can't cut {_named(traits.empty)}, which has no values: leave it out, or choose strategy=ddp"
    return ""


def why_complex(traits: Traits) -> str:
    """Why a strategy whose messages or vectors hold real numbers can't; empty: it can."""
    if not traits.complex_parameters:
        return ""
    return (
        f"it exchanges real parameters only, and {_named(traits.complex_parameters)} is complex: hold real and "
        f"imaginary parts in one (torch.view_as_real) and put them together in forward (torch.view_as_complex), or "
        f"{_SINGLE}"
    )


def why_shared(run: RunConfig, traits: Traits) -> str:
    """Why a strategy that takes a model layer by layer can't; empty: it can."""
    for names in traits.shared:
        layers = [name.partition(".")[0] for name in names]
        if not set(layers) <= set(run.model.anatomy().tied):
            return (
                f"layers {' and '.join(layers)} share a parameter: name them in the `tied` of the model's `anatomy` "
                "(docs/adding-a-model.md), or choose strategy=ddp"
            )
    return ""


_SINGLE = "choose strategy=single with devices=1"


def _named(names: tuple[str, ...]) -> str:
    """The first of them."""
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
