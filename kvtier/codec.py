"""Lossless packing of one item's bytes: two byte planes, then zstd. Pure.

Sixteen-bit numbers keep sign and exponent in every second byte, which compress well once they lie together; the rest is
nearly noise. A frame is four bytes of length and the zstd data.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import zstandard

Bytes = npt.NDArray[np.uint8]

LEVEL: Final = 1
SAMPLE_BYTES: Final = 64 << 10
WORTH: Final = 0.85
"""An item whose beginning shrinks to no less is not tried further."""
_LENGTH: Final = struct.Struct("<I")


class Unpackable(Exception):  # noqa: N818 - says what the frame is
    """A frame that is damaged."""


def _planes(data: Bytes) -> bytes:
    return data.tobytes() if data.size % 2 else data.reshape(-1, 2).T.tobytes()


def pack(views: Sequence[Bytes], most: int) -> bytes | None:
    """A frame of at most `most` bytes with the bytes of the views; None where it would be larger."""
    data = views[0] if len(views) == 1 else np.concatenate(views)
    compress = zstandard.ZstdCompressor(level=LEVEL, write_checksum=False).compress
    sample = data[:SAMPLE_BYTES]
    if len(compress(_planes(sample))) > WORTH * sample.size:
        return None
    body = compress(_planes(data)) if sample.size < data.size else compress(_planes(sample))
    return _LENGTH.pack(len(body)) + body if _LENGTH.size + len(body) <= most else None


def unpack(frame: Bytes, views: Sequence[Bytes]) -> None:
    """Fill the views with the bytes that were packed. Raises Unpackable."""
    size = sum(view.size for view in views)
    (length,) = _LENGTH.unpack(frame[: _LENGTH.size].tobytes())
    try:
        body = frame[_LENGTH.size : _LENGTH.size + length]
        if zstandard.frame_content_size(body.data) != size:  # what it says is allocated
            raise Unpackable
        raw = zstandard.ZstdDecompressor().decompress(body.data, max_output_size=size)
    except zstandard.ZstdError as error:
        raise Unpackable from error
    if len(raw) != size:
        raise Unpackable
    data = np.frombuffer(raw, np.uint8)
    if size % 2 == 0:
        data = data.reshape(2, -1).T.reshape(-1)
    at = 0
    for view in views:
        np.copyto(view, data[at : at + view.size])
        at += view.size
