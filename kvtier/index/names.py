"""Names by which policies remember pages that are gone: 64 bits that say how the path to a page goes.

A page adds a number, made of its key and its page number, to the name of the page before it: so the name of a node's
end tells those of all its pages, and no split or join changes it. Names are no secret and no key to any KV: what is
served goes by chain keys.
"""

from __future__ import annotations

from itertools import count
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from kvtier.identity import MAX_PAGE_TOKENS

MASK: Final = (1 << 64) - 1
FEW: Final = 4
"""Pages of which it is quicker to name one than all."""
AHEAD: Final = 64
"""Pages that are named when the first of them goes."""
_draw = np.random.default_rng(0x6B76)  # the same in each run, so that replays are
_WEIGHTS: Final = _draw.integers(0, 1 << 63, MAX_PAGE_TOKENS + 4, np.uint64) * np.uint64(2) + np.uint64(1)
_PLACE_N: Final = 0x9E3779B97F4A7C15
_MIX_N: Final = 0xFF51AFD7ED558CCD
_PLACE, _MIX = np.uint64(_PLACE_N), np.uint64(_MIX_N)


def added(keys: bytes, stride: int, first: int) -> npt.NDArray[np.uint64]:
    """What each page with these keys, the first of them page number `first`, adds to the name before it."""
    if stride % 4:
        pages = [keys] if len(keys) == stride else np.frombuffer(keys, f"V{stride}").tolist()
        return np.fromiter(map(xxhash.xxh3_64_intdigest, pages, count(first)), np.uint64)
    words = np.frombuffer(keys, "<u4").reshape(-1, stride // 4)
    sums = words @ _WEIGHTS[: stride // 4] + np.arange(first, first + len(words), dtype=np.uint64) * _PLACE
    sums = (sums ^ (sums >> np.uint64(29))) * _MIX
    mixed: npt.NDArray[np.uint64] = (sums ^ (sums >> np.uint64(32))) * _PLACE
    return mixed ^ (mixed >> np.uint64(31))


def total(keys: bytes, stride: int, first: int) -> int:
    """What all of them add together."""
    if len(keys) != stride:
        return int(added(keys, stride, first).sum())
    if stride % 4:
        return xxhash.xxh3_64_intdigest(keys, first)
    words = np.frombuffer(keys, "<u4")  # the same of one page, which evictions ask for: a seventh of the calls
    sums = int(words @ _WEIGHTS[: len(words)]) + first * _PLACE_N & MASK
    sums = (sums ^ sums >> 29) * _MIX_N & MASK
    sums = (sums ^ sums >> 32) * _PLACE_N & MASK
    return sums ^ sums >> 31


class Ends:
    """What a node that loses its last pages ends with; most evictions take them one by one."""

    __slots__ = ("_names",)

    def __init__(self) -> None:
        self._names: list[int] = []
        """Of the pages before the next that goes, and of that one, if it is of the node that was cut last."""

    def cut(self, name: int, keys: bytes, stride: int, first: int, keep: int) -> int:
        """The name of page number `keep` - 1 of a node; `name` is its last page's, `keys` and `first` are its own."""
        pages = len(keys) // stride
        if not keep + 1 == pages > FEW:
            return name - total(keys[keep * stride :], stride, first + keep) & MASK
        if len(self._names) < 2 or self._names[-1] != name:
            skip = max(0, pages - AHEAD)
            sums = np.cumsum(added(keys[skip * stride :], stride, first + skip), dtype=np.uint64)
            start = name - int(sums[-1]) & MASK
            self._names = [start, *(sums + np.uint64(start)).tolist()]
        self._names.pop()
        return self._names[-1]
