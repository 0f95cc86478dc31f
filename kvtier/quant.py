"""Quantized KV: names, how a cell lies, and the arithmetic in numpy, bit for bit what cuda/quant.cu does. Pure.

A cache whose spec has a `codec` keeps cells of [K codes | V codes | K scales | V scales] instead of [K rows | V rows].
The codec is part of the cache's identity, so quantized KV answers only those who asked for it.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.types import bad

Array = npt.NDArray[Any]
GROUP_TOKENS: Final = 32
"""Tokens of one channel that share a scale."""
SCALE_BYTES: Final = 4
TINY: Final = np.float32(1e-30)
"""A scale below this is 0: the group's values come back as its least one."""
NORMAL: Final = np.float32(1.17549435e-38)
MOST_DIM: Final = 1024
LARGEST: Final = {"bf16": np.float32(float.fromhex("0x1.FEp127")), "fp16": np.float32(65504)}
_OVER: Final = {"int8": "0x1.010102p-7", "int4": "0x1.111112p-3", "fp8": "0x1.24924ap-9"}
"""2/255, 2/15 and 1/448 in float32, rounded up: of half the span of values, and of the largest."""
HALF: Final = np.float32(0.5)
"""Halves are exact, and their difference is finite for all finite values: bf16 goes nearly as far as float32."""


class Codec(NamedTuple):
    """How the K and V of a cache are kept."""

    name: str
    kind: str
    """fp8 (e4m3), int8 or int4."""
    axes: tuple[str, str]
    """What shares a scale, for K and for V: token (one row) or channel (one column of GROUP_TOKENS tokens)."""

    @property
    def bits(self) -> int:
        """Bits of one code."""
        return 4 if self.kind == "int4" else 8


CODECS: Final = {
    name: Codec(name, kind, (axis, "token"))
    for name, kind, axis in (
        ("fp8", "fp8", "token"),
        ("int8", "int8", "token"),
        ("int4", "int4", "token"),
        ("int8-kivi", "int8", "channel"),  # keys have outlying channels: a scale for each
        ("int4-kivi", "int4", "channel"),
    )
}


class Rows(NamedTuple):
    """Where the codes and scales of one head's K or V lie in its cell, in bytes."""

    codes: int
    scales: int
    row: int
    """Bytes of one token's codes."""
    axis: str
    dim: int


class Cell(NamedTuple):
    """A quantized cell."""

    rows: tuple[Rows, ...]
    bytes: int


def codec(name: str) -> Codec:
    """The codec of that name; raises bad_request."""
    if name not in CODECS:
        raise bad("spec.codec", f"none or one of {', '.join(CODECS)}", name)
    return CODECS[name]


