"""The kernels of cuda/, run on the CPU as the compilers emit them: bit for bit what numpy does, and within bounds."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import pytest
import xxhash

import cudakit
import ptx
from enginekv import EngineKv, Shape, numbers
from kvtier import quant
from kvtier.device import host
from kvtier.device.kernels import launch
from kvtier.device.layout import Plan
from kvtier.device.ops import moves, summed
from kvtier.sources import source
from ptxparse import parse

SPEC = [(compiler, arch) for compiler in ("nvrtc", "nvcc") for arch in (80, 90, 100)]
USUAL = {(compiler, 90) for compiler in cudakit.compilers()[:1]}
"""What the default suite runs; the rest is slow."""
LAYOUTS = {
    "hnd": (Shape("LBHNC", 2, 7, 4, 16, (64, 64), 2), 32),
    "nhd": (Shape("LBNHC", 2, 7, 4, 16, (64, 64), 2), 16),
    "nhd-planes": (Shape("LBNHC", 2, 6, 8, 16, (128,), 2), 32),
    "block-outermost-hnd": (Shape("BLHNC", 3, 5, 2, 16, (64, 64), 2), 16),
    "block-outermost-nhd": (Shape("BLNHC", 3, 5, 2, 16, (64, 64), 2), 16),
    "head-outermost": (Shape("LHBNC", 2, 6, 3, 8, (64, 64), 2), 24),
    "block-head-layer": (Shape("BHLNC", 2, 6, 3, 8, (64, 64), 2), 8),
    "mla": (Shape("LBNHC", 3, 4, 1, 64, (576,), 2), 64),
    "mla-blocks-of-1": (Shape("LBNHC", 2, 40, 1, 1, (576,), 2), 16),
    "one-head-blocks-of-1": (Shape("LBNHC", 2, 50, 1, 1, (128, 128), 2), 23),
    "k-wider-than-v": (Shape("LBNHC", 2, 4, 2, 16, (192, 128), 2), 16),
    "fp8-kv": (Shape("LBNHC", 2, 4, 2, 16, (128, 128), 1), 32),
    "width-8": (Shape("BLNHC", 2, 5, 2, 8, (36, 20), 2), 16),
    "width-4": (Shape("LBHNC", 2, 5, 3, 4, (10, 6), 2), 12),
    "width-2": (Shape("LHBNC", 2, 5, 3, 4, (5, 3), 2), 12),
    "width-1": (Shape("LBNHC", 2, 5, 3, 5, (5, 3), 1), 15),
}
SECTORS = {"width-8": 1.34, "width-4": 2.05, "width-2": 2.75, "width-1": 4.9}
"""Sectors asked for, as multiples of the bytes moved, of rows of 3 to 72 bytes; of all others 1.05."""
QUANTIZED = {
    "nhd": (Shape("LBNHC", 2, 7, 2, 16, (128, 128), 2), 32),
    "hnd-64": (Shape("LBHNC", 1, 7, 2, 16, (64, 64), 2), 48),
    "blocks-of-2": (Shape("BLNHC", 1, 30, 2, 2, (72, 40), 2), 16),
    "blocks-of-1": (Shape("LBNHC", 1, 40, 1, 1, (256, 8), 2), 16),
    "mla": (Shape("LBNHC", 1, 5, 1, 16, (576,), 2), 32),
    "long": (Shape("LBNHC", 1, 2, 1, 64, (1024, 264), 2), 64),
}


def params(usual: set) -> list:
    """(compiler, arch) pairs: the usual ones, and the others marked slow or skipped."""
    found = cudakit.compilers()
    missing = pytest.mark.skip(reason="neither NVRTC's wheel nor nvcc is here")
    out = [pytest.param(*pair, marks=[] if pair in usual else [pytest.mark.slow]) for pair in SPEC if pair[0] in found]
    return out or [pytest.param("nvrtc", 90, marks=[missing])]


OTHERS = [what for what in cudakit.SOURCES if "ELEMENT=Fp16" in what.defines and "CODEC=Int4" not in what.defines]
"""What no other test of the default suite compiles."""
EMITTED = [
    pytest.param(what, id="-".join([what.file, *what.defines]), marks=[pytest.mark.slow] if what in OTHERS else [])
    for what in cudakit.SOURCES
]
COMPILED = [
    pytest.param(what, id="-".join([what.file, *what.defines]), marks=[pytest.mark.slow] if what.defines else [])
    for what in cudakit.SOURCES
]
on_all = pytest.mark.parametrize(("compiler", "arch"), params(USUAL))


def first_usual(names: Iterable[str]) -> list:
    """The first, and the others marked slow."""
    return [pytest.param(name, marks=[pytest.mark.slow] if at else []) for at, name in enumerate(names)]


def ways(names: Iterable[str]) -> list:
    """(codec, element) pairs; fp16 is slow but for one, and so is what needs one more compilation."""
    return [
        pytest.param(name, element, marks=[] if element == "bf16" or name == "int4-kivi" else [pytest.mark.slow])
        for name in names
        for element in ("bf16", "fp16")
    ]


class Scene(NamedTuple):
    """An engine's KV and slots in checked memory."""

    memory: ptx.Memory
    engine: EngineKv
    plan: Plan
    ids: np.ndarray
    slots: list[np.ndarray]
    addresses: np.ndarray

    def pages(self) -> list[list[int]]:
        """The engine's blocks of each page."""
        return self.ids.reshape(-1, self.plan.per).tolist()


