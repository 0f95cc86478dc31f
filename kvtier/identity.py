"""Which KV may answer for which request: cache specs, their ids, page keys and chain keys.

A cache is one KV format in one trust scope. Its id is a SHA-256 over every field that changes a
byte of KV or who may read it, each field length-prefixed so that no two specs share an encoding.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Sequence
from typing import Annotated, Final

import msgspec

from kvtier.types import Kind, align_up, bad

TOKEN_BYTES: Final = 4
EXTRA_BYTES: Final = 16
CHAIN_BYTES: Final = 16
STATE_SLOT_MAX: Final = 4 << 20
MAX_PAGE_BYTES: Final = 256 << 20
MAX_ITEM_BYTES: Final = 4 << 30
MAX_PAGE_TOKENS: Final = 4096
MAX_WINDOW: Final = 1 << 40
MAX_GROUPS: Final = 16
KEPT: Final = 4096
"""Ids that are not made again at each use."""


class GroupSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Layers that keep KV by one rule.

    One item of the group (a page's KV, or one state point) is canonical: `layers` x `heads` cells of
    `cell_bytes`, layer-major, then head. A cell is all the bytes of one head of one layer for the page's
    tokens. Where the bytes are private to a backend, use layers = heads = 1 and the whole item as the cell.
    """

    kind: Kind
    layers: int
    heads: int
    cell_bytes: int
    window: int = 0
    """Tokens before the resume point that must be present; kind window only."""

    @property
    def item_bytes(self) -> int:
        """Bytes of one page (or state point) of this group."""
        return self.layers * self.heads * self.cell_bytes


