"""Export files: one prefix or one whole cache as records, each of which vouches for itself. Pure: bytes in, bytes out.

A file is a header record, run records with parents before children, and an end record. A record is HEAD (32 bytes:
mark, kind, bytes of meta and payload, check), its meta (MessagePack) and its payload. The check is the xxh3-64 of the
first 24 bytes, the meta and the cache id of the file, so a record that is damaged or from another file is found out;
the payload's items have sums of their own. A reader that has lost its way goes on at the next mark with a right check.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

import msgspec
import xxhash

from kvtier.identity import CHAIN_BYTES, CacheSpec, base_id, cache_id
from kvtier.types import RUN_PAGES, Code, KvtierError, bad

FORMAT: Final = 1
"""Version of the file; its number is the first field of the header in every version."""
MARK: Final = b"KVTIER\r\n"
HEAD: Final = struct.Struct("<8sIIQQ")
HEADER, RUN, END = 1, 2, 3
MAX_META: Final = 4 << 20


class Header(msgspec.Struct, frozen=True, array_like=True):
    """What the file's KV is of."""

    format: int
    spec: CacheSpec
    scope: str
    epoch: int
    base: bytes
    """base_id of spec and scope, as the exporting daemon had it."""

    @property
    def cache_id(self) -> bytes:
        """The id of the cache that was exported."""
        return cache_id(self.spec, self.scope, self.epoch)


class Item(msgspec.Struct, frozen=True, array_like=True):
    """One page's bytes of one group; the payload has them in the order of the items."""

    page: int
    """Index in the run."""
    group: int
    sum: int
    """xxh3-64 of its bytes."""


class Run(msgspec.Struct, frozen=True, array_like=True):
    """Up to 64 consecutive pages."""

    parent: bytes
    """Chain key of the page before in the exporting cache; empty in keyed caches."""
    keys: bytes
    items: tuple[Item, ...]

    def check(self, spec: CacheSpec) -> int:
        """Pages of the run; raises bad_request where it cannot be one of this cache."""
        pages, rest = divmod(len(self.keys), spec.stride)
        if rest or not 1 <= pages <= (1 if spec.keyed else RUN_PAGES):
            raise bad("keys", f"1..{RUN_PAGES} page keys of {spec.stride} bytes", len(self.keys))
        if len(self.parent) != (0 if spec.keyed else CHAIN_BYTES):
            raise bad("parent", f"a chain key of {CHAIN_BYTES} bytes", len(self.parent))
        known = {(item.page, item.group) for item in self.items}
        right = all(0 <= item.page < pages and 0 <= item.group < len(spec.groups) for item in self.items)
        if not self.items or not right or len(known) < len(self.items):
            raise bad("items", "each item of the run's pages and the cache's groups at most once", len(self.items))
        return pages

    def size(self, spec: CacheSpec) -> int:
        """Bytes of its payload."""
        return sum(spec.groups[item.group].item_bytes for item in self.items)


class End(msgspec.Struct, frozen=True, array_like=True):
    """The file is whole."""

    pages: int
    lost: int = 0
    """Pages that were cached when the export began and could not be read any more."""


class Head(NamedTuple):
    """A record's head, believed once `vouched`."""

    kind: int
    meta_bytes: int
    payload_bytes: int
    check: int


_encode = msgspec.msgpack.Encoder().encode


def header(spec: CacheSpec, scope: str, epoch: int) -> Header:
    """The header of a cache's export."""
    return Header(FORMAT, spec, scope, epoch, base_id(spec, scope))


def record(kind: int, meta: msgspec.Struct, payload_bytes: int, cache: bytes) -> bytes:
    """Head and meta of a record; the payload follows. `cache` is the file's cache id, empty for the header."""
    raw = _encode(meta)
    start = MARK + struct.pack("<IIQ", kind, len(raw), payload_bytes)
    return start + struct.pack("<Q", _check(start, raw, cache)) + raw


def _check(start: bytes, meta: bytes, cache: bytes) -> int:
    return xxhash.xxh3_64_intdigest(start + meta + cache)


def head(raw: bytes) -> Head | None:
    """The head in 32 bytes; None where it can be none."""
    if len(raw) < HEAD.size:
        return None
    mark, kind, meta_bytes, payload_bytes, check = HEAD.unpack(raw[: HEAD.size])
    if mark != MARK or meta_bytes > MAX_META:
        return None
    return Head(kind, meta_bytes, payload_bytes, check)


def vouched(raw: bytes, meta: bytes, cache: bytes) -> bool:
    """Whether a record's head and meta are what was written into this file."""
    found = head(raw)
    return found is not None and len(meta) == found.meta_bytes and found.check == _check(raw[:24], meta, cache)


def decode_header(meta: bytes) -> Header:
    """The header in its record's meta. Raises version, bad_request."""
    try:
        version = msgspec.msgpack.decode(meta)[0]
        if version != FORMAT:
            text = f"the file has format {version}; this version reads {FORMAT}"
            raise KvtierError(Code.VERSION, text, "file")
        found = msgspec.msgpack.decode(meta, type=Header)
    except (msgspec.MsgspecError, UnicodeDecodeError, IndexError, TypeError, KeyError):
        raise bad("file", "the header of an export file") from None
    found.spec.check()
    if base_id(found.spec, found.scope) != found.base:
        raise bad("file", "a header whose identity is that of its spec")
    return found


def decode_run(meta: bytes) -> Run:
    """A run in its record's meta. Raises bad_request."""
    try:
        return msgspec.msgpack.decode(meta, type=Run)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise bad("record", "a run of pages") from None


def decode_end(meta: bytes) -> End:
    """The end in its record's meta. Raises bad_request."""
    try:
        return msgspec.msgpack.decode(meta, type=End)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise bad("record", "the end of an export file") from None
