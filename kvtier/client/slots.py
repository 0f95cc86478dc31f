"""Items in the daemon's memory that a process may look at: where they lie, and which reads are verified."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from kvtier import wire
from kvtier.client.arenas import runs
from kvtier.client.caches import OpenCache
from kvtier.client.device import Reached
from kvtier.client.layout import Bytes, Item
from kvtier.client.link import Away, Join, Joined, Owe, Post, Steps
from kvtier.types import Code, KvtierError, bad

Verify = Literal["never", "sample", "always"]
SAMPLE: Final = 16
"""`sample` checks every item of this many that is looked at in place, the first included."""

T = TypeVar("T")

_log = logging.getLogger("kvtier.client")


class Checks:
    """Which reads in place are verified, and how many were wrong."""

    def __init__(self, verify: Verify) -> None:
        if verify not in ("never", "sample", "always"):
            raise bad("verify", "never, sample or always", verify)
        self._every = {"never": 0, "sample": SAMPLE, "always": 1}[verify]
        self._seen = 0
        self.mismatches = 0

    def due(self, reads: int = 1) -> range:
        """Which of the next so many reads are to be verified."""
        first, self._seen = -self._seen, self._seen + reads
        return range(first % self._every, reads, self._every) if self._every else range(0)

    def right(self, got: int, want: int, where: str) -> bool:
        """Whether a checksum is as expected; a mismatch is counted and logged."""
        if got == want:
            return True
        self.mismatches += 1
        _log.warning("checksum mismatch in %s: read as a miss", where)
        return False


class Table(NamedTuple):
    """Where items of one group lie: a wire.Items decoded."""

    first: int
    offsets: npt.NDArray[np.int64]
    """[count, slots_per_item]; -1 where there is no item."""
    sums: npt.NDArray[np.uint64]


def tables(items: Sequence[wire.Items], groups: Sequence[wire.GroupInfo]) -> dict[int, list[Table]]:
    """Items by group."""
    out: dict[int, list[Table]] = {}
    for part in items:
        offsets = np.frombuffer(part.offsets, "<i8").reshape(part.count, groups[part.group].slots_per_item)
        out.setdefault(part.group, []).append(Table(part.first, offsets, np.frombuffer(part.sums, "<u8")))
    return out


class Span(NamedTuple):
    """Items that lie one after another."""

    at: int
    """Position of the first after the page that was asked for."""
    rows: Bytes
    sums: npt.NDArray[np.uint64]
    """Empty for items that are being written."""


class Slots:
    """Items in the arena that this process may look at; nothing of them may be touched once lost."""

    def __init__(
        self, cache: OpenCache, joined: Joined | None, items: Sequence[wire.Items], cache_id: bytes = b""
    ) -> None:
        self.cache = cache
        self._cache_id = cache_id
        """Of the epoch that this was given in, which the cache may have left since."""
        self._joined = joined
        self._items = tuple(items)
        self._tables = tables(items, cache.groups) if items else {}
        self._ended = False
        self._busy: list[Reached] = []

    @property
    def run(self) -> bytes:
        """Of the daemon that gave this."""
        return b"" if self._joined is None else self._joined.welcome.run

    @property
    def instance(self) -> str:
        """Which holds this."""
        return "" if self._joined is None else self._joined.instance

    @property
    def lost(self) -> bool:
        """Whether the connection that gave this is gone, with all its slots."""
        return self._joined is not None and not self._joined.alive

    @property
    def busy(self) -> bool:
        """Whether a device was to read or write the slots, and nobody has waited for it."""
        return bool(self._busy)

    def busy_until(self, reached: Reached) -> None:
        """A device reads or writes the slots until then: nothing gives them back before, a `with` that ends neither."""
        self._busy.append(reached)

    def fence(self, after: Reached | None, timeout_s: float) -> None:
        """Wait until a device is done with the slots; also, later, with what an earlier call did not see reached.

        Raises KvtierError(io) where it is not: a `with` that ends by it does not give the slots back either.
        """
        if after is not None:
            self.busy_until(after)
        while first := self._busy[:1]:
            if not first[0].synchronize(timeout_s):
                raise KvtierError(Code.IO, f"the device has not done it within {timeout_s} s: its slots stay held")
            with contextlib.suppress(ValueError):  # another thread may have waited for it, too: a cancelled task's
                self._busy.remove(first[0])

    def on(self, joined: Joined) -> None:
        """Raise Away unless this was given on that connection."""
        if self._joined is not joined or self._ended:
            raise Away("what the transfer is about was lost with an earlier connection, or given back")

    def _end(self) -> bool:
        """From now on nothing of it is touched; whether that was so before."""
        ended, self._ended = self._ended, True
        self._untouched()
        return ended

    def _untouched(self) -> None:
        """No address that it gave is used any more, so that a lost connection's memory can be unmapped."""
        if self._joined is not None:
            self._joined.arenas.raw.discard(self)

    def _giving_back(self, message: wire.Message | None) -> Steps[None]:
        """Say once that this is over, on another connection too: the daemon knows it by its instance.

        Where there is none at the time, on the next: as long as siblings live, nobody else would give it back. Not to
        another daemon, to which its number would mean something else.
        """
        ended = self._end()
        joined = self._joined
        if ended or joined is None or message is None or joined.inherited:  # which is the parent's
            return
        if joined.alive:
            try:
                yield Post(joined, message)
            except Away:
                pass
            else:
                return
        yield Owe(joined.welcome.run, message)
        yield Join()

    def _offsets(self, group: int, page: int) -> tuple[npt.NDArray[np.int64], int] | None:
        """Slot offsets and checksum of one item; None where it is not here."""
        for table in self._tables.get(group, ()):
            at = page - table.first
            if 0 <= at < len(table.offsets) and table.offsets[at, 0] >= 0:
                return table.offsets[at], int(table.sums[at]) if at < len(table.sums) else 0
        return None

    def on_device(self, group: int, page: int) -> bool:
        """Whether an item of one slot lies in the daemon's device memory, which `map_device` brought here."""
        found, joined = self._offsets(group, page), self._joined
        return found is not None and joined is not None and int(found[0][0]) >> wire.ARENA_SHIFT == joined.device

    def address(self, group: int, page: int) -> int | None:
        """Where an item of one slot is, in host or in device memory, as copies and kernels take it; None: not here.

        What is read there is not verified by the client. It must not be used after the slot was given back, which is to
        be said of what is lost, too: until then the memory stays mapped here and the daemon gives it to nobody.
        """
        found = self._offsets(group, page)
        joined = self._joined
        if found is None or joined is None or self._ended or self.lost:
            return None
        if len(found[0]) > 1:
            raise bad("group", "items of one slot", group)
        joined.arenas.raw.add(self)
        if self.lost:  # another thread noticed, and may have unmapped it before this was counted
            return None
        return self._unless_lost(joined.arenas.address, int(found[0][0]), self.cache.groups[group].slot_bytes)

    def _unless_lost(self, look: Callable[..., T], *where: int) -> T | None:
        """What the arenas have there; None where another thread has noticed since that this is lost."""
        try:
            return look(*where)
        except KvtierError:
            if self.lost:
                return None
            raise

    def _item(self, group: int, page: int) -> tuple[Item, int] | None:
        """The item and its checksum; None where it is not here, or lost, or given back."""
        found = self._offsets(group, page)
        joined = self._joined
        if found is None or joined is None or self._ended:
            return None
        size = self.cache.groups[group].slot_bytes
        slots = [self._unless_lost(joined.arenas.view, int(offset), size) for offset in found[0]]
        there = [slot for slot in slots if slot is not None]
        return (Item(self.cache.spec.groups[group], there), found[1]) if len(there) == len(slots) else None

    def _parted(self, group: int) -> bool:
        """Whether items of a group lie in several slots; raises bad_request where there is no such group."""
        if not 0 <= group < len(self.cache.spec.groups):
            raise bad("group", f"0..{len(self.cache.spec.groups) - 1}", group)
        found = self.cache.groups  # none before a daemon was there
        return bool(found) and found[group].slots_per_item > 1

    def _spans(self, group: int, first: int, count: int) -> Iterator[Span]:
        """Items of one slot that lie one after another, of pages [first, first + count); absent ones are in none."""
        joined = self._joined
        for table in self._tables.get(group, ()):
            size = self.cache.groups[group].slot_bytes
            lo, hi = max(first, table.first), min(first + count, table.first + len(table.offsets))
            offsets = table.offsets[lo - table.first : max(lo, hi) - table.first, 0]
            sums = table.sums[lo - table.first : max(lo, hi) - table.first]
            for at, address, length in runs(offsets, size):
                if joined is None or self.lost or self._ended:
                    return
                rows = self._unless_lost(joined.arenas.block, address, length, size)
                if rows is None:
                    return
                rows = rows[:, : self.cache.groups[group].item_bytes]
                yield Span(lo - first + at, rows, sums[at : at + length])

    @staticmethod
    def expect_rows(data: Bytes, field: str, width: int) -> None:
        """Raise bad_request unless it is rows of so many bytes, and, of `out`, such as can be copied to."""
        if not isinstance(data, np.ndarray):
            raise bad(field, f"a numpy array with uint8 rows of {width} bytes", type(data).__name__)
        if data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != width:
            raise bad(field, f"uint8 rows of {width} bytes", (data.dtype.name, data.shape))
        if field == "out" and data.size and not (data.flags.writeable and data.strides[1] == 1):
            raise bad(field, "rows that can be written to and are contiguous each")
