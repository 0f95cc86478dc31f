"""Lists of items as they travel: picks, their bytes, and the echo that names the path they belong to. Pure."""

from __future__ import annotations

import hashlib
import itertools
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import xxhash

from kvtier.identity import CacheSpec
from kvtier.peer.base import Pick, Place, Shared
from kvtier.peer.frames import MAX_ITEMS
from kvtier.types import RUN_PAGES, bad

CHUNK_BYTES: Final = 16 << 20
"""Pages go in pieces of about so much: a piece is served as soon as it is there, and is all that a failure costs."""


def echo(cache: bytes, keys: bytes) -> bytes:
    """Names a path of a cache: 16 bytes."""
    return hashlib.blake2b(keys, digest_size=16, key=cache).digest()


def page_name(shared: Shared, keys: bytes, page: int) -> bytes:
    """Names page `page` of a path with all before it, in this process."""
    return xxhash.xxh3_128_digest(shared.id + keys[: (page + 1) * shared.spec.stride])


def chunk_pages(spec: CacheSpec) -> int:
    """Pages that go in one piece."""
    per_page = sum(group.item_bytes for group in spec.groups)
    return max(1, min(RUN_PAGES, CHUNK_BYTES // per_page))


def chunks(spec: CacheSpec, places: Sequence[Place]) -> Iterator[list[Place]]:
    """The places in order, cut so that what is asked for at once is a piece at most, or one item."""
    part, room = list[Place](), CHUNK_BYTES
    for place in places:
        nbytes = spec.groups[place.group].item_bytes
        if part and nbytes > room:
            yield part
            part, room = [], CHUNK_BYTES
        part.append(place)
        room -= nbytes
    if part:
        yield part


def picks_of(places: Iterable[tuple[int, int]]) -> tuple[Pick, ...]:
    """Picks of (group, page) pairs, which are grouped by group."""
    groups: dict[int, list[int]] = {}
    for group, page in places:
        groups.setdefault(group, []).append(page)
    return tuple(Pick(group, struct.pack(f"<{len(pages)}i", *pages)) for group, pages in groups.items())


def span_of(groups: int, pages: range) -> tuple[Pick, ...]:
    """Picks of the same pages of each group."""
    packed = struct.pack(f"<{len(pages)}i", *pages)
    return tuple(Pick(group, packed) for group in range(groups))


def sums_of(sums: Sequence[int]) -> bytes:
    """Checksums as a Load has them."""
    return struct.pack(f"<{len(sums)}Q", *sums)


def _count(pick: Pick) -> int:
    """How many page numbers a pick has; raises bad_request."""
    if len(pick.pages) % 4:
        raise bad("picks", "int32 pages")
    return len(pick.pages) // 4


def last_of(pick: Pick) -> int:
    """The last page number of a pick, -1 where it has none; raises bad_request."""
    return int.from_bytes(pick.pages[-4:], "little", signed=True) if _count(pick) else -1


def pages_of(pick: Pick) -> list[int]:
    """Page numbers of a pick; raises bad_request."""
    return list(struct.unpack(f"<{_count(pick)}i", pick.pages))


def items_of(spec: CacheSpec, picks: Sequence[Pick], pages: int) -> list[tuple[int, int]]:
    """(group, page) of the picks, in order; raises bad_request for what cannot be items of a path of `pages` pages."""
    if (total := sum(map(_count, picks))) > MAX_ITEMS:
        raise bad("picks", f"at most {MAX_ITEMS} items", total)
    out: list[tuple[int, int]] = []
    for pick in picks:
        if not 0 <= pick.group < len(spec.groups):
            raise bad("picks", f"groups 0..{len(spec.groups) - 1}", pick.group)
        found = pages_of(pick)
        if found and not (found[0] >= 0 and found[-1] < pages and all(a < b for a, b in itertools.pairwise(found))):
            raise bad("picks", f"ascending pages 0..{pages - 1}")
        out += [(pick.group, page) for page in found]
    if len({group for group, _ in out}) != sum(1 for p in picks if p.pages):
        raise bad("picks", "each group once")
    return out


def nbytes_of(spec: CacheSpec, items: Iterable[tuple[int, int]]) -> int:
    """Bytes of items."""
    return sum(spec.groups[group].item_bytes for group, _ in items)


def ordered(places: Sequence[Place]) -> list[Place]:
    """Places in the order in which their picks name them."""
    return sorted(places, key=lambda place: (place.group, place.page))


def ranges(items: Iterable[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """(group, first, count) that cover the items."""
    out: dict[int, tuple[int, int]] = {}
    for group, page in items:
        lo, hi = out.get(group, (page, page))
        out[group] = (min(lo, page), max(hi, page))
    return [(group, lo, hi - lo + 1) for group, (lo, hi) in out.items()]
