"""Storing many pages in one go: while some are copied, room is made for the next and those before are committed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvtier import wire
from kvtier.client.caches import KeyPath, OpenCache
from kvtier.client.held import HeldReservation
from kvtier.client.layout import Bytes
from kvtier.client.link import Away, Start, Steps, Ticket, Wait
from kvtier.client.slots import Slots
from kvtier.types import Kind, KvtierError, bad

FIRST_BYTES: Final = 4 << 20
"""Room that is waited for before anything is copied."""
BATCH_BYTES: Final = 32 << 20
"""Committed at once: long to copy beside what a request costs, short beside a prompt."""

SLOW_BYTES_S: Final = 200e6
"""A copy that is slower than this counts as stuck."""


def putting(path: KeyPath, first: int, data: Sequence[Bytes], wait_ms: int) -> Steps[int]:
    """How many leading rows of `data` are served when all is done; see Path.put."""
    cache = path.cache
    pages = _pages(cache, data)
    width = sum(rows.shape[1] for rows in data)
    step = max(2, BATCH_BYTES // width)
    commits: list[tuple[int, Ticket[wire.Committed]]] = []
    if not pages:
        return 0
    asked = min(pages, max(2, FIRST_BYTES // width))
    joined, reply = yield from path._reserving(first, asked, (), wait_ms, device=False)  # noqa: SLF001 - one idea
    at = 0
    coming: Ticket[wire.Reserved] | None = None
    held = HeldReservation(cache, first, joined, reply)
    try:
        while True:
            end = at + held.pages
            if held.pages == asked and end < pages:
                asked = min(2 * asked, pages - end)  # a few large requests cost the daemon less than many small ones
                coming = yield Start(joined, path.next_room(first + end, asked, wait_ms), wire.Reserved)
            for lo in range(at, end, step):
                hi = min(lo + step, end)
                _copy(held, first + lo, [rows[lo:hi] for rows in data])
                commits.append((at, (yield Start(joined, held.commit_now(first + lo, hi - lo), wire.Committed))))
            if coming is None:
                break
            ticket, coming = coming, None
            at, held = end, HeldReservation(cache, first + end, joined, (yield Wait(ticket, patient=False)))
    except (Away, KvtierError):
        yield from held._aborting()  # noqa: SLF001
        if coming is not None and joined.alive:
            held = HeldReservation(cache, first + end, joined, (yield Wait(coming, patient=False)))
            yield from held._aborting()  # noqa: SLF001
        raise
    served = 0
    for at, each in commits:
        done: wire.Committed = yield Wait(each, patient=False)
        if at <= served:
            served = max(served, at + done.published)
    return served


def _copy(held: HeldReservation, page: int, parts: Sequence[Bytes]) -> None:
    """Write pages of every group; raises Away."""
    for group, rows in enumerate(parts):
        if not held.write_pages(group, page, rows, summed=True):
            raise Away("the reservation is lost")


def _pages(cache: OpenCache, data: Sequence[Bytes]) -> int:
    """Rows of each group; raises bad_request."""
    groups = cache.spec.groups
    if cache.spec.keyed or any(group.kind is not Kind.FULL for group in groups):
        raise bad("cache", "a token cache of full groups")
    if len(data) != len(groups) or len({len(rows) for rows in data}) != 1:
        raise bad("data", f"as many rows for each of {len(groups)} groups", [len(rows) for rows in data])
    for number, (group, rows) in enumerate(zip(groups, data, strict=True)):
        part = cache.slice_of(number)
        Slots.expect_rows(rows, f"data[{number}]", group.item_bytes if part is None else part.cells * group.cell_bytes)
    return len(data[0])
