"""The exact hit curve of leaf-first LRU at every capacity, from one pass over a trace."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple


class Trace(NamedTuple):
    """Requests as leaves of a tree of blocks: block b's parent is parent[b] (-1 for a root), always before it."""

    name: str
    block_tokens: int
    parent: Sequence[int]
    leaf: Sequence[int]
    """Deepest block of each request, -1 for a request shorter than a block."""
    input_tokens: Sequence[int]
    output_tokens: Sequence[int]
    time_s: Sequence[float]
    token_bytes: int = 0
    """Bytes a token where the log says, else 0."""

    def path(self, request: int) -> list[int]:
        """Blocks of a request, root first."""
        out = []
        node = self.leaf[request]
        while node >= 0:
            out.append(node)
            node = self.parent[node]
        out.reverse()
        return out

    @property
    def seconds(self) -> float:
        """From the first request to the last."""
        return max(self.time_s) - min(self.time_s) if self.time_s else 0.0


class Curve(NamedTuple):
    """Hits at each capacity, in blocks; `hits[c]` is the count at c blocks, the last entry holds for all larger."""

    hits: array[int]
    references: int
    """Blocks asked for, complete ones and the last part of a prompt."""
    unique: int
    requests: int
    tokens: int
    """Prompt tokens of the counted requests: the denominator of the hit ratio."""
    block_tokens: int
    once: int
    """Blocks that a single request asked for."""
    per_request: list[array[int]]
    """For each capacity that was asked about, hit blocks of each request."""

    def hit_tokens(self, blocks: int) -> int:
        """Prompt tokens found in a cache of `blocks` blocks."""
        return self.hits[max(0, min(blocks, len(self.hits) - 1))] * self.block_tokens

    def ratio(self, blocks: int) -> float:
        """Token-weighted hit ratio at `blocks` blocks."""
        return self.hit_tokens(blocks) / self.tokens if self.tokens else 0.0

    @property
    def ceiling(self) -> float:
        """The hit ratio of a cache that never evicts."""
        return self.ratio(len(self.hits) - 1)

    def needed(self, ratio: float) -> int:
        """The fewest blocks that reach `ratio`; the whole working set where nothing does."""
        want = -(-ratio * self.tokens // self.block_tokens)
        return min(bisect_left(self.hits, want), len(self.hits) - 1)


def hit_curve(trace: Trace, capacities: Sequence[int] = (), warmup: float = 0.0, step: int = 1) -> Curve:
    """Stack distances of every block of every request.

    A request touches its blocks deepest first and its root last, so that the LRU stack stays closed under prefixes
    and plain LRU is leaf-first LRU. Blocks that were last touched by the same request lie side by side in the stack:
    one Fenwick query over requests, not blocks, places the whole run. The part of a block at the end of a prompt
    counts as a miss. `warmup` leaves that share of the requests out of the counts, not out of the cache. A request
    resumes after a multiple of `step` blocks: what is found beyond the last of them is computed again.
    """
    count = len(trace.leaf)
    tree = [0] * (count + 1)
    owner = [0] * len(trace.parent)
    once = bytearray(len(trace.parent))
    rises = [0] * (len(trace.parent) + 2)
    per_request = [array("l", bytes(array("l").itemsize * count)) for _ in capacities]
    first = int(count * warmup)
    resident = references = tokens = 0
    for r in range(1, count + 1):
        path = trace.path(r - 1)
        full = min(len(path), trace.input_tokens[r - 1] // trace.block_tokens)
        counts = r > first
        if counts:
            references += len(path)
            tokens += trace.input_tokens[r - 1]
        n = len(path)
        start = 0
        while start < n and (last := owner[path[start]]):
            stop = start + 1
            while stop < n and owner[path[stop]] == last:
                stop += 1
            newer, k = resident + start, last  # this path's blocks above have left the tree already
            while k:
                newer -= tree[k]
                k &= k - 1
            run = stop - start
            if counts and (hit := min(stop, full) - start) > 0:
                if step == 1:
                    rises[newer + 1] += 1
                    rises[newer + hit + 1] -= 1
                else:
                    for end in range(newer + step - start % step, newer + hit + 1, step):
                        rises[end] += step
                        rises[end + 1] -= step
                for row, capacity in zip(per_request, capacities, strict=True):
                    there = start + max(0, min(hit, capacity - newer))
                    row[r - 1] += (there // step - start // step) * step
            k = last
            while k <= count:
                tree[k] -= run
                k += k & -k
            resident -= run
            for node in path[start:stop]:
                once[node] = 1
            start = stop
        for node in path:
            owner[node] = r
        k = r
        while k <= count:
            tree[k] += n
            k += k & -k
        resident += n
    unique = sum(1 for r in owner if r)
    return Curve(_twice_summed(rises, unique), references, unique, count - first, tokens, trace.block_tokens,
                 unique - sum(once), per_request)  # fmt: skip


def _twice_summed(rises: list[int], unique: int) -> array[int]:
    """Hits up to each distance, from where runs of distances begin and end."""
    out = array("q")
    here = total = 0
    for rise in rises[: unique + 1]:
        here += rise
        total += here
        out.append(total)
    return out


def knee(curve: Curve) -> int:
    """Blocks where the curve stands highest above the straight line from nothing to its ceiling."""
    last = curve.needed(curve.ceiling)
    if last <= 0:
        return 0
    top = curve.hits[last]
    return max(range(last + 1), key=lambda c: curve.hits[c] * last - top * c)


def sample_capacities(curve: Curve, points: int = 30) -> list[int]:
    """Capacities for a table or a plot: geometric, ending where the curve ends."""
    last = max(1, curve.needed(curve.ceiling))
    first = max(1, last // 1000)
    steps = {round(first * (last / first) ** (i / (points - 1))) for i in range(points)}
    return sorted(steps)
