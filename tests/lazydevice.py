"""A device that does queued work only when somebody waits, in a random order that the streams and events allow."""

from __future__ import annotations

import ctypes
import random
import sys
from collections import deque
from pathlib import Path
from typing import Any

from kvtier.device.base import Stream
from kvtier.device.host import HostDevice, Work, do
from kvtier.device.ops import Op

Site = tuple[str, int]


def site() -> Site:
    """The line of kvtier or of the test that asked."""
    frame = sys._getframe(2)
    return Path(frame.f_code.co_filename).name, frame.f_lineno


class LazyEvent:
    """A place in a lazy stream."""

    def __init__(self, device: LazyDevice) -> None:
        self.device = device
        self.done = False

    def synchronize(self, timeout_s: float | None = None) -> bool:
        """Let the device work until it is reached; a stuck one never comes there."""
        if self.device.stuck:
            assert timeout_s is not None, "waits for ever"
            return False
        if self.device.asks(site()):
            self.device.work_until(lambda: self.done)
        return True


class LazyStream:
    """Work that waits to be done."""

    def __init__(self, device: LazyDevice) -> None:
        self.device = device
        self.queue: deque[tuple[str, Any]] = deque()
        self.pace = 1.0

    def record(self) -> LazyEvent:
        event = LazyEvent(self.device)
        self.queue.append(("record", event))
        return event

    def wait(self, event: Any) -> None:
        if self.device.asks(site()):
            self.queue.append(("wait", event))

    def synchronize(self) -> None:
        if self.device.asks(site()):
            self.device.work_until(lambda: not self.queue)

    def add(self, work: Work) -> None:
        self.queue.append(("work", work))
        self.device.maybe_work()

    @property
    def ready(self) -> bool:
        """Whether the next thing can be done."""
        return bool(self.queue) and (self.queue[0][0] != "wait" or self.queue[0][1].done)

    def step(self) -> None:
        """Do the next thing."""
        kind, what = self.queue.popleft()
        if kind == "work":
            what()
        elif kind == "record":
            what.done = True


class LazyDevice(HostDevice):
    """`without`: the line whose wait is left out."""

    def __init__(self, seed: int, without: Site | None = None) -> None:
        self.random = random.Random(seed)
        self.eager = self.random.choice([0.0, 0.0, 0.2, 0.6])
        self.without = without
        self.sites: set[Site] = set()
        self.streams: list[LazyStream] = []
        self.stuck = False

    def asks(self, where: Site) -> bool:
        """Note a wait; False where it is the one that is left out."""
        self.sites.add(where)
        return where != self.without

    def stream(self, *, urgent: bool = False) -> Stream:
        self.streams.append(LazyStream(self))
        return self.streams[-1]

    def copy(self, target: int, source: int, size: int, stream: Any) -> None:
        stream.add(lambda: ctypes.memmove(target, source, size) and None)

    def launch(self, op: Op, stream: Any, blocks: int = 0) -> None:
        stream.add(lambda: do(op))

    def step(self) -> bool:
        """One thing of a random stream; False where all wait."""
        assert not self.stuck, "waits for ever"
        ready = [stream for stream in self.streams if stream.ready]
        if ready:
            self.random.choices(ready, [stream.pace for stream in ready])[0].step()
        return bool(ready)

    def work_until(self, reached: Any) -> None:
        """Work until something is reached, and perhaps a little longer."""
        for stream in self.streams:
            stream.pace = 10 ** self.random.uniform(-3, 0)  # some are far behind the others
        while not reached():
            assert self.step(), "streams wait for each other"
        self.maybe_work()

    def maybe_work(self) -> None:
        """A device may also work when nobody waits."""
        while not self.stuck and self.random.random() < self.eager and self.step():
            pass
