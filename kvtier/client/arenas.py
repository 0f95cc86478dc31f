"""The daemon's arenas as this process sees them."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvtier.client.layout import Bytes
from kvtier.types import Code, KvtierError, bad
from kvtier.wire import ARENA_SHIFT, ArenaInfo

OFFSET_MASK: Final = (1 << ARENA_SHIFT) - 1
GRANULE: Final = 2 << 20
"""Whether this process has the arena's pages in its own page table is noted by pieces of this size."""
_MADV_POPULATE_READ: Final = 22
_PROT_NONE: Final = 0
_MAP_FIXED_NOREPLACE: Final = 0x100000
_HOLE: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED_NOREPLACE

_log = logging.getLogger("kvtier.client")
_libc = ctypes.CDLL(None)  # its calls let go of the GIL
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.mmap.restype = ctypes.c_void_p
_foreign: list[mmap.mmap] = []
"""In a child of fork: what must never be unmapped, since other memory lies there."""


class Arenas:
    """Mapped memfds by arena number.

    Children of fork do not inherit the mappings: the daemon watches this process only.
    """

    def __init__(self, infos: Sequence[ArenaInfo], fds: Sequence[int]) -> None:
        """Map each descriptor, which stays the caller's; raises KvtierError when one cannot be mapped."""
        if len(infos) != len(fds):
            raise KvtierError(Code.INTERNAL, f"{len(infos)} arenas came with {len(fds)} descriptors")
        self._maps: list[mmap.mmap] = []
        self._rows: dict[int, Bytes] = {}
        self._places: dict[int, tuple[int, int, Callable[[], None]]] = {}
        """Arenas in memory that only a device reaches: address, bytes, and what unmaps them."""
        self.raw: set[object] = set()
        """Who handed out addresses that no view stands for, and has not said that nothing touches them any more."""
        self._warm: set[int] = set()
        for info, fd in zip(infos, fds, strict=True):
            if not info.bytes:
                continue
            try:
                if os.fstat(fd).st_size < info.bytes:
                    raise KvtierError(Code.INTERNAL, f"arena {info.arena} is smaller than {info.bytes} bytes")
                mapped = mmap.mmap(fd, info.bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            except (OSError, ValueError) as exc:
                raise KvtierError(Code.IO, f"cannot map arena {info.arena}: {exc}") from None
            mapped.madvise(mmap.MADV_DONTFORK)
            self._maps.append(mapped)
            self._rows[info.arena] = np.frombuffer(mapped, np.uint8)

    def add(self, arena: int, mapped: mmap.mmap, row: Bytes) -> None:
        """One more arena, whose bytes are `row` of a mapping."""
        self._maps.append(mapped)
        self._rows[arena] = row

    def place(self, arena: int, address: int, size: int, unmap: Callable[[], None]) -> None:
        """One more, in memory that only a device reaches."""
        self._places[arena] = address, size, unmap

    def forget(self, arena: int) -> None:
        """An arena that is of no use after all."""
        self._rows.pop(arena, None)
        place = self._places.pop(arena, None)
        if place is not None:
            try:
                place[2]()
            except KvtierError as exc:  # a driver that fails: nobody here can do anything about it
                _log.warning("device memory stays mapped: %s", exc)

    def address(self, address: int, size: int) -> int:
        """Where `size` bytes of an arena are, as copies and kernels take it; raises KvtierError as `view` does."""
        place = self._places.get(address >> ARENA_SHIFT)
        at = address & OFFSET_MASK
        if place is not None and at + size <= place[1]:
            return place[0] + at
        return int(self.view(address, size).ctypes.data)

    def view(self, address: int, size: int) -> Bytes:
        """Writable view of `size` bytes; raises KvtierError where they are not in an arena."""
        row = self._rows.get(address >> ARENA_SHIFT)
        at = address & OFFSET_MASK
        if address >> ARENA_SHIFT in self._places:
            raise bad("view", "address(): only a device reaches these bytes")
        if row is None or at + size > len(row):
            raise KvtierError(Code.INTERNAL, f"the daemon named bytes outside its arenas: {address:#x}+{size}")
        return row[at : at + size]

    def block(self, address: int, count: int, slot_bytes: int) -> Bytes:
        """Writable view [count, slot_bytes] of slots that follow each other; raises KvtierError as `view` does."""
        return self.view(address, count * slot_bytes).reshape(count, slot_bytes)

    def warm(self, addresses: npt.NDArray[np.int64], slot_bytes: int) -> None:
        """Map slots that are about to be written in a few steps: a fault for each 4 KiB costs more than the copy.

        They have memory already, which is the daemon's; reading maps 64 KiB at once where writing maps 4.
        """
        for _, first, count in runs(np.sort(addresses), slot_bytes):
            lo, hi = first, first + count * slot_bytes
            inner = range(-(-lo // GRANULE), hi // GRANULE)
            cold = [granule for granule in inner if granule not in self._warm]
            if len(cold) == len(inner):
                self._populate(lo, hi)
            elif cold:
                self._populate(cold[0] * GRANULE, (cold[-1] + 1) * GRANULE)
            self._warm.update(cold)

    def _populate(self, lo: int, hi: int) -> None:
        """Map a range; kernels before 5.14 cannot, which costs only speed."""
        row = self._rows.get(lo >> ARENA_SHIFT)
        if row is not None and (lo & OFFSET_MASK) + hi - lo <= len(row):
            _libc.madvise(row.ctypes.data + (lo & OFFSET_MASK), hi - lo, _MADV_POPULATE_READ)

    def forked(self) -> None:
        """In a child of fork, which has not inherited the mappings, but the objects that will unmap their addresses.

        Nothing else may come to lie there before, least of all the arenas of the child's own connection.
        """
        self._places.clear()
        for mapped in self._maps:
            at, size = np.frombuffer(mapped, np.uint8).ctypes.data, len(mapped)
            if _libc.mmap(at, size, _PROT_NONE, _HOLE, -1, 0) != at:
                _foreign.append(mapped)

    def unmap(self) -> bool:
        """Unmap what neither a view nor an address in somebody's hands refers to; True when nothing is mapped."""
        self._rows.clear()
        if self.raw:
            return False
        for arena in list(self._places):
            self.forget(arena)
        kept = []
        for mapped in self._maps:
            try:
                mapped.close()
            except BufferError:
                kept.append(mapped)
        self._maps = kept
        return not kept


def runs(addresses: npt.NDArray[np.int64], slot_bytes: int) -> list[tuple[int, int, int]]:
    """(position, first address, count) of slots that follow each other without a gap; -1s are in no run."""
    if not len(addresses):
        return []
    apart = (np.diff(addresses) != slot_bytes) | (addresses[:-1] < 0)
    starts = np.concatenate(([0], np.flatnonzero(apart) + 1))
    counts = np.diff(starts, append=len(addresses))
    found = zip(starts.tolist(), addresses[starts].tolist(), counts.tolist(), strict=True)
    return [run for run in found if run[1] >= 0]
