"""Why a prompt is served as it is: what matches, from which tier, where it diverges and what was evicted."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvtier import wire
from kvtier.index import Node
from kvtier.index.radix import Found
from kvtier.store.misses import reason
from kvtier.store.parts import Parts
from kvtier.store.prompts import Prompt, peek, resolve
from kvtier.store.tokens import segments
from kvtier.types import Tier

MOST_SIBLINGS = 4096
SHOWN_TOKENS = 8
MOST_EVICTIONS = 100


class Explain:
    """Answers `kvtierctl explain`."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    async def explain(self, msg: wire.Explain) -> wire.Info:
        """Everything about one prompt. Raises bad_request, unknown."""
        prompt = await resolve(self.parts.caches, self.parts.requests, msg.of)
        cache, found = prompt.cache, peek(prompt)
        evictions = self.parts.persist.evictions
        asked = len(prompt.keys) // cache.index.stride
        tokens = cache.spec.page_tokens
        return wire.Info(
            {
                "cache": {"id": cache.id.hex(), "model": cache.spec.model, "scope": cache.scope, "epoch": cache.epoch},
                "page_tokens": tokens,
                "asked": {"pages": asked, "tokens": asked * tokens},
                "matched": {"pages": found.pages, "tokens": found.pages * tokens},
                "pending_pages": found.pending,
                "segments": _segments(prompt, found),
                "leases": found.node.refs if found.pages else 0,
                "idle_s": round(self.parts.now() - found.node.time, 3) if found.pages else None,
                "chain": _chain(prompt, found),
                "miss": reason(cache, prompt.keys, found, evictions) if found.pages < asked else "",
                "diverges": _divergence(prompt, found) if found.pages < asked else None,
                "evictions": [row._asdict() for row in evictions.along(cache.index, prompt.keys)[-MOST_EVICTIONS:]],
            }
        )


def _segments(prompt: Prompt, found: Found) -> list[dict[str, Any]]:
    """Each part of the match: its tier, pages and the bytes that serving it moves."""
    cache = prompt.cache
    each = sum(cache.item_bytes[group] for group in cache.index.anchors)
    rows, first = [], 0
    for tier, pages in ((s.tier, s.pages) for s in segments(cache, found.node, found.pages)):
        name = Tier(tier).name.lower()
        rows.append({"tier": name, "first_page": first, "pages": pages, "bytes": pages * each})
        first += pages
    return rows


def _chain(prompt: Prompt, found: Found) -> str:
    """Chain key of the last page that matches."""
    if not found.pages:
        return ""
    node, at = prompt.cache.index.locate(found.node, found.pages - 1)
    return prompt.cache.index.chain_of(node)[at * 16 : (at + 1) * 16].hex()


def _divergence(prompt: Prompt, found: Found) -> dict[str, Any] | None:
    """The token at which the prompt leaves what is cached, against the cached page that goes on longest with it."""
    cache = prompt.cache
    size, stride = cache.spec.page_tokens * 4, cache.index.stride
    mine = prompt.keys[found.pages * stride : found.pages * stride + size]
    best, other = -1, b""
    for page in _continuations(prompt, found):
        same = _common(mine, page[:size])
        if same > best:
            best, other = same, page[:size]
    if best < 0:
        return None
    return {
        "page": found.pages,
        "token": found.pages * cache.spec.page_tokens + best,
        "cached": _ids(other, best),
        "asked": _ids(mine, best),
        "extras": best * 4 == size,
    }


def _continuations(prompt: Prompt, found: Found) -> list[bytes]:
    """First pages of what is cached after the match."""
    stride = prompt.cache.index.stride
    node: Node = found.node if found.pages else prompt.cache.index.root
    at = found.pages - node.depth
    if at < node.pages:
        return [node.edge[at * stride : (at + 1) * stride]]
    return [child.edge[:stride] for child in list((node.children or {}).values())[:MOST_SIBLINGS]]


def _common(a: bytes, b: bytes) -> int:
    """Leading tokens that two pages share."""
    differ = np.flatnonzero(np.frombuffer(a, "<i4") != np.frombuffer(b, "<i4"))
    return int(differ[0]) if differ.size else len(a) // 4


def _ids(page: bytes, first: int) -> list[int]:
    """Some token ids from a position on."""
    found: list[int] = np.frombuffer(page, "<i4")[first : first + SHOWN_TOKENS].tolist()
    return found
