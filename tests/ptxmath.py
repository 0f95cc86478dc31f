"""The arithmetic of PTX in numpy, for tests/ptx.py: rounding to narrow floats, comparisons, integers that wrap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


def flushed(value: np.ndarray) -> np.ndarray:
    """Subnormal float32 as zeros of their sign, as -ftz has it."""
    if value.dtype != np.float32:
        return value
    tiny = np.abs(value) < np.float32(1.17549435e-38)
    return np.where(tiny, np.copysign(np.float32(0), value), value)


def halves(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Two float32 as a pair of fp16, to nearest even."""
    with np.errstate(over="ignore"):
        parts = [x.astype(np.float16).view(np.uint16).astype(np.uint32) for x in (low, high)]
    return parts[0] | parts[1] << np.uint32(16)


def bf16_pair(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Two float32 as a pair of bf16, to nearest even; NaN is 0x7FFF."""
    parts = []
    for x in (low, high):
        bits = np.ascontiguousarray(x).view(np.uint32).astype(np.uint64)
        near = (bits + 0x7FFF + (bits >> np.uint64(16) & np.uint64(1))) >> np.uint64(16)
        parts.append(np.where(np.isnan(x), 0x7FFF, near).astype(np.uint32))
    return parts[0] | parts[1] << np.uint32(16)


E4M3 = np.array([(m / 8 * 2.0**-6) if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)])
"""Values of the codes 0..126; 127 is NaN."""
BETWEEN = (E4M3[:126] + E4M3[1:127]) / 2


def e4m3_pair(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Two float32 as a pair of e4m3 codes, to nearest even, saturating; written unlike the kernel's way on purpose."""
    parts = []
    for x in (low, high):
        size = np.abs(x.astype(np.float64))
        code = np.searchsorted(BETWEEN, size, side="left")
        tie = (code < 126) & (size == BETWEEN[np.minimum(code, 125)]) & (code % 2 == 1)
        code = np.where(np.isnan(x), 127, code + tie)
        parts.append((code | np.where(np.signbit(x), 128, 0)).astype(np.uint16))
    return parts[0] | parts[1] << np.uint16(8)


def halves_of_e4m3(codes: np.ndarray) -> np.ndarray:
    """A pair of e4m3 codes as a pair of fp16."""
    parts = []
    for code in (codes & np.uint16(0xFF), codes >> np.uint16(8)):
        value = np.where(code & 127 == 127, np.nan, E4M3[code & 127])
        parts.append(np.where(code & 128, -value, value).astype(np.float32))
    return halves(*parts)


PACKED: dict[str, Callable[..., np.ndarray]] = {"f16x2": halves, "bf16x2": bf16_pair, "e4m3x2": e4m3_pair}


COMPARE = {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
}  # fmt: skip


def _compare(code: Any, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    name = code.op[1]
    if a.dtype.kind != "f":
        return COMPARE[{"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.get(name, name)](a, b)
    unordered = np.isnan(a) | np.isnan(b)  # with NaN every comparison is false, also ne; those that end in u are true
    return COMPARE[name[:2]](a, b) | unordered if name.endswith("u") else COMPARE[name](a, b) & ~unordered


def _multiply(code: Any, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if "wide" in code.op:
        wide = np.int64 if a.dtype.kind == "i" else np.uint64
        return a.astype(wide) * b.astype(wide)
    if "hi" in code.op:
        return np.array([int(x) * int(y) >> 8 * a.itemsize for x, y in zip(a, b, strict=True)], a.dtype)
    return a * b


def _shift(code: Any, a: np.ndarray, by: np.ndarray) -> np.ndarray:
    width = 8 * a.itemsize
    far = by >= width
    small = np.where(far, 0, by).astype(a.dtype)
    moved = a << small if code.op[0] == "shl" else a >> small
    return np.where(far, a >> a.dtype.type(width - 1) if a.dtype.kind == "i" else 0, moved).astype(a.dtype)


def _fma(code: Any, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Of floats only such whose product is exact: a contracted product and sum rounds otherwise than both do."""
    if a.dtype.kind != "f":
        return _multiply(code, a, b) + c
    product = a.astype(np.float64) * b
    less = np.ldexp(product, -8)
    assert np.array_equal(less, less.astype(np.float32), equal_nan=True), f"a contracted multiplication: {code.text}"
    return (product + c).astype(np.float32)


ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": lambda _, a, b: a + b,
    "sub": lambda _, a, b: a - b,
    "mul": _multiply,
    "mad": _fma,
    "fma": _fma,
    "div": lambda _, a, b: a // b,
    "rem": lambda _, a, b: a % b,
    "min": lambda _, a, b: np.fmin(a, b),
    "max": lambda _, a, b: np.fmax(a, b),
    "and": lambda _, a, b: a & b,
    "or": lambda _, a, b: a | b,
    "xor": lambda _, a, b: a ^ b,
    "not": lambda _, a: ~a,
    "neg": lambda _, a: -a,
    "abs": lambda _, a: np.abs(a),
    "rcp": lambda _, a: (np.float32(1) / a).astype(np.float32),
    "shl": _shift,
    "shr": _shift,
    "setp": _compare,
    "selp": lambda *_: None,
}
