"""What a device can be asked to do with pages, independent of how it does it. Addresses are integers. Pure."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.device.layout import Plan, Sheet
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


def moves(plan: Plan, slots: Words, ids: Words, layers: tuple[int, int], *, to_slots: bool) -> list[Move]:
    """What moves the rank's layers [l0, l1) of pages; raises bad_request for blocks that the engine does not have."""
    slots, ids = np.ascontiguousarray(slots, np.uint64), np.ascontiguousarray(ids, np.int64).reshape(-1)
    if len(ids) != len(slots) * plan.per:
        raise bad("ids", f"{plan.per} blocks for each of {len(slots)} pages", len(ids))
    if not len(slots):
        return []
    least = min(sheet.blocks for sheet in plan.sheets)
    if ids.min() < 0 or ids.max() >= least:
        raise bad("ids", f"blocks 0..{least - 1}", (int(ids.min()), int(ids.max())))
    found = ((sheet, *sheet.span(*layers)) for sheet in plan.sheets)
    return [
        Move(sheet, first, count, slots, ids, plan.per, to_slots, plan.kind, plan.element)
        for sheet, first, count in found
        if count
    ]


def summed(slots: Words, size: int, out: int) -> Sum:
    """What sums slots; raises bad_request for sizes that devices do not sum."""
    if size < SUM_FROM or size % 8:
        raise bad("size", f"a multiple of 8 from {SUM_FROM} on", size)
    return Sum(np.ascontiguousarray(slots, np.uint64), size, out)
