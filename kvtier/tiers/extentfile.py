"""The extent file: bytes between 4 KiB-aligned slots and cells, past the page cache where the file system allows.

Neighbouring cells go in one vectored call; a tail that is no multiple of 4 KiB goes through an aligned scratch
block, so nothing outside the given views is read or written.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from kvtier.tiers.cells import BLOCK
from kvtier.tiers.records import View
from kvtier.types import align_up

IO_BYTES: Final = 4 << 20
"""No single call moves more, so that a waiting read is never far behind a write."""
SMALL_IO_BYTES: Final = 512 << 10
SHARES: Final = 4
"""Calls that a transfer is cut into: fewer would leave lanes idle, more cost a thread's waking each."""
IO_VIEWS: Final = 512
SPARE_PARTS: Final = 4
"""One part in so many of a slab's bytes is left to the catalogue, which changes with all that is stored or freed."""
NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


_PUNCH_HOLE: Final = 0x02 | 0x01  # the file keeps its size
_libc = ctypes.CDLL(None, use_errno=True)  # its calls let go of the GIL
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def _punch(fd: int, offset: int, size: int) -> None:
    """Take the blocks of a range away from a file: it reads as zeros. Raises OSError."""
    if _libc.fallocate(fd, _PUNCH_HOLE, offset, size):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


class Calls:
    """The system calls that touch the extents, in one place so that tests can make them fail."""

    pwritev = staticmethod(os.pwritev)
    preadv = staticmethod(os.preadv)
    fdatasync = staticmethod(os.fdatasync)
    fsync = staticmethod(os.fsync)
    fallocate = staticmethod(os.posix_fallocate)
    punch = staticmethod(_punch)


class Piece(NamedTuple):
    """Bytes that lie together both in the file and in memory."""

    offset: int
    view: View
    owner: int
    """Which request the bytes belong to."""


class Io(NamedTuple):
    """One vectored call."""

    offset: int
    views: list[View]
    size: int
    owners: frozenset[int]


class Scratch:
    """Aligned blocks for what cannot go directly, and where each one's bytes belong."""

    def __init__(self) -> None:
        self._moves: list[tuple[View, View]] = []

    def stand_in(self, view: View) -> View:
        """An aligned, zero-padded buffer for a view that is not aligned itself."""
        buffer: View = np.frombuffer(mmap.mmap(-1, align_up(view.size)), np.uint8)
        self._moves.append((view, buffer[: view.size]))
        return buffer

    def fill(self) -> None:
        """Before a write: the views' bytes into their stand-ins."""
        for view, buffer in self._moves:
            np.copyto(buffer, view)

    def spill(self) -> None:
        """After a read: the stand-ins' bytes into the views."""
        for view, buffer in self._moves:
            np.copyto(view, buffer)


def _fits(view: View) -> bool:
    """Whether O_DIRECT takes a view as it is.

    `__array_interface__` has the address too, but makes a dict of fresh names: the interpreter's table of interned
    names is then built anew, 2 MB at a time, in the heap of one thread after the other.
    """
    return view.size % BLOCK == 0 and view.ctypes.data % BLOCK == 0


def _aligned(view: View, scratch: Scratch) -> Iterator[View]:
    """Views that O_DIRECT takes, covering this one and its padding."""
    whole = view.size - view.size % BLOCK
    if view.ctypes.data % BLOCK:
        whole = 0
    if whole:
        yield view[:whole]
    if whole < view.size:
        yield scratch.stand_in(view[whole:])


def pieces(
    views: Sequence[View], cells: Sequence[int], cell_bytes: int, owner: int, scratch: Scratch
) -> Iterator[Piece]:
    """The bytes of one item, cut where either its memory or its cells end."""
    if len(cells) == 1 and len(views) == 1 and views[0].size <= IO_BYTES and _fits(views[0]):
        yield Piece(cells[0] * BLOCK, views[0], owner)
        return
    at, end, cell = 0, 0, -1
    for whole in views:
        for view in _aligned(whole, scratch):
            done = 0
            while done < view.size:
                if at == end:
                    cell += 1
                    at = cells[cell] * BLOCK
                    end = at + cell_bytes
                size = min(view.size - done, end - at, IO_BYTES)
                yield Piece(at, view[done : done + size], owner)
                at += size
                done += size


