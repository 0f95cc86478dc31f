"""Which leaf of a tier goes first: persistent lazy heaps, shared by every index whose slots are shared.

A policy puts each leaf in one of its lanes and ranks it there. An entry is not moved when its node is touched; a
popped entry that is out of date goes back with the node's present rank, so that a touch costs nothing and an eviction
O(log leaves), whatever the number of leaves.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

if TYPE_CHECKING:
    from kvtier.index.base import Index
    from kvtier.index.copies import Copies
    from kvtier.index.node import Node

ANY: Final = -1
MOST_MOVED: Final = 64
"""Entries of another quota that a look for one's own passes on at once."""
LOOKS: Final = 4
"""Entries looked at for each that becomes void: at most about one in so many is void, and no sweep is ever long."""
Entry = tuple[float, int, "Node", Any]
Heads = tuple[list["Node | None"], list[float]]
"""The first leaf of each of the policy's lanes, and when each was last used, as they were last seen."""


class First(NamedTuple):
    """A quota's leaf that goes first: in what order quotas take turns."""

    kept: bool
    time: float
    until: float
    """When the first of those that are kept is like any other."""
    lane: int
    heap: list[Entry]


class Warmth(Protocol):
    """What keeps the access scores of nodes."""

    def use(self, node: Any, now: float) -> None:
        """One logical request ended in `node`."""

    def fresh(self, node: Any, now: float) -> None:
        """`node` is new, and the request that made it was counted above it."""

    def fall(self, node: Any, parent: Any) -> None:
        """`node` goes: the parent takes over its score."""

    def split(self, upper: Any, lower: Any) -> None:
        """`upper` is the new first part of what `lower` was."""

    def join(self, upper: Any, lower: Any) -> None:
        """`lower` takes over the pages of `upper`, its parent."""


class Ranking(Protocol):
    """What an order asks of a policy; kvtier.policy.Policy says more of each."""

    @property
    def lanes(self) -> int:
        """How many queues of leaves there are."""

    def gain(self, index: Any, node: Any, lo: int, hi: int, copies: int) -> None:
        """Copies of pages [lo, hi) arrived in the tier."""

    def found(self, index: Any, node: Any, lo: int, hi: int, copies: int) -> None:
        """Copies of pages [lo, hi) were in the tier already when the store started."""

    def lose(self, index: Any, node: Any, lo: int, hi: int, copies: int) -> None:
        """Copies of pages [lo, hi) left the tier."""

    def use(self, node: Any, now: float) -> None:
        """One logical request ended in `node`."""

    def fall(self, node: Any, parent: Any) -> None:
        """The subtree of `node` left the tier."""

    def split(self, upper: Any, lower: Any) -> None:
        """`upper` is the new first part of what `lower` was."""

    def join(self, upper: Any, lower: Any) -> None:
        """`lower` takes over the pages of `upper`, its parent, which has no other child."""

    def lane(self, node: Any) -> int:
        """Which lane a leaf is in, 0 to `lanes` - 1."""

    def rank(self, index: Any, node: Any) -> float:
        """Where it stands in its lane: lower goes first."""

    def pick(self, heads: Sequence[Any | None], now: float) -> int:
        """Which lane gives the next victim, from the first leaf of each."""

    def spare(self, node: Any) -> bool:
        """Whether the victim gets another chance."""

    def share(self, node: Any) -> int:
        """How many pages of the victim may go at this rank."""


class Kept:
    """See Order.kept: without an entry the leaf would stay for good."""

    __slots__ = ("_index", "_node", "_tier")

    def __init__(self, index: Index, node: Node, tier: int) -> None:
        self._index, self._node, self._tier = index, node, tier

    def __enter__(self) -> None:
        """Nothing changes."""

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: object) -> None:
        if kind is not None:
            self._index.requeue(self._node, self._tier)


