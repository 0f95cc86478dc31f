"""One host pool of HiCache's on a keyed cache: where its pages lie, and the copies between them and the daemon."""

from __future__ import annotations

import ctypes
import hashlib
import logging
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from kvtier.client import Cache
from kvtier.client.layout import Data
from kvtier.types import KvtierError, Presence

LOAD_MS: Final = 3000
STORE_MS: Final = 500
ABSENT: Final = frozenset({Presence.MISS, Presence.PENDING})

_log = logging.getLogger("kvtier.sglang")


class Pool:
    """Pages of a host pool under SGLang's hashes. Thread-safe; never raises: what cannot be done is a miss."""

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
        good = 0
        try:
            pages = self._pages(indices, len(keys))
            with self.cache.acquire_keys(0, names(keys), wait_ms=LOAD_MS) as lease:
                while good < len(pages) and lease.read(0, good, pages[good]):
                    good += 1
        except KvtierError:
            _log.exception("loading pages")
        return [n < good for n in range(len(keys))]

    def store(self, keys: Sequence[str], indices: Any) -> list[bool]:
        """Copy pages out of the pool's memory; whether each is served then."""
        done = 0
        try:
            pages = self._pages(indices, len(keys))
            while done < len(pages) and (more := self._store(keys[done:], pages[done:])):
                done += more
        except KvtierError:
            _log.exception("storing pages")
        return [n < done for n in range(len(keys))]

    def _store(self, keys: Sequence[str], pages: list[list[Data]]) -> int:
        """Store as many leading pages as there is room for now; how many."""
        with self.cache.reserve_keys(0, names(keys), wait_ms=STORE_MS) as held:
            for number in range(held.pages):
                held.write(0, number, pages[number])
            return held.commit()

    def _pages(self, indices: Any, count: int) -> list[list[Data]]:
        """Each page's pieces of memory; none where the pool cannot say where just these pages lie."""
        if indices is None or not count or len(indices) != count * self.memory.page_size:
            return []
        pieces = pieces_of(self.memory, indices)
        each = len(pieces) // count
        return [pieces[at : at + each] for at in range(0, len(pieces), each)]


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
