"""One connection of another daemon: what it looks for, fetches and pushes. It is a guest like an engine."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from kvtier.identity import base_id, cache_id
from kvtier.index import Node
from kvtier.peer import frames
from kvtier.peer.base import Pick, Place, Shared
from kvtier.peer.items import CHUNK_BYTES, chunk_pages, echo, items_of, nbytes_of, pages_of, picks_of, ranges, sums_of
from kvtier.peer.members import keys_of
from kvtier.peer.pipe import Pipe
from kvtier.server.lending import Lent, asked, lent_of
from kvtier.store.cache import Cache
from kvtier.store.keypeers import here, lend_keys, nodes_of
from kvtier.store.peers import Granted, Guest
from kvtier.store.reserve import Reservation
from kvtier.store.routing import load, weigh
from kvtier.types import Code, KvtierError, bad
from kvtier.wire import MAX_ASKED as MOST
from kvtier.wire import MAX_KEYS

if TYPE_CHECKING:
    from kvtier.server.home import Home

MAX_CACHES: Final = 4096
FIRST_BYTES: Final = 64 << 10
KNOCK_S: Final = 2.0
"""A newcomer shows that it has the key within this time."""
IDLE_S: Final = 60.0
TAKE_S: Final = 5.0
"""What is reserved for a peer that does not send it is given back after that time."""


class Route(NamedTuple):
    """The path that a connection is about."""

    shared: Shared
    keys: bytes
    spare: tuple[Pick, ...] = ()
    group: int = 0


class Visit:
    """One connection."""

    def __init__(self, home: Home, pipe: Pipe) -> None:
        self._home = home
        self._pipe = pipe
        self._parts = home.store.parts
        self._guest = Guest(self._parts, "home", home.store.cap_bytes)
        self._known: dict[bytes, Shared] = {}
        self._route: Route | None = None
        self._fresh = False
        """Nothing of the path has been fetched: it counts once, in however many pieces it goes."""
        self._taking: Reservation | None = None
        self._positions: list[int] = []
        """Keyed caches: of what is being taken, the positions in what was offered."""
        self._verbs: Mapping[type[frames.Message], Callable[[Any], Awaitable[frames.Message | None]]] = {
            frames.Ping: self._ping,
            frames.Use: self._use,
            frames.Find: self._find,
            frames.Fetch: self._fetch,
            frames.Offer: self._offer,
            frames.More: self._more,
            frames.Load: self._take,
            frames.Weigh: self._weigh,
            frames.Have: self._have,
        }

    async def run(self) -> None:
        """Serve until the peer goes."""
        home, pipe, clock = self._home, self._pipe, asyncio.get_running_loop().time
        async with asyncio.timeout(KNOCK_S) as patience:
            name = await pipe.answer(home.terms, home.incarnation)
            message = await pipe.receive(frames.Message, FIRST_BYTES)
            if not home.admit(self):
                await pipe.send(frames.Refused(Code.BUSY.value, "too many connections"))
                return
            pipe.pace = home.pace(name)
            while True:
                patience.reschedule(None)
                reply = await self._do(message)
                if reply is not None:
                    patience.reschedule(clock() + home.terms.deadline_s + 1.0)
                    await pipe.send(reply)
                patience.reschedule(clock() + (IDLE_S if self._taking is None else TAKE_S))
                message = await pipe.receive(frames.Message)

    async def _do(self, message: frames.Message) -> frames.Message | None:
        """Do what is asked; what is answered, None where pages were."""
        verb = self._verbs.get(type(message))
        if verb is None:
            raise EOFError("not a request")
        try:
            return await verb(message)
        except KvtierError as exc:
            return frames.Refused(exc.code.value, exc.message)

    def end(self) -> None:
        """The connection is over and nothing of it moves."""
        self._guest.end(self._home.store.commits)

    # -- who may what ----------------------------------------------------------------------------------------------

    async def _ping(self, _: frames.Ping) -> frames.Message:
        return frames.Done()

    async def _use(self, msg: frames.Use) -> frames.Message:
        """Let the connection name a cache whose secret the peer has shown that it holds."""
        msg.spec.check()
        secrets, session = self._home.terms.secrets, self._pipe.session
        scope = secrets.scope_of(msg.key_id)
        assert session is not None
        if scope is None:
            raise KvtierError(Code.FORBIDDEN, "this host does not share caches of that secret")
        shared = secrets.shared(msg.spec, scope, 0)
        if shared is None or shared.id != msg.cache:
            raise KvtierError(Code.FORBIDDEN, "that is not the cache's name")
        if not hmac.compare_digest(secrets.proof(scope, session.id, shared.id), msg.proof):
            raise KvtierError(Code.FORBIDDEN, "the peer has not shown that it holds the cache's secret")
        if len(self._known) >= MAX_CACHES:
            raise KvtierError(Code.OVER_CAP, f"{MAX_CACHES} caches a connection")
        self._known[shared.id] = shared
        return frames.Done()

    def _path(self, cache: bytes, keys: bytes, spare: tuple[Pick, ...] = (), group: int = -1) -> Route:
        """The path (of a keyed cache, the keys of a group) that a request names; raises forbidden, bad_request."""
        shared = self._known.get(cache)
        if shared is None:
            raise KvtierError(Code.FORBIDDEN, "the peer has not shown the secret of that cache here")
        if not keys or len(keys) % shared.spec.stride:
            raise bad("keys", f"whole page keys of {shared.spec.stride} bytes", len(keys))
        if shared.spec.keyed and not (0 <= group < len(shared.spec.groups) and len(keys) <= MOST * shared.spec.stride):
            raise bad("keys", f"at most {MOST} keys of groups 0..{len(shared.spec.groups) - 1}", group)
        return Route(shared, keys, spare, max(group, 0))

    def _tokens(self, cache: bytes, keys: bytes) -> Route:
        """The same of a token cache only."""
        route = self._path(cache, keys, group=0)
        if route.shared.spec.keyed:
            raise bad("cache", "a token cache")
        return route

    def _turn_to(self, route: Route | None) -> None:
        """Be about another path: what was to come of the one before must not be taken for it."""
        self._let_go()
        self._route = route

    def _cache(self, shared: Shared) -> Cache | None:
        """This host's cache of the same name, if there is one."""
        if self._parts.epoch(base_id(shared.spec, shared.scope)):
            return None
        cache = self._parts.ids.get(cache_id(shared.spec, shared.scope, 0))
        return None if cache is None or cache.retired else cache

    # -- reading ---------------------------------------------------------------------------------------------------

    async def _find(self, msg: frames.Find) -> frames.Message | None:
        """How much of a path is here; remembers it, and sends what is fetched with it if that is in host."""
        self._turn_to(None)
        route = self._tokens(msg.cache, msg.keys)
        cache = self._cache(route.shared)
        if cache is None or not (match := cache.radix.match(msg.keys, self._parts.now())).pages:
            return frames.Found(0)
        pages = match.pages
        self._route = route = route._replace(keys=msg.keys[: pages * cache.spec.stride])
        self._fresh = True
        found = frames.Found(pages, self._home.fame.level(keys_of(route.shared, route.keys)[0], time.monotonic()))
        if not msg.picks or any(page >= pages for pick in msg.picks for page in pages_of(pick)[-1:]):
            return found
        items, nbytes = asked(cache, msg.picks, pages)
        node = cache.radix.ending_at(match.node, pages)
        with self._parts.leased(cache, node):
            lent = lent_of(cache, node, route.shared, items, nbytes)
            if lent is None:
                return found
            try:
                await self._pour(lent, msg.picks, packed=msg.packed, found=found)
            except frames.Refusal:  # no thread is free: it may be asked for again
                return msgspec.structs.replace(found, load=None)
            self._used(cache, node, route)
        return None

    async def _have(self, msg: frames.Have) -> frames.Message:
        """Which keys are here; remembers them."""
        self._turn_to(None)
        route = self._path(msg.cache, msg.keys, group=msg.group)
        if not route.shared.spec.keyed:
            raise bad("cache", "a keyed cache")
        cache = self._cache(route.shared)
        self._route = route
        if cache is None:
            return frames.Has(bytes(len(msg.keys) // route.shared.spec.stride))
        return frames.Has(bytes(here(cache, node, msg.group) for node in nodes_of(cache, route.group, route.keys)))

    async def _fetch_keys(self, cache: Cache, route: Route, items: list[tuple[int, int]], *, packed: bool) -> None:
        """Send keys that are here, by their positions."""
        found = nodes_of(cache, route.group, route.keys)
        wanted = [(at, node) for group, at in items if (node := found[at]) is not None and here(cache, node, group)]
        if len(wanted) < len(items) or any(group != route.group for group, _ in items):
            raise KvtierError(Code.UNKNOWN, "some of them are here no more")
        for _, node in wanted:
            cache.index.use(node, self._parts.now())
        with self._parts.leased(cache, *(node for _, node in wanted)):
            nbytes = nbytes_of(cache.spec, items)
            missing = [m for _, node in wanted for m in self._parts.loads.missing(cache, node, [(route.group, 0, 1)])]
            if missing:
                until = asyncio.get_running_loop().time() + self._pipe.patience(nbytes)
                await self._parts.loads.bring(cache, missing, until)
            places, sums = lend_keys(cache, route.group, wanted)
            if not places:
                raise KvtierError(Code.UNKNOWN, "some of it could not be brought to host")
            picks = picks_of((place.group, place.page) for place in places)
            name = echo(route.shared.id, route.keys)
            await self._pour(Lent(places, sums, name, nbytes), picks, packed=packed)

    async def _weigh(self, msg: frames.Weigh) -> frames.Message:
        """What a path would cost here."""
        route = self._tokens(msg.cache, msg.keys)
        cache = self._cache(route.shared)
        if cache is None:
            backlog, decode, requests = load(self._parts)
            return frames.Weighed(0, 0, 0, backlog, decode, requests)
        return frames.Weighed(*weigh(self._parts, cache, msg.keys, "")[1:])

    async def _fetch(self, msg: frames.Fetch) -> frames.Message | None:
        """Send items of the path that was found."""
        route = self._route
        cache = None if route is None else self._cache(route.shared)
        if route is None or cache is None:
            raise KvtierError(Code.UNKNOWN, "nothing was found before")
        pages = len(route.keys) // cache.spec.stride
        items, nbytes = asked(cache, msg.picks, pages)
        if cache.spec.keyed:
            await self._fetch_keys(cache, route, items, packed=msg.packed)
            return None
        index = cache.radix
        found = index.match(route.keys, self._parts.now())
        if found.pages != pages:
            raise KvtierError(Code.UNKNOWN, "it is here no more")
        node = index.ending_at(found.node, pages)
        with self._parts.leased(cache, node):
            await self._send(cache, node, msg, items, nbytes)
            self._used(cache, node, route)
        return None

    def _used(self, cache: Cache, node: Node, route: Route) -> None:
        """Note that a path was fetched, after its bytes are on their way: the peer waits for those."""
        if node.dead:
            return
        cache.radix.use(node, self._parts.now())
        fresh, self._fresh = self._fresh, False
        hot = fresh and self._home.fame.note(keys_of(route.shared, route.keys)[0], time.monotonic())
        if hot and self._parts.peers:
            self._parts.peers.pushes.offer(cache, node, len(route.keys) // cache.index.stride)

    async def _send(
        self, cache: Cache, node: Node, msg: frames.Fetch, items: list[tuple[int, int]], nbytes: int
    ) -> None:
        """Bring a leased path's items to host and send them."""
        route = self._route
        assert route is not None
        missing = self._parts.loads.missing(cache, node, ranges(items))
        if missing:
            until = asyncio.get_running_loop().time() + self._pipe.patience(nbytes)
            await self._parts.loads.bring(cache, missing, until)
        lent = None if node.dead else lent_of(cache, node, route.shared, items, nbytes)
        if lent is None:
            raise KvtierError(Code.UNKNOWN, "some of it could not be brought to host")
        await self._pour(lent, msg.picks, packed=msg.packed)

    async def _pour(
        self, lent: Lent, picks: tuple[Pick, ...], *, packed: bool, found: frames.Found | None = None
    ) -> None:
        """Send items that are leased; with the answer to what was asked with them."""
        load = frames.Load(picks, sums_of(lent.sums), lent.nbytes, lent.name, packed)
        if found is not None:
            found.load = load
        await self._pipe.pour(self._home.pool, load, lent.places, self._pipe.within(lent.nbytes), found)
        self._parts.counts["pages_served_peer"] += len({place.page for place in lent.places})
        self._parts.counts["bytes_host_to_peer"] += self._pipe.wire
        self._parts.counts["peer_packed"] += packed

    # -- writing ---------------------------------------------------------------------------------------------------

    async def _offer(self, msg: frames.Offer) -> frames.Message:
        """A peer has a path: say what of it is wanted here, which is reserved."""
        route = self._path(msg.cache, msg.keys, msg.spare, msg.group)
        items_of(route.shared.spec, msg.spare, len(msg.keys) // route.shared.spec.stride)
        self._turn_to(route)
        return await self._more(frames.More())

    async def _more(self, _: frames.More) -> frames.Message:
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
            return await self._want_keys(cache, route)
        start = cache.radix.match(keys, self._parts.now()).pages
        end = min(len(keys) // cache.index.stride, start + chunk_pages(cache.spec))
        if start == end:
            return frames.Wanted()
        spare = {pick.group: pages_of(pick) for pick in route.spare}
        part = keys[: end * cache.index.stride]
        res = self._hold(await self._guest.reserve(store.tokens, cache, part, start, spare))
        if res is None:
            return frames.Wanted()
        items = res.items(list(range(res.pages)))
        return frames.Wanted(picks_of((g, res.start + at) for g, at, _ in items))

    async def _want_keys(self, cache: Cache, route: Route) -> frames.Message:
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
        self._taking = granted.res
        return granted.res

    async def _take(self, msg: frames.Load) -> frames.Message:
        """Receive what was reserved, check it, serve it."""
        res, route, home = self._taking, self._route, self._home
        if res is None or route is None:
            raise EOFError("pages came that nobody asked for")
        cache = res.cache
        position = self._positions if cache.spec.keyed else range(res.start, res.start + res.pages)
        slots = {(g, position[at]): (at, handle) for g, at, handle in res.items(list(range(res.pages)))}
        items = items_of(cache.spec, msg.picks, len(route.keys) // cache.spec.stride)
        nbytes = nbytes_of(cache.spec, items)
        wrong = not slots.keys() >= set(items) or nbytes != msg.nbytes or len(msg.sums) != 8 * len(items)
        if wrong or msg.echo != echo(route.shared.id, route.keys):
            raise EOFError("other pages came than were asked for")
        places = [Place(g, page, cache.views(g, slots[g, page][1])) for g, page in items]
        got = await self._pipe.fill(home.pool, msg, places, self._pipe.within(nbytes))
        known = {(i[0], slots[i][0]): value for i, value in zip(items, got, strict=True) if value is not None}
        if len(known) < len(items):
            self._parts.counts["peer_checksum"] += len(items) - len(known)
        self._taking = None
        served = self._guest.commit(home.store.commits, res, known)
        self._parts.counts["pages_taken_peer"] += served
        self._parts.counts["bytes_peer_to_host"] += nbytes
        return frames.Stored(served)

    def _let_go(self) -> None:
        """What was reserved and not sent goes back."""
        if self._taking is not None:
            with contextlib.suppress(KvtierError):
                self._guest.commit(self._home.store.commits, self._taking, {})
            self._taking = None
