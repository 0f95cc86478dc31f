"""What a client holds: items under leases and reservations; their verbs as steps without I/O.

The sync and the async client inherit these and add one line of I/O per verb.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final, cast

import msgspec
import numpy as np
import numpy.typing as npt

from kvtier import wire
from kvtier.client.caches import OpenCache
from kvtier.client.copying import copy_rows
from kvtier.client.layout import Bytes, Data, Item, Parts, checksum, rows
from kvtier.client.link import Call, Joined, Steps
from kvtier.client.naming import Names
from kvtier.client.share import Share
from kvtier.client.slots import Checks, Slots, Span
from kvtier.identity import Slice
from kvtier.types import Code, KvtierError, bad

SLOW_BYTES_S: Final = 200e6
"""A copy, or a checksum, that is slower than this counts as stuck."""


class HeldLease(Slots):
    """Pages that stay where they are, readable, until released."""

    def __init__(
        self,
        cache: OpenCache,
        checks: Checks,
        joined: Joined | None = None,
        reply: wire.Acquired | None = None,
        cache_id: bytes = b"",
    ) -> None:
        reply = reply or wire.Acquired(0, 0)
        super().__init__(cache, joined, reply.items, cache_id)
        self.number = reply.lease
        self.pages = reply.pages
        self._checks = checks

    def share(self) -> bytes:
        """For another process of this instance to `adopt`: it may read as long as this lease is held."""
        items = self._items
        lease = wire.Acquired(self.number, self.pages, items)
        return msgspec.msgpack.encode(Share(self._cache_id, 0, self.run, self.instance, lease))

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
        parted = self._parted(group)
        self.expect_rows(out, "out", self.cache.spec.groups[group].item_bytes)
        if parted:
            good = (self.read(group, first + at, row) for at, row in enumerate(out))
            return sum(1 for _ in itertools.takewhile(bool, good))
        spans, done = list[Span](), 0
        for span in self._spans(group, first, len(out)):
            if span.at != done:
                break
            spans.append(span)
            done += len(span.rows)
        got = copy_rows([(out[s.at : s.at + len(s.rows)], s.rows) for s in spans], summed=True)
        wants = (want for span in spans for want in span.sums.tolist())
        for at, (each, want) in enumerate(zip(got, wants, strict=True)):
            if each != want and not self._verified(each, want, group, first + at):
                done = at
                break
        return 0 if self.lost else done

    def views(self, group: int, first: int, pages: int) -> list[Bytes]:
        """Items of pages from `first` on in place: read-only rows [items, item_bytes] of those that lie together.

        The first item that is absent or, where this read is verified, wrong ends them. For items that lie in one slot.
        They must not be used after `release`.
        """
        if self._parted(group):
            raise bad("group", "items of one slot; use read", group)
        out, done = [], 0
        for span in self._spans(group, first, pages):
            if span.at != done:
                break
            span.rows.flags.writeable = False
            rights = self._rights(group, first + done, span.rows, span.sums, self._checks.due(len(span.rows)))
            if rights:
                out.append(span.rows[:rights])
            done += rights
            if rights < len(span.rows):
                break
        return [] if self.lost else out

    def _rights(self, group: int, page: int, items: Bytes, sums: npt.NDArray[np.uint64], looked_at: range) -> int:
        """How many leading rows are right, as far as some of them are looked at."""
        for at in looked_at:
            got, want = checksum([items[at]]), int(sums[at])
            if got != want and not self._verified(got, want, group, page + at):
                return at
        return len(items)

    def shard(self, group: int, page: int, part: Slice, out: Data) -> bool:
        """Copy out one rank's cells, layer-major, and verify the whole item; False: it is a miss."""
        item = self._read_only(group, page)
        if item is None:
            return False
        item[0].read_slice(part, out)
        return self._verified(item[0].checksum(), item[1], group, page) and not self.lost

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
        self,
        cache: OpenCache,
        start: int = 0,
        joined: Joined | None = None,
        reply: wire.Reserved | None = None,
        cache_id: bytes = b"",
    ) -> None:
        reply = reply or wire.Reserved(0, 0, (), Code.IO.value)
        super().__init__(cache, joined, reply.items, cache_id)
        self.number = reply.reservation
        self.start = start
        self.pages = reply.pages
        """Pages granted, from `start` on."""
        self.refused = reply.refused
        """Why fewer than asked; empty where all were granted."""
        self.writes = reply.writes
        """Whether this process writes its shard; else another does, and what is written here is skipped."""
        self.waiting = 0
        """Complete pages that wait for a parent, as of the last commit."""
        self.running = reply.named >= 0
        """Whether its pages may have no keys yet, and its slots are read, too, until `abort`."""
        self._names = Names(reply.named if self.running else start + self.pages, cache.spec.stride)
        self._committed = bytearray(self.pages)
        self._unanswered = 0
        """Commits that the daemon has not said yes to: what they are about may still have to be given back."""
        self._sums: dict[int, npt.NDArray[np.uint64]] = {}
        """Per group the checksum of each page's item, 0 where it was not taken while it was written."""
        if joined is not None:
            for group, parts in self._tables.items():
                for table in parts:
                    joined.arenas.warm(table.offsets.reshape(-1), cache.groups[group].slot_bytes)

    def share(self) -> bytes:
        """For another process of this instance to `adopt`: it writes and commits its own shard."""
        named = self.named if self.running else -1
        reply = wire.Reserved(self.number, self.pages, self._items, self.refused, self.writes, named)
        return msgspec.msgpack.encode(
            Share(self._cache_id, self.start, self.run, self.instance, None, reply, self.cache.slices)
        )

    def view(self, group: int, page: int) -> Bytes | None:
        """The slot to write, for items of one slot; None where the item is stored, or written by another process."""
        item = self._open_item(group, page)
        if item is not None and len(item[0].pieces) > 1:
            raise bad("group", "items of one slot; use write", group)
        self._note(group, page, [0])
        return None if item is None else item[0].pieces[0]

    def address(self, group: int, page: int) -> int | None:
        """Where the slot to write is, as copies and kernels take it; None as for `view`.

        In a running reservation also of what is committed, which is read there.
        """
        if self._writable(page):
            self._note(group, page, [0])
        elif not self.running:
            return None
        return super().address(group, page)

    @property
    def named(self) -> int:
        """Pages of the path, from the root, whose keys are known here."""
        return self._names.named

    def name(self, keys: bytes) -> None:
        """Of a running reservation: the tokens of the path's next pages, from `named` on, are known.

        The daemon is told with the next commit. Raises bad_request.
        """
        self._names.add(keys, self.start + self.pages if self.running else 0)

    def wants(self, group: int, page: int) -> bool:
        """Whether this process is to write the item: it is not stored, nobody else writes it, nothing is lost."""
        return self._open_item(group, page) is not None

    def views(self, group: int, first: int, pages: int) -> list[tuple[int, Bytes]]:
        """Slots to write of pages from `first` on, for items of one slot: (position, rows [items, item_bytes]).

        Items that lie together are one entry; what `wants` is false for is in none.
        """
        if self._parted(group):
            raise bad("group", "items of one slot; use write", group)
        at = first - self.start
        if not self.writes or self.lost or at < 0 or any(self._committed[at : at + pages]):
            return []
        self._note(group, first, [0] * min(pages, self.pages - at))
        return [(span.at, span.rows) for span in self._spans(group, first, pages)]

    def write(self, group: int, page: int, data: Data | Parts) -> bool:
        """Copy in an item: this process's slice of it, or the whole where it opened without slices.

        False: it is already stored, or another process writes it, or the reservation is lost; nothing was written.
        """
        item = self._open_item(group, page)
        if item is None:
            return False
        part = self.cache.slice_of(group)
        if part is None:
            item[0].write(data)
        else:
            item[0].write_slice(part, cast("Data", data))
        self._note(group, page, [0])
        return not self.lost

    def write_pages(self, group: int, first: int, data: Bytes, *, summed: bool = False) -> bool:
        """Copy in the items of pages from `first` on, each a row of `data`; what is stored or another's is skipped.

        Rows hold what `write` takes: whole items, or this process's slices. For many small pages this costs a fraction
        of as many `write`s. `summed`: take the checksums meanwhile, while the bytes are near, and not have the daemon
        read them all again at commit; for whole items of one slot. False: the reservation is lost, or some of the
        pages are not of it or are committed.
        """
        parted = self._parted(group)
        part, spec = self.cache.slice_of(group), self.cache.spec.groups[group]
        self.expect_rows(data, "data", spec.item_bytes if part is None else part.cells * spec.cell_bytes)
        at = first - self.start
        if self.lost or at < 0 or at + len(data) > self.pages or any(self._committed[at : at + len(data)]):
            return False
        if not self.writes:
            return True
        if parted or part is not None:
            for row, item in enumerate(data):
                self.write(group, first + row, item)
        else:
            spans = list(self._spans(group, first, len(data)))
            sums = copy_rows([(s.rows, data[s.at : s.at + len(s.rows)]) for s in spans], summed=summed)
            for span in spans:
                self._note(group, first + span.at, sums[: len(span.rows)])
                del sums[: len(span.rows)]
        return not self.lost

    def summed(self, group: int, first: int, sums: Sequence[int]) -> None:
        """The xxh3-64 of whole items from page `first` on that were written in place, such as a GPU took on the way.

        The daemon need not read them then; whoever reads the items checks them against these.
        """
        at = first - self.start
        if self.cache.slice_of(group) is not None or at < 0 or at + len(sums) > self.pages:
            raise bad("sums", "those of whole items of this reservation", (first, len(sums)))
        self._note(group, first, sums)

    def _note(self, group: int, page: int, sums: Sequence[int]) -> None:
        """Remember the checksums of what was just written from a page on."""
        if group not in self._sums:
            if not any(sums):
                return
            self._sums[group] = np.zeros(self.pages, np.uint64)
        self._sums[group][page - self.start : page - self.start + len(sums)] = sums

    def committing(self, first: int, pages: int) -> wire.Commit:
        """The request that commits pages, with the checksums that are known."""
        at = first - self.start
        parts = ((group, sums[at : at + pages]) for group, sums in self._sums.items())
        known = tuple(wire.Sums(group, part.tobytes()) for group, part in parts if part.any())
        return wire.Commit(self.number, first, pages, known, *self._names.unsaid())

    def commit_now(self, first: int, pages: int) -> wire.Commit:
        """The request that commits pages, which are not written any more from now on."""
        at = first - self.start
        self._unanswered += 1
        self._committed[at : at + pages] = b"\1" * len(self._committed[at : at + pages])
        if all(self._committed) and not self.running:
            self._untouched()
        return self.committing(first, pages)

    def _range(self, first: int | None, pages: int | None) -> tuple[int, int]:
        """The pages that a commit is about: by default from `first` to the end, or all."""
        first = self.start if first is None else first
        return first, max(0, min(self.start + self.pages, self.named) - first) if pages is None else pages

    def summing_s(self, first: int | None, pages: int | None) -> float:
        """How long the daemon may take to sum what a commit says no checksum of, beyond what any answer takes."""
        first, pages = self._range(first, pages)
        at, size = first - self.start, 0
        for group, parts in self._tables.items():
            known = self._sums.get(group, np.zeros(self.pages, np.uint64))[max(0, at) : at + pages]
            there = np.concatenate([table.offsets[:, 0] >= 0 for table in parts])[max(0, at) : at + pages]
            size += int((there & (known == 0)).sum()) * self.cache.spec.groups[group].item_bytes
        return size / SLOW_BYTES_S

    def _committing(self, first: int | None, pages: int | None) -> Steps[int]:
        """Say that pages are written; how many pages of the reservation are served now."""
        first, pages = self._range(first, pages)
        if pages == self.pages and not self.running:
            self._untouched()
        if not self._holds() or not pages:
            return 0
        assert self._joined is not None
        at = first - self.start
        before = self._committed[at : at + pages]
        message = self.commit_now(first, pages)
        try:
            reply = yield Call(self._joined, message, wire.Committed)
        except KvtierError as exc:
            if exc.code in {Code.BAD_REQUEST, Code.BUSY}:  # they are as they were
                self._committed[at : at + len(before)] = before
            raise
        self._names.said(message)
        return self.committed(cast("wire.Committed", reply))

    def committed(self, reply: wire.Committed) -> int:
        """The daemon has said yes to a commit: how many pages of the reservation are served now."""
        self._unanswered -= 1
        self.waiting = reply.waiting
        return reply.published

    def _aborting(self) -> Steps[None]:
        """Give back what is not committed; its slots must not be touched any more."""
        open_pages = self.number and (self.running or self._unanswered or not all(self._committed))
        yield from self._giving_back(wire.Abort(self.number) if open_pages else None)

    def _open_item(self, group: int, page: int) -> tuple[Item, int] | None:
        """The item, unless it was committed: its bytes never change after that."""
        return self._item(group, page) if self._writable(page) else None

    def _writable(self, page: int) -> bool:
        """Whether this process may write items of a page."""
        at = page - self.start
        return self.writes and not self.lost and 0 <= at < len(self._committed) and not self._committed[at]

    def _holds(self) -> bool:
        """Whether the daemon still knows this reservation."""
        return bool(self.number) and not self._ended and not self.lost
