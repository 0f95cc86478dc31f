"""Checks and times the GPU path: one command, one table. Without a GPU it says what it would do and ends well.

    python bench/gpu.py [--tiny] [--json FILE]

Limits: a device-to-device memcpy of the same bytes for kernels that stay on the GPU, one pinned copy of the same bytes
for what crosses the link, a loop of one copy per block for small blocks.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash
from measure import Row, Target, interleave, make_row, markdown

from kvtier import quant
from kvtier.device.find import open_device
from kvtier.device.layout import Plan, kv, plan
from kvtier.device.ops import moves, summed
from kvtier.device.shuttle import MOST_PAGES, Shuttle
from kvtier.identity import GroupSpec
from kvtier.types import Kind

TOTAL = 256 << 20
"""Bytes that one round moves."""
TOKENS, ITEM = 16, 2
SMALL_DIMS = {4: 32, 8: 64, 16: 128, 28: 224}
"""Widths of K and V that make blocks of so many KiB with two heads."""
LAYERS = [1, 4, 8, 16, 64, 256, 1024]
"""Layers of 64 KiB a block that make pages of 64 KiB to 64 MiB."""
STEPS = (
    "check: gather, scatter, quantization and sums on the GPU against numpy, byte for byte",
    "kernels: gather and scatter within GPU memory, GB/s against a device memcpy of the same bytes",
    "quantization: fused gather and quantize, and back, for each codec, GB/s of KV against a device memcpy",
    "sums: xxh3-64 of slots in GPU memory, GB/s",
    "link: pages of 64 KB to 64 MB out of and into an engine's blocks, staged and straight, against one pinned copy",
    "small blocks: 4 to 28 KB a block in 32 layers, against a loop of one copy a block and layer",
    "overlap: pages in and out at once, against the sum of both alone",
    "first layer: from the asking until the first of 32 layers may be read, against all of them",
    "decode: slowdown of a memory-bound kernel on another stream while pages come in, per way",
)
LINK = Target("ratio", ">=", 0.9)
SMALL = Target("ratio", ">=", 5)


class Form(NamedTuple):
    """The KV of one layer."""

    heads: int
    dim: int

    @property
    def bytes(self) -> int:
        """Of one block of 16 tokens, K and V."""
        return self.heads * TOKENS * 2 * self.dim * ITEM


USUAL = Form(8, 128)
"""64 KiB a block and layer."""


class Room(NamedTuple):
    """An engine's blocks in GPU memory and slots in pinned memory."""

    gpu: Any
    plan: Plan
    ids: Any
    slots: Any
    kv: Any
    pinned: Any

    @property
    def bytes(self) -> int:
        """Bytes of all pages."""
        return len(self.slots) * self.plan.group.item_bytes

    def free(self) -> None:
        """Give the memory back."""
        self.kv.free()
        self.pinned.free()


def room(gpu: Any, layers: int, pages: int, name: str = "none", form: Form = USUAL) -> Room:
    """Pages of one block of `layers` layers each, NHD, scattered over twice as many blocks."""
    blocks = 2 * pages
    memory = gpu.take(layers * blocks * form.bytes)
    shape, row = (blocks, form.heads, TOKENS, 2 * form.dim), 2 * form.dim * ITEM
    strides = (form.bytes, row, form.heads * row, ITEM)
    dims = (form.dim, form.dim)
    planes = [kv(memory.address + n * blocks * form.bytes, shape, strides, dims, ITEM) for n in range(layers)]
    size = form.bytes // form.heads if name == "none" else quant.cell(quant.codec(name), TOKENS, dims).bytes
    group = GroupSpec(Kind.FULL, layers, form.heads, size)
    made = plan(planes, TOKENS, group, codec=name, element="bf16")
    pinned = gpu.pin(group.item_bytes * pages)
    slots = np.uint64(pinned.address) + np.arange(pages, dtype=np.uint64) * np.uint64(group.item_bytes)
    return Room(gpu, made, np.random.default_rng(0).permutation(blocks)[:pages], slots, memory, pinned)


