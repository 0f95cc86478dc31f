"""Copies between the cache and regions, an engine's own memory. Each transfer ends done or drained, never half-way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvtier.mover import Mover, Urgency, Views, batches, digest
from kvtier.tiers.disk import DiskTier
from kvtier.tiers.region import Region


class Piece(NamedTuple):
    """One row of a region and the slots of one item; `sum` is its checksum where it is known."""

    row: int
    views: Views
    sum: int


class Fetch(NamedTuple):
    """One row of a region and the disk handle of one item."""

    row: int
    handle: int


class Moved(NamedTuple):
    """What became of one piece: its checksum, and '' or why it failed."""

    sum: int
    error: str


def load_pieces(region: Region, pieces: Sequence[Piece]) -> list[Moved]:
    """Copy items out into rows, each verified first. Runs in a worker thread."""
    out = []
    for piece in pieces:
        found = digest(piece.views)
        if found != piece.sum:
            out.append(Moved(found, "checksum"))
            continue
        try:
            region.write(piece.row, piece.views)
            out.append(Moved(found, ""))
        except OSError:
            out.append(Moved(found, "io"))
    return out


def fetch_pieces(region: Region, disk: DiskTier, group: int, item_bytes: int, pieces: Sequence[Fetch]) -> list[Moved]:
    """Copy items from disk into rows, each verified on the way. Runs in a worker thread."""
    out = []
    item = np.empty(item_bytes, np.uint8)
    for piece in pieces:
        (error,) = disk.read([(piece.handle, group, [item])])
        try:
            if not error:
                region.write(piece.row, [item])
        except OSError:
            error = "io"
        out.append(Moved(0, error))
    return out


def store_pieces(region: Region, pieces: Sequence[Piece]) -> list[Moved]:
    """Copy rows into slots and take their checksums. Runs in a worker thread."""
    out = []
    for piece in pieces:
        try:
            region.read(piece.row, piece.views)
            out.append(Moved(digest(piece.views), ""))
        except OSError:
            out.append(Moved(0, "io"))
    return out


async def move(mover: Mover, region: Region, pieces: list[Piece], item_bytes: int, *, load: bool) -> list[Moved]:
    """Run the pieces in batches; a cancelled caller leaves only when no byte moves any more."""
    work = load_pieces if load else store_pieces
    done = await mover.share(work, batches(pieces, lambda _: item_bytes), region)
    return [moved for part in done for moved in part]


async def fetch(
    mover: Mover, region: Region, disk: DiskTier, pieces: list[Fetch], group: int, item_bytes: int
) -> list[Moved]:
    """The same from disk."""
    parts = batches(pieces, lambda _: item_bytes)
    done = await mover.share(fetch_pieces, parts, region, disk, group, item_bytes, urgency=Urgency.LOAD)
    return [moved for part in done for moved in part]
