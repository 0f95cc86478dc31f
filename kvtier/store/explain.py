"""Why a prompt is served as it is: what matches, from which tier, where it diverges and what was evicted."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from kvtier import wire
from kvtier.index import Node
from kvtier.index.radix import Found
from kvtier.store.busy import rates
from kvtier.store.cache import Cache
from kvtier.store.misses import reason, why_gone
from kvtier.store.parts import Parts
from kvtier.store.prompts import Prompt, peek, resolve
from kvtier.store.segments import segments
from kvtier.store.slices import sliced
from kvtier.types import NO_COPY, Tier

MOST_SIBLINGS = 4096
SHOWN_TOKENS = 8
SHOWN = 5
MOST_EVICTIONS = 100

Data = dict[str, Any]


class Explain:
    """Answers `kvtierctl explain`."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    async def explain(self, msg: wire.Explain) -> wire.Info:
        """Everything about one prompt. Raises bad_request, unknown."""
        prompt = await resolve(self.parts.caches, self.parts.requests, msg.of)
        cache = prompt.cache
        return wire.Info(
            {
                "cache": {"id": cache.id.hex(), "model": cache.spec.model, "scope": cache.scope, "epoch": cache.epoch},
                "page_tokens": cache.spec.page_tokens,
                **(await self._keys(prompt) if cache.spec.keyed else self._path(prompt)),
                "bytes_s": rates(self.parts.counts),
                "evictions": await self._evictions(prompt),
            }
        )

    async def _evictions(self, prompt: Prompt) -> list[Data]:
        """What is remembered of evictions that began at some page of the prompt, latest last."""
        keyed, found = prompt.cache.spec.keyed, []
        async for at, name in sliced(enumerate(prompt.names)):
            record = self.parts.persist.room.evictions.of(prompt.cache.index, 0 if keyed else at, name)
            if record is not None:
                found.append({**record._asdict(), "first": at})
        return sorted(found, key=lambda row: row["when"])[-MOST_EVICTIONS:]

    def _path(self, prompt: Prompt) -> Data:
        """About a path of token pages."""
        cache, found = prompt.cache, peek(prompt)
        tokens, whole = cache.spec.page_tokens, found.pages == prompt.pages
        names = self.parts.persist.room.evictions
        deepest = Found(*cache.radix.deepest(prompt.keys), found.pending)
        return {
            "requests": [path.request or path.session for path in self._same(prompt)],
            "asked": {"pages": prompt.pages, "tokens": prompt.pages * tokens},
            "matched": {"pages": found.pages, "tokens": found.pages * tokens},
            "pending_pages": found.pending,
            "segments": _segments(cache, found),
            "leases": found.node.refs if found.pages else 0,
            "idle_s": round(self.parts.now() - found.node.time, 3) if found.pages else None,
            "chain": _chain(prompt, found),
            "miss": "" if whole else reason(cache, prompt.keys, found, names),
            "diverges": None if deepest.pages == prompt.pages else self._divergence(prompt, deepest),
            "rule": _rule(cache, deepest) if deepest.pages > found.pages else None,
        }

    def _same(self, prompt: Prompt) -> list[Any]:
        """Latest requests that begin with this prompt."""
        found = self.parts.requests.through(prompt.cache, prompt.keys)
        return [path for _, path in zip(range(SHOWN), found, strict=False)]

    def _divergence(self, prompt: Prompt, found: Found) -> Data | None:
        """The token at which the prompt leaves what is cached, against the cached page that goes on longest with it."""
        cache, stride = prompt.cache, prompt.cache.index.stride
        size, tokens = cache.spec.page_tokens * 4, cache.spec.page_tokens
        at = found.pages * stride
        mine = prompt.keys[at : at + size]
        options = [(_common(mine, page[:size]), n, page, node) for n, (page, node) in enumerate(_after(prompt, found))]
        if not options:
            return None
        same, _, page, node = max(options, key=lambda one: (one[0], -one[1]))
        other = Prompt(cache, prompt.keys[:at] + page)
        where = (found.pages - node.depth) * 16
        return {
            "page": found.pages,
            "token": found.pages * tokens + same,
            "asked": _ids(mine, same),
            "cached": _ids(page[:size], same),
            "extras": same * 4 == size,
            "from": {
                "chain": cache.index.chain_of(node)[where : where + 16].hex(),
                "requests": [path.request or path.session for path in self._same(other)],
                "idle_s": round(self.parts.now() - node.time, 3),
            },
        }

    async def _keys(self, prompt: Prompt) -> Data:
        """About opaque keys."""
        cache, states, known = prompt.cache, [], []
        async for name in sliced(prompt.names):
            node = cache.keyed.find(name)
            states.append(self._state(cache, node, name, prompt.group))
            known += [node] if node is not None else []
        there = [state in {"host", "disk"} for state in states]
        lead = [*there, False].index(False)
        return {
            "group": prompt.group,
            "asked": {"pages": prompt.pages},
            "matched": {"pages": lead},
            "present_pages": sum(there),
            "pending_pages": states.count("pending"),
            "segments": _rows(states, cache.item_bytes[prompt.group]),
            "leases": max((node.refs for node in known), default=0),
            "idle_s": round(self.parts.now() - max(node.time for node in known), 3) if known else None,
            "miss": states[lead] if lead < len(states) else "",
            "diverges": None,
        }

    def _state(self, cache: Cache, node: Node | None, name: bytes, group: int) -> str:
        """The fastest tier that has a key, else why none has it."""
        if node is not None and node.live:
            return "host" if cache.index.get(node, 0, Tier.HOST, group) != NO_COPY else "disk"
        if node is not None and node.refs:
            return "pending"
        return why_gone(self.parts.persist.room.evictions.of(cache.index, 0, name))


