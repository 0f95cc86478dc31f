"""How operators name a prompt: tokens, the engine's request or session id, a chain key, or opaque keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from kvtier import wire
from kvtier.identity import CHAIN_BYTES, EXTRA_BYTES, TOKEN_BYTES, CacheSpec
from kvtier.index import Hold, Node
from kvtier.index.node import LOCAL
from kvtier.index.radix import Found
from kvtier.store.cache import Cache
from kvtier.store.loads import Loads, Missing
from kvtier.store.requests import Requests
from kvtier.store.slices import sliced
from kvtier.types import Code, KvtierError, bad

MOST_KEYS: Final = 4096
"""Looked up and leased in one go, like the keys of an engine's Exists."""


class Prompt(NamedTuple):
    """Page keys of a path in a token cache, or keys of one group of a keyed cache."""

    cache: Cache
    keys: bytes
    group: int = 0

    @property
    def pages(self) -> int:
        """How many pages or keys it names."""
        spec = self.cache.spec
        return len(self.keys) // (spec.key_bytes if spec.keyed else spec.stride)

    @property
    def names(self) -> Iterator[bytes]:
        """The pages or keys as the cache's index has them."""
        spec = self.cache.spec
        size = spec.key_bytes if spec.keyed else spec.stride
        front = bytes((self.group,)) if spec.keyed else b""
        return (front + self.keys[at : at + size] for at in range(0, self.pages * size, size))


class Held(NamedTuple):
    """What is cached of a prompt: the node that its match ends in, or one node for each opaque key that is there."""

    cache: Cache
    nodes: list[Node]
    pages: int
    needed: list[tuple[int, int, int]]
    """(group, first, count) of the items on the path to each node."""

    @property
    def cost(self) -> int:
        """Host bytes that all of it takes."""
        each = sum(count * self.cache.slot_cost(group) for group, _, count in self.needed)
        return each * len(self.nodes)

    def lease(self) -> None:
        """Pin all of it."""
        for node in self.nodes:
            self.cache.index.lease(node, Hold.PIN)

    def missing(self, loads: Loads) -> list[Missing]:
        """Items that are on disk and not in host."""
        return [m for node in self.nodes if not node.dead for m in loads.missing(self.cache, node, self.needed)]


def held(prompt: Prompt) -> Held:
    """What is cached of a prompt."""
    cache = prompt.cache
    if cache.spec.keyed:
        nodes = [node for name in prompt.names if (node := cache.keyed.find(name)) is not None and node.live]
        return Held(cache, nodes, len(nodes), [(prompt.group, 0, 1)])
    found = peek(prompt)
    nodes = [cache.radix.ending_at(found.node, found.pages)] if found.pages else []
    return Held(cache, nodes, found.pages, cache.radix.needed(found.pages))


def peek(prompt: Prompt) -> Found:
    """What of a path matches, as `match` would say, without counting as a use."""
    index = prompt.cache.radix
    node, end = index.deepest(prompt.keys)
    pending = index.known(prompt.keys) - end
    if index.windows or index.states:
        node, end = index.resumable(node, end, LOCAL)
    return Found(node, end, pending)


def cache_of(caches: dict[int, Cache], prefix: str, *, keyed: bool | None = None) -> Cache:
    """The one cache (of the given kind) whose id begins with `prefix`; raises unknown."""
    found = [
        cache
        for cache in caches.values()
        if cache.id.hex().startswith(prefix.lower()) and keyed in {None, cache.spec.keyed} and not cache.retired
    ]
    if len(found) != 1:
        kind = {None: "", True: "keyed ", False: "token "}[keyed]
        which = f"have an id that begins with {prefix!r}" if prefix else "are here"
        more = ": say which by the beginning of its id" if found else ""
        raise KvtierError(Code.UNKNOWN, f"{len(found)} {kind}caches {which}{more}", "cache")
    return found[0]


async def resolve(caches: dict[int, Cache], requests: Requests, of: wire.Prompt) -> Prompt:
    """The prompt that an operator names. Raises bad_request, unknown."""
    if sum(map(bool, (of.tokens, of.request, of.session, of.chain, of.keys))) != 1:
        raise bad("of", "exactly one of tokens, request, session, chain and keys")
    if of.request or of.session:
        path = requests.get(of.request) if of.request else next((path for path, _ in requests.latest(of.session)), None)
        if path is None or path.cache.number not in caches:
            what = f"request {of.request!r}" if of.request else f"request of session {of.session!r}"
            raise KvtierError(Code.UNKNOWN, f"no recent {what}", "request" if of.request else "session")
        return Prompt(path.cache, path.keys)
    if of.chain:
        if len(of.chain) != CHAIN_BYTES:
            raise bad("chain", f"{CHAIN_BYTES} bytes", len(of.chain))
        return await _by_chain([c for c in caches.values() if c.id.hex().startswith(of.cache.lower())], of.chain)
    if of.keys:
        return _by_keys(cache_of(caches, of.cache, keyed=True), of)
    cache = cache_of(caches, of.cache, keyed=False)
    return Prompt(cache, keys_of(cache.spec, of.tokens))


def _by_keys(cache: Cache, of: wire.Prompt) -> Prompt:
    """Opaque keys of one group. Raises bad_request."""
    size = cache.spec.key_bytes
    if not 0 <= of.group < cache.index.groups:
        raise bad("group", f"0..{cache.index.groups - 1}", of.group)
    if len(of.keys) % size or len(of.keys) // size > MOST_KEYS:
        raise bad("keys", f"at most {MOST_KEYS} keys of {size} bytes", f"{len(of.keys)} bytes")
    return Prompt(cache, of.keys, of.group)


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
    for cache in caches:
        if cache.spec.keyed:
            continue
        async for node in sliced(cache.index.walk()):
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


def own(prompt: Prompt) -> list[Node]:
    """The nodes, with all below them, that no other prompt shares: what evicting this prompt takes."""
    if prompt.cache.spec.keyed:
        return held(prompt).nodes
    index = prompt.cache.radix
    node, pages = index.deepest(prompt.keys)
    whole = pages * index.stride == len(prompt.keys)
    if not pages or not (whole or (pages == node.end and not node.children)):
        return []
    while node.parent is not None and node.parent is not index.root and len(node.parent.children or ()) == 1:
        node = node.parent
    return [node]
