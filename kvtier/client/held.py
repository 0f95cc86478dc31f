"""What a client holds: items under leases and reservations; their verbs as steps without I/O.

The sync and the async client inherit these and add one line of I/O per verb.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from typing import Final, Literal, NamedTuple, cast

import msgspec
import numpy as np
import numpy.typing as npt

from kvtier import wire
from kvtier.client.arenas import runs
from kvtier.client.caches import OpenCache
from kvtier.client.layout import Bytes, Data, Item, Parts, checksum, rows
from kvtier.client.link import Away, Call, Joined, Post, Steps
from kvtier.identity import Slice
from kvtier.types import Code, KvtierError, bad

Verify = Literal["never", "sample", "always"]
SAMPLE: Final = 16
"""`sample` checks every item of this many that is looked at in place, the first included."""
SPAN_BYTES: Final = 1 << 20
"""Small pages are copied together up to so many bytes, which are still in the cache when they are verified."""

_log = logging.getLogger("kvtier.client")


class Checks:
    """Which reads in place are verified, and how many were wrong."""

    def __init__(self, verify: Verify) -> None:
        if verify not in ("never", "sample", "always"):
            raise bad("verify", "never, sample or always", verify)
        self._every = {"never": 0, "sample": SAMPLE, "always": 1}[verify]
        self._seen = 0
        self.mismatches = 0

    def due(self) -> bool:
        """Whether this read is one to verify."""
        self._seen += 1
        return self._every > 0 and (self._seen - 1) % self._every == 0

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


class Slots:
    """Items in the arena that this process may look at; nothing of them may be touched once lost."""

    def __init__(self, cache: OpenCache, joined: Joined | None, items: Sequence[wire.Items]) -> None:
        self.cache = cache
        self._joined = joined
        self._items = tuple(items)
        self._tables = tables(items, cache.groups) if items else {}
        self._ended = False

    @property
    def lost(self) -> bool:
        """Whether the connection that gave this is gone, with all its slots."""
        return self._joined is not None and not self._joined.alive

    def on(self, joined: Joined) -> None:
        """Raise Away unless this was given on that connection."""
        if self._joined is not joined or self._ended:
            raise Away("what the transfer is about was lost with an earlier connection, or given back")

    def _giving_back(self, message: wire.Message | None) -> Steps[None]:
        """Say once that this is over, on another connection too: the daemon knows it by its instance.

        Not to another daemon, to which its number would mean something else.
        """
        ended, self._ended = self._ended, True
        joined = self._joined
        if ended or joined is None or message is None:
            return
        if not joined.alive:
            joined, _ = yield from self.cache.entering()
            if self._joined is None or self._joined.daemon.gone or joined.daemon.pid != self._joined.daemon.pid:
                return
        yield Post(joined, message)

    def _offsets(self, group: int, page: int) -> tuple[npt.NDArray[np.int64], int] | None:
        """Slot offsets and checksum of one item; None where it is not here."""
        for table in self._tables.get(group, ()):
            at = page - table.first
            if 0 <= at < len(table.offsets) and table.offsets[at, 0] >= 0:
                return table.offsets[at], int(table.sums[at]) if at < len(table.sums) else 0
        return None

    def _item(self, group: int, page: int) -> tuple[Item, int] | None:
        """The item and its checksum; None where it is not here, or lost, or given back."""
        found = self._offsets(group, page)
        joined = self._joined
        if found is None or joined is None or self._ended:
            return None
        size = self.cache.groups[group].slot_bytes
        try:
            slots = [joined.arenas.view(int(offset), size) for offset in found[0]]
        except KvtierError:
            if self.lost:  # another thread noticed between the check and the view
                return None
            raise
        return Item(self.cache.spec.groups[group], slots), found[1]

    def _spans(self, group: int, first: int, count: int) -> Iterator[tuple[int, Bytes]]:
        """Items of one slot that lie one after another, of pages [first, first + count).

        Each is (position after `first`, rows [items, item_bytes]), at most SPAN_BYTES; absent items are in none.
        """
        joined, size = self._joined, self.cache.groups[group].slot_bytes
        most = max(1, SPAN_BYTES // size)
        for table in self._tables.get(group, ()):
            lo, hi = max(first, table.first), min(first + count, table.first + len(table.offsets))
            offsets = table.offsets[lo - table.first : max(lo, hi) - table.first, 0]
            for at, address, length in runs(offsets, size):
                for done in range(0, length, most):
                    if joined is None or self.lost or self._ended:
                        return
                    block = joined.arenas.block(address + done * size, min(most, length - done), size)
                    yield lo - first + at + done, block[:, : self.cache.groups[group].item_bytes]

    def _matrix(self, group: int, data: Bytes, field: str) -> Bytes:
        """Rows of bytes, one an item; raises bad_request where they are not."""
        item = self.cache.spec.groups[group].item_bytes
        if data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != item:
            raise bad(field, f"uint8 rows of {item} bytes", (data.dtype.name, data.shape))
        return data


class Share(msgspec.Struct, forbid_unknown_fields=True):
    """A lease or reservation on its way to another process of the same instance."""

    cache_id: bytes
    start: int
    lease: wire.Acquired | None = None
    reservation: wire.Reserved | None = None


def shared(raw: bytes, cache: OpenCache) -> Share:
    """Decode what `share` gave another process; raises bad_request unless it is about this cache."""
    try:
        share = msgspec.msgpack.decode(raw, type=Share)
    except msgspec.MsgspecError as exc:
        raise bad("share", f"what share() returned ({exc})") from None
    if cache.cache_id != share.cache_id:
        raise bad("share", "a lease or reservation of this cache and epoch")
    return share


class HeldLease(Slots):
    """Pages that stay where they are, readable, until released."""

    def __init__(
        self, cache: OpenCache, checks: Checks, joined: Joined | None = None, reply: wire.Acquired | None = None
    ) -> None:
        reply = reply or wire.Acquired(0, 0)
        super().__init__(cache, joined, reply.items)
        self.number = reply.lease
        self.pages = reply.pages
        self._checks = checks

    def share(self) -> bytes:
        """For another process of this instance to `adopt`: it may read as long as this lease is held."""
        items = self._items
        return msgspec.msgpack.encode(Share(self.cache.cache_id, 0, wire.Acquired(self.number, self.pages, items)))

    def view(self, group: int, page: int) -> Bytes | None:
        """The item in place, read-only; None where it is absent or, if this read is verified, wrong.

        For items that lie in one slot; others are `read`. The view must not be used after `release`.
        """
        item = self._read_only(group, page)
        if item is None:
            return None
        if len(item[0].pieces) > 1:
            raise bad("group", "items of one slot; use read", group)
        if self._checks.due() and not self._verified(item[0].checksum(), item[1], group, page):
            return None
        return item[0].pieces[0]

    def read(self, group: int, page: int, out: Data | Parts) -> bool:
        """Copy the item out, into one buffer or a list of them, and verify the copy; False: it is a miss."""
        item = self._read_only(group, page)
        if item is None:
            return False
        item[0].read(out)
        return self._verified(checksum(rows(out)), item[1], group, page) and not self.lost

    def read_pages(self, group: int, first: int, out: Bytes) -> int:
        """Copy the items of pages from `first` on into the rows of `out` [pages, item_bytes], and verify the copies.

        How many leading rows are right: the first item that is absent or wrong ends it. For many small pages this
        costs a fraction of as many `read`s.
        """
        self._matrix(group, out, "out")
        if self.cache.groups[group].slots_per_item > 1:
            good = (self.read(group, first + at, row) for at, row in enumerate(out))
            return sum(1 for _ in itertools.takewhile(bool, good))
        done = 0
        for at, block in self._spans(group, first, len(out)):
            if at != done:
                break
            rights = self._copied(group, first + at, block, out[at : at + len(block)])
            done += rights
            if rights < len(block):
                break
        return 0 if self.lost else done

    def _copied(self, group: int, page: int, block: Bytes, out: Bytes) -> int:
        """Copy rows, and how many leading ones are right."""
        np.copyto(out, block)
        for at, row in enumerate(out):
            found = self._offsets(group, page + at)
            if found is None or not self._verified(checksum([row]), found[1], group, page + at):
                return at
        return len(out)

    def shard(self, group: int, page: int, part: Slice, out: Data) -> bool:
        """Copy out one rank's cells, layer-major; the whole item is verified as in `view`."""
        item = self._read_only(group, page)
        if item is None:
            return False
        if self._checks.due() and not self._verified(item[0].checksum(), item[1], group, page):
            return False
        item[0].read_slice(part, out)
        return not self.lost

    def _read_only(self, group: int, page: int) -> tuple[Item, int] | None:
        """The item with its bytes protected."""
        item = None if self.lost else self._item(group, page)
        if item is not None:
            for piece in item[0].pieces:
                piece.flags.writeable = False
        return item

    def _verified(self, got: int, want: int, group: int, page: int) -> bool:
        """Whether the bytes are those that were committed."""
        return self._checks.right(got, want, f"group {group} page {page} of lease {self.number}")

    def _releasing(self) -> Steps[None]:
        """Give the lease back; its views must not be used any more."""
        yield from self._giving_back(wire.Release(self.number) if self.number else None)