def share(total: int) -> int:
    """How large the calls of a transfer of so many bytes should be for all lanes to have work until its end."""
    return min(max(align_up(total // SHARES), SMALL_IO_BYTES), IO_BYTES)


def join(parts: Iterable[Piece], limit: int = IO_BYTES) -> list[Io]:
    """Few large calls out of many pieces: sorted by offset, neighbours joined up to a limit of bytes."""
    out: list[Io] = []
    views: list[View] = []
    owners: set[int] = set()
    start = end = 0
    for offset, view, owner in sorted(parts, key=lambda piece: piece.offset):
        if views and (offset != end or end - start + view.size > limit or len(views) >= IO_VIEWS):
            out.append(Io(start, views, end - start, frozenset(owners)))
            views, owners = [], set()
        if not views:
            start = end = offset
        views.append(view)
        owners.add(owner)
        end += view.size
    if views:
        out.append(Io(start, views, end - start, frozenset(owners)))
    return out


class Extents:
    """The open extent file. Its methods may be called from any thread; all but the constructor release the GIL."""

    def __init__(
        self, path: Path, size: int, slab_bytes: int, *, direct: bool = True, calls: Calls | None = None
    ) -> None:
        self._calls = calls or Calls()
        self.slab_bytes = slab_bytes
        self._backed: set[int] = set()
        self._backing = threading.Lock()
        self._syncing = threading.Lock()
        self.lost = 0
        """How often a sync failed: the kernel tells a loss to one of them, and takes it for written from then on."""
        self._fd, self.direct = _open(path, direct)
        try:
            if os.fstat(self._fd).st_size != size:
                os.ftruncate(self._fd, size)
        except OSError:
            os.close(self._fd)
            raise

    def back(self, slab: int) -> None:
        """Have the file system set aside room for a slab, once per process; raises OSError where there is none.

        Where too little would be left for the catalogue there is none.
        """
        if slab in self._backed:
            return
        with self._backing:
            if slab not in self._backed:
                self._set_aside(slab * self.slab_bytes)
                self._backed.add(slab)

    def _set_aside(self, offset: int) -> None:
        try:
            self._take(offset)
        except OSError as error:
            if error.errno in NO_ROOM:  # what a file system found before it had no more, the file keeps
                for hole, size in self._holes(offset):
                    self._calls.punch(self._fd, hole, size)
            raise

    def _take(self, offset: int) -> None:
        before = self.file_bytes
        self._calls.fallocate(self._fd, offset, self.slab_bytes)
        left = os.fstatvfs(self._fd)
        if self.file_bytes > before and left.f_bavail * left.f_frsize < self.slab_bytes // SPARE_PARTS:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _holes(self, offset: int) -> Iterator[tuple[int, int]]:
        """(offset, bytes) in the slab that begins there of what was never written to."""
        at, end = offset, offset + self.slab_bytes
        while at < end and (hole := os.lseek(self._fd, at, os.SEEK_HOLE)) < end:
            try:
                at = os.lseek(self._fd, hole, os.SEEK_DATA)
            except OSError as error:
                if error.errno != errno.ENXIO:  # no data behind it
                    raise
                at = end
            yield hole, min(at, end) - hole

    def backed(self, slab: int) -> bool:
        """Whether this process knows that the file system has room behind a slab."""
        return slab in self._backed

    def discard(self, slab: int, gaps: Iterable[tuple[int, int]]) -> None:
        """Make (offset, bytes) ranges of a slab read as zeros; where they cannot be punched out they are overwritten.

        Raises OSError. Durable after `settle`; the slab is backed again before the next write to it.
        """
        with self._backing:
            self._backed.discard(slab)
            for offset, size in gaps:
                try:
                    self._calls.punch(self._fd, offset, size)
                except OSError as error:
                    if error.errno not in {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}:
                        raise
                    self._blank(offset, size)

    def _blank(self, offset: int, size: int) -> None:
        """Overwrite a range with zeros."""
        zeros: View = np.frombuffer(mmap.mmap(-1, min(size, IO_BYTES)), np.uint8)
        for at in range(0, size, IO_BYTES):
            part = zeros[: min(IO_BYTES, size - at)]
            self.write(Io(offset + at, [part], part.size, frozenset()))

    def settle(self) -> None:
        """The file and where its blocks are, on the device; raises OSError."""
        self._synced(self._calls.fsync)

    def _synced(self, call: Callable[[int], None]) -> None:
        with self._syncing:
            try:
                call(self._fd)
            except OSError:
                self.lost += 1
                raise

    @property
    def file_bytes(self) -> int:
        """Bytes that the file system has set aside."""
        return os.fstat(self._fd).st_blocks * 512

    def write(self, io: Io) -> None:
        """All bytes of one call to the file; raises OSError."""
        _whole(self._calls.pwritev, self._fd, io)

    def read(self, io: Io) -> None:
        """All bytes of one call from the file; raises OSError, EIO where the file ends early."""
        _whole(self._calls.preadv, self._fd, io)
        if not self.direct:
            os.posix_fadvise(self._fd, io.offset, io.size, os.POSIX_FADV_DONTNEED)

    def sync(self) -> None:
        """Everything written before this call is on the device when it returns; raises OSError."""
        self._synced(self._calls.fdatasync)
        if not self.direct:
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the file; no call may be under way."""
        os.close(self._fd)


def _open(path: Path, direct: bool) -> tuple[int, bool]:
    """A descriptor and whether it passes the page cache by."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    if direct:
        with contextlib.suppress(OSError):
            fd = os.open(path, flags | os.O_DIRECT, 0o600)
            try:
                probe = mmap.mmap(-1, BLOCK)
                os.preadv(fd, [probe], 0)
            except OSError:
                os.close(fd)
                raise
            return fd, True
    return os.open(path, flags, 0o600), False


def _whole(call: object, fd: int, io: Io) -> None:
    """Repeat a vectored call until it has moved everything."""
    assert callable(call)
    done: int = call(fd, io.views, io.offset)
    while done < io.size:
        if (more := call(fd, _after(io.views, done), io.offset + done)) == 0:
            raise OSError(errno.EIO, "the file ends early")
        done += more


def _after(views: list[View], done: int) -> list[View]:
    """The views behind the first `done` bytes."""
    for at, view in enumerate(views):
        if done < view.size:
            return [view[done:], *views[at + 1 :]]
        done -= view.size
    return []