def scene(shape: Shape, page_tokens: int, name: str = "none", element: str = "bf16", seed: int = 0) -> Scene:
    """Random KV, two pages of random blocks (or one where there are few), poisoned slots."""
    memory = ptx.Memory(1 << 21)
    engine = EngineKv(shape, memory.take)
    random = np.random.default_rng(seed)
    raw = numbers(len(engine.bytes), seed, element) if name != "none" else random.integers(0, 256, len(engine.bytes))
    engine.bytes[:] = raw
    plan = engine.plan(page_tokens, name, element)
    count = min(2, shape.blocks // plan.per)
    ids = random.permutation(shape.blocks)[: count * plan.per]
    taken = [memory.take(plan.group.item_bytes) for _ in range(count)]
    return Scene(memory, engine, plan, ids, [view for _, view in taken], np.array([a for a, _ in taken], np.uint64))


def do(at: Scene, compiler: str, arch: int, *, to_slots: bool, blocks: int = 0) -> int:
    """Run the kernels; the sectors that they asked for."""
    ops = moves(at.plan, at.addresses, at.ids, (0, at.plan.layers), to_slots=to_slots)
    return sum(cudakit.run(op, at.memory, compiler, arch, blocks).sectors for op in ops)


def do_on_host(at: Scene, *, to_slots: bool) -> None:
    """The same in numpy."""
    for op in moves(at.plan, at.addresses, at.ids, (0, at.plan.layers), to_slots=to_slots):
        host.do(op)


def check_gather(at: Scene) -> None:
    """The slots are the canonical pages."""
    for slot, blocks in zip(at.slots, at.pages(), strict=True):
        assert np.array_equal(slot, at.engine.page(blocks))


def check_scatter(at: Scene, before: np.ndarray) -> None:
    """The pages' blocks are as they were, all others still say 7."""
    logical = at.engine.logical().copy()
    mine = np.zeros(at.engine.shape.blocks, bool)
    mine[at.ids] = True
    assert (logical[:, ~mine] == 7).all()
    at.engine.bytes[:] = before
    assert np.array_equal(logical[:, mine], at.engine.logical()[:, mine])


@on_all
@pytest.mark.parametrize("name", LAYOUTS)
def test_gather_and_scatter_are_exact(name: str, compiler: str, arch: int):
    """Pages come out canonical whatever the engine's layout, and go back into exactly their blocks."""
    at = scene(*LAYOUTS[name])
    do(at, compiler, arch, to_slots=True)
    check_gather(at)
    before = at.engine.bytes.copy()
    at.engine.bytes[:] = 7
    do(at, compiler, arch, to_slots=False)
    check_scatter(at, before)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_cpu_in_a_gpus_place_does_the_same(name: str):
    """Numpy on raw addresses makes the same canonical pages and brings them back."""
    at = scene(*LAYOUTS[name])
    do_on_host(at, to_slots=True)
    check_gather(at)
    before = at.engine.bytes.copy()
    at.engine.bytes[:] = 7
    do_on_host(at, to_slots=False)
    check_scatter(at, before)


@on_all
@pytest.mark.parametrize("layers", [(0, 1), (1, 3)])
def test_layers_can_move_alone(layers: tuple[int, int], compiler: str, arch: int):
    """A launch for some layers touches their bytes of a slot and no others."""
    at = scene(*LAYOUTS["mla"])
    for op in moves(at.plan, at.addresses, at.ids, layers, to_slots=True):
        cudakit.run(op, at.memory, compiler, arch)
    start, size = at.plan.bytes_of(*layers)
    for slot, blocks in zip(at.slots, at.pages(), strict=True):
        assert np.array_equal(slot[start : start + size], at.engine.page(blocks)[start : start + size])
        assert (np.delete(slot, np.s_[start : start + size]) == ptx.POISON).all()


@on_all
@pytest.mark.parametrize("blocks", [1, 3])
def test_few_thread_blocks_do_the_whole_work(blocks: int, compiler: str, arch: int):
    """A copy that leaves the engine most of the GPU moves the same bytes."""
    for name in ("nhd", "one-head-blocks-of-1"):
        at = scene(*LAYOUTS[name])
        do(at, compiler, arch, to_slots=True, blocks=blocks)
        check_gather(at)
    at = scene(*QUANTIZED["nhd"], "int4-kivi")
    do(at, compiler, arch, to_slots=True, blocks=blocks)
    mine = [slot.copy() for slot in at.slots]
    do_on_host(at, to_slots=True)
    assert all(np.array_equal(a, b) for a, b in zip(mine, at.slots, strict=True))


@on_all
@pytest.mark.parametrize(("name", "element"), ways(quant.CODECS))
@pytest.mark.parametrize("shape", first_usual(QUANTIZED))
def test_quantization_is_numpys_bit_for_bit(shape: str, name: str, element: str, compiler: str, arch: int):
    """Codes, scales and what comes back of them are those of kvtier.quant, for every layout, codec and element."""
    at = scene(*QUANTIZED[shape], name, element)
    do(at, compiler, arch, to_slots=True)
    mine = [slot.copy() for slot in at.slots]
    do_on_host(at, to_slots=True)
    assert all(np.array_equal(a, b) for a, b in zip(mine, at.slots, strict=True))
    at.engine.bytes[:] = 7
    do(at, compiler, arch, to_slots=False)
    back = at.engine.bytes.copy()
    at.engine.bytes[:] = 7
    do_on_host(at, to_slots=False)
    assert np.array_equal(back, at.engine.bytes)


@on_all
@pytest.mark.parametrize(("name", "element"), ways(["fp8", "int8", "int4-kivi"]))
def test_odd_values_quantize_as_numpy_does(name: str, element: str, compiler: str, arch: int):
    """NaN, infinities, subnormals, -0, equal values and the largest ones: the same codes and scales, NaN comes back."""
    odd_values(name, element, compiler, arch)


@pytest.mark.skipif(not cudakit.compilers(), reason="neither NVRTC's wheel nor nvcc is here")
@pytest.mark.slow
def test_e4m3_in_software_is_the_same():
    """Before sm_89 there are no e4m3 instructions: the code in their place gives the same bytes."""
    odd_values("fp8", "bf16", cudakit.compilers()[0], 80)


WIDTHS = ["hnd", "width-8", "width-4", "width-2", "width-1"]
"""Layouts that between them take each width of a vector."""
UNUSED = {"Fp8": {"run_pack_channel", "run_unpack_channel"}}
"""Kernels that no codec takes: the template's, compiled with the others."""


def cases_of(what: cudakit.Source) -> list[Scene]:
    """Scenes that between them take each kernel of a source with KV."""
    if what.file == "pages.cu":
        return [scene(*LAYOUTS[name]) for name in WIDTHS]
    element, kind = (define.split("=")[1].lower() for define in what.defines)
    channel = [f"{kind}-kivi"] if kind != "fp8" else []
    shapes = [("nhd", kind), ("long", kind), *(("nhd", name) for name in channel)]
    return [scene(*QUANTIZED[shape], name, element) for shape, name in shapes]


@pytest.mark.skipif(not cudakit.compilers(), reason="neither NVRTC's wheel nor nvcc is here")
@pytest.mark.parametrize("arch", cudakit.ARCHES)
@pytest.mark.parametrize("what", COMPILED)
def test_every_kernel_is_right_in_each_generation(what: cudakit.Source, arch: int):
    """What is emitted for sm_80, 90, 100 and 120 is run kernel by kernel: none is left out, all do what numpy does."""
    compiler, ran = cudakit.compilers()[0], set()
    for at in cases_of(what) if what.file != "sums.cu" else []:
        for to_slots in (True, False):
            ops = moves(at.plan, at.addresses, at.ids, (0, at.plan.layers), to_slots=to_slots)
            ran |= {launch(op, 2).name for op in ops}
            do(at, compiler, arch, to_slots=to_slots)
            mine = [slot.copy() for slot in at.slots] if to_slots else [at.engine.bytes.copy()]
            if not to_slots:
                at.engine.bytes[:] = 7
            do_on_host(at, to_slots=to_slots)
            theirs = at.slots if to_slots else [at.engine.bytes]
            assert all(np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True))
            at.engine.bytes[:] = 7
    if what.file == "sums.cu":
        check_sums(1032, compiler, arch)
        ran.add("sum_slots")
    unused = UNUSED.get(what.defines[1].split("=")[1], set()) if what.defines else set()
    assert ran == set(cudakit.kernels(compiler, what, arch)) - unused


