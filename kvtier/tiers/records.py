"""What the disk tier knows of caches and runs, and how the catalogue spells it.

Each value ends in the xxh3-64 of its key and body, so a record that is damaged, or filed under another's key,
is found out by itself.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from kvtier.identity import TOKEN_BYTES, CacheSpec
from kvtier.tiers.cells import Layout, Span, layout_of
from kvtier.tiers.keyplanes import first_of, unpack_keys
from kvtier.types import RUN_PAGES, bad

FORMAT: Final = 2
"""Version of the catalogue; a higher one on disk is left alone, a lower one is upgraded (tiers/upgrade)."""

VERSION_KEY: Final = b"version"

PAGE_BITS: Final = 6
PAGE_MASK: Final = RUN_PAGES - 1

View = npt.NDArray[np.uint8]
_CHECK: Final = struct.Struct("<Q")
_RUN_KEY: Final = struct.Struct(">I8sQ")
_MASK: Final = struct.Struct("<Q")


class Item(NamedTuple):
    """One page's (or state point's) bytes of one group, on their way to disk."""

    page: int
    """Index of the page in its run, 0..63."""
    group: int
    sum: int
    """xxh3-64 of the bytes."""
    views: Sequence[View]
    """The bytes in order: slots at 4 KiB-aligned addresses, all but the last a multiple of 4 KiB long."""


class Change(NamedTuple):
    """One value of the catalogue to put, or with None to delete."""

    db: bytes
    key: bytes
    value: bytes | None


class Placed(NamedTuple):
    """One group of a run: the mask of pages that have an item, their cells and their sums, in page order."""

    present: int
    spans: list[Span]
    sums: array[int]


class Damaged(Exception):  # noqa: N818 - says what the record is
    """A record whose checksum or contents are not what was written."""


class Version(msgspec.Struct, frozen=True):
    """The catalogue's first record; later formats keep its first field."""

    format: int
    slab_bytes: int = 0
    next_cache: int = 1
    """Cache numbers are never used twice: a run left over from a dropped cache must not enter another."""


class CacheRecord(msgspec.Struct, frozen=True):
    """One cache that has, or may get, runs on disk."""

    cache_id: bytes
    base_id: bytes
    scope: str
    epoch: int
    spec: CacheSpec

    @property
    def item_bytes(self) -> tuple[int, ...]:
        """Bytes of one item, per group."""
        return tuple(group.item_bytes for group in self.spec.groups)

    def layouts(self, slab_bytes: int) -> tuple[Layout, ...]:
        """Cells of one item, per group."""
        return tuple(layout_of(size, slab_bytes) for size in self.item_bytes)


Written = tuple[int, tuple[int, ...], bytes]
"""One group of a run in the catalogue: a mask of the pages that have an item, their spans one after the other, sums."""


class Record(msgspec.Struct, array_like=True, eq=False):
    """A run as the catalogue spells it."""

    cache: int
    pages: int
    parent: bytes
    """Chain key of the page before; empty in keyed caches."""
    planes: int
    packed: bytes
    """Page keys as `pack_keys` leaves them; dropped once the index has them."""
    chains: bytes
    """Concatenated chain keys; dropped once the index has them; empty in keyed caches."""
    written: tuple[Written, ...]