def gbps(size: int, stream: Any, act: Callable[[], None]) -> float:
    """GB/s of work that is queued on a stream and waited for."""
    stream.synchronize()
    start = time.perf_counter()
    act()
    stream.synchronize()
    return size / (time.perf_counter() - start) / 1e9


def within(gpu: Any, rounds: int, layers: int, pages: int) -> list[Row]:
    """Kernels that stay on the GPU."""
    rows, stream = [], gpu.stream()
    for name in ("none", *quant.CODECS):
        at = room(gpu, layers, pages, name)
        there, other = gpu.take(at.bytes), gpu.take(at.bytes)
        slots = at.slots - np.uint64(at.pinned.address) + np.uint64(there.address)
        size = pages * layers * USUAL.bytes
        for to_slots, verb in ((True, "gather"), (False, "scatter")):
            ops = moves(at.plan, slots, at.ids, (0, layers), to_slots=to_slots)

            def ours(ops: Any = ops, size: int = size) -> float:
                return gbps(size, stream, lambda: [gpu.launch(op, stream) for op in ops] and None)

            def memcpy(there: Any = there, other: Any = other) -> float:
                return gbps(there.bytes, stream, lambda: gpu.copy(other.address, there.address, there.bytes, stream))

            ours()
            got = interleave({"kvtier": ours, "memcpy": memcpy}, rounds)
            target = Target("ratio", ">=", 0.9) if name == "none" else None
            rows.append(make_row("gpu", f"{verb} {name}", "GB/s", got, limit="memcpy", target=target))
        if name == "none":
            rows.append(sums(gpu, stream, slots, at, rounds))
        for memory in (there, other, at):
            memory.free()
    return rows


def sums(gpu: Any, stream: Any, slots: Any, at: Room, rounds: int) -> Row:
    """Checksums of slots."""
    out = gpu.pin(8 * len(slots))
    op = summed(slots, at.plan.group.item_bytes, out.address)
    got = interleave({"kvtier": lambda: gbps(at.bytes, stream, lambda: gpu.launch(op, stream))}, rounds)
    out.free()
    return make_row("gpu", "sums", "GB/s", got)


