"""What every peer tier must do when what it talks to dies, hangs or comes back: one suite over real processes."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from engines import Engine, idle, tokens
from kvtier.peer.base import Place, Source
from peerkit import REMOTES, SPEC, blank, direct_remote, fetched, given, given_soon, right
from storekit import storing, until

DEADLINE_S = 0.5
PATH = tokens(*range(1, 10))
CROWD = 64


async def nothing_wrong(source: Source) -> list[Place]:
    """Fetch: what was on its way before may come, the rest is a miss; then let it go. The places that got nothing."""
    places = blank(range(9))
    sums = await source.fetch(places)
    source.close()
    assert all(right(place, PATH) for place, value in zip(places, sums, strict=True) if value is not None)
    return [place for place, value in zip(places, sums, strict=True) if value is None]


@pytest.mark.slow
@REMOTES
async def test_a_killed_server_is_a_miss_and_serves_again_soon_after_it_is_back(tmp_path: Path, remote) -> None:
    """Kill -9: sources give nothing, nobody is asked; back and empty it takes and gives pages within seconds."""
    async with remote(tmp_path, DEADLINE_S) as far:
        assert await given(far.tier, far.shared, PATH) == 9
        assert await fetched(far.tier, far.shared, PATH) == 9
        (source,) = await far.tier.find(far.shared, PATH, 0)
        far.server.kill()
        await nothing_wrong(source)
        await until(lambda: not far.tier.answers())
        assert not far.tier.worth(far.shared, PATH, 0)
        assert await far.tier.find(far.shared, PATH, 0) == []
        far.server.start()
        await until(far.tier.answers)
        assert await fetched(far.tier, far.shared, PATH) == 0, "it was started empty"
        await given_soon(far.tier, far.shared, PATH)
        await until(lambda: far.tier.worth(far.shared, PATH, 0))
        assert await fetched(far.tier, far.shared, PATH) == 9


@REMOTES
async def test_a_stopped_server_is_one_deadline_and_then_nothing(tmp_path: Path, remote) -> None:
    """SIGSTOP: what was asked ends while the server still hangs; after that nobody is asked until it goes on."""
    async with remote(tmp_path, DEADLINE_S) as far:
        assert await given(far.tier, far.shared, PATH) == 9
        (source,) = await far.tier.find(far.shared, PATH, 0)
        far.server.signal(signal.SIGSTOP)
        places = await nothing_wrong(source)
        before = [place.views[0].copy() for place in places]
        await until(lambda: not far.tier.answers())
        assert await far.tier.find(far.shared, PATH, 0) == []
        assert far.tier.counts["peer_down"] == 1
        far.server.signal(signal.SIGCONT)
        await until(far.tier.answers)
        after = [place.views[0] for place in places]
        assert all(map(np.array_equal, before, after)), "nobody writes there any more"
        assert await fetched(far.tier, far.shared, PATH) == 9


@pytest.mark.slow
@REMOTES
async def test_a_crowd_before_a_stopped_server_is_bounded_and_all_of_it_gets_an_answer(tmp_path: Path, remote) -> None:
    """Many questions at once while it hangs: each is a miss, few are under way, and later ones find all the room."""
    async with remote(tmp_path, DEADLINE_S) as far:
        paths = [tokens(1000 + n, 7) for n in range(CROWD)]
        for path in paths[:4]:
            assert await given(far.tier, far.shared, path) == 2
        far.server.signal(signal.SIGSTOP)
        found = await asyncio.gather(*(far.tier.find(far.shared, path, 0) for path in paths))
        assert found == [[]] * CROWD
        far.server.signal(signal.SIGCONT)
        want, again = [2] * 4 + [0] * (CROWD - 4), list[int]()
        for _ in range(20):  # on a busy machine a crowd may be late by itself
            await until(far.tier.answers)
            again = await asyncio.gather(*(fetched(far.tier, far.shared, path) for path in paths))
            if again == want:
                break
        assert again == want


@pytest.mark.slow
@REMOTES
async def test_an_engine_gets_its_miss_and_no_slot_stays_taken_when_a_server_hangs(tmp_path: Path, remote) -> None:
    """A store whose peers hang serves what is here, holds nothing for what did not come, and gets it later."""
    async with remote(tmp_path, DEADLINE_S) as far, storing(None) as near:
        await given(far.tier, far.shared, PATH)
        near.join_fleet(far.tier)
        engine = Engine(near)
        await engine.open(SPEC)
        far.server.signal(signal.SIGSTOP)
        assert await engine.get(PATH, wait_ms=60_000) == 0
        await until(lambda: not near.parts.peers.busy)
        assert idle(near) == [f"instances left: {list(near.parts.instances)}"]
        far.server.signal(signal.SIGCONT)
        await until(far.tier.answers)
        assert await engine.get(PATH) == 9
        engine.leave()
        await until(lambda: not near.parts.peers.busy)
        assert idle(near) == []
        near.parts.peers = None  # the tier is closed by whoever made it


async def test_a_host_that_stood_still_blames_nobody_for_answers_that_it_did_not_see(tmp_path: Path) -> None:
    """Its loop stops for two deadlines while a peer answers a question and a ping: the peer stays up."""
    async with direct_remote(tmp_path, DEADLINE_S) as far:
        assert await given(far.tier, far.shared, PATH) == 9
        node = far.tier._nodes["far"]
        await fetched(far.tier, far.shared, PATH)
        node._watch.cancel()  # the test pings itself
        for ask in (lambda: far.tier.depth("far", far.shared, PATH), node._ping):
            far.server.signal(signal.SIGSTOP)
            task = asyncio.create_task(ask())
            for _ in range(9):
                await asyncio.sleep(0)
            far.server.signal(signal.SIGCONT)
            time.sleep(2 * DEADLINE_S)
            assert not await task
            assert far.tier.answers()
        assert (far.tier.counts["peer_late"], far.tier.counts["peer_down"]) == (1, 0)
        assert await fetched(far.tier, far.shared, PATH) == 9
