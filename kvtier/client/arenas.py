"""The daemon's host arenas as this process sees them."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import Final

import numpy as np

from kvtier.client.layout import Bytes
from kvtier.types import Code, KvtierError
from kvtier.wire import ARENA_SHIFT, ArenaInfo

OFFSET_MASK: Final = (1 << ARENA_SHIFT) - 1


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

    def view(self, address: int, size: int) -> Bytes:
        """Writable view of `size` bytes; raises KvtierError where they are not in an arena."""
        row = self._rows.get(address >> ARENA_SHIFT)
        at = address & OFFSET_MASK
        if row is None or at + size > len(row):
            raise KvtierError(Code.INTERNAL, f"the daemon named bytes outside its arenas: {address:#x}+{size}")
        return row[at : at + size]

    def unmap(self) -> bool:
        """Unmap what no view refers to any more; True when nothing is mapped."""
        self._rows.clear()
        kept = []
        for mapped in self._maps:
            try:
                mapped.close()
            except BufferError:
                kept.append(mapped)
        self._maps = kept
        return not kept
