"""What no policy can beat: Belady's choice, which knows when each block is asked for again."""

from __future__ import annotations

import heapq

from kvtier.replay.trace import Requests


def belady(requests: Requests, pages: int, first: int = 0) -> float:
    """Token hit ratio of evicting what is asked for again last; requests before `first` are not counted.

    A block is asked for no later than what follows it, so that evicting by next use, the deepest first among equals,
    never cuts a kept block off from its root. A block that never comes back is not kept at all.
    """
    uses = _next_uses(requests)
    ends = _ends(requests)
    held = [0] * len(requests.parent)
    due = [0] * len(requests.parent)
    heap: list[tuple[int, int, int]] = []
    used = hits = asked = 0
    for r, ahead in enumerate(uses):
        path = requests.path(r)
        got, whole = 0, True
        for segment, use in zip(path, ahead, strict=True):
            size = requests.pages(segment)
            got += held[segment] if whole else 0
            whole = whole and held[segment] == size
            used += size - held[segment]
            held[segment], due[segment] = size, use
            heapq.heappush(heap, (-use, -ends[segment], segment))
        if r >= first:
            hits += min(got * requests.block_tokens, requests.tokens[r])
            asked += requests.tokens[r]
        while used > pages:
            use, end, segment = heapq.heappop(heap)
            if due[segment] != -use or not held[segment]:
                continue
            gone = min(held[segment], used - pages)
            held[segment] -= gone
            used -= gone
            if held[segment]:
                heapq.heappush(heap, (use, end, segment))
    return hits / asked if asked else 0.0


def _ends(requests: Requests) -> list[int]:
    """Page number after the last of each segment."""
    out: list[int] = []
    for segment, up in enumerate(requests.parent):
        out.append(requests.pages(segment) + (out[up] if up >= 0 else 0))
    return out


def _next_uses(requests: Requests) -> list[list[int]]:
    """For each segment of each request, the next request that asks for it; one past the last where none does."""
    never = len(requests.leaf)
    ahead = [never] * len(requests.parent)
    out: list[list[int]] = [[]] * never
    for r in range(never - 1, -1, -1):
        path = requests.path(r)
        out[r] = [ahead[segment] for segment in path]
        for segment in path:
            ahead[segment] = r
    return out
