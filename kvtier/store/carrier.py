"""Carries bytes to, from and within device memory: one thread has the device, the loop never waits for it.

Work is queued on streams; the thread looks at events and tells the loop when one is reached. What is not done by its
deadline never will be, as far as anybody knows: the carrier is sick then, moves nothing more, and whoever waited is
told `Stuck`, because the device may still write where it was told to. The thread may be what hangs, in a call of the
driver (copies of memory that is not pinned are waited for there): then the loop finds it, and leaves the thread behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import xxhash

from kvtier.device.base import Device, Event, Pinned, Shared, Stream
from kvtier.device.ipc import ADVICE
from kvtier.device.paths import Memory, Paths
from kvtier.device.shuttle import Choose, Transfer, Way
from kvtier.mover import Urgency
from kvtier.numa import node_of
from kvtier.store import carries
from kvtier.tiers.pool import Span
from kvtier.types import Code, KvtierError
from kvtier.waits import drained

DEADLINE_S: Final = 10.0
"""A batch of at most some 8 MiB that takes longer is stuck."""
CALL_DEADLINES: Final = 3
"""So many deadlines may the driver's calls for one batch take: kernels are compiled there when first used."""
HURRY_S: Final = 1.0
"""The deadline when the daemon has no time left."""
WATCH_S: Final = 0.25
"""So often the loop looks at the thread, while somebody waits for it."""
OPEN_S: Final = 60.0
"""A driver that does not come up in this time is none."""
POLL_S: Final = 2e-4
FLYING: Final = 8
"""Batches that the device has at once: enough to keep it busy, few enough for an urgent one to be next."""
WAITING: Final = 4096
SCRATCH_BYTES: Final = 1 << 20
SUMMED: Final = 4096
"""Slots that one kernel sums."""

_log = logging.getLogger("kvtier.device")
T = TypeVar("T")
Lists = Sequence[Sequence[Span]]


class Stuck(KvtierError):  # noqa: N818 - what the device is
    """The device did not do it, or failed half-way: it may still write to the targets, which nobody may use again."""


class Streams(NamedTuple):
    """One for each use, so that none waits for another."""

    load: Stream
    back: Stream


Begin = Callable[["Carrier", Stream], Event | None]


class Batch:
    """One thing to do: `begin` queues it on a stream, or on others and gives their event; `end` gives its result."""

    def __init__(self, begin: Begin, end: Callable[[Carrier], Any], future: asyncio.Future[Any]) -> None:
        self.begin = begin
        self.end = end
        self.future = future
        self.event: Event | None = None
        self.begun = 0.0


