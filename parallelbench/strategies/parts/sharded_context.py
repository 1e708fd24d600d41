"""The replica of FSDP × context parallelism."""

from __future__ import annotations

from parallelbench.strategies.parts.context_replica import ContextReplica
from parallelbench.strategies.parts.fsdp_shards import ShardedReplica


class ShardedContextReplica(ContextReplica, ShardedReplica):
    """A part of every sequence, and a shard of every layer, which gathers it when it needs it."""
