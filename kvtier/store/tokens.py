"""Verbs of token caches: match, acquire, release, prefetch."""

from __future__ import annotations

import asyncio
import bisect
import functools
import time
from collections.abc import Awaitable

import numpy as np
from numpy.typing import NDArray

from kvtier import wire
from kvtier.index import Found, Hold, Node
from kvtier.store import misses, reserving
from kvtier.store.cache import Cache
from kvtier.store.instance import Instance, Lease, Path, Process
from kvtier.store.loads import Brought
from kvtier.store.patience import Turn
from kvtier.store.reserving import Reserving
from kvtier.store.segments import segments
from kvtier.types import NO_COPY, Code, KvtierError, Tier, bad
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
)  # fmt: skip

MAX_TRIES = 4
Mask = NDArray[np.bool_]
LOCAL = (Tier.DEVICE, Tier.HOST, Tier.DISK)
Tiers = tuple[Tier, ...]


class Tokens(Reserving):
    """Prefix matching, leases and reservations over radix caches."""

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
        if msg.prefill and not 1e-6 <= msg.prefill < 1e12:  # seconds have to stay numbers
            raise bad("prefill", "1e-6..1e12 tokens a second, or 0", msg.prefill)
        if len(msg.keys) % cache.index.stride:
            raise bad("keys", f"whole page keys of {cache.index.stride} bytes", len(msg.keys))
        path.prefill = msg.prefill or path.prefill
        instance.add_path(number, path, msg.keys)
        self.parts.requests.note(path, len(msg.keys))
        if self.parts.loading:
            return self._match_later(number, path, first=not msg.handle, device=process.device)
        return self._matched(number, path, first=not msg.handle, device=process.device)

    async def _match_later(self, number: int, path: Path, *, first: bool, device: bool) -> Matched:
        """Match once disk was asked."""
        await self.parts.restore.path(path.cache, path.keys)
        return self._matched(number, path, first=first, device=device)

    def _matched(self, number: int, path: Path, *, first: bool, device: bool) -> Matched:
        """What matches now; a request counts once, however often it polls."""
        cache = path.cache
        found = cache.radix.match(path.keys, self.parts.now())
        node = self._use(path, found)
        parts = segments(cache, node, found.pages, device=device)
        if first:
            self.parts.ways.curves.note(cache, path.keys)
            misses.count(cache, path.keys, found, parts, self.parts.counts, self.parts.persist.room.evictions)
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

    def _use(self, path: Path, found: Found) -> Node:
        """One request counts once, however often it polls; returns the node that the match ends in."""
        if path.used or not found.pages:
            return found.node
        path.used = True
        index = path.cache.radix
        node = index.ending_at(found.node, found.pages)
        index.use(node, self.parts.now())
        if index.crowded(node) and not self.parts.loading:
            index.join(node)
        return node

    def forget(self, process: Process, msg: Forget) -> Ok:
        """Drop a handle."""
        process.instance.forget(msg.handle)
        return Ok()

    async def prefetch(self, process: Process, msg: Prefetch) -> Ok:
        """Start loading what of the handle's match is not in host, and do not wait."""
        path = process.instance.path(msg.handle)
        found = path.cache.radix.match(path.keys, self.parts.now())
        self._ask(path, found)
        if found.pages:
            index = path.cache.radix
            node = index.ending_at(found.node, found.pages)
            loads, needed = self.parts.loads, index.needed(found.pages)
            with self.parts.leased(path.cache, node):
                missing = await loads.lacking(path.cache, node, needed)
                await loads.begin(path.cache, missing, self.parts.deadline(60_000))
        return Ok()

    # -- acquire -------------------------------------------------------------------------------------------------

    def acquire(self, process: Process, msg: Acquire) -> Acquired | Awaitable[Acquired]:
        """Lease a match; waits only when something must come from disk."""
        path = process.instance.path(msg.handle)
        deadline = self.parts.deadline(msg.wait_ms)
        if msg.device and not process.device:
            raise bad("device", "a process that said UseDevice")
        tiers = self._tiers(msg.device)
        asked = path.asked
        if asked is not None and not asked.done() and self._wants_more(path, msg.pages):
            return self._acquire_asked(process, path, msg.pages, asked, deadline, tiers)
        return self._acquire(process, path, msg.pages, deadline, tiers)

    def _tiers(self, device: bool) -> Tiers:
        """Where a reader finds pages in place."""
        return (Tier.HOST,) if self.parts.vram is None else self.parts.vram.tiers(device)

    def _wants_more(self, path: Path, pages: int) -> bool:
        """Whether somebody who asks for `pages` pages is not served by what is here."""
        return pages < 0 or pages > path.cache.radix.match(path.keys, self.parts.now()).pages

    async def _acquire_asked(
        self, process: Process, path: Path, pages: int, asked: asyncio.Task[None], deadline: float, tiers: Tiers
    ) -> Acquired:
        """Wait for what peers have first, and then serve what is here."""
        left = deadline - asyncio.get_running_loop().time()
        await asyncio.wait([asked], timeout=max(0.0, left))
        if process.instance.gone:
            return Acquired(0, 0)
        reply = self._acquire(process, path, pages, deadline, tiers)
        return reply if isinstance(reply, Acquired) else await reply

    def _acquire(
        self, process: Process, path: Path, pages: int, deadline: float, tiers: Tiers
    ) -> Acquired | Awaitable[Acquired]:
        """Lease what matches now; where the engine said how fast it computes, no more than is loaded sooner."""
        if path.prefill and pages < 0:
            pages = self._worth(path)
        held = self._hold(process.instance, path, pages, tiers) if pages else None
        if held is None:
            return Acquired(0, 0)
        if self._whole(held):
            return self._grant(process.instance, held)
        self._drop(process.instance, held)  # a coroutine that is cancelled before it begins could not give it back
        return self._load(process.instance, path, pages, deadline, tiers)

    def _worth(self, path: Path) -> int:
        """How many pages are loaded sooner than computed; -1: all."""
        found = path.cache.radix.match(path.keys, self.parts.now())
        parts = segments(path.cache, found.node, found.pages)
        links = self.parts.links
        return links.loaded(parts, links.judge(path.cache, parts, path.prefill), time.monotonic())

    def _hold(self, instance: Instance, path: Path, pages: int, tiers: Tiers) -> Lease | None:
        """Lease the longest match (of at most `pages`) within the cap; None where there is none."""
        cache = path.cache
        index = cache.radix
        found = index.match(path.keys, self.parts.now())
        node, end = found.node, found.pages
        if 0 <= pages < end:
            node, end = index.resumable(node, pages, LOCAL)
        if not end or not (self.parts.host.budget_bytes or len(tiers) > 1):
            return None
        cost = _cost(cache, end)
        there = self._there(cache, node, end) if len(tiers) > 1 else 0
        if there > instance.room(Tier.DEVICE):
            tiers, there = (Tier.HOST,), 0
        if cost - there > instance.room() or _told(cache, end) > reserving.MOST_TOLD:
            below, fits = index.resumable(node, _fitting(cache, end, instance.room()), LOCAL)
            if not fits and cost - there <= instance.room():
                return None
            if fits:  # else charge says that not even a part is within the cap
                node, end, cost = below, fits, _cost(cache, fits)
                there = self._there(cache, node, end) if there else 0
        instance.charge(cost - there)
        instance.hold(Tier.DEVICE, there)
        node = index.ending_at(node, end)
        node.time = max(node.time, self.parts.now())
        lease = Lease(cache, [node], end, cost - there, tiers=tiers, device_cost=there)
        lease.hold = Hold.READ if self.parts.vram is None or Tier.DEVICE in tiers else Hold.LOW
        index.lease(node, lease.hold)
        return lease

    @staticmethod
    def _whole(lease: Lease) -> bool:
        """Whether its holder can read all of it in place."""
        cache, needed = lease.cache, lease.cache.radix.needed(lease.pages)
        return all(NO_COPY not in cache.found(lease.nodes[0], *each, lease.tiers) for each in needed)

    @staticmethod
    def _there(cache: Cache, node: Node, pages: int) -> int:
        """Bytes of device memory among what an engine reads that resumes after so many pages."""
        needed = cache.radix.needed(pages)
        held = ((g, n - cache.gather(node, g, first, n, Tier.DEVICE).count(NO_COPY)) for g, first, n in needed)
        return sum(count * cache.slot_cost(group) for group, count in held)

    def _drop(self, instance: Instance, lease: Lease) -> None:
        instance.hold(Tier.HOST, -lease.cost)
        instance.hold(Tier.DEVICE, -lease.device_cost)
        for node in lease.nodes:
            self.parts.unlease(lease.cache, node, lease.hold)

    async def _load(self, instance: Instance, path: Path, pages: int, deadline: float, tiers: Tiers) -> Acquired:
        """Bring the missing pages; a lost copy or the deadline leaves the longest prefix that can be read in place."""
        with self.parts.patience.turn(path.cache.pool, Tier.HOST, instance, deadline) as turn:
            return await self._tried(instance, path, pages, deadline, tiers, turn)

    async def _tried(
        self, instance: Instance, path: Path, pages: int, deadline: float, tiers: Tiers, turn: Turn
    ) -> Acquired:
        """Try until all is there, or what is there cannot become more in time."""
        tries, asked = 0, pages
        while (tries := tries + 1) <= MAX_TRIES:
            lease = self._hold(instance, path, pages, tiers)
            if lease is None:
                break
            cache, node = lease.cache, lease.nodes[0]
            brought = None
            try:
                needed = cache.radix.needed(lease.pages)
                missing = await self.parts.loads.lacking(cache, node, needed, lease.tiers)
                begun, own = time.perf_counter(), not self.parts.loads.under_way(missing)
                if missing:
                    brought = await self.parts.loads.bring(cache, missing, deadline)
                took = time.perf_counter() - begun
            except BaseException:
                self._drop(instance, lease)
                raise
            if not cache.gone(node) and cache.radix.resumable(node, lease.pages, LOCAL)[1] == lease.pages:
                _, pages = cache.radix.resumable(node, lease.pages, lease.tiers)  # time or room is up
                if pages == lease.pages:
                    if brought is Brought.ALL and own:  # else not all of these bytes came in that time
                        slowest = Tier(max(m.tier for m in missing))
                        nbytes = sum(cache.item_bytes[m.group] for m in missing)
                        self.parts.links.links[slowest].note(nbytes, took, time.monotonic())
                    return self._grant(instance, lease)
            turn.quietly(functools.partial(self._drop, instance, lease))
            lacking = _cost(cache, lease.pages) - _cost(cache, max(0, pages))
            never = self.parts.space.allowance.never(cache, _cost(cache, lease.pages))
            if brought is Brought.SHORT and not never and await turn.again(lacking):
                tries, pages = 0, asked
        return Acquired(0, 0)

    def _grant(self, instance: Instance, lease: Lease) -> Acquired:
        """Register the lease and say where its items are."""
        number = next(self.parts.numbers)
        instance.leases[number] = lease
        cache, node = lease.cache, lease.nodes[0]
        items = []
        for group, first, count in cache.radix.needed(lease.pages):
            handles, sums = cache.readable(node, group, first, count, lease.tiers)
            items.append(Items(group, first, count, cache.offsets(group, handles), sums.tobytes()))
        cache.counts["pages_leased"] += lease.pages
        if len(lease.tiers) > 1 and self.parts.vram is not None:
            self.parts.vram.promote.wish(cache, node, lease.pages)
        return Acquired(number, lease.pages, tuple(items))

    def release(self, process: Process, msg: Release) -> Ok:
        """Give a lease back."""
        lease = process.instance.leases.pop(msg.lease, None)
        if lease is None:
            raise KvtierError(Code.UNKNOWN, f"no lease {msg.lease} here", "lease")
        self._drop(process.instance, lease)
        return Ok()


def _cost(cache: Cache, pages: int) -> int:
    """Arena bytes of what an engine reads that resumes after so many pages; more pages never cost less."""
    return sum(count * cache.slot_cost(g) for g, _, count in cache.radix.needed(pages))


def _told(cache: Cache, pages: int) -> int:
    """Bytes of a reply that says where these are, and their checksums."""
    return sum(count * 8 * (1 + cache.shape.slots_per_item[g]) for g, _, count in cache.radix.needed(pages))


def _fitting(cache: Cache, pages: int, room: int) -> int:
    """The most pages, up to `pages`, that cost no more than `room`, and that one reply tells of."""
    most = bisect.bisect_right(range(1, pages + 1), room, key=lambda n: _cost(cache, n))
    return bisect.bisect_right(range(1, most + 1), reserving.MOST_TOLD, key=lambda n: _told(cache, n))
