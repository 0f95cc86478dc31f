"""Verbs of token caches: match, acquire, release, prefetch, reserve, commit, abort."""

from __future__ import annotations

import asyncio
import bisect
import time
from array import array
from collections.abc import Awaitable

import numpy as np
from numpy.typing import NDArray

from kvtier import wire
from kvtier.index import Found
from kvtier.store.cache import Cache
from kvtier.store.instance import Instance, Lease, Path, Process
from kvtier.store.loads import Missing
from kvtier.store.parts import Parts
from kvtier.store.reserve import SETTLED, Reservation
from kvtier.store.segments import segments
from kvtier.types import NO_COPY, Code, Kind, KvtierError, Tier, bad
from kvtier.wire import (
    Acquire,
    Acquired,
    Forget,
    Items,
    Match,
    Matched,
    Ok,
    Prefetch,
    Release,
    Reserve,
    Reserved,
    Want,
)  # fmt: skip

MAX_TRIES = 4
Mask = NDArray[np.bool_]
LOCAL = (Tier.DEVICE, Tier.HOST, Tier.DISK)


class Tokens:
    """Prefix matching and leases over radix caches."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    # -- match ---------------------------------------------------------------------------------------------------

    def match(self, process: Process, msg: Match) -> Matched | Awaitable[Matched]:
        """Longest cached prefix of a request's path; a handle goes on with the path it named.

        While the catalogue loads, waits for the look-up of what it has along the path.
        """
        instance = process.instance
        if msg.handle:
            path = instance.path(msg.handle)
            number, cache = msg.handle, path.cache
        else:
            cache = self.parts.opened(process, msg.cache)
            path = Path(cache, msg.request[: wire.MAX_NAME], msg.session[: wire.MAX_NAME])
            number = next(self.parts.numbers)
        if cache.spec.keyed:
            raise bad("cache", "a token cache (this one is keyed: use exists)", msg.cache)
        if not 0 <= msg.prefill < 1e12:
            raise bad("prefill", "tokens a second, or 0", msg.prefill)
        if len(msg.keys) % cache.index.stride:
            raise bad("keys", f"whole page keys of {cache.index.stride} bytes", len(msg.keys))
        path.prefill = msg.prefill or path.prefill
        instance.add_path(number, path, msg.keys)
        self.parts.requests.note(path, len(msg.keys))
        if self.parts.loading:
            return self._match_later(number, path, first=not msg.handle)
        return self._matched(number, path, first=not msg.handle)

    async def _match_later(self, number: int, path: Path, *, first: bool) -> Matched:
        """Match once disk was asked."""
        await self.parts.restore.path(path.cache, path.keys)
        return self._matched(number, path, first=first)

    def _matched(self, number: int, path: Path, *, first: bool) -> Matched:
        """What matches now; a request counts once, however often it polls."""
        cache = path.cache
        found = cache.radix.match(path.keys, self.parts.now())
        parts = segments(cache, found.node, found.pages)
        if first or not path.used:
            self.parts.tally.note(path, found, parts, first=first)
        asking = self._ask(path, found)
        known = cache.radix.deepest(path.keys)[1] if cache.radix.states else 0
        if not path.prefill:
            return Matched(number, found.pages, parts, found.pending, asking=asking, known=known)
        self.parts.links.need(self.parts.mover)
        verdict = self.parts.links.judge(cache, parts, path.prefill)
        return Matched(number, found.pages, parts, found.pending, *verdict, asking=asking, known=known)

    def _ask(self, path: Path, found: Found) -> bool:
        """Whether peers are being asked for the rest of a path, which somebody here does not compute already."""
        peers = self.parts.peers
        return peers is not None and not found.pending and peers.asking(path, found.pages) is not None

    def forget(self, process: Process, msg: Forget) -> Ok:
        """Drop a handle."""
        process.instance.forget(msg.handle)
        return Ok()

    def prefetch(self, process: Process, msg: Prefetch) -> Ok:
        """Start loading what of the handle's match is not in host, and do not wait."""
        path = process.instance.path(msg.handle)
        found = path.cache.radix.match(path.keys, self.parts.now())
        self._ask(path, found)
        if found.pages:
            index = path.cache.radix
            node = index.ending_at(found.node, found.pages)
            missing = self.parts.loads.missing(path.cache, node, index.needed(found.pages))
            self.parts.loads.start(path.cache, missing, self.parts.deadline(60_000))
        return Ok()

    # -- acquire -------------------------------------------------------------------------------------------------

    def acquire(self, process: Process, msg: Acquire) -> Acquired | Awaitable[Acquired]:
        """Lease a match; waits only when something must come from disk."""
        self.parts.tally.settle()
        path = process.instance.path(msg.handle)
        deadline = self.parts.deadline(msg.wait_ms)
        asked = path.asked
        if asked is not None and not asked.done() and self._wants_more(path, msg.pages):
            return self._acquire_asked(process, path, msg.pages, asked, deadline)
        return self._acquire(process, path, msg.pages, deadline)

    def _wants_more(self, path: Path, pages: int) -> bool:
        """Whether somebody who asks for `pages` pages is not served by what is here."""
        return pages < 0 or pages > path.cache.radix.match(path.keys, self.parts.now()).pages

    async def _acquire_asked(
        self, process: Process, path: Path, pages: int, asked: asyncio.Task[None], deadline: float
    ) -> Acquired:
        """Wait for what peers have first, and then serve what is here."""
        left = deadline - asyncio.get_running_loop().time()
        await asyncio.wait([asked], timeout=max(0.0, left))
        if process.instance.gone:
            return Acquired(0, 0)
        reply = self._acquire(process, path, pages, deadline)
        return reply if isinstance(reply, Acquired) else await reply

    def _acquire(self, process: Process, path: Path, pages: int, deadline: float) -> Acquired | Awaitable[Acquired]:
        """Lease what matches now; where the engine said how fast it computes, no more than is loaded sooner."""
        if path.prefill and pages < 0:
            pages = self._worth(path)
        held = self._hold(process.instance, path, pages) if pages else None
        if held is None:
            return Acquired(0, 0)
        lease, missing = held
        if not missing:
            return self._grant(process.instance, lease)
        self._drop(process.instance, lease)  # a coroutine that is cancelled before it begins could not give it back
        return self._load(process.instance, path, pages, deadline)

    def _worth(self, path: Path) -> int:
        """How many pages are loaded sooner than computed; -1: all."""
        found = path.cache.radix.match(path.keys, self.parts.now())
        parts = segments(path.cache, found.node, found.pages)
        links = self.parts.links
        return links.loaded(parts, links.judge(path.cache, parts, path.prefill).cut, time.monotonic())

    def _hold(self, instance: Instance, path: Path, pages: int) -> tuple[Lease, list[Missing]] | None:
        """Lease the longest match (of at most `pages`) within the cap; None where there is none."""
        cache = path.cache
        index = cache.radix
        found = index.match(path.keys, self.parts.now())
        node, end = found.node, found.pages
        if 0 <= pages < end:
            node, end = index.resumable(node, pages, LOCAL)
        if not end or not self.parts.host.budget_bytes:
            return None
        cost = _cost(cache, end)
        if cost > instance.room():
            below, fits = index.resumable(node, _fitting(cache, end, instance.room()), LOCAL)
            if fits:  # else charge says that not even a part is within the cap
                node, end, cost = below, fits, _cost(cache, fits)
        instance.charge(cost)
        node = index.ending_at(node, end)
        node.time = max(node.time, self.parts.now())
        index.lease(node)
        lease = Lease(cache, [node], end, cost)
        return lease, self.parts.loads.missing(cache, node, index.needed(end))

    def _drop(self, instance: Instance, lease: Lease) -> None:
        instance.held_bytes -= lease.cost
        for node in lease.nodes:
            self.parts.unlease(lease.cache, node)

    async def _load(self, instance: Instance, path: Path, pages: int, deadline: float) -> Acquired:
        """Bring the missing pages; a lost copy or the deadline leaves the longest prefix that is in host."""
        for _ in range(MAX_TRIES):
            held = self._hold(instance, path, pages)
            if held is None:
                break
            lease, missing = held
            if not missing:
                return self._grant(instance, lease)
            cache, node = lease.cache, lease.nodes[0]
            try:
                begun = time.perf_counter()
                if await self.parts.loads.bring(cache, missing, deadline):
                    nbytes = sum(cache.item_bytes[m.group] for m in missing)
                    self.parts.links.links[Tier.DISK].note(nbytes, time.perf_counter() - begun, time.monotonic())
            except BaseException:
                self._drop(instance, lease)
                raise
            if not node.dead and cache.radix.resumable(node, lease.pages, LOCAL)[1] == lease.pages:
                _, pages = cache.radix.resumable(node, lease.pages, (Tier.HOST,))  # time or room is up
                if pages == lease.pages:
                    return self._grant(instance, lease)
            self._drop(instance, lease)
        return Acquired(0, 0)

    def _grant(self, instance: Instance, lease: Lease) -> Acquired:
        """Register the lease and say where its items are."""
        number = next(self.parts.numbers)
        instance.leases[number] = lease
        cache, node = lease.cache, lease.nodes[0]
        items = []
        for group, first, count in cache.radix.needed(lease.pages):
            handles = cache.gather(node, group, first, count, Tier.HOST)
            sums = cache.gather_sums(node, group, first, count)
            items.append(Items(group, first, count, cache.pool.offsets(group, handles).tobytes(), sums.tobytes()))
        cache.counts["pages_leased"] += lease.pages
        return Acquired(number, lease.pages, tuple(items))

    def release(self, process: Process, msg: Release) -> Ok:
        """Give a lease back."""
        lease = process.instance.leases.pop(msg.lease, None)
        if lease is None:
            raise KvtierError(Code.UNKNOWN, f"no lease {msg.lease} here", "lease")
        self._drop(process.instance, lease)
        return Ok()

    # -- reserve ---------------------------------------------------------------------------------------------------

    def reserve(self, process: Process, msg: Reserve) -> Reserved | Awaitable[Reserved]:
        """Slots for pages of a path; waits only when room must be made."""
        self.parts.tally.settle()
        path = process.instance.path(msg.handle)
        cache = path.cache
        total = len(path.keys) // cache.index.stride
        if msg.pages < 1 or msg.start < 0 or msg.start + msg.pages > total:
            raise bad("pages", f"a range within the {total} pages of the handle", (msg.start, msg.pages))
        wanted = _wanted(cache, msg)
        deadline = self.parts.deadline(msg.wait_ms)
        if cache.retired:
            return Reserved(0, 0, refused=Code.UNKNOWN)
        if not self.parts.host.budget_bytes:
            return Reserved(0, 0, refused=Code.NO_SPACE)
        needs = self._needs(process.instance, cache, path.keys, msg.start, wanted)
        if self.parts.space.fits(cache, needs):
            got = [cache.pool.alloc(g, n) if n else array("q") for g, n in enumerate(needs)]
            if all(len(have) == n for have, n in zip(got, needs, strict=True)):
                return self._fill(process, path, msg, wanted, got, "")
            self.parts.space.give_back(cache, got)
        return self._reserve_later(process, path, msg, wanted, needs, deadline)

    async def _reserve_later(
        self, process: Process, path: Path, msg: Reserve, wanted: list[Mask], needs: list[int], deadline: float
    ) -> Reserved:
        got = await self.parts.space.take(path.cache, needs, deadline)
        if path.cache.retired or process.instance.gone:
            self.parts.space.give_back(path.cache, got)
            return Reserved(0, 0, refused=Code.UNKNOWN)
        return self._fill(process, path, msg, wanted, got, self.parts.space.short(path.cache, needs))

    def _needs(self, instance: Instance, cache: Cache, keys: bytes, start: int, wanted: list[Mask]) -> list[int]:
        """Items per group to allocate: what is wanted, not there yet, and within the instance's cap."""
        lack = self._lacking(cache, keys, start, wanted)
        cost = sum(m.astype(np.int64) * cache.slot_cost(g) for g, m in enumerate(lack))
        fits = int(np.searchsorted(np.cumsum(cost), instance.room(), side="right"))
        return [int(m[:fits].sum()) for m in lack]

    @staticmethod
    def _lacking(cache: Cache, keys: bytes, start: int, wanted: list[Mask]) -> list[Mask]:
        """Per group and page: wanted and not cached."""
        pages = len(wanted[0])
        index = cache.radix
        node, end = index.deepest(keys[: (start + pages) * index.stride])
        have = max(0, end - start)
        out = []
        for group, mask in enumerate(wanted):
            lack = mask.copy()
            if have:
                for tier in LOCAL:
                    held = np.frombuffer(cache.gather(node, group, start, have, tier), np.int64)
                    lack[:have] &= held == NO_COPY
            out.append(lack)
        return out

    def _fill(
        self, process: Process, path: Path, msg: Reserve, wanted: list[Mask], got: list[array[int]], short: str
    ) -> Reserved:
        """Make the reservation of as many leading pages as the slots cover."""
        cache, index = path.cache, path.cache.radix
        if index.known(path.keys[: msg.start * index.stride]) < msg.start:
            self.parts.space.give_back(cache, got)
            return Reserved(0, 0, refused=Code.UNKNOWN)
        lack = self._lacking(cache, path.keys, msg.start, wanted)
        cost = sum(m.astype(np.int64) * cache.slot_cost(g) for g, m in enumerate(lack))
        granted = int(np.searchsorted(np.cumsum(cost), process.instance.room(), side="right"))
        refused = "" if granted == msg.pages else str(Code.OVER_CAP)
        for group, mask in enumerate(lack):
            covered = int(np.searchsorted(np.cumsum(mask), len(got[group]), side="right"))
            if covered < granted:
                granted, refused = covered, short
        handles = []
        for group, mask in enumerate(lack):
            row = np.full(granted, NO_COPY, np.int64)
            used = int(mask[:granted].sum())
            row[mask[:granted]] = got[group][:used]
            handles.append(array("q", row.tobytes()))
            cache.free_host(group, got[group][used:])
        if not granted:
            return Reserved(0, 0, refused=refused or Code.NO_SPACE)
        node = index.extend(path.keys[: (msg.start + granted) * index.stride], self.parts.now())
        index.lease(node)
        res = Reservation(next(self.parts.numbers), cache, process, [node], msg.start, handles)
        items = tuple(
            Items(g, msg.start, granted, cache.pool.offsets(g, row).tobytes()) for g, row in enumerate(handles)
        )
        there = ~np.logical_or.reduce([mask[:granted] for mask in lack])
        res.state[:] = (there * np.uint8(SETTLED)).tobytes()
        self.parts.admit(res)
        self.parts.space.ahead(cache.pool)
        return Reserved(res.number, granted, items, refused, res.writes)


