"""Counts what requests found: tokens served by tier, and why the rest was not there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvtier.index.radix import Found
from kvtier.store.cache import Cache
from kvtier.store.evictions import Eviction, Evictions
from kvtier.types import Tier
from kvtier.wire import Segment

REASONS = ("absent", "evicted", "lost", "pending", "rule")
"""absent: nobody stored it; evicted: it left for want of room; lost: its bytes did not check out; pending: somebody is
computing it; rule: it is there, but a window or state that must be with it is not."""


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