class Order:
    """Leaves of one tier, what the policy would have go first, first.

    Around the policy's lanes are two more: leaves that are known to be dead go before all others, and leaves that
    somebody asked to keep for a while go after them, the first to run out first.
    """

    __slots__ = ("_firsts", "_heads", "_last", "_shares", "_stirred", "_sweep", "_tie", "late", "policy", "tier")

    def __init__(self, tier: int, policy: Ranking) -> None:
        self.tier = tier
        self.policy = policy
        self.late = False
        """Whether leaves may be missing: what a catalogue brings is queued once all of it is there."""
        self._shares: dict[int, list[list[Entry]]] = {0: self._lanes()}
        """By quota, 0 for what is under none: a heap for each lane."""
        self._heads: dict[int, Heads] = {}
        self._firsts: dict[int, First] = {}
        """By quota: what goes first of it, as it was last seen. Where there are many, looking at all takes too long."""
        self._stirred = {0}
        """Quotas whose leaves have changed since."""
        self._last = self.policy.lanes + 1
        self._tie = 0
        self._sweep = _sweeping(self._shares, 8 * tier)

    def _lanes(self) -> list[list[Entry]]:
        return [[] for _ in range(self.policy.lanes + 2)]

    def __len__(self) -> int:
        """Entries, stale ones included."""
        return sum(len(heap) for lanes in self._shares.values() for heap in lanes)

    def queued(self, node: Node) -> bool:
        """Whether an entry of the node is here."""
        return node.queued >> 8 * self.tier & 255 > 0

    def _queue(self, node: Node, lane: int) -> None:
        """Note the lane that holds the node's valid entry, -1 for none."""
        shift = 8 * self.tier
        node.queued = node.queued & ~(255 << shift) | lane + 1 << shift

    def _place(self, index: Copies, node: Node) -> tuple[int, float]:
        """Lane and rank of a leaf now."""
        if node.keep > node.time:
            return self._last, node.keep
        if index.doomed_tail(node):
            return 0, node.time
        return self.policy.lane(node) + 1, self.policy.rank(index, node)

    def push(self, index: Copies, node: Node) -> None:
        """Let a free leaf of the tier be found; does nothing where an entry of it is in the right lane already."""
        self._stirred.add(index.share)
        lane, rank = self._place(index, node)
        held = node.queued >> 8 * self.tier & 255
        if held == lane + 1:
            return
        if held:
            self._forgotten()
        self._queue(node, lane)
        self._tie += 1
        heapq.heappush(self._heaps(index.share)[lane], (rank, self._tie, node, index))

    def _heaps(self, share: int) -> list[list[Entry]]:
        heaps = self._shares.get(share)
        if heaps is None:
            heaps = self._shares[share] = self._lanes()
        return heaps

    def moved(self, index: Copies, node: Node) -> None:
        """What is queued of the node is void: its index is of another quota now, or it is kept for a shorter time."""
        if self.queued(node):
            self._forgotten()
            self._queue(node, -1)
            self.push(index, node)

    def use(self, index: Copies, node: Node, now: float) -> None:
        """One logical request ended in `node`; where that moves it to another lane, it is queued there."""
        self.policy.use(node, now)
        if node.queued >> 8 * self.tier & 255:
            self.push(index, node)

    def pop(self, now: float = 0.0, share: int = ANY) -> tuple[Index, Node] | None:
        """Take out the leaf that goes first, of one quota or of all; or None.

        The caller trims it and puts it back if it lasts.
        """
        while True:
            found = self._coldest(now) if share == ANY else self._first(share, now, own=True)
            if found is None:
                return None
            _, _, _, lane, heap = found
            _, _, node, index = heapq.heappop(heap)
            self._queue(node, -1)
            self._stirred.add(index.share)
            if 0 < lane < self._last and self.policy.spare(node):
                self.push(index, node)
                continue
            return index, node

    def kept(self, index: Index, node: Node) -> Kept:
        """Around what is done with a leaf that was popped: where that raises, as a policy may, it is put back."""
        return Kept(index, node, self.tier)

    def turn(self, now: float, share: int = ANY) -> tuple[bool, float]:
        """When a quota's leaf that goes first was used last. After all others: one to be kept, then none at all."""
        found = self._coldest(now) if share == ANY else self._first(share, now, own=True)
        return (True, math.inf) if found is None else (found.kept, found.time)

    def _coldest(self, now: float) -> First | None:
        """What goes first of all. Between quotas the least recently used of their first leaves goes first.

        A time that was seen is no later than it is now, so that whoever still comes first after another look does.
        """
        if len(self._shares) == 1:
            return self._first(0, now, own=False)
        firsts = self._firsts
        seen = self._stirred | {share for share, first in firsts.items() if first.until <= now}
        self._stirred = set()
        for share in seen:
            self._look(share, now)
        while firsts:
            best = min(firsts, key=lambda share: firsts[share][:2])
            if best in seen:
                return firsts[best]
            seen.add(best)
            self._look(best, now)
        return None

    def _look(self, share: int, now: float) -> None:
        """See what goes first of a quota."""
        found = self._first(share, now, own=False)
        if found is not None:
            self._firsts[share] = found
        else:
            self._firsts.pop(share, None)

    def _first(self, share: int, now: float, *, own: bool) -> First | None:
        """What goes first of a quota, None where nothing of it can."""
        heaps = self._heaps(share)
        self._expire(heaps, share, now)
        lane = self._pick(heaps, share, now, own)
        if lane < 0:
            return None
        until = heaps[self._last][0][0] if heaps[self._last] else math.inf
        return First(lane == self._last, heaps[lane][0][2].time, until, lane, heaps[lane])

    def _expire(self, heaps: list[list[Entry]], share: int, now: float) -> None:
        """Leaves that were to be kept until now are like any other again."""
        kept = heaps[self._last]
        while kept and kept[0][0] <= now:
            _, _, node, index = heapq.heappop(kept)
            if node.queued >> 8 * self.tier & 255 == self._last + 1 and _among(index, share):
                self._queue(node, -1)
                if node.keep <= now:
                    node.keep = 0.0
                if not node.dead and not node.holds(self.tier) and node.tier_leaf(self.tier):
                    self.push(index, node)

    def _pick(self, heaps: list[list[Entry]], share: int, now: float, own: bool) -> int:
        """The lane whose first leaf goes next, -1 where there is none."""
        if heaps[0] and self._head(heaps, share, 0, own) is not None:
            return 0
        if self._last == 2:
            lane = 1 if self._head(heaps, share, 1, own) is not None else -1
        else:
            lane = self._chosen(heaps, share, now, own)
        if lane > 0:
            return lane
        return self._last if heaps[-1] and self._head(heaps, share, self._last, own) is not None else -1

    def _chosen(self, heaps: list[list[Entry]], share: int, now: float, own: bool) -> int:
        """The policy's lane, -1 where all are empty.

        With many lanes most heads are those of the last time; what shows at once is looked at for all of them, all
        else for the one that is taken.
        """
        heads, times = self._heads.setdefault(share, ([None] * (self._last - 1), [0.0] * (self._last - 1)))
        checked, tier = 0, self.tier
        for number, heap in enumerate(heaps[1:-1]):
            top, known = heap[0][2] if heap else None, heads[number]
            if top is known and (top is None or (top.time == times[number] and not (top.refs and top.holds(tier)))):
                continue
            heads[number] = head = self._head(heaps, share, number + 1, own)
            times[number] = head.time if head is not None else 0.0
            checked |= 1 << number
        while any(heads):
            number = self.policy.pick(heads, now)
            if checked >> number & 1:
                return number + 1
            checked |= 1 << number
            head = self._head(heaps, share, number + 1, own)
            if head is heads[number]:
                return number + 1
            heads[number], times[number] = head, head.time if head is not None else 0.0
        return -1

    def _head(self, heaps: list[list[Entry]], share: int, lane: int, own: bool) -> Node | None:
        """The first leaf of a lane, entries that are out of date put right on the way.

        With `own` only what is of that quota: what has left it is passed on, some of it at a time.
        """
        heap, moved = heaps[lane], 0
        shift = 8 * self.tier
        while heap:
            rank, tie, node, index = heap[0]
            if node.queued >> shift & 255 != lane + 1 or not _among(index, share):
                heapq.heappop(heap)
                continue
            if node.dead or node.holds(self.tier) or not node.tier_leaf(self.tier):
                heapq.heappop(heap)
                self._queue(node, -1)
                continue
            if own and index.share != share:
                if (moved := moved + 1) > MOST_MOVED:
                    return None
                heapq.heappop(heap)
                self._queue(node, -1)
                self.push(index, node)
                continue
            where, now = self._place(index, node)
            if where != lane:
                heapq.heappop(heap)
                self._queue(node, -1)
                self.push(index, node)
            elif now > rank:
                heapq.heapreplace(heap, (now, tie, node, index))
            else:
                return node
        return None

    def _forgotten(self) -> None:
        """An entry is void: sweep a little."""
        for _ in range(LOOKS):
            next(self._sweep)

    def died(self) -> None:
        """A queued node left the index."""
        self._forgotten()


