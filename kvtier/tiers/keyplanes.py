"""Page keys as byte planes, so that token ids take no more bytes in the catalogue than they need."""

from __future__ import annotations

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


def first_of(planes: int, packed: bytes, size: int) -> bytes:
    """Their first `size` bytes."""
    if planes == TOKEN_BYTES:
        return packed[:size]
    words, wanted, out = len(packed) // planes, size // TOKEN_BYTES, bytearray(size)
    for plane in range(planes):
        out[plane::TOKEN_BYTES] = packed[plane * words : plane * words + wanted]
    return bytes(out)
