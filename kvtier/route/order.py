"""In which order a batch of waiting requests is best served: longest shared prefix first, and nobody waits too long.

Serving the request that shares most with what is cached, again and again, walks the tree of the waiting prompts depth
first. As long as the cache holds the longest request, every shared page is then computed once, which no order beats
(tests/test_route.py compares with all orders of small batches). A request that has waited past the bound goes before
all that have not.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

BLOCK = 4096
"""Bytes that are compared at a time."""


def order(
    paths: Sequence[bytes], stride: int, cached: Sequence[int], waited_s: Sequence[float], bound_s: float
) -> list[int]:
    """Numbers of the requests in the order to serve them.

    `paths` are page keys of `stride` bytes, `cached` how many leading pages of each are cached now. Those that waited
    for `bound_s` or more come first, the longest wait first.
    """
    overdue = sorted((n for n in range(len(paths)) if waited_s[n] >= bound_s), key=lambda n: -waited_s[n])
    rest = sorted((n for n in range(len(paths)) if waited_s[n] < bound_s), key=lambda n: (paths[n], -waited_s[n]))
    shared = [_common(paths[a], paths[b]) // stride for a, b in itertools.pairwise(rest)]
    return overdue + _walk(rest, shared, cached, waited_s)


def _common(a: bytes, b: bytes) -> int:
    """Leading bytes that two strings share."""
    most = min(len(a), len(b))
    for at in range(0, most, BLOCK):
        end = min(at + BLOCK, most)
        if a[at:end] != b[at:end]:
            differs = np.frombuffer(a, np.uint8, end - at, at) != np.frombuffer(b, np.uint8, end - at, at)
            return at + int(differs.argmax())
    return most


def _walk(sorted_: list[int], shared: list[int], cached: Sequence[int], waited_s: Sequence[float]) -> list[int]:
    """Depth first over the tree of prompts in dictionary order; at a fork, first where most is cached, then who waits.

    `shared[n]` is how many pages requests n and n + 1 of the list share.
    """
    out: list[int] = []
    stack = [(0, len(sorted_))]
    while stack:
        lo, hi = stack.pop()
        if hi - lo < 2:
            out += sorted_[lo:hi]
            continue
        fork = min(shared[lo : hi - 1])
        cuts = [lo, *(n + 1 for n in range(lo, hi - 1) if shared[n] == fork), hi]
        parts = list(itertools.pairwise(cuts))
        parts.sort(key=lambda part: max((cached[n], waited_s[n]) for n in sorted_[part[0] : part[1]]))
        stack += parts
    return out
