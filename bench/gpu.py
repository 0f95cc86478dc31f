"""Checks and times the GPU path: one command, one table. Without a GPU it says what it would do and ends well.

    python bench/gpu.py [--tiny] [--json FILE]

Limits: a device-to-device memcpy of the same bytes for kernels that stay on the GPU, one pinned copy of the same bytes
for what crosses the link, a loop of one copy per block for small blocks. A step that fails costs no other its rows; the
command ends with 1 then.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import gpu_daemon
import msgspec
import numpy as np
from gpu_check import check
from gpu_room import USUAL, Form, Room, gbps, room, ways
from measure import Row, Target, interleave, make_row, markdown, number

from kvtier import quant
from kvtier.device.find import open_device
from kvtier.device.ops import moves, summed
from kvtier.device.shuttle import MOST_PAGES, Shuttle

TOTAL = 256 << 20
"""Bytes that one round moves."""
TIMES = 16
"""Kernels in a row, where nothing but the GPU is to be timed."""
SMALL_DIMS = {4: 32, 8: 64, 16: 128, 28: 224}
"""Widths of K and V that make blocks of so many KiB with two heads."""
SIZES = [(1, Form(2, 32)), (1, Form(2, 128)), *((layers, USUAL) for layers in (1, 4, 8, 16, 64, 256, 1024))]
"""Layers and their form that make pages of 4 KiB to 64 MiB."""
STEPS = (
    "check: gather, scatter, sums, quantization and what comes back of it, against numpy byte for byte; largest errors",
    "kernels: gather and scatter within GPU memory, pages of 4 KB to 64 MB, GB/s against a device memcpy of as much",
    "quantization: fused gather and quantize, and back, for each codec, GB/s of KV against a device memcpy",
    "sums: xxh3-64 of slots in GPU memory, GB/s",
    "link: pages of 4 KB to 64 MB out of and into an engine's blocks, each way, against one pinned copy",
    "small blocks: 4 to 28 KB a block in 32 layers, each way, against a loop of one copy a block and layer",
    "overlap: pages in and out at once, against the sum of both alone",
    "first layer: from the asking until the first of 32 layers may be read, against all of them",
    "by the daemon: blocks of 4 and 64 KiB to and from slots in host and on the device, and pages between these tiers",
    "hit: from a match at a real daemon until the first layer may be read, pages in host and on the device tier",
    "decode: slowdown of a memory-bound kernel while pages come in: each way, on its own stream, by the daemon",
)
LINK = Target("ratio", ">=", 0.9)
SMALL = Target("ratio", ">=", 5)


def within(
    gpu: Any, rounds: int, layers: int, pages: int, total: int, sizes: list[tuple[int, Form]], times: int
) -> Iterator[Row]:
    """Kernels that stay on the GPU: each codec, and plain pages of each size.

    `times`: so many in a row, as a launch takes the host a good part of what 256 MiB take the GPU.
    """
    stream = gpu.stream()
    kinds = [(name, layers, pages, USUAL, "") for name in ("none", *quant.CODECS)]
    for depth, form in sizes:
        count = min(MOST_PAGES, max(1, total // (depth * form.bytes)))
        kinds.append(("none", depth, count, form, f" pages of {depth * form.bytes >> 10} KiB"))
    for name, depth, count, form, case in kinds:
        at = room(gpu, depth, count, name, form)
        there, other = gpu.take(at.bytes), gpu.take(at.bytes)
        slots = at.slots - np.uint64(at.pinned.address) + np.uint64(there.address)
        size = count * depth * form.bytes
        for to_slots, verb in ((True, "gather"), (False, "scatter")):
            ops = moves(at.plan, slots, at.ids, (0, at.plan.layers), to_slots=to_slots)

            def ours(ops: Any = ops, size: int = size) -> float:
                return gbps(size, stream, lambda: [gpu.launch(op, stream) for op in ops] and None, times)

            def memcpy(there: Any = there, other: Any = other) -> float:
                copy = (other.address, there.address, there.bytes, stream)
                return gbps(there.bytes, stream, lambda: gpu.copy(*copy), times)

            ours()
            got = interleave({"kvtier": ours, "memcpy": memcpy}, rounds)
            target = Target("ratio", ">=", 0.9) if name == "none" and at.plan.group.item_bytes >= 512 << 10 else None
            yield make_row("gpu", f"{verb} {name}{case}", "GB/s", got, limit="memcpy", target=target)
        if name == "none" and not case:
            yield sums(gpu, stream, slots, at, rounds, times)
        for memory in (there, other, at):
            memory.free()


def sums(gpu: Any, stream: Any, slots: Any, at: Room, rounds: int, times: int) -> Row:
    """Checksums of slots."""
    out = gpu.pin(8 * len(slots))
    op = summed(slots, at.plan.group.item_bytes, out.address)
    got = interleave({"kvtier": lambda: gbps(at.bytes, stream, lambda: gpu.launch(op, stream), times)}, rounds)
    out.free()
    return make_row("gpu", "sums", "GB/s", got)


def link(gpu: Any, rounds: int, total: int, sizes: list[tuple[int, Form]], depth: int) -> Iterator[Row]:
    """What crosses the link: pages of each size, and small blocks of many layers."""
    for layers, form in sizes:
        pages = min(MOST_PAGES, max(1, total // (layers * form.bytes)))
        yield from crossing(room(gpu, layers, pages, form=form), f"pages of {layers * form.bytes >> 10} KiB", rounds)
    for kib, dim in SMALL_DIMS.items():
        form = Form(2, dim)
        pages = min(MOST_PAGES, max(1, total // (depth * form.bytes)))
        yield from crossing(room(gpu, depth, pages, form=form), f"blocks of {kib} KiB", rounds, small=True)


def crossing(at: Room, case: str, rounds: int, *, small: bool = False) -> Iterator[Row]:
    """One size: out and in, each way, against one copy of the same bytes, or against a loop of copies."""
    gpu = at.gpu
    shuttles = {way.value: Shuttle(gpu, at.plan, stage_bytes=32 << 20, way=way) for way in ways(gpu)}
    stream, flat = gpu.stream(), gpu.take(at.bytes)
    for verb in ("store", "load"):
        ends = (at.pinned.address, flat.address)[:: 1 if verb == "store" else -1]

        def one(ends: tuple[int, int] = ends) -> float:
            return gbps(at.bytes, stream, lambda: gpu.copy(*ends, at.bytes, stream))

        subjects = {name: crosses(at, shuttle, verb) for name, shuttle in shuttles.items()}
        got = interleave({**subjects, "one copy": one, "loop": loop(at, stream, verb)}, rounds)
        best = max(shuttles, key=lambda name: max(got[name]))
        large = LINK if at.plan.group.item_bytes >= 512 << 10 else None
        yield make_row("gpu", f"{verb} {case} {best}", "GB/s", {"kvtier": got[best], **got},
                       limit="loop" if small else "one copy", target=SMALL if small else large)  # fmt: skip
    for shuttle in shuttles.values():
        shuttle.close()
    flat.free()
    at.free()


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


def overlap(gpu: Any, rounds: int, layers: int, pages: int) -> Iterator[Row]:
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

    got = interleave({"kvtier": both, "alone": alone}, rounds)
    yield make_row("gpu", "store and load at once", "GB/s", got, limit="alone")

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
    yield make_row("gpu", "until the first layers are there", "ms", got, limit="all layers")
    shuttle.close()
    other.close()
    out.free()
    back.free()


def run(steps: dict[str, Callable[[], Iterable[Row]]]) -> tuple[list[Row], list[str]]:
    """The rows of all steps, each shown as it comes, and the names of those that failed."""
    rows, failed = [], []
    for name, step in steps.items():
        start = time.perf_counter()
        try:
            for row in step():
                rows.append(row)
                print(f"{row.case}: {number(row.value)} {row.unit}", flush=True)
        except Exception:  # noqa: BLE001 - the next may tell more
            failed.append(name)
            traceback.print_exc()
        print(f"-- {name}: {time.perf_counter() - start:.1f} s", flush=True)
    return rows, failed


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
    print(f"{gpu.facts.name}, {gpu.facts.processors} multiprocessors, driver {gpu.facts.driver}")
    rounds, total, pages, times = (1, 1 << 20, 4, 1) if args.tiny else (args.rounds, TOTAL, 128, TIMES)
    layers = 2 if args.tiny else 32
    sizes = SIZES[:3] if args.tiny else SIZES
    rows, failed = run(
        {
            "check": lambda: check(gpu),
            "kernels": lambda: within(gpu, rounds, layers, pages, total, sizes, times),
            "link": lambda: link(gpu, rounds, total, sizes, layers),
            "overlap": lambda: overlap(gpu, rounds, layers, pages),
            "by the daemon": lambda: gpu_daemon.launched(gpu, rounds, layers, pages),
            "hits and decoding": lambda: gpu_daemon.engines(gpu, rounds, layers, pages),
        }
    )
    print(markdown(rows))
    if args.json:
        args.json.write_bytes(msgspec.json.encode(rows))
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
