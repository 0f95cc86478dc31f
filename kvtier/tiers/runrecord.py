"""How the catalogue spells a run."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence

import msgspec

from kvtier.identity import TOKEN_BYTES
from kvtier.tiers.cells import Layout, Span
from kvtier.tiers.keyplanes import pack_keys
from kvtier.tiers.layouts import packed_layouts
from kvtier.tiers.records import (
    Damaged,
    Placed,
    Record,
    Run,
    Written,
    name_of,
    place,
    run_key,
    run_prefix,
    seal,
    unseal,
)

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Run).decode


def encode_run(run: Run, groups: Sequence[Placed]) -> bytes:
    """The catalogue's value for a run whose keys and chains are still in memory."""
    planes, keys = pack_keys(run.keys)
    parts = tuple(
        (present, tuple(n for span in spans for n in span), sums.tobytes()) for present, spans, sums in groups
    )
    return seal(run.key, _encode(Record(run.cache, run.pages, run.parent, planes, keys, run.chains, parts)))


def parse(key: bytes, value: bytes | memoryview) -> Run:
    """What a record says that is right, without places for it. Raises Damaged."""
    try:
        run = _decode(unseal(key, value))
        run.depth, run.name, run.id = run_key(key)
    except (msgspec.DecodeError, struct.error) as error:
        raise Damaged from error
    return run


def settle(run: Run, layouts: tuple[Layout, ...]) -> Sequence[tuple[int, ...]]:
    """Give a run that was parsed its cells and sums; returns the spans of all cells. Raises Damaged."""
    planes, written = run.planes, run.written
    if planes != TOKEN_BYTES and (not 0 < planes < TOKEN_BYTES or len(run.packed) % planes):
        raise Damaged
    run.written = ()
    run.groups, run.layouts = len(layouts), layouts
    if len(written) == len(layouts) and (plain := _plain(run, written)):
        return plain
    if len(written) > len(layouts):
        run.layouts = packed_layouts(layouts)
    try:
        groups = [Placed(present, _triples(spans), array("Q", sums)) for present, spans, sums in written]
        place(run, groups)
    except (TypeError, ValueError) as error:
        raise Damaged from error
    return [span for group in groups for span in group.spans]


def _plain(run: Run, written: tuple[Written, ...]) -> list[tuple[int, ...]]:
    """Settle a run as most are: each item in one cell, each group's in one span. Nothing, and no change, for others."""
    pages = run.pages
    full = (1 << pages) - 1
    out: list[tuple[int, ...]] = []
    cells: tuple[range, ...] = ()
    sums: tuple[array[int], ...] = ()
    for (blocks, parts, _), (present, span, have) in zip(run.layouts, written, strict=True):
        if parts != 1 or present != full or span[1:] != (blocks, pages) or len(have) != 8 * pages:
            return []
        out.append(span)
        cells += (range(span[0], span[0] + blocks * pages, blocks),)
        sums += (array("Q", have),)
    run.live, run.cells, run.parts, run.sums = full, cells, cells, sums
    return out


def decode_run(key: bytes, value: bytes, layouts: tuple[Layout, ...]) -> Run:
    """A run as written. Raises Damaged."""
    run = parse(key, value)
    settle(run, layouts)
    return run


def rename_run(body: bytes | memoryview, depth: int, number: int) -> tuple[bytes, bytes]:
    """The key and the value in this format of a run's body that older formats filed elsewhere. Raises Damaged."""
    try:
        record = _decode(body)
    except msgspec.DecodeError as error:
        raise Damaged from error
    keys = record.keys
    name = name_of(record.parent, keys[: len(keys) // record.pages])
    key = run_prefix(depth, name) + number.to_bytes(8, "big")
    return key, seal(key, bytes(body))


def _triples(flat: tuple[int, ...]) -> list[Span]:
    return [Span(*flat[at : at + 3]) for at in range(0, len(flat), 3)]