def link(gpu: Any, rounds: int, total: int, counts: list[int]) -> list[Row]:
    """What crosses the link: pages of 64 KiB and more, and small blocks of many layers."""
    rows = []
    for layers in counts:
        pages = min(MOST_PAGES, max(1, total // (layers * USUAL.bytes)))
        rows += crossing(room(gpu, layers, pages), f"pages of {layers * USUAL.bytes >> 10} KiB", rounds)
    for kib, dim in SMALL_DIMS.items():
        form, layers = Form(2, dim), 32 if len(counts) > 1 else 2
        pages = min(MOST_PAGES, max(1, total // (layers * form.bytes)))
        rows += crossing(room(gpu, layers, pages, form=form), f"blocks of {kib} KiB", rounds, small=True)
    return rows


def crossing(at: Room, case: str, rounds: int, *, small: bool = False) -> list[Row]:
    """One size: out and in, each way, against one copy of the same bytes, or against a loop of copies."""
    gpu, rows = at.gpu, []
    ways = {
        "staged": Shuttle(gpu, at.plan, stage_bytes=32 << 20),
        "straight": Shuttle(gpu, at.plan, direct=True),
    }
    stream, flat = gpu.stream(), gpu.take(at.bytes)
    for verb in ("store", "load"):
        ends = (at.pinned.address, flat.address)[:: 1 if verb == "store" else -1]

        def one(ends: tuple[int, int] = ends) -> float:
            return gbps(at.bytes, stream, lambda: gpu.copy(*ends, at.bytes, stream))

        subjects = {name: crosses(at, shuttle, verb) for name, shuttle in ways.items()}
        got = interleave({**subjects, "one copy": one, "loop": loop(at, stream, verb)}, rounds)
        best = max(ways, key=lambda name: max(got[name]))
        large = LINK if at.plan.group.item_bytes >= 512 << 10 else None
        row = make_row("gpu", f"{verb} {case} {best}", "GB/s", {"kvtier": got[best], **got},
                       limit="loop" if small else "one copy", target=SMALL if small else large)  # fmt: skip
        rows.append(row)
    for shuttle in ways.values():
        shuttle.close()
    flat.free()
    at.free()
    return rows


def crosses(at: Room, shuttle: Shuttle, verb: str) -> Callable[[], float]:
    """One transfer of all pages."""

    def run() -> float:
        start = time.perf_counter()
        (shuttle.store if verb == "store" else shuttle.load)(at.ids, at.slots).wait()
        return at.bytes / (time.perf_counter() - start) / 1e9

    return run


def loop(at: Room, stream: Any, verb: str) -> Callable[[], float]:
    """One copy a block and layer, as engines do it without kernels."""
    group = at.plan.group
    layer = group.item_bytes // group.layers
    bases = at.plan.sheets[0].bases[::2]  # of K; V is beside it
    pairs = [
        (int(slot) + n * layer, base + int(block) * layer)[:: 1 if verb == "store" else -1]
        for slot, block in zip(at.slots, at.ids, strict=True)
        for n, base in enumerate(bases)
    ]

    ends = tuple(zip(*pairs, strict=True))

    def run() -> float:
        return gbps(at.bytes, stream, lambda: at.gpu.copies(*ends, [layer] * len(pairs), stream))

    return run


def overlap(gpu: Any, rounds: int, layers: int, pages: int) -> list[Row]:
    """In and out at once, and the first layer."""
    out, back = room(gpu, layers, pages), room(gpu, layers, pages)
    shuttle = Shuttle(gpu, out.plan, stage_bytes=32 << 20)
    other = Shuttle(gpu, back.plan, stage_bytes=32 << 20, pieces=min(layers, 8))

    def both() -> float:
        start = time.perf_counter()
        stored, loaded = shuttle.store(out.ids, out.slots), other.load(back.ids, back.slots)
        stored.wait()
        loaded.wait()
        return (out.bytes + back.bytes) / (time.perf_counter() - start) / 1e9

    def alone() -> float:
        start = time.perf_counter()
        shuttle.store(out.ids, out.slots).wait()
        other.load(back.ids, back.slots).wait()
        return (out.bytes + back.bytes) / (time.perf_counter() - start) / 1e9

    rows = [make_row("gpu", "store and load at once", "GB/s", interleave({"kvtier": both, "alone": alone}, rounds),
                     limit="alone")]  # fmt: skip

    def first(layer: int) -> Callable[[], float]:
        def run() -> float:
            start = time.perf_counter()
            loaded = other.load(back.ids, back.slots)
            loaded.layers[layer].synchronize()
            took = (time.perf_counter() - start) * 1e3
            loaded.wait()
            return took

        return run

    got = interleave({"kvtier": first(0), "all layers": first(-1)}, rounds)
    rows.append(make_row("gpu", "until the first layers are there", "ms", got, limit="all layers"))
    rows += decode(gpu, other, back, rounds)
    shuttle.close()
    other.close()
    out.free()
    back.free()
    return rows


def decode(gpu: Any, shuttle: Shuttle, at: Room, rounds: int) -> list[Row]:
    """What loads do to a memory-bound kernel beside them: here a gather within GPU memory, again and again."""
    there, stream = gpu.take(at.bytes), gpu.stream(urgent=True)
    slots = at.slots - np.uint64(at.pinned.address) + np.uint64(there.address)
    ops = moves(at.plan, slots, at.ids, (0, at.plan.layers), to_slots=True)
    straight = Shuttle(gpu, at.plan, direct=True)

    def busy(beside: Shuttle | None) -> Callable[[], float]:
        def run() -> float:
            loading = beside.load(at.ids, at.slots) if beside else None
            took = at.bytes / gbps(at.bytes, stream, lambda: [gpu.launch(op, stream) for op in ops * 20] and None) / 1e6
            if loading is not None:
                loading.wait()
            return took

        return run

    rows = []
    for name, beside in (("staged", shuttle), ("straight", straight)):
        got = interleave({"kvtier": busy(beside), "alone": busy(None)}, rounds)
        rows.append(make_row("gpu", f"20 gathers beside a {name} load", "ms", got, limit="alone"))
    straight.close()
    there.free()
    return rows


def check(gpu: Any) -> None:
    """Pages through every codec, out and in, against numpy on the CPU; raises where a byte differs."""
    for name in ("none", *quant.CODECS):
        at = room(gpu, 3, 5, name)
        mirror, stream = gpu.pin(at.kv.bytes), gpu.stream()
        words = np.random.default_rng(1).standard_normal(at.kv.bytes // 2).astype(np.float32)
        mirror.data[:] = quant.narrow(words, "bf16").view(np.uint8)
        gpu.copy(at.kv.address, mirror.address, at.kv.bytes, stream)
        stream.synchronize()
        shuttle = Shuttle(gpu, at.plan, sums=True)
        stored = shuttle.store(at.ids, at.slots)
        stored.wait()
        pages = at.pinned.data.reshape(5, -1)
        rows = (
            mirror.data.view(np.uint16)
            .reshape(3, 10, TOKENS, USUAL.heads, 2, USUAL.dim)[:, at.ids]
            .transpose(1, 0, 3, 4, 2, 5)
        )
        for page, want in zip(pages, rows, strict=True):
            assert np.array_equal(page, expected(want, name)), f"gather {name}"
        assert stored.sums is not None
        assert stored.sums.tolist() == [xxhash.xxh3_64_intdigest(page) for page in pages], f"sums {name}"
        shuttle.load(at.ids, at.slots).wait()
        if name == "none":
            gpu.copy(mirror.address, at.kv.address, at.kv.bytes, stream)
            stream.synchronize()
            assert np.array_equal(mirror.data.view(np.uint16), quant.narrow(words, "bf16")), "scatter"
        shuttle.close()
        mirror.free()
        at.free()
    print("check: every byte is as numpy has it")


def expected(page: Any, name: str) -> Any:
    """A canonical page of words [layers, heads, K and V, tokens, dim] as bytes in its slot."""
    if name == "none":
        return np.ascontiguousarray(page).view(np.uint8).reshape(-1)
    way = quant.codec(name)
    parts = [quant.pack(page[:, :, n], way.kind, way.axes[n], "bf16") for n in range(2)]
    heads = page.shape[:2]
    pieces = [codes.reshape(*heads, -1) for codes, _ in parts]
    pieces += [np.ascontiguousarray(words).view(np.uint8).reshape(*heads, -1) for _, words in parts]
    return np.concatenate(pieces, axis=2).reshape(-1)


def main() -> None:
    """Check, time, print."""
    parser = argparse.ArgumentParser(description="Check and time the GPU path.")
    parser.add_argument("--tiny", action="store_true", help="sizes that only show that it runs")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the rows there too")
    args = parser.parse_args()
    gpu, reason = open_device()
    if reason and not args.tiny:
        print(f"no GPU: {reason}. With one, this would run:")
        print(*(f"  {n}. {step}" for n, step in enumerate(STEPS, 1)), sep="\n")
        sys.exit(0)
    print(f"{gpu.facts.name}, {gpu.facts.processors} multiprocessors")
    check(gpu)
    rounds, total, pages = (1, 1 << 20, 4) if args.tiny else (args.rounds, TOTAL, 128)
    layers = 2 if args.tiny else 32
    rows = within(gpu, rounds, layers, pages)
    rows += link(gpu, rounds, total, LAYERS[:1] if args.tiny else LAYERS)
    rows += overlap(gpu, rounds, layers, pages)
    print(markdown(rows))
    if args.json:
        args.json.write_bytes(msgspec.json.encode(rows))


if __name__ == "__main__":
    main()
