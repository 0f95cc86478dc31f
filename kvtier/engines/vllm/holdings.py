"""What the scheduler's side of the connector holds of the daemon for its workers, and how it is let go: in a thread."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from kvtier.client import Lease, Reservation
from kvtier.engines.vllm.messages import Done

WRITE_S: Final = 30.0
"""A reservation that is not served by then never will be."""
LOOKED_AT: Final = 8
"""Reservations looked at in a step, oldest first."""


class Holdings:
    """Leases that workers read and reservations that they write."""

    def __init__(self) -> None:
        self._back = ThreadPoolExecutor(1, "kvtier-back")  # what frees room does not queue behind what waits for it
        self._leases: dict[int, tuple[Lease, int]] = {}
        """And how many workers still read them."""
        self._reservations: dict[int, tuple[Reservation, float]] = {}
        """Oldest first, and since when."""
        self._drops: deque[bytes] = deque()

    def lend(self, lease: Lease, times: int) -> None:
        """So many workers read a lease."""
        self._leases[lease.number] = (lease, times)

    def promise(self, held: Reservation) -> None:
        """Workers write a reservation."""
        self._reservations[held.number] = (held, time.monotonic())

    def heard(self, done: Done) -> None:
        """Workers have read leases, or given up reservations."""
        for number, times in done.leases.items():
            lease, left = self._leases.pop(number, (None, 0))
            if lease is not None and left > times:
                self._leases[number] = (lease, left - times)
            else:
                self.release(lease)
        for number in done.served:
            self._reservations.pop(number, None)
        for number in done.dropped:
            self.abort(self._reservations.pop(number, (None, 0))[0])

    def drops(self) -> tuple[bytes, ...]:
        """Reservations that the workers are to give up, those among them that nobody has written for long."""
        for number, (held, since) in list(self._reservations.items())[:LOOKED_AT]:
            if time.monotonic() - since > WRITE_S:  # some worker joined too late to be its writer
                self._reservations.pop(number)
                self.abort(held)
        return tuple(self._drops.popleft() for _ in range(len(self._drops)))  # threads add to it meanwhile

    def release(self, lease: Lease | None) -> None:
        """Give back a lease that no worker reads."""
        self._give_back(None if lease is None or not lease.number else lease.release)

    def abort(self, held: Reservation | None) -> None:
        """Give up a reservation here, and in the workers with the next step."""
        if held is not None and held.number:
            self._drops.append(held.share())
            self._give_back(held.abort)

    def release_found(self, future: Future[Lease]) -> None:
        """Give back what a look-up leases that nobody waits for any more."""
        if not future.cancelled() and future.exception() is None:
            self.release(future.result())

    def abort_found(self, future: Future[Reservation]) -> None:
        """Give up what is reserved for nobody any more."""
        if not future.cancelled() and future.exception() is None:
            self.abort(future.result())

    def close(self) -> None:
        """End the thread."""
        self._back.shutdown(cancel_futures=True)

    def _give_back(self, verb: Callable[[], None] | None) -> None:
        """Let go in the thread."""
        if verb is not None:
            self._back.submit(verb)
