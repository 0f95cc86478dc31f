"""Write-behind: every page published in host goes to disk once, parents before children, and is reported durable.

Pages on their way are leased, so that neither eviction nor relocation nor a split can touch their slots or their place.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable

import numpy as np

from kvtier.index import Node
from kvtier.index.node import on_path, shared_to
from kvtier.store.cache import Cache
from kvtier.store.diskroom import FULL_S, DiskRoom
from kvtier.store.entries import GONE, Entry, Failures
from kvtier.store.runs import names_of, within_reach
from kvtier.store.slices import SLICE_S
from kvtier.store.ways import Ways
from kvtier.tiers.disk import DiskTier
from kvtier.tiers.records import PAGE_BITS, Item
from kvtier.types import NO_COPY, RUN_PAGES, Code, Tier

log = logging.getLogger("kvtier.persist")
MAX_QUEUED_PAGES = 1 << 20
PUMP_S = 1e-3


class Persist:
    """Pages between host and disk. Without a disk tier every offer is refused."""

    def __init__(self, disk: DiskTier | None, ways: Ways) -> None:
        self.disk = disk
        self.ways = ways
        self.counts = ways.counts
        self.room = DiskRoom(disk, ways)
        self.queue: deque[Entry] = deque()
        self.pending: dict[Entry, None] = {}
        """Entries that are not settled, oldest first."""
        self.ending: dict[Node, list[Entry]] = {}
        """The same by the node that they end in."""
        self.queued_pages = 0
        self._writing = 0
        self._moved = asyncio.Event()
        self._syncing = False
        self._owed = False
        """Whether what went for room could not be made durable: it is waited for before more goes."""
        self._pumping = False
        """Whether pump is about to run."""
        self._failures = Failures()

    @property
    def there(self) -> bool:
        """Whether there is a disk tier."""
        return self.disk is not None

    def declines(self, node: Node) -> bool:
        """Whether its pages were over a quota just now, or disk is full, and what that would give up is as warm.

        To write such pages again and again would keep host from making room.
        """
        return self._failures.lasts(node, asyncio.get_running_loop().time()) or self.room.refuses(node)

    def offer(
        self, cache: Cache, node: Node, first: int, end: int, notify: Callable[[int], None] | None = None
    ) -> bool:
        """Queue pages [first, end) of the path to `node` for writing; False when there is no working disk or no place.

        Pages before them that are not on disk, nor on their way, are written too: a page is of no use there without
        its parent. `notify(end)` is called once all are durable.
        """
        if self.disk is None or self.disk.sick or cache.retired:
            return False
        if not self._parent_saved(cache, node, first) and self.coming(cache, node, first - 1) is None:
            first = self._kept_to(cache, node, first)
        if self.queued_pages + end - first > MAX_QUEUED_PAGES:
            return False
        self.queue.append(self._noted(Entry(cache, node, first, end, notify)))
        self.pump_soon()
        return True

    def _kept_to(self, cache: Cache, node: Node, end: int) -> int:
        """End of the last of the path's pages [0, end) that is on disk, or on its way there: 0 where none is.

        After a time in which disk took nothing there may be thousands, so that nobody looks at them one by one.
        """
        there = np.ones(end, bool)
        for group in cache.index.anchors:
            there &= np.array(cache.gather(node, group, 0, end, Tier.DISK), np.int64) != NO_COPY
        saved = np.flatnonzero(there)
        kept = int(saved[-1]) + 1 if saved.size else 0
        for entry in self.pending:
            if entry.cache is cache and not entry.failed:
                shared = min(entry.end, shared_to(node, entry.node), end)
                kept = max(kept, shared) if entry.begin < shared else kept
        return kept

    def _noted(self, entry: Entry) -> Entry:
        """An entry that is on its way from now on."""
        entry.cache.index.lease(entry.node)
        self.pending[entry] = None
        self.ending.setdefault(entry.node, []).append(entry)
        self.queued_pages += entry.left
        return entry

    def coming(self, cache: Cache, node: Node, page: int) -> Entry | None:
        """The entry that brings a page of the path to `node` to disk, if one does."""
        where, _ = cache.index.locate(node, page)
        if not where.refs:  # what brings it holds it; a flush of much asks of each page, beside as many on their way
            return None
        up: Node | None = node
        while up is not None and up.end > page:
            for entry in self.ending.get(up, ()):
                if entry.covers(page):
                    return entry
            up = up.parent
        found = (e for e in self.pending if e.cache is cache and e.covers(page) and on_path(e.node, where))
        return next(found, None)

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

    # -- the way to disk -----------------------------------------------------------------------------------------

    def pump_soon(self) -> None:
        """Pump when the loop has its next turn."""
        if not self._pumping:
            self._pumping = True
            asyncio.get_running_loop().call_soon(self.pump)

    def pump(self) -> None:
        """Hand queued pages to the disk tier as long as it takes them, and let the loop go on in between."""
        self._pumping = False
        late = time.perf_counter() + PUMP_S
        while self.queue:
            if time.perf_counter() > late:
                self.pump_soon()
                return
            entry = self.queue[0]
            gone = entry.cache.gone(entry.node)
            if entry.first >= entry.end or gone or entry.failed:
                self.queue.popleft()
                if gone:
                    self._rest(entry)
                self._settle(entry, entry.end - entry.first, GONE if gone else "")
                continue
            if not self._write_run(entry):
                return

    def _rest(self, entry: Entry) -> None:
        """Write next what is there of an entry whose end is gone: what others stored after that waits behind it."""
        node = entry.node
        while node.dead and node.parent is not None:
            node = node.parent
        if not entry.cache.retired and entry.first < (end := min(entry.end, node.end)):
            self.queue.appendleft(self._noted(Entry(entry.cache, node, entry.first, end, None)))

    def _write_run(self, entry: Entry) -> bool:
        """Submit the next run of an entry, from its first page that lacks something; False when the disk is busy."""
        disk = self.disk
        assert disk is not None
        cache, end = entry.cache, min(entry.end, entry.first + RUN_PAGES)
        items = self._bounded(cache, self._items(entry, end))
        nbytes = sum(cache.slot_cost(item.group) for item in items)
        saved = items[0].page if items else within_reach(cache, entry.node, entry.first, end)
        if not saved and not items:
            entry.failed = "a page is in neither host nor disk"
            return True
        if saved:
            self._settle(entry, saved, "")
            entry.first += saved
            return True
        end = entry.first + items[-1].page + 1
        if not self._parent_saved(cache, entry.node, entry.first) and not self.coming(
            cache, entry.node, entry.first - 1
        ):
            entry.failed = "the page before is not on disk"
            return True
        if self.room.order.late:  # until what may go is known; the end of loading pumps
            return False
        self.room.gave_way = False
        if self.ways.quotas.blocks(cache, nbytes, Tier.DISK, self.room.evict_own):
            return self._over(entry)
        if cache.disk is None:
            cache.disk = disk.open_cache(cache.id, cache.base, cache.scope, cache.epoch, cache.spec)
        first = entry.first
        keys, chains, parent = names_of(cache, entry.node, first, end)
        done = self._completion(entry, first, end, items, nbytes)
        if not disk.write(cache.disk, parent, 0 if cache.spec.keyed else first, keys, chains, items, done):
            self._make_room(entry, nbytes)
            return False
        self.ways.quotas.write(cache, nbytes)
        self._writing += 1
        entry.first = end
        self.room.ahead_soon()
        return True

    def _items(self, entry: Entry, end: int) -> list[Item]:
        """What only host holds of the run's pages; nothing when every page is on disk already.

        A page that is on neither (a device has it) ends the run: what follows has no parent on disk.
        """
        out: list[Item] = []
        cache, first = entry.cache, entry.first
        end = first + within_reach(cache, entry.node, first, end)
        for group in range(cache.index.groups):
            host = cache.gather(entry.node, group, first, end - first, Tier.HOST)
            disk = cache.gather(entry.node, group, first, end - first, Tier.DISK)
            sums = cache.gather_sums(entry.node, group, first, end - first)
            for page, handle in enumerate(host):
                if handle != NO_COPY and disk[page] == NO_COPY:
                    out.append(Item(page, group, sums[page], cache.views(group, handle)))
        out.sort(key=lambda item: (item.page, item.group))
        return out

    def _bounded(self, cache: Cache, items: list[Item]) -> list[Item]:
        """Those of the leading pages that make a run: so small that it needs but a part of the disk, and of a quota."""
        left = self.room.most_run(cache)
        for at, item in enumerate(items):
            left -= cache.slot_cost(item.group)
            if left < 0 and item.page > items[0].page:
                return [each for each in items[:at] if each.page < item.page]
        return items

    @staticmethod
    def _parent_saved(cache: Cache, node: Node, first: int) -> bool:
        """Whether disk holds the page before page `first` of the path to `node`."""
        if first == 0 or cache.spec.keyed:
            return True
        where, at = cache.index.locate(node, first - 1)
        return all(cache.index.get(where, at, Tier.DISK, g) != NO_COPY for g in cache.index.anchors)

    def _completion(
        self, entry: Entry, first: int, end: int, items: list[Item], nbytes: int
    ) -> Callable[[int | None, str], None]:
        def done(run_id: int | None, error: str) -> None:
            self._writing -= 1
            self.ways.quotas.write(entry.cache, -nbytes)
            if run_id is not None:
                self._record(entry.cache, entry.node, first, items, run_id)
            if entry.node.dead:
                error = GONE
            elif run_id is None:
                self.counts[f"refused_disk_{error}"] += end - first
            else:
                self.counts["pages_written_disk"] += end - first
                self.counts["bytes_host_to_disk"] += sum(entry.cache.item_bytes[i.group] for i in items)
            self._settle(entry, end - first, error)
            self.pump_soon()

        return done

    def _record(self, cache: Cache, node: Node, first: int, items: list[Item], run_id: int) -> None:
        """Note the disk copies of a run that is durable now; pages that are gone, or came with another run, go again.

        Where its end is gone, what is before that may be others' beginning: what they stored names it as its parent.
        """
        index = cache.index
        placed = set()
        for item in items:
            where, at = index.locate(node, first + item.page)
            if not where.dead and index.get(where, at, Tier.DISK, item.group) == NO_COPY:
                index.put(where, at, Tier.DISK, item.group, [run_id << PAGE_BITS | item.page], [item.sum])
                placed.add(item.page)
        self._free(run_id, {item.page for item in items} - placed)

    def _free(self, run_id: int, pages: set[int]) -> None:
        """Forget pages of a run that no node names."""
        assert self.disk is not None
        self.disk.free([run_id << PAGE_BITS | page for page in sorted(pages)])

    def _settle(self, entry: Entry, pages: int, error: str) -> None:
        """Count pages of an entry as done; the last one lets its lease go."""
        entry.left -= pages
        entry.failed = entry.failed or error
        self.queued_pages -= pages
        if entry.left <= 0 and entry in self.pending:
            del self.pending[entry]
            self.ending[entry.node].remove(entry)
            if not self.ending[entry.node]:
                del self.ending[entry.node]
            if entry.failed == Code.OVER_CAP:  # which lasts; a parent that is missing may come at once
                self._failures.note(entry.node, asyncio.get_running_loop().time() + FULL_S)
            entry.cache.release(entry.cache.index.unlease(entry.node), self.disk)
            entry.done.set_result(entry.failed)
            if entry.notify is not None and not entry.failed:
                entry.notify(entry.end)
        self._moved.set()

    def _over(self, entry: Entry) -> bool:
        """An entry does not fit its quota: later, where more can go, or never. As _write_run."""
        if self.room.gave_way or self.ways.quotas.moving:
            self.pump_soon()
            return False
        entry.failed = Code.OVER_CAP
        return True

    def _make_room(self, entry: Entry, nbytes: int) -> None:
        """The disk refused a run: evict its coldest leaves, or fail the entry where nothing can go."""
        disk = self.disk
        assert disk is not None
        if disk.refusal != Code.NO_SPACE or self._syncing:
            return  # a completion pumps again, or the end of loading
        if disk.sick:  # what goes does not become room now: more would go with each try, until disk has nothing left
            self._refuse(entry, Code.IO)
            return
        freed = 0 if self._owed and disk.freeing_bytes else self.room.evict(nbytes, slice_s=SLICE_S)
        if freed or disk.freeing_bytes or disk.making_room:
            self._syncing = True
            self._more_room(nbytes, freed)
        elif not self._writing:  # else what is being written can be evicted soon
            self.room.stuck()
            self._refuse(entry, Code.NO_SPACE)

    def _refuse(self, entry: Entry, code: Code) -> None:
        """Disk does not take what is left of an entry."""
        entry.failed = code
        self.counts[f"refused_disk_{code}"] += entry.end - entry.first
        self.pump_soon()

    def _more_room(self, lacking: int, freed: int) -> None:
        """So much of it was freed in one slice: go on until it is all there, or nothing goes, and make it durable."""
        if 0 < freed < lacking:
            asyncio.get_running_loop().call_soon(self._another_slice, lacking - freed)
        elif self.disk is not None:
            self.disk.flush(self._synced)

    def _another_slice(self, lacking: int) -> None:
        """Whatever a policy raises, what was freed is made durable: nothing is written before that."""
        freed = 0
        try:
            freed = self.room.evict(lacking, slice_s=SLICE_S)
        finally:
            self._more_room(lacking, freed)

    def _synced(self, error: str) -> None:
        """Freed cells can be used again, or will be when a commit works."""
        self._syncing, self._owed = False, bool(error)
        self.pump()
