"""What tests of the clients share: pages of known bytes, a daemon's own word, and interrupts at any moment."""

from __future__ import annotations

import contextlib
import dis
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache as cached
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np

import signalkit
from kvtier import wire
from kvtier.client import page_keys
from kvtier.client.link import Aside, Steps
from kvtier.demo.daemon import Daemon
from kvtier.identity import CacheSpec, GroupSpec
from kvtier.types import Kind, KvtierError

ROWS = 16
"""Of a region in an engine's own memory."""
PAGE = 4
FULL = GroupSpec(Kind.FULL, 2, 4, 4096)
RNG = np.random.default_rng(7)
BLOB = RNG.integers(0, 256, 8 << 20, dtype=np.uint8)
DEADLINE = 5.0
"""Seconds in which anything that waits for another process must have happened."""


def spec_of(*groups: GroupSpec, **more: Any) -> CacheSpec:
    """A cache of small pages."""
    fields = {"model": "m", "fingerprint": b"f" * 16, "kv_dtype": "bf16", "page_tokens": PAGE, "groups": groups}
    return CacheSpec(**(fields | more))


SPEC = spec_of(FULL)
KEYED = spec_of(FULL, key_bytes=16)


def content(seed: int, size: int) -> np.ndarray:
    """Bytes that only this seed has."""
    out = BLOB[:size].copy()
    out[:8] = np.frombuffer(np.int64(seed).tobytes(), np.uint8)
    return out


def keys(pages: int, spec: CacheSpec = SPEC, first: int = 0) -> bytes:
    """Keys of a path of distinct pages."""
    return page_keys(spec, np.arange(first, first + pages * PAGE))


def put(cache: Any, pages: int, seed: int = 0) -> None:
    """Store pages of the path, group 0."""
    with cache.match(keys(pages)).reserve(0, pages, wait_ms=2000) as reserved:
        assert reserved.pages == pages, reserved.refused
        for page in range(pages):
            assert reserved.write(0, page, content(seed + page, FULL.item_bytes))
        assert reserved.commit() == pages


def right(lease: Any, pages: int, seed: int = 0) -> bool:
    """Whether a lease has these pages, byte for byte."""
    out = np.empty(FULL.item_bytes, np.uint8)
    return lease.pages == pages and all(
        lease.read(0, page, out) and np.array_equal(out, content(seed + page, out.size)) for page in range(pages)
    )


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that is stopped meanwhile, as a daemon that hangs."""
    signalkit.send(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):  # killed meanwhile
            os.kill(pid, signal.SIGCONT)


def until(condition: Any) -> None:
    """Wait until it holds."""
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def status(daemon: Daemon) -> dict[str, Any]:
    """What the daemon says of itself."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(daemon.socket.with_name("admin.sock")))
        sock.sendall(wire.request_frame(wire.Status(), 1))
        raw = b""
        while len(raw) < 16 or len(raw) < 16 + wire.parse_header(raw[:16]).length:
            raw += sock.recv(1 << 16)
    return wire.decode_reply(wire.VERBS[wire.Status], raw[16:], wire.Info).data


TRACED = (str(Path(wire.__file__).parent), threading.__file__)
"""Where calls are interrupted."""


class Interrupt(BaseException):
    """As a signal handler raises it."""


@cached
def _names(code: CodeType) -> dict[int, str]:
    """What a function does at each offset."""
    return {each.offset: each.opname for each in dis.get_instructions(code)}


def _in_destructor(frame: FrameType | None) -> bool:
    """Whether nothing that is raised there gets out."""
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


def interrupted(number: int, call: Callable[[], Any]) -> bool:
    """Whether a call came to its moment `number` (1: the first), at which it was interrupted.

    Moments are where CPython runs signal handlers: as a function begins, after calls, and at jumps back.
    """
    seen, before = 0, dict[int, str]()  # by frames' ids: the frames themselves would keep all that they refer to

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal seen
        if not frame.f_code.co_filename.startswith(TRACED) or _in_destructor(frame):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        name = _names(frame.f_code).get(frame.f_lasti, "") if event == "opcode" else ""
        was, before[id(frame)] = before.get(id(frame), ""), name
        if event == "call" or (event == "opcode" and (was.startswith("CALL") or name.startswith("JUMP_BACKWARD"))):
            seen += 1
            if seen == number:
                sys.settrace(None)
                raise Interrupt
        return trace

    old = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except Interrupt:
        return True
    finally:
        sys.settrace(old)
    return False


def answered(steps: Steps[Any], aside: Aside, reply: Any) -> Any:
    """What a client does next, once what it asked on a connection of its own has that answer."""
    try:
        aside.learn(reply, list)
    except KvtierError as exc:
        return steps.throw(exc)
    return steps.send(None)


def in_thread(call: Callable[[], Any]) -> Any:
    """What a call returns in another thread."""
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(call()))
    thread.start()
    thread.join()
    return got[0]


def in_child(work: Callable[[], bool]) -> int:
    """How a child of fork ends: 0 where its work is true."""
    child = os.fork()
    if not child:
        try:
            os._exit(0 if work() else 1)
        finally:
            os._exit(2)
    end = time.monotonic() + 30
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    return os.waitstatus_to_exitcode(ended[1])
