"""Write-behind: every page published in host goes to disk once, parents before children, and is reported durable.

Pages on their way are leased, so that neither eviction nor relocation nor a split can touch their slots or their place.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from kvtier.index import Node, Order
from kvtier.store.cache import Cache
from kvtier.store.ways import Ways
from kvtier.tiers.disk import DiskTier
from kvtier.tiers.ledger import PAGE_BITS
from kvtier.tiers.records import Item
from kvtier.types import NO_COPY, RUN_PAGES, Code, KvtierError, Tier

log = logging.getLogger("kvtier.persist")
RETRY_S = 0.05
MAX_QUEUED_PAGES = 1 << 20


class Entry:
    """Pages [first, end) of the path to `node`, to be written; `left` of them are not settled yet."""

    __slots__ = ("cache", "done", "end", "failed", "first", "left", "node", "notify")

    def __init__(self, cache: Cache, node: Node, first: int, end: int, notify: Callable[[int], None] | None) -> None:
        self.cache = cache
        self.node = node
        self.first = first
        self.end = end
        self.left = end - first
        self.failed = ""
        self.notify = notify
        self.done: asyncio.Future[str] = asyncio.get_running_loop().create_future()


class Persist:
    """Pages between host and disk. Without a disk tier every offer is refused."""

    def __init__(self, disk: DiskTier | None, ways: Ways) -> None:
        self.disk = disk
        self.ways = ways
        self.counts = ways.counts
        self.order = Order(Tier.DISK, ways.policy(Tier.DISK))
        self.caches: dict[Any, Cache] = {}
        self.queue: deque[Entry] = deque()
        self.pending: set[Entry] = set()
        self.queued_pages = 0
        self._moved = asyncio.Event()
        self._syncing = False

    def offer(
        self, cache: Cache, node: Node, first: int, end: int, notify: Callable[[int], None] | None = None
    ) -> bool:
        """Queue pages [first, end) of the path to `node` for writing; False when there is no working disk or no place.

        `notify(end)` is called once they are durable.
        """
        if self.disk is None or self.disk.sick or cache.retired or self.queued_pages + end - first > MAX_QUEUED_PAGES:
            return False
        entry = Entry(cache, node, first, end, notify)
        cache.index.lease(node)
        self.queue.append(entry)
        self.pending.add(entry)
        self.queued_pages += end - first
        self.pump()
        return True

    async def progress(self, deadline: float) -> bool:
        """Wait until some write ends; False at once when none runs, or at the deadline."""
        if not self.pending:
            return False
        self._moved.clear()
        left = deadline - asyncio.get_running_loop().time()
        try:
            await asyncio.wait_for(self._moved.wait(), max(0.0, left))
        except TimeoutError:
            return False
        return True

    async def flush(self, caches: Iterable[Cache], deadline: float) -> str:
        """Write what only host holds and wait for it; '' when all is durable, else why not."""
        if self.disk is None:
            return "there is no disk tier"
        wanted = set(caches)
        for cache in wanted:
            self._offer_unsaved(cache)
        waiting = [e for e in self.pending if e.cache in wanted]
        if waiting:
            left = deadline - asyncio.get_running_loop().time()
            _, late = await asyncio.wait([e.done for e in waiting], timeout=max(0.0, left))
            if late:
                return "the deadline came before the disk"
        failed = [e.failed for e in waiting if e.failed]
        return failed[0] if failed else ("" if not any(map(unsaved, wanted)) else self.disk.sick or "no room on disk")

    def _offer_unsaved(self, cache: Cache) -> None:
        """Queue every published page that only host holds and that is not on its way."""
        moving = [e for e in self.pending if e.cache is cache]
        for node in list(cache.index.walk()):
            runs = _unsaved_runs(cache, node)
            for lo, hi in runs:
                if not any(e.first <= node.depth + lo < e.end and _on_path(e.node, node) for e in moving):
                    self.offer(cache, node, node.depth + lo, node.depth + hi)

    # -- the way to disk -----------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Hand queued pages to the disk tier as long as it takes them."""
        while self.queue:
            entry = self.queue[0]
            if entry.first >= entry.end or entry.node.dead or entry.failed:
                self.queue.popleft()
                self._settle(entry, entry.end - entry.first, "" if not entry.node.dead else "gone")
                continue
            if not self._write_run(entry):
                return

    def _write_run(self, entry: Entry) -> bool:
        """Submit the next run of an entry; False when the disk cannot take it now."""
        disk = self.disk
        assert disk is not None
        end = min(entry.end, entry.first + RUN_PAGES)
        items, nbytes = self._items(entry, end)
        if not items:
            self._settle(entry, end - entry.first, "")
            entry.first = end
            return True
        if not self._parent_coming(entry):
            entry.failed = "the page before is not on disk"
            return True
        cache, first = entry.cache, entry.first
        keys, chains, parent = _names(cache, entry.node, first, end)
        done = self._completion(entry, first, end, items)
        if cache.disk is None:
            cache.disk = disk.open_cache(cache.id, cache.base, cache.scope, cache.epoch, cache.spec)
        if not disk.write(cache.disk, parent, 0 if cache.spec.keyed else first, keys, chains, items, done):
            self._make_room(entry, nbytes)
            return False
        entry.first = end
        return True

    def _items(self, entry: Entry, end: int) -> tuple[list[Item], int]:
        """What only host holds of the run's pages; nothing when every page is on disk already."""
        out: list[Item] = []
        nbytes = 0
        cache, first = entry.cache, entry.first
        for group in range(cache.index.groups):
            host = cache.gather(entry.node, group, first, end - first, Tier.HOST)
            disk = cache.gather(entry.node, group, first, end - first, Tier.DISK)
            sums = cache.gather_sums(entry.node, group, first, end - first)
            for page, handle in enumerate(host):
                if handle != NO_COPY and disk[page] == NO_COPY:
                    out.append(Item(page, group, sums[page], cache.views(group, handle)))
                    nbytes += cache.item_bytes[group]
        out.sort(key=lambda item: (item.page, item.group))
        return out, nbytes

    def _parent_coming(self, entry: Entry) -> bool:
        """Whether the page before the run is on disk, or ahead of it on the way there."""
        if self._parent_saved(entry.cache, entry.node, entry.first):
            return True
        node, _ = entry.cache.index.locate(entry.node, entry.first - 1)
        return any(not e.failed and _on_path(e.node, node) for e in self.pending)

    @staticmethod
    def _parent_saved(cache: Cache, node: Node, first: int) -> bool:
        """Whether disk holds the page before page `first` of the path to `node`."""
        if first == 0 or cache.spec.keyed:
            return True
        where, at = cache.index.locate(node, first - 1)
        return all(cache.index.get(where, at, Tier.DISK, g) != NO_COPY for g in cache.index.anchors)

    def _completion(self, entry: Entry, first: int, end: int, items: list[Item]) -> Callable[[int | None, str], None]:
        def done(run_id: int | None, error: str) -> None:
            if run_id is None:
                self.counts[f"refused_disk_{error}"] += end - first
            elif entry.node.dead:
                assert self.disk is not None
                self.disk.free([run_id << PAGE_BITS | page for page in sorted({i.page for i in items})])
                error = "gone"
            else:
                self._record(entry.cache, entry.node, first, items, run_id)
                self.counts["pages_written_disk"] += end - first
                self.counts["bytes_host_to_disk"] += sum(entry.cache.item_bytes[i.group] for i in items)
            self._settle(entry, end - first, error)
            self.pump()

        return done

    def _record(self, cache: Cache, node: Node, first: int, items: list[Item], run_id: int) -> None:
        """Note the disk copies of a run that is durable now."""
        index = cache.index
        again = set()
        for item in items:
            where, at = index.locate(node, first + item.page)
            if item.page in again or index.get(where, at, Tier.DISK, item.group) != NO_COPY:
                again.add(item.page)
                continue
            index.put(where, at, Tier.DISK, item.group, [run_id << PAGE_BITS | item.page], [item.sum])
        if again:
            assert self.disk is not None
            self.disk.free([run_id << PAGE_BITS | page for page in sorted(again)])

    def _settle(self, entry: Entry, pages: int, error: str) -> None:
        """Count pages of an entry as done; the last one lets its lease go."""
        entry.left -= pages
        entry.failed = entry.failed or error
        self.queued_pages -= pages
        if entry.left <= 0 and entry in self.pending:
            self.pending.discard(entry)
            entry.cache.release(entry.cache.index.unlease(entry.node), self.disk)
            entry.done.set_result(entry.failed)
            if entry.notify is not None and not entry.failed:
                entry.notify(entry.end)
        self._moved.set()

    # -- room on disk ----------------------------------------------------------------------------------------------

    def _make_room(self, entry: Entry, nbytes: int) -> None:
        """The disk refused a run: evict its coldest leaves, or fail the entry where nothing can go."""
        disk = self.disk
        assert disk is not None
        if disk.refusal == Code.BUSY:
            return  # a completion pumps again
        if disk.refusal != Code.NO_SPACE:  # loading, or closing
            asyncio.get_running_loop().call_later(RETRY_S, self.pump)
            return
        if not (self.evict(nbytes) or disk.freeing_bytes):
            entry.failed = Code.NO_SPACE
            self.counts["refused_disk_no_space"] += entry.end - entry.first
            asyncio.get_running_loop().call_soon(self.pump)
        elif not self._syncing:
            self._syncing = True
            disk.flush(self._synced)

    def _synced(self, *_: object) -> None:
        """Freed cells can be used again."""
        self._syncing = False
        self.pump()

    def evict(self, nbytes: int) -> bool:
        """Free at least `nbytes` of cold pages on disk; False when nothing is free to go."""
        disk = self.disk
        assert disk is not None
        freed = 0
        while freed < nbytes:
            taken = self.order.pop(self.ways.now())
            if taken is None:
                break
            index, node = taken
            cache = self.caches[index]
            lo, hi = index.tail(node, Tier.DISK, self.order.policy.share(node))
            if lo == hi:
                continue
            for dropped in index.drop(node, lo, hi, Tier.DISK):
                disk.free(dropped.handles)
                freed += len(dropped.handles) * cache.item_bytes[dropped.group]
            self.counts["pages_evicted_disk"] += hi - lo
            index.settle(node)
            index.requeue(node, Tier.DISK)
        return freed > 0


