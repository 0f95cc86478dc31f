"""One host pool of HiCache's on a keyed cache: where its pages lie, and the copies between them and the daemon."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from kvtier.client import Cache
from kvtier.client.layout import Data
from kvtier.types import KvtierError, Presence

LOAD_MS: Final = 3000
STORE_MS: Final = 500
BATCH: Final = 256
BATCH_BYTES: Final = 64 << 20
"""Of one request: what is held while pages come from disk must leave room for them."""
QUICK_S: Final = 1e-4
ABSENT: Final = frozenset({Presence.MISS, Presence.PENDING})

Move = Callable[[Cache, Sequence[str], Any], int]
"""Moves leading pages between their memory and a cache; how many."""

_log = logging.getLogger("kvtier.sglang")


class Pool:
    """Pages of a pool under SGLang's hashes. Thread-safe; never raises: what cannot be done is a miss.

    `memory` is one of HiCache's host pools, which says where pages lie (`device.DevicePool`: of the GPU's).
    """

    def __init__(self, memory: Any, cache: Cache) -> None:
        self.memory = memory
        self.cache = cache

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Whether each page is there."""
        try:
            return [state not in ABSENT for state in self.cache.exists(0, names(keys))]
        except KvtierError:
            _log.exception("asking for pages")
            return [False] * len(keys)

    def load(self, keys: Sequence[str], indices: Any) -> list[bool]:
        """Copy pages into the pool's memory, up to the first that is missing or wrong.

        `indices`: the host slots of the pages' tokens, a page's in a row, as `alloc` of the pool gave them.
        """
        return self._move("loading", self._load, keys, indices, self.cache)

    def store(self, keys: Sequence[str], indices: Any, cache: Cache | None = None) -> list[bool]:
        """Copy pages out of the pool's memory; whether each is served then.

        `cache`: that of the weights that computed them, where it may not be the pool's any more.
        """
        return self._move("storing", self._store, keys, indices, cache or self.cache)

    def _move(self, doing: str, move: Move, keys: Sequence[str], indices: Any, cache: Cache) -> list[bool]:
        """Move pages, as many at once as one request takes, up to the first that is not; whether each was.

        All in a cache of one time, should weights change meanwhile.
        """
        done = 0
        try:
            pages = self._pages(indices, len(keys))
            with quick_turns:
                while done < len(pages):
                    part = self._part(done)
                    if not (more := move(cache, keys[part], pages[part])):
                        break
                    done += more
        except KvtierError:
            _log.exception("%s pages", doing)
        return [n < done for n in range(len(keys))]

    def _part(self, first: int) -> slice:
        """Pages from one on, as many as one request takes."""
        return slice(first, first + max(1, min(BATCH, BATCH_BYTES // self.cache.spec.groups[0].item_bytes)))

    def _pages(self, indices: Any, count: int) -> Any:
        """Each page's pieces of memory; none where the pool cannot say where just these pages lie."""
        if indices is None or not count or len(indices) != count * self.memory.page_size:
            return []
        pieces = pieces_of(self.memory, indices)
        each = len(pieces) // count
        return [pieces[at : at + each] for at in range(0, len(pieces), each)]

    def _load(self, cache: Cache, keys: Sequence[str], pages: Any) -> int:
        """Load as many leading pages as are there and may be held at once; how many."""
        with cache.acquire_keys(0, names(keys), wait_ms=LOAD_MS) as lease:
            read = (lease.read(0, number, pages[number]) for number in range(lease.pages))
            return sum(1 for _ in itertools.takewhile(bool, read))

    def _store(self, cache: Cache, keys: Sequence[str], pages: Any) -> int:
        """Store as many leading pages as there is room for now; how many."""
        with cache.reserve_keys(0, names(keys), wait_ms=STORE_MS) as held:
            for number in range(held.pages):
                held.write(0, number, pages[number])
            return held.commit()


class QuickTurns:
    """While pages are copied, threads take turns sooner: beside a busy scheduler each copy waits for one.

    At Python's 5 ms a batch of 128 pages of 128 KiB took 470 ms instead of 140.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before = 0.0

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(min(self._before, QUICK_S))
            self._inside += 1

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                sys.setswitchinterval(self._before)


quick_turns = QuickTurns()


def pieces_of(memory: Any, indices: Any) -> list[Data]:
    """Views of the memory of pages, in the order of a page's bytes."""
    pointers, sizes = memory.get_page_buffer_meta(indices)
    return [
        np.frombuffer((ctypes.c_uint8 * size).from_address(pointer), np.uint8)
        for pointer, size in zip(pointers, sizes, strict=True)
    ]


def names(keys: Sequence[str]) -> bytes:
    """SGLang's page hashes as keys of 32 bytes."""
    return b"".join(_name(key) for key in keys)


def _name(key: str) -> bytes:
    """SHA-256 in hex as it is; whatever else a key may be, its own digest."""
    if len(key) == 64:
        try:
            return bytes.fromhex(key)
        except ValueError:
            pass
    return hashlib.sha256(b"kvtier name of " + key.encode()).digest()
