"""What a client holds: caches, paths of keys, leases, reservations; their verbs as steps without I/O.

The sync and the async client inherit these and add one line of I/O per verb.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final, Literal, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from kvtier import wire
from kvtier.identity import CacheSpec, Slice
from kvtier.layout import Bytes, Data, Item, Parts, checksum, rows
from kvtier.link import FAULTS, Away, Call, Join, Joined, Post, R, Steps
from kvtier.types import Code, KvtierError, bad

Verify = Literal["never", "sample", "always"]
SAMPLE: Final = 16
"""`sample` checks every item of this many that is looked at in place, the first included."""

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


class OpenCache:
    """One cache as one process of an engine sees it; opened again on each new connection."""

    def __init__(self, spec: CacheSpec, rank: int, world: int, slices: tuple[Slice, ...], epoch: int) -> None:
        spec.check()
        if slices and len(slices) != len(spec.groups):
            raise bad("slices", f"one for each of {len(spec.groups)} groups", len(slices))
        self.spec = spec
        self.epoch = epoch
        """The newest epoch known here; KV of older ones is never matched."""
        self.cache_id = b""
        """32 bytes; empty until the daemon was reached."""
        self.groups: tuple[wire.GroupInfo, ...] = ()
        self._open = (rank, world, slices)
        self._joined: Joined | None = None
        self._number = 0
        self._owed = False
        """A reset was asked for before the daemon could say which epoch it is in."""

    def slice_of(self, group: int) -> Slice | None:
        """The part of each item that this process writes; None: whole items."""
        return self._open[2][group] if self._open[2] else None

    def entering(self) -> Steps[tuple[Joined, int]]:
        """Be connected, with this cache open there: the connection and the cache's number on it."""
        joined = cast("Joined", (yield Join()))
        if self._joined is not joined:
            rank, world, slices = self._open
            request = wire.Open(self.spec, rank, world, slices, self.epoch)
            try:
                opened = cast("wire.Opened", (yield Call(joined, request, wire.Opened)))
            except KvtierError as exc:
                if self.cache_id and exc.code in FAULTS:  # it was open before: not the engine's fault
                    raise Away(f"the daemon does not open this cache again: {exc}") from exc
                raise
            if self._owed:
                opened = cast("wire.Opened", (yield Call(joined, wire.Reset(opened.cache), wire.Opened)))
            self._opened(joined, opened)
        return joined, self._number

    def _opened(self, joined: Joined, opened: wire.Opened) -> None:
        """Remember what the daemon said."""
        self._number, self.cache_id, self.groups = opened.cache, opened.cache_id, opened.groups
        self.epoch = max(self.epoch, opened.epoch)
        self._joined, self._owed = joined, False

    def _resetting(self) -> Steps[int]:
        """A new epoch, here first: whatever happens to the request, the old KV is not matched again."""
        joined, number = self._joined, self._number
        self.epoch += 1
        self._joined, self._owed = None, not self.cache_id
        if joined is None or not joined.alive:
            yield from self.entering()
            return self.epoch
        self._opened(joined, cast("wire.Opened", (yield Call(joined, wire.Reset(number), wire.Opened))))
        return self.epoch

    def _flushing(self, timeout_s: float) -> Steps[bool]:
        """Whether all that was committed before is durable."""
        joined, number = yield from self.entering()
        yield Call(joined, wire.Flush(number, int(timeout_s * 1000)), wire.Ok)
        return True

    def _existing(self, group: int, keys: bytes) -> Steps[bytes]:
        """Presence of opaque keys."""
        joined, number = yield from self.entering()
        reply = yield Call(joined, wire.Exists(number, group, keys), wire.Existence)
        return cast("wire.Existence", reply).states

    def _acquiring_keys(self, group: int, keys: bytes, wait_ms: int) -> Steps[tuple[Joined, wire.Acquired]]:
        """Lease opaque keys."""
        joined, number = yield from self.entering()
        return joined, (yield Call(joined, wire.AcquireKeys(number, group, keys, wait_ms), wire.Acquired))

    def _reserving_keys(self, group: int, keys: bytes, wait_ms: int) -> Steps[tuple[Joined, wire.Reserved]]:
        """Slots for opaque keys."""
        joined, number = yield from self.entering()
        return joined, (yield Call(joined, wire.ReserveKeys(number, group, keys, wait_ms), wire.Reserved))

    def _count(self, keys: bytes) -> int:
        """How many opaque keys there are; raises bad_request where they are not whole keys of a keyed cache."""
        if not self.spec.keyed or len(keys) % self.spec.key_bytes:
            raise bad("keys", "whole keys of a keyed cache", len(keys))
        return len(keys) // self.spec.key_bytes


