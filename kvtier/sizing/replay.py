"""Caches replayed one request at a time: the check of the curve, and Belady's bound on what any policy could hit."""

from __future__ import annotations

import heapq
from collections import OrderedDict

from kvtier.sizing.curve import Trace


def lru_hits(trace: Trace, blocks: int, step: int = 1) -> int:
    """Hit blocks of plain LRU at one capacity, each request touching deepest first: slow and obvious.

    Requests resume after a multiple of `step` blocks.
    """
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for r in range(len(trace.leaf)):
        path = trace.path(r)
        full = trace.input_tokens[r] // trace.block_tokens
        found = 0
        for node in path[:full]:
            if node not in cache:
                break
            found += 1
        hits += found // step * step
        for node in reversed(path):
            cache[node] = None
            cache.move_to_end(node)
        while len(cache) > blocks:
            cache.popitem(last=False)
    return hits


def leaf_first_hits(trace: Trace, blocks: int) -> int:
    """Hit blocks where only leaves may go, the least recently used first: what a radix tree does; slower still."""
    used: dict[int, int] = {}
    children: dict[int, int] = {}
    hits = 0
    for r in range(len(trace.leaf)):
        path = trace.path(r)
        full = trace.input_tokens[r] // trace.block_tokens
        for node in path[:full]:
            if node not in used:
                break
            hits += 1
        for node in path:
            if node not in used:
                children[trace.parent[node]] = children.get(trace.parent[node], 0) + 1
            used[node] = r
        while len(used) > blocks:
            # of leaves last used by the same request there is one a branch, and its depth does not matter
            victim = min((n for n in used if not children.get(n)), key=lambda n: (used[n], -n))
            del used[victim]
            children[trace.parent[victim]] -= 1
    return hits


def belady_hits(trace: Trace, blocks: int) -> int:
    """Hit blocks of the policy that evicts what is asked for again last: an upper bound for every policy.

    A block is asked for no later than its descendants, so that evicting by next use, deepest first among equals,
    never cuts a kept block off from its root.
    """
    uses = _next_uses(trace)
    due: dict[int, int] = {}
    heap: list[tuple[int, int]] = []
    hits = 0
    for r in range(len(trace.leaf)):
        path = trace.path(r)
        full = trace.input_tokens[r] // trace.block_tokens
        hits += sum(node in due for node in path[:full])
        for node, use in zip(path, uses[r], strict=True):
            due[node] = use
            heapq.heappush(heap, (-use, -node))
        while len(due) > blocks:
            use, node = heapq.heappop(heap)
            if due.get(-node) == -use:
                del due[-node]
        if len(heap) > 4 * len(due) + 1024:
            heap = [(-use, -node) for node, use in due.items()]
            heapq.heapify(heap)
    return hits


def _next_uses(trace: Trace) -> list[list[int]]:
    """For each block of each request, the next request that asks for it; one past the last where none does."""
    ahead: dict[int, int] = {}
    never = len(trace.leaf)
    out: list[list[int]] = [[]] * never
    for r in range(never - 1, -1, -1):
        path = trace.path(r)
        out[r] = [ahead.get(node, never) for node in path]
        for node in path:
            ahead[node] = r
    return out
