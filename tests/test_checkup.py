"""The daemon checks itself, in slices: engines go on being served, and what they change meanwhile is no false alarm."""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines import FULL, STATE, WINDOW, Engine, spec, tokens
from kvtier import archive, wire
from kvtier.client import Client
from kvtier.control.call import Admin
from kvtier.demo.daemon import Daemon
from kvtier.identity import CacheSpec, GroupSpec
from kvtier.store import Store, checkup, slices
from kvtier.store.scrub import Scrub
from kvtier.types import Kind, Tier
from storekit import MIB, drop_host, quiet, storing, until
from test_store_machine import Traffic, steps

DEADLINE = 60.0


async def traffic(engine: Engine, rounds: int) -> None:
    """Store and read branching prompts, more than host holds."""
    rng = np.random.default_rng(1)
    for _ in range(rounds):
        keys = tokens(*rng.integers(0, 4, 12).tolist())
        await engine.put(keys, wait_ms=500)
        await engine.get(keys)
        await asyncio.sleep(0)


async def test_a_check_beside_busy_engines_raises_no_false_alarm(tmp_path, monkeypatch):
    """A step at a time, with evictions, splits, loads and writes between any two of them."""
    monkeypatch.setattr(slices, "SLICE_S", 0.0)
    async with storing(tmp_path, host=1 * MIB, disk=4 * MIB) as store:
        engine = Engine(store)
        await engine.open(spec((FULL, WINDOW, STATE)))
        busy = asyncio.create_task(traffic(engine, 150))
        seen = []
        while not busy.done():
            seen.append(await store.checkup.round())
            await asyncio.sleep(0)
        await busy
        assert not [line for each in seen for line in each.broken]
        assert any(each.changed for each in seen), "something must have changed within a round"
        await quiet(store)
        last = await store.checkup.round()
        assert (last.broken, last.changed) == ([], [])
        engine.leave()


async def checked(ops: list, disk_bytes: int) -> None:
    """Play the steps of the store's state machine while checks run without a pause."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(slices, "SLICE_S", 0.0)
        traffic = Traffic(Path(folder), disk_bytes)
        await traffic.start()

        async def watch() -> None:
            while True:
                assert (await traffic.store.checkup.round()).broken == []
                await asyncio.sleep(0)

        watching = asyncio.create_task(watch())
        for what, n, detail in ops:
            if what != "restart":
                await getattr(traffic, what)(n, detail)
                await asyncio.sleep(0)
        if not watching.done():
            watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        if not watching.cancelled():
            watching.result()
        await traffic.stop()


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(steps, min_size=10, max_size=60), st.sampled_from([0, 1 << 20, 64 << 20]))
def test_checks_beside_random_traffic_raise_no_false_alarm(ops: list, disk_bytes: int) -> None:
    """Aborts, deaths, resets, evictions and half-committed pages between any two steps of a check."""
    asyncio.run(checked(ops, disk_bytes))


async def test_what_the_daemon_itself_holds_is_no_lease_that_was_forgotten(tmp_path, monkeypatch):
    """A copy that is being re-read and an import that goes on, while no engine is attached, are no alarm."""
    reading, gate = asyncio.Event(), asyncio.Event()

    async def slow(*_: object) -> list[object]:
        reading.set()
        await gate.wait()
        return []

    monkeypatch.setattr(Scrub, "_read", slow)
    async with storing(tmp_path) as store:
        engine = Engine(store)
        await engine.open(spec())
        await engine.put(tokens(1, 2, 3))
        await quiet(store)
        engine.leave()
        (cache,) = store.parts.caches.values()
        batch = await anext(store.scrub.batches())
        scrubbing = asyncio.ensure_future(store.scrub.check(batch[:1]))
        await reading.wait()
        header = archive.header(cache.spec, cache.scope, cache.epoch)
        begun = store.admin[wire.Import](wire.Import(msgspec.msgpack.encode(header))).data
        assert cache.index.root.refs == cache.own == 2
        assert (await store.checkup.round()).broken == []
        gate.set()
        await scrubbing
        store.admin[wire.ImportEnd](wire.ImportEnd(begun["import"]))
        assert cache.index.root.refs == cache.own == 0


async def test_a_check_finds_what_is_broken(tmp_path):
    """A count that is off, and a lease that outlives every engine; the latest result is kept for status and metrics."""
    async with storing(tmp_path) as store:
        engine = Engine(store)
        await engine.open(spec())
        await engine.put(tokens(1, 2, 3))
        await quiet(store)
        (cache,) = store.parts.caches.values()
        (node,) = cache.index.walk()
        cache.index.lease(node)
        node.count[Tier.HOST] += 1
        engine.leave()
        found = await store.checkup.round()
        node.count[Tier.HOST] -= 1
        assert any("tier 1 counts 4" in line for line in found.broken)
        assert any("1 leases that nobody holds" in line for line in found.broken)
        assert store.report.status(wire.Status()).data["checked"]["broken"] == len(found.broken)
        assert store.report.metrics(wire.Metrics()).data["checks"] == 1
        cache.index.unlease(node)
        assert (await store.checkup.round()).broken == []


async def test_pins_are_no_forgotten_leases(tmp_path):
    """An operator's hold without any engine is as it should be."""
    async with storing(tmp_path) as store:
        engine = Engine(store)
        await engine.open(spec())
        await engine.put(tokens(1, 2, 3))
        await quiet(store)
        await store.pins.pin(wire.Pin(wire.Prompt(tokens=tokens(1, 2, 3))))
        engine.leave()
        assert (await store.checkup.round()).broken == []
        store.pins.unpin(wire.Unpin())


