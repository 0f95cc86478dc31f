"""How the catalogue spells a run."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Sequence

import msgspec

from kvtier.identity import TOKEN_BYTES
from kvtier.tiers.cells import Layout, Span
from kvtier.tiers.keyplanes import pack_keys, unpack_all, unpack_keys
from kvtier.tiers.layouts import packed_layouts
from kvtier.tiers.records import Damaged, Placed, Run, name_of, place, run_key, run_prefix, seal, unseal


class _Group(msgspec.Struct, array_like=True, frozen=True):
    """One group of a run: which pages have an item, their cells as (first, blocks, count) triples, their sums."""

    present: int
    spans: tuple[int, ...]
    sums: bytes


class Record(msgspec.Struct, array_like=True):
    """A run as the catalogue spells it."""

    cache: int
    pages: int
    parent: bytes
    planes: int
    keys: bytes
    chains: bytes
    groups: tuple[_Group, ...]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Record).decode


def encode_run(run: Run, groups: Sequence[Placed]) -> bytes:
    """The catalogue's value for a run whose keys and chains are still in memory."""
    planes, keys = pack_keys(run.keys)
    parts = tuple(
        _Group(present, tuple(n for s in spans for n in s), sums.tobytes()) for present, spans, sums in groups
    )
    return seal(run.key, _encode(Record(run.cache, run.pages, run.parent, planes, keys, run.chains, parts)))


def parse(key: bytes, value: bytes) -> Record:
    """What a value says that is right. Raises Damaged."""
    try:
        return _decode(unseal(key, value))
    except msgspec.DecodeError as error:
        raise Damaged from error


def parse_all(sealed: Iterable[tuple[bytes, bytes]]) -> list[Record | None]:
    """The same of many keys and values, with their page keys unpacked together; None for those that are damaged."""
    out: list[Record | None] = []
    alike: dict[tuple[int, int], list[Record]] = {}
    for key, value in sealed:
        try:
            record = parse(key, value)
        except Damaged:
            out.append(None)
            continue
        out.append(record)
        alike.setdefault((record.planes, len(record.keys)), []).append(record)
    for (planes, size), records in alike.items():
        if 0 < planes < TOKEN_BYTES and size and not size % planes:
            for record, keys in zip(records, unpack_all(planes, [each.keys for each in records]), strict=True):
                record.planes, record.keys = TOKEN_BYTES, keys
    return out


def build(key: bytes, record: Record, caches: dict[int, tuple[Layout, ...]]) -> tuple[Run, list[Span]] | None:
    """A run and all its cells, as written; None where its cache is gone. Raises Damaged."""
    try:
        depth, name, number = run_key(key)
        if record.cache not in caches:
            return None
        run = Run(number, record.cache, record.pages, caches[record.cache])
        if len(record.groups) > run.groups:
            run.layouts = packed_layouts(run.layouts)
        run.parent, run.depth, run.name = record.parent, depth, name
        run.keys, run.chains = unpack_keys(record.planes, record.keys), record.chains
        if (spans := _plain(run, record.groups)) is not None:
            return run, spans
        groups = [Placed(g.present, _triples(g.spans), array("Q", g.sums)) for g in record.groups]
        place(run, groups)
    except (ValueError, struct.error) as error:
        raise Damaged from error
    return run, [span for group in groups for span in group.spans]


def decode_run(key: bytes, value: bytes, caches: dict[int, tuple[Layout, ...]]) -> tuple[Run, list[Span]] | None:
    """The same of a value."""
    return build(key, parse(key, value), caches)


def _plain(run: Run, groups: tuple[_Group, ...]) -> list[Span] | None:
    """Place a run as most are: every item in one cell, each group's in one span. None, and no change, for others."""
    if len(groups) != run.groups:
        return None
    pages, full = run.pages, (1 << run.pages) - 1
    cells, sums, spans = [], [], []
    for (blocks, parts, _), group in zip(run.layouts, groups, strict=True):
        first, *size = group.spans or (0,)
        if parts != 1 or group.present != full or size != [blocks, pages] or len(group.sums) != 8 * pages:
            return None
        cells.append(range(first, first + blocks * pages, blocks))
        sums.append(array("Q", group.sums))
        spans.append(Span(first, blocks, pages))
    run.live = full
    run.cells = run.parts = tuple(cells)
    run.sums = tuple(sums)
    return spans


def rename_run(body: bytes, depth: int, number: int) -> tuple[bytes, bytes]:
    """The key and the value in this format of a run's body that older formats filed elsewhere. Raises Damaged."""
    try:
        record = _decode(body)
    except msgspec.DecodeError as error:
        raise Damaged from error
    keys = unpack_keys(record.planes, record.keys)
    name = name_of(record.parent, keys[: len(keys) // record.pages])
    key = run_prefix(depth, name) + number.to_bytes(8, "big")
    return key, seal(key, body)


def _triples(flat: tuple[int, ...]) -> list[Span]:
    return [Span(*flat[at : at + 3]) for at in range(0, len(flat), 3)]
