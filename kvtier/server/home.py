"""Serves other daemons: what they look for, fetch, and push here because this host is its home.

A connection is a guest like an engine: its reservations end with it, and what it reads is leased while it is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets as random
import socket
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import numpy as np

from kvtier.identity import base_id, cache_id
from kvtier.peer import frames
from kvtier.peer.base import Pick, Place, Shared
from kvtier.peer.direct import MIN_BYTES_S
from kvtier.peer.items import CHUNK_BYTES, chunk_pages, echo, items_of, nbytes_of, pages_of, picks_of
from kvtier.peer.pipe import Pipe
from kvtier.peer.secrets import Secrets
from kvtier.store import Store
from kvtier.store.cache import Cache
from kvtier.store.peers import Guest, lend, path_keys
from kvtier.store.reserve import Reservation
from kvtier.store.routing import load, weigh
from kvtier.types import Code, KvtierError, bad

MAX_CONNECTIONS: Final = 256
MAX_CACHES: Final = 4096
THREADS: Final = 8
FIRST_BYTES: Final = 64 << 10
KNOCK_S: Final = 2.0
"""A newcomer shows that it has the key within this time."""
IDLE_S: Final = 60.0
TAKE_S: Final = 5.0
"""What is reserved for a peer that does not send it is given back after that time."""
FAULTS: Final = (OSError, EOFError, TimeoutError)

_log = logging.getLogger("kvtier.peer")


class Route(NamedTuple):
    """The path that a connection is about."""

    shared: Shared
    keys: bytes
    spare: tuple[Pick, ...] = ()


class Home:
    """Listens for peers. Owned by the loop thread."""

    def __init__(self, store: Store, secrets: Secrets, address: tuple[str, int], deadline_s: float) -> None:
        """Raises OSError where the address cannot be had."""
        self.store = store
        self.secrets = secrets
        self.deadline_s = deadline_s
        self.incarnation = random.token_bytes(8)
        self.pool = ThreadPoolExecutor(THREADS, "kvtier-home")
        family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        self._socket = socket.create_server(address, family=family, backlog=MAX_CONNECTIONS)
        self._socket.setblocking(False)
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._socket.getsockname()[1])

    def start(self) -> None:
        """Serve from now on."""
        self._accepting = asyncio.get_running_loop().create_task(self._accept())

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self._socket)
            except OSError as exc:
                _log.warning("a peer could not be accepted: %s", exc)
                await asyncio.sleep(0.2)
                continue
            if len(self._tasks) >= MAX_CONNECTIONS:
                sock.close()
                continue
            task = loop.create_task(self._serve(sock))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, sock: socket.socket) -> None:
        try:
            visit = Visit(self, Pipe(sock))
            try:
                await visit.run()
            finally:
                visit.end()
        except (*FAULTS, KvtierError) as exc:
            _log.debug("a peer's connection ended: %r", exc)
        except Exception:  # noqa: BLE001 - one peer's connection, not the others'
            _log.exception("a peer's connection failed")
        finally:
            sock.close()

    async def close(self) -> None:
        """Serve nobody any more."""
        self._socket.close()
        tasks = [*self._tasks, *([self._accepting] if self._accepting else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.pool.shutdown(wait=True)

    def within(self, nbytes: int) -> float:
        """Seconds that a transfer may take."""
        return self.deadline_s + nbytes / MIN_BYTES_S


class Visit:
    """One connection."""

    def __init__(self, home: Home, pipe: Pipe) -> None:
        self._home = home
        self._pipe = pipe
        self._parts = home.store.parts
        self._guest = Guest(self._parts, "home", home.store.cap_bytes)
        self._known: dict[bytes, Shared] = {}
        self._route: Route | None = None
        self._taking: Reservation | None = None
        self._verbs: Mapping[type[frames.Message], Callable[[Any], Awaitable[frames.Message | None]]] = {
            frames.Ping: self._ping,
            frames.Use: self._use,
            frames.Find: self._find,
            frames.Fetch: self._fetch,
            frames.Offer: self._offer,
            frames.More: self._more,
            frames.Load: self._take,
            frames.Weigh: self._weigh,
        }

    async def run(self) -> None:
        """Serve until the peer goes."""
        home, pipe = self._home, self._pipe
        async with asyncio.timeout(KNOCK_S):
            await pipe.answer(home.secrets, home.incarnation)
            message = await pipe.receive(frames.Message, FIRST_BYTES)
        while True:
            try:
                verb = self._verbs.get(type(message))
                if verb is None:
                    raise EOFError("not a request")
                reply = await verb(message)
            except KvtierError as exc:
                reply = frames.Refused(exc.code.value, exc.message)
            if reply is not None:
                async with asyncio.timeout(home.deadline_s + 1.0):
                    await pipe.send(reply)
            async with asyncio.timeout(IDLE_S if self._taking is None else TAKE_S):
                message = await pipe.receive(frames.Message)

    def end(self) -> None:
        """The connection is over and nothing of it moves."""
        self._guest.end(self._home.store.commits)

    # -- who may what ----------------------------------------------------------------------------------------------

    async def _ping(self, _: frames.Ping) -> frames.Message:
        return frames.Done()

    async def _use(self, msg: frames.Use) -> frames.Message:
        """Let the connection name a cache whose secret the peer has shown that it holds."""
        msg.spec.check()
        secrets, session = self._home.secrets, self._pipe.session
        scope = secrets.scope_of(msg.key_id)
        assert session is not None
        if scope is None:
            raise KvtierError(Code.FORBIDDEN, "this host does not share caches of that secret")
        shared = secrets.shared(msg.spec, scope, 0)
        if shared is None or shared.id != msg.cache or msg.spec.keyed:
            raise KvtierError(Code.FORBIDDEN, "that is not the cache's name")
        if not hmac.compare_digest(secrets.proof(scope, session.id, shared.id), msg.proof):
            raise KvtierError(Code.FORBIDDEN, "the peer has not shown that it holds the cache's secret")
        if len(self._known) >= MAX_CACHES:
            raise KvtierError(Code.OVER_CAP, f"{MAX_CACHES} caches a connection")
        self._known[shared.id] = shared
        return frames.Done()

    def _path(self, cache: bytes, keys: bytes, spare: tuple[Pick, ...] = ()) -> Route:
        """The path that a request names; raises forbidden, bad_request."""
        shared = self._known.get(cache)
        if shared is None:
            raise KvtierError(Code.FORBIDDEN, "the peer has not shown the secret of that cache here")
        if not keys or len(keys) % shared.spec.stride:
            raise bad("keys", f"whole page keys of {shared.spec.stride} bytes", len(keys))
        return Route(shared, keys, spare)

    def _cache(self, shared: Shared) -> Cache | None:
        """This host's cache of the same name, if there is one."""
        if self._parts.epoch(base_id(shared.spec, shared.scope)):
            return None
        cache = self._parts.ids.get(cache_id(shared.spec, shared.scope, 0))
        return None if cache is None or cache.retired else cache

    # -- reading ---------------------------------------------------------------------------------------------------

    async def _find(self, msg: frames.Find) -> frames.Message:
        """How much of a path is here; remembers it."""
        self._route = None
        route = self._path(msg.cache, msg.keys)
        cache = self._cache(route.shared)
        pages = 0 if cache is None else cache.radix.match(msg.keys, self._parts.now()).pages
        if pages:
            self._route = route._replace(keys=msg.keys[: pages * route.shared.spec.stride])
        return frames.Found(pages)

    async def _weigh(self, msg: frames.Weigh) -> frames.Message:
        """What a path would cost here."""
        route = self._path(msg.cache, msg.keys)
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
        pages = len(route.keys) // cache.index.stride
        items = items_of(cache.spec, msg.picks, pages)
        nbytes = nbytes_of(cache.spec, items)
        if not items or (nbytes > CHUNK_BYTES and len({page for _, page in items}) > 1 and len(items) > 64):
            raise bad("picks", f"items of about {CHUNK_BYTES} bytes", nbytes)
        index = cache.radix
        found = index.match(route.keys, self._parts.now())
        if found.pages != pages:
            raise KvtierError(Code.UNKNOWN, "it is here no more")
        node = index.ending_at(found.node, pages)
        index.use(node, self._parts.now())
        index.lease(node)
        try:
            await self._send(cache, node, items, nbytes)
        finally:
            self._parts.unlease(cache, node)
        return None

    async def _send(self, cache: Cache, node: Any, items: list[tuple[int, int]], nbytes: int) -> None:
        """Bring a leased path's items to host and send them."""
        home, route = self._home, self._route
        assert route is not None
        within = home.within(nbytes)
        missing = self._parts.loads.missing(cache, node, _ranges(items))
        if missing:
            await self._parts.loads.bring(cache, missing, asyncio.get_running_loop().time() + within)
        places, sums = ([], []) if node.dead else lend(cache, node, items)
        if not places:
            raise KvtierError(Code.UNKNOWN, "some of it could not be brought to host")
        keys = path_keys(cache, node)
        load = frames.Load(picks_of(items), np.array(sums, "<u8").tobytes(), nbytes, echo(route.shared.id, keys))

        await self._pipe.threaded(home.pool, lambda line: line.pour(load, places), within)
        self._parts.counts["pages_served_peer"] += len({page for _, page in items})
        self._parts.counts["bytes_host_to_peer"] += nbytes

    # -- writing ---------------------------------------------------------------------------------------------------

    async def _offer(self, msg: frames.Offer) -> frames.Message:
        """A peer has a path: say what of it is wanted here, which is reserved."""
        self._route = self._path(msg.cache, msg.keys, msg.spare)
        spec = self._route.shared.spec
        items_of(spec, msg.spare, len(msg.keys) // spec.stride)
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
        start = cache.radix.match(keys, self._parts.now()).pages
        end = min(len(keys) // cache.index.stride, start + chunk_pages(cache.spec))
        if start == end:
            return frames.Wanted()
        spare = {pick.group: pages_of(pick) for pick in route.spare}
        res = await self._guest.reserve(store.tokens, cache, keys[: end * cache.index.stride], start, spare)
        if res is None:
            return frames.Wanted()
        self._taking = res
        items = res.items(list(range(res.pages)))
        return frames.Wanted(picks_of((g, res.start + at) for g, at, _ in items))

    async def _take(self, msg: frames.Load) -> frames.Message:
        """Receive what was reserved, check it, serve it."""
        res, route, home = self._taking, self._route, self._home
        if res is None or route is None:
            raise EOFError("pages came that nobody asked for")
        cache = res.cache
        handles = {(g, res.start + at): handle for g, at, handle in res.items(list(range(res.pages)))}
        items = items_of(cache.spec, msg.picks, len(route.keys) // cache.index.stride)
        nbytes = nbytes_of(cache.spec, items)
        wrong = not handles.keys() >= set(items) or nbytes != msg.nbytes or len(msg.sums) != 8 * len(items)
        if wrong or msg.echo != echo(route.shared.id, route.keys):
            raise EOFError("other pages came than were asked for")
        places = [Place(g, page, cache.views(g, handles[g, page])) for g, page in items]
        sums = np.frombuffer(msg.sums, "<u8").tolist()
        got = await self._pipe.threaded(home.pool, lambda line: line.fill(places, sums), home.within(nbytes))
        known = {(g, page - res.start): value for (g, page), value in zip(items, got, strict=True) if value is not None}
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


def _ranges(items: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """(group, first, count) that cover the items."""
    out: dict[int, tuple[int, int]] = {}
    for group, page in items:
        lo, hi = out.get(group, (page, page))
        out[group] = (min(lo, page), max(hi, page))
    return [(group, lo, hi - lo + 1) for group, (lo, hi) in out.items()]