class Run(Record, eq=False):
    """Up to 64 consecutive pages written together: what is known of them while the tier is open.

    What follows is not in the record; the first three are its key's.
    """

    depth: int = 0
    """Page number of the first page; 0 in keyed caches."""
    name: bytes = bytes(8)
    """See name_of."""
    id: int = 0
    groups: int = 0
    layouts: tuple[Layout, ...] = ()
    """Per group; with packed items per share of a cell and group (see packing)."""
    live: int = 0
    """Bit i: page i is still stored (a page of which no group has an item never was)."""
    trimmed: bool = False
    """Whether the catalogue holds a mask for this run."""
    cells: tuple[Sequence[int], ...] = ()
    """Per group, the block where each page's item begins; -1 where the page has none."""
    parts: tuple[Sequence[int], ...] = ()
    """Per layout, the blocks where each page's cells begin: as many for each page as it has parts; or nothing."""
    sums: tuple[Any, ...] = ()
    """Per group, an array of the xxh3-64 of each page's item."""

    @classmethod
    def new(cls, number: int, cache: int, pages: int, layouts: tuple[Layout, ...]) -> Run:
        """One that is to be written."""
        return cls(cache, pages, b"", TOKEN_BYTES, b"", b"", (), id=number, groups=len(layouts), layouts=layouts)

    @property
    def keys(self) -> bytes:
        """Concatenated page keys."""
        return unpack_keys(self.planes, self.packed)

    @keys.setter
    def keys(self, keys: bytes) -> None:
        self.planes, self.packed = TOKEN_BYTES, keys

    def first_key(self, stride: int) -> bytes:
        """The first page's."""
        return first_of(self.planes, self.packed, stride)

    @property
    def last(self) -> int:
        """The handle of its last page."""
        return self.id << PAGE_BITS | self.pages - 1

    def unfold(self) -> tuple[bytes, bytes, array[int], Sequence[array[int]]]:
        """Page keys, chain keys, handles and sums of a run whose every page the index has; keys and chains go."""
        keys, chains, first = self.keys, self.chains, self.id << PAGE_BITS
        self.keys = self.chains = b""
        return keys, chains, array("q", range(first, first + self.pages)), self.sums

    @property
    def key(self) -> bytes:
        """Its key in the catalogue: by depth, so that parents load before children, then by name."""
        return _RUN_KEY.pack(self.depth, self.name, self.id)

    def spans(self, pages: int) -> list[Span]:
        """The cells of the pages in this mask, consecutive ones joined."""
        out: list[Span] = []
        everything = not ~pages & (1 << self.pages) - 1
        for parts, layout in zip(self.parts, self.layouts, strict=True):
            count = layout.parts
            own = parts if everything else _of_pages(parts, count, pages, self.pages)
            out += spans_of(own, layout)
        return out


def _of_pages(parts: Sequence[int], count: int, pages: int, end: int) -> Iterable[int]:
    """The cells, `count` a page, of the pages in this mask."""
    for page in range(end):
        if pages >> page & 1:
            yield from parts[page * count : page * count + count]


def spans_of(cells: Iterable[int], layout: Layout) -> list[Span]:
    """Cells in this order as spans: neighbours joined within a slab, gaps (-1) passed over."""
    out: list[Span] = []
    blocks, _, slab = layout
    first = count = 0
    for cell in cells:
        if count and cell == first + count * blocks and cell % slab:
            count += 1
            continue
        if count:
            out.append(Span(first, blocks, count))
        first, count = cell, int(cell >= 0)
    if count:
        out.append(Span(first, blocks, count))
    return out


def name_of(parent: bytes, first: bytes) -> bytes:
    """By what runs are found, beside their depth: a digest of their parent's chain key and their first page key."""
    return xxhash.xxh3_64_digest(parent + first)


def run_prefix(depth: int, name: bytes) -> bytes:
    """With what the catalogue keys of such runs begin."""
    return _RUN_KEY.pack(depth, name, 0)[:12]


def run_key(key: bytes) -> tuple[int, bytes, int]:
    """Depth, name and id in a run's catalogue key; raises struct.error where it is none."""
    depth, name, number = _RUN_KEY.unpack(key)
    return depth, name, number


def run_number(key: bytes) -> int:
    """The run's id in its catalogue key; 0 where the key is none."""
    return int(_RUN_KEY.unpack(key)[2]) if len(key) == _RUN_KEY.size else 0


_encode = msgspec.msgpack.Encoder().encode
_decode_cache = msgspec.msgpack.Decoder(CacheRecord).decode


def seal(key: bytes, body: bytes) -> bytes:
    """The body with the checksum over key and body behind it."""
    return body + _CHECK.pack(xxhash.xxh3_64_intdigest(key + body))


def unseal(key: bytes, value: bytes | memoryview) -> bytes | memoryview:
    """The body of a sealed value; raises Damaged where the checksum differs."""
    body, check = value[: -_CHECK.size], xxhash.xxh3_64(key)
    check.update(body)
    if value[-_CHECK.size :] != _CHECK.pack(check.intdigest()):
        raise Damaged
    return body


