"""Whether a process that the kernel does not let us watch still maps the arenas.

It is given open file descriptions of its own, each with a lock on one byte. Such a lock goes with the last descriptor
and the last mapping of its description, so that whether it is there says whether the process may still write.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Sequence

_FLOCK = struct.Struct("hhqqi4x")


def lend(fds: Sequence[int], mark: int) -> list[int]:
    """Descriptors of the same memory that hold lock `mark`, to be sent and closed. Raises OSError."""
    lent: list[int] = []
    try:
        for fd in fds:
            lent.append(os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC))
            fcntl.fcntl(lent[-1], fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, mark, 1, 0))
    except BaseException:
        for fd in lent:
            os.close(fd)
        raise
    return lent


def mapped(fds: Sequence[int], mark: int) -> bool:
    """Whether what was lent of them is still open or mapped somewhere."""
    ask = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, mark, 1, 0)
    return any(_FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, ask))[0] != fcntl.F_UNLCK for fd in fds)
