"""A slab: slots of one size, each in one state, counted."""

from __future__ import annotations

import enum
from typing import Final

import numpy as np
import numpy.typing as npt

from kvtier.tiers.space import Plot

ARENA_SHIFT: Final = 44
"""A slot's address is its arena's number shifted by this, plus its byte offset in the arena."""
OFFSET_MASK: Final = (1 << ARENA_SHIFT) - 1

Addresses = npt.NDArray[np.int64]


class SlotState(enum.IntEnum):
    """What a slot is used for; leased is derived by the store."""

    FREE = 0
    RESERVED = 1
    FILLING = 2
    CACHED = 3
    IN_FLIGHT = 4
    RELOCATING = 5
    DOOMED = 6
    QUARANTINED = 7


class Slab:
    """Slots of one group from address `lo` to below `hi`; `used` of them are not free. `closed`: no new ones."""

    __slots__ = ("_first", "_raw", "closed", "counts", "group", "hi", "lo", "plot", "slot_bytes", "slots", "states")

    def __init__(self, plot: Plot, group: int, slot_bytes: int) -> None:
        self.plot = plot
        self.group = group
        self.slot_bytes = slot_bytes
        self.slots = (plot.hi - plot.lo) // slot_bytes
        number: int = plot.ground.arena.number
        self.lo = number << ARENA_SHIFT | plot.lo
        self.hi = self.lo + self.slots * slot_bytes
        self.closed = False
        self.counts: Addresses = np.zeros(len(SlotState), np.int64)
        self.counts[SlotState.FREE] = self.slots
        self._raw = bytearray(self.slots)
        self.states: npt.NDArray[np.uint8] = np.frombuffer(self._raw, np.uint8)
        self._first = 0  # no slot below is free

    @property
    def free(self) -> int:
        """Slots that are free."""
        return int(self.counts[SlotState.FREE])

    @property
    def used(self) -> int:
        """Slots that are not free."""
        return self.slots - int(self.counts[SlotState.FREE])

    def take(self, n: int) -> Addresses:
        """Reserve up to `n` free slots, lowest first; their addresses."""
        if n == 1:
            index = np.array([self._raw.find(SlotState.FREE, self._first)], np.int64)
            index = index[index >= 0]
        else:
            index = np.flatnonzero(self.states[self._first :] == SlotState.FREE)[:n] + self._first
        if index.size:
            self.states[index] = SlotState.RESERVED
            self.counts[SlotState.FREE] -= index.size
            self.counts[SlotState.RESERVED] += index.size
            self._first = int(index[-1]) + 1
        return index * self.slot_bytes + self.lo

    def index(self, addresses: Addresses) -> Addresses:
        """Which slots the ascending addresses name. Raises AssertionError where one is not a used slot's."""
        index, off = np.divmod(addresses - self.lo, self.slot_bytes)
        if off.any() or not self.states[index].all():
            raise AssertionError(f"not a used slot of [{self.lo:#x}, {self.hi:#x}): {addresses[:4]}")
        return index

    def move(self, index: Addresses, state: SlotState) -> None:
        """Put the slots, ascending, into `state`."""
        self.counts -= np.bincount(self.states[index], minlength=len(SlotState))
        self.counts[state] += index.size
        self.states[index] = state
        if state is SlotState.FREE:
            self._first = min(self._first, int(index[0]))

    def check(self) -> list[str]:
        """Broken invariants."""
        wrong = []
        if not np.array_equal(np.bincount(self.states, minlength=len(SlotState)), self.counts):
            wrong.append(f"slab {self.lo:#x}: counts disagree with states")
        if (self.states[: self._first] == SlotState.FREE).any():
            wrong.append(f"slab {self.lo:#x}: free slots that are never looked at")
        if self.hi - self.lo > self.plot.hi - self.plot.lo:
            wrong.append(f"slab {self.lo:#x}: slots outside its range")
        return wrong
