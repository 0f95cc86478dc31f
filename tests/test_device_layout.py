"""Layouts of paged KV as sheets: which rows become one, how ranks share a page, what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from enginekv import EngineKv, Shape
from kvtier.device import host
from kvtier.device.host import HostBuffer
from kvtier.device.layout import Paged, plan
from kvtier.device.ops import moves, summed
from kvtier.device.shuttle import Shuttle
from kvtier.identity import GroupSpec, Slice
from kvtier.types import Kind, KvtierError


def engine(order: str = "LBNHC", **more) -> EngineKv:
    """A small engine's KV, zeroed."""
    fields = {"order": order, "layers": 2, "blocks": 6, "heads": 4, "tokens": 8, "dims": (16, 16), "item": 2}
    made: list[HostBuffer] = []

    def take(size: int) -> tuple[int, np.ndarray]:
        made.append(HostBuffer(size))
        return made[0].address, made[0].data

    kv = EngineKv(Shape(**(fields | more)), take)
    kv.keep = made
    return kv


@pytest.mark.parametrize(
    ("order", "dims", "heads", "rows"),
    [
        ("LBNHC", (16, 16), 4, (4, 8, 32)),  # K beside V in every row: one row a head and token
        ("LBHNC", (32,), 4, (4, 1, 512)),  # a head's tokens in one run
        ("LBNHC", (32,), 1, (1, 1, 512)),  # a latent: the whole block in one run
        ("LBNHC", (32,), 4, (4, 8, 64)),  # heads between tokens: rows stay apart
    ],
)
def test_rows_that_lie_together_on_both_sides_are_one(order: str, dims: tuple, heads: int, rows: tuple):
    """(heads, tokens, row bytes) of the sheet: as few and as long rows as the two layouts have in common."""
    (sheet,) = engine(order, dims=dims, heads=heads).plan(16).sheets
    assert (sheet.heads, sheet.tokens, sheet.row) == rows
    assert len(sheet.bases) == 2 * len(dims)


def test_ranks_write_one_canonical_page():
    """Two tensor-parallel ranks of two pipeline stages, each with its pool, fill the page that one rank would fill."""
    whole = engine("LBNHC", layers=4)
    whole.bytes[:] = np.random.default_rng(0).integers(0, 256, len(whole.bytes))
    group = whole.plan(16).group
    slot = HostBuffer(group.item_bytes)
    ids, slots = np.array([4, 1]), np.array([slot.address], np.uint64)
    for part in (Slice(l0, l0 + 2, h0, h0 + 2) for l0 in (0, 2) for h0 in (0, 2)):
        rank = engine("LBHNC", heads=2)
        rank.logical()[:] = whole.logical()[part.l0 : part.l1, :, part.h0 : part.h1]
        mine = plan(rank.layers, 16, group, part)
        for op in moves(mine, slots, ids, (0, 2), to_slots=True):
            host.do(op)
    assert np.array_equal(slot.data, whole.page([4, 1]))


def test_a_rank_with_some_heads_moves_straight():
    """Its layers are no runs of bytes in a slot, so its shuttle leaves staging out, and refuses to sum."""
    rank = engine(heads=2)
    group = GroupSpec(Kind.FULL, 2, 4, 16 * 64)
    mine = plan(rank.layers, 16, group, Slice(0, 2, 2, 4))
    assert Shuttle(host.HostDevice(), mine).direct
    with pytest.raises(KvtierError, match="sums"):
        Shuttle(host.HostDevice(), mine, sums=True)


REFUSED = {
    "spec.page_tokens": lambda kv, group: plan(kv.layers, 12, group),
    "layers": lambda kv, group: plan(kv.layers[:1], 16, group),
    "spec.groups.cell_bytes": lambda kv, group: plan(kv.layers, 16, GroupSpec(Kind.FULL, 2, 4, 999)),
    "layers.heads": lambda kv, group: plan(kv.layers, 16, group, Slice(0, 2, 0, 3)),
    "spec.codec": lambda kv, group: plan(kv.layers, 16, group, codec="zip", element="bf16"),
    "spec.kv_dtype": lambda kv, group: plan(kv.layers, 16, group, codec="fp8", element="fp32"),
}


@pytest.mark.parametrize("field", REFUSED)
def test_what_does_not_fit_is_refused_by_name(field: str):
    """Each mismatch between an engine's tensors and the cache's spec names the field, before anything moves."""
    kv = engine()
    with pytest.raises(KvtierError) as caught:
        REFUSED[field](kv, kv.plan(16).group)
    assert caught.value.field == field


def test_blocks_of_different_sizes_are_refused():
    """Layers whose blocks hold different numbers of tokens have no page in common."""
    kv = engine()
    odd = kv.layers[1][0]._replace(tokens=4)
    with pytest.raises(KvtierError, match="8 tokens"):
        plan([kv.layers[0], [odd, odd]], 16, kv.plan(16).group)


def test_blocks_that_the_engine_does_not_have_are_refused():
    """Ids below 0 or past the pool, and a wrong number of them, never reach a kernel."""
    made = engine().plan(16)
    slots = np.zeros(1, np.uint64)
    for ids in ([-1, 0], [0, 6], [0], [0, 1, 2]):
        with pytest.raises(KvtierError, match="ids"):
            moves(made, slots, np.array(ids), (0, 2), to_slots=True)
    assert moves(made, slots[:0], np.array([], int), (0, 2), to_slots=True) == []


def test_codecs_need_rows_at_16_bytes():
    """Quantized rows are read 16 bytes at once: odd bases are refused, which is no matter for plain moves."""
    rows = [[Paged(8, 4, 1, 16, 64, 1024, 64, 64), Paged(8, 4, 1, 16, 64, 1024, 64, 64)]]
    assert plan(rows, 16, GroupSpec(Kind.FULL, 1, 1, 2048)).sheets[0].width == 8
    with pytest.raises(KvtierError, match="multiples of 16 bytes"):
        plan(rows, 16, GroupSpec(Kind.FULL, 1, 1, 2048), codec="fp8", element="bf16")


def test_only_sizes_that_the_kernel_sums_are_asked_of_it():
    """Slots of at most 240 bytes and odd sizes are summed by the host."""
    for size in (240, 250, 1001):
        with pytest.raises(KvtierError, match="size"):
            summed(np.zeros(1, np.uint64), size, 0)
