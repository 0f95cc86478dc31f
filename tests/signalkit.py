"""Signals that have been taken note of before a test goes on."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

PATIENCE_S = 10.0


def send(pid: int, number: int) -> None:
    """A signal to a process. After SIGSTOP none of its threads runs any more: one in a call may answer meanwhile."""
    os.kill(pid, number)
    end = time.monotonic() + PATIENCE_S
    while number == signal.SIGSTOP and set(states(pid)) - set("TtZX"):
        assert time.monotonic() < end, f"process {pid} was not stopped"
        time.sleep(0.001)


def states(pid: int) -> str:
    """The states of its threads, a letter each, as proc(5) has them."""
    found = ""
    for each in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            found += each.read_text().rpartition(")")[2].split()[0]
    return found
