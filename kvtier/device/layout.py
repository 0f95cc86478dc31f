"""How an engine's paged KV lies and how a page of it lies in a slot: sheets of planes that one launch moves. Pure."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from kvtier.identity import GroupSpec, Slice
from kvtier.quant import CODECS, Cell, cell
from kvtier.types import bad

VECTOR: Final = 16


class Paged(NamedTuple):
    """One layer's K, its V, or its fused rows, in blocks of `tokens` tokens. All in bytes, no stride negative."""

    base: int
    blocks: int
    heads: int
    tokens: int
    row: int
    """Bytes of one head of one token, contiguous."""
    block_stride: int
    head_stride: int
    token_stride: int


class Sheet(NamedTuple):
    """Planes of one geometry, in the order of their layers."""

    heads: int
    tokens: int
    row: int
    block_stride: int
    head_stride: int
    token_stride: int
    head_pitch: int
    """Bytes from one head's cell to the next in a slot."""
    blocks: int
    axis: str
    """What shares a scale: token or channel; empty where bytes are moved as they are."""
    bases: tuple[int, ...]
    ats: tuple[int, ...]
    """Offsets of each plane's rows (or codes) in a slot."""
    metas: tuple[int, ...]
    """Offsets of each plane's scales in a slot."""
    layers: tuple[int, ...]

    def span(self, l0: int, l1: int) -> tuple[int, int]:
        """First plane of layers [l0, l1), and how many."""
        first = bisect.bisect_left(self.layers, l0)
        return first, bisect.bisect_left(self.layers, l1) - first

    @property
    def width(self) -> int:
        """Bytes of the widest vector (up to 16) at whose boundaries all rows lie, where slots lie at those of 16."""
        strides = [self.block_stride, self.row, *self.bases, *self.ats]
        strides += [self.head_stride, self.head_pitch] if self.heads > 1 else []
        strides += [self.token_stride] if self.tokens > 1 else []
        return math.gcd(VECTOR, *strides)


class Plan(NamedTuple):
    """How pages of one group, or one rank's part of them, move between an engine's blocks and slots."""

    sheets: tuple[Sheet, ...]
    page_tokens: int
    per: int
    """Engine blocks of one page."""
    group: GroupSpec
    part: Slice
    kind: str = ""
    """fp8, int8 or int4 where the slots are quantized."""
    element: str = ""

    def bytes_of(self, l0: int, l1: int) -> tuple[int, int]:
        """Offset and size in a slot of the rank's layers [l0, l1), which must be whole layers (all heads)."""
        layer = self.group.heads * self.group.cell_bytes
        return (self.part.l0 + l0) * layer, (l1 - l0) * layer

    @property
    def whole_layers(self) -> bool:
        """Whether the rank has all heads of its layers, so that layers are runs of bytes in a slot."""
        return self.part.h1 - self.part.h0 == self.group.heads

    @property
    def layers(self) -> int:
        """How many layers the rank has."""
        return self.part.l1 - self.part.l0