ODD = Shape("LBNHC", 1, 2, 1, 32, (64, 64), 2), 32
"""Two pages for the numbers that go wrong first."""


def put_odd_values(data: np.ndarray, element: str) -> None:
    """NaN, infinities, subnormals, -0, equal values and the largest ones."""
    words = data.view(np.uint16).reshape(2, 32, 128)
    nan, inf, most = (0x7FC0, 0x7F80, 0x7F7F) if element == "bf16" else (0x7E00, 0x7C00, 0x7BFF)
    words[0, 1, 3], words[0, 2, 4], words[0, 3, 5], words[0, 4, 70] = nan, inf, 0x8000 | inf, nan
    words[1, 0], words[1, 1], words[1, 2], words[1, 3] = 0, 0x8000, 0x0001, 0x8003
    words[1, 4, ::2], words[1, 4, 1::2], words[1, 5] = most, 0x8000 | most, 0x3F80


def odd_values(name: str, element: str, compiler: str, arch: int) -> None:
    """Both ways with them."""
    at = scene(*ODD, name, element)
    put_odd_values(at.engine.bytes, element)
    do(at, compiler, arch, to_slots=True)
    mine = [slot.copy() for slot in at.slots]
    do_on_host(at, to_slots=True)
    assert all(np.array_equal(a, b) for a, b in zip(mine, at.slots, strict=True))
    at.engine.bytes[:] = 7
    do(at, compiler, arch, to_slots=False)
    back = quant.widen(at.engine.bytes.view(np.uint16), element)
    at.engine.bytes[:] = 7
    do_on_host(at, to_slots=False)
    want = quant.widen(at.engine.bytes.view(np.uint16), element)
    assert np.isnan(want).any()
    assert not np.isinf(want).any()
    assert np.array_equal(back, want, equal_nan=True)


