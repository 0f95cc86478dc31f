"""Quotas: whoever is over makes room among its own, others lose nothing, limits change while the daemon runs."""

from __future__ import annotations

import asyncio
import json
import os
import timeit

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines import Engine, idle, spec, tokens
from kvtier import wire
from kvtier.client import Client
from kvtier.config import size
from kvtier.ctl import main
from kvtier.identity import GroupSpec
from kvtier.policy.quota import Rule, parse
from kvtier.store import diskroom, quotas
from kvtier.store.quotas import Quotas
from kvtier.store.vram import DeviceMemory
from kvtier.types import Code, Kind, KvtierError, Tier
from storekit import MIB, drop_host, maker, memfd, quiet, rows, storing, until

PAGE = 65536


def cache_of(tenant: bytes, page: int = PAGE, **more):
    """A cache of one tenant."""
    return spec((GroupSpec(Kind.FULL, 1, 1, page),), page_tokens=1, salt=tenant, **more)


def path(number: int, pages: int = 4) -> bytes:
    """One of several prompts."""
    return tokens(*(1000 * number + n for n in range(pages)), page_tokens=1)


def limited(*, pages: int, tenant: bytes = b"a", tier: Tier = Tier.HOST) -> list[Rule]:
    """One tenant may have so many pages of a tier."""
    return [Rule("tenant", tenant.hex(), {tier: pages * PAGE})]


async def engine_of(store, tenant: bytes) -> Engine:
    """An engine of a tenant."""
    engine = Engine(store, f"engine-{tenant.hex()}", pid=tenant[0])
    await engine.open(cache_of(tenant))
    return engine


def held(store, engine: Engine, tier: Tier) -> int:
    """Pages of the engine's cache in a tier."""
    return sum(store.parts.caches[engine.opened.cache].index.held[tier])


async def test_a_tenant_at_its_limit_takes_from_itself_alone(tmp_path):
    """Its coldest prompts go, another's older ones stay; disk keeps what host gives up."""
    async with storing(tmp_path, host=4 * MIB) as store:
        store.limit(limited(pages=10))
        other, engine = await engine_of(store, b"b"), await engine_of(store, b"a")
        for n in range(5):
            await other.put(path(n))
        for n in range(6):
            assert await engine.put(path(n), wait_ms=5000) == 4
            assert held(store, engine, Tier.HOST) <= 10
            assert store.parts.check() == []
        assert held(store, other, Tier.HOST) == 20
        await quiet(store)
        assert held(store, engine, Tier.DISK) == 24
        assert await engine.get(path(0)) == 4, "what comes back makes room, too"
        assert held(store, engine, Tier.HOST) <= 10


async def test_a_request_larger_than_the_limit_is_granted_as_far_as_that_goes():
    """And says by name why it is not all; where not even one page fits, none is granted."""
    async with storing(None, host=4 * MIB) as store:
        store.limit(limited(pages=3))
        engine = await engine_of(store, b"a")
        reserved = await engine.reserve(path(0))
        assert (reserved.pages, reserved.refused) == (3, Code.OVER_CAP)
        assert store.parts.counts["refused_quota"] == 1
        await engine.call(wire.Abort(reserved.reservation))
        assert await engine.put(path(1, 3)) == 3
        store.limit(limited(pages=0))
        reserved = await engine.reserve(path(0))
        assert (reserved.pages, reserved.refused) == (0, Code.OVER_CAP)
        assert store.parts.check() == []


