"""What one connection of another daemon pushes here: reserved before a byte of it is read, checked, served."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from msgspec.structs import replace

from kvtier.identity import base_id
from kvtier.index.node import LOCAL
from kvtier.peer import frames
from kvtier.peer.base import Pick, Place, Shared
from kvtier.peer.items import CHUNK_BYTES, chunk_pages, echo, items_of, nbytes_of, pages_of, picks_of, sums_of
from kvtier.peer.pipe import Pipe
from kvtier.store.cache import Cache
from kvtier.store.keypeers import nodes_of
from kvtier.store.peers import Granted, Guest
from kvtier.store.reserve import Reservation
from kvtier.types import NO_COPY, Code, KvtierError
from kvtier.wire import MAX_KEYS

if TYPE_CHECKING:
    from kvtier.server.home import Home

SCRAP: Final = 256 << 10
"""Memory for what comes and is not wanted, however much that is."""


class Route(NamedTuple):
    """The path that a connection is about."""

    shared: Shared
    keys: bytes
    spare: tuple[Pick, ...] = ()
    group: int = 0


class Taking:
    """A guest like an engine: its reservations end with the connection."""

    def __init__(self, home: Home, pipe: Pipe) -> None:
        self._home = home
        self._pipe = pipe
        self._parts = home.store.parts
        self._guest = Guest(self._parts, "home", home.store.cap_bytes)
        self._route: Route | None = None
        self._res: Reservation | None = None
        self._positions: list[int] = []
        """Keyed caches: of what is being taken, the positions in what was offered."""

    @property
    def waits(self) -> bool:
        """Whether slots are held for what is to come."""
        return self._res is not None

    def turn_to(self, route: Route | None) -> None:
        """Be about another path: what was to come of the one before must not be taken for it."""
        self._let_go()
        self._route = route

    def end(self) -> None:
        """The connection is over and nothing of it moves."""
        self._guest.end(self._home.store.commits)

    # -- what is wanted --------------------------------------------------------------------------------------------

    async def more(self, _: frames.More | None = None) -> frames.Wanted:
        """Reserve the next pages that are missing here."""
        self._let_go()
        route, store = self._route, self._home.store
        if route is None:
            raise KvtierError(Code.UNKNOWN, "nothing was offered before")
        if store.closing:
            raise KvtierError(Code.CLOSING, "the daemon is draining")
        shared, keys = route.shared, route.keys
        if self._parts.epoch(base_id(shared.spec, shared.scope)):
            raise KvtierError(Code.FORBIDDEN, "the cache was reset here")
        self._parts.room_for(shared.spec, shared.scope, 0)
        cache = self._parts.cache(shared.spec, shared.scope, 0)
        if cache.spec.keyed:
            return await self._more_keys(cache, route)
        if self._parts.loading:
            await self._parts.restore.path(cache, keys)
        spare = {pick.group: pages_of(pick) for pick in route.spare}
        start = self._first_lacking(cache, keys, spare)
        end = min(len(keys) // cache.index.stride, start + chunk_pages(cache.spec))
        if start == end:
            return frames.Wanted()
        part = keys[: end * cache.index.stride]
        res = self._hold(await self._guest.reserve(store.tokens, cache, part, start, spare))
        if res is None:
            return frames.Wanted()
        items = res.items(list(range(res.pages)))
        return frames.Wanted(picks_of((g, res.start + at) for g, at, _ in items))

    def _first_lacking(self, cache: Cache, keys: bytes, spare: dict[int, list[int]]) -> int:
        """The first page, beyond where an engine can resume, that is not here or lacks a spare item that is offered.

        Pages that are here may be of use only with a window or state of a later piece: they are not asked for again.
        """
        first = cache.radix.match(keys, self._parts.now()).pages
        node, end = cache.radix.deepest(keys)
        lacking = [end]
        for group, pages in spare.items():
            held = cache.found(node, group, first, max(0, end - first), LOCAL)
            lacking += [page for page in pages if first <= page < end and held[page - first] == NO_COPY][:1]
        return min(lacking)

    async def _more_keys(self, cache: Cache, route: Route) -> frames.Wanted:
        """Reserve the next keys that are missing here; their positions are those in all that was offered."""
        absent = [at for at, node in enumerate(nodes_of(cache, route.group, route.keys)) if node is None]
        self._positions = absent[: min(max(1, CHUNK_BYTES // cache.item_bytes[route.group]), MAX_KEYS)]
        size = cache.spec.key_bytes
        keys = b"".join(route.keys[at * size : (at + 1) * size] for at in self._positions)
        if not keys:
            return frames.Wanted()
        res = self._hold(await self._guest.reserve_keys(self._home.store.keys, cache, route.group, keys))
        if res is None:
            return frames.Wanted()
        return frames.Wanted(picks_of((g, self._positions[at]) for g, at, _ in res.items(list(range(res.pages)))))

    def _hold(self, granted: Granted) -> Reservation | None:
        """What is taken next; None where it is all here by now. Raises what it was refused for: it is offered again."""
        if granted.refused:
            raise KvtierError(Code(granted.refused), "there is no room for what was offered now")
        self._res = granted.res
        return granted.res

    def _let_go(self) -> None:
        """What was reserved and not sent goes back."""
        if self._res is not None:
            with contextlib.suppress(KvtierError):
                self._guest.commit(self._home.store.commits, self._res, {})
            self._res = None

    # -- what comes ------------------------------------------------------------------------------------------------

    async def take(self, load: frames.Load) -> frames.Stored:
        """Receive what was reserved, check it, serve it."""
        if self._res is None or self._route is None:
            raise EOFError("pages came that nobody asked for")
        return frames.Stored(await self._receive(self._res, self._route, load, all_wanted=True))

    async def ahead(self, load: frames.Load, wanted: frames.Wanted) -> frames.Wanted:
        """Receive what came with an offer, of which `wanted` is reserved; serve that, and say what is wanted then."""
        if self._res is None or self._route is None:
            await self.pass_over(load)
            return wanted
        _bound(load)
        start, offered = self._res.start, len(self._route.keys) // self._res.cache.spec.stride
        served = await self._receive(self._res, self._route, load, all_wanted=False)
        return frames.Wanted((), served) if start + served == offered else replace(await self.more(), stored=served)

    async def pass_over(self, load: frames.Load) -> None:
        """Receive what came with an offer that is refused, or that has nothing new, and keep none of it."""
        _bound(load)
        self._parts.counts["peer_unwanted"] += len(load.sums) // 8
        blank = frames.Load((), sums_of([0]), load.nbytes, b"")
        await self._pipe.fill(self._home.pool, blank, [scrap(0, 0, load.nbytes)], self._pipe.within(load.nbytes))

    async def _receive(self, res: Reservation, route: Route, load: frames.Load, *, all_wanted: bool) -> int:
        """Receive items, check and serve those that are reserved; pages that are served."""
        home, cache = self._home, res.cache
        position = self._positions if cache.spec.keyed else range(res.start, res.start + res.pages)
        slots = {(g, position[at]): (at, handle) for g, at, handle in res.items(list(range(res.pages)))}
        items = items_of(cache.spec, load.picks, len(route.keys) // cache.spec.stride)
        nbytes = nbytes_of(cache.spec, items)
        wrong = (all_wanted and not slots.keys() >= set(items)) or nbytes != load.nbytes
        if wrong or len(load.sums) != 8 * len(items) or load.echo != echo(route.shared.id, route.keys):
            raise EOFError("other pages came than were asked for")
        places = [
            Place(g, page, cache.views(g, slots[g, page][1]))
            if (g, page) in slots
            else scrap(g, page, cache.item_bytes[g])
            for g, page in items
        ]
        got = await self._pipe.fill(home.pool, load, places, self._pipe.within(nbytes))
        good = [(item, value) for item, value in zip(items, got, strict=True) if value is not None and item in slots]
        known = {(item[0], slots[item][0]): value for item, value in good}
        self._parts.counts["peer_checksum"] += got.count(None)
        self._parts.counts["peer_unwanted"] += sum(item not in slots for item in items)
        self._res = None
        served = self._guest.commit(home.store.commits, res, known)
        self._parts.counts["pages_taken_peer"] += served
        self._parts.counts["bytes_peer_to_host"] += nbytes
        return served


def scrap(group: int, page: int, nbytes: int) -> Place:
    """Where an item goes that nobody wants: the same memory, again and again."""
    whole, rest = divmod(nbytes, SCRAP)
    memory = np.empty(min(nbytes, SCRAP), np.uint8)
    return Place(group, page, [memory] * whole + [memory[:rest]] * (rest > 0))


def _bound(load: frames.Load) -> None:
    """Raise EOFError for more than may come with an offer."""
    if load.packed or not 0 <= load.nbytes <= CHUNK_BYTES:
        raise EOFError("more came with an offer than may")