@on_all
@pytest.mark.parametrize("size", [248, 1016, 1024, 1032, 2048, 32 * 1024, 33 * 1024 + 8, 72_968])
def test_sums_are_the_hosts_xxh3(size: int, compiler: str, arch: int):
    """A slot's sum on the device is the xxh3-64 that the host takes, for every kind of tail."""
    check_sums(size, compiler, arch)


def check_sums(size: int, compiler: str, arch: int) -> None:
    """Three slots of random bytes."""
    memory, random = ptx.Memory(1 << 19), np.random.default_rng(size)
    taken = [memory.take(size) for _ in range(3)]
    for _, view in taken:
        view[:] = random.integers(0, 256, size)
    out, sums = memory.take(24)
    cudakit.run(summed(np.array([address for address, _ in taken]), size, out), memory, compiler, arch)
    assert sums.view(np.uint64).tolist() == [xxhash.xxh3_64_intdigest(view) for _, view in taken]


@on_all
@pytest.mark.parametrize("name", LAYOUTS)
def test_moves_ask_for_hardly_more_sectors_than_there_are(name: str, compiler: str, arch: int):
    """Gather and scatter touch at most 1.05 times the 32-byte sectors of their pages, their tables included.

    Rows that are no multiples of 16 bytes begin amid sectors, and K and V share some: those have bounds of their own.
    """
    at = scene(*LAYOUTS[name])
    ideal, most = 2 * len(at.slots) * len(at.slots[0]) / 32, SECTORS.get(name, 1.05)
    assert do(at, compiler, arch, to_slots=True) <= most * ideal
    assert do(at, compiler, arch, to_slots=False) <= most * ideal


@on_all
@pytest.mark.parametrize("name", quant.CODECS)
@pytest.mark.parametrize("shape", first_usual(["nhd", "mla"]))
def test_quantization_asks_for_hardly_more_sectors(shape: str, name: str, compiler: str, arch: int):
    """The same bound for fused gather and quantize, and back."""
    at = scene(*QUANTIZED[shape], name)
    rows = sum(at.engine.shape.dims) * 2 * at.engine.shape.heads * at.engine.shape.layers * at.plan.page_tokens
    ideal = len(at.slots) * (len(at.slots[0]) + rows) / 32
    assert do(at, compiler, arch, to_slots=True) <= 1.05 * ideal
    assert do(at, compiler, arch, to_slots=False) <= 1.05 * ideal


