"""Host memory that processes share: one sealed, sparse memfd per trust scope and NUMA node."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from kvtier.numa import bind
from kvtier.types import PAGE_ALIGN

HUGE_BYTES: Final = 2 << 20
"""Bytes of one huge page; larger slabs start and end on multiples of it."""
CHUNK_BYTES: Final = 8 << 20
"""Memory is faulted and punched in steps of this many bytes, so that neither holds anybody up for long."""
MEMINFO: Final = Path("/proc/meminfo")

_KEEP_SIZE: Final = 1
_PUNCH_HOLE: Final = 2
_MADV_POPULATE_WRITE: Final = 23
_MFD_NOEXEC_SEAL: Final = 8
_MAP_NORESERVE: Final = 0x4000

_libc = ctypes.CDLL(None, use_errno=True)  # its calls let go of the GIL
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def free_huge_bytes(meminfo: Path = MEMINFO) -> int:
    """Bytes of huge pages of 2 MiB that nobody holds or has reserved."""
    values = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    if int(values.get("Hugepagesize", "0 kB").split()[0]) << 10 != HUGE_BYTES:
        return 0
    return (int(values.get("HugePages_Free", "0")) - int(values.get("HugePages_Rsvd", "0"))) * HUGE_BYTES


def _memfd(name: str, huge: bool) -> int:
    """A sealable memfd; one that cannot be executed where the kernel knows that seal."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | (os.MFD_HUGETLB | os.MFD_HUGE_2MB if huge else 0)
    try:
        return os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create(name, flags)


def _raise_errno(what: str) -> None:
    """Raise OSError for the C call that just failed."""
    code = ctypes.get_errno()
    raise OSError(code, f"{what}: {os.strerror(code)}")


class Arena:
    """`size` bytes of address space of one scope, without memory until touched; mode 0600, size sealed.

    `huge` takes huge pages from the host's pool: a range must then be faulted before it is used. `node`
    binds the memory to a NUMA node where the kernel allows it (`bound` says). Raises OSError.
    """

    def __init__(self, scope: str, number: int, size: int, *, huge: bool = False, node: int | None = None) -> None:
        self.scope = scope
        self.number = number
        self.bytes = size
        self.huge = huge
        self.fd = _memfd(f"kvtier-{number}", huge)
        try:
            os.fchmod(self.fd, 0o600)  # the default 0777 lets another uid reopen it for writing through /proc
            os.ftruncate(self.fd, size)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            mapping = mmap.mmap(self.fd, size, mmap.MAP_SHARED | (_MAP_NORESERVE if huge else 0))
        except BaseException:
            os.close(self.fd)
            raise
        self.data: npt.NDArray[np.uint8] = np.frombuffer(mapping, np.uint8)
        self.bound = node is not None and bind(self.address, size, node)
        if not huge and size >= HUGE_BYTES:
            self._advise_huge(mapping)

    @property
    def address(self) -> int:
        """Where it begins in this process."""
        return int(self.data.ctypes.data)

    def fault(self, lo: int, hi: int) -> None:
        """Back [lo, hi) with memory charged to this process, contents unchanged; blocks. Raises OSError."""
        base = self.data.ctypes.data
        for at in range(lo, hi, CHUNK_BYTES):
            size = min(CHUNK_BYTES, hi - at)
            if not _libc.madvise(base + at, size, _MADV_POPULATE_WRITE):
                continue
            if ctypes.get_errno() != errno.EINVAL:
                _raise_errno("populate")
            if _libc.fallocate(self.fd, 0, at, size):  # kernels before 5.14
                _raise_errno("fallocate")

    def punch(self, lo: int, hi: int) -> None:
        """Give the memory of [lo, hi) back to the host, leaving zeros; blocks. Raises OSError."""
        for at in range(lo, hi, CHUNK_BYTES):
            if _libc.fallocate(self.fd, _PUNCH_HOLE | _KEEP_SIZE, at, min(CHUNK_BYTES, hi - at)):
                _raise_errno("punch")

    def close(self) -> None:
        """Let go of the descriptor and the mapping, which lasts for as long as somebody holds a view."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self.data = np.empty(0, np.uint8)

    @staticmethod
    def _advise_huge(mapping: mmap.mmap) -> None:
        """Ask for transparent huge pages: kernels built without them refuse, which costs only speed."""
        try:
            mapping.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise


def unit_of(size: int) -> int:
    """What a piece of memory of about `size` bytes is a whole number of: huge pages, or pages where it is smaller."""
    return HUGE_BYTES if size >= HUGE_BYTES else PAGE_ALIGN


def places_for(want: int, least: int, *, huge: bool = False) -> Iterator[tuple[int, int]]:
    """How a range of `want` bytes is looked for: alignments, and the fewest bytes that are taken at each.

    All of it between pages goes before a part of it at a huge page. `huge`: nothing but whole huge pages.
    """
    if huge:
        yield HUGE_BYTES, max(least, HUGE_BYTES)
        return
    if want % HUGE_BYTES == 0:
        yield HUGE_BYTES, max(least, want)
    yield PAGE_ALIGN, max(least, PAGE_ALIGN)
