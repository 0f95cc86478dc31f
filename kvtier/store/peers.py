"""Pages of other hosts: brought when a prompt is not all here, and pushed to their homes when they were computed here.

`match` never waits for a peer: it starts the question and says that it is asking; what comes is reserved (and so
`pending`), checked, published page by page, and is then as local as any other. `acquire` waits for the question, within
its own deadline. What is fetched and what peers push passes the same reserve and commit as an engine's pages.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from array import array
from typing import Final

from kvtier import wire
from kvtier.index import Node
from kvtier.peer.base import PeerTier, Pick, Place, Shared, Sink, Source
from kvtier.peer.items import chunk_pages, items_of, picks_of
from kvtier.store.cache import Cache
from kvtier.store.commits import Commits
from kvtier.store.instance import Instance, Path, Process
from kvtier.store.keyed import Keys
from kvtier.store.keypeers import KeyPeers
from kvtier.store.parts import Parts
from kvtier.store.reserve import Reservation
from kvtier.store.tokens import Tokens
from kvtier.types import NO_COPY, KvtierError, Tier, bad

MAX_ASKING: Final = 256
"""Prompts for which peers are asked at a time; more are misses."""
MAX_WISHES: Final = 1024
"""Requests whose pages a certain peer is to get; the oldest are forgotten."""
MAX_QUEUED: Final = 4096
"""Nodes that wait to be pushed; more are not pushed."""
PUSHERS: Final = 2
ROOM_MS: Final = 50

_log = logging.getLogger("kvtier.peers")


class Guest(Instance):
    """Reserves and commits for other hosts. Its pages are not pushed on."""

    guest = True

    def __init__(self, parts: Parts, name: str, cap_bytes: int) -> None:
        super().__init__(name, "", cap_bytes)
        self.parts = parts
        self.process = Process(next(parts.numbers), self, None, lambda _: None, events=False)
        self.processes.add(self.process)

    async def reserve(
        self, tokens: Tokens, cache: Cache, keys: bytes, start: int, spare: dict[int, list[int]]
    ) -> Reservation | None:
        """Slots for what is not here of pages [start, end of keys), and of `spare` pages of window and state groups.

        None: nothing is missing or no room could be made.
        """
        if cache.number not in self.process.ranks:
            self.process.ranks[cache.number] = self.join_shard(cache, wire.Open(cache.spec))
        number, path = next(self.parts.numbers), Path(cache, "")
        self.add_path(number, path, keys)
        pages = len(keys) // cache.index.stride - start
        others = [g for g in range(cache.index.groups) if g not in cache.index.anchors]
        wants = tuple(
            wire.Want(g, _packed([p for p in spare.get(g, ()) if start <= p < start + pages])) for g in others
        )
        try:
            reply = tokens.reserve(self.process, wire.Reserve(number, start, pages, wants, ROOM_MS))
            got = await reply if inspect.isawaitable(reply) else reply
        finally:
            self.forget(number)
        return self.reservations.get(got.reservation)

    async def reserve_keys(self, keys: Keys, cache: Cache, group: int, names: bytes) -> Reservation | None:
        """Slots for those of the (concatenated) keys that are not here; None where there are none, or no room."""
        self.process.ranks.setdefault(cache.number, self.join_shard(cache, wire.Open(cache.spec)))
        reply = keys.reserve(self.process, wire.ReserveKeys(cache.number, group, names, ROOM_MS))
        got = await reply if inspect.isawaitable(reply) else reply
        return self.reservations.get(got.reservation)

    def commit(self, commits: Commits, res: Reservation, sums: dict[tuple[int, int], int]) -> int:
        """Serve positions all of whose items have a checksum (of a path, up to the first that lacks one).

        The rest goes back. Returns how many are served.
        """
        missing = {at for g, at, _ in res.items(list(range(res.pages))) if (g, at) not in sums}
        last = res.pages if res.cache.spec.keyed else min(missing, default=res.pages)
        good = [at for at in range(last) if at not in missing]
        before = res.published
        if good:
            reply = commits.complete(res, [p for at in good for p in res.mark(self.process, at, 1)], sums)
            assert not inspect.isawaitable(reply), "every item has its checksum"
        if not res.over:
            commits.abort(self.process, wire.Abort(res.number))
        return res.published - before

    def end(self, commits: Commits) -> None:
        """Nothing of it writes any more: all that is open goes back."""
        self.gone = True
        self.processes.clear()
        commits.let_go(list(self.reservations.values()))


class Peers:
    """Between the store and a peer tier. Owned by the loop thread."""

    def __init__(
        self, parts: Parts, tokens: Tokens, keys: Keys, commits: Commits, tier: PeerTier, cap_bytes: int
    ) -> None:
        self.parts = parts
        self.tier = tier
        self.counts = parts.counts
        self._tokens = tokens
        self._commits = commits
        self._guest = Guest(parts, "peers", cap_bytes)
        self.keys = KeyPeers(tier, keys, commits, self._guest)
        self._asking: dict[tuple[int, bytes], asyncio.Task[None]] = {}
        self._queue: dict[tuple[Cache, Node], int] = {}
        """What waits to be pushed: the path to the node, up to a page."""
        self._wishes: dict[tuple[Cache, bytes, str], None] = {}
        """Paths whose pages a peer is to get as they are committed."""
        self._queued = asyncio.Event()
        self._pushers: list[asyncio.Task[None]] = []
        self._pushing = 0

    def start(self) -> None:
        """Watch the peers and push in the background."""
        self.tier.start()
        loop = asyncio.get_running_loop()
        self._pushers = [loop.create_task(self._push_all()) for _ in range(PUSHERS)]

    async def close(self) -> None:
        """Ask nobody and push nothing any more."""
        tasks = [*self._pushers, *self._asking.values(), *self.keys.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.tier.close()
        self._guest.end(self._commits)

    def shared(self, cache: Cache) -> Shared | None:
        """The cache as peers know it; None where it is not shared."""
        return None if cache.retired else self.tier.shared(cache.spec, cache.scope, cache.epoch)

    # -- fetching --------------------------------------------------------------------------------------------------

    def asking(self, path: Path, pages: int) -> asyncio.Task[None] | None:
        """The question for the rest of a path of which `pages` pages are here, begun if it is worth it."""
        if path.asked is not None and not path.asked.done():
            return path.asked
        cache = path.cache
        if path.asked_bytes == len(path.keys) or pages * cache.index.stride >= len(path.keys):
            return None
        path.asked_bytes = len(path.keys)
        shared = self.shared(cache)
        if shared is None or not self.tier.worth(shared, path.keys, pages):
            return None
        name = cache.number, path.keys
        task = self._asking.get(name)
        if task is None:
            if len(self._asking) >= MAX_ASKING:
                self.counts["peer_refused_asking"] += 1
                return None
            task = asyncio.get_running_loop().create_task(self._bring(cache, shared, path.keys, pages))
            self._asking[name] = task
            task.add_done_callback(lambda _: self._asking.pop(name, None))
        path.asked = task
        return task

    async def _bring(self, cache: Cache, shared: Shared, keys: bytes, have: int) -> None:
        """Fetch what peers have of a path beyond page `have`, from one after another."""
        cache.index.lease(cache.index.root)  # so that the cache is not forgotten meanwhile
        sources: list[Source] = []
        try:
            sources = await self.tier.find(shared, keys, have)
            self.counts["peer_hits" if sources else "peer_misses"] += 1
            for source in sources:
                have = await self._pull(cache, source, keys, have)
        except KvtierError as exc:
            _log.warning("peers' pages could not be taken: %s", exc)
        except Exception:  # noqa: BLE001 - one prompt's pages, not the others'
            _log.exception("fetching from peers failed")
        finally:
            for source in sources:
                source.close()
            self.parts.unlease(cache, cache.index.root)

    async def _pull(self, cache: Cache, source: Source, keys: bytes, have: int) -> int:
        """Fetch from one peer, piece by piece, until it has no more or something did not come; returns pages here."""
        step = chunk_pages(cache.spec)
        while have < source.pages and not cache.retired:
            end = min(have + step, source.pages)
            resume = end if end == source.pages else 0
            if not await self._piece(cache, source, keys, (have, end, resume)):
                break
            have = end
        return have

    async def _piece(self, cache: Cache, source: Source, keys: bytes, span: tuple[int, int, int]) -> bool:
        """Fetch pages [start, end), and what resuming after `resume` pages needs besides; whether all came."""
        start, end, resume = span
        index, stride = cache.radix, cache.index.stride
        spare: dict[int, list[int]] = {}
        for group, first, count in index.needed(resume) if resume else ():
            if group not in index.anchors:
                spare[group] = list(range(first, first + count))
        start = min([start, *(pages[0] for pages in spare.values() if pages)])
        res = await self._guest.reserve(self._tokens, cache, keys[: end * stride], start, spare)
        if res is None:
            return index.deepest(keys[: end * stride])[1] == end
        items = res.items(list(range(res.pages)))
        places = [Place(g, start + at, cache.views(g, handle)) for g, at, handle in items]
        sums: list[int | None] = [None] * len(places)
        try:
            sums = await source.fetch(places)
        finally:
            known = {(g, at): value for (g, at, _), value in zip(items, sums, strict=True) if value is not None}
            whole = res.pages == end - start and len(known) == len(items)
            self._count(cache, known)
            self._guest.commit(self._commits, res, known)
        return whole

    def _count(self, cache: Cache, known: dict[tuple[int, int], int]) -> None:
        """Count what came."""
        self.counts["pages_loaded_peer"] += len({at for _, at in known})
        self.counts["bytes_peer_to_host"] += sum(cache.item_bytes[g] for g, _ in known)

    # -- pushing ---------------------------------------------------------------------------------------------------

    def offer(self, cache: Cache, node: Node, end: int) -> None:
        """Push the path to `node`, up to page `end`, to its homes. Never waits; over the bound it is dropped."""
        if self.shared(cache) is None:
            return
        key = cache, node
        if len(self._queue) >= MAX_QUEUED and key not in self._queue:
            self.counts["peer_push_dropped_queue"] += 1
            return
        self._queue[key] = max(end, self._queue.get(key, 0))
        self._queued.set()

    def wish(self, cache: Cache, keys: bytes, to: str) -> None:
        """Give a peer what is here of a path, and the rest as it is committed. Raises bad_request for no peer."""
        if not self.tier.known(to):
            raise bad("to", "a peer's name", to)
        self._wishes.pop((cache, keys, to), None)
        self._wishes[cache, keys, to] = None
        while len(self._wishes) > MAX_WISHES:
            self._wishes.pop(next(iter(self._wishes)))
        node, end = cache.radix.deepest(keys)
        if end:
            self.offer(cache, cache.radix.ending_at(node, end), end)

    @property
    def busy(self) -> bool:
        """Whether some prompt is being asked for or pushed."""
        return bool(self._asking or self.keys.tasks) or self.unpushed > 0

    @property
    def unpushed(self) -> int:
        """Paths that wait to be pushed or are being pushed."""
        return len(self._queue) + self._pushing

    async def _push_all(self) -> None:
        while True:
            await self._queued.wait()
            if not self._queue:
                self._queued.clear()
                continue
            cache, node = key = next(iter(self._queue))
            end = self._queue.pop(key)
            self._pushing += 1
            try:
                await (self._push_keys(cache, node) if cache.spec.keyed else self._push(cache, node, end))
            except (KvtierError, OSError, EOFError) as exc:
                self.counts["peer_push_failed"] += 1
                _log.warning("a push failed: %r", exc)
            except Exception:  # noqa: BLE001 - one prompt's pages, not the others'
                _log.exception("a push failed")
            finally:
                self._pushing -= 1

    async def _push_keys(self, cache: Cache, node: Node) -> None:
        """Give keys of one group to their homes: this one, and others that wait."""
        same = [key for key in self._queue if key[0] is cache and key[1].edge[0] == node.edge[0]][: wire.MAX_KEYS - 1]
        for key in same:
            del self._queue[key]
        shared = self.shared(cache)
        nodes = [each for each in (node, *(key[1] for key in same)) if not each.dead and each.live]
        self.counts["peer_push_dropped_gone"] += 1 + len(same) - len(nodes)
        if nodes and shared is not None:
            taken = await self.keys.push(cache, shared, nodes)
            self.counts["pages_pushed_peer"] += taken
            self.counts["bytes_host_to_peer"] += taken * cache.item_bytes[node.edge[0]]

    async def _push(self, cache: Cache, node: Node, end: int) -> None:
        """Give every home what it lacks of a path."""
        shared = self.shared(cache)
        if shared is None or node.dead:
            self.counts["peer_push_dropped_gone"] += 1
            return
        cache.index.lease(node)
        try:
            keys = path_keys(cache, node)[: end * cache.index.stride]
            for home, pages in self._receivers(cache, shared, keys):
                part = keys[: pages * cache.index.stride]
                sink = await self.tier.offer(home, shared, part, _spare(cache, node, pages))
                if sink is None:
                    self.counts["peer_push_dropped_home"] += 1
                    continue
                with contextlib.closing(sink):
                    await self._feed(cache, node, sink, pages)
        finally:
            self.parts.unlease(cache, node)

    def _receivers(self, cache: Cache, shared: Shared, keys: bytes) -> list[tuple[str, int]]:
        """(peer, leading pages): who waits for the path first, then its homes."""
        pages = len(keys) // cache.index.stride
        found = {to: pages for of, wanted, to in self._wishes if of is cache and _continues(wanted, keys)}
        for home, most in self.tier.homes(shared, keys):
            found.setdefault(home, most)
        return list(found.items())

    async def _feed(self, cache: Cache, node: Node, sink: Sink, pages: int) -> None:
        """Send what a home wants as long as host has it."""
        while sink.picks and not node.dead:
            places, sums = lend(cache, node, items_of(cache.spec, sink.picks, pages))
            if not places:
                self.counts["peer_push_dropped_gone"] += 1
                return
            sent = await sink.send(places, sums)
            self.counts["pages_pushed_peer"] += sent
            self.counts["bytes_host_to_peer"] += sum(cache.item_bytes[place.group] for place in places)
            if not sent:
                return
            await sink.more()


def lend(cache: Cache, node: Node, items: list[tuple[int, int]]) -> tuple[list[Place], list[int]]:
    """Slots and checksums of items of a leased path; none at all unless host has every one of them."""
    groups: dict[int, list[int]] = {}
    for group, page in items:
        groups.setdefault(group, []).append(page)
    places: list[Place] = []
    sums: list[int] = []
    for group, pages in groups.items():
        first, count = pages[0], pages[-1] - pages[0] + 1
        handles = cache.gather(node, group, first, count, Tier.HOST)
        known = cache.gather_sums(node, group, first, count)
        for page in pages:
            if handles[page - first] == NO_COPY:
                return [], []
            places.append(Place(group, page, cache.views(group, handles[page - first])))
            sums.append(known[page - first])
    return places, sums


def path_keys(cache: Cache, node: Node) -> bytes:
    """Page keys of the path to a node, as the tree has them."""
    return b"".join(each.edge for each in cache.index.path(node))


def _continues(a: bytes, b: bytes) -> bool:
    """Whether one path is the beginning of the other."""
    return a.startswith(b) if len(a) > len(b) else b.startswith(a)


def _packed(pages: list[int]) -> bytes:
    """Page numbers as the wire has them."""
    return array("i", pages).tobytes()


def _spare(cache: Cache, node: Node, pages: int) -> tuple[Pick, ...]:
    """What host has of window and state groups of a path's first pages."""
    others = [g for g in range(cache.index.groups) if g not in cache.index.anchors]
    held = {g: cache.gather(node, g, 0, pages, Tier.HOST) for g in others}
    return picks_of((g, page) for g, row in held.items() for page, handle in enumerate(row) if handle != NO_COPY)
