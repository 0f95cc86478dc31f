"""The host tier: pools of slots in shared memory, within one budget."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from kvtier.identity import Shape
from kvtier.tiers.arena import HUGE_BYTES, NODES, Arena, grain
from kvtier.tiers.pool import HostPool
from kvtier.tiers.slab import Slab, SlotState
from kvtier.tiers.space import HostSpace
from kvtier.types import align_up

__all__ = ["HostPool", "HostTier", "Slab", "SlotState"]

SLAB_SLOTS = 16
"""A slab is large enough for this many of a pool's largest slots, where the budget allows."""


class HostTier:
    """All host memory: at most `budget_bytes` in slabs; 0 is legal and holds nothing.

    All calls come from one thread. `hugepages` is auto or never; `prefault` keeps the whole budget backed by
    memory that is charged to this process. `nodes` is sysfs's folder of NUMA nodes.
    """

    def __init__(
        self,
        budget_bytes: int,
        *,
        slab_bytes: int = 64 << 20,
        hugepages: str = "auto",
        prefault: bool = True,
        nodes: Path = NODES,
    ) -> None:
        self.budget_bytes = budget_bytes
        self._slab_bytes = slab_bytes
        self._space = HostSpace(budget_bytes, hugepages=hugepages, prefault=prefault, nodes=nodes)
        self._pools: dict[tuple[str, Shape], HostPool] = {}

    @property
    def used_bytes(self) -> int:
        """Bytes of slabs given to pools."""
        return self._space.used

    @property
    def free_bytes(self) -> int:
        """Bytes of the budget that are in no slab."""
        return self.budget_bytes - self._space.used

    @property
    def scopes(self) -> list[str]:
        """Scopes that have arenas."""
        return self._space.scopes

    @property
    def pools(self) -> list[HostPool]:
        """All pools, oldest first."""
        return list(self._pools.values())

    def arenas(self, scope: str) -> list[Arena]:
        """The scope's arenas, made on first ask. Raises OSError."""
        return self._space.arenas(scope)

    def pool(self, scope: str, shape: Shape) -> HostPool:
        """The pool of all caches of one shape in one scope, made on first ask. Raises OSError."""
        found = self._pools.get((scope, shape))
        if found is None:
            self._space.arenas(scope)
            found = HostPool(scope, shape, self._slab_size(shape), self._space)
            self._pools[scope, shape] = found
        return found

    def idle(self, pools: Collection[HostPool], scopes: Collection[str]) -> list[HostPool]:
        """Give back what is not in use: empty pools beside `pools`, which are returned, and arenas beside `scopes`'.

        A scope's arenas stay while some slot of it is used; they are made again when they are asked for.
        """
        gone = [pool for pool in self.pools if pool not in pools and not any(slab.used for slab in pool.slabs)]
        for pool in gone:
            pool.shed()
            del self._pools[pool.scope, pool.shape]
        for pool in self.pools:
            if pool.scope not in scopes:
                pool.shed()
        self._space.close_idle(scopes)
        return gone

    def settle(self, timeout_s: float = 30.0) -> bool:
        """Wait until no memory is left to be warmed or punched out; whether that came in time. Blocks."""
        return self._space.settle(timeout_s)

    def checking(self) -> Iterator[list[str]]:
        """Broken invariants of the budget and of every pool, in steps between which they may change."""
        yield self._space.check(slab.plot for pool in self.pools for slab in pool.slabs)
        for pool in self.pools:
            yield from pool.checking()

    def check(self) -> list[str]:
        """All of them at once."""
        return [line for step in self.checking() for line in step]

    def close(self) -> None:
        """Stop the background thread and close the arenas; views handed out stay readable."""
        self._space.close()

    def _slab_size(self, shape: Shape) -> int:
        """Bytes of a pool's slabs: every group of a small budget still gets a few."""
        largest = max(shape.slot_bytes)
        size = min(max(self._slab_bytes, SLAB_SLOTS * largest), self.budget_bytes // (4 * len(shape.slot_bytes)))
        size = max(size, largest)
        unit = HUGE_BYTES if self._space.huge else grain(size)
        return max(size // unit * unit, align_up(largest, unit))
