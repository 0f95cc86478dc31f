"""Values laid side by side into a tray: a piece of the memory that kvtierd shares with the process of an engine."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from kvtier.peer.shelf import Want
from kvtier.types import align_up

TRAY: Final = 16 << 20
"""Bytes of one, which is what one call moves at most."""
ALIGN: Final = 64


def trays_of(wants: Sequence[Want]) -> Iterator[list[Want]]:
    """Values, as many together as a tray holds."""
    part: list[Want] = []
    room = TRAY
    for want in wants:
        size = align_up(want.nbytes, ALIGN)
        if size > room:
            yield part
            part, room = [], TRAY
        part.append(want)
        room -= size
    if part:
        yield part


def places_of(wants: Sequence[Want], first: int) -> list[int]:
    """Where each value is put, from an offset on."""
    sizes = [align_up(want.nbytes, ALIGN) for want in wants]
    return [first + before for before in itertools.accumulate(sizes[:-1], initial=0)]


def pack(wants: Sequence[Want], memory: np.ndarray, at: Sequence[int]) -> None:
    """Copy values into shared memory."""
    for want, offset in zip(wants, at, strict=True):
        end = offset
        for view in want.views:
            np.copyto(memory[end : end + len(view)], np.frombuffer(view, np.uint8))
            end += len(view)


def unpack(wants: Sequence[Want], memory: np.ndarray, at: Sequence[int], told: Sequence[int | None]) -> None:
    """Copy those values out that are there, whole."""
    for want, offset, size in zip(wants, at, told, strict=True):
        if size != want.nbytes:
            continue
        end = offset
        for view in want.views:
            np.copyto(np.frombuffer(view, np.uint8), memory[end : end + len(view)])
            end += len(view)


def add_up(wants: Sequence[Want]) -> None:
    """Give the bytes to their hashes."""
    for want in wants:
        for view in want.views:
            want.sum.update(view)