def cell(way: Codec, page_tokens: int, dims: tuple[int, ...]) -> Cell:
    """How a cell of `page_tokens` rows of K and V of these dims (or of one fused row) lies; raises bad_request."""
    if page_tokens % 16:
        raise bad("spec.page_tokens", f"a multiple of 16 with codec {way.name}", page_tokens)
    for dim in dims:
        if dim % 8 or not 8 <= dim <= MOST_DIM:
            raise bad("dim", f"a multiple of 8 up to {MOST_DIM} with codec {way.name}", dim)
    sizes = [dim * way.bits // 8 for dim in dims]
    codes = [page_tokens * sum(sizes[:n]) for n in range(len(dims) + 1)]
    rows, at = [], codes[-1]
    for number, dim in enumerate(dims):
        axis = way.axes[number]
        rows.append(Rows(codes[number], at, sizes[number], axis, dim))
        at += SCALE_BYTES * scales(axis, page_tokens, dim)
    return Cell(tuple(rows), at)


def scales(axis: str, tokens: int, dim: int) -> int:
    """Scales of one head's rows of a page."""
    return tokens if axis == "token" else -(-tokens // GROUP_TOKENS) * dim


def widen(raw: Array, element: str) -> Array:
    """bf16 or fp16 words (uint16) as float32."""
    if element == "fp16":
        return raw.view(np.float16).astype(np.float32)
    return (raw.astype(np.uint32) << 16).view(np.float32)


def narrow(values: Array, element: str) -> Array:
    """float32 as bf16 or fp16 words, to nearest even."""
    if element == "fp16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.uint16)
    bits = np.ascontiguousarray(values).view(np.uint32)
    near = (bits.astype(np.uint64) + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), 0x7FFF, near).astype(np.uint16)


def _settled(values: Array) -> Array:
    """Subnormal float32 and -0 as 0."""
    return np.where(np.abs(values) < NORMAL, np.float32(0), values)


def _up(step: Array, element: str) -> Array:
    """Positive float32 as words of the element's type, rounded up."""
    if element == "bf16":
        return ((step.view(np.uint32).astype(np.uint64) + 0xFFFF) >> 16).astype(np.uint16)
    near = step.astype(np.float16)
    return (near.view(np.uint16) + (near.astype(np.float32) < step)).astype(np.uint16)


def _scale(x: Array, kind: str, element: str) -> tuple[Array, Array, Array]:
    """(least, inverse step, scale word) of groups that lie along the last axis."""
    finite = np.where(np.isfinite(x), _settled(x), np.float32(np.inf))
    least, most = finite.min(-1), finite.max(-1)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        span = np.maximum(np.abs(least), np.abs(most)) if kind == "fp8" else most * HALF - least * HALF
        good = span < np.inf
        step = np.where(good, span, 0) * np.float32(float.fromhex(_OVER[kind]))
        tiny = step < TINY
        if kind == "fp8":
            plain = np.where(tiny, np.float32(0), step).view(np.uint32)
            inverse = np.where(tiny, 0, np.float32(1) / step)
            return np.zeros_like(least), inverse.astype(np.float32), np.where(good, plain, 0x7FC00000).astype("u4")
        up = np.where(tiny, 0, _up(np.where(tiny, np.float32(1), step), element)).astype(np.uint32)
        inverse = np.where(tiny, 0, np.float32(1) / widen(up.astype(np.uint16), element)).astype(np.float32)
        word = narrow(np.where(good, least, 0), element).astype(np.uint32) | up << 16
    return np.where(good, least, 0).astype(np.float32), inverse, np.where(good, word, 0x7FFF7FFF).astype(np.uint32)


def _e4m3(x: Array) -> Array:
    """float32 of at most 448 as e4m3 codes, to nearest even."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    size = bits & 0x7FFFFFFF
    small = np.rint(np.where(size < 0x3C800000, np.abs(x), 0) * np.float32(512)).astype(np.uint32)  # below 2**-6
    near = np.minimum(((size + 0x7FFFF + (size >> 20 & 1)) >> 20) - np.uint32(120 << 3), 0x7E)
    code: Array = np.where(size < 0x3C800000, small, near) | bits >> 24 & 0x80
    return code.astype(np.uint8)


def _of_e4m3(codes: Array) -> Array:
    """e4m3 codes as float32."""
    size = codes.astype(np.uint32) & 0x7F
    large = ((size << 20) + np.uint32(120 << 23)).view(np.float32)
    value = np.where(size < 8, size.astype(np.float32) * np.float32(2**-9), large)
    return np.where(codes & 0x80, -value, value).astype(np.float32)


def _codes(x: Array, least: Array, inverse: Array, kind: str) -> Array:
    """One code a byte."""
    with np.errstate(invalid="ignore", over="ignore"):
        halves = _settled(x) * HALF - least * HALF
        at = np.where(inverse == 0, np.float32(0), halves * (inverse * 2)).astype(np.float32)
    if kind == "fp8":
        return _e4m3(at)
    return np.minimum(np.rint(at), 255 if kind == "int8" else 15).astype(np.uint8)


def _groups(x: Array, axis: str) -> list[Array]:
    """Views of rows [..., tokens, dim] whose last axis is one group: rows, or columns of up to GROUP_TOKENS tokens."""
    if axis == "token":
        return [x]
    return [np.moveaxis(x[..., at : at + GROUP_TOKENS, :], -2, -1) for at in range(0, x.shape[-2], GROUP_TOKENS)]


def _laid(words: Array, dim: int) -> Array:
    """Scales of a group of channels as they lie: [2][dim / 8][4]."""
    return np.moveaxis(words.reshape(*words.shape[:-1], dim // 8, 2, 4), -2, -3).reshape(words.shape)


def _unlaid(words: Array, dim: int) -> Array:
    """The inverse of `_laid`."""
    return np.moveaxis(words.reshape(*words.shape[:-1], 2, dim // 8, 4), -3, -2).reshape(words.shape)


def pack(raw: Array, kind: str, axis: str, element: str) -> tuple[Array, Array]:
    """Quantize uint16 words [..., tokens, dim]: codes uint8 [..., tokens, row bytes], scales uint32 [..., n]."""
    x = widen(raw, element)
    codes: Array = np.empty(x.shape, np.uint8)
    words = []
    for group, out in zip(_groups(x, axis), _groups(codes, axis), strict=True):
        least, inverse, word = _scale(group, kind, element)
        out[...] = _codes(group, least[..., None], inverse[..., None], kind)
        words.append(word if axis == "token" else _laid(word, x.shape[-1]))
    if kind == "int4":
        codes = codes[..., 0::2] | codes[..., 1::2] << 4
    return codes, np.concatenate(words, axis=-1)


def unpack(codes: Array, words: Array, kind: str, axis: str, element: str) -> Array:
    """The words [..., tokens, dim] that codes and scales stand for."""
    if kind == "int4":
        codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)
    out = np.empty(codes.shape, np.float32)
    dim = codes.shape[-1]
    for number, (group, to) in enumerate(zip(_groups(codes, axis), _groups(out, axis), strict=True)):
        word = words if axis == "token" else _unlaid(words[..., number * dim : (number + 1) * dim], dim)
        with np.errstate(invalid="ignore", over="ignore"):
            to[...] = _values(group, word[..., None], kind, element)
    return narrow(out, element)


def _values(codes: Array, word: Array, kind: str, element: str) -> Array:
    """float32 of codes under their scale words."""
    if kind == "fp8":
        return _flushed(_of_e4m3(codes) * word.view(np.float32))
    least = widen((word & 0xFFFF).astype(np.uint16), element)
    step = widen((word >> 16).astype(np.uint16), element)
    exact = codes.astype(np.float64) * step  # in float32 too, but where it is infinite
    x = _flushed((exact + least).astype(np.float32))
    return np.where(x > LARGEST[element], LARGEST[element], x)  # the step was rounded up


def _flushed(values: Array) -> Array:
    """Subnormal float32 as zeros of their sign."""
    return np.where(np.abs(values) < NORMAL, np.copysign(np.float32(0), values), values)


def bound(raw: Array, words: Array, kind: str, axis: str, element: str) -> Array:
    """How far `unpack` may be from rows [..., tokens, dim], for each value: half a step, and the element's rounding.

    int8, int4: step / 2, where step <= (most - least) / levels * (1 + 2**-7 for bf16, 2**-10 for fp16).
    fp8: |x| / 16, or scale / 1024 for values below scale / 64. Both with the last rounding of the result added.
    """
    x = widen(raw, element).astype(np.float64)
    out = np.empty(x.shape)
    dim = x.shape[-1]
    for number, (group, to) in enumerate(zip(_groups(x, axis), _groups(out, axis), strict=True)):
        word = (words if axis == "token" else _unlaid(words[..., number * dim : (number + 1) * dim], dim))[..., None]
        if kind == "fp8":
            to[...] = np.maximum(np.abs(group) / 16, word.view(np.float32).astype(np.float64) / 1024)
        else:
            to[...] = widen((word >> 16).astype(np.uint16), element).astype(np.float64) / 2
    last = 2.0**-8 if element == "bf16" else 2.0**-11
    return out * (1 + 1e-3) + (np.abs(x) + out) * last * 1.01 + (2.0**-25 if element == "fp16" else 3e-28)
