"""Serves other daemons: the port that they connect to.

A connection is a guest like an engine: its reservations end with it, and what it reads is leased while it is sent.
"""

from __future__ import annotations

import asyncio
import logging
import secrets as random
import socket
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from kvtier.peer.fame import Fame
from kvtier.peer.pace import Pace, pace
from kvtier.peer.pipe import Pipe
from kvtier.peer.terms import MAX_OPS, Terms
from kvtier.server.visit import Visit
from kvtier.store import Store
from kvtier.types import KvtierError

SPARE: Final = 256
"""Connections beyond what each member may have: those that ended on the other side, which nobody told us of."""
MAX_NEW: Final = 128
"""Connections whose other end has not shown the key yet."""
THREADS: Final = 8
FAULTS: Final = (OSError, EOFError, TimeoutError)

_log = logging.getLogger("kvtier.peer")


class Home:
    """Listens for peers. Owned by the loop thread."""

    def __init__(
        self, store: Store, terms: Terms, address: tuple[str, int], fame: Fame, *, members: Collection[str] = ()
    ) -> None:
        """Raises OSError where the address cannot be had. `fame`: the peer tier's; `members`: hosts of the fleet."""
        self.store = store
        self.terms = terms
        self._paces = {name: pace(terms.rate) for name in members}
        self._others = pace(terms.rate)
        """Of all that the list lacks together: who holds the key may call itself anything, each time anew."""
        self.fame = fame
        self.incarnation = random.token_bytes(8)
        self.pool = ThreadPoolExecutor(THREADS, "kvtier-home")
        family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        self._socket = socket.create_server(address, family=family, backlog=SPARE)
        self._socket.setblocking(False)
        self._most = SPARE + len(members) * (MAX_OPS + 1)
        """Connections that are served: of each member its requests under way, and its pings."""
        self._admitted: set[Visit] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._strangers: dict[asyncio.Task[None], None] = {}
        """Those whose other end has not shown the key, the oldest first."""
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
            if len(self._strangers) >= MAX_NEW:  # who has the key shows it sooner than so many others come
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                oldest.cancel()
            task = loop.create_task(self._serve(sock))
            self._tasks.add(task)
            self._strangers[task] = None
            task.add_done_callback(self._over)
            task.add_done_callback(_closer(sock))  # also of one that never began

    def _over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._strangers.pop(task, None)

    async def _serve(self, sock: socket.socket) -> None:
        try:
            certs = self.terms.certs
            pipe = Pipe(sock, channel=None if certs is None else certs.channel(server=True))
            visit = Visit(self, pipe)
            try:
                await visit.run()
            finally:
                pipe.close()
                self._admitted.discard(visit)
                visit.end()
        except (*FAULTS, KvtierError) as exc:
            _log.debug("a peer's connection ended: %r", exc)
        except Exception:  # noqa: BLE001 - one peer's connection, not the others'
            _log.exception("a peer's connection failed")

    async def close(self) -> None:
        """Serve nobody any more."""
        self._socket.close()
        tasks = [*self._tasks, *([self._accepting] if self._accepting else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.pool.shutdown(wait=True)

    def admit(self, visit: Visit) -> bool:
        """Whether a connection whose other end has shown the key is served."""
        task = asyncio.current_task()
        if task not in self._strangers or len(self._admitted) >= self._most:
            return False  # it has waited for too long, or there are too many
        del self._strangers[task]
        self._admitted.add(visit)
        return True

    def pace(self, peer: str) -> Pace:
        """How fast that peer may be served, over all its connections."""
        return self._paces.get(peer, self._others)


def _closer(sock: socket.socket) -> Callable[[asyncio.Task[None]], None]:
    """Closes the socket once its task is over."""

    def close(_: asyncio.Task[None]) -> None:
        sock.close()

    return close
