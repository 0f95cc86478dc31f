"""What a peer asks for of a path that is here, and the slots and checksums that answer it."""

from __future__ import annotations

from typing import Final, NamedTuple

from kvtier.index import Node
from kvtier.peer.base import Pick, Place, Shared
from kvtier.peer.items import CHUNK_BYTES, echo, items_of, nbytes_of
from kvtier.store.cache import Cache
from kvtier.store.pushes import lend, path_keys
from kvtier.types import bad

MAX_FETCH: Final = 64
"""Items of one fetch, where they are more than CHUNK_BYTES."""


class Lent(NamedTuple):
    """Items that are sent: where they are, their checksums, the echo that names the path, their bytes together."""

    places: list[Place]
    sums: list[int]
    name: bytes
    nbytes: int


def asked(cache: Cache, picks: tuple[Pick, ...], pages: int) -> tuple[list[tuple[int, int]], int]:
    """Items of a path of `pages` pages that are asked for, and their bytes; raises bad_request."""
    items = items_of(cache.spec, picks, pages)
    nbytes = nbytes_of(cache.spec, items)
    if not items or (nbytes > CHUNK_BYTES and len(items) > MAX_FETCH and len({page for _, page in items}) > 1):
        raise bad("picks", f"items of about {CHUNK_BYTES} bytes", nbytes)
    return items, nbytes


def lent_of(cache: Cache, node: Node, shared: Shared, items: list[tuple[int, int]], nbytes: int) -> Lent | None:
    """Items of a leased path, to be sent; None where not all of them are in host."""
    places, sums = lend(cache, node, items)
    whole = len(places) == len(items)
    return Lent(places, sums, echo(shared.id, path_keys(cache, node)), nbytes) if whole else None
