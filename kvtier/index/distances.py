"""Stack distances of the traffic that passes by, and the hits that LRU would have had at any capacity.

A request touches its pages deepest first and its root last, so that the stack stays closed under prefixes. Pages that
the same request touched last lie side by side in it, and one count places the whole run. Pages are known by names of
64 bits that stand for the page and all before it.

Opaque keys have no prefixes: each is looked for by itself. Within what one request touched last their order is not
kept, so that a distance is short by at most the length of a request.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

EXACT_PAGES: Final = 1 << 16
"""Distances are exact up to so many pages."""
SAMPLE: Final = 32
"""Beyond, one page in so many stands for all, and what is hot for itself."""
REQUESTS: Final = 1 << 16
"""A page that so many requests in a row did not ask for is forgotten."""
HOT: Final = 64
"""Requests for a page that make it hot, as counted by `_Heads`."""
HEADS: Final = 1024
STEP: Final = 256
"""Pages looked at between two steps: less than a tenth of a millisecond."""
_BLOCK: Final = 256
_MIX: Final = np.uint64(0xFF51AFD7ED558CCD)

Names = NDArray[np.uint64]


class Namer:
    """Names of pages: a hash of each page, summed up along the path. Not for keys that leave the process."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._draw = np.random.default_rng(seed)
        self._weights: dict[int, Names] = {}
        self._places = np.zeros(0, np.uint64)

    def _odd(self, count: int) -> Names:
        return self._draw.integers(0, 1 << 63, count, dtype=np.uint64) * np.uint64(2) + np.uint64(1)

    def names(self, keys: bytes, stride: int, root: int) -> Names:
        """One name for each whole page of `keys`; equal pages after equal paths under equal roots have equal names."""
        words = np.frombuffer(keys, "<u4").reshape(-1, stride // 4)
        weights = self._weights.get(stride)
        if weights is None:
            weights = self._weights[stride] = self._odd(stride // 4)
        if len(self._places) < len(words):
            self._places = np.concatenate((self._places, self._odd(2 * len(words) - len(self._places))))
        pages = (words @ weights) ^ np.uint64(root)
        pages = (pages ^ (pages >> np.uint64(29))) * _MIX
        path = np.cumsum((pages ^ (pages >> np.uint64(32))) * self._places[: len(pages)], dtype=np.uint64)
        path = (path ^ (path >> np.uint64(33))) * _MIX
        named: Names = path ^ (path >> np.uint64(29))
        return named

    def flat(self, keys: Iterable[bytes], root: int) -> Names:
        """One name for each opaque key."""
        return np.array([xxh3_64_intdigest(key, self._seed) ^ root for key in keys], np.uint64)


class Stack:
    """An LRU stack of at most `most` pages of some weight each, and a histogram of the distances of hits."""

    def __init__(self, most: int, scale: int, requests: int = REQUESTS) -> None:
        self.most = most
        self.scale = scale
        """Pages that an entry stands for, unless it is hot."""
        self.owner: OrderedDict[int, int] = OrderedDict()
        """Name -> the request that touched it last; the least recently touched first."""
        self._live = np.zeros(requests, np.int64)
        """Weight of the pages that each request was the last to touch, in a ring."""
        self._sums = np.zeros(requests // _BLOCK + 1, np.int64)
        self._requests = requests
        self._now = 0
        self.hits = np.zeros(most * scale + 2)
        """hits[d]: pages found at distance d, which a cache of more than d pages has."""

    def touch(self, names: Sequence[int], hot: set[int] | None = None) -> Iterator[None]:
        """One request for these pages, its root first, in steps."""
        self._now += 1
        owner, scale = self.owner, self.scale
        weights = [1 if name in hot else scale for name in names] if hot else [scale] * len(names)
        start, above, known = 0, 0, len(names)
        lasts: list[int] = []
        for at in range(0, known, STEP):
            lasts += [owner.get(name, 0) for name in names[at : at + STEP]]
            yield
        while start < known and (last := lasts[start]):
            stop = start + 1
            while stop < known and lasts[stop] == last:
                stop += 1
            run = sum(weights[start:stop])
            self._found(above + self._newer(last), weights[start:stop])
            self._add(last, -run)
            above += run
            start = stop
            yield
        for last, weight in zip(lasts[start:], weights[start:], strict=True):  # its parent was forgotten
            if last:
                self._add(last, -weight)
        yield from self._own(names, sum(weights), hot)

    def ask(self, names: Sequence[int]) -> None:
        """One request for these keys, none of which needs another, the one that it touches last first."""
        self._now += 1
        newer: dict[int, int] = {}
        lasts = [last for name in names if (last := self.owner.get(name, 0))]
        for last in lasts:
            if last not in newer:
                newer[last] = self._newer(last)
            self._found(newer[last], [self.scale])
            newer[last] += self.scale
        for last in lasts:
            self._add(last, -self.scale)
        for _ in self._own(names, self.scale * len(names), None):
            pass

    def alone(self, name: int) -> None:
        """An entry stands for itself from now on."""
        if last := self.owner.get(name, 0):
            self._add(last, 1 - self.scale)

    def _own(self, names: Sequence[int], weight: int, hot: set[int] | None) -> Iterator[None]:
        """All of them were touched now."""
        owner = self.owner
        for end in range(len(names), 0, -STEP):
            for name in reversed(names[max(0, end - STEP) : end]):
                owner[name] = self._now
                owner.move_to_end(name)
            yield
        self._add(self._now, weight)
        yield from self._forget(hot)

    def _add(self, request: int, weight: int) -> None:
        """Change the weight of what a request was the last to touch."""
        at = request % self._requests
        self._live[at] += weight
        self._sums[at // _BLOCK] += weight

    def _newer(self, last: int) -> int:
        """Weight of what was touched after request `last`."""
        lo, hi = (last + 1) % self._requests, self._now % self._requests
        if lo <= hi:
            return self._between(lo, hi)
        return self._between(lo, self._requests) + self._between(0, hi)

    def _between(self, lo: int, hi: int) -> int:
        first, end = -(-lo // _BLOCK), hi // _BLOCK
        if first >= end:
            return int(self._live[lo:hi].sum())
        edges = self._live[lo : first * _BLOCK].sum() + self._live[end * _BLOCK : hi].sum()
        return int(edges + self._sums[first:end].sum())

    def _found(self, distance: int, weights: list[int]) -> None:
        """Hits at the distances from `distance` on."""
        if self.scale == 1:
            self.hits[distance : distance + len(weights)] += 1  # what is past the end is further than anybody asks
            return
        for weight in weights:
            self.hits[min(distance + weight // 2, len(self.hits) - 1)] += weight
            distance += weight

    def _forget(self, hot: set[int] | None) -> Iterator[None]:
        """Stay within bounds: the oldest first."""
        owner, gone = self.owner, 0
        while owner and (len(owner) > self.most or self._now - next(iter(owner.values())) >= self._requests - 1):
            name, last = owner.popitem(last=False)
            self._add(last, -1 if hot and name in hot else -self.scale)
            gone += 1
            if not gone % STEP:
                yield


class _Heads:
    """Which pages many requests begin with: counts of the pages at 1, 2, 4, 8, ..., the rarest forgotten."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.hot: set[int] = set()

    def see(self, names: Names) -> list[int]:
        """One request; where a page is hot all before it are. Those that are hot from now on."""
        at, new = 1, []
        while at <= len(names):
            name = int(names[at - 1])
            self.counts[name] = count = self.counts.get(name, 0) + 1
            if count == HOT and len(self.hot) + at <= HEADS:
                new += [each for each in names[:at].tolist() if each not in self.hot]
                self.hot.update(new)
            at *= 2
        while len(self.counts) > 4 * HEADS:
            self.counts = {name: count // 2 for name, count in self.counts.items() if count > 1}
        return new


class Distances:
    """Hits at every capacity: exact up to EXACT_PAGES pages, by a sample above."""

    def __init__(self, exact: int = EXACT_PAGES, sample: int = SAMPLE) -> None:
        self.exact = Stack(exact, 1)
        self.sampled = Stack(max(64, exact // 4), sample)
        self._heads = _Heads()
        self._mask = sample - 1
        self.requests = 0
        self.pages = 0
        """Asked for."""

    def see(self, names: Names) -> Iterator[None]:
        """One logical request for these pages, its root first, in steps; the next one begins when all are done."""
        self.requests += 1
        self.pages += len(names)
        known = names.tolist()
        yield from self.exact.touch(known)
        hot = self._heads.hot
        for name in self._heads.see(names):
            self.sampled.alone(name)
        mask = self._mask
        chosen: list[int] = []
        for at in range(0, len(known), STEP):
            chosen += [name for name in known[at : at + STEP] if not name & mask or name in hot]
            yield
        yield from self.sampled.touch(chosen, hot)

    def ask(self, names: Names) -> None:
        """One logical request for these opaque keys, its root first."""
        keys = list(dict.fromkeys(names.tolist()))
        self.requests += 1
        self.pages += len(keys)
        self.exact.ask(keys)
        self.sampled.ask([key for key in keys if not key & self._mask])

    def curve(self, capacities: Sequence[int]) -> list[float]:
        """Pages found at each capacity, in pages."""
        near, far = np.cumsum(self.exact.hits), np.cumsum(self.sampled.hits)
        bound = self.exact.most

        def hits(pages: int) -> float:
            if pages <= 0:
                return 0.0
            found = float(near[min(pages, bound) - 1])
            if pages > bound:
                found += float(far[min(pages, len(far)) - 1]) - float(far[bound - 1])
            return found

        return [hits(pages) for pages in capacities]

    @property
    def most(self) -> int:
        """The largest capacity that anything is known of, in pages."""
        return len(self.sampled.hits) - 2

    def halve(self) -> None:
        """Let what was seen count half."""
        for stack in (self.exact, self.sampled):
            stack.hits *= 0.5
        self.requests //= 2
        self.pages //= 2


def geometric(first: int, last: int, steps: int) -> list[int]:
    """About so many capacities from `first` to `last`, each larger than the one before by the same factor."""
    raw = np.geomspace(max(1, first), max(1, last), steps).round().astype(int).tolist()
    return [raw[0], *(b for a, b in pairwise(raw) if b > a)]
