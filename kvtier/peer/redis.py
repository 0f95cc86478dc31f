"""A shelf on Redis or Valkey: one server, or a Cluster, whose slots say which server has a name.

Each server has its own connections, bound and breaker: a lost one costs its share of the names.
"""

from __future__ import annotations

import asyncio
import binascii
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from kvtier.peer.redis_server import MOVING, Login, Server
from kvtier.peer.resp import Line, ReplyError, command
from kvtier.peer.shelf import Want

T = TypeVar("T")
PING_S: Final = 1.0
SLOTS: Final = 16384

_log = logging.getLogger("kvtier.peer")


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
        self.returns = 0
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
                away = [server for server in self._servers.values() if not server.up]
                await asyncio.gather(*(server.ping() for server in self._servers.values()))
                self.returns += sum(server.up for server in away)
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