def _cost(cache: Cache, pages: int) -> int:
    """Arena bytes of what an engine reads that resumes after so many pages; more pages never cost less."""
    return sum(count * cache.slot_cost(g) for g, _, count in cache.radix.needed(pages))


def _fitting(cache: Cache, pages: int, room: int) -> int:
    """The most pages, up to `pages`, that cost no more than `room`."""
    return bisect.bisect_right(range(1, pages + 1), room, key=lambda n: _cost(cache, n))


def _wanted(cache: Cache, msg: Reserve) -> list[Mask]:
    """Per group, which of the pages are asked for; raises bad_request."""
    out = [np.full(msg.pages, g.kind is not Kind.STATE) for g in cache.spec.groups]
    for want in msg.wants:
        if not 0 <= want.group < len(out):
            raise bad("wants.group", f"0..{len(out) - 1}", want.group)
        if want.group in cache.index.anchors:
            raise bad("wants.group", "a group that is not stored for every page anyway", want.group)
        out[want.group] = _pages_mask(want, msg)
    return out


def _pages_mask(want: Want, msg: Reserve) -> Mask:
    if len(want.pages) % 4:
        raise bad("wants.pages", "int32 page numbers", len(want.pages))
    at = np.frombuffer(want.pages, "<i4").astype(np.int64) - msg.start
    if at.size and (at.min() < 0 or at.max() >= msg.pages):
        raise bad("wants.pages", f"pages {msg.start}..{msg.start + msg.pages - 1}")
    mask = np.zeros(msg.pages, dtype=bool)
    mask[at] = True
    return mask
