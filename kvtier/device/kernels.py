"""Which kernel of cuda/ does an operation, with which grid and arguments. Pure: the tests run it on no GPU at all."""

from __future__ import annotations

import functools
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.device.layout import VECTOR, Sheet
from kvtier.device.ops import Move, Op, Sum
from kvtier.types import bad

THREADS: Final = 256
"""Most threads of a block that moves bytes."""
EACH: Final = 4
"""Vectors that such a thread has in flight."""
WARP: Final = 32
ROW: Final = 4
"""Least threads that move a block: 64 bytes at once, two whole sectors."""
QUANT_THREADS: Final = 128
ROWS: Final = 8
"""Tokens that a group of threads quantizes at once, in rows of up to 32 vectors."""
WIDE_ROWS: Final = 4
"""The same for longer rows."""
SUM_THREADS: Final = 288
WAVES: Final = 16
"""Blocks for each multiprocessor: enough to fill it several times over."""
ELEMENTS: Final = {"bf16": "Bf16", "fp16": "Fp16"}
CODECS: Final = {"fp8": "Fp8", "int8": "Int8", "int4": "Int4"}
SECRET: Final = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248e"
    "e03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d8a"
    "51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8f"
    "f8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
"""The constants of xxh3."""
FIRST: Final = (0xC2B2AE3D, 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9,
                0x85EBCA77C2B2AE63, 0x85EBCA77, 0x27D4EB2F165667C5, 0x9E3779B1)  # fmt: skip


class Source(NamedTuple):
    """One compilation: a file of cuda/ and the macros it is compiled with."""

    file: str
    defines: tuple[str, ...] = ()


class Launch(NamedTuple):
    """One launch. Arrays among `args` are tables: the device puts them in its memory and passes their addresses."""

    source: Source
    name: str
    grid: tuple[int, int]
    block: tuple[int, int]
    args: tuple[int | npt.NDArray[Any], ...]


@functools.cache
def sum_keys() -> npt.NDArray[np.uint64]:
    """Words of the secret as cuda/sums.cu wants them, and the first accumulators."""
    at = [*range(0, 192, 8), *range(121, 185, 8), *range(11, 75, 8)]
    words = [int.from_bytes(SECRET[n : n + 8], "little") for n in at]
    return np.array([*words, *FIRST], np.uint64)


def table(sheet: Sheet, first: int, count: int) -> npt.NDArray[np.uint64]:
    """The table of planes: 32 bytes each, of which the last 8 are not used."""
    rows = np.zeros((count, 4), np.uint64)
    for number, column in enumerate((sheet.bases, sheet.ats, sheet.metas)):
        rows[:, number] = column[first : first + count]
    return rows


def launch(op: Op, processors: int, blocks: int = 0) -> Launch:
    """How to do an operation on a GPU of so many multiprocessors; `blocks`: at most so many thread blocks (0: many)."""
    most = blocks or processors * WAVES
    if isinstance(op, Sum):
        keys = sum_keys()
        grid = (min(len(op.slots), most), 1)
        return Launch(
            Source("sums.cu"), "sum_slots", grid, (SUM_THREADS, 1), (op.slots, len(op.slots), op.size, keys, op.out)
        )
    return _quantize(op, most) if op.kind else _move(op, most)


def _move(op: Move, most: int) -> Launch:
    """A launch that moves bytes as they are."""
    sheet, width = op.sheet, op.sheet.width
    vectors = sheet.heads * sheet.tokens * sheet.row // width
    wanted = -(-vectors // EACH)
    threads, rows = min(max(WARP, wanted // WARP * WARP), THREADS), 1
    if wanted < WARP and width == VECTOR:  # several blocks a warp, which would be idle else
        threads = max(ROW, 1 << (wanted - 1).bit_length())
        rows = WARP // threads
    units = -(-len(op.ids) // rows) * op.planes
    parts = min(-(-vectors // (threads * EACH)), max(1, most // units))
    grid = (min(units, max(1, most // parts)), parts)
    args = (
        table(sheet, op.first, op.planes), op.planes, op.slots, op.ids, len(op.ids), op.per, sheet.block_stride,
        sheet.heads, sheet.head_stride, sheet.head_pitch, sheet.tokens, sheet.token_stride, sheet.row,
    )  # fmt: skip
    return Launch(Source("pages.cu"), f"{'gather' if op.to_slots else 'scatter'}_{width}", grid, (threads, rows), args)


def _quantize(op: Move, most: int) -> Launch:
    """A launch that quantizes or dequantizes on the way."""
    sheet = op.sheet
    vecs = sheet.row // 16
    lanes = min(1 << (vecs - 1).bit_length(), 32)
    tokens = sheet.tokens * op.per
    heads = len(op.slots) * op.planes * sheet.heads
    if sheet.axis == "channel":
        items = heads * -(-tokens // 32) * vecs
    else:
        items = heads * tokens // (WIDE_ROWS if vecs > 32 else ROWS) * lanes
    if items >= 1 << 31:
        raise bad("slots", "fewer pages at once: kernels count in 32 bits", len(op.slots))
    source = Source("quant.cu", (f"ELEMENT={ELEMENTS[op.element]}", f"CODEC={CODECS[op.kind]}"))
    args = (
        table(sheet, op.first, op.planes), op.planes, op.slots, op.ids, len(op.slots), op.per, sheet.block_stride,
        sheet.heads, sheet.head_stride, sheet.head_pitch, sheet.tokens, sheet.token_stride, vecs, lanes,
    )  # fmt: skip
    wide = "_wide" if sheet.axis == "token" and vecs > 32 else ""
    name = f"run_{'pack' if op.to_slots else 'unpack'}_{sheet.axis}{wide}"
    return Launch(source, name, (min(-(-items // QUANT_THREADS), most), 1), (QUANT_THREADS, 1), args)