class KeyPath:
    """A path of page keys and the daemon's handle for it. Keeps the keys, to match again after a reconnect."""

    def __init__(self, cache: OpenCache, request: str) -> None:
        self.cache = cache
        self.pages = 0
        """Pages that can be acquired, as of the last match."""
        self.pending = 0
        """Pages after them that somebody is about to commit."""
        self.segments: tuple[wire.Segment, ...] = ()
        self._request = request
        self._keys: list[bytes] = []
        self._joined: Joined | None = None
        self._epoch = cache.epoch
        self._handle = 0

    @property
    def keys(self) -> bytes:
        """All page keys of the path."""
        if len(self._keys) > 1:
            self._keys = [b"".join(self._keys)]
        return self._keys[0] if self._keys else b""

    def _matching(self, keys: bytes) -> Steps[None]:
        """Append keys and match; only new keys are sent where the daemon has the handle."""
        stride = self.cache.spec.stride
        if self.cache.spec.keyed or len(keys) % stride:
            raise bad("keys", f"whole page keys of {stride} bytes of a token cache", len(keys))
        if keys:
            self._keys.append(keys)
        handle, self.pages, self.pending, self.segments = self._handle, 0, 0, ()
        self._handle = 0
        joined, number = yield from self.cache.entering()
        if handle and self._joined is joined and self._epoch == self.cache.epoch:
            try:
                reply = yield Call(joined, wire.Match(0, handle, keys, self._request), wire.Matched)
            except KvtierError as exc:
                if exc.code is not Code.UNKNOWN:
                    raise
                reply = yield Call(joined, wire.Match(number, 0, self.keys, self._request), wire.Matched)
        else:
            reply = yield Call(joined, wire.Match(number, 0, self.keys, self._request), wire.Matched)
        self._matched(joined, cast("wire.Matched", reply))

    def _matched(self, joined: Joined, reply: wire.Matched) -> None:
        """Remember what the daemon said."""
        self._joined, self._epoch, self._handle = joined, self.cache.epoch, reply.handle
        self.pages, self.pending, self.segments = reply.pages, reply.pending, reply.segments

    def _handled(self) -> Steps[tuple[Joined, int]]:
        """The connection and the handle on it, matching again where either is gone."""
        joined, _ = yield from self.cache.entering()
        if not self._handle or self._joined is not joined or self._epoch != self.cache.epoch:
            yield from self._matching(b"")
            assert self._joined is not None
            joined = self._joined
        return joined, self._handle

    def _asking(self, message: Callable[[int], wire.Message], reply: type[R]) -> Steps[tuple[Joined, R]]:
        """Ask about the handle, matching again where the daemon does not know it any more."""
        joined, handle = yield from self._handled()
        try:
            return joined, (yield Call(joined, message(handle), reply))
        except KvtierError as exc:
            if exc.code is not Code.UNKNOWN:
                raise
        self._handle = 0
        joined, handle = yield from self._handled()
        return joined, (yield Call(joined, message(handle), reply))

    def _acquiring(self, pages: int, wait_ms: int) -> Steps[tuple[Joined, wire.Acquired]]:
        """Lease pages of the path."""
        return (yield from self._asking(lambda handle: wire.Acquire(handle, pages, wait_ms), wire.Acquired))

    def _reserving(
        self, start: int, pages: int, wants: Sequence[tuple[int, Sequence[int]]], wait_ms: int
    ) -> Steps[tuple[Joined, wire.Reserved]]:
        """Slots for pages of the path."""
        lists = tuple(wire.Want(group, np.asarray(numbers, "<i4").tobytes()) for group, numbers in wants)
        return (
            yield from self._asking(lambda handle: wire.Reserve(handle, start, pages, lists, wait_ms), wire.Reserved)
        )

    def _prefetching(self) -> Steps[None]:
        """Bring matched pages to host."""
        yield from self._asking(wire.Prefetch, wire.Ok)

    def _closing(self) -> Steps[None]:
        """Drop the handle."""
        handle, self._handle = self._handle, 0
        if handle and self._joined is not None and self._joined.alive:
            yield Post(self._joined, wire.Forget(handle))


class Slots:
    """Items in the arena that this process may look at; nothing of them may be touched once lost."""

    def __init__(self, cache: OpenCache, joined: Joined | None, items: Sequence[wire.Items]) -> None:
        self.cache = cache
        self._joined = joined
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
        if self._joined is not None and self.number and not self._ended and self._joined.alive:
            yield Post(self._joined, wire.Release(self.number))
        self._ended = True


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
        if self._holds() and not all(self._committed):
            assert self._joined is not None
            yield Post(self._joined, wire.Abort(self.number))
        self._ended = True

    def _open_item(self, group: int, page: int) -> tuple[Item, int] | None:
        """The item, unless it was committed: its bytes never change after that."""
        at = page - self.start
        if self.lost or not 0 <= at < len(self._committed) or self._committed[at]:
            return None
        return self._item(group, page)

    def _holds(self) -> bool:
        """Whether the daemon still knows this reservation."""
        return bool(self.number) and not self._ended and not self.lost


def pinging() -> Steps[bool]:
    """Whether the serving loop answers."""
    joined = yield Join()
    yield Call(joined, wire.Ping(), wire.Ok)
    return True


def asking_stat() -> Steps[dict[str, object]]:
    """Numbers of the daemon that any engine may see."""
    joined = yield Join()
    return cast("wire.Info", (yield Call(joined, wire.Stat(), wire.Info))).data
