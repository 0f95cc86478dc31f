"""Load or compute: what was measured of each tier, the best cut, and tiers that are not worth it."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines import Engine, spec, tokens
from kvtier import wire
from kvtier.client import Client
from kvtier.identity import GroupSpec
from kvtier.mover import Mover
from kvtier.store.links import SMALLEST, STALE_S, Link, Links, Verdict
from kvtier.types import Code, Kind, KvtierError, Tier
from storekit import MIB, drop_host, quiet, storing, until

PAGES = spec((GroupSpec(Kind.FULL, 1, 1, 65536),), page_tokens=4)
FAST, SLOW = 1e9, 1.0
"""Tokens a second with which nothing, and everything, is worth loading."""


def path(count: int) -> bytes:
    """Keys of so many pages."""
    return tokens(*range(count), page_tokens=4)


class Fake:
    """As much of a cache as a verdict asks about."""

    spec = PAGES
    item_bytes = (65536,)

    class index:  # noqa: N801
        """Its groups."""

        anchors = (0,)


parts = st.lists(st.tuples(st.sampled_from([Tier.HOST, Tier.DISK]), st.integers(1, 400)), max_size=8)


@given(parts, st.floats(1, 1e8), st.floats(1e6, 1e10), st.floats(1e6, 1e10))
def test_the_cut_is_the_cheapest(segments, prefill, host, disk):
    """Of all prefixes of segments none costs less to load, with the rest computed."""
    links = Links()
    for tier, rate in ((Tier.HOST, host), (Tier.DISK, disk)):
        links.links[tier].note(1 << 20, (1 << 20) / rate, 0.0)
    found = [wire.Segment(tier, pages) for tier, pages in segments]
    verdict = links.judge(Fake, found, prefill)
    costs = {}
    for n in range(len(found) + 1):
        pages = sum(segment.pages for segment in found[:n])
        costs[pages] = sum(verdict.load_s[:n]) + sum(verdict.recompute_s[n:])
    assert costs[verdict.cut] == pytest.approx(min(costs.values()))
    assert verdict.recompute_s == pytest.approx([4 * pages / prefill for _, pages in segments])


def test_rates_follow_what_is_measured_and_the_size():
    """Small loads have a rate of their own; a device that becomes slow is believed within some loads."""
    link = Link(Tier.DISK)
    assert link.seconds(1 << 30) == pytest.approx((1 << 30) / 1e9)
    link.note(SMALLEST, SMALLEST / 1e7, 1.0)
    link.note(64 << 20, (64 << 20) / 2e9, 1.0)
    assert link.seconds(4096) == pytest.approx(4096 / 1e7)
    assert link.seconds(1 << 30) == pytest.approx((1 << 30) / 2e9)
    for _ in range(20):
        link.note(64 << 20, (64 << 20) / 1e8, 2.0)
    assert link.seconds(1 << 30) == pytest.approx((1 << 30) / 1e8, rel=0.3)
    assert link.measured == 22


def test_a_tier_that_was_skipped_for_long_is_tried_again():
    """Else nobody would notice that it became faster."""
    links = Links()
    links.links[Tier.DISK].tried = 100.0
    found = [wire.Segment(Tier.HOST, 2), wire.Segment(Tier.DISK, 3)]
    slow, fast = Verdict((0.1, 2.0), (1.0, 1.0), 2), Verdict((0.1, 0.5), (1.0, 1.0), 5)
    assert links.loaded(found, slow, 101.0) == 2
    assert links.loaded(found, slow, 101.0 + STALE_S) == -1
    assert links.loaded(found, slow, 102.0 + STALE_S) == 2
    assert links.skipped[Tier.DISK] == 6
    assert links.report()["disk"]["below_break_even"]
    assert links.loaded(found, fast, 103.0) == -1
    links.links[Tier.DISK].note(1 << 20, 1e-3, 103.0)
    assert not links.report()["disk"]["below_break_even"], "not for ever"


def test_what_lies_behind_a_slow_tier_is_not_called_slow():
    """It is left out because what is before it is; a load of it alone would be worth it."""
    links = Links()
    links.links[Tier.DISK].tried = links.links[Tier.HOST].tried = 100.0
    found = [wire.Segment(Tier.DISK, 9), wire.Segment(Tier.HOST, 1)]
    links.links[Tier.HOST].measured = 1
    assert links.loaded(found, Verdict((9.0, 0.1), (1.0, 1.0), 0), 101.0) == 0
    report = links.report()
    assert (report["disk"]["below_break_even"], report["host"]["below_break_even"]) == (True, False)
    assert report["host"]["pages_skipped"] == 1


async def test_only_loads_that_brought_all_of_it_tell_how_fast_a_tier_is(tmp_path):
    """What another request began before, or what found no room, took no time of its own: no tier is so fast."""
    async with storing(tmp_path, host=1 * MIB, cap=1.0) as store:
        engine = Engine(store)
        await engine.open(PAGES)
        await engine.put(path(8))
        await quiet(store)
        drop_host(store)
        link = store.parts.links.links[Tier.DISK]
        matched = await engine.match(path(8))
        first, second = await asyncio.gather(*(engine.call(wire.Acquire(matched.handle, wait_ms=5000)) for _ in "ab"))
        assert (first.pages, second.pages) == (8, 8)
        assert link.measured == 1
        await engine.call(wire.Release(first.lease))
        await engine.call(wire.Release(second.lease))
        drop_host(store)
        other = Engine(store, "other", pid=2)
        await other.open(PAGES)
        assert (await other.reserve(tokens(*range(500, 512), page_tokens=4))).pages == 12
        assert (await engine.call(wire.Acquire(matched.handle))).pages == 4, "there is room for no more"
        assert link.measured == 1


async def test_a_tier_below_break_even_is_skipped_and_status_says_so(tmp_path):
    """An engine that computes faster than disk gives gets what is in host; a slower one gets all; both are told."""
    async with storing(tmp_path) as store:
        engine = Engine(store)
        await engine.open(PAGES)
        await engine.put(path(8))
        await quiet(store)
        drop_host(store)
        plain = await engine.match(path(8))
        assert (plain.cut, plain.load_s) == (-1, ())
        store.parts.links.links[Tier.DISK].note(1 << 19, 0.01, 1e12)
        fast = await engine.call(wire.Match(engine.opened.cache, 0, path(8), prefill=FAST))
        assert (fast.pages, fast.cut) == (8, 0)
        assert fast.load_s[0] > fast.recompute_s[0] == pytest.approx(32 / FAST)
        assert (await engine.call(wire.Acquire(fast.handle))).pages == 0
        assert store.report.stat(wire.Stat()).data["tiers"]["disk"]["below_break_even"]
        slow = await engine.call(wire.Match(engine.opened.cache, 0, path(8), prefill=SLOW))
        assert slow.cut == 8
        lease = await engine.call(wire.Acquire(slow.handle))
        assert lease.pages == 8
        tiers = store.report.stat(wire.Stat()).data["tiers"]
        assert not tiers["disk"]["below_break_even"]
        assert tiers["disk"]["pages_skipped"] == 8
        assert tiers["disk"]["loads_measured"] == 2, "the load was measured"
        await until(lambda: store.parts.links.links[Tier.HOST].measured == 3)
        asked = await engine.call(wire.Acquire(fast.handle, pages=3))
        assert asked.pages == 3, "who asks for pages by number gets them"


async def test_host_is_measured_later_where_the_mover_was_busy():
    """Else it would be taken for what was assumed of it, for good."""
    links, busy, idle = Links(), Mover(waiting=0), Mover()
    try:
        links.need(busy)
        await until(lambda: links.probing is None)
        links.need(idle)
        await until(lambda: links.links[Tier.HOST].measured == 3)
    finally:
        busy.close()
        idle.close()


async def test_a_wrong_rate_is_refused():
    """By its name."""
    async with storing(None) as store:
        engine = Engine(store)
        await engine.open(PAGES)
        for wrong in (-1.0, float("nan"), 1e13, 1e-310):
            with pytest.raises(KvtierError) as caught:
                await engine.call(wire.Match(engine.opened.cache, 0, path(1), prefill=wrong))
            assert (caught.value.code, caught.value.field) == (Code.BAD_REQUEST, "prefill")


def test_the_client_says_its_rate_and_is_told_the_cut(daemon):
    """Through a real daemon, per path."""
    with Client(daemon.socket, instance="one") as client:
        cache = client.open(PAGES)
        cache.prefill = 1000.0
        with cache.match(path(3)).reserve(0, 3) as reserved:
            assert reserved.commit() == 3
        route = cache.match(path(5))
        assert route.pages == route.cut == 3
        assert route.recompute_s == pytest.approx((12 / 1000,))
        assert len(route.load_s) == len(route.segments) == 1
