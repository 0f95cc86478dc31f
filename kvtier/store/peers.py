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
from collections.abc import Awaitable
from typing import Final, NamedTuple

from kvtier import wire
from kvtier.peer.base import PeerTier, Place, Shared, Source
from kvtier.peer.items import chunk_pages, chunks
from kvtier.store.cache import Cache
from kvtier.store.commits import Commits
from kvtier.store.instance import Instance, Path, Process
from kvtier.store.keyed import Keys
from kvtier.store.keypeers import KeyPeers
from kvtier.store.parts import Parts
from kvtier.store.pushes import Pushes, shared_of
from kvtier.store.repairs import Repairs
from kvtier.store.reserve import Reservation
from kvtier.store.tokens import Tokens
from kvtier.types import KvtierError

MAX_ASKING: Final = 256
"""Prompts for which peers are asked at a time; more are misses."""
ROOM_MS: Final = 50
"""A home that is pushed to says within the peer's deadline whether it has room."""
LONG_ROOM_MS: Final = 1000
"""What is fetched waits until pages that it displaces are written: engines have deadlines of their own."""
TRIES: Final = 3
"""So often peers are asked for a prompt whose pages did not come."""

_log = logging.getLogger("kvtier.peers")


class Granted(NamedTuple):
    """A reservation; None where nothing is missing or, `refused` says why, nothing was granted."""

    res: Reservation | None
    refused: str