MUTATIONS = {
    "sums without the barrier": ("sums.cu", "__syncthreads();", "", "race"),
    "a step past the last vector": ("pages.cu", "(n + k * stride < total)", "(n + k * stride <= total)", "bounds"),
    "rows of threads past the last block": ("pages.cu", "if (block >= (u32)blocks) continue;", "", "bounds|race"),
    "rows of the last group twice": ("quant.cu", "live = n < total ? (u32)vecs : 0", "live = vecs", "race"),
    "a shuffle that idle threads miss": (
        "quant.cu", "for (u32 by = 1; by < lanes; by *= 2) range.merge(by);",
        "if (lane < live) for (u32 by = 1; by < lanes; by *= 2) range.merge(by);", "part of a warp",
    ),
}  # fmt: skip


@on_all
@pytest.mark.parametrize("name", MUTATIONS)
def test_kernels_with_a_mistake_are_caught(name: str, compiler: str, arch: int):
    """The real sources with one mistake each: the run on the CPU stops and names its kind."""
    file, right, wrong, says = MUTATIONS[name]
    what = next(s for s in cudakit.SOURCES if s.file == file)
    text = source("cuda", file).read_text()
    assert right in text
    found = parse(cudakit.to_ptx(compiler, what, arch, text.replace(right, wrong)))
    if file == "sums.cu":
        memory = ptx.Memory(1 << 18)
        address, out = memory.take(70 << 10)[0], memory.take(8)[0]
        runs = [(summed(np.array([address]), 70 << 10, out), memory)]
    else:
        odd = Shape("LBNHC", 1, 3, 1, 16, (72, 40), 2), 16
        scenes = [scene(*odd, "fp8")] if file == "quant.cu" else [scene(*odd), scene(*LAYOUTS["one-head-blocks-of-1"])]
        runs = [(moves(at.plan, at.addresses, at.ids, (0, 1), to_slots=True)[0], at.memory) for at in scenes]
    with pytest.raises(ptx.WrongError, match=says):
        all(cudakit.run(op, memory, compiler, arch, found=found) for op, memory in runs)


@on_all
@pytest.mark.parametrize("what", EMITTED)
def test_emitted_code_names_its_memory(what: cudakit.Source, compiler: str, arch: int):
    """No generic or local loads and stores anywhere, and pages move 16 bytes at once, marked as streaming."""
    text = cudakit.ptx_text(compiler, what, arch)
    assert not re.findall(r"\b(?:ld|st)\.(?!global|shared|param|const)[^\n]*", text)
    assert ".local" not in text
    for kernel in ("gather_16", "scatter_16") if what.file == "pages.cu" else ():
        body = text.split(f".entry {kernel}(")[1].split("\n}")[0]
        data = [line for line in body.splitlines() if ".cs." in line]
        assert data
        assert all(".v4." in line for line in data)


@pytest.mark.parametrize("arch", cudakit.ARCHES)
@pytest.mark.parametrize("compiler", ["nvrtc", "nvcc"])
@pytest.mark.parametrize("what", COMPILED)
def test_kernels_compile_without_spills(what: cudakit.Source, compiler: str, arch: int):
    """Every kernel compiles to machine code for each generation, keeps its values in registers and fits its launch."""
    if compiler not in cudakit.compilers():
        pytest.skip(f"{compiler} is not here")
    log = cudakit.cubin_log(compiler, what, arch)
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert len(spills) == {"pages.cu": 10, "sums.cu": 1}.get(what.file, 6)
    assert {number for found in spills for number in found} == {"0"}


def test_tables_name_kernels_that_exist():
    """`launch` picks kernels that the sources have, with as many arguments as they take."""
    for shape, tokens in (*LAYOUTS.values(), *QUANTIZED.values()):
        at = scene(shape, tokens)
        names = ["none"] if (shape, tokens) in LAYOUTS.values() else list(quant.CODECS)
        for name in names:
            plan = at.engine.plan(tokens, name)
            for op in moves(plan, at.addresses, at.ids, (0, shape.layers), to_slots=True):
                made = launch(op, 100)
                text = source("cuda", made.source.file).read_text()
                assert re.search(rf"\b{made.name.removeprefix('run_')}\b", text)
                assert len(made.args) == (14 if made.source.defines else 13)
                assert 1 <= made.grid[0] < 2**31
                assert 1 <= made.grid[1] < 65536
                assert made.block[0] * made.block[1] % 32 == 0
