"""Calls of Linux for which libc has no function, by their numbers."""

from __future__ import annotations

import ctypes
import platform
from typing import Final

NUMBERS: Final = {
    "x86_64": {"mbind": 237, "set_mempolicy": 238, "get_mempolicy": 239, "sched_setattr": 314, "sched_getattr": 315},
    "aarch64": {"mbind": 235, "get_mempolicy": 236, "set_mempolicy": 237, "sched_setattr": 274, "sched_getattr": 275},
}
"""By machine; of others nothing is known."""

_libc = ctypes.CDLL(None)  # its calls let go of the GIL
_libc.syscall.restype = ctypes.c_long


def call(name: str, *args: object) -> bool:
    """Whether a call succeeded; containers may forbid it, and on machines whose numbers are not known none does."""
    number = NUMBERS.get(platform.machine(), {}).get(name)
    words = [ctypes.c_ulong(arg) if isinstance(arg, int) else arg for arg in args]
    return number is not None and not _libc.syscall(ctypes.c_long(number), *words)
