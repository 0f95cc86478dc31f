"""Makes durable what only host holds, or says by name what there is no room for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Final

from kvtier import wire
from kvtier.index import ANY, Node
from kvtier.store.cache import Cache
from kvtier.store.entries import GONE, settled
from kvtier.store.parts import Parts
from kvtier.store.persist import Persist
from kvtier.store.runs import unsaved_runs
from kvtier.types import Code, KvtierError, Tier

SLICE: Final = 64
"""Nodes looked at before other work on the loop has its turn: about a millisecond."""
BROKEN: Final = frozenset(Code) - {Code.NO_SPACE, Code.OVER_CAP}
"""Why pages were not written, other than for want of room."""
MOST_NAMED: Final = 3


async def make_durable(parts: Parts, caches: Iterable[Cache], wait_ms: int) -> wire.Ok:
    """The verb Flush: what is there of these caches. Raises no_space, over_cap, io."""
    deadline, caches = parts.deadline(wait_ms), [cache for cache in caches if not cache.retired]
    if parts.vram is not None and (late := await parts.vram.flush(caches, deadline)):
        raise KvtierError(Code.NO_SPACE, late)
    if failed := await flush(parts.persist, caches, deadline):
        raise failed
    return wire.Ok()


async def flush(persist: Persist, caches: Iterable[Cache], deadline: float) -> KvtierError | None:
    """Write what only host holds and wait for it; None when all that was there is durable, else why not.

    What disk gave up for want of room is left alone for a while, unless it was used or room was gained since: on a
    full disk it would push out something else and be pushed out again, flush after flush.
    """
    if persist.disk is None:
        return KvtierError(Code.IO, "there is no disk tier")
    wanted = set(caches)
    while True:
        before = persist.disk.shortages
        failed, tried = await _once(persist, wanted, deadline)
        known = tried and persist.disk.shortages == before
        if failed is None or known or asyncio.get_running_loop().time() > deadline:
            return failed
        # The file system had no room behind what was written to, of which nobody knew: it is known now. Or the disk
        # was sick when pages came to it, and is not any more.


async def _once(persist: Persist, wanted: set[Cache], deadline: float) -> tuple[KvtierError | None, bool]:
    """Write what there is and wait for it: what is amiss, and whether that is what came of trying."""
    assert persist.disk is not None
    if not await settled([e for e in persist.pending if e.cache in wanted], deadline):
        return _late(), True
    before = set(persist.pending)
    spare, spared, refused = _Spare(persist), False, False
    for cache in wanted:
        async for node, lo, hi in _unsaved(persist, cache):
            if persist.room.gave_up(node) and not spare.take(cache, (hi - lo) * sum(cache.item_bytes)):
                spared = True
            elif not persist.offer(cache, node, node.depth + lo, node.depth + hi):
                refused = True
    again = [e for e in persist.pending if e.cache in wanted and e not in before]
    if not await settled(again, deadline):
        return _late(), True
    failed = [e.failed for e in again if e.failed not in {"", GONE}]
    left = await _left(persist, wanted)
    if not failed and left is None:
        return None, True
    if broken := persist.disk.sick or next((reason for reason in failed if reason in BROKEN), ""):
        return KvtierError(Code.IO, broken), True
    return left or KvtierError(Code.IO, failed[0]), not refused and (spared or bool(failed))


def _late() -> KvtierError:
    return KvtierError(Code.IO, "the deadline came before the disk")


class _Spare:
    """Room that disk and quotas have gained since something was given up for want of it."""

    def __init__(self, persist: Persist) -> None:
        self._persist = persist
        self._left: dict[int, int] = {}

    def take(self, cache: Cache, nbytes: int) -> bool:
        """Whether so much of it is left for a cache; it is not any more then."""
        shares = {ANY, cache.index.share or ANY}
        for share in shares - self._left.keys():
            self._left[share] = self._persist.room.gained(share)
        if any(self._left[share] < nbytes for share in shares):
            return False
        for share in shares:
            self._left[share] -= nbytes
        return True


async def _unsaved(persist: Persist, cache: Cache) -> AsyncIterator[tuple[Node, int, int]]:
    """Published pages [lo, hi) of a node that only host holds and that are not on their way, parents first."""
    for seen, node in enumerate(cache.index.walk()):
        if not node.dead and not cache.retired:
            for lo, hi in unsaved_runs(cache, node):
                if not _all_coming(persist, cache, node, node.depth + lo, node.depth + hi):
                    yield node, lo, hi
        if seen % SLICE == SLICE - 1:
            await asyncio.sleep(0)


def _all_coming(persist: Persist, cache: Cache, node: Node, first: int, end: int) -> bool:
    """Whether all of the pages are on their way."""
    while first < end:
        entry = persist.coming(cache, node, first)
        if entry is None:
            return False
        first = entry.end
    return True


async def _left(persist: Persist, caches: Iterable[Cache]) -> KvtierError | None:
    """Which pages there was no room for, of which caches; None where all are on disk."""
    pages, names, over = 0, list[str](), True
    for cache in caches:
        mine = sum([hi - lo async for _, lo, hi in _unsaved(persist, cache)])
        if mine:
            pages += mine
            names.append(cache.id.hex()[:12])
            page = sum(map(cache.slot_cost, range(cache.index.groups)))
            over = over and persist.ways.quotas.over(cache, mine * page, Tier.DISK) > 0
    if not pages:
        return None
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    of = f"{', '.join(names[:MOST_NAMED])}{more}"
    if over:
        return KvtierError(Code.OVER_CAP, f"{pages} pages are beyond a quota on disk, of caches {of}")
    return KvtierError(Code.NO_SPACE, f"{pages} pages have no room on disk, of caches {of}")