def plan(
    layers: Sequence[Sequence[Paged]], page_tokens: int, group: GroupSpec, part: Slice | None = None,
    codec: str = "none", element: str = "",
) -> Plan:  # fmt: skip
    """The plan of layers of which each keeps K and V, or one fused plane; raises bad_request naming what does not fit.

    `part`: what this rank has of the group; all of it by default. `element`: bf16 or fp16, with a codec.
    """
    part = part or Slice(0, group.layers, 0, group.heads)
    if len(layers) != part.l1 - part.l0:
        raise bad("layers", f"{part.l1 - part.l0}, as the slice says", len(layers))
    tokens = layers[0][0].tokens
    if page_tokens % tokens:
        raise bad("spec.page_tokens", f"a multiple of the engine's block of {tokens} tokens", page_tokens)
    made = _Sheets(group, page_tokens)
    for number, planes in enumerate(layers):
        way = _quantized(planes, page_tokens, codec, element)
        size = way.bytes if way else sum(page_tokens * plane.row for plane in planes)
        if size != group.cell_bytes:
            raise bad("spec.groups.cell_bytes", f"{size}, as the engine's rows say", group.cell_bytes)
        cell_at, at = ((part.l0 + number) * group.heads + part.h0) * size, 0
        for which, plane in enumerate(planes):
            _check(plane, part, tokens)
            rows = way.rows[which] if way else None
            where = (rows.codes, rows.scales) if rows else (at, 0)
            made.add(number, plane, cell_at + where[0], cell_at + where[1], rows.axis if rows else "")
            at += page_tokens * plane.row
    kind = CODECS[codec].kind if codec != "none" else ""
    return Plan(tuple(made.sheets()), page_tokens, page_tokens // tokens, group, part, kind, element if kind else "")


def _quantized(planes: Sequence[Paged], page_tokens: int, codec: str, element: str) -> Cell | None:
    """How a quantized cell lies; raises bad_request."""
    if codec == "none":
        return None
    if codec not in CODECS:
        raise bad("spec.codec", f"none or one of {', '.join(CODECS)}", codec)
    if element not in {"bf16", "fp16"}:
        raise bad("spec.kv_dtype", f"bf16 or fp16 with codec {codec}", element)
    for plane in planes:
        if any(n % VECTOR for n in (plane.base, plane.row, plane.block_stride, plane.head_stride, plane.token_stride)):
            raise bad("layers", f"rows at multiples of {VECTOR} bytes with codec {codec}", plane)
    return cell(CODECS[codec], page_tokens, tuple(plane.row // 2 for plane in planes))


def _check(plane: Paged, part: Slice, tokens: int) -> None:
    """Raise bad_request for a plane that is not one of the slice's."""
    if plane.heads != part.h1 - part.h0:
        raise bad("layers.heads", f"{part.h1 - part.h0}, as the slice says", plane.heads)
    if plane.tokens != tokens:
        raise bad("layers.tokens", f"blocks of {tokens} tokens in every layer", plane.tokens)
    if min(plane.row, plane.blocks) < 1 or min(plane.block_stride, plane.head_stride, plane.token_stride) < 0:
        raise bad("layers", "rows and strides in bytes, none negative", plane)


class _Sheets:
    """Planes gathered by geometry."""

    def __init__(self, group: GroupSpec, page_tokens: int) -> None:
        self.group = group
        self.page_tokens = page_tokens
        self.found: dict[Sheet, list[tuple[int, int, int, int]]] = {}

    def add(self, layer: int, plane: Paged, at: int, meta: int, axis: str) -> None:
        """One plane, with its place in a slot."""
        shape = Sheet(
            plane.heads, plane.tokens, plane.row, plane.block_stride, plane.head_stride, plane.token_stride,
            self.group.cell_bytes, plane.blocks, axis, (), (), (), (),
        )  # fmt: skip
        if not axis:
            shape = merged(shape)
        self.found.setdefault(shape, []).append((plane.base, at, meta, layer))

    def sheets(self) -> Iterable[Sheet]:
        """What was added."""
        for shape, planes in self.found.items():
            bases, ats, metas, layers = (tuple(column) for column in zip(*planes, strict=True))
            yield shape._replace(bases=bases, ats=ats, metas=metas, layers=layers)


def merged(sheet: Sheet) -> Sheet:
    """The same rows as fewer, longer ones, where both sides have them in one run."""
    if sheet.token_stride == sheet.row or sheet.tokens == 1:
        row = sheet.row * sheet.tokens
        sheet = sheet._replace(row=row, tokens=1, token_stride=row)
    if sheet.tokens == 1 and (sheet.heads == 1 or sheet.head_stride == sheet.head_pitch == sheet.row):
        row = sheet.row * sheet.heads
        sheet = sheet._replace(row=row, token_stride=row, heads=1, head_stride=row, head_pitch=row)
    return sheet


def kv(base: int, shape: Sequence[int], strides: Sequence[int], dims: Sequence[int], item: int) -> tuple[Paged, ...]:
    """K and V (or one fused plane) of one layer seen as [blocks, heads, tokens, content], in any physical order.

    `strides` in bytes; the content of one head of one token is contiguous: `dims` elements of K and of V, one after the
    other, or the one dim of a fused latent. This is how vLLM shows its cache to connectors.
    """
    blocks, heads, tokens, content = shape
    if sum(dims) != content or strides[3] != item:
        raise bad("layers", f"contiguous content of {sum(dims)} elements", (content, strides[3]))
    starts = [sum(dims[:n]) * item for n in range(len(dims))]
    return tuple(
        Paged(base + at, blocks, heads, tokens, dim * item, *strides[:3])
        for at, dim in zip(starts, dims, strict=True)
    )  # fmt: skip
