"""Moves bytes in worker threads: checksums, copies, disk reads, region I/O. Knows nothing of the index.

Every call is a batch of at most BATCH_BYTES, so that a waiting load overtakes background work after one batch, and a
call that was started always ends before its caller goes on, even when the caller is cancelled: nothing is written
into memory that was given away.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import xxhash

from kvtier.types import Code, KvtierError
from kvtier.waits import drained

BATCH_BYTES = 8 << 20
INLINE_BYTES = 128 << 10
"""Checksums of so few bytes cost less than a trip to a thread."""

Views = list[Any]
T = TypeVar("T")


def digest(views: Views) -> int:
    """xxh3-64 of an item's bytes, slot by slot."""
    if len(views) == 1:
        return xxhash.xxh3_64_intdigest(views[0])
    state = xxhash.xxh3_64()
    for view in views:
        state.update(view)
    return state.intdigest()


def digests(items: Sequence[Views]) -> list[int]:
    """Checksums of several items."""
    return [digest(views) for views in items]


def row_digests(stride: int, size: int, blocks: Sequence[Any]) -> list[int]:
    """Checksums of items of `size` bytes that lie `stride` apart in each block."""
    one = xxhash.xxh3_64_intdigest
    return [
        one(data[at : at + size]) for block in blocks for data in [block.data] for at in range(0, len(data), stride)
    ]


def copy_items(pairs: Sequence[tuple[Views, Views]]) -> None:
    """Copy items slot to slot: (source, destination) each."""
    for source, destination in pairs:
        for a, b in zip(source, destination, strict=True):
            np.copyto(b, a)


def batches(items: Iterable[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """Split into lists of at most BATCH_BYTES each (at least one item)."""
    batch: list[T] = []
    total = 0
    for item in items:
        nbytes = size(item)
        if batch and total + nbytes > BATCH_BYTES:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += nbytes
    if batch:
        yield batch


class Urgency(enum.IntEnum):
    """What goes first when more waits than runs."""

    LOAD = 0
    """An engine waits for pages to come back."""
    ENGINE = 1
    """An engine waits for a checksum or a copy of its own memory."""
    BACKGROUND = 2
    """Nobody waits: relocation, scrubbing. One at a time."""


class Mover:
    """`threads` workers, of which LOAD and ENGINE leave each other one; `waiting` batches of each urgency queue up.

    So a disk that does not answer holds up no checksum and no copy between host and an engine.
    """

    def __init__(self, threads: int = 0, waiting: int = 4096) -> None:
        """`threads` 0: as many as there are cores, 3 or 4; with fewer, BACKGROUND would hold up one of the others."""
        threads = threads or min(4, max(3, os.cpu_count() or 1))
        self._shared = threads - 1
        """How many of LOAD, or of ENGINE, may run at once, BACKGROUND among them."""
        self._most = waiting
        self._queues: tuple[deque[_Job], ...] = (deque(), deque(), deque())
        self._busy = [0, 0, 0]
        self._closing = False
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._work, name=f"kvtier-mover-{n}", daemon=True) for n in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def running(self) -> int:
        """Batches that run now."""
        return sum(self._busy)

    @property
    def waiting(self) -> dict[str, int]:
        """Batches that wait, by urgency."""
        return {u.name.lower(): len(self._queues[u]) for u in Urgency}

    async def run(self, fn: Callable[..., T], *args: Any, urgency: Urgency = Urgency.ENGINE) -> T:
        """The result of fn(*args) in a worker thread. Raises busy where too much waits already.

        A cancelled caller is let go only when fn has ended, or will never begin.
        """
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        job = _Job(functools.partial(fn, *args), future)
        with self._changed:
            if len(self._queues[urgency]) >= self._most or self._closing:
                raise KvtierError(Code.BUSY, f"{self._most} batches wait in the mover ({urgency.name.lower()})")
            self._queues[urgency].append(job)
            self._changed.notify()
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if not self._withdraw(job, urgency):
                await drained(future)
            raise
        finally:
            del job, future  # an exception has this frame, which must not have it: nobody collects cycles

    def _withdraw(self, job: _Job, urgency: Urgency) -> bool:
        """Take back a batch that has not begun."""
        with self._changed:
            try:
                self._queues[urgency].remove(job)
            except ValueError:
                return False
        job.future.cancel()
        return True

    async def share(
        self, fn: Callable[..., T], parts: Iterable[Any], *args: Any, urgency: Urgency = Urgency.ENGINE
    ) -> list[T]:
        """fn(*args, part) of every part, side by side; ends, however it ends, only when all of them have."""
        calls = (self.run(fn, *args, part, urgency=urgency) for part in parts)
        done = await asyncio.gather(*calls, return_exceptions=True)
        results = []
        for each in done:
            if isinstance(each, BaseException):
                raise each
            results.append(each)
        return results

    async def checksums(self, items: list[Views], item_bytes: int) -> list[int]:
        """xxh3-64 of each item of `item_bytes` bytes."""
        parts = await self.share(digests, batches(items, lambda _: item_bytes))
        return [total for part in parts for total in part]

    async def row_checksums(self, blocks: list[Any], stride: int, size: int) -> list[int]:
        """The same of items that lie `stride` apart in each block."""
        parts = await self.share(row_digests, batches(blocks, len), stride, size)
        return [total for part in parts for total in part]

    def close(self) -> None:
        """Drop what has not begun, wait for what runs, stop the threads."""
        with self._changed:
            self._closing = True
            for queue in self._queues:
                for job in queue:
                    job.future.cancel()
                queue.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    # -- in the worker threads -----------------------------------------------------------------------------------

    def _may(self, urgency: Urgency) -> bool:
        """Whether one more may run."""
        load, engine, background = self._busy
        if urgency == Urgency.BACKGROUND:
            return not background and max(load, engine) < self._shared
        return self._busy[urgency] + background < self._shared

    def _next(self) -> tuple[_Job, int] | None:
        """Wait for the most urgent batch that may run; None when closing."""
        with self._changed:
            while True:
                for urgency, queue in zip(Urgency, self._queues, strict=True):
                    if queue and self._may(urgency):
                        self._busy[urgency] += 1
                        return queue.popleft(), urgency
                if self._closing:
                    return None
                self._changed.wait()

    def _work(self) -> None:
        while found := self._next():
            job, urgency = found
            job.run()
            del found, job  # the memory that it was about is not to be held until the next one comes
            with self._changed:
                self._busy[urgency] -= 1
                self._changed.notify()


class _Job:
    """One call, and the future of whoever waits for it."""

    __slots__ = ("call", "future")

    def __init__(self, call: Callable[[], Any], future: asyncio.Future[Any]) -> None:
        self.call = call
        self.future = future

    def run(self) -> None:
        """Make the call; its result or exception goes to the loop."""
        result, error = None, None
        try:
            result = self.call()
        except Exception as exc:  # noqa: BLE001 - it is the caller's, who waits for it
            error = exc
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self.future.get_loop().call_soon_threadsafe(self._deliver, result, error)
        del self, error  # an exception has this frame, which must not have its future: nobody collects cycles

    def _deliver(self, result: Any, error: Exception | None) -> None:
        if self.future.done():
            return
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)
