"""Copies of whole pages between an engine's memory and slots, with their checksums, by two threads where it pays.

One thread copies as fast as one core reaches memory, and the checksum is on top of that; two are faster than one
memcpy. A call returns, or raises, when nothing of it is copied any more: its slots may be somebody else's then.
"""

from __future__ import annotations

import _thread
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from math import inf
from queue import SimpleQueue
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
    return _Shares(pairs, work).copy()


class _Shares:
    """One copy, taken apart for two threads."""

    def __init__(self, pairs: Sequence[Pair], work: Callable[[Bytes, Bytes], list[int]]) -> None:
        self._work = work
        self._left = deque(enumerate(_shares(pairs)))
        self._sums = [list[int]()] * len(self._left)
        self._helping = threading.Lock()
        """Held by the other thread while it copies a share."""
        self._failed: list[BaseException] = []

    def copy(self) -> list[int]:
        """Do all of it; the sums of the rows."""
        try:
            try:
                _helper.begin(self._help)
                self._some()
            finally:
                self._end()
        finally:
            self._end()  # once more: an interrupt may come just before the first gets anywhere
        if self._failed:
            raise self._failed[0]
        return [each for share in self._sums for each in share]

    def _one(self) -> bool:
        """Copy a share; False where there is none left."""
        try:
            at, pair = self._left.popleft()
        except IndexError:
            return False
        self._sums[at] = self._work(*pair)
        return True

    def _some(self) -> None:
        """Copy one share after another, until there are none."""
        while self._one():
            pass

    def _help(self) -> None:
        """The same in the other thread, however late it comes to it."""
        try:
            more = True
            while more:
                with self._helping:
                    more = self._one()
        except BaseException as exc:  # noqa: BLE001 - raised by who asked for the copy
            self._left.clear()
            self._failed.append(exc)

    def _end(self) -> None:
        """Return when nothing is copied any more, whoever interrupts: the slots are not free before."""
        over = False
        try:
            self._left.clear()
            with self._helping:
                over = True
        finally:
            if not over:
                self._end()


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
    """One thread for the whole process, begun with the first large copy, and again in a child of fork.

    Not a pool: an interrupt amid a submit would leave a lock of its held, and the next copy would wait for it for good.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """The thread is not in this process."""
        self._work: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._begun = False

    def begin(self, work: Callable[[], None]) -> None:
        """Let the thread do work when it comes to it; never, where the system has no thread to give."""
        if not self._begun:
            self._begun = True
            try:
                _thread.start_new_thread(self._serve, (self._work,))
            except RuntimeError:
                self._begun = False
                return
        self._work.put(work)

    @staticmethod
    def _serve(work: SimpleQueue[Callable[[], None]]) -> None:
        while True:
            work.get()()


_helper = _Helper()
os.register_at_fork(after_in_child=_helper.forget)
