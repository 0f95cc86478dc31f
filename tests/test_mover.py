"""The mover: what engines wait for overtakes, cancellation drains, too much is refused by name."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

import pytest

from kvtier.mover import Mover, Urgency
from kvtier.types import Code, KvtierError


@contextlib.contextmanager
def mover(threads: int = 3, waiting: int = 100) -> Iterator[Mover]:
    one = Mover(threads, waiting)
    try:
        yield one
    finally:
        one.close()


async def begun(*events: threading.Event) -> None:
    while not all(event.is_set() for event in events):
        await asyncio.sleep(0.001)


async def test_one_worker_is_kept_for_loads() -> None:
    """However many checksums run and wait, a load starts at once."""
    gate = threading.Event()
    with mover(threads=3) as moving:
        others = [asyncio.ensure_future(moving.run(gate.wait)) for _ in range(10)]
        while moving.running < 2 or moving.waiting["engine"] < 8:
            await asyncio.sleep(0.001)
        assert await moving.run(lambda: "loaded", urgency=Urgency.LOAD) == "loaded"
        assert moving.waiting == {"load": 0, "engine": 8, "background": 0}
        gate.set()
        await asyncio.gather(*others)


async def test_reads_of_a_disk_that_hangs_hold_up_no_engine() -> None:
    """However many loads and scrubs wait for it, checksums and copies of host memory go on."""
    gate = threading.Event()
    with mover(threads=3) as moving:
        kinds = [Urgency.BACKGROUND, *10 * [Urgency.LOAD], Urgency.BACKGROUND]
        others = [asyncio.ensure_future(moving.run(gate.wait, urgency=urgency)) for urgency in kinds]
        while moving.running < 2:
            await asyncio.sleep(0.001)
        for _ in range(10):
            assert await moving.run(lambda: "summed") == "summed"
        gate.set()
        await asyncio.gather(*others)


async def test_a_scrub_of_a_disk_that_hangs_holds_up_no_load() -> None:
    """With one background batch that does not end there is a worker for loads and one for engines."""
    gate = threading.Event()
    with mover(threads=3) as moving:
        stuck = asyncio.ensure_future(moving.run(gate.wait, urgency=Urgency.BACKGROUND))
        while moving.running < 1:
            await asyncio.sleep(0.001)
        sums = [asyncio.ensure_future(moving.run(gate.wait)) for _ in range(5)]
        assert await moving.run(lambda: "loaded", urgency=Urgency.LOAD) == "loaded"
        gate.set()
        await asyncio.gather(stuck, *sums)


async def test_the_urgent_overtake_and_background_runs_one_at_a_time() -> None:
    """Among what waits, loads go before engines' work and that before background."""
    gate, order = threading.Event(), []
    with mover(threads=3) as moving:
        block = [asyncio.ensure_future(moving.run(gate.wait, urgency=u)) for u in (Urgency.LOAD, *2 * [Urgency.ENGINE])]
        while moving.running < 3:
            await asyncio.sleep(0.001)
        waiting = [
            asyncio.ensure_future(moving.run(order.append, urgency, urgency=urgency))
            for urgency in (Urgency.BACKGROUND, Urgency.ENGINE, Urgency.LOAD)
        ]
        await asyncio.sleep(0.02)
        gate.set()
        await asyncio.gather(*block, *waiting)
    assert order[-1] is Urgency.BACKGROUND
    assert set(order) == set(Urgency)
    running, most, lock = 0, 0, threading.Lock()

    def count() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        threading.Event().wait(0.002)
        with lock:
            running -= 1

    with mover(threads=4) as moving:
        await asyncio.gather(*(moving.run(count, urgency=Urgency.BACKGROUND) for _ in range(10)))
    assert most == 1


async def test_too_much_is_refused_by_name() -> None:
    """Back-pressure is an error that says busy, never a queue without bound."""
    gate = threading.Event()
    with mover(threads=2, waiting=3) as moving:
        tasks = [asyncio.ensure_future(moving.run(gate.wait))]
        while not moving.running:
            await asyncio.sleep(0.001)
        tasks += [asyncio.ensure_future(moving.run(gate.wait)) for _ in range(3)]
        while moving.waiting["engine"] < 3:
            await asyncio.sleep(0.001)
        with pytest.raises(KvtierError) as caught:
            await moving.run(gate.wait)
        assert caught.value.code == Code.BUSY
        gate.set()
        await asyncio.gather(*tasks)


async def test_a_cancelled_batch_ends_before_its_caller_or_never_begins() -> None:
    """What runs is waited for; what waits is withdrawn."""
    gate, started, ended, ran = threading.Event(), threading.Event(), threading.Event(), threading.Event()

    def slow() -> None:
        started.set()
        gate.wait()
        ended.set()

    with mover(threads=2) as moving:
        first = asyncio.ensure_future(moving.run(slow))
        await begun(started)
        second = asyncio.ensure_future(moving.run(ran.set))
        await asyncio.sleep(0.01)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        first.cancel()
        await asyncio.sleep(0.01)
        assert not first.done()
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert ended.is_set()
    assert not ran.is_set()


async def test_an_exception_goes_to_whoever_asked() -> None:
    """A batch that fails harms no other."""
    with mover() as moving:
        with pytest.raises(ZeroDivisionError):
            await moving.run(lambda: 1 // 0)
        assert await moving.share(len, ["a", "bb"]) == [1, 2]


async def test_a_waiting_load_is_delayed_by_at_most_one_background_batch() -> None:
    """With as much background work as there may be, and more loads than workers, one batch at most comes between."""
    order: list[str] = []
    started = threading.Event()

    def background() -> None:
        order.append("background")
        started.set()
        threading.Event().wait(0.002)

    with mover(threads=2) as moving:
        scrubs = [asyncio.ensure_future(moving.run(background, urgency=Urgency.BACKGROUND)) for _ in range(50)]
        await begun(started)
        for _ in range(5):
            before = len(order)
            loads = [asyncio.ensure_future(moving.run(order.append, "load", urgency=Urgency.LOAD)) for _ in range(6)]
            await asyncio.gather(*loads)
            meanwhile = order[before:]
            last = max(n for n, what in enumerate(meanwhile) if what == "load")
            assert meanwhile[:last].count("background") <= 1
            await asyncio.sleep(0.003)
        await asyncio.gather(*scrubs)