async def test_the_daemon_checks_itself_and_logs_what_is_broken(tmp_path, monkeypatch, caplog):
    """Without anybody's asking, round after round."""
    monkeypatch.setattr(checkup, "EVERY_S", 0.01)
    async with storing(tmp_path) as store:
        await until(lambda: store.checkup.rounds > 1)
        assert not caplog.records
        store.parts.host._space.used += 1
        await until(lambda: caplog.records)
        store.parts.host._space.used -= 1
    assert "broken invariant: host: " in caplog.text


async def test_a_check_that_fails_is_logged_and_not_the_last(tmp_path, monkeypatch, caplog):
    """A bug of the check itself."""
    monkeypatch.setattr(checkup, "EVERY_S", 0.01)
    async with storing(tmp_path) as store:
        with monkeypatch.context() as patch:
            patch.setattr(store.parts, "host", None)
            await until(lambda: "the check failed" in caplog.text)
        rounds = store.checkup.rounds
        await until(lambda: store.checkup.rounds > rounds)


async def test_many_small_caches_are_checked_in_slices_too(tmp_path, monkeypatch):
    """Others have their turn between the caches, though none of them is worth a slice of its own."""
    monkeypatch.setattr(slices, "SLICE_S", 0.0)
    async with storing(tmp_path) as store:
        engine = Engine(store)
        for number in range(50):
            await engine.open(spec(salt=bytes([number])))
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        await store.checkup.round()
        counting.cancel()
        assert turns > 50
        engine.leave()


async def test_a_catalogue_that_loads_is_not_compared(tmp_path):
    """The sums are not there yet; the answer says which part was left out."""
    async with storing(tmp_path) as store:
        store.parts.loading = True
        assert (await store.checkup.round()).changed == ["disk"]
        store.parts.loading = False


async def tree_of(store: Store, **more: int) -> list[dict]:
    """Rows of the only cache's tree."""
    return (await store.admin[wire.Tree](wire.Tree("", **more))).data["nodes"]


async def test_walking_verbs_bear_what_engines_change_meanwhile(tmp_path, monkeypatch):
    """The tree answers in the midst of evictions, and it and the counts by cache are right once it is quiet."""
    monkeypatch.setattr(slices, "SLICE_S", 0.0)
    async with storing(tmp_path, host=1 * MIB, disk=4 * MIB) as store:
        engine = Engine(store)
        await engine.open(spec())
        busy = asyncio.create_task(traffic(engine, 40))
        while not busy.done():
            assert len(await tree_of(store, limit=20)) <= 20
            drop_host(store)
            await asyncio.sleep(0)
        await busy
        await quiet(store)
        (row,) = store.admin[wire.Caches](wire.Caches()).data["caches"]
        nodes = await tree_of(store, limit=10_000, depth=100)
        assert (row["nodes"], row["pages"]) == (len(nodes), sum(node["pages"] for node in nodes))
        assert row["tiers"].get("disk", 0) == sum(node["tiers"].get("disk", 0) for node in nodes)
        engine.leave()


# -- a real daemon with a large index ----------------------------------------------------------------------------------

KEYS = CacheSpec("keyed", b"f" * 16, "bf16", 4, (GroupSpec(Kind.FULL, 1, 1, 4096),), key_bytes=16)
PLAIN = CacheSpec("plain", b"f" * 16, "bf16", 4, (GroupSpec(Kind.FULL, 1, 1, 4096),))
COUNT, AT_ONCE = 30_000, 500


def fill(client: Client) -> str:
    """Store many keys, each a node of its own; the cache's id."""
    cache = client.open(KEYS)
    for first in range(0, COUNT, AT_ONCE):
        keys = b"".join(n.to_bytes(16, "little") for n in range(first, first + AT_ONCE))
        with cache.reserve_keys(0, keys) as reserved:
            assert reserved.pages == AT_ONCE
            assert reserved.commit() == AT_ONCE
    return cache.cache_id.hex()


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(wire.Check(), id="check"),
        pytest.param(wire.Tree("", width=1000), id="tree", marks=pytest.mark.slow),
        pytest.param(wire.Remove(""), id="remove", marks=pytest.mark.slow),
    ],
)
def test_engines_are_served_while_an_operator_walks_everything(tmp_path: Path, message):
    """Many matches are answered in the time of one walk; on a loop that walks in one go it would be one."""
    with Daemon(tmp_path, host="512MiB", disk="0", flags=["--caps-instance=1"]) as daemon:
        with Client(daemon.socket, instance="e", timeout_s=DEADLINE) as client:
            keyed = fill(client)
            if isinstance(message, wire.Tree | wire.Remove):
                message.cache = keyed
            cache = client.open(PLAIN)
            ends: list[float] = []
            done = threading.Event()

            def serve() -> None:
                while not done.is_set():
                    assert cache.match(bytes(16)).pages == 0
                    ends.append(time.perf_counter())

            thread = threading.Thread(target=serve)
            thread.start()
            try:
                start, end, data = walked(daemon, message)
            finally:
                done.set()
                thread.join()
            assert not data.get("broken"), data
            served = sum(start < at < end for at in ends)
            assert served >= 10, f"{served} matches in {end - start:.3f} s"
        assert daemon.stop() == 0


def walked(daemon: Daemon, message: wire.Message) -> tuple[float, float, dict]:
    """When a verb was sent and answered, and what was said."""
    with Admin(daemon.socket.with_name("admin.sock"), DEADLINE) as admin:
        start = time.perf_counter()
        data = admin.ask(message, wire.Info).data
        return start, time.perf_counter(), data