def _on_path(deep: Node, node: Node) -> bool:
    """Whether `node` is on the path to `deep`."""
    up: Node | None = deep
    while up is not None and up.depth >= node.depth:
        if up is node:
            return True
        up = up.parent
    return False


def _unsaved_runs(cache: Cache, node: Node) -> list[tuple[int, int]]:
    """Ranges of published pages of a node with items that only host holds."""
    groups = range(cache.index.groups)
    out: list[tuple[int, int]] = []
    for at in range(node.live):
        only = any(
            cache.index.get(node, at, Tier.HOST, g) != NO_COPY and cache.index.get(node, at, Tier.DISK, g) == NO_COPY
            for g in groups
        )
        if only and out and out[-1][1] == at:
            out[-1] = (out[-1][0], at + 1)
        elif only:
            out.append((at, at + 1))
    return out


def unsaved(cache: Cache) -> bool:
    """Whether some published page of the cache is in host only."""
    return any(_unsaved_runs(cache, node) for node in cache.index.walk())


def _names(cache: Cache, node: Node, first: int, end: int) -> tuple[bytes, bytes, bytes]:
    """Page keys and chain keys of pages [first, end), and the chain key of the page before."""
    if cache.spec.keyed:
        return node.edge[1:], b"", b""  # which group it is the item says
    keys: list[bytes] = []
    chains: list[bytes] = []
    stride = cache.index.stride
    up: Node = node
    while True:
        lo, hi = max(up.depth, first), min(up.end, end)
        if lo < hi:
            keys.append(up.edge[(lo - up.depth) * stride : (hi - up.depth) * stride])
            chains.append(cache.index.chain_of(up)[(lo - up.depth) * 16 : (hi - up.depth) * 16])
        if up.depth <= first:
            break
        assert up.parent is not None
        up = up.parent
    if first > up.depth:
        before = cache.index.chain_of(up)[(first - up.depth - 1) * 16 : (first - up.depth) * 16]
    else:
        assert up.parent is not None
        before = cache.index.chain_of(up.parent)[-16:]
    return b"".join(reversed(keys)), b"".join(reversed(chains)), before


def flush_error(reason: str) -> KvtierError:
    """The error of a flush that could not make everything durable."""
    return KvtierError(Code.NO_SPACE if reason in {Code.NO_SPACE, "no room on disk"} else Code.IO, reason)
