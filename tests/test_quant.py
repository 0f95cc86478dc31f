"""Quantized KV: every value comes back within the stated bound."""

from __future__ import annotations

import numpy as np
import pytest

from enginekv import numbers
from kvtier import quant
from kvtier.identity import CacheSpec, GroupSpec, cache_id
from kvtier.types import Kind, KvtierError

ELEMENTS = ("bf16", "fp16")
WAYS = [(kind, axis) for kind in ("fp8", "int8", "int4") for axis in ("token", "channel")]


def around_e4m3() -> np.ndarray:
    """All e4m3 values up to 448, all ties between them, and the float32 beside each."""
    steps = quant._of_e4m3(np.arange(127, dtype=np.uint8))
    points = np.concatenate([steps, (steps[1:] + steps[:-1]) / 2]).astype(np.float32)
    near = [np.nextafter(points, np.float32(way)) for way in (-np.inf, np.inf)]
    return np.clip(np.concatenate([points, *near]), 0, 448).astype(np.float32)


def rows(seed: int, element: str, tokens: int = 48, dim: int = 64) -> np.ndarray:
    """uint16 [3, tokens, dim] of KV-like numbers."""
    return numbers(3 * tokens * dim * 2, seed, element).view(np.uint16).reshape(3, tokens, dim)


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize(("kind", "axis"), WAYS)
def test_values_come_back_within_the_bound(kind: str, axis: str, element: str):
    """No value of random KV, tiny and huge scales included, is further off than `bound` says; and the bound is near."""
    worst = 0.0
    for seed in range(10):
        raw = rows(seed, element)
        if seed > 5:
            raw = quant.narrow(quant.widen(raw, element) * np.float32(10.0 ** (seed - 8)), element)
        codes, words = quant.pack(raw, kind, axis, element)
        off = np.abs(
            quant.widen(quant.unpack(codes, words, kind, axis, element), element).astype(np.float64)
            - quant.widen(raw, element)
        )
        limit = quant.bound(raw, words, kind, axis, element)
        assert (off <= limit).all()
        worst = max(worst, float((off / limit).max()))
    assert worst > 0.5


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize(("kind", "axis"), WAYS)
def test_the_largest_values_come_back_finite(kind: str, axis: str, element: str):
    """However far apart; a step is rounded up, so that the last code stands for more than the largest value."""
    most = quant.LARGEST[element]
    raw = quant.narrow((np.linspace(-1, 1, 2 * 32 * 64) * most).astype(np.float32), element).reshape(2, 32, 64)
    raw[:, :, 0], raw[:, :, 63], raw[:, 31] = raw[0, 0, 0], raw[1, 31, 63], raw[1, 31, 63]
    codes, words = quant.pack(raw, kind, axis, element)
    back = quant.widen(quant.unpack(codes, words, kind, axis, element), element)
    assert np.isfinite(back).all()
    off = np.abs(back.astype(np.float64) - quant.widen(raw, element))
    assert (off <= quant.bound(raw, words, kind, axis, element)).all()


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize(("kind", "axis"), WAYS)
def test_equal_values_come_back_exactly(kind: str, axis: str, element: str):
    """A group of one value (zero, one, minus 2.5) has no error at all."""
    for value in (0.0, 1.0, -2.5):
        raw = quant.narrow(np.full((2, 16, 8), value, np.float32), element)
        if kind == "fp8" and value:
            continue  # 448 is a code, but the scale is rounded
        codes, words = quant.pack(raw, kind, axis, element)
        assert np.array_equal(quant.unpack(codes, words, kind, axis, element), raw)


@pytest.mark.parametrize(("kind", "axis"), WAYS)
def test_what_is_not_finite_brings_nan_back(kind: str, axis: str):
    """A NaN or an infinity spoils its group, visibly, and no other."""
    raw = rows(1, "bf16", 32, 16)
    raw[0, 3, 5], raw[1, 4, 6] = 0x7FC0, 0xFF80
    codes, words = quant.pack(raw, kind, axis, "bf16")
    back = np.isnan(quant.widen(quant.unpack(codes, words, kind, axis, "bf16"), "bf16"))
    if axis == "token":
        assert back[0, 3].all()
        assert back[1, 4].all()
        assert back.sum() == 2 * 16
    else:
        assert back[0, :, 5].all()
        assert back[1, :, 6].all()
        assert back.sum() == 2 * 32


def test_e4m3_codes_are_the_nearest_values():
    """Every code stands for itself; every other number goes to the nearer neighbour, ties to the even code."""
    values = around_e4m3()
    steps = quant._of_e4m3(np.arange(127, dtype=np.uint8)).astype(np.float64)
    codes = quant._e4m3(values)
    off = np.abs(steps[codes] - values)
    best = np.abs(steps[None, :] - values[:, None].astype(np.float64)).min(1)
    assert np.array_equal(off, best)
    assert np.array_equal(quant._e4m3(quant._of_e4m3(np.arange(127, dtype=np.uint8))), np.arange(127))
    ties = ((steps[1:] + steps[:-1]) / 2).astype(np.float32)
    assert (quant._e4m3(ties) % 2 == 0).all()


def test_channels_save_keys_with_outlying_channels():
    """int4 keys with a few large channels: a scale a channel is several times nearer than a scale a token (KIVI)."""
    random = np.random.default_rng(0)
    keys = random.standard_normal((4, 64, 128)).astype(np.float32)
    keys[:, :, ::16] += 20 * random.standard_normal((4, 1, 8)).astype(np.float32)
    raw = quant.narrow(keys, "bf16")
    off = {}
    for axis in ("token", "channel"):
        back = quant.unpack(*quant.pack(raw, "int4", axis, "bf16"), "int4", axis, "bf16")
        off[axis] = float(np.sqrt(np.mean((quant.widen(back, "bf16") - quant.widen(raw, "bf16")) ** 2)))
    assert off["channel"] < off["token"] / 3


@pytest.mark.parametrize(
    ("name", "ratio"), [("fp8", 1.93), ("int8", 1.93), ("int4", 3.76), ("int8-kivi", 1.85), ("int4-kivi", 3.45)]
)
def test_cells_are_as_small_as_stated(name: str, ratio: float):
    """Bytes of bf16 cells of 64 tokens and 128 channels over those of quantized ones."""
    small = quant.cell(quant.codec(name), 64, (128, 128)).bytes
    assert 64 * 256 * 2 / small == pytest.approx(ratio, abs=0.01)


def test_what_cannot_be_quantized_is_refused_by_name():
    """Unknown codecs, pages of odd sizes and odd dims name the field."""
    with pytest.raises(KvtierError, match=r"spec\.codec"):
        quant.codec("zip")
    with pytest.raises(KvtierError, match=r"spec\.page_tokens"):
        quant.cell(quant.codec("fp8"), 8, (128, 128))
    for dim in (12, 0, 1032):
        with pytest.raises(KvtierError, match="dim"):
            quant.cell(quant.codec("fp8"), 16, (dim, 128))


def test_the_codec_is_part_of_the_identity():
    """Quantized KV never answers for KV that is not, nor for another codec's."""
    made = {
        cache_id(CacheSpec("m", bytes(16), "bfloat16", 16, (GroupSpec(Kind.FULL, 1, 1, 64),), codec=name), "s", 0)
        for name in ("none", *quant.CODECS)
    }
    assert len(made) == 1 + len(quant.CODECS)
