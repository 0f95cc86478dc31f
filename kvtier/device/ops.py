"""What a device can be asked to do with pages, independent of how it does it. Addresses are integers. Pure."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.device.layout import VECTOR, Plan, Sheet
from kvtier.types import bad

Words = npt.NDArray[Any]
SUM_FROM = 241
"""Bytes from which on a slot can be summed on a device."""


class Move(NamedTuple):
    """Planes [first, first + planes) of a sheet, for pages: between the engine's blocks and slots."""

    sheet: Sheet
    first: int
    planes: int
    slots: Words
    """uint64: address of each page's slot."""
    ids: Words
    """int64: the engine's blocks, `per` a page."""
    per: int
    to_slots: bool
    kind: str = ""
    """fp8, int8 or int4: quantize on the way to slots, dequantize on the way back."""
    element: str = ""


class Sum(NamedTuple):
    """xxh3-64 of the first `size` bytes of each slot, written as uint64 to `out`."""

    slots: Words
    size: int
    out: int


Op = Move | Sum


def blocks_of(plan: Plan, ids: Words, pages: int, *, to_slots: bool) -> Words:
    """The engine's blocks of so many pages as int64; raises bad_request for blocks that it does not have.

    On the way to the engine each block may be there once: two pages in one block would be neither.
    """
    ids = np.ascontiguousarray(ids, np.int64).reshape(-1)
    if len(ids) != pages * plan.per:
        raise bad("ids", f"{plan.per} blocks for each of {pages} pages", len(ids))
    least = min(sheet.blocks for sheet in plan.sheets)
    if pages and (ids.min() < 0 or ids.max() >= least):
        raise bad("ids", f"blocks 0..{least - 1}", (int(ids.min()), int(ids.max())))
    if not to_slots and len(np.unique(ids)) < len(ids):
        raise bad("ids", "each block once")
    return ids


def moves(plan: Plan, slots: Words, ids: Words, layers: tuple[int, int], *, to_slots: bool) -> list[Move]:
    """What moves the rank's layers [l0, l1) of pages; raises bad_request for blocks or slots that cannot be."""
    slots, ids = np.ascontiguousarray(slots, np.uint64), blocks_of(plan, ids, len(slots), to_slots=to_slots)
    found = [(sheet, *sheet.span(*layers)) for sheet in plan.sheets]
    width = max(VECTOR if sheet.axis else sheet.width for sheet in plan.sheets)
    if (slots % np.uint64(width)).any():
        raise bad("slots", f"addresses at multiples of {width} bytes")
    return [
        Move(sheet, first, count, slots, ids, plan.per, to_slots, plan.kind, plan.element)
        for sheet, first, count in found
        if count and len(slots)
    ]


def summed(slots: Words, size: int, out: int) -> Sum:
    """What sums slots; raises bad_request for sizes that devices do not sum."""
    if size < SUM_FROM or size % 8:
        raise bad("size", f"a multiple of 8 from {SUM_FROM} on", size)
    return Sum(np.ascontiguousarray(slots, np.uint64), size, out)
