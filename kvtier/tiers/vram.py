"""The device tier: pools of slots in one allocation of GPU memory, which one trust scope has to itself."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final, NamedTuple

from kvtier.identity import Shape
from kvtier.tiers.arena import places_for
from kvtier.tiers.extents import Extents
from kvtier.tiers.host import SlabTier
from kvtier.tiers.pool import LISTED, SlotPool
from kvtier.tiers.slab import ARENA_SHIFT, Slab
from kvtier.tiers.space import Plot

DEVICE_ARENA: Final = 1024
"""Its arena's number: no host has so many NUMA nodes."""


def on_device(handle: int) -> bool:
    """Whether a slot's or an item's handle is one of device memory."""
    return handle >= 0 and (handle & LISTED - 1) >> ARENA_SHIFT == DEVICE_ARENA


class VramArena(NamedTuple):
    """`bytes` of device memory that begin at `address` on the device."""

    number: int
    bytes: int
    address: int


class Land:
    """The arena's address space: every byte is in a slab (`used`) or free."""

    def __init__(self, arena: VramArena) -> None:
        self.arena = arena
        self.used = 0
        self.free = Extents()
        if arena.bytes:
            self.free.add(0, arena.bytes)


class VramSpace:
    """One range of device memory; the scope that asks first keeps it, so that nobody sees what another scope left."""

    huge = False

    def __init__(self, arena: VramArena) -> None:
        self.owner = ""
        self.closed = False
        """The device failed: nothing is given out any more."""
        self.used = 0
        self._land = Land(arena)

    @property
    def scopes(self) -> list[str]:
        """The scope that has the arena."""
        return [self.owner] if self.owner else []

    def arenas(self, scope: str) -> list[VramArena]:
        """The arena, where it is this scope's or nobody's."""
        if not self._land.arena.bytes or scope != (self.owner or scope):
            return []
        self.owner = scope
        return [self._land.arena]

    def take(self, scope: str, want: int, least: int) -> Plot | None:
        """A range of `want` bytes, or of what is left but at least `least`; or None."""
        if self.closed or not self.arenas(scope):
            return None
        free = self._land.free
        for unit, fewest in places_for(want, least):
            size = min(want, free.largest(unit)) // unit * unit
            if size >= fewest and (lo := free.fit(size, unit)) is not None:
                free.discard(lo, lo + size)
                self.used += size
                return Plot(self._land, lo, lo + size)
        return None

    def give(self, plot: Plot) -> None:
        """Take the range of a slab back."""
        self._land.free.add(plot.lo, plot.hi)
        self.used -= plot.hi - plot.lo

    def close_idle(self, keep: Collection[str]) -> None:
        """Nothing: the memory is taken once."""

    def check(self, plots: Iterable[Plot]) -> list[str]:
        """Broken invariants, given the ranges of all slabs."""
        taken = Extents()
        wrong = []
        for _, lo, hi in plots:
            if taken.discard(lo, hi) or self._land.free.covers(lo, lo + 1):
                wrong.append(f"device memory at {lo:#x} is in two slabs, or free")
            taken.add(lo, hi)
        if taken.bytes != self.used or taken.bytes + self._land.free.bytes != self._land.arena.bytes:
            wrong.append(f"slabs hold {taken.bytes} bytes of device memory, {self.used} counted")
        return wrong

    def close(self) -> None:
        """Nothing: whoever took the memory gives it back."""


class VramPool(SlotPool):
    """Slots in device memory, of which none is used again once the device failed."""

    def __init__(self, scope: str, shape: Shape, slab_bytes: int, space: VramSpace) -> None:
        super().__init__(scope, shape, slab_bytes, space)
        self._vram = space

    def reopen_slab(self, slab: Slab) -> None:
        """The same, where the device did not fail while the slab was closed."""
        if not self._vram.closed:
            super().reopen_slab(slab)


class DeviceTier(SlabTier[SlotPool]):
    """Slots in device memory, whose bytes only a device moves. `sick` says why it takes nothing any more."""

    def __init__(self, address: int, budget_bytes: int, slab_bytes: int) -> None:
        """`budget_bytes` of device memory from `address` on; 0: no tier."""
        self.space = VramSpace(VramArena(DEVICE_ARENA, budget_bytes, address))
        super().__init__(budget_bytes, slab_bytes, self.space)
        self.sick = ""

    def _make(self, scope: str, shape: Shape) -> SlotPool:
        """A new pool; one of another scope than the owner's never has a slot."""
        return VramPool(scope, shape, self._slab_size(shape), self.space)
