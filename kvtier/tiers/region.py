"""Memory of an engine's own, registered by descriptor: rows that the mover reads and writes."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from kvtier.types import bad

MAX_ROWS: Final = 1 << 31
IOV_MAX: Final = 1024
"""Buffers that the kernel takes in one call."""

Views = list[npt.NDArray[np.uint8]]


def _check(fd: int, offset: int, stride: int, rows: int) -> None:
    """Raise bad_request naming the first field that cannot be served."""
    if offset < 0:
        raise bad("offset", "0 or more", offset)
    if stride < 1:
        raise bad("stride", "a positive number", stride)
    if not 1 <= rows <= MAX_ROWS:
        raise bad("rows", f"1..{MAX_ROWS}", rows)
    try:
        status, flags = os.fstat(fd), fcntl.fcntl(fd, fcntl.F_GETFL)
    except OSError as error:
        raise bad("fd", "an open descriptor", error.strerror) from None
    if not stat.S_ISREG(status.st_mode):
        raise bad("fd", "a regular file or memfd")
    if flags & os.O_ACCMODE != os.O_RDWR or flags & os.O_APPEND:
        raise bad("fd", "a descriptor open for reading and writing, without O_APPEND")
    if offset + stride * rows > status.st_size:
        raise bad("rows", f"rows that end within the {status.st_size} bytes of the file", offset + stride * rows)


def _seals(fd: int) -> int:
    """The seals of a memfd; 0 for files that have none. Raises bad_request for those that stop all writing."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return 0
    if seals & (fcntl.F_SEAL_WRITE | 0x10):  # 0x10: F_SEAL_FUTURE_WRITE
        raise bad("fd", "a memfd that is not sealed against writing")
    return seals


class _Descriptor:
    """A duplicate of a descriptor, closed with its last user: a number closed under a worker may name another file."""

    def __init__(self, fd: int) -> None:
        self.number = os.dup(fd)

    def __del__(self) -> None:
        os.close(self.number)


class Region:
    """`rows` rows of `stride` bytes each at `offset` of a file, on a descriptor of this object's own.

    Mapped only where the file can never shrink: a truncated mapping would kill this process with SIGBUS. Others
    are read and written through the descriptor. `read` and `write` are for worker threads and keep no GIL while
    bytes move; those running at `close` still end well. Raises bad_request naming the field that is wrong.
    """

    def __init__(self, fd: int, offset: int, stride: int, rows: int, name: str, owner: object = None) -> None:
        _check(fd, offset, stride, rows)
        self.name = name
        self.owner = owner
        """The process whose memory it is."""
        self.offset = offset
        self.rows = rows
        self.row_bytes = stride
        self.mapped = bool(_seals(fd) & fcntl.F_SEAL_SHRINK)
        self._data: npt.NDArray[np.uint8] | None = None
        self._file: _Descriptor | None = None
        if not self.mapped:
            self._file = _Descriptor(fd)
            return
        if os.fstatvfs(fd).f_bsize != mmap.PAGESIZE:
            # A hole in huge pages faults with SIGBUS once the host's pool is empty, seal or no seal.
            raise bad("fd", "memory of ordinary pages, not a sealed huge-page memfd")
        skip = offset % mmap.ALLOCATIONGRANULARITY
        mapping = mmap.mmap(fd, skip + stride * rows, mmap.MAP_SHARED, offset=offset - skip)
        self._data = np.frombuffer(mapping, np.uint8)[skip:]

    def read(self, row: int, views: Views) -> None:
        """Fill the views, in order, with the row's first bytes. Raises OSError where the file has become shorter."""
        at, data = self._at(row, views), self._data
        if data is None:
            self._through(os.preadv, at, views)
            return
        for view in views:
            np.copyto(view, data[at : at + view.size])
            at += view.size

    def write(self, row: int, views: Views) -> None:
        """Put the views, in order, over the row's first bytes. Raises OSError where the file has become shorter."""
        at, data = self._at(row, views), self._data
        if data is None:
            self._through(os.pwritev, at, views)
            return
        for view in views:
            np.copyto(data[at : at + view.size], view)
            at += view.size

    def close(self) -> None:
        """Let go of the descriptor and the mapping; a second call does nothing."""
        self._file = self._data = None

    def _at(self, row: int, views: Views) -> int:
        """Where the row starts among the rows. Raises bad_request for a row or sizes that it does not have."""
        if not 0 <= row < self.rows:
            raise bad("row", f"0..{self.rows - 1}", row)
        size = sum(view.size for view in views)
        if size > self.row_bytes:
            raise bad("views", f"at most {self.row_bytes} bytes", size)
        return row * self.row_bytes

    def _through(self, call: Callable[..., int], at: int, views: Views) -> None:
        """All bytes of the views by preadv or pwritev, however many calls that takes."""
        file = self._file
        if file is None:
            raise OSError(errno.EBADF, f"region {self.name} is closed")
        at += self.offset
        if os.fstat(file.number).st_size < at + sum(view.size for view in views):
            raise self._short()  # a write would make the file longer again
        left = [view for view in views if view.size]
        while left:
            done = call(file.number, left[:IOV_MAX], at)
            if not done:
                raise self._short()
            at += done
            while left and done >= left[0].size:
                done -= left.pop(0).size
            if done:
                left[0] = left[0][done:]

    def _short(self) -> OSError:
        """The error of a file that ends before its rows do."""
        return OSError(errno.EIO, f"region {self.name} is shorter than its rows")
