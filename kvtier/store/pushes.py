"""Gives what was computed here to its homes, in the background; what failed is tried again a few times.

What waits is bounded, by what it may hold up too: nothing is leased before its turn comes. A page that left host
meanwhile is not pushed; it has been on disk since, or is not worth it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Final, NamedTuple

from kvtier import wire
from kvtier.index import Node
from kvtier.peer.base import NOTHING, Ahead, PeerTier, Pick, Place, Shared, Sink
from kvtier.peer.frames import MAX_ITEMS
from kvtier.peer.items import chunk_pages, items_of, picks_of, ranges
from kvtier.store.cache import Cache
from kvtier.store.keypeers import KeyPeers
from kvtier.store.parts import Parts
from kvtier.types import NO_COPY, KvtierError, Tier, bad

MAX_WISHES: Final = 1024
MAX_WISH_BYTES: Final = 64 << 20
"""Requests whose pages a certain peer is to get, and their keys; the oldest are forgotten."""
MAX_QUEUED: Final = 4096
"""Nodes that wait to be pushed; more are not pushed."""
PUSHERS: Final = 2
TRIES: Final = 4
LOAD_MS: Final = 5000
RETRY_S: Final = 1.5
"""A peer that did not answer has been pinged again by then."""

_log = logging.getLogger("kvtier.peers")


def shared_of(tier: PeerTier, cache: Cache) -> Shared | None:
    """The cache as peers know it; None where it is not shared."""
    return None if cache.retired else tier.shared(cache.spec, cache.scope, cache.epoch)


class Due(NamedTuple):
    """A path that waits to be pushed: up to which page, how often that was tried, from which page on it is new here."""

    end: int
    tries: int
    fresh: int

    @property
    def first(self) -> bool:
        """Whether homes lack some of it, as far as anybody knows."""
        return self.fresh < self.end


class Again(NamedTuple):
    """A path that is pushed once more: up to which page, how often that was tried, what wakes it."""

    end: int
    tries: int
    timer: asyncio.TimerHandle


class Pushes:
    """The queue to the homes. Owned by the loop thread."""

    def __init__(self, parts: Parts, tier: PeerTier, keys: KeyPeers) -> None:
        self.parts = parts
        self.tier = tier
        self.tasks: list[asyncio.Task[None]] = []
        self._keys = keys
        self._counts = parts.counts
        self._queue: dict[tuple[Cache, Node], Due] = {}
        self._later: dict[tuple[Cache, Node], Again] = {}
        """What is tried again soon."""
        self._wishes: dict[tuple[Cache, bytes, str], None] = {}
        """Paths whose pages a peer is to get as they are committed."""
        self._wish_bytes = 0
        self._queued = asyncio.Event()
        self._running = 0

    def start(self) -> None:
        """Push from now on."""
        loop = asyncio.get_running_loop()
        self.tasks = [loop.create_task(self._run()) for _ in range(PUSHERS)]

    def close(self) -> None:
        """Try nothing again. The tasks are the caller's to cancel."""
        for each in self._later.values():
            each.timer.cancel()
        self._later.clear()

    @property
    def waiting(self) -> int:
        """Paths that wait to be pushed, or are being pushed."""
        return len(self._queue) + len(self._later) + self._running

    def offer(self, cache: Cache, node: Node, end: int, tries: int = 0, *, fresh: int | None = None) -> None:
        """Push the path to `node`, up to page `end`, to its homes. Never waits; over the bound it is dropped.

        `fresh`: the first page that was just computed, so that homes lack it; None: nobody knows.
        """
        if shared_of(self.tier, cache) is None:
            return
        key = cache, node
        if len(self._queue) + len(self._later) >= MAX_QUEUED and key not in self._queue:
            self._counts["peer_push_dropped_queue"] += 1
            self.tier.gave_up()
            return
        due = Due(end, tries, end if fresh is None else fresh)
        waits = self._queue.get(key, due)
        self._queue[key] = Due(max(end, waits.end), min(tries, waits.tries), min(due.fresh, waits.fresh))
        self._queued.set()

    def _again(self, cache: Cache, node: Node, end: int, tries: int) -> None:
        """Some home did not take it: try once more in a while, unless that was often enough."""
        key, waits = (cache, node), self._later.get((cache, node))
        if tries + 1 >= TRIES:
            self._counts["peer_push_dropped_home"] += 1
            self.tier.gave_up()
        elif waits is not None:
            self._later[key] = waits._replace(end=max(end, waits.end), tries=min(tries + 1, waits.tries))
        else:

            def now() -> None:
                found = self._later.pop(key)
                self.offer(cache, node, found.end, found.tries)

            timer = asyncio.get_running_loop().call_later(RETRY_S, now)
            self._later[key] = Again(end, tries + 1, timer)

    def wish(self, cache: Cache, keys: bytes, to: str) -> None:
        """Give a peer what is here of a path, and the rest as it is committed. Raises bad_request for no peer."""
        if not self.tier.known(to):
            raise bad("to", "a peer's name", to)
        if not keys:
            return  # every path goes on from there
        if (cache, keys, to) not in self._wishes:
            self._wishes[cache, keys, to] = None
            self._wish_bytes += len(keys)
        while len(self._wishes) > MAX_WISHES or (self._wish_bytes > MAX_WISH_BYTES and len(self._wishes) > 1):
            oldest = next(iter(self._wishes))
            del self._wishes[oldest]
            self._wish_bytes -= len(oldest[1])
        node, end = cache.radix.deepest(keys)
        if end:
            self.offer(cache, cache.radix.ending_at(node, end), end)

    # -- in the background -------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            await self._queued.wait()
            if not self._queue:
                self._queued.clear()
                continue
            cache, node = key = next(iter(self._queue))
            due = self._queue.pop(key)
            self._running += 1
            try:
                if cache.spec.keyed:
                    await self._push_keys(cache, node, due)
                elif not await self._push(cache, node, due.end, due.fresh):
                    self._again(cache, node, due.end, due.tries)
            except Exception:  # noqa: BLE001 - one prompt's pages, not the others'
                _log.exception("a push failed")
            finally:
                self._running -= 1

    async def _push_keys(self, cache: Cache, node: Node, due: Due) -> None:
        """Give keys of one group to their homes: this one, and others that wait."""
        same = [key for key in self._queue if key[0] is cache and key[1].edge[0] == node.edge[0]][: wire.MAX_KEYS - 1]
        tried = {node: due} | {key[1]: self._queue.pop(key) for key in same}
        shared = shared_of(self.tier, cache)
        nodes = [each for each in tried if not each.dead and each.live]
        self._counts["peer_push_dropped_gone"] += len(tried) - len(nodes)
        if nodes and shared is not None:
            taken, left = await self._keys.push(cache, shared, nodes, fresh=all(each.first for each in tried.values()))
            self._counts["pages_pushed_peer"] += taken
            self._counts["bytes_host_to_peer"] += taken * cache.item_bytes[node.edge[0]]
            for each in left:
                self._again(cache, each, 1, tried[each].tries)

    async def repair(self, cache: Cache, node: Node, end: int) -> bool:
        """Give every home what it lacks of a path; False where some home did not answer or failed."""
        return await self._push(cache, node, end, end, disk=self.tier.keeps_all)

    async def _push(self, cache: Cache, node: Node, end: int, fresh: int, *, disk: bool = False) -> bool:
        """Give every home what it lacks of a path; False where some home did not answer or failed."""
        shared = shared_of(self.tier, cache)
        if shared is None or node.dead:
            self._counts["peer_push_dropped_gone"] += 1
            return True
        whole = True
        with self.parts.leased(cache, node):
            keys = path_keys(cache, node)[: end * cache.index.stride]
            await self._down(cache, node, len(keys) // cache.index.stride)
            for home, pages in self._receivers(cache, shared, keys):
                part = keys[: pages * cache.index.stride]
                ahead = _ahead(cache, node, range(fresh, pages))
                sink = await self.tier.offer(home, shared, part, _spare(cache, node, pages), ahead=ahead)
                if sink is None:
                    whole = False
                    continue
                self._counts["pages_pushed_peer"] += sink.stored
                self._counts["bytes_host_to_peer"] += sink.stored * sum(cache.item_bytes)
                with contextlib.closing(sink):
                    whole = await self._feed(cache, node, sink, pages, disk=disk) and whole
        return whole

    async def _down(self, cache: Cache, node: Node, pages: int) -> None:
        """Wait for what was computed on a device and is on its way to host."""
        vram, needed = self.parts.vram, [(group, 0, pages) for group in range(cache.index.groups)]
        if vram is not None and any(m.tier == Tier.DEVICE for m in self.parts.loads.missing(cache, node, needed)):
            await vram.demote.settled()

    def _receivers(self, cache: Cache, shared: Shared, keys: bytes) -> list[tuple[str, int]]:
        """(peer, leading pages): who waits for the path first, then its homes."""
        pages = len(keys) // cache.index.stride
        found = {to: pages for of, wanted, to in self._wishes if of is cache and _continues(wanted, keys)}
        for home, most in self.tier.homes(shared, keys):
            found.setdefault(home, most)
        return list(found.items())

    async def _feed(self, cache: Cache, node: Node, sink: Sink, pages: int, *, disk: bool) -> bool:
        """Send what a home wants as long as host (or disk) has it; False where the home failed."""
        try:
            while sink.picks and not node.dead:
                items = items_of(cache.spec, sink.picks, pages)
                missing = self.parts.loads.missing(cache, node, ranges(items)) if disk else []
                if missing:
                    await self.parts.loads.bring(cache, missing, self.parts.deadline(LOAD_MS))
                places, sums = ([], []) if node.dead else lend(cache, node, items)
                sent = await sink.send(places, sums) if places else 0
                self._counts["pages_pushed_peer"] += sent
                self._counts["bytes_host_to_peer"] += sum(cache.item_bytes[place.group] for place in places)
                if places and not sent:
                    return False
                if len(places) < len(items):
                    self._counts["peer_push_dropped_gone"] += 1
                    return True
                await sink.more()
        except (KvtierError, OSError, EOFError) as exc:
            _log.warning("a push to %s failed: %r", sink.node, exc)
            return False
        return True


def lend(cache: Cache, node: Node, items: list[tuple[int, int]]) -> tuple[list[Place], list[int]]:
    """Slots and checksums of items of a leased path, up to the first page of which host lacks one of them."""
    groups: dict[int, list[int]] = {}
    for group, page in items:
        groups.setdefault(group, []).append(page)
    found: list[tuple[Place, int]] = []
    end = 1 + max((page for _, page in items), default=-1)
    for group, pages in groups.items():
        first, count = pages[0], pages[-1] - pages[0] + 1
        handles = cache.gather(node, group, first, count, Tier.HOST)
        known = cache.gather_sums(node, group, first, count)
        for page in pages:
            if page >= end:
                break
            if handles[page - first] == NO_COPY:
                end = page
                break
            place = Place(group, page, cache.views(group, handles[page - first]))
            found.append((place, known[page - first]))
    kept = [pair for pair in found if pair[0].page < end]
    return [place for place, _ in kept], [value for _, value in kept]


def _ahead(cache: Cache, node: Node, pages: range) -> Ahead:
    """A first piece of pages of a leased path that homes lack; nothing where more than whole pages is to be picked."""
    groups = range(cache.index.groups)
    first = pages[: chunk_pages(cache.spec)]
    if node.dead or not first or len(cache.index.anchors) < len(groups):
        return NOTHING
    return Ahead(*lend(cache, node, [(group, page) for group in groups for page in first]))


def path_keys(cache: Cache, node: Node) -> bytes:
    """Page keys of the path to a node, as the tree has them."""
    return b"".join(each.edge for each in cache.index.path(node))


def _continues(a: bytes, b: bytes) -> bool:
    """Whether one path is the beginning of the other."""
    return a.startswith(b) if len(a) > len(b) else b.startswith(a)


def _spare(cache: Cache, node: Node, pages: int) -> tuple[Pick, ...]:
    """What host has of window and state groups of a path's first pages: the deepest of each, as many as are taken."""
    others = [g for g in range(cache.index.groups) if g not in cache.index.anchors]
    first = max(0, pages - MAX_ITEMS // max(1, len(others)))
    held = {g: cache.gather(node, g, first, pages - first, Tier.HOST) for g in others}
    return picks_of((g, first + at) for g, row in held.items() for at, handle in enumerate(row) if handle != NO_COPY)
