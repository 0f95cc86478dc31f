"""How pages get between vLLM's paged KV and the daemon's memory: what both ways do (`torched`, `kernels`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np

from kvtier.client import Lease, Reservation
from kvtier.client.layout import Bytes
from kvtier.engines.vllm.messages import Blocks, Load


class Arrival(Protocol):
    """Pages on their way into blocks."""

    good: bool
    """Whether all of them are right, as far as is known when the load was begun."""
    pages: int

    def here(self) -> bool:
        """Whether none of its bytes moves any more, neither into blocks nor out of leased slots; does not block."""


class Arrived:
    """Pages that were copied at once."""

    def __init__(self, pages: int, *, good: bool) -> None:
        self.pages = pages
        self.good = good

    def here(self) -> bool:
        """They are."""
        return True


class Loading:
    """A load that is copied part by part."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.done = 0
        """Pages that were begun, or, where one failed, need not be."""
        self.good = True
        self._parts: list[Arrival] = []

    @property
    def begun(self) -> bool:
        """Whether nothing is left to begin."""
        return self.done >= self.load.pages

    def add(self, part: Arrival, pages: int) -> None:
        """The next pages are on their way; with one that is not right all ends."""
        self._parts.append(part)
        self.good = self.good and part.good
        self.done = self.done + pages if part.good else self.load.pages

    def here(self) -> bool:
        """Whether all is over; does not block."""
        self._parts = [part for part in self._parts if not part.here()]
        return self.begun and not self._parts


class Copies(Protocol):
    """One way, for all KV cache groups of a process. `load`, `save` and `fence` come from one thread."""

    aside: bool
    """Whether what `save` gives reads blocks when it is called."""
    uuid: bytes
    """Of the device whose kernels reach the daemon's device memory, where that is on it; empty: none do."""

    def load(self, lease: Lease, first: int, rows: Blocks, *, later: bool) -> Arrival:
        """Begin to copy a lease's pages from `first` on into blocks, each verified.

        What vLLM's stream does next begins after it, unless it comes `later`: then vLLM waits until it is `here`.
        """

    def save(self, held: Reservation, first: int, rows: Blocks) -> Callable[[], int | None]:
        """Begin to copy blocks into a reservation's pages from `first` on, after what vLLM's stream does so far.

        What it gives is called by the thread that ends saves: the pages that are written then, or None.
        """

    def fence(self) -> None:
        """What vLLM's stream does next may overwrite blocks of earlier saves, but those that are read `aside`."""

    def close(self) -> None:
        """Wait for what is in flight and let go of memory."""


def whole_items(lease: Lease, group: int, first: int, count: int) -> Iterator[Bytes]:
    """Rows of whole items, verified: in place, or where one lies in several slots, copied together."""
    cache = lease.cache
    if cache.groups[group].slots_per_item == 1:
        yield from lease.views(group, first, count)
        return
    for page in range(first, first + count):
        item = np.empty((1, cache.spec.groups[group].item_bytes), np.uint8)
        if not lease.read(group, page, item[0]):
            return
        yield item


def wanted(held: Reservation, group: int, first: int, count: int) -> list[tuple[int, int]]:
    """[begin, end) of the positions that this process is to write; one by one where an item lies in several slots."""
    if held.cache.groups[group].slots_per_item > 1:
        return [(at, at + 1) for at in range(count) if held.wants(group, first + at)]
    return [(at, at + len(pages)) for at, pages in held.views(group, first, count)]
