"""The slots of all caches of one shape in one scope."""

from __future__ import annotations

import bisect
import heapq
import itertools
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvtier.identity import Shape
from kvtier.tiers.arena import HUGE_BYTES
from kvtier.tiers.slab import ARENA_SHIFT, OFFSET_MASK, Addresses, Slab, SlotState
from kvtier.tiers.space import HostSpace, Plot
from kvtier.types import NO_COPY, align_up

LISTED: Final = 1 << 62
"""Set in the handle of an item of several slots: its list is kept beside."""
LEFT_OVER: Final = 64
"""One part in so many of a slab may be in no slot, so that it is whole huge pages."""


class _Group:
    """Slabs of one group, by address and by fullness."""

    def __init__(self, number: int, slot_bytes: int, per_item: int) -> None:
        self.number = number
        self.slot_bytes = slot_bytes
        self.per_item = per_item
        self.items: dict[int, Addresses] = {}
        self.slabs: dict[int, Slab] = {}
        self.slots = self.used = self.bytes = 0
        """Of all slabs, of which a large host has thousands: nobody adds them up to hand out a slot."""
        self.lows: list[int] = []
        self.open: list[tuple[int, int]] = []  # heap of (free slots, lo): an entry is void once the number differs

    def offer(self, slab: Slab) -> None:
        """Let the slab's free slots be found."""
        if slab.closed or not slab.free:
            return
        if len(self.open) > 4 * len(self.slabs) + 64:
            self.open = [(one.free, one.lo) for one in self.slabs.values() if one.free and not one.closed]
            heapq.heapify(self.open)
        heapq.heappush(self.open, (slab.free, slab.lo))

    def fullest(self) -> Slab | None:
        """The open slab with the fewest free slots, which is not offered any more; None where all are full."""
        while self.open:
            free, lo = heapq.heappop(self.open)
            slab = self.slabs.get(lo)
            if slab is not None and not slab.closed and slab.free == free:
                return slab
        return None

    def addresses(self, handles: Iterable[int]) -> Addresses:
        """Slot addresses of the handles, ascending. Raises AssertionError for unknown or repeated ones."""
        if self.per_item > 1:
            try:
                listed = [self.items[handle] for handle in handles]
            except KeyError as error:
                raise AssertionError(f"not an item of group {self.number}: {error}") from None
            found = np.concatenate(listed) if listed else np.empty(0, np.int64)
        else:
            known = handles if hasattr(handles, "__len__") else list(handles)
            found = np.array(known, dtype=np.int64)
        found.sort()
        if (found[1:] == found[:-1]).any():
            raise AssertionError("a handle was given twice")
        return found

    def located(self, handles: Iterable[int]) -> list[tuple[Slab, Addresses]]:
        """Slabs and slot numbers of the handles. Raises AssertionError where one is not a used slot of the group."""
        addresses = self.addresses(handles)
        found, at = [], 0
        while at < addresses.size:
            first = int(addresses[at])
            where = bisect.bisect_right(self.lows, first) - 1
            slab = self.slabs[self.lows[where]] if where >= 0 else None
            if slab is None or first >= slab.hi:
                raise AssertionError(f"not a slot of group {self.number}: {first:#x}")
            end = int(addresses.searchsorted(slab.hi))
            found.append((slab, slab.index(addresses[at:end])))
            at = end
        return found


