"""Hints of engines: what is kept goes last, what is dead goes first, nothing is held."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest

from engines import Engine, spec, tokens
from kvtier import wire
from kvtier.client import AsyncClient, Client
from kvtier.identity import GroupSpec
from kvtier.store import Store
from kvtier.store.ways import Ways
from kvtier.tiers.host import HostTier
from kvtier.types import Code, Kind, KvtierError

PAGES = spec((GroupSpec(Kind.FULL, 1, 1, 4096),), page_tokens=1)


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1e-3
        return self.now


@asynccontextmanager
async def full(policy: str = "lru", pages: int = 16):
    """A host of so many pages, an engine on it, and the clock."""
    clock = Clock()
    host = HostTier(pages * 4096, slab_bytes=pages * 4096, hugepages="never", prefault=False)
    store = Store(host, None, cap=1.0, ways=Ways(policy, clock))
    await store.start()
    engine = Engine(store)
    await engine.open(PAGES)
    try:
        yield engine, clock
    finally:
        assert store.parts.check() == []
        await store.drain(1.0)


async def hint(engine: Engine, keys: bytes, what: str, seconds: float = 0.0, page: int = 0) -> None:
    """One hint about a path."""
    matched = await engine.match(keys)
    await engine.call(wire.Hint(matched.handle, what, seconds, page))
    await engine.call(wire.Forget(matched.handle))


def path(number: int, pages: int = 4) -> bytes:
    """One of several prompts without anything in common."""
    return tokens(*(1000 * number + n for n in range(pages)), page_tokens=1)


async def found(engine: Engine, keys: bytes) -> int:
    """Pages of a path that are cached."""
    return (await engine.match(keys)).pages


@pytest.mark.parametrize("policy", ["lru", "heat"])
@pytest.mark.parametrize("what", ["continues", "waiting"])
async def test_what_is_kept_outlives_what_is_newer(policy, what):
    """The oldest prompt stays while others go, until its time has passed; then it is like any other."""
    async with full(policy) as (engine, clock):
        await engine.put(path(0))
        await hint(engine, path(0), what, 40.0)
        for n in range(1, 8):
            await engine.put(path(n))
        assert await found(engine, path(0)) == 4
        assert await found(engine, path(3)) == 0
        clock.now += 41.0
        for n in range(8, 14):
            await engine.put(path(n))
        assert (await engine.call(wire.Match(engine.opened.cache, 0, path(0)))).pages == 0


async def test_the_latest_hint_holds_also_where_it_is_for_a_shorter_time():
    """Said to wait for an hour, and then to go on within seconds: after these the path is like any other."""
    async with full() as (engine, clock):
        await engine.put(path(0))
        await hint(engine, path(0), "waiting", 3600.0)
        await hint(engine, path(0), "continues", 5.0)
        clock.now += 6.0
        for n in range(1, 5):
            await engine.put(path(n))
        assert [await found(engine, path(n)) for n in range(5)] == [0, 4, 4, 4, 4]


async def test_kept_pages_go_when_nothing_else_is_left():
    """A hint holds nothing: where all is kept, what runs out first goes first."""
    async with full() as (engine, _):
        for n, seconds in enumerate((50.0, 10.0, 30.0, 40.0)):
            await engine.put(path(n))
            await hint(engine, path(n), "waiting", seconds)
        await engine.put(path(9))
        assert [await found(engine, path(n)) for n in range(4)] == [4, 0, 4, 4]


async def test_a_dead_tail_goes_first_and_its_head_stays():
    """Of the newest prompt the pages from the given one on go before the oldest prompt; a use takes it back."""
    async with full() as (engine, _):
        for n in range(4):
            await engine.put(path(n))
        await hint(engine, path(3), "dead", page=1)
        await engine.put(path(9, 3))
        assert [await found(engine, path(n)) for n in (0, 1, 2, 3, 9)] == [4, 4, 4, 1, 3]
        await hint(engine, path(2), "dead")
        assert await found(engine, path(2)) == 4
        await engine.put(path(10, 2))
        assert [await found(engine, path(n)) for n in (0, 1, 2, 9)] == [2, 4, 4, 3], "it was used again"


async def test_what_others_go_on_from_is_not_given_up():
    """A dead end takes nothing along that another prompt needs."""
    async with full() as (engine, _):
        shared = path(1, 3)
        await engine.put(shared + path(2, 2))
        await engine.put(shared + path(3, 2))
        await hint(engine, shared + path(2, 2), "dead")
        await engine.put(path(5, 11))
        assert await found(engine, shared + path(3, 2)) == 5
        assert await found(engine, shared + path(2, 2)) == 3


@pytest.mark.parametrize(
    ("wrong", "field"),
    [(("sleeps", 0.0, 0), "what"), (("waiting", -1.0, 0), "seconds"), (("waiting", 1e9, 0), "seconds"),
     (("dead", 0.0, -1), "page")],
)  # fmt: skip
async def test_wrong_hints_are_refused(wrong, field):
    """By the name of the field."""
    async with full() as (engine, _):
        with pytest.raises(KvtierError) as caught:
            await hint(engine, path(0), *wrong)
        assert (caught.value.code, caught.value.field) == (Code.BAD_REQUEST, field)


async def test_clients_pass_hints_on(daemon):
    """Both clients, to a real daemon, which counts them."""
    keys = path(0)
    with Client(daemon.socket, instance="one") as client:
        route = client.open(PAGES).match(keys)
        route.hint("waiting", 40.0)
        with pytest.raises(KvtierError, match="what"):
            route.hint("sleeps")
    async with AsyncClient(daemon.socket, instance="two") as client:
        await (await (await client.open(PAGES)).match(keys)).hint("dead", page=1)
        counters = (await client.stat())["counters"]
    assert counters["hints_keep"] == 1
    assert counters["hints_dead"] == 1