@pytest.mark.parametrize("held_pages", [0, 4])
async def test_keys_are_stored_as_far_as_the_limit_goes(held_pages: int):
    """Reserved by an engine or copied from its rows: the leading ones, and the rest is refused by name."""
    keyed = spec((GroupSpec(Kind.FULL, 1, 1, PAGE),), key_bytes=16, salt=b"a")
    keys = [bytes([n]) * 16 for n in range(30)]
    fd, _ = memfd(12, PAGE, sealed=True)
    async with storing(None, host=4 * MIB) as store:
        store.limit(limited(pages=10))
        engine = Engine(store)
        number = (await engine.open(keyed)).cache
        if held_pages:  # which cannot go
            reserved = await engine.call(wire.ReserveKeys(number, 0, b"".join(keys[-held_pages:])))
            assert reserved.pages == held_pages
        room = 10 - held_pages
        reserved = await engine.call(wire.ReserveKeys(number, 0, b"".join(keys[:12])))
        assert (reserved.pages, reserved.refused) == (room, Code.OVER_CAP)
        await engine.call(wire.Abort(reserved.reservation))
        region = store.register(wire.Register("engine", "rows", 0, PAGE, 12), fd, engine.process.peer).region
        store_rows = wire.Store(region, 0, rows(*range(12)), cache=number, keys=b"".join(keys[:12]))
        stored = await engine.call(store_rows)
        assert (stored.done, stored.refused) == (b"\1" * room + bytes(12 - room), Code.OVER_CAP)
        states = (await engine.call(wire.Exists(number, 0, b"".join(keys[:12])))).states
        assert [state != 0 for state in states] == [n < room for n in range(12)]
        assert sum(store.parts.caches[number].index.held[Tier.HOST]) == room
        engine.leave()
        assert idle(store) == []
    os.close(fd)


