"""The same between hosts for keyed caches: each key has homes of its own.

`exists` never waits: keys that are not here are pending while their homes are asked, then `peer` or a miss; what was
said is believed for a moment. `acquire` fetches keys that peers have within its own deadline.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from kvtier.index import Node
from kvtier.index.node import LOCAL
from kvtier.peer.base import Ahead, PeerTier, Place, Shared, Sink
from kvtier.peer.items import CHUNK_BYTES, pages_of
from kvtier.store.cache import Cache
from kvtier.store.keyed import Keys
from kvtier.types import NO_COPY, KvtierError, Presence, Tier

if TYPE_CHECKING:
    from kvtier.store.commits import Commits
    from kvtier.store.peers import Guest

YES_S: Final = 5.0
NO_S: Final = 1.0
MAX_HINTS: Final = 1 << 16
MAX_QUESTIONS: Final = 64
ASKED_S: Final = 60.0
"""A question is over long before: its own deadline ends it."""
_log = logging.getLogger("kvtier.peers")


class Hint(NamedTuple):
    """Which peers have a key, until when that is believed; `asking`: nobody has said yet."""

    nodes: tuple[str, ...]
    until: float
    asking: bool = False


class KeyPeers:
    """Questions, fetches and pushes by key. Owned by the loop thread."""

    def __init__(self, tier: PeerTier, keys: Keys, commits: Commits, guest: Guest) -> None:
        self.tier = tier
        self._keys = keys
        self._commits = commits
        self._guest = guest
        self._hints: OrderedDict[tuple[int, bytes], Hint] = OrderedDict()
        self.tasks: set[asyncio.Task[None]] = set()

    # -- looking -----------------------------------------------------------------------------------------------------

    def look(self, cache: Cache, shared: Shared, names: Sequence[bytes], states: bytes) -> bytes:
        """What `exists` says of keys, given what is here; begins to ask for those of which nothing is known."""
        now = asyncio.get_running_loop().time()
        out, ask = bytearray(states), []
        for at, state in enumerate(states):
            if state != Presence.MISS:
                continue
            hint = self._hints.get((cache.number, names[at]))
            if hint is None or hint.until <= now:
                ask.append(at)
            elif hint.asking:
                out[at] = Presence.PENDING
            elif hint.nodes:
                out[at] = Presence.PEER
        if ask and len(self.tasks) < MAX_QUESTIONS and self.tier.answers():
            for at in ask:
                self._note(cache, names[at], Hint((), now + ASKED_S, asking=True))
                out[at] = Presence.PENDING
            self._begin(self._ask(cache, shared, [names[at] for at in ask]))
        return bytes(out)

    def _begin(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def _note(self, cache: Cache, name: bytes, hint: Hint) -> None:
        self._hints.pop((cache.number, name), None)
        self._hints[cache.number, name] = hint
        while len(self._hints) > MAX_HINTS:
            self._hints.popitem(last=False)

    async def _ask(self, cache: Cache, shared: Shared, names: list[bytes]) -> None:
        """Ask the homes of keys of one group, and remember what they say."""
        found: dict[bytes, list[str]] = {}
        try:
            found = await self.tier.holders(shared, names[0][0], [name[1:] for name in names])
        except KvtierError as exc:
            _log.warning("peers could not be asked for keys: %s", exc)
        finally:
            now = asyncio.get_running_loop().time()
            for name in names:
                nodes = tuple(found.get(name[1:], ()))
                self._note(cache, name, Hint(nodes, now + (YES_S if nodes else NO_S)))

    # -- fetching ----------------------------------------------------------------------------------------------------

    def wanted(self, cache: Cache, names: Iterable[bytes]) -> dict[str, list[bytes]]:
        """Absent keys that a peer said it has, by that peer."""
        now, out = asyncio.get_running_loop().time(), dict[str, list[bytes]]()
        for name in names:
            hint = self._hints.get((cache.number, name))
            if hint is not None and hint.nodes and hint.until > now and cache.keyed.find(name) is None:
                out.setdefault(hint.nodes[0], []).append(name)
        return out

    async def bring(self, cache: Cache, shared: Shared, wanted: dict[str, list[bytes]], deadline: float) -> None:
        """Fetch keys from peers, from several side by side; what comes after the deadline goes on by itself."""
        tasks = [self._begin(self._pull(cache, shared, node, names)) for node, names in wanted.items()]
        await asyncio.wait(tasks, timeout=max(0.0, deadline - asyncio.get_running_loop().time()))

    async def _pull(self, cache: Cache, shared: Shared, node: str, names: list[bytes]) -> None:
        """Fetch keys of one group from one peer, and what does not come from the next that said it has it."""
        left = await self._from(cache, shared, node, names)
        for name in left:
            hint = self._hints.pop((cache.number, name), None)
            others = tuple(each for each in hint.nodes if each != node) if hint is not None else ()
            if hint is not None and others:
                self._note(cache, name, hint._replace(nodes=others))
        for other, mine in self.wanted(cache, left).items():
            await self._pull(cache, shared, other, mine)

    async def _from(self, cache: Cache, shared: Shared, node: str, names: list[bytes]) -> list[bytes]:
        """Fetch keys of one group from one peer, piece by piece; those that did not come."""
        group, step = names[0][0], max(1, CHUNK_BYTES // cache.item_bytes[names[0][0]])
        left: list[bytes] = []
        with self._keys.parts.leased(cache, cache.index.root):  # so that the cache is not forgotten meanwhile
            try:
                for at in range(0, len(names), step):
                    lacking = await self._piece(cache, shared, node, group, names[at : at + step])
                    if lacking is None:
                        return left + names[at:]
                    left += lacking
            except KvtierError as exc:
                _log.warning("peers' keys could not be taken: %s", exc)
            except Exception:  # noqa: BLE001 - these keys, not the others'
                _log.exception("fetching keys from a peer failed")
        return left

    async def _piece(
        self, cache: Cache, shared: Shared, node: str, group: int, names: list[bytes]
    ) -> list[bytes] | None:
        """Fetch some keys; those that did not come, None where the peer does not say which it has."""
        keys = b"".join(name[1:] for name in names)
        source = await self.tier.source(node, shared, group, keys)
        if source is None:
            return None
        sums: list[int | None] = []
        try:
            res, _ = await self._guest.reserve_keys(self._keys, cache, group, keys)
            if res is None:
                return []  # others brought them, or there is no room
            items = res.items(list(range(res.pages)))
            try:
                sums = await source.fetch([Place(g, at, cache.views(g, handle)) for g, at, handle in items])
            finally:
                known = {(g, at): v for (g, at, _), v in zip(items, sums, strict=False) if v is not None}
                self._guest.commit(self._commits, res, known)
            counts = self._keys.parts.counts
            counts["pages_loaded_peer"] += len(known)
            counts["bytes_peer_to_host"] += len(known) * cache.item_bytes[group]
            return [names[at] for g, at, _ in items if (g, at) not in known]
        finally:
            source.close()

    # -- pushing -----------------------------------------------------------------------------------------------------

    async def push(self, cache: Cache, shared: Shared, nodes: list[Node], *, fresh: bool) -> tuple[int, list[Node]]:
        """Give homes keys of one group that they lack; how many they took, and the nodes that some home did not get.

        `fresh`: they were just computed, so that homes lack all of them.
        """
        group = nodes[0].edge[0]
        homes: dict[str, list[Node]] = {}
        for node in nodes:
            for home in self.tier.key_homes(shared, group, node.edge[1:]):
                homes.setdefault(home, []).append(node)
        taken = 0
        left: dict[Node, None] = {}
        with self._keys.parts.leased(cache, *nodes):
            for home, mine in homes.items():
                sent = await self._push_to(cache, shared, home, mine, fresh=fresh)
                taken += max(0, sent)
                if sent < 0:
                    left.update(dict.fromkeys(mine))
        return taken, list(left)

    async def _push_to(self, cache: Cache, shared: Shared, home: str, nodes: list[Node], *, fresh: bool) -> int:
        """How many keys a home took; -1 where it did not answer or failed."""
        group = nodes[0].edge[0]
        keys = b"".join(node.edge[1:] for node in nodes)
        first = list(enumerate(nodes[: CHUNK_BYTES // cache.item_bytes[group]])) if fresh else []
        sink = await self.tier.offer(home, shared, keys, (), group, Ahead(*lend_keys(cache, group, first)))
        if sink is None:
            return -1
        try:
            fed = await self._feed(cache, sink, group, nodes)
            return fed if fed < 0 else sink.stored + fed
        except (KvtierError, OSError, EOFError) as exc:
            _log.warning("a push to %s failed: %r", home, exc)
            return -1
        finally:
            sink.close()

    async def _feed(self, cache: Cache, sink: Sink, group: int, nodes: list[Node]) -> int:
        """Send what a home picks of these keys and host has; how many it took, -1 where it failed."""
        taken = 0
        gone = set[int]()
        while wanted := {at for pick in sink.picks for at in pages_of(pick)} - gone:
            gone |= {at for at in wanted if _in_host(cache, nodes[at], group) is None}
            places, sums = lend_keys(cache, group, [(at, nodes[at]) for at in sorted(wanted - gone)])
            if places:
                sent = await sink.send(places, sums)
                if not sent:
                    return -1
                taken += sent
            await sink.more()
        self._keys.parts.counts["peer_push_dropped_gone"] += len(gone)
        return taken


def nodes_of(cache: Cache, group: int, keys: bytes) -> list[Node | None]:
    """The nodes of concatenated keys."""
    size, find, name = cache.spec.key_bytes, cache.keyed.find, cache.keyed.name
    return [find(name(group, keys[at : at + size])) for at in range(0, len(keys), size)]


def here(cache: Cache, node: Node | None, group: int) -> bool:
    """Whether a key can be served from this host."""
    return node is not None and node.live > 0 and any(cache.index.get(node, 0, t, group) != NO_COPY for t in LOCAL)


def _in_host(cache: Cache, node: Node, group: int) -> tuple[int, int] | None:
    """Handle and checksum of a leased key that can be sent."""
    handle = NO_COPY if node.dead else cache.index.get(node, 0, Tier.HOST, group)
    kept = node.sums[group]
    return None if handle == NO_COPY or kept is None else (handle, kept[0])


def lend_keys(cache: Cache, group: int, wanted: list[tuple[int, Node]]) -> tuple[list[Place], list[int]]:
    """Slots and checksums of leased keys, by position; none at all unless host has every one of them."""
    places: list[Place] = []
    sums: list[int] = []
    for at, node in wanted:
        found = _in_host(cache, node, group)
        if found is None:
            return [], []
        places.append(Place(group, at, cache.views(group, found[0])))
        sums.append(found[1])
    return places, sums
