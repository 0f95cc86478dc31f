"""Reservations: slots that an engine fills, and the rule by which filled pages become served.

A page is complete when the instance's shards cover it, served when its checksum is taken and every page before it is
served. Two engines may fill the same page: the first wins and the other's slots return.

An engine that computes where its pages are kept reserves them running: before their tokens are known, and to go on
reading them when they are served. Such a reservation holds its path and all of its slots until its writers let go.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvtier.index import Node
from kvtier.index.node import LOCAL
from kvtier.store.cache import Cache
from kvtier.store.instance import WHOLE, Process
from kvtier.tiers.slab import SlotState
from kvtier.types import NO_COPY, Tier

OPEN, HASHING, COMPLETE, SETTLED, ABORTED = range(5)


def _to(state: int, *before: int) -> bytes:
    """A table for bytes.translate: states `before` become `state`. A reservation may have as many as 100,000 pages."""
    return bytes.maketrans(bytes(before), bytes([state]) * len(before))


_GIVEN_UP: Final = _to(ABORTED, OPEN)
_UNSERVED: Final = _to(ABORTED, OPEN, COMPLETE)
_SUMMED: Final = _to(COMPLETE, HASHING)
_NOT_SUMMED: Final = _to(ABORTED, HASHING)
_FAILED: Final = _to(ABORTED, OPEN, HASHING, COMPLETE)


class Reservation:
    """Pages [start, start + pages) of a path (or that many keys), with this instance's slots for them."""

    def __init__(
        self,
        number: int,
        cache: Cache,
        process: Process,
        nodes: list[Node],
        start: int,
        handles: list[array[int]],
        tier: Tier = Tier.HOST,
        *,
        named: int = -1,
    ) -> None:
        """`named`: a running one's pages from the root whose keys are known; -1: it is none."""
        self.number = number
        self.cache = cache
        self.tier = tier
        """Where its slots are."""
        self.instance = process.instance
        rank = process.ranks[cache.number]
        self.writes = rank.worker or not self.instance.working(cache.number)
        """Whether who reserved writes its shard; a scheduler beside workers does not."""
        self.writers: dict[int, Process] = {rank.bit: process} if self.writes else {}
        """Shard bit -> the only process that writes it; workers that join later are added."""
        self.decide()
        self.nodes = nodes
        """Token cache: the one node that ends the path. Keyed: one node per key."""
        self.start = start
        self.handles = handles
        self.pages = len(handles[0])
        self.running = named >= 0
        self.named = named if self.running else start + self.pages
        """Pages of the path, from the root, that the node ends; those after them have no keys yet."""
        self.reading = 0
        """Running: bytes of slots that are the index's by now, which the instance holds all the same."""
        self.spare: list[tuple[int, int]] = []
        """Running: (group, handle) of items that somebody served first; its engine reads them where they are."""
        self.state = bytearray(self.pages)
        self.marks = array("Q", bytes(8 * self.pages))
        self.sums = [array("Q", bytes(8 * self.pages)) for _ in handles]
        self.published = 0
        self.next = 0
        """Token cache: the first page that is not settled."""
        self.hashing = 0
        self.filling: Counter[int] = Counter()
        """Positions that region Stores write into now."""
        self.committer: Process | None = None
        """Who committed last: durable is told to it."""
        self.durable = 0
        """Keyed cache: leading keys that are on disk, as far as was told."""
        self.watched = False
        """Whether somebody waits to tell more."""
        self.over = False
        self.acks: set[Process] = set()
        """Processes that will write no more."""
        self.cost = self._cost(0, self.pages)
        self.parted = self.cost > 0 and WHOLE not in self.writers
        """Whether it has slots that workers write, each its shard."""

    def _cost(self, lo: int, hi: int) -> int:
        """Arena bytes of the slots of positions [lo, hi)."""
        slots = (hi - lo - held[lo:hi].count(NO_COPY) for held in self.handles)
        return sum(self.cache.slot_cost(g) * count for g, count in enumerate(slots))

    @property
    def waiting(self) -> int:
        """Complete pages that are not served yet."""
        return self.state.count(COMPLETE)

    @property
    def kept(self) -> bool:
        """Whether an engine may still read what it wrote here: some writer lives and has not let go."""
        return self.running and any(p in self.instance.processes and p not in self.acks for p in self.writers.values())

    def name(self, first: int, keys: bytes, now: float, unlease: Callable[[Cache, Node], None]) -> None:
        """The keys of the path's pages from `first` on are known: from now on the node ends with them."""
        cache, node = self.cache, self.nodes[0]
        keys = keys[max(0, self.named - first) * cache.index.stride :]
        self.named += len(keys) // cache.index.stride
        if keys and not cache.gone(node):
            self.nodes[0] = cache.radix.extend(keys, now, node)
            cache.index.lease(self.nodes[0])
            unlease(cache, node)

    def mark(self, process: Process, first: int, pages: int) -> Sequence[int]:
        """Note that a process filled its shard of positions [first, first + pages); returns those now complete."""
        rank = process.ranks[self.cache.number]
        if self.writers.get(rank.bit) is not process:
            return []  # a replica writes it
        full = self.instance.complete_mask(self.cache)
        self.committer = process
        end = first + pages
        if rank.bit == WHOLE and self.state.count(OPEN, first, end) == pages:  # the usual case, a page at a time dear
            np.frombuffer(self.marks, np.uint64)[first:end] |= np.uint64(WHOLE)
            self.state[first:end] = bytes([HASHING]) * pages
            return range(first, end)
        marks = np.frombuffer(self.marks, np.uint64)[first:end]
        marks |= np.uint64(rank.bit)
        done = (marks & np.uint64(WHOLE)) > 0
        if full:
            done |= (marks & np.uint64(full)) == full
        done &= np.frombuffer(self.state, np.uint8)[first:end] == OPEN
        out: list[int] = (np.flatnonzero(done) + first).tolist()
        np.frombuffer(self.state, np.uint8)[out] = HASHING
        return out

    def whole(self, process: Process) -> bool:
        """Whether a process holds all cells of an item."""
        return process.ranks[self.cache.number].bit in {WHOLE, self.instance.complete_mask(self.cache)}

    def know(self, positions: Sequence[int], group: int, first: int, sums: array[int]) -> None:
        """Checksums of a group's items from position `first` on, 0 where not known; of those among `positions`."""
        if len(positions) == len(sums):
            self.sums[group][first : first + len(sums)] = sums
        else:
            for at in positions:
                self.sums[group][at] = sums[at - first]

    def unsummed(self, positions: Sequence[int]) -> list[tuple[int, int, int]]:
        """(group, position, handle) of the items at these positions whose checksum is not known."""
        out: list[tuple[int, int, int]] = []
        for group, (held, sums) in enumerate(zip(self.handles, self.sums, strict=True)):
            known = np.frombuffer(sums, np.uint64)
            if not isinstance(positions, range) or not known[positions.start : positions.stop].all():
                out += [(group, at, held[at]) for at in positions if not sums[at] and held[at] != NO_COPY]
        return out

    def summed(self, positions: Sequence[int], *, good: bool) -> None:
        """The checksums of complete pages are known, or could not be taken."""
        if isinstance(positions, range):
            part = slice(positions.start, positions.stop)
            self.state[part] = self.state[part].translate(_SUMMED if good else _NOT_SUMMED)
            return
        for at in positions:
            if self.state[at] == HASHING:
                self.state[at] = COMPLETE if good else ABORTED

    def items(self, positions: Sequence[int]) -> list[tuple[int, int, int]]:
        """(group, position, handle) of the slots at these positions."""
        return [(g, at, held[at]) for g, held in enumerate(self.handles) for at in positions if held[at] != NO_COPY]

    # -- token caches -----------------------------------------------------------------------------------------

    def publish(self, now: float) -> tuple[int, int]:
        """Serve complete pages in order; returns the absolute range [first, end) that is new."""
        cache, index = self.cache, self.cache.radix
        first = self.start + self.next
        while self.next < self.pages and self.state[self.next] in {COMPLETE, SETTLED}:
            if self.state[self.next] == SETTLED:
                self.next += 1
                continue
            node, at = index.locate(self.nodes[0], self.start + self.next)
            parent = node.parent
            if cache.gone(node) or parent is None or at > node.live or parent.live < parent.pages:
                break
            if at < node.live:
                self._merge(node, at, self._stretch(min(node.live - at, self.pages - self.next)))
            else:
                count = self._stretch(min(node.pages - at, self.pages - self.next))
                self._serve(node, at, count)
                index.publish(node, node.depth + at + count)
                index.fresh(node, now)
        end = self.start + self.next
        self.published += end - first
        cache.counts["pages_published"] += end - first
        return first, end

    def _stretch(self, most: int) -> int:
        """How many complete pages follow each other from `next`, at most `most`."""
        ahead = self.state[self.next : self.next + most]
        return len(ahead) - len(ahead.lstrip(bytes([COMPLETE])))

    def _serve(self, node: Node, at: int, count: int) -> None:
        """Hand the slots of `count` pages to the index."""
        lo, hi = self.next, self.next + count
        for group, held in enumerate(self.handles):
            part = held[lo:hi]
            mine = part if part.count(NO_COPY) == 0 else array("q", [h for h in part if h != NO_COPY])
            if mine:
                self.cache.settle(self.tier, group, mine)
                self.cache.index.put(node, at, self.tier, group, part, self.sums[group][lo:hi])
        self._settled(lo, hi)
        self.next = hi

    def _merge(self, node: Node, at: int, count: int) -> None:
        """Somebody served these pages first: fill what they lack, give the rest back."""
        index, lo, hi = self.cache.index, self.next, self.next + count
        for group, held in enumerate(self.handles):
            mine = np.array(held[lo:hi], np.int64)
            there = np.zeros(count, bool)
            for row in (node.at[tier * index.groups + group] for tier in LOCAL):
                if row is not None:
                    there |= np.array(row[at : at + count], np.int64) != NO_COPY
            if self.running:
                self.spare += [(group, handle) for handle in _handles(mine[there])]
            else:
                self.cache.free(self.tier, group, _handles(mine[there]))
            mine[there] = NO_COPY
            if fresh := _handles(mine):
                self.cache.settle(self.tier, group, fresh)
                index.put(node, at, self.tier, group, array("q", mine.tobytes()), self.sums[group][lo:hi])
        self._settled(lo, hi)
        self.next = hi

    def _settled(self, lo: int, hi: int) -> None:
        """Positions whose slots are no longer this reservation's."""
        freed = self._cost(lo, hi)
        self._pay(freed)
        if self.running:
            self.reading += freed
        else:
            self.instance.hold(self.tier, -freed)
        for group in range(len(self.handles)):
            self.handles[group][lo:hi] = array("q", [NO_COPY]) * (hi - lo)
        self.state[lo:hi] = bytes([SETTLED]) * (hi - lo)

    def _pay(self, freed: int) -> None:
        """Bytes of slots that are no longer this reservation's."""
        self.cost -= freed
        self.cache.dues[self.tier] -= freed

    # -- keyed caches -------------------------------------------------------------------------------------------

    def publish_keys(self, positions: Sequence[int], now: float) -> list[int]:
        """Serve complete keys, whatever the others do; returns the positions that are new."""
        ready = [at for at in positions if self.state[at] == COMPLETE and not self.cache.gone(self.nodes[at])]
        fresh: list[int] = []
        known: list[int] = []
        for at in ready:
            (known if self.nodes[at].live else fresh).append(at)
            self.nodes[at].live = 1
        self._serve_keys(fresh, now)
        for at in known:
            self.next = at
            self._merge(self.nodes[at], 0, 1)
        self.published += len(ready)
        self.cache.counts["pages_published"] += len(fresh)
        return fresh

    def _serve_keys(self, positions: list[int], now: float) -> None:
        """Hand the slots of keys to the index: the pool is told once for all of them."""
        index = self.cache.keyed
        for group, held in enumerate(self.handles):
            mine = [at for at in positions if held[at] != NO_COPY]
            if mine:
                self.cache.settle(self.tier, group, array("q", [held[at] for at in mine]))
            for at in mine:
                index.put(self.nodes[at], 0, self.tier, group, held[at : at + 1], self.sums[group][at : at + 1])
        for at in positions:
            index.fresh(self.nodes[at], now)
            self._settled(at, at + 1)

    # -- the end -----------------------------------------------------------------------------------------------

    @property
    def settled(self) -> bool:
        """Whether nothing is left to fill or to serve."""
        return self.state.count(SETTLED) == self.pages

    def abandon(self, *, complete: bool = False) -> None:
        """No page that is not complete will be any more; nor, if `complete`, will those be served that are."""
        self.state = self.state.translate(_UNSERVED if complete else _GIVEN_UP)

    def fail(self) -> None:
        """Its tier failed: nothing that is not served yet will be, whoever sums or commits it."""
        self.state = self.state.translate(_FAILED)

    def decide(self) -> None:
        """Name the writer of every shard that has one now and had none: it may write, whatever becomes of it later."""
        if WHOLE in self.writers:
            return
        for (number, bit), named in self.instance.writers.items():
            fresh = number == self.cache.number and bit not in self.writers
            if fresh and named.above < self.number and not named.process.left:
                self.writers[bit] = named.process

    def orphan(self) -> None:
        """Give up pages that lack a shard whose writer is gone, or is one that came too late to write it."""
        never = 0
        if WHOLE not in self.writers:
            late = [b for number, b in self.instance.writers if number == self.cache.number and b not in self.writers]
            never = sum(late)
        for bit, process in self.writers.items():
            if process not in self.instance.processes:
                never |= bit
        if never:
            lacking = np.frombuffer(self.marks, np.uint64) & np.uint64(never) != never
            state = np.frombuffer(self.state, np.uint8)
            state[lacking & (state == OPEN)] = ABORTED

    @property
    def writable(self) -> bool:
        """Whether some process may still write: it lives, and neither let go nor committed its shard of every page."""
        return any(
            process in self.instance.processes and process not in self.acks and self._unmarked(bit)
            for bit, process in self.writers.items()
        )

    def _unmarked(self, bit: int) -> bool:
        """Whether a shard of some page was not committed."""
        unmarked = np.frombuffer(self.marks, np.uint64) & np.uint64(bit) == 0
        return bool((unmarked & (np.frombuffer(self.state, np.uint8) != SETTLED)).any())

    @property
    def dead(self) -> bool:
        """Whether its place in the index was cut away."""
        return all(self.cache.gone(node) for node in self.nodes)

    @property
    def stuck(self) -> bool:
        """Whether the next page to serve was aborted, so that nothing after it can be served."""
        if self.cache.spec.keyed:
            return self.state.count(OPEN) + self.state.count(HASHING) == 0
        ahead = self.state[self.next : self.next + 1]
        if ahead == bytes([SETTLED]):  # until something is committed, nobody has passed over what was stored before
            ahead = self.state[self.next :].lstrip(ahead)[:1]
        return ahead == bytes([ABORTED])

    def strand(self, group: int, positions: list[int]) -> None:
        """A device that is stuck may still write these slots: they are nobody's, and their pages will not be served."""
        held = self.handles[group]
        lost = [held[at] for at in positions if held[at] != NO_COPY]
        self.cache.pools[self.tier].mark(group, lost, SlotState.QUARANTINED)
        freed = len(lost) * self.cache.slot_cost(group)
        self._pay(freed)
        self.instance.hold(self.tier, -freed)
        for at in positions:
            held[at] = NO_COPY
            self.state[at] = ABORTED

    def drop(self, unlease: Callable[[Cache, Node], None]) -> None:
        """End it: what is not served goes back to the pool."""
        for group, held in enumerate(self.handles):
            self.cache.free(self.tier, group, _handles(np.array(held, np.int64)))
        self._settled(0, self.pages)
        for group, handle in self.spare:
            self.cache.free(self.tier, group, [handle])
        self.instance.hold(self.tier, -self.cost - self.reading)
        self._pay(self.cost)
        self.reading = 0
        self.over = True
        for node in self.nodes:
            unlease(self.cache, node)


def _handles(row: npt.NDArray[np.int64]) -> array[int]:
    """Those in a row that are some."""
    return array("q", row[row != NO_COPY].tobytes())
