"""One connection of another daemon: what it looks for and fetches; `taking` is about what it pushes."""

from __future__ import annotations

import asyncio
import hmac
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kvtier.identity import base_id, cache_id
from kvtier.index import Node
from kvtier.peer import frames
from kvtier.peer.base import Pick, Shared
from kvtier.peer.bulk import shut
from kvtier.peer.items import echo, items_of, last_of, nbytes_of, picks_of, ranges, sums_of
from kvtier.peer.members import keys_of
from kvtier.peer.patience import Patience
from kvtier.peer.pipe import Pipe
from kvtier.server.lending import Lent, asked, lent_of
from kvtier.server.taking import Route, Taking
from kvtier.store.cache import Cache
from kvtier.store.keypeers import here, lend_keys, nodes_of
from kvtier.store.routing import load, weigh
from kvtier.types import Code, KvtierError, bad
from kvtier.wire import MAX_ASKED as MOST

if TYPE_CHECKING:
    from kvtier.server.home import Home

MAX_CACHES: Final = 4096
FIRST_BYTES: Final = 64 << 10
KNOCK_S: Final = 2.0
"""A newcomer shows that it has the key within this time."""
IDLE_S: Final = 60.0
TAKE_S: Final = 5.0
"""What is reserved for a peer that does not send it is given back after that time."""


class Visit:
    """One connection."""

    def __init__(self, home: Home, pipe: Pipe) -> None:
        self._home = home
        self._pipe = pipe
        self._parts = home.store.parts
        self._taking: Taking = Taking(home, pipe)
        self._known: dict[bytes, Shared] = {}
        self._names: dict[bytes, tuple[bytes, bytes]] = {}
        """What those caches are called here: without and with an epoch."""
        self._route: Route | None = None
        self._fresh = False
        """Nothing of the path has been fetched: it counts once, in however many pieces it goes."""

    async def run(self) -> None:
        """Serve until the peer goes."""
        home, pipe, clock = self._home, self._pipe, asyncio.get_running_loop().time
        async with asyncio.timeout(KNOCK_S):
            name = await pipe.answer(home.terms, home.incarnation)
            message = await pipe.receive(frames.Message, FIRST_BYTES)
            if not home.admit(self):
                await pipe.send(frames.Refused(Code.BUSY.value, "too many connections"))
                return
        pipe.pace = home.pace(name)
        with Patience(partial(shut, pipe.stream.sock)) as patience:
            while True:
                reply = await self._do(message)
                if reply is not None:
                    patience.until = clock() + home.terms.deadline_s + 1.0
                    await pipe.send(reply)
                patience.until = clock() + (TAKE_S if self._taking.waits else IDLE_S)
                message = await pipe.receive(frames.Message)
                patience.until = math.inf

    async def _do(self, message: frames.Message) -> frames.Message | None:
        """Do what is asked; what is answered, None where pages were."""
        verb = _VERBS.get(type(message))
        if verb is None:
            raise EOFError("not a request")
        try:
            return await verb(self, message)
        except KvtierError as exc:
            return frames.Refused(exc.code.value, exc.message)

    def end(self) -> None:
        """The connection is over and nothing of it moves."""
        self._taking.end()

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
        self._names[shared.id] = base_id(shared.spec, scope), cache_id(shared.spec, scope, 0)
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
        self._taking.turn_to(None)
        self._route = route

    def _cache(self, shared: Shared) -> Cache | None:
        """This host's cache of the same name, if there is one."""
        base, number = self._names[shared.id]
        if self._parts.epoch(base):
            return None
        cache = self._parts.ids.get(number)
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
        if not msg.picks or any(last_of(pick) >= pages for pick in msg.picks):
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
        """A peer has a path: say what of it is wanted here, and take what came with it."""
        self._turn_to(None)
        try:
            route = self._path(msg.cache, msg.keys, msg.spare, msg.group)
            items_of(route.shared.spec, msg.spare, len(msg.keys) // route.shared.spec.stride)
            self._taking.turn_to(route)
            wanted = await self._taking.more()
        except KvtierError:
            if msg.load is not None:
                await self._taking.pass_over(msg.load)
            raise
        return wanted if msg.load is None else await self._taking.ahead(msg.load, wanted)


# Not one for each visit: its own methods in a mapping of its own are a cycle, and the daemon collects none.
_VERBS: Final[Mapping[type[frames.Message], Callable[[Visit, Any], Awaitable[frames.Message | None]]]] = {
    frames.Ping: Visit._ping,  # noqa: SLF001 - its own verbs
    frames.Use: Visit._use,  # noqa: SLF001
    frames.Find: Visit._find,  # noqa: SLF001
    frames.Fetch: Visit._fetch,  # noqa: SLF001
    frames.Offer: Visit._offer,  # noqa: SLF001
    frames.More: lambda visit, message: visit._taking.more(message),  # noqa: SLF001
    frames.Load: lambda visit, message: visit._taking.take(message),  # noqa: SLF001
    frames.Weigh: Visit._weigh,  # noqa: SLF001
    frames.Have: Visit._have,  # noqa: SLF001
}
