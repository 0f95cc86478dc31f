"""What a GPU makes of pages, compared with numpy on the CPU: bytes, sums, and the values that come back of a codec."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import xxhash
from gpu_room import TOKENS, USUAL, Room, room
from measure import Row, Target, make_row

from kvtier import quant
from kvtier.device.shuttle import Shuttle

LAYERS, PAGES = 3, 5
WITHIN = Target("value", "<=", 1)


def check(gpu: Any) -> Iterator[Row]:
    """Pages through every codec, out and in; raises where a byte differs. A row for each codec: how far values move."""
    for name in ("none", *quant.CODECS):
        yield from _checked(gpu, name)
    print("check: every byte is as numpy has it, dequantized values too")


def _checked(gpu: Any, name: str) -> list[Row]:
    """One codec."""
    at = room(gpu, LAYERS, PAGES, name)
    mirror, stream = gpu.pin(at.kv.bytes), gpu.stream()

    def send(words: Any) -> None:
        mirror.data[:] = words.view(np.uint8)
        gpu.copy(at.kv.address, mirror.address, at.kv.bytes, stream)
        stream.synchronize()

    words = quant.narrow(np.random.default_rng(1).standard_normal(at.kv.bytes // 2).astype(np.float32), "bf16")
    send(words)
    shuttle = Shuttle(gpu, at.plan, sums=True)
    stored = shuttle.store(at.ids, at.slots)
    stored.wait()
    pages, before = at.pinned.data.reshape(PAGES, -1), _pages(words, at)
    for page, want in zip(pages, before, strict=True):
        assert np.array_equal(page, expected(want, name)), f"gather {name}"
    assert stored.sums is not None
    assert stored.sums.tolist() == [xxhash.xxh3_64_intdigest(page) for page in pages], f"sums {name}"
    send(np.zeros_like(words))
    shuttle.load(at.ids, at.slots).wait()
    gpu.copy(mirror.address, at.kv.address, at.kv.bytes, stream)
    stream.synchronize()
    found = mirror.data.view(np.uint16)
    back, numpys = _pages(found, at), np.stack([returned(page, name) for page in before])
    assert np.array_equal(back, numpys), f"scatter {name}"
    others = np.delete(_blocks(found), at.ids, axis=1)
    assert not others.any(), f"scatter {name} wrote to other blocks"
    shuttle.close()
    mirror.free()
    at.free()
    if name == "none":
        return []
    shares = {who: [_share(before, values, name)] for who, values in (("kvtier", back), ("numpy", numpys))}
    case = f"dequantized {name}, largest error"
    return [make_row("gpu", case, "of its bound", shares, limit="numpy", target=WITHIN)]


def _blocks(words: Any) -> Any:
    """An engine's KV as [layers, blocks, tokens, heads, K and V, dim]."""
    return words.reshape(LAYERS, 2 * PAGES, TOKENS, USUAL.heads, 2, USUAL.dim)


def _pages(words: Any, at: Room) -> Any:
    """What the pages' blocks hold, as [pages, layers, heads, K and V, tokens, dim]."""
    return np.ascontiguousarray(_blocks(words)[:, at.ids].transpose(1, 0, 3, 4, 2, 5))


def _halves(page: Any, name: str) -> list[tuple[Any, Any, Any, str, str]]:
    """(words, codes, scales, kind, axis) of a page's K and of its V."""
    way = quant.codec(name)
    return [
        (page[:, :, n], *quant.pack(page[:, :, n], way.kind, way.axes[n], "bf16"), way.kind, way.axes[n])
        for n in range(2)
    ]


def expected(page: Any, name: str) -> Any:
    """A canonical page of words [layers, heads, K and V, tokens, dim] as bytes in its slot."""
    if name == "none":
        return np.ascontiguousarray(page).view(np.uint8).reshape(-1)
    parts, heads = _halves(page, name), page.shape[:2]
    pieces = [codes.reshape(*heads, -1) for _, codes, _, _, _ in parts]
    pieces += [np.ascontiguousarray(scales).view(np.uint8).reshape(*heads, -1) for _, _, scales, _, _ in parts]
    return np.concatenate(pieces, axis=2).reshape(-1)


def returned(page: Any, name: str) -> Any:
    """The same page as it comes back."""
    if name == "none":
        return page
    parts = _halves(page, name)
    return np.stack([quant.unpack(codes, scales, kind, axis, "bf16") for _, codes, scales, kind, axis in parts], axis=2)


def _share(pages: Any, back: Any, name: str) -> float:
    """The largest error of a value, as a share of what its codec promises."""
    shares = []
    for page, came in zip(pages, back, strict=True):
        for n, (raw, _, scales, kind, axis) in enumerate(_halves(page, name)):
            off = np.abs(quant.widen(came[:, :, n], "bf16") - quant.widen(raw, "bf16"))
            limit = quant.bound(raw, scales, kind, axis, "bf16")
            shares.append(float((off / np.maximum(limit, np.finfo(np.float32).tiny)).max()))
    return max(shares)
