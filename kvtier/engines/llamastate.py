"""The state of a llama.cpp sequence, as llama_state_seq_get_data gives it, cut into pages of tokens and put together.

    8 bytes of mark; then for each KV cache of the context
    u32 streams (1), u32 cells; for each cell: i32 position, u32 sequences (1), i32 sequence (0)
    u32 V is transposed, u32 layers
    for each layer: i32 type, u64 row bytes; a K row for each cell
    for each layer: i32 type, u64 row bytes; a V row for each cell
                or: i32 type, u32 element bytes, u32 rows; for each row an element for each cell

What a context writes is learnt from one token of it; whatever differs from this is refused. Pure.
"""

from __future__ import annotations

import struct
from typing import Any, Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from kvtier.types import bad

Bytes = npt.NDArray[np.uint8]
MARK: Final = 8
CELL: Final = 12
HEAD: Final = 12
"""Bytes before the data of each layer's K or V."""


class Plane(NamedTuple):
    """K or V of one layer: `rows` x cells x `item` bytes."""

    head: bytes
    rows: int
    item: int


class Memory(NamedTuple):
    """One KV cache of a context; one with a sliding window has two."""

    transposed: int
    planes: tuple[Plane, ...]
    """K of every layer, then V of every layer."""


class Format(NamedTuple):
    """What the states of one context have in common."""

    mark: bytes
    memories: tuple[Memory, ...]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's KV."""
        return sum(plane.rows * plane.item for memory in self.memories for plane in memory.planes)

    def build(self, pages: Bytes, page_tokens: int) -> Bytes:
        """The state of a sequence of whole pages: uint8 [pages, page_bytes]."""
        tokens = len(pages) * page_tokens
        parts: list[Bytes] = [_raw(self.mark)]
        at = 0
        for memory in self.memories:
            counts = struct.pack("<II", 1, tokens)
            layout = struct.pack("<II", memory.transposed, len(memory.planes) // 2)
            parts += [_raw(counts), _table(tokens).view(np.uint8).reshape(-1), _raw(layout)]
            for plane in memory.planes:
                end = at + plane.rows * page_tokens * plane.item
                cut = pages[:, at:end].reshape(len(pages), plane.rows, page_tokens * plane.item)
                parts += [_raw(plane.head), _joined(cut)]
                at = end
        return np.concatenate(parts)


class State(NamedTuple):
    """A sequence's state with its parts found."""

    form: Format
    tokens: int
    planes: tuple[npt.NDArray[Any], ...]
    """Of all memories: [rows, cells, item] views of its bytes."""
    orders: tuple[npt.NDArray[np.int64], ...]
    """For each plane the cell of each position."""

    @classmethod
    def of(cls, raw: Bytes) -> Self:
        """Find the parts; raises bad_request where it is not a state of positions 0, 1, ... of one sequence."""
        try:
            return cls(*_parsed(raw))
        except (struct.error, ValueError) as exc:
            raise bad("state", f"one of a release of llama.cpp that is known here ({exc})", len(raw)) from exc

    def pages(self, first: int, count: int, page_tokens: int) -> Bytes:
        """Pages [first, first + count) of the sequence: uint8 [count, page_bytes]."""
        out = np.empty((count, page_tokens * self.form.token_bytes), np.uint8)
        lo, at = first * page_tokens, 0
        for plane, order in zip(self.planes, self.orders, strict=True):
            rows, _, item = plane.shape
            end = at + rows * page_tokens * item
            cells = order[lo : lo + count * page_tokens]
            begin = int(cells[0])
            together = np.array_equal(cells, np.arange(begin, begin + len(cells)))
            part = plane[:, begin : begin + len(cells)] if together else plane[:, cells]
            part = part.reshape(rows, count, page_tokens * item)
            out[:, at:end].reshape(count, rows, page_tokens * item)[...] = part.transpose(1, 0, 2)
            at = end
        return out


def _parsed(raw: Bytes) -> tuple[Format, int, tuple[npt.NDArray[Any], ...], tuple[npt.NDArray[np.int64], ...]]:
    """What a State is made of."""
    at, memories, planes, orders = MARK, [], [], []
    counts = set()
    while at < len(raw):
        cells, order, at = _cells(raw, at)
        transposed, layers = struct.unpack_from("<II", raw.data, at)
        at += 8
        found = []
        for number in range(2 * layers):
            plane = _plane(raw, at, transposed=bool(transposed and number >= layers))
            at += HEAD
            end = at + plane.rows * cells * plane.item
            planes.append(raw[at:end].reshape(plane.rows, cells, plane.item))
            orders.append(order)
            found.append(plane)
            at = end
        memories.append(Memory(transposed, tuple(found)))
        counts.add(cells)
    if len(counts) != 1:
        raise ValueError(f"{counts} cells")
    return Format(bytes(raw[:MARK]), tuple(memories)), counts.pop(), tuple(planes), tuple(orders)


def _cells(raw: Bytes, at: int) -> tuple[int, npt.NDArray[np.int64], int]:
    """How many cells, which is at each position, and where what follows them begins."""
    streams, cells = struct.unpack_from("<II", raw.data, at)
    end = at + 8 + cells * CELL
    table = raw[at + 8 : end].view("<i4").reshape(cells, 3)
    order = np.argsort(table[:, 0])
    if streams != 1 or not np.array_equal(table[order], _table(cells)):
        raise ValueError("not one sequence from position 0 on")
    return cells, order, end


def _table(cells: int) -> npt.NDArray[np.int32]:
    """Position, sequences, sequence of each cell of a sequence."""
    out = np.zeros((cells, 3), "<i4")
    out[:, 0], out[:, 1] = np.arange(cells), 1
    return out


def _plane(raw: Bytes, at: int, *, transposed: bool) -> Plane:
    """The shape that the bytes before a plane's data say."""
    head = bytes(raw[at : at + HEAD])
    if transposed:
        _, item, rows = struct.unpack("<iII", head)
        return Plane(head, rows, item)
    _, row = struct.unpack("<iQ", head)
    return Plane(head, 1, row)


def _joined(cut: Bytes) -> Bytes:
    """[pages, rows, bytes] as the bytes of each row of all pages in a row."""
    return np.ascontiguousarray(cut.transpose(1, 0, 2)).reshape(-1)


def _raw(data: bytes) -> Bytes:
    return np.frombuffer(data, np.uint8)
