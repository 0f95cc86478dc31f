"""Events for routers: whatever changes while all is announced, and however slowly it is read, nothing is left out."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest

from engines import Engine, spec
from kvtier.events import feed
from kvtier.events.feed import Cleared, Event, Feed, Removed, Stored
from storekit import storing

CHAIN = 16


class Router:
    """Believes what it is told."""

    def __init__(self) -> None:
        self.known: set[bytes] = set()
        self.cleared = 0

    def hear(self, _: float, events: list[Event]) -> None:
        """Take a batch."""
        for event in events:
            if isinstance(event, Cleared):
                self.known.clear()
                self.cleared += 1
                continue
            pages = {event.chains[at : at + CHAIN] for at in range(0, len(event.chains), CHAIN)}
            self.known = self.known - pages if isinstance(event, Removed) else self.known | pages


def prompt(first: int, pages: int) -> bytes:
    """Page keys that no other prompt begins with."""
    return np.repeat(np.arange(first, first + pages, dtype=np.int32), spec().page_tokens).tobytes()


async def test_a_path_that_is_split_while_everything_is_announced_is_announced_whole(monkeypatch) -> None:
    """Ten paths part from ten others half-way, between two slices: their common pages are told too."""
    monkeypatch.setattr(feed, "SLICE_S", 0.0)
    router = Router()
    async with storing(None) as store:
        store.parts.feed = tells = Feed(router.hear)
        engine = Engine(store)
        await engine.open(spec())
        for n in range(10):
            await engine.put(prompt(1000 * n, 10))
        tells.announce()
        await asyncio.sleep(0)
        for n in range(10):
            await engine.put(prompt(1000 * n, 5) + prompt(90_000 + n, 1))
        await tells._announcing
        tells.flush()
        assert len(router.known) == 110
        engine.leave()


async def test_who_asks_for_everything_while_it_is_announced_gets_all_of_it_afterwards(monkeypatch) -> None:
    """A second question in the middle is answered by another announcement, from the beginning."""
    monkeypatch.setattr(feed, "SLICE_S", 0.0)
    router = Router()
    async with storing(None) as store:
        store.parts.feed = tells = Feed(router.hear)
        engine = Engine(store)
        await engine.open(spec())
        for n in range(10):
            await engine.put(prompt(1000 * n, 2))
        tells.announce()
        for _ in range(5):
            await asyncio.sleep(0)
        tells.announce()
        await tells._announcing
        tells.flush()
        assert router.cleared == 2
        assert len(router.known) == 20
        engine.leave()


def test_a_replay_to_a_slow_reader_has_no_gap(tmp_path: Path) -> None:
    """9,000 batches that nobody reads while they are replayed: all of them and the end come, in order."""
    zmq = pytest.importorskip("zmq", reason="pyzmq is not installed (kvtier[events])")
    from kvtier.events.publish import Publisher

    most = 9000
    sender = Publisher(f"ipc://{tmp_path}/p", f"ipc://{tmp_path}/r", lambda: None)
    context = zmq.Context()
    try:
        for n in range(most):
            sender.send(float(n), [Stored("DISK", b"", b"x" * CHAIN, b"k" * 64, 16)])
            while len(sender._batches) > 1000:
                time.sleep(0.001)
        while sender._next < sender._first + most:
            time.sleep(0.001)
        reader = context.socket(zmq.DEALER)
        reader.connect(f"ipc://{tmp_path}/r")
        reader.send_multipart([b"", (0).to_bytes(8, "big")])
        time.sleep(0.5)
        got = []
        while (not got or got[-1] >= 0) and reader.poll(5000):
            *_, number, _ = reader.recv_multipart()
            got.append(int.from_bytes(number, "big", signed=True))
        assert got == [*range(sender._first, sender._first + most), -1]
    finally:
        context.destroy(linger=0)
        sender.close()


def test_what_is_kept_for_replays_is_bounded_in_bytes_and_who_asks_for_more_gets_all_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of a long prompt each: the latest are replayed, and older ones make everything be announced."""
    zmq = pytest.importorskip("zmq", reason="pyzmq is not installed (kvtier[events])")
    from kvtier.events import publish

    monkeypatch.setattr(publish, "KEPT_BYTES", 1 << 20, raising=False)
    announced: list[None] = []
    sender = publish.Publisher(f"ipc://{tmp_path}/p", f"ipc://{tmp_path}/r", lambda: announced.append(None))
    context = zmq.Context()
    try:
        for n in range(20):
            sender.send(float(n), [Stored("DISK", b"", b"x" * CHAIN, bytes(4 * 100_000), 16)])
        while sender._next < sender._first + 20:
            time.sleep(0.001)
        assert sum(len(payload) for _, payload in sender._kept) <= 1 << 20
        reader = context.socket(zmq.DEALER)
        reader.connect(f"ipc://{tmp_path}/r")
        reader.send_multipart([b"", (0).to_bytes(8, "big")])
        got = []
        while (not got or got[-1] >= 0) and reader.poll(5000):
            *_, number, _ = reader.recv_multipart()
            got.append(int.from_bytes(number, "big", signed=True))
        assert got == [*range(got[0], sender._first + 20), -1]
        assert got[0] > sender._first
        assert announced
    finally:
        context.destroy(linger=0)
        sender.close()