def _rule(cache: Cache, deepest: Found) -> Data:
    """Pages of the path that are cached, of which a match could not end at the last, and where states are."""
    states = {}
    for group in cache.index.states:
        parts = [node.present(group) for node in cache.index.path(deepest.node)]
        states[str(group)] = [int(at) + 1 for at in np.flatnonzero(np.concatenate(parts)[: deepest.pages])][-SHOWN:]
    return {"cached_pages": deepest.pages, "states_after_pages": states}


def _rows(states: list[str], item_bytes: int) -> list[Data]:
    """Keys in a row that are in the same state."""
    rows: list[Data] = []
    for at, state in enumerate(states):
        if not rows or rows[-1]["tier"] != state:
            rows.append({"tier": state, "first_page": at, "pages": 0, "bytes": 0, "moves": {}})
        rows[-1]["pages"] += 1
        if state in {"host", "disk"}:
            rows[-1]["bytes"] += item_bytes
            rows[-1]["moves"] = {state: rows[-1]["bytes"]}
    return rows


def _segments(cache: Cache, found: Found) -> list[Data]:
    """Each part of the match: its tier, its pages, and the bytes that serving it moves, by where they are."""
    rows: list[Data] = []
    first = 0
    for tier, pages in ((s.tier, s.pages) for s in segments(cache, found.node, found.pages)):
        moves: Counter[str] = Counter()
        for group, start, count in cache.radix.needed(found.pages):
            lo, hi = max(first, start), min(first + pages, start + count)
            if lo < hi:
                near, host = (
                    hi - lo - cache.readable(found.node, group, lo, hi - lo, tiers)[0].count(NO_COPY)
                    for tiers in ((Tier.HOST, Tier.DEVICE), (Tier.HOST,))
                )
                moves["host"] += host * cache.item_bytes[group]
                moves["device"] += (near - host) * cache.item_bytes[group]
                moves["disk"] += (hi - lo - near) * cache.item_bytes[group]
        row: Data = {"tier": Tier(tier).name.lower(), "first_page": first, "pages": pages, "bytes": sum(moves.values())}
        rows.append({**row, "moves": {name: size for name, size in moves.items() if size}})
        first += pages
    return rows


def _chain(prompt: Prompt, found: Found) -> str:
    """Chain key of the last page that matches."""
    if not found.pages:
        return ""
    node, at = prompt.cache.index.locate(found.node, found.pages - 1)
    return prompt.cache.index.chain_of(node)[at * 16 : (at + 1) * 16].hex()


def _after(prompt: Prompt, found: Found) -> list[tuple[bytes, Node]]:
    """First pages of what is cached after the match, and the nodes that they are in."""
    stride = prompt.cache.index.stride
    node = found.node if found.pages else prompt.cache.index.root
    at = found.pages - node.depth
    if at < node.pages:
        return [(node.edge[at * stride : (at + 1) * stride], node)]
    return [(child.edge[:stride], child) for child in list((node.children or {}).values())[:MOST_SIBLINGS]]


def _common(a: bytes, b: bytes) -> int:
    """Leading tokens that two pages share."""
    differ = np.flatnonzero(np.frombuffer(a, "<i4") != np.frombuffer(b, "<i4"))
    return int(differ[0]) if differ.size else len(a) // 4


def _ids(page: bytes, first: int) -> list[int]:
    """Some token ids from a position on."""
    found: list[int] = np.frombuffer(page, "<i4")[first : first + SHOWN_TOKENS].tolist()
    return found
