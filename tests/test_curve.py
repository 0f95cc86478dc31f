"""The live hit curve equals brute replay, stays within bounds of time and memory, and is shown to operators."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from itertools import accumulate

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from engines import Engine, spec, tokens
from kvtier import wire
from kvtier.client import Client
from kvtier.ctl import main
from kvtier.identity import GroupSpec
from kvtier.index import distances
from kvtier.index.distances import HOT, Distances, Namer, Stack, geometric
from kvtier.replay.trace import Mix, read
from kvtier.sizing.curve import Trace, hit_curve
from kvtier.sizing.replay import lru_hits
from kvtier.store import curves
from kvtier.store.curves import SAVED_S, SHARE, Curves
from kvtier.types import Kind
from storekit import storing, until
from tracekit import published, traces

PAGES = spec((GroupSpec(Kind.FULL, 1, 1, 4096),), page_tokens=1)


def whole(steps: Iterator[None]) -> None:
    """All steps."""
    for _ in steps:
        pass


def seen_by(trace: Trace, seen: Distances) -> Distances:
    """The whole trace, block numbers as tokens."""
    namer = Namer(1)
    for r in range(len(trace.leaf)):
        whole(seen.see(namer.names(np.array(trace.path(r), "<i4").tobytes(), 4, 9)))
    return seen


@settings(max_examples=150, deadline=None)
@given(traces(), st.integers(0, 40))
def test_the_curve_equals_brute_replay(trace, pages):
    """At any capacity up to the bound, to the page."""
    assert seen_by(trace, Distances(64)).curve([pages]) == [lru_hits(trace, pages)]


@settings(max_examples=60, deadline=None)
@given(traces(), st.integers(0, 40))
def test_the_curve_of_opaque_keys_along_paths_equals_brute_replay(trace, pages):
    """Keys that are asked for from the root on, as engines do, are what pages of a tree are."""
    seen = Distances(64)
    for r in range(len(trace.leaf)):
        seen.ask(np.array(trace.path(r), np.uint64))
    assert seen.curve([pages]) == [lru_hits(trace, pages)]


def found_by_lru(requests: list[list[int]], most: int) -> int:
    """Keys found by an LRU of `most` keys, each request touching its first key last."""
    stack: list[int] = []
    hits = 0
    for keys in requests:
        hits += sum(key in stack[:most] for key in keys)
        stack = [*keys, *(key for key in stack if key not in keys)]
    return hits


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=6, unique=True), max_size=20), st.integers(0, 20))
def test_keys_asked_for_in_any_order_are_placed_to_within_a_request(requests, most):
    """Holes, pieces of earlier requests, other orders: the hits are those of a cache at most one request larger."""
    seen = Distances(64)
    for keys in requests:
        seen.ask(np.array(keys, np.uint64))
    (found,) = seen.curve([most])
    assert found_by_lru(requests, most) <= found <= found_by_lru(requests, most + 6 if most else 0)


async def test_keyed_caches_have_a_curve_of_their_own():
    """One pool of theirs, in keys; whoever asks again for the same keys is one request."""
    async with storing(None, host=16 << 20) as store:
        engine = Engine(store)
        await engine.open(spec((GroupSpec(Kind.FULL, 1, 1, 4096),), key_bytes=16))
        cache, keys = engine.opened.cache, b"".join(bytes([n]) * 16 for n in range(10))
        for _ in range(3):
            await engine.call(wire.Exists(cache, 0, keys))
        await engine.call(wire.AcquireKeys(cache, 0, keys))
        await engine.call(wire.Exists(cache, 0, keys))
        curves = store.parts.ways.curves
        await until(lambda: curves.pools and next(iter(curves.pools.values())).distances.requests == 2)
        (pool,) = curves.info(0, ())
        assert pool["keyed"]
        assert pool["page_bytes"] == 4096
        assert pool["points"][0]["hit_ratio"] == pytest.approx(0.05)
        assert pool["points"][-1]["hit_ratio"] == pytest.approx(0.5)


@settings(max_examples=60, deadline=None)
@given(traces(), st.integers(1, 12), st.integers(2, 9))
def test_a_bounded_stack_is_exact_below_its_bound(trace, most, requests):
    """What is forgotten, pages or requests, changes no distance below the bound."""
    stack = Stack(most, 1, 1 << 12)
    for r in range(len(trace.leaf)):
        whole(stack.touch(trace.path(r)))
        assert len(stack.owner) <= most
    hits = list(accumulate(stack.hits))
    longest = max(len(trace.path(r)) for r in range(len(trace.leaf)))
    if most >= longest:
        assert hits[most - 1] == lru_hits(trace, most)
    few = Stack(64, 1, requests)
    for r in range(len(trace.leaf)):
        whole(few.touch(trace.path(r)))
    assert sum(few.hits) <= lru_hits(trace, 64)


def test_above_the_bound_a_sample_is_near():
    """The published chat trace: within 2 points at every capacity of a sample of one page in 32, root pages exact."""
    requests = read([published("mooncake_conversation")], Mix())
    namer, seen = Namer(1), Distances(4096, 16)
    seen.sampled = Stack(1 << 14, 16)
    for r in range(len(requests.leaf)):
        keys = b"".join([requests.keys[segment] for segment in requests.path(r)])
        if keys:
            whole(seen.see(namer.names(keys, 4, 9)))
    total = sum(requests.tokens) / requests.block_tokens
    for percent, lru in {1: 5.35, 5: 19.96, 10: 28.44, 25: 36.04, 50: 37.03}.items():
        (found,) = seen.curve([requests.blocks * percent // 100])
        assert 100 * found / total == pytest.approx(lru, abs=0.1 if percent == 1 else 2.0), percent


def test_what_many_requests_begin_with_is_counted_exactly():
    """A system prompt that everybody sends is hot, whatever the sample says of its pages."""
    namer, seen = Namer(1), Distances(256, 32)
    for n in range(distances.HOT + 200):
        whole(seen.see(namer.names(tokens(1, 2, 3, 4, 1000 + n, page_tokens=1), 4, 9)))
    assert len(seen._heads.hot) == 4
    assert sum(seen.sampled.hits) == pytest.approx(4 * 200, abs=4 * 32 * 4)


def test_what_turns_hot_is_counted_once_from_then_on():
    """A page that stood for many in the sample stands for itself: what it weighed before is not left behind."""
    distances, draw = Distances(exact=64, sample=4), np.random.default_rng(3)
    common = draw.integers(0, 1 << 62, 64, dtype=np.uint64)
    for n in range(3 * HOT):
        own = draw.integers(0, 1 << 62, 8, dtype=np.uint64)
        whole(distances.see(np.concatenate((common, own))))
        stack, hot = distances.sampled, distances._heads.hot
        assert stack._live.sum() == sum(1 if name in hot else stack.scale for name in stack.owner), n
    assert set(common.tolist()) <= hot


def test_names_stand_for_the_path():
    """The same page after another path, or of another cache, has another name; the same path the same."""
    namer = Namer(1)
    one, other = (namer.names(tokens(*pages), 8, 9).tolist() for pages in ((1, 2, 3), (1, 5, 3)))
    assert one[0] == other[0]
    assert not set(one[1:]) & set(other[1:])
    assert not set(one) & set(namer.names(tokens(1, 2, 3), 8, 10).tolist())
    assert namer.names(tokens(1, 2), 8, 9).tolist() == one[:2]
    many = namer.names(np.zeros(100_000, "<i4").tobytes(), 4, 9)
    assert len(set(many.tolist())) == 100_000


def test_geometric_capacities():
    """Ascending, from the first to the last."""
    points = geometric(1, 1000, 40)
    assert points == sorted(set(points))
    assert (points[0], points[-1]) == (1, 1000)


async def test_a_page_takes_what_is_kept_with_it():
    """Host holds half as many pages where each has an item of a window beside its anchor, so that it hits less."""
    both = spec((GroupSpec(Kind.FULL, 1, 1, 4096), GroupSpec(Kind.WINDOW, 1, 1, 4096, window=64)), page_tokens=1)
    async with storing(None, host=16 << 20) as store:
        engine = Engine(store)
        await engine.open(both)
        keys = tokens(*range(8), page_tokens=1)
        await engine.match(keys)
        (pool,) = store.parts.ways.curves.info(0, ())
        assert pool["page_bytes"] == 4096
        assert await engine.put(keys) == 8
        (pool,) = store.parts.ways.curves.info(0, ())
        assert pool["page_bytes"] == 8192
        assert pool["now"][0]["pages"] == pool["now"][0]["bytes"] // 8192


async def test_an_engine_that_comes_back_goes_on_in_its_curve():
    """Also where its slots were given back meanwhile: it is not shown twice."""
    async with storing(None, host=16 << 20) as store:
        for times in (1, 2):
            engine = Engine(store)
            await engine.open(PAGES)
            await engine.match(tokens(1, 2, 3, page_tokens=1))
            curves = store.parts.ways.curves
            await until(lambda n=times, c=curves: [pool.distances.requests for pool in c.pools.values()] == [n])
            assert [pool.cache.pool for pool in curves.pools.values()] == store.parts.host.pools
            engine.leave()
            store.parts.prune()


async def test_requests_count_once_and_time_is_bounded():
    """Polling counts no request again; where the time is used up, requests are skipped and counted."""
    async with storing(None, host=16 << 20) as store:
        engine = Engine(store)
        await engine.open(PAGES)
        matched = await engine.match(tokens(1, 2, 3, page_tokens=1))
        for _ in range(5):
            await engine.match(b"", matched.handle)
        curves = store.parts.ways.curves
        pool = next(iter(curves.pools.values()))
        await until(lambda: pool.distances.requests == 1)
        assert pool.distances.pages == 3
        curves._saved_s = -1000.0
        await engine.match(tokens(1, 2, 3, page_tokens=1))
        await until(lambda: pool.skipped == 1)
        assert pool.distances.requests == 1


async def test_a_prompt_of_millions_of_pages_does_not_hold_the_loop():
    """What would take longer than all that may be saved up is not begun; the next request is looked at."""
    async with storing(None, host=16 << 20) as store:
        engine = Engine(store)
        await engine.open(PAGES)
        await engine.match(np.arange(2 << 20, dtype="<i4").tobytes())
        await engine.match(tokens(1, 2, 3, page_tokens=1))
        pool = next(iter(store.parts.ways.curves.pools.values()))
        await until(lambda: pool.distances.requests == 1)
        assert (pool.skipped, pool.distances.pages) == (1, 3)


async def test_a_long_prompt_is_looked_at_in_turns(monkeypatch):
    """Thousands of its pages take milliseconds: others have the loop in between, and all of it is counted."""
    monkeypatch.setattr(curves, "TURN_S", 1e-9)  # a step a turn
    turns, work = [], curves.Curves._work

    def turn(self: Curves) -> None:
        turns.append(self)
        self._saved_s = 1.0
        work(self)

    monkeypatch.setattr(curves.Curves, "_work", turn)
    async with storing(None, host=16 << 20) as store:
        engine = Engine(store)
        await engine.open(PAGES)
        for _ in range(2):
            await engine.match(np.arange(8 << 10, dtype="<i4").tobytes())
        pools = store.parts.ways.curves.pools
        await until(lambda: pools and next(iter(pools.values())).distances.requests == 2)
        await until(lambda: not store.parts.ways.curves._waiting)
        (pool,) = pools.values()
        assert pool.distances.curve([8 << 10]) == [8 << 10]
        assert len(turns) >= 4 * (8 << 10) // distances.STEP


async def test_a_busy_loop_spends_a_hundredth_on_it():
    """However many long prompts come, what the curve takes is its share of the time, and what was saved up."""
    async with storing(None, host=16 << 20) as store:
        engine = Engine(store)
        await engine.open(PAGES)
        loop = asyncio.get_running_loop()
        begun = loop.time()
        while loop.time() < begun + 1.0:
            await engine.match(np.random.default_rng(int(loop.time() * 1e6)).integers(0, 9, 20_000, "i4").tobytes())
            await asyncio.sleep(0)
        curves: Curves = store.parts.ways.curves
        longest = 0.2  # one request more than the share allows may be under way
        assert curves.spent_s <= SHARE * (loop.time() - begun) + SAVED_S + longest
        assert next(iter(curves.pools.values())).skipped > 0


def test_operators_see_the_curve(daemon):
    """Kvtierctl curve: a table with a plot, and JSON with what more memory would buy."""
    keys = tokens(*range(10), page_tokens=1)
    with Client(daemon.socket, instance="one") as client:
        cache = client.open(PAGES)
        for _ in range(4):
            cache.match(keys).close()
    runner = CliRunner()
    for _ in range(50):
        result = runner.invoke(
            main, ["--socket", str(daemon.socket.with_name("admin.sock")), "curve", "--add", "1GiB", "--json"]
        )
        assert result.exit_code == 0, result.output
        pools = json.loads(result.output)["pools"]
        if pools and pools[0]["points"] and pools[0]["points"][-1]["hit_ratio"] == 0.75:  # counted in turns
            break
    (pool,) = pools
    assert (pool["requests"], pool["pages_asked"]) == (4, 40)
    assert pool["points"][-1]["hit_ratio"] == pytest.approx(0.75)
    assert pool["added"][0]["bytes"] == pool["now"][0]["bytes"] + (1 << 30)
    assert pool["points"][0]["hit_ratio"] == pytest.approx(0.075)
    where = ["--socket", str(daemon.socket.with_name("admin.sock"))]
    (sold,) = json.loads(runner.invoke(main, [*where, "curve", "--add", "1GB", "--json"]).output)["pools"]
    assert sold["added"][0]["bytes"] == sold["now"][0]["bytes"] + 10**9, "GB is what `size` takes it for"
    shown = runner.invoke(main, ["--socket", str(daemon.socket.with_name("admin.sock")), "curve"])
    assert "75.00 %" in shown.output
    assert "#" * 40 in shown.output
    plot = [line for line in shown.output.splitlines() if "|" in line]
    assert ["75.00 %" in line for line in plot] == [False] * (len(plot) - 1) + [True]  # more room changes nothing
    assert (
        runner.invoke(
            main, ["--socket", str(daemon.socket.with_name("admin.sock")), "curve", "--add", "much"]
        ).exit_code
        == 1
    )


def test_the_curve_of_a_published_trace_is_the_sizing_curve():
    """One pass over the stream gives what one pass over the file gives."""
    requests = read([published("mooncake_synthetic")], Mix(), 800)
    from kvtier.sizing.traces import load_trace

    trace = load_trace([published("mooncake_synthetic")], 800)
    inputs = [len(trace.path(r)) * trace.block_tokens for r in range(len(trace.leaf))]
    seen = seen_by(trace, Distances())
    curve = hit_curve(trace._replace(input_tokens=inputs))
    at = [1, 100, 1000, 5000, requests.blocks]
    assert seen.curve(at) == [curve.hits[min(pages, len(curve.hits) - 1)] for pages in at]