def slab_of(most: int, slot_bytes: int, *, huge: bool) -> int:
    """Bytes of a slab of slots that fills about `most`: whole huge pages, unless much would be left over in them."""
    slots = max(1, most // slot_bytes) * slot_bytes
    whole = align_up(slots, HUGE_BYTES)
    return whole if huge or whole - slots <= slots // LEFT_OVER else slots


class Span(NamedTuple):
    """Bytes at a raw address, which a device's copies take."""

    address: int
    bytes: int


class Placed(Protocol):
    """An arena as far as pools need it."""

    @property
    def number(self) -> int:
        """The upper bits of its slots' addresses."""

    @property
    def address(self) -> int:
        """Where it begins in this process, or on its device."""


class Budget(Protocol):
    """Where a pool's slabs come from."""

    huge: bool
    """Whether ranges are whole huge pages."""

    def arenas(self, scope: str) -> Sequence[Placed]:
        """The scope's arenas."""

    def take(self, scope: str, want: int, least: int) -> Plot | None:
        """A range of `want` bytes, or of what is left but at least `least`; or None."""

    def give(self, plot: Plot) -> None:
        """Take the range of a slab back."""


class SlotPool:
    """Slots of the caches of one (scope, shape), in slabs taken from a tier's budget when needed.

    A handle of an item of one slot is the slot's address: arena number << 44 | byte offset. An item of several
    slots has its first slot's address with bit 62 set. Capacities and counts are in slots.
    """

    def __init__(self, scope: str, shape: Shape, slab_bytes: int, space: Budget) -> None:
        self.scope = scope
        self.shape = shape
        self.slab_bytes = slab_bytes
        self._space = space
        self._bases: dict[int, int] = {}
        """Where the scope's arenas begin, while there are slabs."""
        sizes = zip(shape.slot_bytes, shape.slots_per_item, strict=True)
        self._groups = [_Group(number, size, per_item) for number, (size, per_item) in enumerate(sizes)]

    @property
    def slabs(self) -> list[Slab]:
        """All slabs, by group and address."""
        return [group.slabs[lo] for group in self._groups for lo in group.lows]

    @property
    def total_bytes(self) -> int:
        """Bytes taken from the budget."""
        return sum(group.bytes for group in self._groups)

    @property
    def step_bytes(self) -> int:
        """Bytes by which it grows at least, whichever group needs them: what is left of a budget may be less."""
        return max(*self.shape.slot_bytes, self.slab_bytes // 8)

    def capacity(self, group: int) -> int:
        """Slots of the group, free or not."""
        return self._groups[group].slots

    def used(self, group: int) -> int:
        """Slots of the group that are not free."""
        return self._groups[group].used

    def counts(self) -> list[dict[SlotState, int]]:
        """Slots in each state, per group."""
        sums = [sum((s.counts for s in g.slabs.values()), np.zeros(len(SlotState), np.int64)) for g in self._groups]
        return [dict(zip(SlotState, map(int, one), strict=True)) for one in sums]

    def alloc(self, group: int, n: int) -> array[int]:
        """Handles of up to `n` new items in state RESERVED; fewer where the budget ends. Never waits."""
        one = self._groups[group]
        grown: list[Slab] = []
        found = self._take(one, n * one.per_item, grown)
        if one.per_item > 1:
            whole = found.size // one.per_item * one.per_item
            self._untake(one, found[whole:], grown)
            items = found[:whole].reshape(-1, one.per_item)
            found = items[:, 0] | LISTED
            one.items.update(zip(found.tolist(), items.copy(), strict=True))
        handles = array("q")
        handles.frombytes(found.tobytes())
        return handles

    def mark(self, group: int, handles: Iterable[int], state: SlotState) -> None:
        """Put the items into `state`, not FREE. Raises AssertionError, all unchanged, where one is not allocated."""
        if state == SlotState.FREE:
            raise AssertionError("free() frees")
        for slab, index in self._groups[group].located(handles):
            slab.move(index, state)

    def free(self, group: int, handles: Iterable[int]) -> None:
        """Free the items. Raises AssertionError, all unchanged, where one is not allocated."""
        one = self._groups[group]
        if one.per_item > 1:
            handles = list(handles)
        self._release(one, one.located(handles))
        if one.per_item > 1:
            for handle in handles:
                del one.items[handle]

    def offsets(self, group: int, handles: Iterable[int]) -> Addresses:
        """Slot addresses of the items in order, slots_per_item each; -1s for a handle of -1."""
        one = self._groups[group]
        if one.per_item == 1:
            known = handles if hasattr(handles, "__len__") else list(handles)
            return np.array(known, dtype=np.int64)
        none = np.full(one.per_item, NO_COPY, np.int64)
        rows = [none if handle == NO_COPY else one.items[handle] for handle in handles]
        return np.concatenate(rows) if rows else np.empty(0, np.int64)

    def spans(self, group: int, handle: int, item_bytes: int) -> list[Span]:
        """The item's slots as raw addresses, in order, `item_bytes` in total."""
        one = self._groups[group]
        found = []
        for address in [handle] if handle < LISTED else one.items[handle].tolist():
            size = min(one.slot_bytes, item_bytes)
            found.append(Span(self._bases[address >> ARENA_SHIFT] + (address & OFFSET_MASK), size))
            item_bytes -= size
        return found

    def close_slab(self, slab: Slab) -> None:
        """Allocate no more from the slab; once its last slot is free it goes back to the budget by itself."""
        slab.closed = True
        if not slab.used:
            self._return(self._groups[slab.group], slab)

    def reopen_slab(self, slab: Slab) -> None:
        """Allocate from a closed slab again. Raises AssertionError where it has gone back already."""
        one = self._groups[slab.group]
        if one.slabs.get(slab.lo) is not slab:
            raise AssertionError(f"slab {slab.lo:#x} went back to the budget")
        slab.closed = False
        one.offer(slab)

    def shed(self) -> int:
        """Give every empty slab back to the budget; the bytes given."""
        empty = [slab for slab in self.slabs if not slab.used]
        for slab in empty:
            self._return(self._groups[slab.group], slab)
        return sum(slab.plot.hi - slab.plot.lo for slab in empty)

    def checking(self) -> Iterator[list[str]]:
        """Broken invariants of the pool's own slabs and items, in steps between which it may change."""
        for slab in self.slabs:
            yield slab.check()
        for one in self._groups:
            yield self._check_group(one)

    @staticmethod
    def _check_group(one: _Group) -> list[str]:
        wrong = []
        slabs = one.slabs.values()
        sums = sum(s.slots for s in slabs), sum(s.used for s in slabs), sum(s.plot.hi - s.plot.lo for s in slabs)
        if sums != (counted := (one.slots, one.used, one.bytes)):
            wrong.append(f"group {one.number}: (slots, used, bytes) {counted}, its slabs have {sums}")
        if one.lows != sorted(one.slabs):
            wrong.append(f"group {one.number}: slabs out of order")
        hidden = {(s.free, s.lo) for s in one.slabs.values() if s.free and not s.closed} - set(one.open)
        wrong += [f"group {one.number}: slab {lo:#x} has {free} free slots not offered" for free, lo in hidden]
        if one.per_item > 1:
            listed = [address for item in one.items.values() for address in item.tolist()]
            used = sum(slab.used for slab in one.slabs.values())
            if len(set(listed)) != len(listed) or len(listed) != used:
                wrong.append(f"group {one.number}: items list {len(listed)} slots, {used} are used")
        return wrong

    def _take(self, one: _Group, n: int, grown: list[Slab]) -> Addresses:
        """Up to `n` slots, the fullest slabs' first, growing at the end."""
        parts = []
        while n > 0:
            slab = one.fullest()
            if slab is None:
                slab = self._grow(one)
                if slab is None:
                    break
                grown.append(slab)
            parts.append(slab.take(n))
            n -= parts[-1].size
            one.used += parts[-1].size
            one.offer(slab)
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def _untake(self, one: _Group, addresses: Addresses, grown: list[Slab]) -> None:
        """Free slots too few for an item, and give back slabs that were taken in vain."""
        self._free_slots(one, addresses)
        for slab in grown:
            if not slab.used:
                self._return(one, slab)

    def _free_slots(self, one: _Group, addresses: Addresses) -> None:
        """Free slots by address."""
        addresses = np.sort(addresses)
        while addresses.size:
            slab = one.slabs[one.lows[bisect.bisect_right(one.lows, int(addresses[0])) - 1]]
            end = int(addresses.searchsorted(slab.hi))
            self._release(one, [(slab, slab.index(addresses[:end]))])
            addresses = addresses[end:]

    def _release(self, one: _Group, located: list[tuple[Slab, Addresses]]) -> None:
        """Free located slots; a closed slab that is empty now goes back."""
        for slab, index in located:
            slab.move(index, SlotState.FREE)
            one.used -= index.size
            one.offer(slab)
            if slab.closed and not slab.used:
                self._return(one, slab)

    def _grow(self, one: _Group) -> Slab | None:
        """A new slab, smaller at the end of the budget; None where nothing worth having is left."""
        least = max(one.slot_bytes, self.slab_bytes // 8) if one.slabs else one.slot_bytes
        plot = self._space.take(self.scope, slab_of(self.slab_bytes, one.slot_bytes, huge=self._space.huge), least)
        if plot is None:
            return None
        if not self._bases:
            self._begin()
        slab = Slab(plot, one.number, one.slot_bytes)
        one.slabs[slab.lo] = slab
        one.slots, one.bytes = one.slots + slab.slots, one.bytes + plot.hi - plot.lo
        bisect.insort(one.lows, slab.lo)
        return slab

    def _return(self, one: _Group, slab: Slab) -> None:
        """Give an empty slab back to the budget."""
        slab.closed = True
        del one.slabs[slab.lo]
        one.slots, one.bytes = one.slots - slab.slots, one.bytes - (slab.plot.hi - slab.plot.lo)
        one.lows.remove(slab.lo)
        self._space.give(slab.plot)
        if not any(each.slabs for each in self._groups):
            self._end()

    def _begin(self) -> None:
        """There is a first slab: the arenas stay while there is one."""
        self._bases = {arena.number: arena.address for arena in self._space.arenas(self.scope)}

    def _end(self) -> None:
        """There is no slab any more: the arenas may be closed."""
        self._bases = {}


class HostPool(SlotPool):
    """Slots in host memory, which this process reads and writes too."""

    def __init__(self, scope: str, shape: Shape, slab_bytes: int, space: HostSpace) -> None:
        super().__init__(scope, shape, slab_bytes, space)
        self._host = space
        self._data: list[npt.NDArray[np.uint8]] = []

    def views(self, group: int, handle: int, item_bytes: int) -> list[npt.NDArray[np.uint8]]:
        """Writable views of the item's slots, in order, `item_bytes` in total."""
        if 0 <= handle < LISTED:
            at = handle & OFFSET_MASK
            return [self._data[handle >> ARENA_SHIFT][at : at + item_bytes]]
        one = self._groups[group]
        found = []
        for address in one.items[handle].tolist():
            at = address & OFFSET_MASK
            size = min(one.slot_bytes, item_bytes)
            found.append(self._data[address >> ARENA_SHIFT][at : at + size])
            item_bytes -= size
        return found

    def blocks(self, group: int, handles: array[int], most_bytes: int) -> list[npt.NDArray[np.uint8]]:
        """Slots of items of one slot, in order: views of as many as lie one after another, up to `most_bytes` each."""
        size, most = self.shape.slot_bytes[group], max(1, most_bytes // self.shape.slot_bytes[group])
        addresses = np.frombuffer(handles, np.int64)
        cuts = np.flatnonzero(np.diff(addresses) != size) + 1
        found = []
        for lo, hi in itertools.pairwise([0, *cuts.tolist(), len(addresses)]):
            for first in range(lo, hi, most):
                address, count = int(addresses[first]), min(most, hi - first)
                at = address & OFFSET_MASK
                found.append(self._data[address >> ARENA_SHIFT][at : at + count * size])
        return found

    def _begin(self) -> None:
        """There is a first slab."""
        super()._begin()
        self._data = [arena.data for arena in self._host.arenas(self.scope)]

    def _end(self) -> None:
        """There is no slab any more."""
        super()._end()
        self._data = []
