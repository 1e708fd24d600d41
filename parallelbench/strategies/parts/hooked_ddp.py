"""DDP with a communication hook that attribution can tell from backward."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch.nn.parallel import DistributedDataParallel

from parallelbench.measure.spans import Spanned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch
    from torch._C._distributed_c10d import GradBucket

    Hook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]


class HookedDdp(DistributedDataParallel):
    """Calls its communication hook, if it gets one, through a method of its own, which may be wrapped later.

    The reducer keeps the hook it was given for good. DDP's own all-reduces have no hook: the reducer starts them in
    C++, within backward.
    """

    _hook: Hook | None = None

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """Register a hook, as DDP does."""
        self._hook = hook
        # The reducer, in C++, would keep a module that its hook refers to, with its memory and connections, for good.
        module = weakref.ref(self)
        super().register_comm_hook(state, lambda state, bucket: _alive(module).reduce_bucket(state, bucket))

    def reduce_bucket(self, state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Call the hook with a full bucket, while backward goes on."""
        assert self._hook is not None
        return self._hook(state, bucket)

    def spanned(self) -> Iterable[Spanned]:
        """The hook is communication: what it computes and how long it waits is no part of backward."""
        return [Spanned(self, "reduce_bucket", "communication")] if self._hook is not None else []


def _alive(module: weakref.ref[HookedDdp]) -> HookedDdp:
    this = module()
    assert this is not None, "a reducer works for a living module only"
    return this
