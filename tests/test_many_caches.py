"""How many caches there may be, and which make way."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines import Engine, idle, spec, tokens
from kvtier import wire
from kvtier.identity import CacheSpec, GroupSpec
from kvtier.store import Store, parts
from kvtier.types import Code, Kind, KvtierError
from storekit import quiet, storing, until

PAGE = GroupSpec(Kind.FULL, 1, 1, 4096)


async def test_tenants_who_never_come_back_make_way_for_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the most caches that there may be the longest unused that nobody has open is emptied, on disk too."""
    monkeypatch.setattr(parts, "MAX_CACHES", 8)
    monkeypatch.setattr(parts, "MOST_FORGOTTEN", 2)

    def tenant(number: int) -> CacheSpec:
        return spec((PAGE,), salt=bytes([number]), key_bytes=16 * (number % 2))

    async def visit(store: Store, number: int) -> int:
        """An engine comes for a moment: how many pages of its own it found; it stores what lacks."""
        engine = Engine(store, f"e{number}", pid=number + 1)
        cache = (await engine.open(tenant(number))).cache
        if number % 2:
            names = bytes([number]) * 16
            found = (await engine.call(wire.Exists(cache, 0, names))).states.count(b"\0") == 0
            reserved = await engine.call(wire.ReserveKeys(cache, 0, names))
            if reserved.reservation and not found:
                engine.write(names, reserved)
                await engine.call(wire.Commit(reserved.reservation, 0, 1))
        else:
            found = await engine.get(tokens(number))
            await engine.put(tokens(number))
        await quiet(store)
        engine.leave()
        return int(found)

    async with storing(tmp_path) as store:
        kept = Engine(store, "kept", pid=99)
        await kept.open(tenant(100))
        assert await kept.put(tokens(1, 2)) == 2
        for number in range(30):
            assert await visit(store, number) == 0
            assert await visit(store, 0) == 1  # one that comes back stays
            assert len(store.parts.caches) <= 8
        assert await kept.get(tokens(1, 2)) == 2
        assert await visit(store, 29) == 1
        assert await visit(store, 3) == 0
        assert await visit(store, 3) == 1
        kept.leave()
        await quiet(store)
        assert idle(store) == []
    async with storing(tmp_path) as store:
        assert len(store.parts.caches) <= 8
        assert await visit(store, 3) == 1
        assert await visit(store, 50) == 0
        assert len(store.parts.caches) <= 8
        assert idle(store) == []


async def test_a_large_cache_that_is_the_longest_unused_makes_way_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is emptied in slices beside all else; another that was used since stays."""
    monkeypatch.setattr(parts, "MAX_CACHES", 4)
    monkeypatch.setattr(parts, "MOST_NODES", 8)
    async with storing(tmp_path) as store:

        async def visit(number: int, prompts: int) -> bytes:
            engine = Engine(store, f"e{number}", pid=number + 1)
            opened = await engine.open(spec((PAGE,), salt=bytes([number])))
            for n in range(prompts):
                assert await engine.put(tokens(n)) == 1
            await quiet(store)
            engine.leave()
            return opened.cache_id

        large = [await visit(number, 12) for number in range(2)]
        for number in range(2, 6):
            await visit(number, 1)
        await until(lambda: large[0] not in store.parts.ids)
        assert large[1] in store.parts.ids
        await visit(1, 12)
        for number in range(6, 9):
            await visit(number, 1)
        assert large[1] in store.parts.ids
        assert len(store.parts.caches) <= 4
        assert idle(store) == []


async def test_where_all_caches_are_open_one_more_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of them is taken."""
    monkeypatch.setattr(parts, "MAX_CACHES", 3)
    async with storing(None) as store:
        engine = Engine(store)
        for number in range(3):
            await engine.open(spec((PAGE,), salt=bytes([number])))
            assert await engine.put(tokens(1)) == 1
        with pytest.raises(KvtierError) as caught:
            await engine.open(spec((PAGE,), salt=b"more"))
        assert caught.value.code is Code.OVER_CAP
        assert await engine.get(tokens(1)) == 1
