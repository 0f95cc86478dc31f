"""Page keys as byte planes, so that token ids take no more bytes in the catalogue than they need."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvtier.identity import TOKEN_BYTES


def pack_keys(keys: bytes) -> tuple[int, bytes]:
    """Page keys as byte planes without the high planes that are all zero: token ids rarely need four bytes."""
    planes = TOKEN_BYTES
    if len(keys) % TOKEN_BYTES:
        return planes, keys
    while planes > 1 and not keys[planes - 1 :: TOKEN_BYTES].strip(b"\0"):
        planes -= 1
    if planes == TOKEN_BYTES:
        return planes, keys
    return planes, b"".join(keys[plane::TOKEN_BYTES] for plane in range(planes))


def unpack_keys(planes: int, packed: bytes) -> bytes:
    """The page keys that `pack_keys` was given."""
    if planes == TOKEN_BYTES:
        return packed
    words = len(packed) // planes
    out = bytearray(words * TOKEN_BYTES)
    for plane in range(planes):
        out[plane::TOKEN_BYTES] = packed[plane * words : (plane + 1) * words]
    return bytes(out)


def unpack_all(planes: int, packed: Sequence[bytes]) -> list[bytes]:
    """The same of many that are equally long, together, at half the cost."""
    parts = np.frombuffer(b"".join(packed), np.uint8).reshape(len(packed), planes, -1)
    words = parts[:, planes - 1].astype("<u4")
    for plane in reversed(range(planes - 1)):
        words <<= 8
        words |= parts[:, plane]
    return [keys.tobytes() for keys in words]
