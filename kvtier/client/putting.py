"""Storing many pages in one go: while some are copied, room is made for the next and those before are committed."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from typing import Final

from kvtier import wire
from kvtier.client.caches import KeyPath, OpenCache
from kvtier.client.held import SLOW_BYTES_S, HeldReservation
from kvtier.client.layout import Bytes
from kvtier.client.link import Away, Do, Given, Start, Steps, Ticket, Wait
from kvtier.client.slots import Slots
from kvtier.types import Kind, KvtierError, bad

FIRST_BYTES: Final = 4 << 20
"""Room that is waited for before anything is copied."""
BATCH_BYTES: Final = 32 << 20
"""Committed at once: long to copy beside what a request costs, short beside a prompt."""


def putting(path: KeyPath, first: int, data: Sequence[Bytes], wait_ms: int) -> Steps[int]:
    """How many leading rows of `data` are served when all is done; see Path.put."""
    cache = path.cache
    pages = _pages(cache, data)
    width = sum(rows.shape[1] for rows in data)
    step = max(2, BATCH_BYTES // width)
    if not pages:
        return 0
    asked = min(pages, max(2, FIRST_BYTES // width))
    given = yield from path._reserving(first, asked, (), wait_ms, device=False)  # noqa: SLF001 - one idea
    held = HeldReservation(cache, first, *given)
    path.refused = held.refused
    under_way = _UnderWay(given, held)
    at = served = 0
    try:
        while True:
            end = at + held.pages
            if held.pages == asked and end < pages:
                asked = min(2 * asked, pages - end)  # a few large requests cost the daemon less than many small ones
                room = path.next_room(first + end, asked, wait_ms)
                under_way.coming = yield Start(given.joined, room, wire.Reserved)
            for lo in range(at, end, step):
                hi = min(lo + step, end)
                yield Do(partial(_copy, held, first + lo, [rows[lo:hi] for rows in data]), (hi - lo) * width)
                commit = held.commit_now(first + lo, hi - lo)
                under_way.commits.append((at, held, (yield Start(given.joined, commit, wire.Committed))))
            if under_way.coming is None:
                break
            at, held = end, (yield from under_way.next_held(cache, first + end))
            path.refused = held.refused
        for at, each, ticket in under_way.commits:
            published = each.committed((yield Wait(ticket, patient=False)))
            if at <= served:
                served = max(served, at + published)
    except GeneratorExit:  # nobody does the steps any more: the link has dropped the connection
        raise
    except BaseException:
        yield from under_way.giving_back(cache)
        raise
    return served


class _UnderWay:
    """What a put holds, and has asked for."""

    def __init__(self, given: Given[wire.Reserved], first: HeldReservation) -> None:
        self.commits: list[tuple[int, HeldReservation, Ticket[wire.Committed]]] = []
        self.coming: Ticket[wire.Reserved] | None = None
        self._given = given
        self._held = [first]

    def next_held(self, cache: OpenCache, start: int) -> Steps[HeldReservation]:
        """Wait for the room that was asked for."""
        coming, self.coming = self.coming, None  # what comes of it after a cancelled wait is given back by the link
        reply = yield Wait(coming, patient=False)
        held = HeldReservation(cache, start, *self._given._replace(reply=reply))
        self._held.append(held)
        return held

    def giving_back(self, cache: OpenCache) -> Steps[None]:
        """Give back what is not committed; whatever made it fail is said, not that the daemon is away, too."""
        for held in self._held:
            with contextlib.suppress(Away, KvtierError):
                yield from held._aborting()  # noqa: SLF001 - one idea
        if self.coming is not None and self._given.joined.alive:
            with contextlib.suppress(Away, KvtierError):
                held = yield from self.next_held(cache, 0)
                yield from held._aborting()  # noqa: SLF001 - one idea


def _copy(held: HeldReservation, page: int, parts: Sequence[Bytes]) -> None:
    """Write pages of every group; raises Away."""
    for group, rows in enumerate(parts):
        if not held.write_pages(group, page, rows, summed=True):
            raise Away("the reservation is lost")


def slow_s(cache: OpenCache, data: Sequence[Bytes]) -> float:
    """Seconds after which copying this much counts as stuck; raises bad_request where it cannot be put."""
    _pages(cache, data)
    return sum(rows.nbytes for rows in data) / SLOW_BYTES_S


def _pages(cache: OpenCache, data: Sequence[Bytes]) -> int:
    """Rows of each group; raises bad_request."""
    groups = cache.spec.groups
    if cache.spec.keyed or any(group.kind is not Kind.FULL for group in groups):
        raise bad("cache", "a token cache of full groups")
    if not isinstance(data, list | tuple):
        raise bad("data", "a list with the rows of each group", type(data).__name__)
    if len(data) != len(groups) or len({len(rows) for rows in data}) != 1:
        raise bad("data", f"as many rows for each of {len(groups)} groups", [len(rows) for rows in data])
    for number, (group, rows) in enumerate(zip(groups, data, strict=True)):
        part = cache.slice_of(number)
        Slots.expect_rows(rows, f"data[{number}]", group.item_bytes if part is None else part.cells * group.cell_bytes)
    return len(data[0])