def _among(index: Copies, share: int) -> bool:
    """Whether entries of an index that are queued under a quota can be valid."""
    return index.share == share or index.moving


def _sweeping(shares: dict[int, list[list[Entry]]], shift: int) -> Iterator[None]:
    """Take void entries out, over and over; each step looks at one entry. Heaps may change between steps."""
    while True:
        for share in list(shares):
            for lane, heap in enumerate(shares[share]):
                at = len(heap)
                while (at := min(at, len(heap)) - 1) >= 0:
                    if _void(heap[at], shift, share, lane):
                        take_out(heap, at)
                    yield
            yield


def _void(entry: Entry, shift: int, share: int, lane: int) -> bool:
    """Whether an entry in a lane of a quota says nothing any more."""
    _, _, node, index = entry
    return node.dead or node.queued >> shift & 255 != lane + 1 or not _among(index, share)


def take_out(heap: list[Any], at: int) -> None:
    """Remove one entry of a heap, wherever it stands."""
    last = heap.pop()
    if at == len(heap):
        return
    while at and last < heap[up := (at - 1) // 2]:
        heap[at] = heap[up]
        at = up
    while (down := 2 * at + 1) < len(heap):
        if down + 1 < len(heap) and heap[down + 1] < heap[down]:
            down += 1
        if not heap[down] < last:
            break
        heap[at] = heap[down]
        at = down
    heap[at] = last
