"""Names by which policies remember pages that are gone: 64 bits that say how the path to a page goes.

A page adds a number, made of its key and its page number, to the name of the page before it: so the name of a node's
end tells those of all its pages, and no split or join changes it. Names are no secret and no key to any KV: what is
served goes by chain keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Final

import numpy as np
import xxhash

MASK: Final = (1 << 64) - 1


def added(keys: bytes, stride: int, first: int) -> Iterator[int]:
    """What each page with these keys, the first of them page number `first`, adds to the name before it."""
    pages = [keys] if len(keys) == stride else np.frombuffer(keys, f"V{stride}").tolist()
    return map(xxhash.xxh3_64_intdigest, pages, count(first))
