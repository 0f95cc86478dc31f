"""The serving thread asks the kernel for short turns on the processor: it is woken sooner beside busy engines.

Linux (6.12 and later) lets a thread that wakes go before one whose turns are longer. Each of the serving thread's takes
a fraction of a millisecond anyway. Measured beside an engine that stores without a rest, on two cores that others kept
busy too: 2.1 instead of 2.9 ms in the 99th percentile of matches.
"""

from __future__ import annotations

import ctypes
import os
from typing import Final

from kvtier.linux import call

TURN_NS: Final = 100_000
"""The shortest that there is."""


class _Attributes(ctypes.Structure):
    """struct sched_attr of sched_setattr(2)."""

    _fields_ = (
        ("size", ctypes.c_uint32), ("policy", ctypes.c_uint32), ("flags", ctypes.c_uint64), ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32), ("runtime", ctypes.c_uint64), ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64), ("util_min", ctypes.c_uint32), ("util_max", ctypes.c_uint32),
    )  # fmt: skip


def turn_ns(thread: int = 0) -> int:
    """How long the turns of a thread (0: the caller's) are; 0 where the kernel does not say."""
    return int(found.runtime) if (found := _read(thread)) is not None else 0


def short_turns() -> bool:
    """Ask for short turns of the calling thread; whether the kernel gives them.

    Threads that are begun by it later have them, too. One that was given another policy keeps that.
    """
    attributes = _read(0)
    if attributes is None or attributes.policy != os.SCHED_OTHER:
        return False
    attributes.runtime = TURN_NS
    call("sched_setattr", 0, ctypes.byref(attributes), 0)
    return turn_ns() == TURN_NS


def _read(thread: int) -> _Attributes | None:
    attributes = _Attributes()
    read = call("sched_getattr", thread, ctypes.byref(attributes), ctypes.sizeof(attributes), 0)
    return attributes if read else None
