"""How fast the index is: matching, inserting, evicting, and what a page costs beside its key.

    python bench/bench_index.py [--rivals] [--json FILE]

Limits: memcmp or memcpy of the same bytes, SHA-256 of the same bytes, one heap operation among as many entries.
"""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import multiprocessing
import random
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from measure import OURS, Bench, RivalFailed, Subject, Target, interleave, median_us, skipped
from rival import Rival, Running

from kvtier.identity import CacheSpec, GroupSpec
from kvtier.index import Order, RadixIndex
from kvtier.policy import Policy
from kvtier.types import Kind, Tier

PAGE = 64
ROOT_CHAIN = bytes(16)
SPEC = CacheSpec("bench", bytes(16), "bfloat16", PAGE, (GroupSpec(Kind.FULL, 1, 1, 4096),))
DYNAMO = Rival("Dynamo RadixTree 1.6.1", "dynamo", "dynamo_radix.py", (("ai-dynamo-runtime==1.6.1",),))


Copies = tuple["array[int]", "array[int]"]


def copies_of(pages: int) -> Copies:
    """Handles and checksums of so many pages."""
    return array("q", range(pages)), array("Q", range(pages))


class Bed:
    """An index with seeded tokens to put into it."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.index = RadixIndex(SPEC, ROOT_CHAIN, {Tier.HOST: Order(Tier.HOST, Policy(Tier.HOST))})
        self.now = 0.0

    def keys(self, tokens: int) -> bytes:
        """Page keys of so many random tokens; whole pages only."""
        return self.random.integers(0, 128_000, tokens // PAGE * PAGE, np.int32).tobytes()

    def insert(self, keys: bytes, copies: Copies | None = None, *, chain: bool = False) -> None:
        """Cache the path that is not there yet: pages, host copies with checksums, and chain keys if asked."""
        self.now += 1.0
        node = self.index.extend(keys, self.now)
        handles, sums = copies or copies_of(node.pages)
        self.index.put(node, 0, Tier.HOST, 0, handles, sums)
        self.index.publish(node, node.end)
        if chain:
            self.index.chain_of(node)

    def turns(self, keys: bytes, node_pages: int) -> None:
        """Cache a path as a conversation does: a node a turn."""
        step = node_pages * SPEC.stride
        for end in range(step, len(keys) + step, step):
            self.insert(keys[:end])

    def evict(self) -> None:
        """Drop the coldest leaf of the host tier, as the store does."""
        popped = self.index.orders[Tier.HOST].pop()
        assert popped is not None
        node = popped[1]
        lo, hi = self.index.tail(node, Tier.HOST)
        self.index.drop(node, lo, hi, Tier.HOST)
        self.index.settle(node)


def match(bench: Bench, dynamo: Running | None) -> None:
    """Matches of cached prompts, as turns of 2,048 tokens, beside other sequences."""
    targets = {1_000: Target("value", "<=", 5), 200_000: Target("value", "<=", 150)}
    for tokens in (1_000, 8_000) if bench.tiny else (1_000, 8_000, 32_000, 200_000):
        bed = Bed(bench.seed)
        for _ in range(20 if bench.tiny else 2_000):
            bed.insert(bed.keys(256))
        cached = bed.keys(tokens)
        bed.turns(cached, 32)
        prompt, copy = bytes(bytearray(cached)), bytes(bytearray(cached))
        assert bed.index.match(prompt, 1.0).pages == len(prompt) // SPEC.stride
        nodes = -(-len(prompt) // (32 * SPEC.stride))
        subjects = {
            OURS: lambda p=prompt, b=bed: median_us(lambda: b.index.match(p, 1.0), 50),
            "memcmp": lambda p=prompt, c=copy: median_us(lambda: c.startswith(p), 50),
        }
        if dynamo:
            dynamo.ask("prepare_match", tokens=tokens, node_pages=32)
            subjects[DYNAMO.name] = lambda: dynamo.ask("match", calls=20)
            subjects["Dynamo, hashes given"] = lambda: dynamo.ask("match_hashes", calls=20)
        samples = interleave(subjects, bench.rounds(9))
        bench.add(f"match {tokens:,} tokens, nodes: {nodes}", "us", samples, limit="memcmp", target=targets.get(tokens))
    diverging(bench)


def diverging(bench: Bench) -> None:
    """A prompt that leaves one long edge at three quarters."""
    tokens = 8_000 if bench.tiny else 200_000
    bed = Bed(bench.seed)
    cached = bed.keys(tokens)
    bed.insert(cached)
    cut = len(cached) // SPEC.stride * 3 // 4 * SPEC.stride
    prompt, copy = cached[:cut] + bed.keys(tokens)[cut:], cached[:cut]
    samples = interleave(
        {
            OURS: lambda: median_us(lambda: bed.index.match(prompt, 1.0), 50),
            "memcmp": lambda: median_us(lambda: prompt.startswith(copy), 50),
        },
        bench.rounds(9),
    )
    bench.add(f"match {tokens:,} tokens, leaving one edge at 3/4", "us", samples, limit="memcmp")


def insert(bench: Bench, dynamo: Running | None) -> None:
    """A cold insert of one long prompt."""
    tokens, calls = 8_000 if bench.tiny else 200_000, 5
    keys = Bed(bench.seed).keys(tokens)
    copies = copies_of(len(keys) // SPEC.stride)

    def ours(*, chain: bool) -> float:
        beds = iter([Bed(bench.seed) for _ in range(calls)])
        return median_us(lambda: next(beds).insert(keys, copies, chain=chain), calls)

    def hashing() -> float:
        return median_us(lambda: hashlib.sha256(keys).digest(), calls)

    plain: dict[str, Subject] = {
        OURS: lambda: ours(chain=False),
        "memcpy": lambda: median_us(lambda: bytearray(keys), calls),
    }
    if dynamo:
        plain[DYNAMO.name] = lambda: dynamo.ask("insert", tokens=tokens, calls=calls)
    rounds, name = bench.rounds(7), f"insert {tokens:,} tokens cold, with copies"
    bench.add(name, "us", interleave(plain, rounds), limit="memcpy", target=Target("value", "<=", 100))
    samples = interleave({OURS: lambda: ours(chain=True), "SHA-256 of the keys": hashing}, rounds)
    target = Target("value", "<=", 5_000)
    bench.add(f"{name} and chain keys", "us", samples, limit="SHA-256 of the keys", target=target)


def evict(bench: Bench, dynamo: Running | None) -> None:
    """Evictions of one leaf of 8 pages among ever more leaves; each round puts back what it took."""
    for leaves in (100, 1_000) if bench.tiny else (1_000, 10_000, 50_000, 200_000):
        calls = min(200, leaves // 10)
        bed = Bed(bench.seed)
        for _ in range(leaves):
            bed.insert(bed.keys(8 * PAGE))
        subjects = {
            OURS: refilled(bed, calls),
            "heap pop and push": heap_limit(leaves, calls, bench.seed),
            **ordered_dict(leaves, calls, bench.seed),
        }
        if dynamo and leaves == 50_000:
            dynamo.ask("prepare_evict", leaves=leaves, node_pages=8)
            subjects["Dynamo, victim given"] = lambda n=calls: dynamo.ask("evict", calls=n)
        samples = interleave(subjects, bench.rounds(7))
        target = Target("value", "<=", 100) if leaves == 50_000 else None
        bench.add(f"evict one of {leaves:,} leaves", "us", samples, limit="heap pop and push", target=target)


def refilled(bed: Bed, calls: int) -> Callable[[], float]:
    """A round that evicts and puts as many new leaves in, which is not timed."""

    def subject() -> float:
        taken = median_us(bed.evict, calls)
        for _ in range(calls):
            bed.insert(bed.keys(8 * PAGE))
        return taken

    return subject


def heap_limit(leaves: int, calls: int, seed: int) -> Callable[[], float]:
    """What any order of leaves costs at least."""
    numbers = random.Random(seed)
    heap = [(numbers.random(), n) for n in range(leaves)]
    heapq.heapify(heap)

    def subject() -> float:
        return median_us(lambda: heapq.heapreplace(heap, (1.0 + numbers.random(), 0)), calls)

    return subject


def ordered_dict(leaves: int, calls: int, seed: int) -> dict[str, Subject]:
    """The order of leaves alone as a SortedDict: take the coldest, put one back."""
    try:
        from sortedcontainers import SortedDict
    except ImportError as exc:
        skipped("sortedcontainers", exc)
        return {}
    numbers = random.Random(seed)
    order = SortedDict({(numbers.random(), n): None for n in range(leaves)})

    def replace() -> None:
        (_, number), _ = order.popitem(0)
        order[1.0 + numbers.random(), number] = None

    return {"SortedDict, order alone": lambda: median_us(replace, calls)}


def memory(bench: Bench) -> None:
    """Resident bytes a page beside its key, each shape in a fresh process, every page with chain key and copy."""
    count, prompts = 2_000 if bench.tiny else 30_000, 100
    shapes = {
        f"{prompts} prompts of 20,000 tokens, turns of 2,048": (prompts, 20_000, 32),
        f"{count:,} suffixes of 256 tokens": (count, 256, 4),
        f"{count:,} suffixes of one page": (count, PAGE, 1),
    }
    for case, shape in shapes.items():
        target = Target("value", "<=", 400) if shape[2] > 1 else None
        samples = {OURS: [in_fresh_process(bench.seed, *shape) for _ in range(2)]}
        bench.add(f"memory of a page: {case}", "B", samples, target=target)


def in_fresh_process(seed: int, *shape: int) -> float:
    """Bytes a page of a heap that nothing else has used."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(resident, (seed, *shape))


def resident(seed: int, paths: int, tokens: int, node_pages: int) -> float:
    """Growth of the resident set per page, key bytes left out."""
    bed = Bed(seed)
    bed.turns(bed.keys(PAGE), 1)
    before, pages = statm(), bed.index.pages
    for _ in range(paths):
        bed.turns(bed.keys(tokens), node_pages)
    for node in bed.index.walk():
        bed.index.chain_of(node)
    grown = bed.index.pages - pages
    return (statm() - before) / grown - SPEC.stride


def statm() -> int:
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@contextlib.contextmanager
def rivals(bench: Bench) -> Iterator[Running | None]:
    """Dynamo, where it was asked for and runs."""
    if not bench.rivals:
        yield None
        return
    try:
        running = Running(DYNAMO, bench.seed)
    except RivalFailed as exc:
        skipped(DYNAMO.name, exc)
        yield None
        return
    with running:
        yield running


def main() -> None:
    """Run every measurement."""
    bench = Bench("index", "How fast the index is.")
    with rivals(bench) as dynamo:
        match(bench, dynamo)
        insert(bench, dynamo)
        evict(bench, dynamo)
    memory(bench)
    bench.finish()


if __name__ == "__main__":
    main()
