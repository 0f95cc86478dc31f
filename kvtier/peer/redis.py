"""A shelf on Redis or Valkey: one server, or a Cluster, whose slots say which server has a name.

Each server has its own connections, bound and breaker: a lost one costs its share of the names. One that did not
answer once is asked nothing until it answers a ping, once a second.
"""

from __future__ import annotations

import asyncio
import binascii
import contextlib
import logging
import ssl
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple, TypeVar

from kvtier.peer.names import Found, Resolver
from kvtier.peer.resp import Line, ReplyError, command
from kvtier.peer.shelf import Want
from kvtier.waits import drained

T = TypeVar("T")
MAX_OPS: Final = 8
"""Requests under way to one server; its threads are its own, so that one that stalls holds up no other."""
PING_S: Final = 1.0
SLOTS: Final = 16384
UNASKED: Final = "not asked yet"
MOVING: Final = ("MOVED", "ASK", "CLUSTERDOWN")
"""What a server of a Cluster says of names that it does not have."""
FAULTS: Final = (OSError, EOFError, TimeoutError, ReplyError, ValueError)
"""ValueError: what came is no reply."""

_log = logging.getLogger("kvtier.peer")


class Login(NamedTuple):
    """How to be let in."""

    user: bytes = b""
    password: bytes = b""
    tls: ssl.SSLContext | None = None

    def __repr__(self) -> str:
        return "Login(...)"


class Server:
    """One server. Owned by the loop thread."""

    def __init__(self, address: tuple[str, int], login: Login, deadline_s: float, counts: Counter[str]) -> None:
        self.address = address
        self.up = False
        self.why = UNASKED
        self.life = 0
        self._refusal = self._told = ""
        """What it refused the last write with, and what of that was logged."""
        self._login = login
        self._pool = ThreadPoolExecutor(MAX_OPS + 1, "kvtier-redis")
        self._deadline_s = deadline_s
        self._counts = counts
        self._resolver = Resolver(address)
        self._where: Found | None = None
        self._idle: list[Line] = []
        self._room = asyncio.Semaphore(MAX_OPS)

    async def use(self, work: Callable[[Line], T], until: float) -> T | None:
        """Let a worker thread use a connection; None where the server failed, which it is then blamed for."""
        try:
            async with asyncio.timeout(max(0.0, until - time.monotonic())):
                await self._room.acquire()
        except TimeoutError:
            self._counts["peer_busy"] += 1
            return None
        try:
            return await self._threaded(work, until) if self.up else None  # it may have failed while this one waited
        except FAULTS as exc:
            self._counts["peer_failures"] += 1
            self.failed(exc)
            return None
        finally:
            self._room.release()

    async def _threaded(self, work: Callable[[Line], T], until: float) -> T:
        """The same in a thread, raising what went wrong. A cancelled caller cuts the connection and waits for it."""
        line: list[Line] = []
        future = asyncio.get_running_loop().run_in_executor(self._pool, self._work, work, until, line)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            for one in line:
                one.shut()  # so that the thread ends
            await drained(future)
            if not future.cancelled():
                future.exception()  # nobody waits for it, and asyncio would complain
            raise
        finally:
            del future  # an exception has this frame, which must not have it: nobody collects cycles

    def _work(self, work: Callable[[Line], T], until: float, line: list[Line]) -> T:
        """In a worker thread: on an idle connection or a new one, which is kept where nothing went wrong."""
        one = self._line(until)
        line.append(one)
        try:
            result = work(one)
        except BaseException:
            one.close()
            raise
        if one.refusal is not None:
            self._refusal, one.refusal = one.refusal, None
        line.clear()  # from here on it is nobody's to cut
        self._idle.append(one)
        return result

    def _line(self, until: float) -> Line:
        """In a worker thread: a connection that has been let in."""
        with contextlib.suppress(IndexError):
            while True:
                one = self._idle.pop()
                one.until = until
                if one.quiet():
                    return one
                self.life += 1  # it hung up: perhaps it was started again
                one.close()
        if self._where is None:
            raise OSError(f"{self.address[0]} is not known yet")
        one = Line(self.address[0], self._where, until, self._login.tls)
        try:
            if self._login.password:
                self._enter(one)
        except BaseException:
            one.close()
            raise
        return one

    def _enter(self, one: Line) -> None:
        """Show the password. What a server says to that is not passed on: some repeat what they do not understand."""
        user = [self._login.user] if self._login.user else []
        try:
            one.call(b"AUTH", *user, self._login.password)
        except ReplyError as exc:
            why = next((code for code in ("WRONGPASS", "NOPERM") if str(exc).startswith(code)), "ERR")
            raise ReplyError(f"AUTH was refused ({why})") from None

    async def ping(self) -> None:
        """Ask whether it answers, which also is how it gets another chance."""
        try:
            async with asyncio.timeout(self._deadline_s):  # here, because a look-up in a thread knows no deadline
                self._where = (await self._resolver.find())[0]
            await self._threaded(lambda line: line.call(b"PING"), time.monotonic() + self._deadline_s)
        except FAULTS as exc:
            if self._where is not None:
                self._resolver.failed(self._where)
            self.failed(exc)
            return
        if not self.up:
            _log.info("the shared store at %s:%d answers", *self.address)
        self.up, self.why = True, ""
        if self._refusal not in {"", self._told, *MOVING}:
            _log.warning("the shared store at %s:%d refuses what it is given: %s", *self.address, self._refusal)
        self._told = self._refusal

    def failed(self, exc: BaseException) -> None:
        """It did not do what was asked: ask nothing more until it answers a ping."""
        if self.up or self.why == UNASKED:
            _log.warning("the shared store at %s:%d is asked nothing until it answers: %r", *self.address, exc)
        if self.up:
            self._counts["peer_down"] += 1
            self.life += 1
        self.up, self.why = False, f"{type(exc).__name__}: {exc}"
        self.hang_up()

    def hang_up(self) -> None:
        """Drop idle connections."""
        while self._idle:
            self._idle.pop().close()

    def end(self, *, wait: bool) -> None:
        """Ask it nothing any more."""
        self.up = False
        self._pool.shutdown(wait=wait)
        self.hang_up()

    def status(self) -> dict[str, Any]:
        """For people."""
        where = "{}:{}".format(*self.address)
        why = self.why or (f"refuses what it is given: {self._refusal}" if self._refusal not in {"", *MOVING} else "")
        return {"name": f"redis {where}", "address": where, "up": self.up, "why": why, "idle": len(self._idle)}


