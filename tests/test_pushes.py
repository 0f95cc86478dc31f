"""What is computed here reaches its homes, also where they hiccup, are full or were started again meanwhile."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

import pytest

from engineproc import SPEC, content, path_keys
from engines import Engine, spec, tokens
from fleetkit import Fleet, free_ports, until, write_secrets
from kvtier import wire
from kvtier.client import Client
from kvtier.peer import node
from kvtier.peer.direct import Direct
from kvtier.peer.fame import Fame
from kvtier.peer.secrets import read
from kvtier.peer.terms import Terms
from kvtier.server.home import Home
from kvtier.store import pushes, repairs
from storekit import storing
from storekit import until as soon


def test_what_was_committed_while_the_first_half_waits_for_its_home_gets_there_too(tmp_path: Path) -> None:
    """A home hangs between two commits of a reservation; once it goes on it gets the pages of both."""
    pages = list(range(1, 11))
    keys, stride = path_keys(pages), SPEC.stride
    with Fleet(tmp_path, 2, replicas=2) as hosts:
        a, b = hosts["a"], hosts["b"]
        with a.engine().open(SPEC).match(keys).reserve(0, 10, wait_ms=2000) as reserved:
            for page in range(10):
                reserved.write(0, page, content(keys[: (page + 1) * stride]).reshape(-1))
            b.signal(signal.SIGSTOP)
            reserved.commit(0, 5)
            until(lambda: "b" not in a.up())
            reserved.commit(5, 5)
            time.sleep(0.1)
            b.signal(signal.SIGCONT)
        until(a.settled)
        until(lambda: a.seen(pages).get("b") == 10)


def test_a_home_that_hiccups_while_it_gets_its_share_back_gets_all_of_it(tmp_path: Path) -> None:
    """It was started again, empty, and hangs for a moment as it is given its paths: none is left out."""
    paths = [[1000 + n, 1] for n in range(60)]
    with Fleet(tmp_path, 2, replicas=2) as hosts:
        a, b = hosts["a"], hosts["b"]
        for path in paths:
            a.put(path)
        until(a.settled, 60.0)
        b.daemon.kill()
        until(lambda: not a.up())
        b.start()
        until(lambda: a.up() == {"b"})
        b.signal(signal.SIGSTOP)  # within a second its paths are walked
        until(lambda: not a.up())
        b.signal(signal.SIGCONT)
        until(lambda: all(a.seen(path).get("b") == 2 for path in paths), 60.0)


def test_a_home_that_has_no_room_for_the_moment_gets_it_later(tmp_path: Path) -> None:
    """Engines hold all of its slots: it says so, is offered the path again, and takes it once they let go."""
    pages = list(range(1, 11))
    with Fleet(tmp_path, 2, replicas=2) as hosts:
        a, b = hosts["a"], hosts["b"]
        holders = [Client(b.daemon.socket, instance=f"full-{n}", timeout_s=10.0) for n in range(3)]
        for n, client in enumerate(holders, 1):
            path = client.open(SPEC).match(path_keys(list(range(10_000 * n, 10_000 * n + 600))))
            path.reserve(0, 600, wait_ms=500)
        assert a.put(pages) == 10
        until(lambda: a.count("peer_refused") > 0)
        for client in holders:
            client.close()
        until(lambda: a.seen(pages).get("b") == 10)


async def test_each_key_is_tried_as_often_as_any_other_whoever_it_goes_along_with(tmp_path: Path) -> None:
    """A key at its last try and a new one go to a home together that does not answer: the new one is tried again."""
    secrets = read(write_secrets(tmp_path / "secrets", ["uid:0"]))
    nodes = {name: ("127.0.0.1", port) for name, port in zip(("near", "far"), free_ports(2), strict=True)}
    async with storing(None) as near:
        near.join_fleet(Direct(nodes, Terms("near", secrets)))
        queue = near.parts.peers.pushes
        engine = Engine(near)
        await engine.open(spec(key_bytes=16))
        reply = await engine.call(wire.ReserveKeys(engine.opened.cache, 0, bytes(16) + b"1" * 16))
        await engine.call(wire.Commit(reply.reservation, 0, 2))
        old, new = queue._queue
        queue._queue[old] = pushes.Due(1, pushes.TRIES - 1, 1)
        queue.start()
        await soon(lambda: near.parts.counts["peer_push_dropped_home"])
        await asyncio.sleep(0)
        assert list(queue._later) == [new]
        assert near.parts.counts["peer_push_dropped_home"] == 1
        engine.leave()


def test_a_push_of_less_than_a_page_sends_nothing(tmp_path: Path) -> None:
    """Every path begins like the empty one: asking for that to be pushed does not send the whole cache there."""
    paths = [[2000 + n, 1] for n in range(20)]
    with Fleet(tmp_path, 3, replicas=1) as hosts:
        a = hosts["a"]
        a.engine().open(SPEC).match(b"").push("b")
        for path in paths:
            a.put(path)
        until(a.settled)
        assert sum(a.seen(path).get("b", 0) for path in paths) < 2 * len(paths)


@pytest.mark.parametrize("keyed", [False, True])
async def test_what_was_given_up_while_a_home_was_down_gets_there_once_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, keyed: bool
) -> None:
    """It is down for longer than a push is tried and not for long enough to be replaced: then nothing is owed to it."""
    monkeypatch.setattr(pushes, "RETRY_S", 0.01)
    monkeypatch.setattr(repairs, "LOOK_S", 0.05)
    monkeypatch.setattr(node, "PING_S", 0.05)
    secrets = read(write_secrets(tmp_path / "secrets", ["uid:0"]))
    nodes = {name: ("127.0.0.1", port) for name, port in zip(("near", "far"), free_ports(2), strict=True)}
    cache, keys = spec(key_bytes=16 if keyed else 0), tokens(*range(1, 21))
    async with storing(None) as near, storing(None) as far:
        near.join_fleet(Direct(nodes, Terms("near", secrets)))
        near.parts.peers.start()
        engine, there = Engine(near), Engine(far)
        for each in (engine, there):
            await each.open(cache)
        if keyed:
            await engine.put_keys(keys)
        else:
            assert await engine.put(keys) == 20
        await soon(lambda: near.parts.counts["peer_push_dropped_home"])
        await soon(lambda: not near.parts.peers.busy)
        home = Home(far, Terms("far", secrets), nodes["far"], Fame())
        home.start()
        try:
            index = far.parts.caches[there.opened.cache].index
            await soon(lambda: index.pages == len(keys) // cache.stride)
            await soon(lambda: not (near.parts.peers.busy or near.parts.peers.repairs.walking))
            assert near.parts.peers.tier.moves() is None
        finally:
            await near.parts.peers.close()
            near.parts.peers = None
            await home.close()
        engine.leave()
        there.leave()
