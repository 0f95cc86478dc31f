"""Cutting a byte stream into frames, whatever pieces it arrives in. Pure: no sockets, no clock."""

from __future__ import annotations

from typing import NamedTuple

from kvtier.wire import HEADER, MAX_BODY, Header, parse_header


class Frame(NamedTuple):
    """One whole frame; `body` is valid until the next `feed`."""

    verb: int
    request: int
    body: memoryview


class Frames:
    """Incremental framing: a body is buffered only after its header was accepted, and only to its length."""

    def __init__(self, max_body: int = MAX_BODY) -> None:
        self._max_body = max_body
        self._data: bytes | bytearray = b""
        self._at = 0
        self._header: Header | None = None

    @property
    def buffered(self) -> int:
        """Bytes taken but not yet handed out."""
        return len(self._data) - self._at

    @property
    def request(self) -> int:
        """Request id of the header at hand, also where the header itself is refused; 0 where there is none."""
        head = bytes(self._data[self._at : self._at + HEADER.size])
        return int.from_bytes(head[8:16], "little") if len(head) == HEADER.size else 0

    def feed(self, data: bytes) -> None:
        """Take the next piece of the stream."""
        if self._at == len(self._data):
            self._data, self._at = data, 0
        elif self._at or not isinstance(self._data, bytearray):
            # A new buffer: views of the old one may still be held by whoever got its frames.
            rest = bytearray(memoryview(self._data)[self._at :])
            rest += data
            self._data, self._at = rest, 0
        else:
            self._data += data

    def next(self) -> Frame | None:
        """The next whole frame, or None until more is fed; raises KvtierError where the stream cannot go on."""
        data, start = self._data, self._at + HEADER.size
        if self._header is None:
            if len(data) < start:
                return None
            self._header = parse_header(data[self._at : start], self._max_body)
        length, verb, request = self._header
        end = start + length
        if len(data) < end:
            return None
        self._at, self._header = end, None
        if end == len(data):  # whoever says nothing more for hours is not to keep his last word here
            self._data, self._at = b"", 0
        return Frame(verb, request, memoryview(data)[start:end])
