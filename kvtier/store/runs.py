"""Runs: which pages of a node need one on disk, and what a run is called there."""

from __future__ import annotations

import numpy as np

from kvtier.identity import CHAIN_BYTES
from kvtier.index import Node
from kvtier.store.cache import Cache
from kvtier.types import NO_COPY, Tier


def unsaved_runs(cache: Cache, node: Node) -> list[tuple[int, int]]:
    """Ranges of published pages of a node with items that only host holds."""
    if not node.count[Tier.HOST]:
        return []
    only = np.zeros(node.pages, dtype=bool)
    for group in range(cache.index.groups):
        only |= node.present(group, (Tier.HOST,)) & ~node.present(group, (Tier.DISK,))
    edges = np.flatnonzero(np.diff(only[: node.live], prepend=False, append=False))
    return [(int(lo), int(hi)) for lo, hi in edges.reshape(-1, 2)]


def within_reach(cache: Cache, node: Node, first: int, end: int) -> int:
    """How many pages from `first` on have their anchors in host or on disk: a device alone may have the next."""
    count = end - first
    if Tier.DEVICE not in cache.pools:
        return count
    for group in cache.index.anchors:
        held, _ = cache.readable(node, group, first, count, (Tier.HOST, Tier.DISK))
        if NO_COPY in held:
            count = held.index(NO_COPY)
    return count


def names_of(cache: Cache, node: Node, first: int, end: int) -> tuple[bytes, bytes, bytes]:
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
            chain = cache.index.chain_to(up, hi - up.depth)
            chains.append(chain[(lo - up.depth) * CHAIN_BYTES : (hi - up.depth) * CHAIN_BYTES])
        if up.depth <= first:
            break
        assert up.parent is not None
        up = up.parent
    if first > up.depth:
        end = (first - up.depth) * CHAIN_BYTES
        before = cache.index.chain_to(up, first - up.depth)[end - CHAIN_BYTES : end]
    else:
        assert up.parent is not None
        before = cache.index.chain_of(up.parent)[-CHAIN_BYTES:]
    return b"".join(reversed(keys)), b"".join(reversed(chains)), before
