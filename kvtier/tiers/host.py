"""Tiers of slots in slabs, within one budget; the host tier is one: shared memory."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from kvtier.identity import Shape
from kvtier.numa import NODES
from kvtier.tiers.arena import HUGE_BYTES, Arena, unit_of
from kvtier.tiers.pool import Budget, HostPool, SlotPool
from kvtier.tiers.slab import Slab, SlotState
from kvtier.tiers.space import HostSpace, Plot
from kvtier.types import align_up

__all__ = ["HostPool", "HostTier", "Slab", "SlabTier", "SlotState"]

SLAB_SLOTS = 16
"""A slab is large enough for this many of a pool's largest slots, where the budget allows."""


P = TypeVar("P", bound=SlotPool)


class Memory(Budget, Protocol):
    """A budget as a tier needs it."""

    used: int

    @property
    def scopes(self) -> list[str]:
        """Scopes that have arenas."""

    def close_idle(self, keep: Collection[str]) -> None:
        """Close the arenas of scopes that are not in `keep` and have no slab."""

    def check(self, plots: Iterable[Plot]) -> list[str]:
        """Broken invariants, given the ranges of all slabs."""

    def close(self) -> None:
        """Close all arenas."""


class SlabTier(Generic[P]):
    """At most `budget_bytes` in slabs; 0 is legal and holds nothing. All calls come from one thread."""

    def __init__(self, budget_bytes: int, slab_bytes: int, space: Memory) -> None:
        self.budget_bytes = budget_bytes
        self._slab_bytes = slab_bytes
        self._memory = space
        self._pools: dict[tuple[str, Shape], P] = {}

    @property
    def used_bytes(self) -> int:
        """Bytes of slabs given to pools."""
        return self._memory.used

    @property
    def free_bytes(self) -> int:
        """Bytes of the budget that are in no slab."""
        return self.budget_bytes - self._memory.used

    @property
    def scopes(self) -> list[str]:
        """Scopes that have arenas."""
        return self._memory.scopes

    @property
    def pools(self) -> list[P]:
        """All pools, oldest first."""
        return list(self._pools.values())

    def pool(self, scope: str, shape: Shape) -> P:
        """The pool of all caches of one shape in one scope, made on first ask. Raises OSError."""
        found = self._pools.get((scope, shape))
        if found is None:
            self._memory.arenas(scope)
            found = self._make(scope, shape)
            self._pools[scope, shape] = found
        return found

    def _make(self, scope: str, shape: Shape) -> P:
        """A new pool of this tier's kind."""
        raise NotImplementedError

    def idle(self, pools: Collection[P], scopes: Collection[str]) -> list[P]:
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
        self._memory.close_idle(scopes)
        return gone

    def checking(self) -> Iterator[list[str]]:
        """Broken invariants of the budget and of every pool, in steps between which they may change."""
        yield self._memory.check(slab.plot for pool in self.pools for slab in pool.slabs)
        for pool in self.pools:
            yield from pool.checking()

    def check(self) -> list[str]:
        """All of them at once."""
        return [line for step in self.checking() for line in step]

    def close(self) -> None:
        """Stop the background thread and close the arenas; views handed out stay readable."""
        self._memory.close()

    def _slab_size(self, shape: Shape) -> int:
        """Bytes of a pool's slabs: every group of a small budget still gets a few."""
        largest = max(shape.slot_bytes)
        size = min(max(self._slab_bytes, SLAB_SLOTS * largest), self.budget_bytes // (4 * len(shape.slot_bytes)))
        size = max(size, largest)
        unit = HUGE_BYTES if self._memory.huge else unit_of(size)
        return max(size // unit * unit, align_up(largest, unit))


class HostTier(SlabTier[HostPool]):
    """All host memory.

    `hugepages` is auto or never; `prefault` keeps the whole budget backed by
    memory that is charged to this process. `nodes` is sysfs's folder of NUMA nodes, `near` the one of the GPU.
    """

    def __init__(
        self,
        budget_bytes: int,
        *,
        slab_bytes: int = 64 << 20,
        hugepages: str = "auto",
        prefault: bool = True,
        nodes: Path = NODES,
        near: int | None = None,
    ) -> None:
        self._space = HostSpace(budget_bytes, hugepages=hugepages, prefault=prefault, nodes=nodes, near=near)
        super().__init__(budget_bytes, slab_bytes, self._space)

    def arenas(self, scope: str) -> list[Arena]:
        """The scope's arenas, made on first ask. Raises OSError."""
        return self._space.arenas(scope)

    def settle(self, timeout_s: float = 30.0) -> bool:
        """Wait until no memory is left to be warmed or punched out; whether that came in time. Blocks."""
        return self._space.settle(timeout_s)

    def _make(self, scope: str, shape: Shape) -> HostPool:
        """A new pool."""
        return HostPool(scope, shape, self._slab_size(shape), self._space)
