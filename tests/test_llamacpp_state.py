"""States of llama.cpp sequences cut into pages and put together again."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from kvtier.engines.llamastate import State
from kvtier.types import KvtierError

PAGE = 4


def state(tokens: int, order: list[int], *, transposed: bool) -> np.ndarray:
    """A state of two memories of two layers, whose cells are filled in `order`; each byte names its position."""
    parts = [struct.pack("<II", 0xAF143C58, 0)]
    for memory in range(2):
        parts.append(struct.pack("<II", 1, tokens))
        parts += [struct.pack("<iIi", position, 1, 0) for position in order]
        parts.append(struct.pack("<II", int(transposed), 2))
        for layer in range(2):
            parts.append(struct.pack("<iQ", 1, 6))
            parts += [bytes([position, memory, layer, 0, 1, 2]) for position in order]
        for layer in range(2):
            if transposed:
                parts.append(struct.pack("<iII", 1, 2, 3))
                parts += [bytes([position, 64 + row * 8 + layer]) for row in range(3) for position in order]
            else:
                parts.append(struct.pack("<iQ", 1, 3))
                parts += [bytes([position, memory, 128 + layer]) for position in order]
    return np.frombuffer(b"".join(parts), np.uint8)


@pytest.mark.parametrize("transposed", [False, True])
def test_pages_put_together_are_the_state_that_they_were_cut_from(transposed: bool):
    """Whole pages of a sequence give its state back byte for byte, and a prefix's pages give the prefix's."""
    whole = State.of(state(12, list(range(12)), transposed=transposed))
    pages = whole.pages(0, 3, PAGE)
    assert np.array_equal(whole.form.build(pages, PAGE), state(12, list(range(12)), transposed=transposed))
    assert np.array_equal(whole.form.build(pages[:2], PAGE), state(8, list(range(8)), transposed=transposed))
    assert np.array_equal(np.concatenate([whole.pages(0, 1, PAGE), whole.pages(1, 2, PAGE)]), pages)


@pytest.mark.parametrize("transposed", [False, True])
def test_pages_do_not_depend_on_where_cells_lie(transposed: bool):
    """A context that forgot and refilled cells gives the same pages as one that never did."""
    tidy = State.of(state(12, list(range(12)), transposed=transposed))
    mixed = State.of(state(12, [7, 3, 0, 1, 2, 11, 10, 9, 8, 6, 5, 4], transposed=transposed))
    assert np.array_equal(mixed.pages(0, 3, PAGE), tidy.pages(0, 3, PAGE))
    assert np.array_equal(mixed.pages(1, 1, PAGE), tidy.pages(1, 1, PAGE))


def test_what_is_not_a_state_is_refused():
    """Cut short, too long, another number of streams, holes between positions, memories of other lengths."""
    good = state(8, list(range(8)), transposed=False)
    streams = good.copy()
    streams[8] = 2
    twice = np.concatenate([good, state(7, list(range(7)), transposed=False)[8:]])
    for wrong in (good[:-1], good[:40], np.append(good, 0), streams, twice, good[:8]):
        with pytest.raises(KvtierError, match="a release of llama"):
            State.of(wrong)
    for positions in ([0, 1, 2, 4], [1, 2, 3, 4], [0, 1, 1, 2]):
        with pytest.raises(KvtierError, match="position 0"):
            State.of(state(4, positions, transposed=False))
