"""A start over a large catalogue: when it is open, a first prompt is matched, all is indexed, and matches meanwhile."""

from __future__ import annotations

import asyncio
import gc
import time
from array import array
from pathlib import Path

import numpy as np
import uvloop
from measure import OURS, Bench, Samples, Target

from kvtier import wire
from kvtier.identity import CacheSpec, base_id, cache_id, chain_keys
from kvtier.store import Store
from kvtier.tiers.catalogue import Catalogue
from kvtier.tiers.cells import Span
from kvtier.tiers.disk import DiskTier
from kvtier.tiers.host import HostTier
from kvtier.tiers.records import (
    VERSION_KEY,
    CacheRecord,
    Change,
    Placed,
    Run,
    Version,
    cache_key,
    encode_cache,
    encode_version,
    name_of,
    place,
)
from kvtier.tiers.runrecord import encode_run

RUN = 16
PROMPT_RUNS = 62
SLAB = 64 << 20
SCOPE = "uid:0"
SHORT = 256
"""Pages of the prompt that is matched again and again."""


def catalogue_of(home: Path, spec: CacheSpec, pages: int, seed: int) -> bytes:
    """A catalogue of prompts of 992 pages, without their payload; the page keys of one that is loaded late."""
    home.mkdir()
    record = CacheRecord(cache_id(spec, SCOPE, 0), base_id(spec, SCOPE), SCOPE, 0, spec)
    catalogue = Catalogue(home / "catalogue", SLAB, limit_bytes=8 << 30, sync=False)
    layouts, random, stride = record.layouts(SLAB), np.random.default_rng(seed), spec.stride
    changes = [
        Change(b"caches", cache_key(1), encode_cache(cache_key(1), record)),
        Change(b"meta", VERSION_KEY, encode_version(Version(2, SLAB, 2))),
    ]
    keys: list[bytes] = []
    whole = b""
    parent = b""
    for number in range(1, pages // RUN + 1):
        depth = (number - 1) % PROMPT_RUNS
        run = Run.new(number, 1, RUN, layouts)
        run.depth, run.parent = depth * RUN, parent if depth else record.cache_id[:16]
        run.keys = random.integers(0, 150_000, RUN * stride // 4, "<i4").tobytes()
        run.name = name_of(run.parent, run.keys[:stride])
        run.chains = chain_keys(run.parent, run.keys, stride)
        parent = run.chains[-16:]
        keys = [*keys, run.keys] if depth else [run.keys]
        whole = b"".join(keys) if depth == PROMPT_RUNS - 1 or not whole else whole
        placed = [Placed((1 << RUN) - 1, [Span((number - 1) * RUN, 1, RUN)], array("Q", random.bytes(8 * RUN)))]
        place(run, placed)
        changes.append(Change(b"runs", run.key, encode_run(run, placed)))
        if len(changes) > 500:
            catalogue.commit(changes)
            changes = []
    catalogue.commit(changes)
    catalogue.close()
    return whole


class Peer:
    """Whoever asks, as the server would know it."""

    uid, gid, pid, pidfd = 0, 0, 1, None


async def start(home: Path, spec: CacheSpec, keys: bytes, pages: int, times: Samples) -> None:
    """One start, from opening until all is indexed."""
    loop = asyncio.get_running_loop()
    gc.disable()  # as the daemon does
    begin, spent = time.perf_counter(), time.process_time()
    tier = DiskTier(home, pages * 4096 + 16 * SLAB, post=loop.call_soon_threadsafe)
    times["open"].append(time.perf_counter() - begin)
    store = Store(HostTier(64 << 20, slab_bytes=1 << 20, prefault=False), tier)
    loading = store.start()
    await asyncio.sleep(0)
    process, _, _ = store.join(wire.Hello(wire.VERSION, "bench"), Peer(), lambda _: None)
    opened = store.open(process, wire.Open(spec))
    assert isinstance(opened, wire.Opened)

    async def match(some: bytes) -> int:
        reply = store.tokens.match(process, wire.Match(opened.cache, 0, some))
        found = reply if isinstance(reply, wire.Matched) else await reply
        return found.pages

    assert await match(keys) == len(keys) // spec.stride
    times["first"].append(time.perf_counter() - begin)
    waits = []
    while not loading.done():
        asked = time.perf_counter()
        await match(keys[: SHORT * spec.stride])
        waits.append(time.perf_counter() - asked)
        await asyncio.sleep(0.005)
    times["loaded"].append(time.perf_counter() - begin)
    times["cpu"].append(time.process_time() - spent)
    times["meanwhile"].append(float(np.quantile(waits, 0.99)) * 1e3 if waits else 0.0)
    await store.drain(1.0)
    gc.enable()


def start_up(bench: Bench, home: Path, spec: CacheSpec, pages: int) -> None:
    """Measure starts, and the catalogue's bytes per page."""
    keys = catalogue_of(home / "big", spec, pages, bench.seed)
    data = home / "big" / "catalogue" / "data.mdb"
    bench.add("catalogue, per page in 16-page runs", "B", {OURS: [data.stat().st_size / pages]})
    times: Samples = {"open": [], "first": [], "loaded": [], "cpu": [], "meanwhile": []}
    for _ in range(bench.rounds(5)):
        uvloop.run(start(home / "big", spec, keys, pages, times))
    name, soon = f"{pages:,} pages", Target("value", "<=", 0.5)
    bench.add(f"start: open, scanned in a child, {name}", "s", {OURS: times["open"]}, target=soon)
    prompt = f"first match, {len(keys) // spec.stride} pages deep"
    bench.add(f"start: {prompt}, {name}", "s", {OURS: times["first"]}, target=soon)
    bench.add(f"start: all indexed, {name}", "s", {OURS: times["loaded"]}, target=Target("value", "<=", 2.0))
    bench.add(f"start: processor time of that, matches included, {name}", "s", {OURS: times["cpu"]})
    bench.add(
        f"match p99 meanwhile, {SHORT} pages", "ms", {OURS: times["meanwhile"]}, target=Target("value", "<=", 1.0)
    )