async def test_models_of_a_tenant_take_turns_in_its_room():
    """One with smaller pages gets what the other holds and used longer ago, and loses it again in its turn."""
    async with storing(None, host=8 * MIB) as store:
        store.limit(limited(pages=10))
        first, second = await engine_of(store, b"a"), Engine(store, "second", pid=2)
        await second.open(cache_of(b"a", PAGE // 2, model="other"))
        for n in range(4):
            await first.put(path(n))
        for n in range(4):
            assert await second.put(path(n), wait_ms=5000) == 4
        assert held(store, first, Tier.HOST) <= 2, "the coldest prompts go, whatever their pages' size"
        for n in range(4, 8):
            assert await first.put(path(n), wait_ms=5000) == 4
        assert held(store, second, Tier.HOST) <= 4
        assert store.parts.check() == []


async def test_a_request_larger_than_the_limit_stays_within_it(tmp_path):
    """The tenant's own pages make room for as much of it as may be there; so they do for what is loaded."""
    async with storing(tmp_path, host=8 * MIB) as store:
        engine = await engine_of(store, b"a")
        assert await engine.put(path(1, 12)) == 12
        await quiet(store)
        drop_host(store)
        store.limit(limited(pages=10))
        assert await engine.put(path(2)) == 4
        reserved = await engine.reserve(path(3, 11), wait_ms=5000)
        assert (reserved.pages, reserved.refused) == (10, Code.OVER_CAP)
        assert held(store, engine, Tier.HOST) == 0
        await engine.call(wire.Abort(reserved.reservation))
        await quiet(store)
        assert await engine.get(path(1, 12)) == 10
        assert held(store, engine, Tier.HOST) == 10
        assert store.parts.check() == []


async def test_all_that_a_load_brings_at_once_counts(tmp_path):
    """A prompt of several batches comes back no further than the limit."""
    async with storing(tmp_path, host=64 * MIB, disk=128 * MIB) as store:
        engine = Engine(store)
        await engine.open(cache_of(b"a", MIB))
        assert await engine.put(path(1, 30)) == 30
        await quiet(store)
        drop_host(store)
        store.limit([Rule("tenant", b"a".hex(), {Tier.HOST: 10 * MIB})])
        assert await engine.get(path(1, 30)) == 10
        assert held(store, engine, Tier.HOST) == 10
        assert await engine.get(path(1, 30)) == 10, "nothing of it stays counted"
        store.limit([])
        assert await engine.get(path(1, 30)) == 30


async def test_a_limit_on_disk(tmp_path):
    """The tenant's oldest pages leave disk; another's stay."""
    async with storing(tmp_path, host=8 * MIB) as store:
        store.limit(limited(pages=10, tier=Tier.DISK))
        other, engine = await engine_of(store, b"b"), await engine_of(store, b"a")
        await other.put(path(0))
        await quiet(store)
        for n in range(6):
            await engine.put(path(n))
            await quiet(store)
            assert held(store, engine, Tier.DISK) <= 10
        assert held(store, other, Tier.DISK) == 4
        assert held(store, engine, Tier.HOST) == 24
        assert store.parts.check() == []


async def test_small_pages_take_no_more_of_disk_than_the_limit_and_give_up_no_more_than_they_must(tmp_path):
    """A page of 100 bytes is a cell of 4 KiB there: that counts from before it is written, and when it goes."""
    async with storing(tmp_path, host=8 * MIB) as store:
        store.limit([Rule("tenant", b"a".hex(), {Tier.DISK: 160 * 4096})])
        engine = Engine(store)
        await engine.open(cache_of(b"a", page=100))
        most, least = 0, 160
        for n in range(12):
            assert await engine.put(path(n, 40)) == 40
            while store.parts.persist.pending:
                most = max(most, store.parts.ways.quotas.report()[0]["disk_held_bytes"])
                await asyncio.sleep(0)
            least = min(least, held(store, engine, Tier.DISK)) if n > 4 else least
        assert most <= 160 * 4096
        assert least >= 120
        assert store.parts.check() == []


async def test_a_limit_on_a_device():
    """The tenant's oldest pages leave the device and stay in host; another's, older still, stay where they are."""
    memory = DeviceMemory(maker("cpu"), 16 * MIB, slab_bytes=4 * PAGE, deadline_s=30.0)
    async with storing(None, host=16 * MIB, device=memory) as store:
        store.limit(limited(pages=10, tier=Tier.DEVICE))
        other, engine = await engine_of(store, b"b"), await engine_of(store, b"a")
        for n in range(3):
            assert await other.put(path(n)) == 4
        for n in range(6):
            assert await engine.put(path(n), wait_ms=5000) == 4
            assert held(store, engine, Tier.DEVICE) <= 10
        assert held(store, other, Tier.DEVICE) == 12
        assert held(store, engine, Tier.HOST) == 24
        assert await engine.get(path(0)) == 4
        assert held(store, engine, Tier.DEVICE) <= 10
        assert store.parts.check() == []
        engine.leave()
        other.leave()


@pytest.mark.parametrize("allowed", [0, 1])
async def test_a_prompt_that_disk_may_not_take_keeps_no_room_from_others(tmp_path, allowed):
    """It is the coldest and cannot be saved: clean pages of others go, then it is lost, and nobody waits for it."""
    async with storing(tmp_path, host=8 * PAGE, cap=1.0) as store:
        store.limit([Rule("tenant", b"a".hex(), {Tier.DISK: allowed * PAGE})])
        mine, others = Engine(store), Engine(store, "others", pid=2)
        await mine.open(cache_of(b"a"))
        await others.open(cache_of(b"b"))
        assert await mine.put(path(1)) == 4
        for number in range(2, 12):
            assert await others.put(path(number, 2), wait_ms=2000) == 2
            await quiet(store)
        assert store.parts.check() == []
        mine.leave()
        others.leave()


async def test_limits_that_change_hold_for_what_is_there(tmp_path):
    """Caches move under a new rule with all their leaves, and out of it again."""
    async with storing(tmp_path, host=4 * MIB) as store:
        engine = await engine_of(store, b"a")
        for n in range(8):
            await engine.put(path(n))
        await quiet(store)
        store.limit(limited(pages=12))
        assert store.parts.check() == []
        await engine.put(path(50), wait_ms=5000)
        assert held(store, engine, Tier.HOST) <= 12
        store.limit([])
        for n in range(51, 56):
            await engine.put(path(n))
        assert held(store, engine, Tier.HOST) > 12
        assert store.parts.check() == []


class Halted:
    """Moving under another rule stops after some nodes until `opened`."""

    def __init__(self, after: int) -> None:
        self.after = after
        self.opened = asyncio.Event()
        self.stood = asyncio.Event()

    async def paced(self, items):
        """In place of `sliced`."""
        for n, item in enumerate(items):
            yield item
            if n == self.after:
                self.stood.set()
                await self.opened.wait()


async def test_while_leaves_move_under_another_rule_nobody_loses_and_nobody_waits_for_ever(tmp_path, monkeypatch):
    """Halfway: others make room from all leaves, who is over waits and is served at the end; rules change again."""
    halted = Halted(0)
    monkeypatch.setattr(quotas, "sliced", halted.paced)
    async with storing(tmp_path, host=4 * MIB) as store:
        other, engine = await engine_of(store, b"b"), await engine_of(store, b"a")
        for n in range(12):
            await engine.put(path(n))
        await quiet(store)
        store.limit(limited(pages=12))
        await halted.stood.wait()
        assert store.parts.ways.quotas.moving
        assert store.parts.check() == []
        for n in range(8):
            assert await other.put(path(n), wait_ms=5000) == 4, "all of host is to be had for it"
        assert held(store, other, Tier.HOST) == 32
        waiting = asyncio.create_task(engine.put(path(50), wait_ms=60_000))
        await asyncio.sleep(0)
        store.limit([*limited(pages=4, tenant=b"b"), *limited(pages=8)])
        halted.opened.set()
        assert await waiting == 4
        await until(lambda: not store.parts.ways.quotas.moving)
        assert store.parts.check() == []
        assert held(store, engine, Tier.HOST) <= 8
        await other.put(path(60), wait_ms=5000)
        assert held(store, other, Tier.HOST) <= 4
        assert store.parts.check() == []


async def test_a_prompt_larger_than_a_limit_on_disk_is_there_as_far_as_that_goes(tmp_path):
    """It is written in runs that fit, not in one that does not."""
    async with storing(tmp_path, host=8 * MIB) as store:
        store.limit(limited(pages=10, tier=Tier.DISK))
        engine = await engine_of(store, b"a")
        await engine.put(path(1, 12))
        await quiet(store)
        assert held(store, engine, Tier.DISK) == 10
        drop_host(store)
        assert await engine.get(path(1, 12)) == 10
        assert store.parts.check() == []


async def test_a_prompt_of_large_pages_takes_what_disk_has_and_no_more_goes_than_that(tmp_path):
    """Runs of large pages are short: one for which there is no room is not a reason to give up what is durable."""
    async with storing(tmp_path, host=160 * MIB, disk=48 * MIB) as store:
        engine = Engine(store)
        await engine.open(cache_of(b"a", MIB))
        for n in range(6):
            await engine.put(path(n))
            await quiet(store)
        assert await engine.put(path(50, 70)) == 70
        await until(lambda: not store.parts.persist.pending)
        assert held(store, engine, Tier.DISK) >= 40
        assert store.parts.check() == []


async def test_a_large_excess_on_disk_goes_in_slices(tmp_path, monkeypatch):
    """A limit far below what is there: the next write makes room for itself, some of it at a time."""
    monkeypatch.setattr(diskroom, "MOST_OWN", 2 * PAGE)
    async with storing(tmp_path, host=8 * MIB) as store:
        engine = await engine_of(store, b"a")
        for n in range(12):
            await engine.put(path(n))
        await quiet(store)
        store.limit(limited(pages=6, tier=Tier.DISK))
        await engine.put(path(50))
        await quiet(store)
        assert held(store, engine, Tier.DISK) <= 6
        assert await engine.get(path(50)) == 4
        assert store.parts.check() == []


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.sampled_from([b"a", b"b", b"c"]), st.integers(0, 9), st.integers(1, 6)), max_size=40),
       st.integers(1, 12))  # fmt: skip