class RedisShelf:
    """See Shelf."""

    name = "redis"
    peeks = True

    def __init__(
        self,
        servers: Sequence[tuple[str, int]],
        login: Login | None = None,
        *,
        ttl_s: int = 0,
        deadline_s: float = 0.2,
        counts: Counter[str] | None = None,
    ) -> None:
        """`servers`: one, or some of a Cluster. `ttl_s`: values are forgotten after that time; 0: when they must."""
        self.counts = Counter() if counts is None else counts
        self._login = login or Login()
        self._deadline_s = deadline_s
        self._expire = (b"EX", b"%d" % ttl_s) if ttl_s else ()
        self._seeds = list(servers)
        self._servers = {address: self._server(address) for address in servers}
        self._slots: list[Server | None] = []
        """Of a Cluster, who has each slot."""
        self._moved = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None

    def _server(self, address: tuple[str, int]) -> Server:
        return Server(address, self._login, self._deadline_s, self.counts)

    @property
    def up(self) -> bool:
        """See Shelf."""
        return any(server.up for server in self._servers.values())

    @property
    def life(self) -> int:
        """See Shelf."""
        return sum(server.life for server in self._servers.values())

    # -- who answers, and who has what ---------------------------------------------------------------------------------

    def start(self) -> None:
        """See Shelf."""
        if self._watch is None:
            self._watch = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while True:
            try:
                await asyncio.gather(*(server.ping() for server in self._servers.values()))
                await self._survey()
            except Exception:  # noqa: BLE001 - the watch must not end
                _log.exception("a look at the shared store ended; the next follows")
            self._moved.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PING_S):
                    await self._moved.wait()

    async def _survey(self) -> None:
        """Ask a server that answers which servers there are and which slots each has."""
        for server in [one for one in self._servers.values() if one.up]:
            found = await server.use(_slots, time.monotonic() + self._deadline_s)
            if found is None:
                continue
            if not found and len(self._seeds) > 1:
                server.failed(ValueError("it is no Cluster: then there can be one server only"))
                continue
            self._map(found)
            return

    def _map(self, found: list[tuple[int, int, tuple[str, int]]]) -> None:
        """Take over what a Cluster says of itself; seeds are kept, so that it can be found again."""
        for address in {address for *_, address in found} - self._servers.keys():
            self._servers[address] = self._server(address)
        for gone in self._servers.keys() - {address for *_, address in found} - set(self._seeds):
            self._servers.pop(gone).end(wait=False)
        self._slots = [None] * SLOTS if found else []
        for first, last, address in found:
            self._slots[first : last + 1] = [self._servers[address]] * (last + 1 - first)

    def _of(self, name: str) -> Server | None:
        """The server that has a name; None where nobody has it now."""
        server: Server | None = self._servers[self._seeds[0]]
        if self._slots:
            tag = name[name.index("{") + 1 : name.index("}")]
            server = self._slots[binascii.crc_hqx(tag.encode(), 0) % SLOTS]
        return server if server is not None and server.up else None

    async def _spread(
        self, names: Sequence[str], work: Callable[[Line, list[int]], list[T]], until: float, silence: T
    ) -> list[T]:
        """Let each server do what concerns it, side by side; `silence` for what one did not say."""
        out = [silence] * len(names)
        shares: dict[Server, list[int]] = {}
        for at, name in enumerate(names):
            if (server := self._of(name)) is not None:
                shares.setdefault(server, []).append(at)

        async def share(server: Server, mine: list[int]) -> None:
            for at, value in zip(mine, await server.use(lambda line: work(line, mine), until) or [], strict=False):
                out[at] = value

        tasks = [asyncio.ensure_future(share(server, mine)) for server, mine in shares.items()]
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        return out

    def _told(self, reply: Any) -> Any:
        """A reply, or None for a refusal: of one that has moved, the map is asked for anew."""
        if not isinstance(reply, ReplyError):
            return reply
        self.counts["peer_refused"] += 1
        if str(reply).startswith(MOVING):
            self._moved.set()
        return None

    # -- values ------------------------------------------------------------------------------------------------------

    async def has(self, names: Sequence[str], until: float) -> list[bool | None]:
        """See Shelf."""
        found = await self._ask([(b"EXISTS", name.encode()) for name in names], names, until)
        return [None if isinstance(one, ReplyError) or one is None else one == 1 for one in found]

    async def peek(self, names: Sequence[str], most: int, until: float) -> list[bytes | None]:
        """See Shelf."""
        found = await self._ask([(b"GETRANGE", name.encode(), b"0", b"%d" % most) for name in names], names, until)
        return [None if not isinstance(one, bytes) else one if len(one) <= most else b"" for one in found]

    async def _ask(self, commands: Sequence[tuple[bytes, ...]], names: Sequence[str], until: float) -> list[Any]:
        """Small commands about names; None where there is no answer."""

        def work(line: Line, mine: list[int]) -> list[Any]:
            return list(line.many([command(*commands[at]) for at in mine]))

        return [self._told(reply) for reply in await self._spread(names, work, until, None)]

    async def read(self, wants: Sequence[Want], until: float) -> list[bool | None]:
        """See Shelf."""

        def work(line: Line, mine: list[int]) -> list[bool | None]:
            return line.read([wants[at] for at in mine])

        return await self._spread([want.name for want in wants], work, until, None)

    async def write(self, wants: Sequence[Want], until: float) -> list[bool]:
        """See Shelf."""

        def work(line: Line, mine: list[int]) -> list[bool]:
            return line.write([wants[at] for at in mine], self._expire)

        done = await self._spread([want.name for want in wants], work, until, silence=False)
        self.counts["peer_refused"] += done.count(False)
        return done

    async def claim(self, names: Sequence[str], value: bytes, until: float) -> None:
        """See Shelf."""
        await self._ask([(b"SET", name.encode(), value, b"NX") for name in names], names, until)

    async def replace(self, names: Sequence[str], value: bytes, until: float) -> list[bool]:
        """See Shelf."""
        return [one == b"OK" for one in await self._ask([(b"SET", n.encode(), value) for n in names], names, until)]

    async def drop(self, names: Sequence[str], until: float) -> bool:
        """See Shelf."""
        found = await self._ask([(b"UNLINK", name.encode()) for name in names], names, until)
        return None not in found

    def status(self) -> list[dict[str, Any]]:
        """See Shelf."""
        return [server.status() for server in self._servers.values()]

    async def close(self) -> None:
        """See Shelf."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        for server in self._servers.values():
            server.end(wait=True)


def _slots(line: Line) -> list[tuple[int, int, tuple[str, int]]]:
    """(first slot, last slot, address of who serves them); empty for a server that is no Cluster."""
    try:
        rows = line.call(b"CLUSTER", b"SLOTS")
    except ReplyError as exc:
        # A proxy may not know the command, and a user may not use it: then the seed is all there is.
        if "cluster support disabled" in str(exc) or str(exc).startswith(("NOPERM", "ERR unknown")):
            return []
        raise
    here = str(line.where.address[0]).encode()
    try:
        found = [(int(row[0]), int(row[1]), ((row[2][0] or here).decode(), int(row[2][1]))) for row in rows]
    except (TypeError, LookupError, AttributeError):
        raise EOFError("no map of a Cluster") from None
    if not all(0 <= first <= last < SLOTS and 0 <= port < 1 << 16 for first, last, (_, port) in found):
        raise EOFError("no map of a Cluster")
    return found
