"""Counts what requests found: use of nodes, tokens by tier, why the rest was not there.

At once, not after the reply: where the engine runs on the core that the daemon answered from, it would wait for that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

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


class Tally:
    """Counts matches."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def note(self, path: Path, found: Found, segments: Sequence[Segment], *, first: bool) -> None:
        """Count a match; one logical request counts once, however often it polls (`first`: of its request)."""
        cache, parts = path.cache, self._parts
        if not path.used and found.pages:
            path.used = True
            node = cache.radix.ending_at(found.node, found.pages)
            cache.radix.use(node, parts.now())
            if cache.radix.crowded(node) and not parts.loading:
                cache.radix.join(node)
        if first:
            parts.ways.curves.note(cache, path.keys)
            count(cache, path.keys, found, segments, parts.counts, parts.persist.evictions)


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
