"""Tells engines how much of a reservation is on disk and synced."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvtier.store.instance import Process
from kvtier.store.persist import Persist
from kvtier.store.reserve import Reservation
from kvtier.types import NO_COPY, Tier
from kvtier.wire import Durable


def told_durable(res: Reservation) -> Callable[[int], None] | None:
    """Tells the process that committed when the pages of its path up to some page are on disk."""
    process = res.committer
    if process is None or not process.events:
        return None
    return lambda end: process.notify(Durable(res.number, end - res.start))


def watch_keys(persist: Persist, res: Reservation) -> None:
    """Tell the process that committed, as they come to be on disk, how many leading keys of its reservation are."""
    process = res.committer
    if process is not None and process.events and not res.watched:
        _tell(persist, res, process)


def _tell(persist: Persist, res: Reservation, process: Process, *_: object) -> None:
    """Go past the keys that are on disk, say so, and wait for the first that is not."""
    before, index = res.durable, res.cache.index
    res.watched = False
    while res.durable < res.pages:
        node = res.nodes[res.durable]
        if node.dead or index.get(node, 0, Tier.DISK, node.edge[0]) == NO_COPY:
            entry = None if node.dead else persist.coming(res.cache, node, 0)
            if entry is not None:
                res.watched = True
                entry.done.add_done_callback(partial(_tell, persist, res, process))
            break
        res.durable += 1
    if res.durable > before:
        process.notify(Durable(res.number, res.durable))
