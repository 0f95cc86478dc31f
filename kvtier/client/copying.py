"""Copies of whole pages between an engine's memory and slots, with their checksums, by two threads where it pays.

One thread copies as fast as one core reaches memory, and the checksum is on top of that; two are faster than one
memcpy. A call returns, or raises, when nothing of it is copied any more: its slots may be somebody else's then.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from math import inf
from typing import Final

import numpy as np
import xxhash

from kvtier.client.layout import Bytes

NEAR_BYTES: Final = 256 << 10
"""Bytes copied at once that are in the second cache still when they are summed."""
PAST_BYTES: Final = 1 << 20
"""From about here on memcpy writes past the caches."""
WIDE_BYTES: Final = 2 << 20
"""From here on a second thread helps: waking it takes as long as copying some 100 KiB."""
SHARE_BYTES: Final = 512 << 10
"""Either thread takes so much at a time: one may have to wait for a processor."""

Pair = tuple[Bytes, Bytes]
"""Rows of bytes that are copied, target first."""


def copy_rows(pairs: Sequence[Pair], *, summed: bool) -> list[int]:
    """Copy rows of bytes, and the xxh3-64 of each row's copy, one pair's after the other's; 0 where not `summed`."""
    work = _summed if summed else _plain
    if sum(target.nbytes for target, _ in pairs) < WIDE_BYTES:
        return [each for pair in pairs for each in work(*pair)]
    shares = deque(enumerate(_shares(pairs)))
    sums = [list[int]()] * len(shares)

    def some() -> None:
        """Take one share after another, until there are none."""
        while True:
            try:
                at, pair = shares.popleft()
            except IndexError:
                return
            try:
                sums[at] = work(*pair)
            except BaseException:
                shares.clear()  # the other thread need not go on
                raise

    _helper.beside(some)
    return [each for share in sums for each in share]


def _shares(pairs: Sequence[Pair]) -> Iterator[Pair]:
    """Some rows at a time."""
    for target, source in pairs:
        step = max(1, SHARE_BYTES // target.shape[1])
        for at in range(0, len(target), step):
            yield target[at : at + step], source[at : at + step]


def _plain(target: Bytes, source: Bytes) -> list[int]:
    np.copyto(target, source)
    return [0] * len(target)


def _summed(target: Bytes, source: Bytes) -> list[int]:
    """Small rows some at once, summed while they are near."""
    if target.shape[1] > NEAR_BYTES:
        return [_pieces.copy(to, row) for to, row in zip(target, source, strict=True)]
    step, sums = NEAR_BYTES // target.shape[1], []
    for at in range(0, len(target), step):
        part = target[at : at + step]
        np.copyto(part, source[at : at + step])
        sums += [xxhash.xxh3_64_intdigest(row) for row in part]
    return sums


class Pieces:
    """Copies large rows of bytes piece by piece, each summed while it is near, and finds out how large pieces pay.

    A small one is still near when it is summed, but some processors gain more where the copy goes past the caches.
    The first rows tell: each size has a few, and the one with the best counts.
    """

    def __init__(self, sizes: Sequence[int] = (NEAR_BYTES, PAST_BYTES), tries: int = 6) -> None:
        self._best = dict.fromkeys(sizes, inf)
        self._left = [*sizes] * tries

    def copy(self, target: Bytes, source: Bytes) -> int:
        """Copy a row of bytes; the xxh3-64 of the copy."""
        try:
            size = self._left.pop() if len(target) >= PAST_BYTES else self._size
        except IndexError:  # all are tried
            return self._copy(target, source, self._size)
        start = time.perf_counter()
        found = self._copy(target, source, size)
        self._best[size] = min(self._best[size], (time.perf_counter() - start) / max(1, len(target)))
        return found

    @property
    def _size(self) -> int:
        """The best so far."""
        return min(self._best, key=lambda size: self._best[size])

    @staticmethod
    def _copy(target: Bytes, source: Bytes, size: int) -> int:
        digest = xxhash.xxh3_64()
        for at in range(0, len(target), size):
            piece = target[at : at + size]
            np.copyto(piece, source[at : at + size])
            digest.update(piece.data)
        return digest.intdigest()


_pieces = Pieces()


# -- the second thread ------------------------------------------------------------------------------------------------


class _Helper:
    """One thread for the whole process, begun with the first large copy, and again in a child of fork."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    def forget(self) -> None:
        """The thread is not in this process."""
        self._pool = None

    def beside(self, work: Callable[[], None]) -> None:
        """Do work here and, if it comes to it in time, in the other thread too; returns when both are through."""
        job = self._begin(work)
        try:
            work()
        finally:
            _end(job)
        if job is not None and not job.cancelled():
            job.result()

    def _begin(self, work: Callable[[], None]) -> Future[None] | None:
        """Let the thread begin; None where nothing begins any more, as the interpreter ends."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "kvtier-copy")
        try:
            return self._pool.submit(work)
        except RuntimeError:
            return None


def _end(job: Future[None] | None) -> None:
    """Return when a job is over, whoever interrupts: the slots are not free before."""
    if job is None or job.cancel():
        return
    try:
        wait([job])
    finally:
        if not job.done():
            _end(job)


_helper = _Helper()
os.register_at_fork(after_in_child=_helper.forget)
