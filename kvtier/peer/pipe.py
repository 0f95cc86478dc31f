"""One connection between two daemons: frames on the loop, bytes of pages in worker threads, one user at a time."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import secrets as random
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import TypeVar

import xxhash

from kvtier.mover import drained
from kvtier.peer import bulk, frames
from kvtier.peer.base import Place
from kvtier.peer.secrets import Secrets
from kvtier.types import Code, KvtierError

T = TypeVar("T")


class Pipe:
    """An authenticated connection. Raises OSError, EOFError, KvtierError; after any of them it is of no use."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.sock = sock
        self.session: frames.Session | None = None
        self.sealed = False
        self.incarnation = b""
        self.used: set[bytes] = set()
        """Caches that the asker has shown the secret of."""
        self._loop = asyncio.get_running_loop()

    # -- the first two frames -------------------------------------------------------------------------------------

    async def knock(self, secrets: Secrets, *, sealed: bool | None = None) -> None:
        """As the asker: agree on keys. `sealed` None: unless both ends are on loopback."""
        self.sealed = not self.local if sealed is None else sealed
        nonce = random.token_bytes(frames.NONCE_BYTES)
        await self.send(frames.Knock(frames.VERSION, nonce, self.sealed))
        answer = await self.receive(frames.Challenge, frames.MAX_HELLO)
        session = frames.Session(secrets.session(nonce, answer.nonce), asker=True)
        if not hmac.compare_digest(session.challenge(answer.incarnation), answer.proof):
            raise KvtierError(Code.FORBIDDEN, "the peer does not have the fleet's key")
        self.session, self.incarnation = session, answer.incarnation

    async def answer(self, secrets: Secrets, incarnation: bytes) -> None:
        """As the answerer: agree on keys. The asker has shown nothing before its next frame is received."""
        knock = await self.receive(frames.Knock, frames.MAX_HELLO)
        if knock.version != frames.VERSION or len(knock.nonce) != frames.NONCE_BYTES:
            error = KvtierError(Code.VERSION, f"expected peer protocol version {frames.VERSION}, got {knock.version}")
            await self.send(frames.Refused(error.code.value, error.message))
            raise error
        if not knock.sealed and not self.local:
            raise KvtierError(Code.FORBIDDEN, "pages are sent off loopback only under a seal")
        self.sealed = knock.sealed
        nonce = random.token_bytes(frames.NONCE_BYTES)
        session = frames.Session(secrets.session(knock.nonce, nonce), asker=False)
        await self.send(frames.Challenge(nonce, incarnation, session.challenge(incarnation)))
        self.session = session

    @property
    def local(self) -> bool:
        """Whether both ends are on loopback."""
        ends = (self.sock.getsockname()[0], self.sock.getpeername()[0])
        return all(ipaddress.ip_address(end.partition("%")[0]).is_loopback for end in ends)

    # -- frames ---------------------------------------------------------------------------------------------------

    async def send(self, message: frames.Message) -> None:
        """Send one frame."""
        raw = frames.encode(message) if self.session is None else self.session.close(message)
        await self._loop.sock_sendall(self.sock, raw)

    async def receive(self, kind: type[T], most: int = frames.MAX_BODY) -> T:
        """The next frame, which must be of that kind; raises the Refusal that came instead."""
        head = await self._exactly(frames.LENGTH.size)
        size = frames.size_of(head, most)
        if self.session is None:
            return frames.expect(frames.decode(bytes(await self._exactly(size))), kind)
        return frames.expect(self.session.open(head, await self._exactly(size + frames.MAC_BYTES)), kind)

    async def ask(self, message: frames.Message, kind: type[T]) -> T:
        """One frame there and one back."""
        await self.send(message)
        return await self.receive(kind)

    async def _exactly(self, size: int) -> bytearray:
        """The next `size` bytes; raises EOFError."""
        out = bytearray(size)
        view = memoryview(out)
        at = 0
        while at < size:
            at += await self._some(view[at:])
        return out

    async def _some(self, view: memoryview) -> int:
        """Receive some bytes; raises EOFError."""
        try:
            got = self.sock.recv_into(view)
        except BlockingIOError:
            got = await self._loop.sock_recv_into(self.sock, view)
        if not got:
            raise EOFError("the peer closed the connection")
        return got

    # -- bytes of pages -------------------------------------------------------------------------------------------

    async def threaded(self, pool: Executor, work: Callable[[bulk.Line], T], within_s: float) -> T:
        """Let a worker thread use the connection for so long at most. Raises what `work` raises.

        A cancelled caller shuts the connection, so that the thread ends, and waits for that.
        """
        session = self.session
        assert session is not None

        def run() -> T:
            with bulk.Line(self.sock, session, self.sealed, within_s) as line:
                return work(line)

        future = asyncio.ensure_future(self._loop.run_in_executor(pool, run))
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            bulk.shut(self.sock)
            await drained(future)
            if not future.cancelled():
                future.exception()  # nobody waits for it, and asyncio would complain
            raise

    async def pour(self, pool: Executor, load: frames.Load, places: Sequence[Place], within_s: float) -> None:
        """Send a frame and the items' bytes in order. Like `threaded`; what fits at once goes without a thread."""
        session = self.session
        assert session is not None
        views = [memoryview(view) for place in places for view in place.views]
        head = session.close(load)
        if self.sealed:
            async with asyncio.timeout(within_s):
                await self._loop.sock_sendall(self.sock, head)
        else:
            views = bulk.begin(self.sock, [memoryview(head), *views])
        if views:
            await self.threaded(pool, lambda line: line.pour(views), within_s)

    async def fill(
        self, pool: Executor, places: Sequence[Place], sums: Sequence[int], within_s: float
    ) -> list[int | None]:
        """Receive items into places. Like `threaded` and Line.fill; what is small comes without a thread."""
        if self.sealed or sum(len(view) for place in places for view in place.views) > bulk.SMALL:
            return await self.threaded(pool, lambda line: line.fill(places, sums), within_s)
        out: list[int | None] = [None] * len(places)
        try:
            async with asyncio.timeout(within_s):
                for at, place in enumerate(places):
                    found = await self._item(place)
                    out[at] = found if found == sums[at] else None
        except bulk.FAULTS:
            bulk.shut(self.sock)
        return out

    async def _item(self, place: Place) -> int:
        """Receive one item; its checksum."""
        state = xxhash.xxh3_64()
        for view in place.views:
            data, at = memoryview(view), 0
            while at < len(data):
                got = await self._some(data[at:])
                state.update(data[at : at + got])
                at += got
        return state.intdigest()

    def close(self) -> None:
        """Drop the connection."""
        self.sock.close()