async def test_whatever_is_asked_limits_hold(requests, pages):
    """Three tenants over a small host, two of them limited: never over, invariants hold."""
    async with storing(None, host=2 * MIB, cap=1.0) as store:
        rules = [*limited(pages=pages), *limited(pages=2 * pages, tenant=b"b")]
        store.limit(rules)
        engines = {name: await engine_of(store, name) for name in (b"a", b"b", b"c")}
        for name, number, count in requests:
            await engines[name].put(path(number, count))
            assert held(store, engines[b"a"], Tier.HOST) <= pages
            assert held(store, engines[b"b"], Tier.HOST) <= 2 * pages
            assert store.parts.check() == []


async def test_what_a_rule_holds_is_known_however_many_caches_it_has():
    """Engines open a cache for each salt and adapter: a request that asked each of them held the loop for its time."""
    took = []
    async with storing(None, host=4 * MIB) as store:
        store.limit([Rule("scope", "uid:0", {Tier.HOST: 2 * MIB})])
        engine = Engine(store)
        for n in range(600):
            await engine.open(cache_of(n.to_bytes(2, "little")))
            if n in {5, 599}:
                assert await engine.put(path(n), wait_ms=5000) == 4
                took.append(min(timeit.repeat(lambda: store.parts.ways.quotas.held(1, Tier.HOST), number=20, repeat=9)))
        assert took[1] < 10 * took[0], took
        assert store.parts.ways.quotas.report()[0]["host_held_bytes"] == 8 * PAGE
        assert store.parts.check() == []


