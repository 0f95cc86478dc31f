"""Worker threads with two lanes: reads overtake writes, and one thread is never given to writes."""

from __future__ import annotations

import logging
import threading
from collections import deque
from time import monotonic
from typing import Protocol

log = logging.getLogger("kvtier.disk")


class Job(Protocol):
    """Work for one thread; both methods report failure by themselves and raise nothing."""

    def run(self) -> None:
        """Do it."""

    def drop(self) -> None:
        """It will not be done: the tier closes."""


class Lanes:
    """`threads` workers for anything and one more for urgent jobs only."""

    def __init__(self, threads: int, name: str) -> None:
        self._limit = threads
        self._bulk: deque[Job] = deque()
        self._urgent: deque[Job] = deque()
        self._busy = 0  # bulk jobs running
        self._closing = False
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True) for number in range(threads + 1)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job, *, urgent: bool) -> None:
        """Queue a job; dropped at once where the lanes are closed."""
        with self._changed:
            if not self._closing:
                (self._urgent if urgent else self._bulk).append(job)
                self._changed.notify()
                return
        job.drop()

    def close(self, timeout_s: float) -> bool:
        """Drop what waits and let what runs end; False where a thread is still stuck in a call at the deadline."""
        with self._changed:
            self._closing = True
            waiting = [*self._urgent, *self._bulk]
            self._urgent.clear()
            self._bulk.clear()
            self._changed.notify_all()
        for job in waiting:
            job.drop()
        deadline = monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(deadline - monotonic(), 0))
        return not any(thread.is_alive() for thread in self._threads)

    def _next(self) -> tuple[Job, bool] | None:
        """Wait for a job this thread may run; None when closing."""
        with self._changed:
            while True:
                if self._urgent:
                    return self._urgent.popleft(), False
                if self._bulk and self._busy < self._limit:
                    self._busy += 1
                    return self._bulk.popleft(), True
                if self._closing:
                    return None
                self._changed.wait()

    def _work(self) -> None:
        while found := self._next():
            job, bulk = found
            try:
                job.run()
            except Exception:
                log.exception("a disk job broke its promise not to raise")
            del found, job  # the memory that it was about is not to be held until the next one comes
            if bulk:
                with self._changed:
                    self._busy -= 1
                    if self._bulk:
                        self._changed.notify()
