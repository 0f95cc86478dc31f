"""How operators name a prompt: its tokens, the engine's request id, or a page's chain key. Looks, touches nothing."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from typing import Final, NamedTuple

import numpy as np

from kvtier import wire
from kvtier.identity import CHAIN_BYTES, EXTRA_BYTES, TOKEN_BYTES, CacheSpec
from kvtier.index import Node
from kvtier.index.node import LOCAL
from kvtier.index.radix import Found
from kvtier.store.cache import Cache
from kvtier.store.instance import Path
from kvtier.types import Code, KvtierError, bad

SLICE_S: Final = 1e-3
MOST_REQUESTS: Final = 1024
MOST_BYTES: Final = 64 << 20


class Requests:
    """The latest requests by the engines' own ids, also after the engine forgot them. Bounded."""

    def __init__(self) -> None:
        self._paths: OrderedDict[str, Path] = OrderedDict()
        self._bytes = 0

    def note(self, path: Path, added: int) -> None:
        """A request was asked for, with `added` bytes of keys more than before."""
        if not path.request:
            return
        known = self._paths.pop(path.request, None)
        if known is path:
            self._bytes += added
        else:
            self._bytes += len(path.keys) - (0 if known is None else len(known.keys))
        self._paths[path.request] = path
        while len(self._paths) > MOST_REQUESTS or (self._bytes > MOST_BYTES and len(self._paths) > 1):
            _, old = self._paths.popitem(last=False)
            self._bytes -= len(old.keys)

    def get(self, request: str) -> Path | None:
        """The latest request of that id."""
        return self._paths.get(request)


class Prompt(NamedTuple):
    """A path of page keys in one cache."""

    cache: Cache
    keys: bytes


def peek(prompt: Prompt) -> Found:
    """What of a prompt matches, as `match` would say, without counting as a use."""
    index = prompt.cache.radix
    node, end = index.deepest(prompt.keys)
    pending = index.known(prompt.keys) - end
    if index.windows or index.states:
        node, end = index.resumable(node, end, LOCAL)
    return Found(node, end, pending)


def cache_of(caches: dict[int, Cache], prefix: str, *, tokens: bool) -> Cache:
    """The one cache whose id begins with `prefix` (of token caches only where asked); raises unknown."""
    found = [c for c in caches.values() if c.id.hex().startswith(prefix.lower()) and not (tokens and c.spec.keyed)]
    if len(found) != 1:
        raise KvtierError(Code.UNKNOWN, f"{len(found)} caches have an id that begins with {prefix!r}", "cache")
    return found[0]


async def resolve(caches: dict[int, Cache], requests: Requests, of: wire.Prompt) -> Prompt:
    """The prompt that an operator names. Raises bad_request, unknown."""
    if sum(map(bool, (of.tokens, of.request, of.chain))) != 1:
        raise bad("of", "exactly one of tokens, request and chain")
    if of.request:
        path = requests.get(of.request)
        if path is None or path.cache.number not in caches:
            raise KvtierError(Code.UNKNOWN, f"no request {of.request!r} lately", "request")
        return Prompt(path.cache, path.keys)
    if of.chain:
        if len(of.chain) != CHAIN_BYTES:
            raise bad("chain", f"{CHAIN_BYTES} bytes", len(of.chain))
        return await _by_chain([c for c in caches.values() if c.id.hex().startswith(of.cache.lower())], of.chain)
    cache = cache_of(caches, of.cache, tokens=True)
    return Prompt(cache, keys_of(cache.spec, of.tokens))


def keys_of(spec: CacheSpec, tokens: bytes) -> bytes:
    """Page keys of raw int32 tokens; pages of images and the like cannot be named so, and match as plain text."""
    if len(tokens) % TOKEN_BYTES:
        raise bad("tokens", "int32 token ids", len(tokens))
    size = spec.page_tokens * TOKEN_BYTES
    pages = len(tokens) // size
    if not spec.extras:
        return tokens[: pages * size]
    keys = np.zeros((pages, size + EXTRA_BYTES), np.uint8)
    keys[:, :size] = np.frombuffer(tokens, np.uint8, pages * size).reshape(pages, size)
    return keys.tobytes()


async def _by_chain(caches: list[Cache], chain: bytes) -> Prompt:
    """The path that ends with the page of that chain key; looks at every page, in slices."""
    until = time.perf_counter() + SLICE_S
    for cache in caches:
        if cache.spec.keyed:
            continue
        for node in list(cache.index.walk()):
            if time.perf_counter() > until:
                await asyncio.sleep(0)
                until = time.perf_counter() + SLICE_S
            at = -1 if node.dead else _position(cache.index.chain_of(node), chain)
            if at >= 0:
                edges = b"".join(each.edge for each in cache.index.path(node))
                return Prompt(cache, edges[: (node.depth + at + 1) * cache.index.stride])
    raise KvtierError(Code.UNKNOWN, "no page has that chain key", "chain")


def _position(chains: bytes, chain: bytes) -> int:
    """Which page has the key; -1: none."""
    at = chains.find(chain)
    while at >= 0 and at % CHAIN_BYTES:
        at = chains.find(chain, at + 1)
    return at // CHAIN_BYTES if at >= 0 else -1


def own_subtree(prompt: Prompt, found: Found) -> Node | None:
    """The first node of the path that no other prompt shares; all below it continues this prompt. None: all shared."""
    index = prompt.cache.radix
    node = found.node
    whole = found.pages * index.stride == len(prompt.keys)
    if not found.pages or not (whole or (found.pages == node.end and not node.children)):
        return None
    while node.parent is not None and node.parent is not index.root and len(node.parent.children or ()) == 1:
        node = node.parent
    return node