async def test_what_a_rule_holds_follows_what_is_under_way(tmp_path):
    """Reservations, slots that are being taken and writes count under whatever rule a cache is at the time."""
    async with storing(tmp_path, host=4 * MIB) as store:
        engine = await engine_of(store, b"a")
        reserved = await engine.reserve(path(0))
        store.limit(limited(pages=30))
        assert store.parts.check() == []
        rule = store.parts.ways.quotas.report()[0]
        assert rule["host_held_bytes"] == 4 * PAGE
        engine.write(path(0), reserved)
        await engine.call(wire.Commit(reserved.reservation, 0, 4))
        store.limit([Rule("scope", "uid:0", {Tier.HOST: 30 * PAGE, Tier.DISK: 30 * PAGE})])
        assert store.parts.check() == []
        await quiet(store)
        assert store.parts.ways.quotas.report()[0]["disk_held_bytes"] == 4 * PAGE
        store.limit([])
        assert store.parts.check() == []


def test_rules_as_text():
    """Kinds, tiers and sizes; the first that fits is the rule."""
    rules = parse("tenant=6163 device=1GiB host=2GiB disk=20GiB; scope=uid:7 host=1M;;", size)
    assert rules == [
        Rule("tenant", "6163", {Tier.DEVICE: 1 << 30, Tier.HOST: 2 << 30, Tier.DISK: 20 << 30}),
        Rule("scope", "uid:7", {Tier.HOST: 1 << 20}),
    ]
    assert rules[0].fits(b"x", b"ac", "uid:1")
    assert not rules[0].fits(b"x", b"a", "uid:1")
    assert rules[1].fits(b"x", b"", "uid:7")
    assert parse("cache=3FA8 disk=1G", size)[0].fits(bytes.fromhex("3fa811"), b"", "")
    assert parse("", size) == []


@pytest.mark.parametrize(
    "text",
    [
        "who=1 host=1G",
        "tenant= host=1G",
        "tenant=61",
        "tenant=61 tape=1G",
        "tenant=61 host=much",
        "tenant=616 host=1G",
        "tenant=acme host=1G",
        "cache=3fz host=1G",
        "scope=7 host=1G",
        "scope=uid: host=1G",
        ";".join(["tenant=61 host=1G"] * 65),
    ],
)
def test_wrong_rules_are_refused(text):
    """Naming the setting."""
    with pytest.raises(KvtierError) as caught:
        parse(text, size)
    assert caught.value.field == "quotas"


def test_no_rules_cost_nothing():
    """Without a rule nothing is counted."""
    none = Quotas()

    class Cache:
        """A cache under no rule."""

        class index:  # noqa: N801
            """Its share."""

            share = 0

    assert not none.blocks(Cache, 1 << 40, Tier.HOST, lambda *_: pytest.fail("evicted"))


def test_operators_set_quotas_while_it_runs(daemon):
    """Kvtierctl set, and what status says of them."""
    runner, admin = CliRunner(), ["--socket", str(daemon.socket.with_name("admin.sock"))]
    with Client(daemon.socket, instance="one") as client:
        cache = client.open(cache_of(b"a"))
        with cache.match(path(0)).reserve(0, 4) as reserved:
            reserved.commit()
        result = runner.invoke(main, [*admin, "set", "quotas=tenant=61 host=256KiB"])
        assert result.exit_code == 0, result.output
        with cache.match(path(1)).reserve(0, 4) as reserved:
            reserved.commit()
        data = json.loads(runner.invoke(main, [*admin, "status", "--json"]).output)
    (rule,) = data["quotas"]
    assert rule["host_limit_bytes"] == 256 << 10
    assert 0 < rule["host_held_bytes"] <= 256 << 10
    assert "tenant=61" in runner.invoke(main, [*admin, "status"]).output
    assert runner.invoke(main, [*admin, "set", "quotas=nobody"]).exit_code == 1