class HeldReservation(Slots):
    """Slots that this process may write until they are committed or given back."""

    def __init__(
        self, cache: OpenCache, start: int = 0, joined: Joined | None = None, reply: wire.Reserved | None = None
    ) -> None:
        reply = reply or wire.Reserved(0, 0, (), Code.IO.value)
        super().__init__(cache, joined, reply.items)
        self.number = reply.reservation
        self.start = start
        self.pages = reply.pages
        """Pages granted, from `start` on."""
        self.refused = reply.refused
        """Why fewer than asked; empty where all were granted."""
        self.waiting = 0
        """Complete pages that wait for a parent, as of the last commit."""
        self._committed = bytearray(self.pages)
        if joined is not None:
            for group, parts in self._tables.items():
                for table in parts:
                    joined.arenas.warm(table.offsets.reshape(-1), cache.groups[group].slot_bytes)

    def share(self) -> bytes:
        """For another process of this instance to `adopt`: it writes and commits its own shard."""
        reply = wire.Reserved(self.number, self.pages, self._items, self.refused)
        return msgspec.msgpack.encode(Share(self.cache.cache_id, self.start, None, reply))

    def view(self, group: int, page: int) -> Bytes | None:
        """The slot to write, for items of one slot; None where the item is already stored."""
        item = self._open_item(group, page)
        if item is not None and len(item[0].pieces) > 1:
            raise bad("group", "items of one slot; use write", group)
        return None if item is None else item[0].pieces[0]

    def write(self, group: int, page: int, data: Data | Parts) -> bool:
        """Copy in an item: this process's slice of it, or the whole where it opened without slices.

        False: it is already stored, or the reservation is lost; nothing was written.
        """
        item = self._open_item(group, page)
        if item is None:
            return False
        part = self.cache.slice_of(group)
        if part is None:
            item[0].write(data)
        else:
            item[0].write_slice(part, cast("Data", data))
        return not self.lost

    def write_pages(self, group: int, first: int, data: Bytes) -> bool:
        """Copy in the items of pages from `first` on, the rows of `data` [pages, item_bytes]; stored ones are skipped.

        False: the reservation is lost, or some of the pages are not of it or are committed. For many small pages this
        costs a fraction of as many `write`s.
        """
        self._matrix(group, data, "data")
        at = first - self.start
        if self.lost or at < 0 or at + len(data) > self.pages or any(self._committed[at : at + len(data)]):
            return False
        if self.cache.groups[group].slots_per_item > 1 or self.cache.slice_of(group) is not None:
            for row, item in enumerate(data):
                self.write(group, first + row, item)
        else:
            for row, block in self._spans(group, first, len(data)):
                np.copyto(block, data[row : row + len(block)])
        return not self.lost

    def _committing(self, first: int | None, pages: int | None) -> Steps[int]:
        """Say that pages are written; how many pages of the reservation are served now."""
        first = self.start if first is None else first
        pages = self.start + self.pages - first if pages is None else pages
        if not self._holds() or not pages:
            return 0
        assert self._joined is not None
        at = first - self.start
        self._committed[at : at + pages] = b"\1" * len(self._committed[at : at + pages])
        reply = yield Call(self._joined, wire.Commit(self.number, first, pages), wire.Committed)
        committed = cast("wire.Committed", reply)
        self.waiting = committed.waiting
        return committed.published

    def _aborting(self) -> Steps[None]:
        """Give back what is not committed; its slots must not be touched any more."""
        open_pages = self.number and not all(self._committed)
        yield from self._giving_back(wire.Abort(self.number) if open_pages else None)

    def _open_item(self, group: int, page: int) -> tuple[Item, int] | None:
        """The item, unless it was committed: its bytes never change after that."""
        at = page - self.start
        if self.lost or not 0 <= at < len(self._committed) or self._committed[at]:
            return None
        return self._item(group, page)

    def _holds(self) -> bool:
        """Whether the daemon still knows this reservation."""
        return bool(self.number) and not self._ended and not self.lost