def _expand(spans: Iterable[Span], size: int) -> array[int]:
    """Where each cell begins; Damaged where one is not of this size."""
    cells = array("q")
    for first, blocks, count in spans:
        if blocks != size:
            raise Damaged
        cells.extend(range(first, first + blocks * count, blocks))
    return cells


def place(run: Run, placed: Sequence[Placed]) -> None:
    """Give a run its cells and sums; raises Damaged where they cannot be those of such a run."""
    cells: list[array[int]] = []
    parts: list[array[int]] = []
    sums: list[array[int]] = []
    run.live = 0
    for at, ((present, spans, have), (blocks, count, _)) in enumerate(zip(placed, run.layouts, strict=True)):
        run.live |= present
        if at >= run.groups and not present:
            parts.append(array("q"))
            continue
        flat = _expand(spans, blocks)
        pages = present.bit_count()
        if pages * count != len(flat) or pages != len(have) or present >> run.pages:
            raise Damaged
        flat, own = (flat, have) if pages == run.pages else _spread(run.pages, count, present, flat, have)
        parts.append(flat)
        if at < run.groups:
            cells.append(flat[:] if count == 1 and len(placed) > run.groups else flat if count == 1 else flat[::count])
            sums.append(own[:] if len(placed) > run.groups else own)
        else:
            _merge(cells[at % run.groups], sums[at % run.groups], flat, own)
    run.cells, run.parts, run.sums = tuple(cells), tuple(parts), tuple(sums)


def _merge(cells: array[int], sums: array[int], flat: array[int], own: array[int]) -> None:
    """Packed items are items of their group too; raises Damaged where it has them already."""
    for page, cell in enumerate(flat):
        if cell >= 0:
            if cells[page] >= 0:
                raise Damaged
            cells[page], sums[page] = cell, own[page]


def _spread(pages: int, count: int, present: int, flat: array[int], have: array[int]) -> tuple[array[int], array[int]]:
    """Cells (`count` a page) and sums of some pages, with gaps for the others."""
    parts, sums = array("q", [-1]) * (pages * count), array("Q", [0]) * pages
    for at, page in enumerate(page for page in range(pages) if present >> page & 1):
        parts[page * count : page * count + count] = flat[at * count : at * count + count]
        sums[page] = have[at]
    return parts, sums


def encode_number(key: bytes, live: int) -> bytes:
    """The catalogue's value for one number: the pages of a run still stored, or an epoch."""
    return seal(key, _MASK.pack(live))


def decode_number(key: bytes, value: bytes | memoryview) -> int:
    """The number that `encode_number` was given; raises Damaged."""
    try:
        live: int = _MASK.unpack(unseal(key, value))[0]
    except struct.error as error:
        raise Damaged from error
    return live


def encode_version(version: Version) -> bytes:
    """The catalogue's value for its version."""
    return seal(VERSION_KEY, _encode(version))


def decode_version(value: bytes) -> Version:
    """The version of a catalogue; raises Damaged."""
    try:
        return msgspec.msgpack.decode(unseal(VERSION_KEY, value), type=Version)
    except msgspec.DecodeError as error:
        raise Damaged from error


def cache_key(number: int) -> bytes:
    """The catalogue's key of a cache."""
    return number.to_bytes(4, "big")


def encode_cache(key: bytes, record: CacheRecord) -> bytes:
    """The catalogue's value for a cache."""
    return seal(key, _encode(record))


def decode_cache(key: bytes, value: bytes | memoryview) -> CacheRecord:
    """One cache; raises Damaged."""
    try:
        return _decode_cache(unseal(key, value))
    except msgspec.DecodeError as error:
        raise Damaged from error


def check_items(items: Sequence[Item], pages: int, groups: int) -> None:
    """Raise bad_request unless every item is one of these pages' and groups', and the only one."""
    seen = {(item.group, item.page) for item in items if 0 <= item.page < pages and 0 <= item.group < groups}
    if not items or len(seen) != len(items):
        raise bad("items", f"items of {pages} pages and {groups} groups, each at most once", len(items))
