"""Calls of the kernel's by number."""

from __future__ import annotations

import ctypes
import os
import platform
import re
from pathlib import Path

import pytest

from kvtier import linux, turns

HEADERS = {
    "x86_64": (Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), Path("/usr/include/asm/unistd_64.h")),
    "aarch64": (Path("/usr/include/asm-generic/unistd.h"),),
}
"""Where distributions keep the numbers; aarch64 has those of all newer machines."""


@pytest.mark.parametrize("machine", linux.NUMBERS)
def test_numbers_are_those_of_the_kernels_headers(machine: str):
    """All names have one on each machine, the kernel's own where its headers are here."""
    mine = linux.NUMBERS[machine]
    assert mine.keys() == linux.NUMBERS["x86_64"].keys()
    header = next((path for path in HEADERS[machine] if path.exists()), None)
    if header is None:
        pytest.skip(f"no kernel headers of {machine} are here")
    theirs = dict(re.findall(r"^#define __NR_(\w+)\s+(\d+)", header.read_text(), re.MULTILINE))
    assert {name: int(theirs[name]) for name in mine} == mine


def test_calls_on_this_machine_do_what_they_are_named_for():
    """Read back by other means: a policy, its nice value; memory policies may be forbidden, in containers."""
    attributes = turns._Attributes()
    size = ctypes.sizeof(attributes)
    assert linux.call("sched_getattr", 0, ctypes.byref(attributes), size, 0)
    assert (attributes.policy, attributes.nice) == (os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0))
    assert linux.call("sched_setattr", 0, ctypes.byref(attributes), 0)
    mode = ctypes.c_int(-1)
    if linux.call("get_mempolicy", ctypes.byref(mode), None, 0, None, 0):
        assert mode.value >= 0


def test_a_machine_whose_numbers_are_not_known_is_asked_nothing(monkeypatch: pytest.MonkeyPatch):
    """Another machine's call of the same number would do anything."""
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert not linux.call("sched_getattr", 0, ctypes.byref(turns._Attributes()), 48, 0)
    assert turns.turn_ns() == 0
    assert not turns.short_turns()
