"""Who finds no room because engines hold it waits until they let go, and no longer than it said."""

from __future__ import annotations

import asyncio
from pathlib import Path

from engines import Engine, idle, spec, tokens
from kvtier import wire
from kvtier.identity import GroupSpec
from kvtier.policy.quota import parse
from kvtier.store import Store
from kvtier.types import Code, Kind, Tier
from storekit import MIB, drop_host, quiet, storing

PAGE = spec((GroupSpec(Kind.FULL, 1, 1, 16 << 10),))
KEYED = spec((GroupSpec(Kind.FULL, 1, 1, 16 << 10),), model="keyed", key_bytes=16)
HALF = 32
"""Pages that are half of a host of 1 MiB, all that one engine may hold."""
LONG_MS = 600_000
"""So long nobody waits in vain."""


def prompt(n: int, pages: int = HALF) -> bytes:
    """One of many prompts."""
    return tokens(*range(100 * n, 100 * n + pages))


async def engines(store: Store, count: int) -> list[Engine]:
    """Some engines of one cache, whose prompts of their own numbers are on disk alone."""
    out = [Engine(store, f"e{n}", pid=n + 1) for n in range(count)]
    for n, engine in enumerate(out):
        await engine.open(PAGE)
        assert await engine.put(prompt(n), wait_ms=LONG_MS) == HALF
        await quiet(store)
    drop_host(store)
    return out


async def lease(engine: Engine, keys: bytes, wait_ms: int = LONG_MS) -> wire.Acquired:
    """Acquire and hold."""
    return await engine.call(wire.Acquire((await engine.match(keys)).handle, wait_ms=wait_ms))


async def begun(*tasks: asyncio.Task[object]) -> None:
    """Let these go as far as they do by themselves; they are not done."""
    for _ in range(50):
        await asyncio.sleep(0.002)
    assert not any(task.done() for task in tasks)


async def left(store: Store, out: list[Engine]) -> None:
    """All is let go of."""
    for engine in out:
        engine.leave()
    await quiet(store)
    assert idle(store) == []


async def test_a_read_waits_for_room_that_others_hold(tmp_path: Path) -> None:
    """It is served whole as soon as one of them lets go, and is no miss before."""
    async with storing(tmp_path, host=MIB) as store:
        one, two, three = out = await engines(store, 3)
        held = [await lease(one, prompt(0)), await lease(two, prompt(1))]
        assert [each.pages for each in held] == [HALF, HALF]
        reading = asyncio.ensure_future(three.get(prompt(2), wait_ms=LONG_MS))
        await begun(reading)
        await one.call(wire.Release(held[0].lease))
        assert await reading == HALF
        await left(store, out)


async def test_a_read_is_answered_with_what_there_is_when_its_time_is_up(tmp_path: Path) -> None:
    """Nothing of what it waited for stays held."""
    async with storing(tmp_path, host=MIB) as store:
        one, two, three = out = await engines(store, 3)
        await lease(one, prompt(0, 30))
        await lease(two, prompt(1, 30))
        assert 0 < await three.get(prompt(2), wait_ms=50) < HALF
        assert three.process.instance.held_bytes == 0
        await left(store, out)


async def test_many_who_read_at_once_what_does_not_fit_together_are_all_served_whole(tmp_path: Path) -> None:
    """None of them keeps a part that another waits for."""
    async with storing(tmp_path, host=MIB) as store:
        out = await engines(store, 6)
        for _ in range(3):
            served = await asyncio.gather(*(engine.get(prompt(n), wait_ms=LONG_MS) for n, engine in enumerate(out)))
            assert served == [HALF] * 6
        await left(store, out)


async def test_a_reservation_waits_for_room_that_others_hold(tmp_path: Path) -> None:
    """Of a token cache and of a keyed one; refused only when the time is up."""
    async with storing(tmp_path, host=MIB) as store:
        one, two, three = out = await engines(store, 3)
        keyed = Engine(store, "keyed", pid=9)
        await keyed.open(KEYED)
        held = [await lease(one, prompt(0)), await lease(two, prompt(1))]
        assert (await three.reserve(prompt(7), wait_ms=20)).refused == Code.NO_SPACE
        names = b"".join(n.to_bytes(16, "little") for n in range(HALF))
        waiting = [
            asyncio.ensure_future(three.reserve(prompt(8), wait_ms=LONG_MS)),
            asyncio.ensure_future(keyed.call(wire.ReserveKeys(keyed.opened.cache, 0, names, LONG_MS))),
        ]
        await begun(*waiting)
        for engine, each in zip((one, two), held, strict=True):
            await engine.call(wire.Release(each.lease))
        assert [reply.pages for reply in await asyncio.gather(*waiting)] == [HALF, HALF]
        await left(store, [*out, keyed])


