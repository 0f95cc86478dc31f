"""A shelf on Mooncake Store, whose engine runs in a process of its own (mooncake_child).

Whatever the engine does, a call ends at its deadline: what hangs is left to hang, in the child, over shared memory
that is used again only when the call has ended or the child is dead. Where too many hang the child is killed and
another started. Bytes are copied once, between that memory and the slots.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from kvtier.peer.mooncake_child import LENGTH, MAX_FRAME, Ask, Setup, Told, frame
from kvtier.peer.shelf import Want
from kvtier.peer.trays import TRAY, add_up, pack, places_of, trays_of, unpack
from kvtier.waits import lasting

TRAYS: Final = 8
"""Calls with bytes at a time."""
MAX_OPS: Final = 8
"""Calls without bytes at a time."""
MAX_LOST: Final = 8
"""Calls that may hang; more, and the child is killed."""
THREADS: Final = 4
MAX_SILENT: Final = 3
"""Pings in a row without an answer."""
START_S: Final = 20.0
PING_S: Final = 1.0
UNASKED: Final = "not asked yet"
SMALL: Final = 64 << 10
"""Bytes that are copied sooner than a thread wakes."""
GONE: Final = frozenset((-703, -704))
"""No such value, or one that is not whole."""
SICK: Final = -900
"""The master does not answer."""
TOO_LONG: Final = -600
FAULTS: Final = (OSError, EOFError, TimeoutError, ValueError)
IMPATIENT: Final = {
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "2", "MC_RPC_TIMEOUT_MS": "1000", "MC_RPC_CONNECT_TIMEOUT_MS": "1000",
}  # fmt: skip
"""What the engine is told where the environment does not say otherwise: by default a stalled node holds it for 30 s."""

_log = logging.getLogger("kvtier.peer")


class Child(NamedTuple):
    """A running engine."""

    process: subprocess.Popen[bytes]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class MooncakeShelf:
    """See Shelf. Owned by the loop thread."""

    name = "mooncake"
    peeks = False

    def __init__(self, setup: Setup, *, deadline_s: float = 0.2, counts: Counter[str] | None = None) -> None:
        """`setup`: how the child joins the cluster."""
        self.counts = Counter() if counts is None else counts
        self.up = False
        self.why = UNASKED
        self.life = self.returns = 0
        self._setup = setup
        self._deadline_s = deadline_s
        self._pool = ThreadPoolExecutor(THREADS, "kvtier-mooncake")
        self._memory_fd = os.memfd_create("kvtier-mooncake", os.MFD_CLOEXEC)
        os.fchmod(self._memory_fd, 0o600)  # the default lets every user open it through /proc
        os.ftruncate(self._memory_fd, TRAY * TRAYS)
        self._memory = np.frombuffer(mmap.mmap(self._memory_fd, 0), np.uint8)
        self._trays = list(range(TRAYS))
        self._room = asyncio.Semaphore(TRAYS)
        self._asks = asyncio.Semaphore(MAX_OPS)
        self._number = 0
        self._calls: dict[int, asyncio.Future[list[int] | None]] = {}
        self._lost = 0
        self._child: Child | None = None
        self._watch: asyncio.Task[None] | None = None

    # -- the child -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """See Shelf."""
        if self._watch is None:
            self._watch = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        """Keep a child, and ask it once a second whether the master answers."""
        while True:
            try:
                await self._spawn()
                await self._listen()
            except FAULTS as exc:
                self._failed(exc)
            except Exception as exc:  # noqa: BLE001 - the watch must not end
                _log.exception("the process of Mooncake's engine is started again")
                self._failed(exc)
            finally:
                await asyncio.shield(self._bury())
            await asyncio.sleep(PING_S)

    async def _spawn(self) -> None:
        """Start a child and wait until its engine is up."""
        ours, theirs = socket.socketpair()
        with theirs:
            fds = (theirs.fileno(), self._memory_fd)
            command = [sys.executable, "-m", "kvtier.peer.mooncake_child", *map(str, fds)]
            noise = (
                None if _log.isEnabledFor(logging.DEBUG) else subprocess.DEVNULL
            )  # a line for every value that failed
            process = subprocess.Popen(  # noqa: S603, ASYNC220 - our own module
                command, pass_fds=fds, stdin=subprocess.DEVNULL, stdout=noise, stderr=noise, env=IMPATIENT | os.environ
            )
        reader, writer = await asyncio.open_connection(sock=ours)
        self._child = Child(process, reader, writer)
        writer.write(frame(self._setup))
        async with asyncio.timeout(START_S):
            await self._receive(reader)

    async def _receive(self, reader: asyncio.StreamReader) -> Told:
        """What the child says next; raises EOFError."""
        (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        if size > MAX_FRAME:
            raise EOFError("no frame of the child")
        return msgspec.msgpack.decode(await reader.readexactly(size), type=Told)

    async def _listen(self) -> None:
        """Hand out what the child says, until it is gone."""
        assert self._child is not None
        pings = asyncio.get_running_loop().create_task(self._pings())
        try:
            while True:
                told = await self._receive(self._child.reader)
                call = self._calls.pop(told.number, None)
                if call is not None:
                    call.set_result(told.values)
        finally:
            pings.cancel()

    async def _pings(self) -> None:
        """Ask whether the master answers; a child that says nothing for long is killed."""
        silent = 0
        while (call := self._begin("has", ["kvt1:ping"])) is not None:
            found = await self._ended(call, 1, time.monotonic() + self._deadline_s)
            silent = silent + 1 if found is None else 0
            if silent >= MAX_SILENT:
                self._kill(f"{silent} pings had no answer")
            if found is not None and found[0] < 0:
                self._failed(OSError(f"the master does not answer ({found[0]})"))
            elif found is not None:
                if not self.up:
                    self.returns += 1
                    _log.info("the shared store of Mooncake answers")
                self.up, self.why = True, ""
            await asyncio.sleep(PING_S)

    def _kill(self, why: str) -> None:
        """End the child: its end of the socket closes, and _run goes on from there."""
        if self._child is not None:
            _log.warning("the process of Mooncake's engine is killed: %s", why)
            self._child.process.kill()

    async def _bury(self) -> None:
        """The child is dead: only now its calls are over."""
        child, self._child = self._child, None
        if child is not None:
            child.writer.close()
            child.process.kill()
            await asyncio.get_running_loop().run_in_executor(None, child.process.wait)
        calls = list(self._calls.values())
        self._calls.clear()
        for call in calls:
            call.set_result(None)

    def _failed(self, exc: BaseException) -> None:
        """It did not do what was asked: ask nothing more until it answers a ping."""
        if self.up or self.why == UNASKED:
            _log.warning("the shared store of Mooncake is asked nothing until it answers: %r", exc)
        if self.up:
            self.counts["peer_down"] += 1
            self.life += 1
        self.up, self.why = False, f"{type(exc).__name__}: {exc}"

    # -- calls ---------------------------------------------------------------------------------------------------------

    def _begin(
        self, verb: str, names: list[str], at: Sequence[int] = (), sizes: Sequence[int] = ()
    ) -> asyncio.Future[list[int] | None] | None:
        """Begin a call of the engine: what it will say of each name (None: the child died). None without a child."""
        if self._child is None or self._child.writer.is_closing():
            return None
        self._number += 1
        call: asyncio.Future[list[int] | None] = asyncio.get_running_loop().create_future()
        self._calls[self._number] = call
        self._child.writer.write(frame(Ask(self._number, verb, names, list(at), list(sizes))))
        return call

    async def _ended(self, call: asyncio.Future[list[int] | None], count: int, until: float) -> list[int] | None:
        """What the engine says of `count` names; None where it does not by then."""
        try:
            await asyncio.wait([call], timeout=max(0.0, until - time.monotonic()))
        finally:
            if not call.done():
                self._lose(call)
        found = call.result() if call.done() else None
        if found is not None and len(found) == count:
            return found
        self.counts["peer_failures"] += 1
        self._failed(TimeoutError("a call of the engine took too long, or its process died"))
        return None

    def _lose(self, call: asyncio.Future[list[int] | None]) -> None:
        """Nobody waits for a call any more. Too many of those, and the child goes."""
        self._lost += 1

        def found(_: object) -> None:
            self._lost -= 1

        call.add_done_callback(found)
        if self._lost == MAX_LOST + 1:
            self._kill(f"more than {MAX_LOST} calls hang")

    async def _small(self, verb: str, names: Sequence[str], until: float) -> list[int | None]:
        """A call without bytes; None where there is no answer."""
        if not await self._admitted(self._asks, until):
            return [None] * len(names)
        try:
            call = self._begin(verb, list(names)) if self.up and names else None
            found = None if call is None else await self._ended(call, len(names), until)
        finally:
            self._asks.release()
        return [None] * len(names) if found is None else [self._told(value) for value in found]

    async def _admitted(self, room: asyncio.Semaphore, until: float) -> bool:
        """Whether there is room for one more call by then, and somebody to ask."""
        if self.up:
            try:
                async with asyncio.timeout(max(0.0, until - time.monotonic())):
                    await room.acquire()
            except TimeoutError:
                self.counts["peer_busy"] += 1
            else:
                if self.up:
                    return True
                room.release()  # it failed while this one waited
        return False

    def _told(self, value: int) -> int | None:
        """A value, or None for what says nothing about it."""
        if value >= 0 or value in GONE or value == TOO_LONG:
            return value
        self.counts["peer_refused"] += 1
        if value == SICK:
            self._failed(OSError("the master does not answer"))
        return None

    async def has(self, names: Sequence[str], until: float) -> list[bool | None]:
        """See Shelf."""
        return [None if value is None else value == 1 for value in await self._small("has", names, until)]

    async def drop(self, names: Sequence[str], until: float) -> bool:
        """See Shelf."""
        return all(value == 0 or value in GONE for value in await self._small("drop", names, until))

    # -- bytes ---------------------------------------------------------------------------------------------------------

    async def peek(self, names: Sequence[str], most: int, until: float) -> list[bytes | None]:
        """See Shelf."""
        room = [np.zeros(most, np.uint8) for _ in names]
        sizes = await self._move("read", [Want(n, [r.data]) for n, r in zip(names, room, strict=True)], until)
        return [None if size is None else r[: max(0, size)].tobytes() for size, r in zip(sizes, room, strict=True)]

    async def read(self, wants: Sequence[Want], until: float) -> list[bool | None]:
        """See Shelf."""
        sizes = await self._move("read", wants, until)
        return [None if size is None else size == want.nbytes for size, want in zip(sizes, wants, strict=True)]

    async def write(self, wants: Sequence[Want], until: float) -> list[bool]:
        """See Shelf."""
        return [value == 0 for value in await self._move("write", wants, until)]

    async def claim(self, names: Sequence[str], value: bytes, until: float) -> None:
        """See Shelf: what is there is not written again, so whoever is first stays."""
        await self._move("write", [Want(name, [memoryview(value)]) for name in names], until)

    async def replace(self, names: Sequence[str], value: bytes, until: float) -> list[bool]:
        """See Shelf."""
        told = await self._move("replace", [Want(name, [memoryview(value)]) for name in names], until)
        return [one == 0 for one in told]

    async def _move(self, verb: str, wants: Sequence[Want], until: float) -> list[int | None]:
        """Calls with bytes, as many at once as there are trays; what the engine says of each value."""
        loads = [asyncio.ensure_future(self._load(verb, part, until)) for part in trays_of(wants)]
        try:
            told = [value for part in await asyncio.gather(*loads) for value in part]
        except BaseException:
            for load in loads:
                load.cancel()
            await asyncio.gather(*loads, return_exceptions=True)  # none of them writes into slots any more
            raise
        await self._threaded(
            add_up, [want for want in wants if want.sum is not None]
        )  # in order, as trays do not end in
        return told

    async def _load(self, verb: str, wants: Sequence[Want], until: float) -> list[int | None]:
        """One call, through one tray."""
        nothing: list[int | None] = [None] * len(wants)
        if not await self._admitted(self._room, until):
            return nothing
        tray = self._trays.pop()

        def free(_: object = None) -> None:
            self._trays.append(tray)
            self._room.release()

        at = places_of(wants, tray * TRAY)
        call = None
        try:
            if verb != "read":
                await self._threaded(pack, wants, self._memory, at)
            call = self._begin(verb, [want.name for want in wants], at, [want.nbytes for want in wants])
            found = None if call is None else await self._ended(call, len(wants), until)
        except BaseException:
            free() if call is None else call.add_done_callback(free)
            raise
        if call is not None and not call.done():
            call.add_done_callback(free)  # the engine may still write there
            return nothing
        try:
            told = nothing if found is None else [self._told(value) for value in found]
            if verb == "read":
                await self._threaded(unpack, wants, self._memory, at, told)
        finally:
            free()
        return told

    async def _threaded(self, work: Callable[..., None], wants: Sequence[Want], *args: Any) -> None:
        """Go over bytes, in a thread where they are many; a cancelled caller waits for it."""
        if sum(want.nbytes for want in wants) <= SMALL:
            work(wants, *args)
            return
        await lasting(asyncio.get_running_loop().run_in_executor(self._pool, work, wants, *args))

    def status(self) -> list[dict[str, Any]]:
        """See Shelf."""
        master = self._setup.master
        return [{"name": f"mooncake {master}", "address": master, "up": self.up, "why": self.why, "idle": 0}]

    async def close(self) -> None:
        """See Shelf."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        self._pool.shutdown(wait=True)
        if self._memory_fd >= 0:
            os.close(self._memory_fd)
            self._memory_fd = -1
