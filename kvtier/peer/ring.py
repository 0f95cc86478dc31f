"""Which hosts are a prompt's homes: rendezvous hashing of its beginning, on two rungs. Pure.

A page is of no use without those before it, so a home must get whole prefixes. All prompts that begin alike up to a
depth share their homes: the first page decides for the first RUNG_TOKENS tokens of a prompt, the first RUNG_TOKENS
tokens decide for all of it. A short prompt that grows keeps its homes until it passes the rung; conversations behind
one system prompt are spread over the fleet once they differ within the rung, each with a copy of what they share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import xxhash

from kvtier.peer.base import Shared

RUNG_TOKENS: Final = 2048


class Rung(NamedTuple):
    """`key` decides where the first `pages` pages of a path live."""

    key: bytes
    pages: int


def rungs(shared: Shared, keys: bytes) -> list[Rung]:
    """The rungs of a path, deepest first."""
    stride = shared.spec.stride
    total = len(keys) // stride
    deep = -(-RUNG_TOKENS // shared.spec.page_tokens)
    if not total:
        return []
    out = [Rung(_key(shared, keys[:stride]), min(total, deep))]
    if total > deep > 1:
        out.insert(0, Rung(_key(shared, keys[: deep * stride]), total))
    elif deep == 1:
        out = [Rung(out[0].key, total)]
    return out


def key_name(shared: Shared, group: int, key: bytes) -> bytes:
    """Names a key of a keyed cache."""
    return _key(shared, bytes((group,)) + key)


def _key(shared: Shared, prefix: bytes) -> bytes:
    """Names a beginning of prompts of one cache."""
    return xxhash.xxh3_128_digest(shared.id + prefix)


def homes(names: Sequence[str], key: bytes, replicas: int) -> list[str]:
    """The `replicas` hosts whose hash with the key is highest: a host that goes moves only what it had."""
    return sorted(names, key=lambda name: (xxhash.xxh3_64_intdigest(name.encode() + b"\0" + key), name))[-replicas:][
        ::-1
    ]
