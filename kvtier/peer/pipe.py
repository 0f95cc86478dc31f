"""One connection between two daemons: frames on the loop, bytes of pages in worker threads, one user at a time."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import secrets as random
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import TypeVar

import numpy as np
from msgspec.structs import replace

from kvtier.peer import bulk, frames, turns
from kvtier.peer.base import Place
from kvtier.peer.pace import Pace
from kvtier.peer.stream import Stream
from kvtier.peer.terms import Terms
from kvtier.peer.tls import Channel, expect_name
from kvtier.types import Code, KvtierError
from kvtier.waits import drained

T = TypeVar("T")


class Pipe:
    """An authenticated connection. Raises OSError, EOFError, KvtierError; after any of them it is of no use."""

    def __init__(self, sock: socket.socket, *, channel: Channel | None = None, pace: Pace | None = None) -> None:
        """`channel`: TLS, whose handshake is the first thing to be done."""
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.stream = Stream(sock, channel)
        self.session: frames.Session | None = None
        self.sealed = False
        self.incarnation = b""
        self.used: set[bytes] = set()
        """Caches that the asker has shown the secret of."""
        self.pace = pace or Pace()
        self.wire = 0
        """Bytes of items, as they travelled, of the transfer that was last,"""
        self.coding_s = 0.0
        """and seconds for packing or unpacking them."""
        self._terms: Terms | None = None
        """Those that both ends keep to."""
        self.paced = False
        """Whether this end sends no faster than the other one takes."""
        self._loop = asyncio.get_running_loop()

    # -- the first two frames -------------------------------------------------------------------------------------

    async def knock(self, terms: Terms, peer: str, *, sealed: bool | None = None) -> None:
        """As the asker of that peer: agree on keys. `sealed` None: off loopback, without TLS."""
        await self.stream.shake()
        if self.stream.channel is not None:
            expect_name(self.stream.channel, peer)
        self.sealed = not (self.local or self.stream.channel) if sealed is None else sealed
        nonce = random.token_bytes(frames.NONCE_BYTES)
        knock = frames.Knock(frames.VERSION, nonce, self.sealed, terms.name, terms.rate)
        await self.send(knock)
        answer = await self.receive(frames.Challenge, frames.MAX_HELLO)
        key = terms.secrets.session((nonce, answer.nonce), (terms.name, peer))
        session = frames.Session(key, asker=True)
        if not hmac.compare_digest(session.challenge(knock, answer), answer.proof):
            raise KvtierError(Code.FORBIDDEN, f"the peer does not have the fleet's key, or is not {peer}")
        self.session, self.incarnation = session, answer.incarnation
        self._terms = terms.met(answer.rate)
        self.paced = 0 < terms.rate <= self._terms.rate

    async def answer(self, terms: Terms, incarnation: bytes) -> str:
        """As the answerer: agree on keys; who asks. It has shown nothing (but a certificate) before its next frame."""
        await self.stream.shake()
        knock = await self.receive(frames.Knock, frames.MAX_HELLO)
        if knock.version != frames.VERSION or len(knock.nonce) != frames.NONCE_BYTES:
            error = KvtierError(Code.VERSION, f"expected peer protocol version {frames.VERSION}, got {knock.version}")
            await self.send(frames.Refused(error.code.value, error.message))
            raise error
        if self.stream.channel is not None:
            expect_name(self.stream.channel, knock.name)
        elif not knock.sealed and not self.local:
            raise KvtierError(Code.FORBIDDEN, "pages are sent off loopback only under a seal or in TLS")
        self.sealed = knock.sealed
        nonce = random.token_bytes(frames.NONCE_BYTES)
        key = terms.secrets.session((knock.nonce, nonce), (knock.name, terms.name))
        session = frames.Session(key, asker=False)
        answer = frames.Challenge(nonce, incarnation, b"", terms.rate)
        await self.send(replace(answer, proof=session.challenge(knock, answer)))
        self.session, self._terms = session, terms.met(knock.rate)
        return knock.name

    @property
    def local(self) -> bool:
        """Whether both ends are on loopback."""
        sock = self.stream.sock
        ends = (sock.getsockname()[0], sock.getpeername()[0])
        return all(ipaddress.ip_address(end.partition("%")[0]).is_loopback for end in ends)

    # -- frames ---------------------------------------------------------------------------------------------------

    async def send(self, *messages: frames.Message) -> None:
        """Send frames."""
        close = frames.encode if self.session is None else self.session.close
        await self.stream.send(b"".join(map(close, messages)))

    def post(self, message: frames.Message) -> None:
        """Send a frame as far as the kernel takes it now; the rest goes before the answer is `heard`."""
        assert self.session is not None
        self.stream.post(self.session.close(message))

    async def heard(self, kind: type[T]) -> T:
        """The answer to what was posted."""
        await self.stream.send(b"")
        return await self.receive(kind)

    async def receive(self, kind: type[T], most: int = frames.MAX_BODY) -> T:
        """The next frame, which must be of that kind; raises the Refusal that came instead."""
        head = await self.stream.exactly(frames.LENGTH.size)
        size = frames.size_of(head, most)
        if self.session is None:
            return frames.expect(frames.decode(await self.stream.exactly(size)), kind)
        return frames.expect(self.session.open(head, await self.stream.exactly(size + frames.MAC_BYTES)), kind)

    async def ask(self, message: frames.Message, kind: type[T]) -> T:
        """One frame there and one back."""
        await self.send(message)
        return await self.receive(kind)

    # -- bytes of pages -------------------------------------------------------------------------------------------

    def within(self, nbytes: int) -> float:
        """Seconds that a transfer may take, as both ends reckon."""
        assert self._terms is not None
        return self._terms.within(nbytes)

    def patience(self, nbytes: int) -> float:
        """Seconds that each end takes for nothing but its own part of it, such as reading its disk."""
        assert self._terms is not None
        return self._terms.patience(nbytes)

    @property
    def _slow(self) -> bool:
        """Whether either end keeps to a rate: a thread notices where nothing moves, in all the time that takes."""
        assert self._terms is not None
        return self._terms.rate > 0

    async def threaded(
        self, pool: Executor, work: Callable[[bulk.Line], T], nbytes: int, within_s: float, *, begun: bool = False
    ) -> T:
        """Let a worker thread use the connection, all over so long after it has its turn. Raises what `work` raises.

        Raises a Refusal where no thread is free for half of the time that the other end bears without a byte: that is
        nobody's fault but this host's. `begun`: bytes are on their way, so that the connection is of no use then. A
        cancelled caller shuts the connection, so that the thread ends, and waits for that.
        """
        session, patience = self.session, min(within_s, 2 * self.patience(nbytes))
        assert session is not None

        def run() -> T:
            until = time.monotonic() + within_s
            line = bulk.Line(self.stream, session, until, patience=patience, sealed=self.sealed, pace=self.pace)
            with line:
                result = work(line)
            self.wire, self.coding_s = line.wire, line.coding_s
            return result

        job = pool.submit(run)
        future = asyncio.wrap_future(job)
        timer = self._loop.call_later(patience / 2, job.cancel)  # what runs goes on
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            job.cancel()
            bulk.shut(self.stream.sock)
            await drained(future)
            if not future.cancelled():
                future.exception()  # nobody waits for it, and asyncio would complain
            raise
        finally:
            timer.cancel()
        try:
            if not future.cancelled():
                return future.result()
        finally:
            del job, future  # an exception has this frame, which must not have it: nobody collects cycles
        if begun:
            bulk.shut(self.stream.sock)
        raise frames.Refusal(Code.BUSY, "no thread was free for a transfer")

    async def pour(
        self,
        pool: Executor,
        load: frames.Load,
        places: Sequence[Place],
        within_s: float,
        whole: frames.Found | frames.Offer | None = None,
    ) -> None:
        """Send a Load (or the `whole` that it is part of) and the items' bytes in order.

        Like `threaded`; small ones go without a thread.
        """
        session, sock = self.session, self.stream.sock
        assert session is not None
        views = [memoryview(view) for place in places for view in place.views]

        def work(line: bulk.Line) -> None:
            line.announce(session.close(whole or load))  # once there is a thread: without one the answer is a Refusal
            if load.packed:
                line.pour_packed(places)
            else:
                line.pour(views)

        if self.sealed or self.stream.channel or self._slow or load.packed:
            await self.threaded(pool, work, load.nbytes, within_s)
            return
        views.insert(0, memoryview(session.close(whole or load)))
        if load.nbytes <= turns.SMALL:
            await self.stream.sending(turns.pouring(sock, views), within_s)
        elif left := turns.begin(sock, views):
            await self.threaded(pool, lambda line: line.pour(left), load.nbytes, within_s, begun=True)
        self.wire, self.coding_s = load.nbytes, 0.0

    async def fill(
        self, pool: Executor, load: frames.Load, places: Sequence[Place], within_s: float
    ) -> list[int | None]:
        """Receive the items that a frame announced. Like `threaded` and Line.fill; small ones come without a thread."""
        sums = np.frombuffer(load.sums, "<u8").tolist()
        if self.sealed or self.stream.channel or self._slow or load.packed or load.nbytes > turns.SMALL:
            work = partial(bulk.Line.fill, places=places, sums=sums, packed=load.packed)
            return await self.threaded(pool, work, load.nbytes, within_s, begun=True)
        out: list[int | None] = [None] * len(places)
        try:
            await self.stream.receiving(turns.filling(self.stream, places, sums, out), within_s)
        except bulk.FAULTS:
            bulk.shut(self.stream.sock)
        return out

    def close(self) -> None:
        """Drop the connection."""
        self.stream.close()