class Guest(Instance):
    """Reserves and commits for other hosts. Its pages are not pushed on."""

    guest = True

    def __init__(self, parts: Parts, name: str, cap_bytes: int, *, room_ms: int = ROOM_MS) -> None:
        """`room_ms`: how long room is waited for."""
        super().__init__(name, "", cap_bytes)
        self.parts = parts
        self._room_ms = room_ms
        self.process = Process(next(parts.numbers), self, None, lambda _: None, events=False)
        self.processes.add(self.process)

    async def reserve(
        self, tokens: Tokens, cache: Cache, keys: bytes, start: int, spare: dict[int, list[int]]
    ) -> Granted:
        """Slots for what is not here of pages [start, end of keys), and of `spare` pages of window and state groups."""
        self._join(cache)
        number, path = next(self.parts.numbers), Path(cache, "")
        self.add_path(number, path, keys)
        pages = len(keys) // cache.index.stride - start
        others = [g for g in range(cache.index.groups) if g not in cache.index.anchors]
        wants = tuple(
            wire.Want(g, _packed([p for p in spare.get(g, ()) if start <= p < start + pages])) for g in others
        )
        try:
            reply = tokens.reserve(self.process, wire.Reserve(number, start, pages, wants, self._room_ms))
            return await self._known(cache, reply)
        finally:
            self.forget(number)

    async def reserve_keys(self, keys: Keys, cache: Cache, group: int, names: bytes) -> Granted:
        """Slots for those of the (concatenated) keys that are not here."""
        self._join(cache)
        reply = keys.reserve(self.process, wire.ReserveKeys(cache.number, group, names, self._room_ms))
        return await self._known(cache, reply)

    async def _known(self, cache: Cache, reply: wire.Reserved | Awaitable[wire.Reserved]) -> Granted:
        """The reply; a guest does not hold caches open, and this one must not be forgotten while it waits for room."""
        with self.parts.leased(cache, cache.index.root):
            got = await reply if inspect.isawaitable(reply) else reply
        return Granted(self.reservations.get(got.reservation), "" if got.pages else got.refused)

    def _join(self, cache: Cache) -> None:
        """Write whole items of a cache; those that are forgotten by now go."""
        ranks = self.process.ranks
        if cache.number not in ranks:
            for number in [number for number in ranks if number not in self.parts.caches]:
                del ranks[number]
            ranks[cache.number] = self.join_shard(cache, wire.Open(cache.spec))

    def commit(self, commits: Commits, res: Reservation, sums: dict[tuple[int, int], int]) -> int:
        """Serve positions all of whose items have a checksum (of a path, up to the first that lacks one).

        The rest goes back. Returns how many are served.
        """
        missing = {at for g, at, _ in res.items(list(range(res.pages))) if not sums.get((g, at))}  # 0: not known
        last = res.pages if res.cache.spec.keyed else min(missing, default=res.pages)
        good = [at for at in range(last) if at not in missing]
        before = res.published
        if good:
            marked = [p for at in good for p in res.mark(self.process, at, 1)]
            for group, at, _ in res.items(marked):
                res.sums[group][at] = sums[group, at]
            reply = commits.complete(res, marked)
            assert not inspect.isawaitable(reply), "every item has its checksum"
        if not res.over:
            commits.abort(self.process, wire.Abort(res.number))
        return res.published - before

    def end(self, commits: Commits) -> None:
        """Nothing of it writes any more: all that is open goes back."""
        self.gone = True
        self.processes.clear()
        commits.let_go(list(self.reservations.values()))
        self.writers.clear()
        del self.process  # which has this one: nobody collects cycles


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
        self._guest = Guest(parts, "peers", cap_bytes, room_ms=LONG_ROOM_MS)
        self.keys = KeyPeers(tier, keys, commits, self._guest)
        self._asking: dict[tuple[int, bytes], asyncio.Task[None]] = {}
        self.pushes = Pushes(parts, tier, self.keys)
        self.repairs = Repairs(parts, tier, self.pushes)

    def start(self) -> None:
        """Watch the peers and push in the background."""
        self.tier.start()
        self.pushes.start()
        self.repairs.start()

    async def close(self) -> None:
        """Ask nobody and push nothing any more."""
        self.pushes.close()
        tasks = [*self.repairs.tasks, *self.pushes.tasks, *self._asking.values(), *self.keys.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.tier.close()
        self._guest.end(self._commits)

    def shared(self, cache: Cache) -> Shared | None:
        """The cache as peers know it; None where it is not shared."""
        return shared_of(self.tier, cache)

    async def forget(self, cache: Cache) -> None:
        """The cache is purged: nothing of it comes back from a store that hosts share."""
        shared = self.shared(cache)
        if shared is not None:
            await self.tier.forget(shared)

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
        """Fetch what peers have of a path beyond page `have`; where one fails, from those that are left."""
        with self.parts.leased(cache, cache.index.root):  # so that it is not forgotten meanwhile
            try:
                for _ in range(TRIES):
                    have, failed = await self._from(cache, shared, keys, have)
                    if not failed:
                        return
            except KvtierError as exc:
                _log.warning("peers' pages could not be taken: %s", exc)
            except Exception:  # noqa: BLE001 - one prompt's pages, not the others'
                _log.exception("fetching from peers failed")

    async def _from(self, cache: Cache, shared: Shared, keys: bytes, have: int) -> tuple[int, bool]:
        """Fetch from those that answer, one after another; pages that are here now, and whether one failed."""
        failed = False
        with contextlib.ExitStack() as held:
            sources = await self.tier.find(shared, keys, have)
            for source in sources:
                held.callback(source.close)
            self.counts["peer_hits" if sources else "peer_misses"] += 1
            for source in sources:
                have, broken = await self._pull(cache, source, keys, have)
                failed |= broken
        return have, failed

    async def _pull(self, cache: Cache, source: Source, keys: bytes, have: int) -> tuple[int, bool]:
        """Fetch from one peer, piece by piece, while it has more; pages that are here, and whether one did not come."""
        step = chunk_pages(cache.spec)
        while have < source.pages and not cache.retired:
            end = min(have + step, source.pages)
            whole = await self._piece(cache, source, keys, (have, end, end if end == source.pages else 0))
            if not whole:
                return have, whole is False
            have = end
        return have, False

    async def _piece(self, cache: Cache, source: Source, keys: bytes, span: tuple[int, int, int]) -> bool | None:
        """Fetch pages [start, end), and what resuming after `resume` pages needs besides; whether all came.

        None: there is no room for them.
        """
        start, end, resume = span
        index, stride = cache.radix, cache.index.stride
        spare: dict[int, list[int]] = {}
        for group, first, count in index.needed(resume) if resume else ():
            if group not in index.anchors:
                spare[group] = list(range(first, first + count))
        start = min([start, *(pages[0] for pages in spare.values() if pages)])
        res, _ = await self._guest.reserve(self._tokens, cache, keys[: end * stride], start, spare)
        if res is None:
            return index.deepest(keys[: end * stride])[1] == end or None
        items = res.items(list(range(res.pages)))
        places = [Place(g, start + at, cache.views(g, handle)) for g, at, handle in items]
        sums: list[int | None] = []
        try:
            for part in chunks(cache.spec, places):  # windows and states of the last piece may be many times a piece
                sums += await source.fetch(part)
        finally:
            known = {(g, at): value for (g, at, _), value in zip(items, sums, strict=False) if value is not None}
            whole = len(known) == len(items) and (res.pages == end - start or None)
            self._count(cache, known)
            self._guest.commit(self._commits, res, known)
        return whole

    def _count(self, cache: Cache, known: dict[tuple[int, int], int]) -> None:
        """Count what came."""
        self.counts["pages_loaded_peer"] += len({at for _, at in known})
        self.counts["bytes_peer_to_host"] += sum(cache.item_bytes[g] for g, _ in known)

    @property
    def busy(self) -> bool:
        """Whether some prompt is being asked for or pushed."""
        return bool(self._asking or self.keys.tasks) or self.pushes.waiting > 0


def _packed(pages: list[int]) -> bytes:
    """Page numbers as the wire has them."""
    return array("i", pages).tobytes()
