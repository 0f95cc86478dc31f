"""Moves bytes in worker threads: checksums, copies, disk reads, region I/O. Knows nothing of the index.

Every call is a batch of at most BATCH_BYTES, so that a waiting load overtakes background work after one batch, and a
call that was started always ends before its caller goes on, even when the caller is cancelled: nothing is written
into memory that was given away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import xxhash

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


class Mover:
    """Worker threads: `urgent` ones for what an engine waits for, and one for background moves."""

    def __init__(self, threads: int = 3) -> None:
        self._urgent = ThreadPoolExecutor(threads, "kvtier-urgent")
        self._background = ThreadPoolExecutor(1, "kvtier-background")
        self.running = 0

    async def run(self, fn: Callable[..., T], *args: Any, background: bool = False) -> T:
        """The result of fn(*args) in a worker thread; a cancelled caller is let go only when fn has ended."""
        pool = self._background if background else self._urgent
        future = asyncio.get_running_loop().run_in_executor(pool, fn, *args)
        self.running += 1
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await drained(future)
            raise
        finally:
            self.running -= 1

    async def share(self, fn: Callable[..., T], parts: Iterable[Any], *args: Any) -> list[T]:
        """fn(*args, part) of every part, side by side; ends, however it ends, only when all of them have."""
        done = await asyncio.gather(*(self.run(fn, *args, part) for part in parts), return_exceptions=True)
        results = []
        for each in done:
            if isinstance(each, BaseException):
                raise each
            results.append(each)
        return results

    async def checksums(self, items: list[Views], item_bytes: int) -> list[int]:
        """xxh3-64 of each item of `item_bytes` bytes."""
        if len(items) * item_bytes <= INLINE_BYTES:
            return digests(items)
        parts = await self.share(digests, batches(items, lambda _: item_bytes))
        return [total for part in parts for total in part]

    def close(self) -> None:
        """Wait for what runs and stop the threads."""
        self._urgent.shutdown(wait=True, cancel_futures=True)
        self._background.shutdown(wait=True, cancel_futures=True)


async def drained(future: asyncio.Future[Any]) -> None:
    """Wait for a future whatever happens to the waiting task, leaving its result alone."""
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            continue