class Carrier:
    """One device. `sick` says why nothing moves any more; a device that never came up is sick from the beginning."""

    def __init__(
        self,
        make: Callable[[], Device],
        shared_bytes: int,
        *,
        deadline_s: float = DEADLINE_S,
        folder: Path | None = None,
    ) -> None:
        """Opens the device and takes `shared_bytes` of its memory, which is `shared`. Blocks.

        `folder`: where it is kept what was measured of a GPU, or measured now; None: copies go one by one.
        """
        self.sick = ""
        self.name = ""
        self.uuid = b""
        self.node: int | None = None
        """The NUMA node of host memory that is nearest."""
        self.shared: Shared | None = None
        self.told = False  # whether others may map `shared`: freeing it is undefined then, but by the process's end
        self.on_sick: Callable[[], None] | None = None
        """Called once when the device failed, by the thread or on the loop."""
        self.way: Choose | Way = Way.STAGED
        """How pages go between host memory and the device; the shuttles of engines' own KV take it too."""
        self._make = make
        self._size = shared_bytes
        self._folder = folder
        self._deadline_s = deadline_s
        self._queues: tuple[deque[Batch], deque[Batch]] = (deque(), deque())
        self._flying: deque[Batch] = deque()
        self._changed = threading.Condition()
        self._summing = asyncio.Lock()
        self._entered: float | None = None
        """Since when the thread is among the driver's calls for one batch; None while it waits for work."""
        self._timer: asyncio.TimerHandle | None = None
        self._closing = False
        self._fallen = False
        self._opened = threading.Event()
        self.scratch: Pinned
        self._thread = threading.Thread(target=self._run, name="kvtier-device", daemon=True)
        self._thread.start()
        if not self._opened.wait(OPEN_S):
            self.sick = f"the device did not open within {OPEN_S:.0f} s"

    @property
    def waiting(self) -> int:
        """Batches that are not done."""
        return len(self._queues[0]) + len(self._queues[1]) + len(self._flying)

    @property
    def base(self) -> int:
        """Where the tier's memory begins on the device."""
        return self.shared.memory.address if self.shared is not None else 0

    def on_device(self, address: int) -> bool:
        """Whether it is in the tier's memory."""
        return self.base <= address < self.base + self._size

    def way_of(self, target: Span, count: int) -> Way:
        """How so many slots of one size go to where the first one does."""
        return self.way if isinstance(self.way, Way) else self.way(self.on_device(target.address), target.bytes, count)

    # -- on the loop -----------------------------------------------------------------------------------------------

    async def copy(self, pairs: Sequence[tuple[Sequence[Span], Sequence[Span]]], urgency: Urgency) -> None:
        """Copy items: (source, target) spans each. Raises busy, io, Stuck."""
        await self.do(functools.partial(carries.copy, pairs), carries.nothing, urgency)

    async def checksums(self, items: Lists, urgency: Urgency) -> list[int]:
        """xxh3-64 of items in device memory, by the device where it can. Raises busy, io, Stuck."""
        size = items[0][0].bytes if items else 0
        same = carries.summable(size) and all(len(spans) == 1 and spans[0].bytes == size for spans in items)
        async with self._summing:  # one scratch memory for all
            if same:
                return await self._sums([spans[0].address for spans in items], size, urgency)
            return [await self._digest(spans, urgency) for spans in items]

    async def _sums(self, slots: list[int], size: int, urgency: Urgency) -> list[int]:
        """Sums of slots by the device's kernel."""
        out: list[int] = []
        for at in range(0, len(slots), SUMMED):
            part = np.array(slots[at : at + SUMMED], np.uint64)
            out += await self.do(
                functools.partial(carries.add_up, part, size), functools.partial(carries.read, len(part)), urgency
            )
        return out

    async def _digest(self, spans: Sequence[Span], urgency: Urgency) -> int:
        """The sum of one item of any shape, fetched piece by piece."""
        state = xxhash.xxh3_64()
        for span in spans:
            for at in range(0, span.bytes, SCRATCH_BYTES):
                piece = Span(span.address + at, min(SCRATCH_BYTES, span.bytes - at))
                await self.do(
                    functools.partial(carries.fetch, piece),
                    functools.partial(carries.update, state, piece.bytes),
                    urgency,
                )
        return state.intdigest()

    async def call(self, work: Callable[[Device], T], urgency: Urgency = Urgency.ENGINE) -> T:
        """What the thread gets from a call that queues nothing; its refusal is the caller's. Raises busy, io."""
        box: list[Any] = []

        def begin(carrier: Carrier, _stream: Stream) -> None:
            try:
                box.append(work(carrier.device))
            except KvtierError as exc:
                box.append(exc)

        try:
            result: T = await self.do(begin, lambda _: box[0], urgency)
        except Stuck as exc:
            raise KvtierError(exc.code, exc.message) from exc  # nothing was queued that may still write
        finally:
            box.clear()
        return result

    async def transfer(self, start: Callable[[], Transfer], urgency: Urgency) -> None:
        """Have a shuttle move pages. Raises bad_request and busy before anything was queued, io, Stuck."""
        box: list[Any] = []

        def begin(_carrier: Carrier, _stream: Stream) -> Event | None:
            try:
                box.append(start())
            except KvtierError as exc:
                if exc.code not in {Code.BAD_REQUEST, Code.BUSY}:
                    raise
                box.append(exc)
                return None
            event: Event = box[0].done
            return event

        def end(_carrier: Carrier) -> Any:
            if isinstance(box[0], Exception):
                return box[0]
            box[0].settled()
            return None

        try:
            await self.do(begin, end, urgency)
        finally:
            box.clear()

    async def probe(self, address: int, token: bytes, what: str) -> None:
        """Read back what another process says is in its memory. Raises io, with advice, where it is something else."""
        state = xxhash.xxh3_64()
        async with self._summing:
            piece = Span(address, len(token))
            await self.do(
                functools.partial(carries.fetch, piece),
                functools.partial(carries.update, state, len(token)),
                Urgency.ENGINE,
            )
        if state.intdigest() != xxhash.xxh3_64_intdigest(token):
            raise KvtierError(Code.IO, f"{what} is mapped here but shows other bytes; {ADVICE}")

    async def write(self, where: Span, data: bytes) -> None:
        """Put a few bytes into device memory. Raises busy, io, Stuck."""
        async with self._summing:
            await self.do(functools.partial(carries.put, where, data), carries.nothing, Urgency.ENGINE)

    async def do(self, begin: Begin, end: Callable[[Carrier], Any], urgency: Urgency) -> Any:
        """Have the thread queue work, and wait for its result. Raises busy, io, Stuck.

        A cancelled caller is let go only when no byte moves any more.
        """
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        with self._changed:
            if self.sick or self._closing:
                raise KvtierError(Code.IO, self.sick or "closing")
            queue = self._queues[int(urgency is Urgency.BACKGROUND)]
            if len(queue) >= WAITING:
                raise KvtierError(Code.BUSY, f"{WAITING} batches wait for the device")
            queue.append(Batch(begin, end, future))
            self._changed.notify()
        if self._timer is None:
            self._watch(asyncio.get_running_loop())
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await drained(future)
            if isinstance(future.exception(), Stuck):
                return future.result()  # raises it: bytes may move still, whoever is cancelled must hear that
            raise
        finally:
            del future  # an exception has this frame, which must not have it: nobody collects cycles

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Give the device up when the thread does not come out of the driver; goes on while somebody waits."""
        self._timer = None
        entered, most = self._entered, CALL_DEADLINES * self._deadline_s
        if entered is not None and time.monotonic() - entered > most:
            self._fall(f"a call of the device's driver did not return within {most:.1f} s")
        if self.waiting:
            self._timer = loop.call_later(WATCH_S, self._watch, loop)

    def hurry(self) -> None:
        """The daemon has no time left: what takes longer than a moment is stuck."""
        self._deadline_s = min(self._deadline_s, HURRY_S)

    def close(self) -> None:
        """Drop what has not begun, wait for what the device does, give its memory back; a sick one keeps it."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if not self.sick:  # else the thread may be in the driver for ever
            self._thread.join(self._deadline_s + 1.0)
        if self.shared is not None and self.shared.fd >= 0:
            os.close(self.shared.fd)
            self.shared = self.shared._replace(fd=-1)

    # -- in the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Have the device until closing, or until it is sick."""
        try:
            self.device = self._make()
            facts = self.device.facts
            self.name, self.uuid, self.node = facts.name, facts.uuid, node_of(facts.pci)
            self.shared = self.device.share(self._size)
            self.scratch = self.device.pin(SCRATCH_BYTES)
            self._streams = Streams(self.device.stream(urgent=True), self.device.stream())
            self._choose()
        except Exception as exc:  # noqa: BLE001 - whatever a driver says, the daemon goes on without
            self.sick = str(exc) or type(exc).__name__
        self._opened.set()
        while not self.sick and self._turn():
            pass
        self._fall()
        if not self.sick and self.shared is not None and not self.told:
            with contextlib.suppress(KvtierError):
                self.scratch.free()
                self.shared.memory.free()

    def _choose(self) -> None:
        """Measure a GPU once, or read what was measured; one without room for that is used all the same."""
        if self._folder is None or not self.device.facts.compute:
            return
        try:
            self.way = Paths(self.device, self._folder, memory=Memory.PAGED).way
        except KvtierError as exc:
            _log.warning("copies go one by one: %s", exc)

    def _turn(self) -> bool:
        """Queue what waits, see what is done; False when closing and nothing flies."""
        with self._changed:
            while not self._flying and not self._closing and not any(self._queues):
                self._changed.wait()
            if self._closing and not self._flying:
                return False
            fresh = self._next()
        self._entered = time.monotonic()
        try:
            if fresh is not None:
                self._begin(*fresh)
            if self._flying:
                self._look()
        except Exception as exc:  # noqa: BLE001 - whatever it is, somebody waits for what was queued
            self.sick = self.sick or str(exc) or type(exc).__name__
        self._entered = None
        return True

    def _next(self) -> tuple[Batch, Stream] | None:
        """The most urgent batch, where another may fly; it does from here on (the lock is held)."""
        if len(self._flying) >= FLYING or self._closing:
            return None
        for queue, stream in zip(self._queues, self._streams, strict=True):
            if queue:
                self._flying.append(queue.popleft())
                return self._flying[-1], stream
        return None

    def _begin(self, batch: Batch, stream: Stream) -> None:
        """Queue a batch on a stream."""
        batch.event = batch.begin(self, stream) or stream.record()
        batch.begun = time.monotonic()  # a kernel that has to be compiled first took none of it

    def _look(self) -> None:
        """Wait a little for the oldest batch, and hand over all that are done."""
        flying = tuple(self._flying)
        oldest = flying[0]
        assert oldest.event is not None
        reached = oldest.event.synchronize(POLL_S)
        done = [b for b in flying if (b is oldest and reached) or (b is not oldest and b.event and b.event.done)]
        for batch in done:
            result = batch.end(self)
            self._flying.remove(batch)
            carries.tell(batch.future, result)
        if self._flying and time.monotonic() - self._flying[0].begun > self._deadline_s:
            self.sick = f"the device did not move a batch within {self._deadline_s:.1f} s"

    def _fall(self, why: str = "") -> None:
        """Closing or sick: let everybody go who waits. Once, by the thread, or on the loop where that hangs."""
        with self._changed:
            if self._fallen:
                return
            self._fallen = self._closing = True
            self.sick = self.sick or why
            queued, flying = [batch for queue in self._queues for batch in queue], list(self._flying)
            for waiting in (*self._queues, self._flying):
                waiting.clear()
        for batch in queued:
            carries.tell(batch.future, KvtierError(Code.IO, self.sick or "closing"))
        for batch in flying:
            carries.tell(batch.future, Stuck(Code.IO, self.sick))
        if self.sick and self.on_sick is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self.on_sick()
