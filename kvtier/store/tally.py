"""Counts what requests found, once they have their answers: use of nodes, tokens by tier, why the rest was not there.

Counting takes longer than matching; the engine waits only for the latter.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from kvtier.index.radix import Found
from kvtier.store.cache import Cache
from kvtier.store.evictions import Eviction, Evictions
from kvtier.types import Tier
from kvtier.wire import Segment

if TYPE_CHECKING:
    from kvtier.store.instance import Path
    from kvtier.store.parts import Parts

REASONS = ("absent", "evicted", "lost", "pending", "rule")
"""absent: nobody stored it; evicted: it left for want of room; lost: its bytes did not check out; pending: somebody is
computing it; rule: it is there, but a window or state that must be with it is not."""


AT_ONCE: Final = 8
"""More are counted at once, in the turn of whoever asked for them: others would wait for it."""


class Due(NamedTuple):
    """One match to be counted."""

    path: Path
    found: Found
    segments: Sequence[Segment]
    first: bool
    """Of its request: one logical request counts once, however often it polls."""
    now: float


class Tally:
    """Matches that were answered and are not counted yet."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._due: list[Due] = []

    def note(self, path: Path, found: Found, segments: Sequence[Segment], *, first: bool) -> None:
        """Count a match when its reply is sent, or when `settle` is called before that."""
        if not self._due:
            loop = asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, self.settle)  # a turn later, when the loop has sent what it served now
        self._due.append(Due(path, found, segments, first, self._parts.now()))
        if len(self._due) >= AT_ONCE:
            self.settle()

    def settle(self) -> None:
        """Count what is due."""
        due, self._due = self._due, []
        for each in due:
            cache = each.path.cache
            if not each.path.used and each.found.pages and not cache.retired:
                self._use(each)
            if each.first:
                self._parts.ways.curves.note(cache, each.path.keys)
                persist = self._parts.persist
                count(cache, each.path.keys, each.found, each.segments, self._parts.counts, persist.evictions)

    def _use(self, due: Due) -> None:
        """Tell the index where a request ended; of a path that was cut short meanwhile, where it ends now."""
        path, (node, pages, _) = due.path, due.found
        path.used = True
        index = path.cache.radix
        if node.dead or not node.depth < pages <= node.end:
            node, pages = index.deepest(path.keys[: pages * index.stride])
        if not pages:
            return
        node = index.ending_at(node, pages)
        index.use(node, due.now)
        if index.crowded(node) and not self._parts.loading:
            index.join(node)


def reason(cache: Cache, keys: bytes, found: Found, evictions: Evictions) -> str:
    """Why a path is not served beyond found.pages (one of REASONS)."""
    if found.pending:
        return "pending"
    stride = cache.index.stride
    page = found.pages
    if (cache.radix.windows or cache.radix.states) and cache.radix.deepest(keys)[1] > page:
        return "rule"
    return why_gone(evictions.of(cache.index, page, keys[page * stride : (page + 1) * stride]))


def why_gone(eviction: Eviction | None) -> str:
    """Why a page is not there, by what is remembered of its going (absent, evicted, lost)."""
    if eviction is None:
        return "absent"
    return "lost" if eviction.why.startswith("lost") else "evicted"


def count(
    cache: Cache, keys: bytes, found: Found, segments: Sequence[Segment], counts: Counter[str], evictions: Evictions
) -> None:
    """Count one request."""
    asked = len(keys) // cache.index.stride
    tokens = cache.spec.page_tokens
    cache.counts["requests"] += 1
    cache.counts["pages_asked"] += asked
    cache.counts["pages_hit"] += found.pages
    counts["requests"] += 1
    counts["requests_hit"] += found.pages > 0
    counts["tokens_asked"] += asked * tokens
    for segment in segments:
        counts[f"tokens_hit_{Tier(segment.tier).name.lower()}"] += segment.pages * tokens
    if found.pages < asked:
        counts[f"tokens_missed_{reason(cache, keys, found, evictions)}"] += (asked - found.pages) * tokens