class Slice(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The layers [l0, l1) and heads [h0, h1) of one group that one rank holds."""

    l0: int
    l1: int
    h0: int
    h1: int

    @property
    def cells(self) -> int:
        """How many (layer, head) cells the slice covers."""
        return (self.l1 - self.l0) * (self.h1 - self.h0)

    def overlaps(self, other: Slice) -> bool:
        """Whether some cell is in both."""
        layers = self.l0 < other.l1 and other.l0 < self.l1
        return layers and self.h0 < other.h1 and other.h0 < self.h1


class CacheSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that must be equal before one engine may read another's KV."""

    model: str
    fingerprint: bytes
    """Digest of config, weight index and sampled weights, made by the adapter; never empty."""
    kv_dtype: str
    page_tokens: int
    groups: Annotated[tuple[GroupSpec, ...], msgspec.Meta(max_length=MAX_GROUPS)]
    revision: str = ""
    codec: str = "none"
    layout: str = "canonical"
    backend: str = ""
    """Attention backend, where the bytes inside a cell are private to it."""
    adapter: str = ""
    salt: bytes = b""
    extras: bool = False
    """Page keys carry a 16-byte digest of whatever token ids do not identify (images, audio, embeds)."""
    key_bytes: int = 0
    """0: pages are keyed by their tokens. 16..64: opaque keys of this many bytes, without parents."""

    @property
    def keyed(self) -> bool:
        """Whether pages are named by opaque keys instead of tokens."""
        return self.key_bytes > 0

    @property
    def stride(self) -> int:
        """Bytes of one page key."""
        if self.keyed:
            return self.key_bytes
        return self.page_tokens * TOKEN_BYTES + (EXTRA_BYTES if self.extras else 0)

    def check(self) -> None:
        """Raise bad_request naming the first field that cannot be served."""
        _typed(self, "spec")
        if not self.model or len(self.model) > 512:
            raise bad("spec.model", "1..512 characters", self.model)
        if not 16 <= len(self.fingerprint) <= 64:
            raise bad("spec.fingerprint", "16..64 bytes from the adapter", self.fingerprint)
        for name in ("revision", "codec", "layout", "backend", "adapter"):
            if len(getattr(self, name)) > 512:
                raise bad(f"spec.{name}", "at most 512 characters")
        if not self.kv_dtype or len(self.kv_dtype) > 64:
            raise bad("spec.kv_dtype", "a dtype name", self.kv_dtype)
        if len(self.salt) > 512:
            raise bad("spec.salt", "at most 512 bytes")
        if not 1 <= self.page_tokens <= MAX_PAGE_TOKENS:
            raise bad("spec.page_tokens", f"1..{MAX_PAGE_TOKENS}", self.page_tokens)
        if self.keyed and not 16 <= self.key_bytes <= 64:
            raise bad("spec.key_bytes", "0 or 16..64", self.key_bytes)
        if self.keyed and self.extras:
            raise bad("spec.extras", "false for keyed caches (the key must cover extras)")
        if not isinstance(self.groups, tuple) or not all(isinstance(group, GroupSpec) for group in self.groups):
            raise bad("spec.groups", "a tuple of GroupSpec", self.groups)
        if not 1 <= len(self.groups) <= MAX_GROUPS:
            raise bad("spec.groups", f"1..{MAX_GROUPS} groups", len(self.groups))
        if not self.keyed and all(g.kind is Kind.STATE for g in self.groups):
            raise bad("spec.groups", "a full or window group (keep pure state in a keyed cache)")
        for number, group in enumerate(self.groups):
            self._check_group(f"spec.groups[{number}]", group)

    def _check_group(self, where: str, group: GroupSpec) -> None:
        """Raise bad_request when one group cannot be stored."""
        _typed(group, where)
        if not 1 <= group.layers <= 4096:
            raise bad(f"{where}.layers", "1..4096", group.layers)
        if not 1 <= group.heads <= 65536:
            raise bad(f"{where}.heads", "1..65536", group.heads)
        if group.cell_bytes < 1:
            raise bad(f"{where}.cell_bytes", "a positive number", group.cell_bytes)
        limit = MAX_ITEM_BYTES if group.kind is Kind.STATE else MAX_PAGE_BYTES
        if group.item_bytes > limit:
            raise bad(where, f"items of at most {limit} bytes", group.item_bytes)
        if (group.kind is Kind.WINDOW) != (group.window > 0):
            raise bad(f"{where}.window", "> 0 for window groups and 0 for others", group.window)
        if group.window > MAX_WINDOW:
            raise bad(f"{where}.window", f"at most {MAX_WINDOW} tokens", group.window)
        if self.keyed and group.kind is Kind.WINDOW:
            raise bad(f"{where}.kind", "full or state in a keyed cache (its engine tracks windows)")


@functools.cache
def _types(kind: type[msgspec.Struct]) -> list[tuple[str, type]]:
    """Names and types of the fields that hold one value."""
    return [(f.name, f.type) for f in msgspec.structs.fields(kind) if f.type in (str, bytes, int, bool, Kind)]


def _typed(made: msgspec.Struct, where: str) -> None:
    """Raise bad_request naming a field of another type: nobody looks at what a program makes a struct of."""
    for name, kind in _types(type(made)):
        value = getattr(made, name)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise bad(f"{where}.{name}", f"{kind.__name__}", value)


def part_of(spec: CacheSpec, slices: Sequence[Slice]) -> CacheSpec:
    """The cache that one host of a model spread over hosts keeps: of each group its layers and heads only.

    Its workers declare their slices relative to it. Equal parts are equal caches on any host. Raises bad_request.
    """
    if len(slices) != len(spec.groups):
        raise bad("slices", f"one for each of {len(spec.groups)} groups", len(slices))
    groups, names = [], []
    for number, (part, group) in enumerate(zip(slices, spec.groups, strict=True)):
        if not (0 <= part.l0 < part.l1 <= group.layers and 0 <= part.h0 < part.h1 <= group.heads):
            raise bad(f"slices[{number}]", f"a slice of {group.layers} layers x {group.heads} heads", part)
        groups.append(msgspec.structs.replace(group, layers=part.l1 - part.l0, heads=part.h1 - part.h0))
        names.append(f"{part.l0}-{part.l1}/{group.layers}x{part.h0}-{part.h1}/{group.heads}")
    return msgspec.structs.replace(spec, groups=tuple(groups), layout=f"{spec.layout} part {','.join(names)}")


def _packed(*fields: bytes | str | int) -> bytes:
    """Length-prefixed concatenation: different field lists never encode alike."""
    out = []
    for field in fields:
        raw = field if isinstance(field, bytes) else str(field).encode()
        out.append(struct.pack("<Q", len(raw)) + raw)
    return b"".join(out)


@functools.lru_cache(KEPT)
def base_id(spec: CacheSpec, scope: str) -> bytes:
    """32 bytes naming the cache without its epoch: what `reset` counts epochs of."""
    groups = [_packed(g.kind.value, g.layers, g.heads, g.cell_bytes, g.window) for g in spec.groups]
    return hashlib.sha256(
        _packed(
            "kvtier cache v1", scope, spec.model, spec.revision, spec.fingerprint, spec.kv_dtype, spec.codec,
            spec.layout, spec.backend, spec.page_tokens, spec.adapter, spec.salt, int(spec.extras), spec.key_bytes,
            len(groups), *groups,
        )
    ).digest()  # fmt: skip


@functools.lru_cache(KEPT)
def cache_id(spec: CacheSpec, scope: str, epoch: int) -> bytes:
    """32 bytes naming one cache: two engines share KV exactly when theirs are equal."""
    return hashlib.sha256(_packed("kvtier epoch v1", base_id(spec, scope), epoch)).digest()


def chain_keys(parent: bytes, keys: bytes, stride: int) -> bytes:
    """Chain keys (16 B each) of consecutive pages after the page named `parent`.

    Each is SHA-256(parent chain key, page key) truncated; the root's chain key is cache_id[:16].
    """
    sha = hashlib.sha256
    out = []
    for at in range(0, len(keys), stride):
        parent = sha(parent + keys[at : at + stride]).digest()[:CHAIN_BYTES]
        out.append(parent)
    return b"".join(out)


class Shape(msgspec.Struct, frozen=True):
    """How the items of a cache are laid into slots: caches of one shape and scope share memory."""

    slot_bytes: tuple[int, ...]
    """Bytes of one slot, per group."""
    slots_per_item: tuple[int, ...]
    """Slots that one item takes, per group: 1, or more for state points."""


def shape_of(spec: CacheSpec) -> Shape:
    """Slots of a cache: a page takes one slot; a state point a list of ordinary slots."""
    pages = [g.item_bytes for g in spec.groups if g.kind is not Kind.STATE]
    state_slot = min(max(pages, default=STATE_SLOT_MAX), STATE_SLOT_MAX)
    slots, counts = [], []
    for group in spec.groups:
        size = group.item_bytes if group.kind is not Kind.STATE else min(group.item_bytes, max(state_slot, 1 << 16))
        slots.append(align_up(size))
        counts.append(-(-group.item_bytes // align_up(size)))
    return Shape(tuple(slots), tuple(counts))