async def test_opaque_keys_are_waited_for_too(tmp_path: Path) -> None:
    """Keys that are on disk are no misses while others hold host."""
    async with storing(tmp_path, host=MIB) as store:
        one, two = out = await engines(store, 2)
        keyed = Engine(store, "keyed", pid=9)
        await keyed.open(KEYED)
        names = b"".join(n.to_bytes(16, "little") for n in range(HALF))
        reserved = await keyed.call(wire.ReserveKeys(keyed.opened.cache, 0, names, LONG_MS))
        keyed.write(names, reserved)
        await keyed.call(wire.Commit(reserved.reservation, 0, HALF))
        await quiet(store)
        drop_host(store)
        held = [await lease(one, prompt(0)), await lease(two, prompt(1))]
        reading = asyncio.ensure_future(keyed.call(wire.AcquireKeys(keyed.opened.cache, 0, names, LONG_MS)))
        await begun(reading)
        await two.call(wire.Release(held[1].lease))
        (items,) = (await reading).items
        keyed.verify(names, items)
        assert items.offsets.count(b"\xff" * 8) == 0
        await left(store, [*out, keyed])


async def test_nobody_waits_for_what_nobody_lets_go_of(tmp_path: Path) -> None:
    """What is more than a quota is answered at once with what there is, beside others who hold something."""
    async with storing(tmp_path, host=MIB) as store:
        one, two, three = out = await engines(store, 3)
        other = Engine(store, "other", scope="other", pid=9)
        await other.open(PAGE)
        assert (await other.reserve(prompt(5, 20))).pages == 20
        store.limit(parse(f"scope={one.process.instance.scope} host={20 * (16 << 10)}", int))
        async with asyncio.timeout(60):
            assert 0 < (await two.reserve(prompt(9), wait_ms=LONG_MS)).pages < HALF
            assert await three.get(prompt(2), wait_ms=LONG_MS) < HALF
        await left(store, [*out, other])


async def test_who_waits_is_let_go_of_when_its_engine_ends(tmp_path: Path) -> None:
    """Others have their turn at once."""
    async with storing(tmp_path, host=MIB) as store:
        one, two, three, four = await engines(store, 4)
        held = [await lease(one, prompt(0)), await lease(two, prompt(1))]
        gone = asyncio.ensure_future(three.call(wire.Acquire((await three.match(prompt(2))).handle, wait_ms=LONG_MS)))
        await begun(gone)
        reading = asyncio.ensure_future(four.get(prompt(3), wait_ms=LONG_MS))
        await begun(reading)
        three.leave(clean=False)
        await one.call(wire.Release(held[0].lease))
        assert await reading == HALF
        await gone
        assert Tier.HOST in {segment.tier for segment in (await four.match(prompt(3))).segments}
        await left(store, [one, two, four])


async def test_engines_that_wait_for_each_other_are_answered_long_before_their_time_is_up(tmp_path: Path) -> None:
    """Each holds half of host and asks for more before it lets go of any: one is refused, and goes on."""
    async with storing(tmp_path, host=MIB) as store:
        one, two = out = await engines(store, 2)
        held = [await lease(one, prompt(0)), await lease(two, prompt(1))]
        for engine in (one, two):
            engine.process.instance.cap_bytes = MIB

        async def more(engine: Engine, mine: wire.Acquired, number: int) -> int:
            pages = (await engine.reserve(prompt(number), wait_ms=LONG_MS)).pages
            await engine.call(wire.Release(mine.lease))
            return pages

        async with asyncio.timeout(60):
            pages = await asyncio.gather(more(one, held[0], 8), more(two, held[1], 9))
        assert sorted(pages) in ([0, HALF], [0, 0])
        await left(store, out)
