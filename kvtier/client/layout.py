"""One canonical item as bytes in slots: whole reads and writes, a rank's strided slice, its checksum. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from kvtier.identity import GroupSpec, Slice
from kvtier.types import bad

Bytes = npt.NDArray[np.uint8]
Data = bytes | bytearray | memoryview | npt.NDArray[Any]
Parts = list[Data] | tuple[Data, ...]
"""Several buffers in a row."""


def flat(data: Data, field: str = "data") -> Bytes:
    """Any contiguous buffer as a row of bytes without a copy; raises bad_request where it is strided, or none."""
    if isinstance(data, np.ndarray):
        if not data.flags.c_contiguous:
            raise bad(field, "a C-contiguous array")
        row = data.reshape(-1).view(np.uint8)
    else:
        try:
            row = np.frombuffer(data, np.uint8)
        except (TypeError, ValueError):
            raise bad(field, "a numpy array, or a buffer of bytes", type(data).__name__) from None
    if field == "out" and not row.flags.writeable:
        raise bad(field, "memory that can be written to", type(data).__name__)
    return row


class Item:
    """`layers` x `heads` cells, layer-major then head, lying in one or more slots."""

    def __init__(self, spec: GroupSpec, slots: Sequence[Bytes]) -> None:
        """`slots`: the slots' bytes in order; what is over the item's size in the last one is padding."""
        self.spec = spec
        self.pieces: list[Bytes] = []
        left = spec.item_bytes
        for slot in slots:
            self.pieces.append(slot[: min(left, len(slot))])
            left -= len(self.pieces[-1])

    def read(self, out: Data | Parts) -> None:
        """Copy the whole item out, into one buffer or several in a row."""
        outs = rows(out, "out")
        self._expect("out", sum(map(len, outs)), self.spec.item_bytes)
        copy(outs, self.pieces)

    def write(self, data: Data | Parts) -> None:
        """Copy a whole item in, from one buffer or several in a row."""
        parts = rows(data)
        self._expect("data", sum(map(len, parts)), self.spec.item_bytes)
        copy(self.pieces, parts)

    def read_slice(self, part: Slice, out: Data) -> None:
        """Copy out the cells of one rank: its layers x heads, layer-major."""
        row = flat(out, "out")
        self._expect("out", len(row), part.cells * self.spec.cell_bytes)
        for mine, theirs in self._runs(part, row):
            np.copyto(theirs, mine)

    def write_slice(self, part: Slice, data: Data) -> None:
        """Copy in the cells of one rank."""
        row = flat(data)
        self._expect("data", len(row), part.cells * self.spec.cell_bytes)
        for mine, theirs in self._runs(part, row):
            np.copyto(mine, theirs)

    def checksum(self) -> int:
        """xxh3-64 of the item's bytes."""
        return checksum(self.pieces)

    def _expect(self, field: str, got: int, want: int) -> None:
        """Raise bad_request unless a buffer has the size that is needed."""
        if got != want:
            raise bad(field, f"{want} bytes", got)

    def _runs(self, part: Slice, row: Bytes) -> Iterator[tuple[Bytes, Bytes]]:
        """Pairs of equal-shaped views: of the item's cells in `part`, and of `row`."""
        spec, layers, heads = self.spec, part.l1 - part.l0, part.h1 - part.h0
        if len(self.pieces) == 1:
            cells = self.pieces[0].reshape(spec.layers, spec.heads, spec.cell_bytes)
            mine = cells[part.l0 : part.l1, part.h0 : part.h1]
            yield mine, row.reshape(layers, heads, spec.cell_bytes)
            return
        run = heads * spec.cell_bytes
        for layer in range(layers):
            at = ((part.l0 + layer) * spec.heads + part.h0) * spec.cell_bytes
            yield from self._span(at, row[layer * run : (layer + 1) * run])

    def _span(self, at: int, row: Bytes) -> Iterator[tuple[Bytes, Bytes]]:
        """Pairs of views for one stretch of the item that may cross slots."""
        for piece in self.pieces:
            if at < len(piece) and len(row):
                size = min(len(row), len(piece) - at)
                yield piece[at : at + size], row[:size]
                row, at = row[size:], 0
            else:
                at -= len(piece)


def rows(data: Data | Parts, field: str = "data") -> list[Bytes]:
    """One buffer, or several in a row, as rows of bytes."""
    return [flat(part, field) for part in data] if isinstance(data, list | tuple) else [flat(data, field)]


def checksum(parts: list[Bytes]) -> int:
    """xxh3-64 of rows of bytes as if they were one."""
    if len(parts) == 1:
        return xxhash.xxh3_64_intdigest(parts[0].data)
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part.data)
    return digest.intdigest()


def copy(targets: list[Bytes], sources: list[Bytes]) -> None:
    """Copy rows of bytes of equal total size that are cut at different places."""
    if len(targets) == len(sources) == 1:
        np.copyto(targets[0], sources[0])
        return
    target, source = iter(targets), iter(sources)
    to, got = next(target), next(source)
    while True:
        size = min(len(to), len(got))
        np.copyto(to[:size], got[:size])
        to, got = to[size:], got[size:]
        try:
            to = to if len(to) else next(target)
            got = got if len(got) else next(source)
        except StopIteration:
            return
